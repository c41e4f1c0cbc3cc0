"""Restore sessions."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from ckptapi.bodies.checkpoints import CheckpointBody

RESTORES = "/v1/restores"
MAX_WORLD_SIZE = 1 << 20
MAX_WAIT_S = 60.0
MAX_SILENCE_S = 24 * 3600.0
SILENCE_S = 300.0


class RestoreState(StrEnum):
    """The state of a restore session. All but the first are final."""

    RESTORING = "restoring"
    RESTORED = "restored"
    """All ranks are restored."""
    FAILED = "failed"
    """One rank reported a failure."""
    EXPIRED = "expired"
    """A rank was silent for too long, or never joined."""
    CANCELLED = "cancelled"

    @property
    def live(self) -> bool:
        """Not ended."""
        return self is RestoreState.RESTORING


class Phase(StrEnum):
    """The phases of a rank's restore."""

    JOINED = "joined"
    PLANNING = "planning"
    FETCHING = "fetching"
    PLACING = "placing"
    RESTORED = "restored"
    FAILED = "failed"


WorldSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORLD_SIZE)]
Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]


class RestoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One rank joins the restore of its job. The first request of a run and key resolves the checkpoint for all."""

    run: str
    key: str
    world_size: WorldSize
    rank: Rank
    checkpoint: str | None = None
    """An id; None for the newest usable one."""
    ttl_s: Annotated[float, msgspec.Meta(ge=1, le=MAX_SILENCE_S)] = SILENCE_S
    """A rank that is silent for this time ends the session. The first request sets it."""
    host: Annotated[str, msgspec.Meta(max_length=255)] = ""
    """The host of the rank, for display."""


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """The progress report of a rank."""

    phase: Phase
    done_bytes: Bytes = 0
    total_bytes: Bytes = 0
    """0 until it is known."""
    problem: str = ""


class RestoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a report: the status of the whole session."""

    id: str
    state: RestoreState
    world_size: int
    num_joined: int
    num_restored: int
    problem: str = ""


class RankBody(msgspec.Struct, frozen=True):
    """The last report of one rank."""

    rank: int
    phase: Phase
    done_bytes: int
    total_bytes: int
    updated_at: float
    problem: str = ""


class RestoreBody(msgspec.Struct, frozen=True, kw_only=True):
    """One restore session as JSON."""

    id: str
    run: str
    key: str
    checkpoint: CheckpointBody
    world_size: int
    ttl_s: float
    state: RestoreState
    created_at: float
    expires_at: float | None
    """When it expires without further reports; None after it ended."""
    ended_at: float | None
    num_joined: int
    num_restored: int
    done_bytes: int
    total_bytes: int
    """Sum over the ranks that know their total."""
    problem: str
    """Why it failed or expired, with the ranks that caused it."""
    host: str = ""
    """The host of rank 0, or of the rank that joined first until rank 0 does. Empty if it is not known."""
    progress: float | None = None
    """From 0 to 1, the mean over all ranks. This and the next two are set only if ranks were read: not for a join."""
    stragglers: list[int] = []
    """Ranks that are behind the others, a hundred at most."""
    slowest: RankBody | None = None
    """The slowest rank that joined and is not restored."""
    ranks: list[RankBody] | None = None
    """The ranks that joined; None in listings and if they were not requested."""


class RestoresBody(msgspec.Struct, frozen=True):
    """Restore sessions, newest first."""

    items: list[RestoreBody]

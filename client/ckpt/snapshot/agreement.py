"""The agreement of the ranks before the first save: who writes what, and where it lies in this rank's slots."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckpt.capture.collector import Collector
from ckpt.capture.leaves import Captured
from ckpt.capture.ownership import Ownership, Unit, Units
from ckpt.capture.ownership import agree as assign
from ckpt.capture.train_state import TrainState
from ckpt.capture.values import capture_values, check_others
from ckpt.lazily import torch_loaded
from ckpt.ranks.world import World, together
from ckpt.snapshot.stage import SnapshotLayout
from ckptstore.clock import system_clock
from ckptstore.errors import InvalidRequest, LayoutChanged, RankLost
from ckptstore.format.decoding import decode_msgpack
from ckptstore.names import new_ulid
from ckptstore.reading.source import StoreSource

if TYPE_CHECKING:
    from ckpt.capture.state import Capturer

logger = logging.getLogger(__name__)


class Agreement(NamedTuple):
    """The agreement of all ranks of a job; equal on each, except for the view in `ownership`."""

    session: str
    """A ULID, from which the attempts of all saves are derived."""
    ownership: Ownership


@dataclass
class LayoutAgreement:
    """The agreement of all ranks on one run's saves, and captures that keep to it. Used by the training thread."""

    _world: Callable[[], World]
    _split_replicas: bool
    _folder: StoreSource | None
    """The store that this rank saves to, if it may be another one on another host."""
    _is_tier: bool

    def __post_init__(self) -> None:
        self._agreement: Agreement | None = None
        self._capturer: Capturer | None = None
        self._placed: object | None = None  # the sameness of captures that have this layout
        self._seen: list[object] = []
        self._warned = False
        self.publishes = False
        """Whether only the model's weights are saved, for readers: rounded, and stored as deltas."""
        self.layout = SnapshotLayout.of([])
        """Where the leaves of the last capture lie."""

    @property
    def session(self) -> str | None:
        """The session of all ranks; None before they have agreed."""
        return None if self._agreement is None else self._agreement.session

    def agree(
        self, state: TrainState, check: Callable[[], None] = lambda: None, world: World | None = None
    ) -> Agreement:
        """Agree on the owners of this state, again if the ranks had agreed. A collective of all ranks.

        Raises the first error of any rank's `check` or description, UnsupportedObject or RankLost, on every rank;
        InvalidRequest if the ranks save to different folders.
        """
        world = world or self._world()
        if self._folder is not None:
            _check_shared(world, self._folder, self._is_tier)
        agreement = self._meet(state, check, world)
        if self._agreement is not None:  # of another layout; the session goes on
            agreement = agreement._replace(session=self._agreement.session)
        self._agreement = agreement
        return agreement

    def capture(self, state: TrainState, grads: bool, attempt: str) -> Captured:
        """The part of the state that this rank saves, and its `layout`.

        Where that has changed, the ranks agree again, in a meeting named after the attempt: all of them see the change
        in the same save. Raises UnsupportedObject, or LayoutChanged if a rank does not come.
        """
        try:
            return self._capture(state, grads)
        except LayoutChanged as error:
            started, world = time.monotonic(), self._world().apart(attempt)
            try:
                self.agree(state, world=world)
            except RankLost as lost:
                raise LayoutChanged(f"{error.message}; {lost.message}", error.hint) from lost
            if world.size > 1 and world.rank == 0 and not self._warned:
                self._warned = True
                logger.warning(
                    "the layout of the state has changed: in such a save all ranks wait for each other, now for %.1f s",
                    time.monotonic() - started,
                )
            return self._capture(state, grads)

    def _capture(self, state: TrainState, grads: bool) -> Captured:
        assert self._agreement is not None
        ownership = self._agreement.ownership
        captured = self._captured(state, ownership, grads)
        if captured.sameness is not None and captured.sameness is self._placed:
            return captured
        if captured.leaves.slices != self.layout.slices or captured.seen != self._seen:
            # Optimizer state appears with the first step; anything else is for all ranks to agree on.
            ownership.check(_describe(state, sampled=False))
            self.layout, self._seen = SnapshotLayout.of(captured.leaves.slices), captured.seen
        self._placed = captured.sameness
        return captured

    def estimate(self, state: TrainState) -> tuple[Captured, int]:
        """A capture of the state for the agreement, and the bytes of its snapshots.

        Without an agreement the ranks meet for it, as a collective, and agree on nothing: saves may be given other
        objects. Raises RankLost; other meetings are still in step then.
        """
        if self._agreement is None:
            ownership = self._meet(state, lambda: None, self._world().apart()).ownership
            captured = self._captured(state, ownership, grads=False)
        else:
            ownership, captured = self._agreement.ownership, self._capture(state, grads=False)
        num_bytes = sum(piece.bytes for piece in captured.leaves.slices)
        if state.optimizers:
            from ckpt.capture.describe import bytes_to_come

            num_bytes += bytes_to_come(state, ownership)
        return captured, num_bytes

    def _captured(self, state: TrainState, ownership: Ownership, grads: bool) -> Captured:
        if not torch_loaded():  # then there are no tensors
            return capture_values(Collector(ownership), state)
        if self._capturer is None:
            from ckpt.capture.state import Capturer

            self._capturer = Capturer()
        captured = self._capturer.capture(state, ownership, grads)
        if self.publishes:
            from ckpt.capture.state import weights_alone

            return weights_alone(captured, state)
        return captured

    def _meet(self, state: TrainState, check: Callable[[], None], world: World) -> Agreement:
        """Exchange the units that every rank holds, and agree on their owners. A collective of all ranks.

        Each distinct list of units is sent once, even if several ranks hold it. Raises the error of `check` or of a
        description, on every rank; UnsupportedObject; RankLost.
        """
        units: dict[str, Unit] = {}

        def describe_own() -> str:
            check()
            check_others(state)
            units.update(_describe(state, world.size > 1, None if world.whole else frozenset(world.members)))
            return new_ulid(system_clock())

        session, *_ = together(world, describe_own)
        packed = msgspec.msgpack.encode({name: msgspec.structs.replace(u, boxes=()) for name, u in units.items()})
        held: list[Units] = [units] * world.size
        for data, ranks in world.gather_alike(packed).items():
            theirs = decode_msgpack(data, dict[str, Unit])
            for rank in ranks:
                if rank != world.rank:
                    held[rank] = theirs
        members = None if world.whole else world.members
        return Agreement(session, assign(world.rank, held, self._split_replicas, members))


def _check_shared(world: World, folder: StoreSource, is_tier: bool) -> None:
    """Raises InvalidRequest on every rank unless all see the same objects, or the error of a rank.

    A store that is no tier gets its id only where there are several hosts.
    """
    hosts = world.gather(socket.gethostname())
    if len(set(hosts)) == 1 and not is_tier:
        return
    ids = together(world, folder.id)
    for rank, id in enumerate(ids):
        if id != ids[0]:
            raise InvalidRequest(
                f"rank {rank} on {hosts[rank]} saves to another folder than rank 0 on {hosts[0]}, here to {folder.url}",
                "A checkpoint is committed where all of its shards are: for local=, set replicas=, the number of other "
                "hosts that get each shard; else use a folder that all hosts share, or a store such as s3://",
            )


def _describe(state: TrainState, sampled: bool, members: frozenset[int] | None = None) -> dict[str, Unit]:
    """The units of modules and optimizers that this rank holds; see `describe`."""
    if not (state.modules or state.optimizers):
        return {}
    from ckpt.capture.describe import describe

    return describe(state, sampled, members)

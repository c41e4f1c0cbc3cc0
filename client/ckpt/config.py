"""Every knob of a Checkpointer, validated once; environment variables fill what is not given."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpt.saver.budget import Budget
from ckpt.saver.messages import Setup
from ckpt.saver.streaming import LEAST_BYTES
from ckptstore.errors import InvalidRequest
from ckptstore.names import check_run

_WORDS = {
    "writer": ("process", "thread"),
    "compress": ("auto", "off", "fast", "max"),
    "on_busy": ("wait", "skip", "supersede"),
    "share": ("auto", "broadcast", "daemon", "none"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How one run is saved and restored."""

    store: str | None
    """Where checkpoints are: a path, file://, s3://, memory:// or any other fsspec URL. CKPT_STORE."""
    run: str
    """The training lineage. CKPT_RUN."""
    daemon: str | None
    """URL of ckptd: told of commits; read from where no store is given. CKPTD_URL."""
    token: str | None = field(default=None, repr=False)
    """Bearer token for the daemon. CKPT_TOKEN."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Storage options of the fsspec file system."""
    writer: Literal["process", "thread"] = "process"
    """Whether a saver process or threads of the trainer encode and upload."""
    slots: int = 2
    """Snapshots in host memory at most, each one state size."""
    staging_bytes: int | None = None
    """Host memory of a save at most: of its slot, of what is encoded and of what is on its way to the store. A snapshot
    that is larger than this leaves passes through one slot, and most of it is uploaded before the saver has all of it:
    save_async waits for that, or with overlap the next `optim.step()`. None: no limit."""
    compress: Literal["auto", "off", "fast", "max"] = "auto"
    """off: bytes as they are; fast: float-split and zstd; max: the smallest, at any price. All are lossless. auto: of
    these, by element type and as measured, the smallest that is durable well inside the interval between saves, and
    the soonest durable if saves come back to back."""
    on_busy: Literal["wait", "skip", "supersede"] = "wait"
    """When all slots are in use: wait for one, skip the save, or give up the oldest snapshot that only waits for its
    turn. `save` waits in any case."""
    reference: bool = True
    """Whether chunks that did not change since the last committed checkpoint of the run are not stored again but
    referenced there. The checkpoint that holds them then stays as long as those that reference it."""
    derive: bool = False
    """Whether bfloat16 and float16 tensors that are exactly the casts of float32 ones in the same state (the masters of
    mixed precision) are not stored but derived, which is found out tensor by tensor at every save. Of tensors of 64 KiB
    or more, and of masters of equal shape, cut alike where they are sharded, that the same rank writes. Not with
    staging_bytes, by which no snapshot is in memory as a whole."""
    cpu_budget: float | None = None
    """Share of one core that the saver process keeps to, 0.5 for half of one; None: what is left by others. It does not
    apply to writer="thread"."""
    overlap: bool = True
    """Whether parameters and optimizer state are copied while training goes on, and `optim.step()` waits for the copy;
    else `save_async` returns when all is copied. Of a save that is given an optimizer."""
    commit_timeout_s: float = 1800.0
    """How long a committer waits for the receipts of all ranks."""
    settle_timeout_s: float = 120.0
    """How long a restore waits for the saver of a killed predecessor on this host."""
    peer_timeout_s: float = 600.0
    """How long ranks wait for one that gives no sign of life, at the first save and in restores."""
    daemon_timeout_s: float = 60.0
    """How long reads through the daemon are asked again while it does not answer; a restart goes unnoticed."""
    spread: bool = False
    """Whether ranks that hold copies share the writing of them; else the lowest writes all: one file."""
    share: Literal["auto", "broadcast", "daemon", "none"] = "auto"
    """How ranks that restore the same bytes get them: one reads and passes them on, or all read through the daemon's
    cache, or each reads for itself. auto: broadcast within a process group; without one, the daemon if one is
    given and the environment tells of several ranks."""

    def __post_init__(self) -> None:
        check_run(self.run)
        if self.store is None and self.daemon is None:
            raise InvalidRequest("no store and no daemon are given", "Pass store= or set CKPT_STORE, or CKPTD_URL")
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                *others, last = map(repr, words)
                raise InvalidRequest(f"{name} {getattr(self, name)!r} is unknown", f"Use {', '.join(others)} or {last}")
        if self.share == "daemon" and self.daemon is None:
            raise InvalidRequest("share='daemon' without a daemon", "Pass daemon= or set CKPTD_URL")
        self._check_amounts()

    def _check_amounts(self) -> None:
        if self.derive and self.staging_bytes is not None:
            raise InvalidRequest("derive=True needs whole snapshots", "Leave out staging_bytes, or derive")
        if self.peer_timeout_s <= 0:
            raise InvalidRequest(f"peer_timeout_s {self.peer_timeout_s} is not positive", "Give seconds")
        if self.staging_bytes is not None and self.staging_bytes < LEAST_BYTES:
            raise InvalidRequest(
                f"staging_bytes {self.staging_bytes} is too little for a stream", f"Give at least {LEAST_BYTES}"
            )
        if self.cpu_budget is not None and not 0 < self.cpu_budget < math.inf:
            raise InvalidRequest(f"cpu_budget {self.cpu_budget} is not positive", "Give cores, such as 0.5")
        if self.slots < 1:
            raise InvalidRequest(f"{self.slots} slots cannot hold a snapshot", "Use at least 1")

    @property
    def source(self) -> str:
        """What restores read from."""
        url = self.store or self.daemon
        assert url is not None
        return url

    @property
    def read_only(self) -> bool:
        """A daemon serves reads; savers write to the store itself."""
        return self.source.startswith(("http://", "https://"))

    @property
    def in_process(self) -> bool:
        """Whether the pipeline runs in threads here; memory:// exists in this process only."""
        return self.writer == "thread" or self.source.startswith("memory://")

    def setup(self, rank: int, world_size: int, budget: Budget) -> Setup:
        """What the saver of a rank is told."""
        return Setup(
            store=self.source,
            options=dict(self.options),
            run=self.run,
            rank=rank,
            world_size=world_size,
            compress=self.compress,
            commit_timeout_s=self.commit_timeout_s,
            daemon=self.daemon,
            token=self.token,
            reference=self.reference,
            derive=self.derive,
            cpu_budget=self.cpu_budget,
            encoded_bytes=budget.encoded,
            upload_bytes=budget.upload,
        )


def configure(store: str | None, run: str | None, daemon: str | None, token: str | None, **knobs: Any) -> Config:
    """The configuration from arguments and environment. Raises InvalidName or InvalidRequest."""
    run = run or os.environ.get("CKPT_RUN")
    if run is None:
        raise InvalidRequest("no run is given", "Pass run= or set CKPT_RUN")
    return Config(
        store=store or os.environ.get("CKPT_STORE"),
        run=run,
        daemon=daemon or os.environ.get("CKPTD_URL"),
        token=token or os.environ.get("CKPT_TOKEN"),
        **knobs,
    )

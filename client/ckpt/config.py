"""Every knob of a Checkpointer, written and validated once; environment variables fill what is not given."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, wraps
from typing import (
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

from ckpt.saver.memory import LINGER_S
from ckpt.saver.messages import Setup
from ckptstore.errors import InvalidRequest
from ckptstore.names import check_run
from ckptstore.stores import resolve_url
from ckptstore.stores.retrying import RETRY_S

_P = ParamSpec("_P")
_S = TypeVar("_S")
_T = TypeVar("_T")

OverlapMode = Literal[True, False, "verify"]
Writer = Literal["process", "thread"]
Compress = Literal["auto", "off", "fast", "max"]
OnBusy = Literal["wait", "skip", "supersede"]


@runtime_checkable
class ProcessGroup(Protocol):
    """A torch.distributed.ProcessGroup. This module does not load torch."""

    def rank(self) -> int:
        """The rank of this process in the group."""

    def size(self) -> int:
        """The number of its processes."""


GroupName = Literal["all", "solo"]
Group = GroupName | ProcessGroup
ReplicaReads = Literal["auto", "broadcast", "daemon", "none"]


@dataclass(frozen=True)
class Config:
    """How one run is saved and restored.

    store: where checkpoints are: a path, file://, s3://, memory:// or any other fsspec URL. Default: CKPT_STORE. A
        relative path is resolved at once; a later change of the working directory has no effect.
    run: the training lineage. Default: CKPT_RUN.
    near: a store near the trainer, such as file:///mnt/nvme, that all ranks share. Saves are committed there, and
        carried to `store` in the background. Default: CKPT_NEAR. None: saves are committed in `store`.
    far_every: every how many saves one is carried to `store`; the first after a start or restore, and the last, always.
    near_keep: how many of the newest checkpoints stay near. What is to be carried stays, too, until it is.
    near_bytes: most bytes of the run in the near store. If it is full, or its disk is, `on_busy` decides: wait until
        checkpoints are carried, or skip the save. Each rank looks before it writes its shard. None: no limit.
    spill: a folder for what waits while `store` is away, of at most `spill_bytes`: the same as near=spill, far_every=1,
        near_keep=1 and near_bytes=spill_bytes. Every save passes through it, also while `store` answers.
    spill_bytes: most bytes of the run in the spill folder.
    daemon: URL of ckptd. Notified of commits; used for reads if `store` is unset. Default: CKPTD_URL.
    token: bearer token for the daemon. Default: CKPT_TOKEN.
    options: storage options of the fsspec file system.
    writer: whether a saver process or threads of the trainer encode and upload. The process outlives the trainer.
    slots: maximum number of snapshots in host memory; each takes the size of the state.
    compress: off: bytes as they are; fast: float-split and zstd; max: the smallest, at any price. All are lossless.
        auto: off for a store in a folder of this host, fast for any other.
    on_busy: when all slots are in use: wait for one, skip the save, or supersede (drop) the oldest snapshot whose
        upload has not begun. `save` always waits.
    incremental: do not store chunks that are unchanged since the last committed checkpoint of the run, but reference
        them there. The checkpoint that holds them is kept as long as one that references it.
    max_references: how many checkpoints may reference the same stored chunk. It is then stored again, in parts over a
        few saves, so that one damaged byte does not cost more checkpoints than these. A checkpoint of an earlier
        process that is older than a week is not referenced either.
    dedup_casts: do not store bfloat16 and float16 tensors that are exactly the casts of float32 tensors in the same
        state (the masters of mixed precision); every save compares each element. Applies to tensors of 64 KiB or more
        whose master has the same shape, is sharded alike and is written by the same rank.
    statistics: save statistics of each tensor with it: extremes, NaN and Inf. `ckptctl stats` and `ckptctl why`
        show them. Costs about 3 % of encoding.
    cpu_budget: share of one core that the saver process may use, such as 0.5. None: what other processes leave. Does
        not apply to writer="thread".
    overlap: copy parameters and optimizer state while training continues; `optim.step()` waits for the copy. verify:
        also hash them at the call, in place, so that no change before their copy is missed; takes about 40 % of the
        time of copying them. GPUs then copy before they continue to train. False: `save_async` returns when everything
        is copied. Applies to saves that are given an optimizer.
    commit_timeout_s: how long a committer waits for the receipts of all ranks.
    orphan_saver_timeout_s: how long a restore waits for the saver of a killed predecessor on this host.
    peer_timeout_s: how long ranks wait for a rank that sends no heartbeat, at the first save and in restores.
    daemon_timeout_s: how long reads through a daemon that does not answer are retried, which hides a restart.
    store_retry_s: how long savers and restores repeat a request to a store that does not answer, before they fail. What
        cannot succeed fails at once: no such bucket, no permission, no space. 0: no retries.
    linger_s: how long the saver process keeps the newest committed snapshot in memory after this trainer has died and
        all saves are durable. A trainer that restarts on this host meanwhile restores from there. The memory is freed
        before, when that trainer starts to save, when the host runs short of memory, or at SIGTERM. 0: not at all.
        Default: CKPT_LINGER_S, or 120.
    heartbeat_s: rank 0's saver writes the step that training has reached at this interval, for `ckptctl goodput`. One
        small object per start of a trainer or restore, written again each time. 0: none.
    split_replicas: divide the writing of replicated tensors among the ranks that hold copies. False: the lowest rank
        writes all of them, into one file.
    repeat_steps: allow a step to be saved more than once between two restores; the later commit counts.
    group: the processes that save and restore together. all: those of the default process group. A process group of
        torch.distributed: its processes, such as one pipeline stage; all of them make the same calls, and others none.
        solo: this one, for hooks that run on one rank; no call waits for others. State of which no rank of the group
        holds a part is refused. Groups that save at the same time need a run each.
    replica_reads: how ranks that restore the same bytes get them. broadcast: one rank reads and sends them to the
        others. daemon: all ranks read through the daemon's cache. none: each rank reads for itself. auto: none if
        the store is on a disk of the ranks' host; else broadcast within a process group; without one, daemon if one is
        given and the environment names several ranks.
    """

    store: str | None = None
    _: KW_ONLY
    run: str | None = None
    near: str | None = None
    far_every: int = 1
    near_keep: int = 2
    near_bytes: int | None = None
    spill: str | None = None
    spill_bytes: int | None = None
    daemon: str | None = None
    token: str | None = field(default=None, repr=False)
    options: Mapping[str, Any] | None = field(default=None, repr=False)
    writer: Writer = "process"
    slots: int = 2
    compress: Compress = "auto"
    on_busy: OnBusy = "wait"
    incremental: bool = True
    max_references: int = 32
    dedup_casts: bool = False
    statistics: bool = True
    cpu_budget: float | None = None
    overlap: OverlapMode = True
    commit_timeout_s: float = 1800.0
    orphan_saver_timeout_s: float = 120.0
    peer_timeout_s: float = 600.0
    daemon_timeout_s: float = 60.0
    store_retry_s: float = RETRY_S
    linger_s: float | None = None
    heartbeat_s: float = 60.0
    split_replicas: bool = False
    repeat_steps: bool = False
    group: Group = "all"
    replica_reads: ReplicaReads = "auto"

    def __post_init__(self) -> None:
        """Raises InvalidName or InvalidRequest."""
        for name, variable in _VARIABLES.items():
            object.__setattr__(self, name, getattr(self, name) or os.environ.get(variable))
        if self.store is not None:
            # The saver starts later, perhaps in another working directory; locks are named by the URL.
            object.__setattr__(self, "store", resolve_url(self.store))
        object.__setattr__(self, "options", dict(self.options or {}))
        if self.run is None:
            raise InvalidRequest("no run is given", "Pass run= or set CKPT_RUN")
        check_run(self.run)
        if self.store is None and self.daemon is None:
            raise InvalidRequest("no store and no daemon are given", "Pass store= or set CKPT_STORE, or CKPTD_URL")
        for name, words in _words().items():
            if getattr(self, name) not in words:
                *others, last = map(repr, words)
                raise InvalidRequest(f"{name} {getattr(self, name)!r} is unknown", f"Use {', '.join(others)} or {last}")
        if not isinstance(self.group, ProcessGroup) and self.group not in get_args(GroupName):
            raise InvalidRequest(
                f"group {self.group!r} is none that this process is in",
                "Use 'all', 'solo' or a process group, and make the Checkpointer only on the ranks of that group",
            )
        if self.replica_reads == "daemon" and self.daemon is None:
            raise InvalidRequest("replica_reads='daemon' without a daemon", "Pass daemon= or set CKPTD_URL")
        self._check_near()
        object.__setattr__(self, "linger_s", _linger_s(self.linger_s))
        self._check_amounts()

    def _check_amounts(self) -> None:
        if self.peer_timeout_s <= 0:
            raise InvalidRequest(f"peer_timeout_s {self.peer_timeout_s} is not positive", "Give seconds")
        if not 0 <= self.heartbeat_s < math.inf:
            raise InvalidRequest(f"heartbeat_s {self.heartbeat_s} is no interval", "Give seconds, or 0 for none")
        if not 0 <= self.store_retry_s < math.inf:
            raise InvalidRequest(f"store_retry_s {self.store_retry_s} is no time", "Give seconds, or 0 for no retries")
        if self.cpu_budget is not None and not 0 < self.cpu_budget < math.inf:
            raise InvalidRequest(f"cpu_budget {self.cpu_budget} is not positive", "Give cores, such as 0.5")
        if self.max_references < 1:
            raise InvalidRequest(
                f"max_references {self.max_references} is not positive", "Pass incremental=False to reference nothing"
            )
        if self.slots < 1:
            raise InvalidRequest(f"{self.slots} slots cannot hold a snapshot", "Use at least 1")

    def _check_near(self) -> None:
        if self.spill is not None:
            if self.near not in (None, resolve_url(self.spill)) or self.spill_bytes is None:
                raise InvalidRequest(
                    f"spill={self.spill!r} needs spill_bytes=, and no near=", "A near store is a spill folder as well"
                )
            once = {"near": self.spill, "far_every": 1, "near_keep": 1, "near_bytes": self.spill_bytes}
            for name, value in once.items():
                object.__setattr__(self, name, value)
        if self.near is None:
            return
        object.__setattr__(self, "near", resolve_url(self.near))
        if self.read_only or self.near.startswith(("http://", "https://")):
            raise InvalidRequest("near= needs two stores, and a daemon serves reads only", "Pass the URL of a store")
        if self.near == self.store:
            raise InvalidRequest(f"near and store are the same: {self.near}", "Leave out near, or use another folder")
        if self.far_every < 1 or self.near_keep < 1:
            raise InvalidRequest(
                f"far_every {self.far_every} and near_keep {self.near_keep} must be positive",
                "Use far_every=1 to carry every save, and near_keep=1 to keep only the newest near",
            )

    @property
    def run_name(self) -> str:
        """The run; never None once the environment was read."""
        assert self.run is not None
        return self.run

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
    def patience_s(self) -> float:
        """How long reads are repeated while their source does not answer."""
        return self.daemon_timeout_s if self.read_only else self.store_retry_s

    @property
    def in_process(self) -> bool:
        """Whether the pipeline runs in threads here; memory:// exists in this process only."""
        return self.writer == "thread" or (self.near or self.source).startswith("memory://")

    def setup(self, rank: int, world_size: int) -> Setup:
        """The first message to the saver of a rank: its fields that are knobs have the knobs' names."""
        knobs = {name: getattr(self, name) for name in Setup.__struct_fields__ if hasattr(self, name)}
        ranks = {"rank": rank, "world_size": world_size, "trainer": os.getpid()}
        stores: dict[str, Any] = {"store": self.source}
        if self.near is not None:
            stores = {"store": self.near, "options": {}, "far": self.source, "far_options": self.options}
        return Setup(**(knobs | ranks | stores))


def _linger_s(given: float | None) -> float:
    """The time that is given, or that of the environment. Raises InvalidRequest."""
    text = os.environ.get("CKPT_LINGER_S") or LINGER_S if given is None else given
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InvalidRequest(f"linger_s {text} is no time", "Give seconds, or 0 to keep nothing in memory")
    return seconds


_VARIABLES = {
    "store": "CKPT_STORE",
    "run": "CKPT_RUN",
    "near": "CKPT_NEAR",
    "daemon": "CKPTD_URL",
    "token": "CKPT_TOKEN",
}


@cache
def _words() -> dict[str, tuple[str, ...]]:
    """The knobs that take one of a few words, and these."""
    hints = get_type_hints(Config)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def takes(make: Callable[_P, _T]) -> Callable[[Callable[[_S, _T], None]], Callable[Concatenate[_S, _P], None]]:
    """Decorates an `__init__` that takes one object, to take the arguments that this object is made of instead.

    Type checkers, editors and help() see these, with the documentation of the class of the object.
    """

    shown: Any = vars(make)["__init__"]
    shown.__annotations__ = get_type_hints(shown)  # types in place of their text

    def decorate(init: Callable[[_S, _T], None]) -> Callable[Concatenate[_S, _P], None]:
        @wraps(init)
        def wrapper(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
            init(self, make(*args, **kwargs))

        wrapper.__wrapped__ = shown
        wrapper.__doc__ = f"{inspect.getdoc(make)}\n\n{inspect.cleandoc(init.__doc__ or '')}"
        return wrapper

    return decorate

"""The settings of a Checkpointer, written and validated once; environment variables fill what is not given."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from difflib import get_close_matches
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

from ckpt.saver.messages import Setup
from ckpt.saver.retained_snapshot import RETAIN_SNAPSHOT_S
from ckptstore.errors import InvalidRequest
from ckptstore.names import check_run
from ckptstore.stores import REHEARSAL, resolve_url
from ckptstore.stores.retrying import RETRY_S

_P = ParamSpec("_P")
_S = TypeVar("_S")
_T = TypeVar("_T")

HEARTBEAT_S = 60.0
"""Rank 0's saver writes the step that training has reached at this interval, for `ckptctl goodput`."""

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
Path = str | os.PathLike[str]
Assets = Path | Sequence[Path] | Mapping[str, Path | bytes]
"""A folder, a file or a glob, several of these, or a file or its bytes by the name to save it under."""


@dataclass(frozen=True)
class Config:
    """How one run is saved and restored.

    store: where checkpoints are: a path, file://, s3://, memory:// or any other fsspec URL. run: the training lineage.
    Both come from CKPT_STORE and CKPT_RUN if they are not given. docs/reference/settings.md explains every setting.
    """

    store: str | None = None
    """A relative path is resolved at once."""
    _: KW_ONLY
    run: str | None = None
    local: str | None = None
    """Where saves are committed; they are replicated to `store` in the background. All ranks share it, or each host has
    its own, with `replicas`."""
    replicas: int | None = None
    """How many other hosts get each shard of a local tier that hosts do not share. None: all ranks share it."""
    replicate_every: int = 1
    """Every how many saves one is replicated; the first after a start or restore, and the last, always."""
    local_keep: int = 2
    """How many of the newest checkpoints stay local. Checkpoints still to be replicated stay, too."""
    local_bytes: int | None = None
    """Most bytes of the run in the local tier."""
    daemon: str | None = None
    """URL of ckptd. Notified of commits; used for reads if `store` is unset."""
    token: str | None = field(default=None, repr=False)
    options: Mapping[str, Any] | None = field(default=None, repr=False)
    """Storage options of the fsspec file system."""
    assets: Assets | None = field(default=None, repr=False)
    """Files that belong to the model, such as its configuration and tokenizer: saved with each checkpoint."""
    writer: Writer = "process"
    """A saver process, which outlives the trainer, or threads of the trainer."""
    slots: int = 2
    """Most snapshots in host memory."""
    compress: Compress = "auto"
    """auto: off for a store in a folder of this host, fast for any other."""
    on_busy: OnBusy = "wait"
    """When all slots are in use."""
    max_references: int = 32
    """How many checkpoints may reference the same stored chunk; 0: each stores all."""
    dedup_casts: bool = False
    """Do not store tensors that are exactly the casts of float32 tensors in the same state."""
    statistics: bool = True
    """Save statistics of each tensor with it."""
    cpu_budget: float | None = None
    """Share of one core that the saver process may use."""
    overlap: OverlapMode = True
    """Copy parameters and optimizer state while training continues; verify: also hash them at the call."""
    peer_timeout_s: float = 1800.0
    """How long ranks wait for each other."""
    retry_s: float = RETRY_S
    """How long requests to a store or daemon that does not answer are repeated."""
    retain_snapshot_s: float | None = None
    """How long the saver of a trainer that died keeps its newest committed snapshot in memory."""
    split_replicas: bool = False
    """Divide the writing of replicated tensors among the ranks that hold copies."""
    group: Group = "all"
    """The processes that save and restore together."""
    replica_reads: ReplicaReads = "auto"
    """How ranks that restore the same bytes get them."""

    def __post_init__(self) -> None:
        """Raises InvalidName or InvalidRequest."""
        given = vars(self)
        given.update({name: given[name] or os.environ.get(variable) for name, variable in _VARIABLES.items()})
        if REHEARSAL in os.environ:  # `ckptctl rehearse` replaces the store itself
            given.update(store=self.store or self.daemon, daemon=None, local=None)
        if self.store is not None:
            # The saver starts later, perhaps in another working directory; locks are named by the URL.
            given["store"] = resolve_url(self.store)
        given["options"] = dict(self.options or {})
        if self.run is None:
            raise InvalidRequest("no run is given", "Pass run= or set CKPT_RUN; an id such as gpt@latest names it, too")
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
        self._check_local()
        given["retain_snapshot_s"] = _retain_snapshot_s(self.retain_snapshot_s)
        self._check_amounts()

    def _check_amounts(self) -> None:
        for name, is_allowed, hint in (
            ("peer_timeout_s", self.peer_timeout_s > 0, "Give positive seconds"),
            ("retry_s", 0 <= self.retry_s < math.inf, "Give seconds, or 0 for no retries"),
            ("cpu_budget", self.cpu_budget is None or 0 < self.cpu_budget < math.inf, "Give cores, such as 0.5"),
            ("max_references", self.max_references >= 0, "Use 0 to reference nothing"),
            ("slots", self.slots >= 1, "Use at least 1: it holds a snapshot"),
        ):
            if not is_allowed:
                raise InvalidRequest(f"{name} must not be {getattr(self, name)}", hint)

    def _check_local(self) -> None:
        if self.local is None:
            if self.replicas is not None and REHEARSAL not in os.environ:
                raise InvalidRequest("replicas= without a local tier", "Pass local=, a folder of each host's disk")
            return
        self.__dict__["local"] = resolve_url(self.local)
        if self.read_only or self.local.startswith(("http://", "https://")):
            raise InvalidRequest("local= needs two stores, and a daemon serves reads only", "Pass the URL of a store")
        if self.local == self.store:
            raise InvalidRequest(
                f"local and store are the same: {self.local}", "Leave out local, or use another folder"
            )
        if self.replicas is not None and (self.replicas < 0 or not self.local.startswith("file://")):
            raise InvalidRequest(
                f"replicas={self.replicas} with local={self.local!r}", "Use 0 or more, and a folder of each host's disk"
            )
        if self.replicate_every < 1 or self.local_keep < 1:
            raise InvalidRequest(
                f"replicate_every {self.replicate_every} and local_keep {self.local_keep} must be positive",
                "Use replicate_every=1 to replicate every save, and local_keep=1 to keep only the newest one locally",
            )

    @property
    def run_name(self) -> str:
        """The run; never None once the environment was read."""
        assert self.run is not None
        return self.run

    @property
    def source(self) -> str:
        """The source that restores read from."""
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
        return self.writer == "thread" or (self.local or self.source).startswith("memory://")

    def setup(self, rank: int, world_size: int) -> Setup:
        """The first message to the saver of a rank: its fields that are knobs have the knobs' names."""
        knobs = {name: getattr(self, name) for name in Setup.__struct_fields__ if hasattr(self, name)}
        ranks = {"rank": rank, "world_size": world_size, "trainer": os.getpid(), "heartbeat_s": HEARTBEAT_S}
        stores: dict[str, Any] = {"store": self.source}
        if self.local is not None:
            stores = {"store": self.local, "options": {}, "remote": self.source, "remote_options": self.options}
        return Setup(**(knobs | ranks | stores))


def _retain_snapshot_s(given: float | None) -> float:
    """The time that is given, or that of the environment. Raises InvalidRequest."""
    text = os.environ.get("CKPT_RETAIN_SNAPSHOT_S") or RETAIN_SNAPSHOT_S if given is None else given
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InvalidRequest(
            f"retain_snapshot_s must be at least 0, not {text}", "Give seconds, or 0 to keep nothing in memory"
        )
    return seconds


_VARIABLES = {
    "store": "CKPT_STORE",
    "run": "CKPT_RUN",
    "local": "CKPT_LOCAL",
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

    Type checkers, editors and help() see these, with the documentation of the class of the object. A keyword that it
    does not have raises InvalidRequest, which names one that is near.
    """

    shown: Any = vars(make)["__init__"]
    shown.__annotations__ = get_type_hints(shown)  # types in place of their text
    known = inspect.signature(make).parameters

    def decorate(init: Callable[[_S, _T], None]) -> Callable[Concatenate[_S, _P], None]:
        shown.__qualname__ = init.__qualname__  # errors about arguments name it

        @wraps(init)
        def wrapper(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
            for name in kwargs.keys() - known:
                near = [f"Did you mean {one!r}?" for one in get_close_matches(name, known, 1)]
                raise InvalidRequest(f"{name!r} is not a setting", *near or [f"There are {', '.join(known)}"])
            init(self, make(*args, **kwargs))

        wrapper.__wrapped__ = shown
        wrapper.__doc__ = f"{inspect.getdoc(make)}\n\n{inspect.cleandoc(init.__doc__ or '')}"
        return wrapper

    return decorate

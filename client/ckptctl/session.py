"""The context of every command: its target, screen and clock."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from ckptapi.listing import check_glob, is_glob
from ckptapi.opening import open_source
from ckptctl.render import Screen
from ckptctl.targets import Target
from ckptstore.clock import Clock, system_clock
from ckptstore.commits.audit import operator
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import CkptError, CorruptObject, InvalidRequest, NoCheckpoint, StoreReadOnly
from ckptstore.names import LATEST, Reference, check_run
from ckptstore.operator import StoreOperator
from ckptstore.reading.source import Source, StoreSource
from ckptstore.stores import Store
from ckptstore.tiers.source import TieredSource

if TYPE_CHECKING:
    from ckptapi.client import DaemonClient


_LEASE_S = 600.0
_SLOWEST_BYTES_PER_S = 10 << 20


@dataclass
class Session:
    """One call of the program. The target is chosen and opened on first use."""

    _choose: Callable[[], Target]
    screen: Screen
    clock: Clock = system_clock
    given: Mapping[str, Any] = field(default_factory=dict)
    """The values of the global options."""
    arguments: Sequence[str] = ()
    """The command line, without the name of the program."""
    _local: str | None = None
    creates: bool = False
    """Whether this call may make the store's folder, as a first save does."""

    @cached_property
    def target(self) -> Target:
        """The daemon or store. Raises InvalidRequest if the options are ambiguous."""
        return self._choose()

    @cached_property
    def source(self) -> Source:
        """The target, opened. The folder of a store must exist, unless this call may make it."""
        target = self.target
        source = open_source(target.url, target.token, cacert=target.cacert, local=self._local)
        if isinstance(source, StoreSource) and not (self.creates or isinstance(source, TieredSource)):
            source.store.must_exist = True
        return source

    def add_local_tier(self, local: str | None) -> None:
        """Read this local tier too, if there is one. Raises InvalidRequest if the target is a daemon."""
        if local is not None and self.target.is_daemon:
            raise InvalidRequest(
                "--local needs a store: a daemon serves the remote one", "Use --store instead of --url"
            )
        self._local = local

    def local_limits(self, runs: Iterable[str]) -> list[str]:
        """How long the local tier of these runs lasts, if that is less than the loss of a host."""
        if self._local is None:
            return []
        from ckptapi.hosts import HostsStore, limits, open_local, read_members  # loads an HTTP client

        if not isinstance(store := open_local(self._local), HostsStore):
            return []
        known = (members.replicas for run in runs if (members := read_members(store.own.root, run)))
        return [limit for replicas in {*known} for limit in limits(store.own, replicas)]

    @cached_property
    def operator(self) -> StoreOperator | DaemonClient:
        """The target, for what operators do: both have the same methods."""
        source: Any = self.source
        return source if self.target.is_daemon else StoreOperator(source.store, self.clock, operator())

    def store(self, command: str) -> Store:
        """The store. Raises InvalidRequest if the target is a daemon."""
        if self.target.is_daemon:
            raise InvalidRequest(f"{command} works on a store, not through a daemon", "Use --store instead of --url")
        return cast(StoreSource, self.source).store

    def daemon(self, command: str) -> DaemonClient:
        """The daemon. Raises InvalidRequest if the target is a store."""
        if not self.target.is_daemon:
            raise InvalidRequest(f"{command} works through a daemon, not on a store", "Use --url instead of --store")
        return cast("DaemonClient", self.source)

    def find(self, text: str) -> Checkpoint:
        """The checkpoint that RUN@STEP, RUN@STEP.ULID, RUN@latest or RUN names; RUN is its newest.

        Raises InvalidName or NoCheckpoint.
        """
        return self.source.find(Reference.parse(text if "@" in text else f"{check_run(text)}@{LATEST}"))

    def find_readable(self, text: str) -> Checkpoint:
        """As `find`. Raises CorruptObject for a damaged outcome, too."""
        found = self.find(text)
        if found.state is State.CORRUPT:
            raise CorruptObject(f"{found.id} cannot be read: {found.problem}", "Use another checkpoint")
        return found

    @contextmanager
    def leased(self, *checkpoints: Checkpoint) -> Iterator[None]:
        """Hold leases on checkpoints while they are read. Raises NoCheckpoint if the deletion of one has begun."""
        holder = f"ckptctl on {socket.gethostname()} (process {os.getpid()})"
        with ExitStack() as held:
            for checkpoint in checkpoints:
                ttl_s = _LEASE_S + checkpoint.needed_bytes / _SLOWEST_BYTES_PER_S
                try:
                    lease = self.source.take_lease(checkpoint, holder, ttl_s)
                except StoreReadOnly:
                    # Read-only access is enough to read; a concurrent deletion shows as a missing object.
                    continue
                held.callback(self._release, checkpoint.run, lease)
            yield

    def _release(self, run: str, lease: str) -> None:
        with suppress(CkptError):  # it expires by itself, and an error of the block must not be replaced
            self.source.release_lease(run, lease)

    def chosen(self, text: str) -> list[Checkpoint]:
        """All checkpoints of RUN, the one of RUN@STEP, or those whose step or tag a pattern names: 'gpt-*@1*'.

        Newest first. Raises NoCheckpoint.
        """
        run, at, which = text.partition("@")
        if at and not is_glob(text):
            return [self.find(text)]
        listed = [checkpoint for found in self.checkpoints(run).values() for checkpoint in found]
        found = [c for c in listed if not at or any(fnmatchcase(name, which) for name in (str(c.step), *c.tags))]
        if not found:
            raise NoCheckpoint(f"no checkpoint matches {text!r}", f"ckptctl ls {run!r} lists the checkpoints")
        return found

    def labelled(self, text: str) -> list[Checkpoint]:
        """As `chosen`, but RUN, or a pattern of runs, names the newest checkpoint of each. Raises NoCheckpoint."""
        return self.chosen(text) if "@" in text else [self.find(name) for name in self.run_names(text)]

    def checkpoints(self, run: str | None) -> dict[str, list[Checkpoint]]:
        """The checkpoints of one run, of a pattern of runs or of all runs, newest step first; of RUN@STEP those chosen.

        Raises NoCheckpoint if a named run has none.
        """
        if run is not None and "@" in run:
            return {name: [*found] for name, found in groupby(self.chosen(run), lambda c: c.run)}
        if run is None or is_glob(run):
            return {name: self.source.checkpoints(name) for name in self.run_names(run)}
        found = self.source.checkpoints(check_run(run))
        if not found:
            raise no_checkpoints(run, self.source.url)
        return {run: found}

    def run_names(self, run: str | None) -> list[str]:
        """The named run, the runs that match a pattern, or all runs. Raises NoCheckpoint if none matches."""
        if run is not None and not is_glob(run):
            return [check_run(run)]
        names = self.source.runs()
        if run is None:
            return names
        matching = [name for name in names if fnmatchcase(name, check_glob(run))]
        if not matching:
            raise no_checkpoints(run, self.source.url)
        return matching

    def close(self) -> None:
        """Close the connections to a daemon."""
        if "source" in self.__dict__:
            self.source.close()


def no_checkpoints(run: str, url: str) -> NoCheckpoint:
    """The error for a named run, or a pattern of runs, without checkpoints."""
    return NoCheckpoint(f"run {run!r} has no checkpoint in {url}", "ckptctl runs lists the runs")

"""The context of every command: its target, screen and clock."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import typer

from ckptapi.opening import open_source
from ckptctl.profiles import Profile, load_profiles
from ckptctl.render import Screen
from ckptstore.clock import Clock, system_clock
from ckptstore.commits.audit import operator
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CkptError, InvalidRequest, NoCheckpoint, StoreReadOnly, StoreUnavailable
from ckptstore.names import check_run
from ckptstore.operator import Operator, StoreOperator
from ckptstore.reading.source import Source, StoreSource
from ckptstore.stores import Store
from ckptstore.stores.local import LocalStore

if TYPE_CHECKING:
    from ckptapi.client import DaemonClient

_T = TypeVar("_T")


class Session:
    """One call of the program. The target is chosen and opened on first use."""

    def __init__(self, choose: Callable[[], Target], screen: Screen, clock: Clock = system_clock) -> None:
        self.screen = screen
        self.clock = clock
        self._choose = choose

    @cached_property
    def target(self) -> Target:
        """The daemon or store. Raises InvalidRequest if the options are ambiguous."""
        return self._choose()

    @cached_property
    def source(self) -> Source:
        """The target, opened."""
        return open_target(self.target)

    @cached_property
    def operator(self) -> Operator:
        """The target, for what operators do."""
        daemon: Callable[[], Operator] = self._daemon
        store: Callable[[], Operator] = self._store_operator
        return self.dispatch(daemon, store)

    def dispatch(self, daemon: Callable[[], _T], store: Callable[[], _T]) -> _T:
        """Call `daemon` if the target is one, else `store`."""
        return daemon() if self.target.is_daemon else store()

    def store(self, command: str) -> Store:
        """The store. Raises InvalidRequest if the target is a daemon."""
        return self.store_operator(command).store

    def store_operator(self, command: str) -> StoreOperator:
        """The operator on the store. Raises InvalidRequest if the target is a daemon."""
        refusal = InvalidRequest(f"{command} works on a store, not through a daemon", "Use --store instead of --url")
        return self.dispatch(partial(_refuse, refusal), self._store_operator)

    def daemon(self, command: str) -> DaemonClient:
        """The daemon. Raises InvalidRequest if the target is a store."""
        refusal = InvalidRequest(f"{command} works through a daemon, not on a store", "Use --url instead of --store")
        return self.dispatch(self._daemon, partial(_refuse, refusal))

    def _store_operator(self) -> StoreOperator:
        return StoreOperator(cast(StoreSource, self.source).store, self.clock, operator())

    def _daemon(self) -> DaemonClient:
        return cast("DaemonClient", self.source)

    def checkpoints(self, run: str | None) -> dict[str, list[Checkpoint]]:
        """The checkpoints of one run or all runs, newest step first. Raises NoCheckpoint if the named run has none."""
        if run is None:
            return {name: self.source.checkpoints(name) for name in self.source.runs()}
        found = self.source.checkpoints(check_run(run))
        if not found:
            raise no_checkpoints(run, self.source.url)
        return {run: found}

    def run_names(self, run: str | None) -> list[str]:
        """The named run, or all runs."""
        return [run] if run is not None else self.source.runs()

    def close(self) -> None:
        """Close the connections to a daemon."""
        if "source" in self.__dict__:
            self.source.close()


def _refuse(error: CkptError) -> NoReturn:
    raise error


def no_checkpoints(run: str, url: str) -> NoCheckpoint:
    """The error for a named run without checkpoints."""
    return NoCheckpoint(f"run {run!r} has no checkpoint in {url}", "ckptctl runs lists the runs")


_HTTP = ("http://", "https://")
GLOBAL_OPTIONS = ("url", "store", "token", "profile", "output", "no_color", "quiet")
_LEASE_S = 600.0
_SLOWEST_BYTES_PER_S = 10 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """A daemon or store, and how it was chosen."""

    url: str
    is_daemon: bool
    token: str | None = field(default=None, repr=False)
    origin: str = field(default="", compare=False)
    """The option, variable or profile that chose it."""


def choose_target(
    url: str | None,
    store: str | None,
    token: str | None,
    explicit: Collection[str],
    find_profile: Callable[[], Profile | None] = lambda: None,
) -> Target:
    """The daemon at `url`, the store at `store`, or the target of the profile. Raises InvalidRequest if ambiguous.

    explicit: which of "url", "store", "token" and "profile" are on the command line. The command line overrides the
    environment, which overrides the configuration file.
    """
    on_line = {"url", "store"} & set(explicit)
    if on_line and "profile" in explicit:
        raise InvalidRequest("a profile and another target are set", "Choose one with --profile, --url or --store")
    if "profile" in explicit or not (url or store):
        profile = find_profile()
        if profile is not None:
            # A token from the environment may be for another daemon.
            token = token if "token" in explicit or profile.token is None else profile.token
            return _target(profile.url, profile.store, token, f"profile {profile.name}")
    if url and store and len(on_line) == 1:
        url, store = (url, None) if "url" in explicit else (None, store)
    if url:
        origin = "--url" if "url" in explicit else "CKPTD_URL"
    else:
        origin = "--store" if "store" in explicit else "CKPT_STORE"
    return _target(url, store, token, origin)


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """Values of the global options by name, and which of them are on the command line."""

    values: Mapping[str, Any]
    explicit: Collection[str]

    def target(self) -> Target:
        """The target that they select. Raises InvalidRequest."""
        url, store, token, profile = (self.values.get(name) for name in ("url", "store", "token", "profile"))
        return choose_target(url, store, token, self.explicit, lambda: load_profiles().find(profile))


def global_options(ctx: typer.Context) -> GlobalOptions:
    """The options before and after the command; those after it win."""
    program = ctx.find_root()
    values = {name: program.params.get(name) for name in GLOBAL_OPTIONS}
    explicit: set[str] = set()
    for context in (program, ctx):
        # Depending on Typer's version, the enum of sources is in click or in Typer.
        here = {n for n in GLOBAL_OPTIONS if getattr(context.get_parameter_source(n), "name", "") == "COMMANDLINE"}
        values |= {name: context.params[name] for name in here}
        explicit |= here
    return GlobalOptions(values, explicit)


def _target(url: str | None, store: str | None, token: str | None, origin: str) -> Target:
    if url and store:
        raise InvalidRequest(
            "both a daemon (--url, CKPTD_URL) and a store (--store, CKPT_STORE) are set",
            "Choose one with --url or --store on the command line",
        )
    if url:
        if not url.startswith(_HTTP):
            raise InvalidRequest(f"{origin} {url} is not the URL of a daemon", "Use http://..., or --store for a store")
        return Target(url, is_daemon=True, token=token, origin=origin)
    if store:
        if store.startswith(_HTTP):
            raise InvalidRequest(f"{origin} {store} is not the URL of a store", "Use --url for a daemon")
        return Target(store, is_daemon=False, origin=origin)
    raise InvalidRequest(
        "neither a daemon nor a store is set",
        "Pass --url http://HOST:PORT or --store URL, set CKPTD_URL or CKPT_STORE, or use a profile",
    )


def open_target(target: Target) -> Source:
    """Open the target. Raises StoreUnavailable for a local store whose folder does not exist."""
    source = open_source(target.url, target.token)
    if isinstance(source, StoreSource) and isinstance(source.store, LocalStore) and not source.store.root.is_dir():
        raise StoreUnavailable(
            f"there is no folder {source.store.root}",
            "Check the path, and that it is mounted. The first save creates the folder",
        )
    return source


@contextmanager
def leased(source: Source, checkpoint: Checkpoint) -> Iterator[None]:
    """Hold a lease on a checkpoint while it is read. Raises NoCheckpoint if its deletion has begun."""
    ttl_s = _LEASE_S + checkpoint.needed_bytes / _SLOWEST_BYTES_PER_S
    holder = f"ckptctl on {socket.gethostname()} (process {os.getpid()})"
    try:
        lease = source.take_lease(checkpoint, holder, ttl_s)
    except StoreReadOnly:
        # Read-only access is enough to read; a concurrent deletion shows as a missing object.
        yield
        return
    try:
        yield
    finally:
        try:
            source.release_lease(checkpoint.run, lease)
        except CkptError:
            pass  # it expires by itself, and an error of the block must not be replaced

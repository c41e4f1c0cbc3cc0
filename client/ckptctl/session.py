"""The context of every command: its target, screen and clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

from ckptctl.render import Screen
from ckptctl.target import Target, open_target
from ckptstore.clock import Clock, system_clock
from ckptstore.commits.audit import operator
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CkptError, InvalidRequest, NoCheckpoint
from ckptstore.names import check_run
from ckptstore.operator import Operator, StoreOperator
from ckptstore.reading.source import Source, StoreSource
from ckptstore.stores import Store

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

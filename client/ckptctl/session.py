"""The context of every command: its target, screen and clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, cast

from ckptctl.render import Screen
from ckptctl.target import Target, open_target
from ckptstore.clock import Clock, system_clock
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import InvalidRequest, NoCheckpoint
from ckptstore.names import check_run
from ckptstore.reading.source import Source, StoreSource
from ckptstore.stores import Store

if TYPE_CHECKING:
    from ckptapi.client import DaemonClient


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
        if "source" in self.__dict__ and self.target.is_daemon:
            self.daemon("close").close()


def no_checkpoints(run: str, url: str) -> NoCheckpoint:
    """The error for a named run without checkpoints."""
    return NoCheckpoint(f"run {run!r} has no checkpoint in {url}", "ckptctl runs lists the runs")

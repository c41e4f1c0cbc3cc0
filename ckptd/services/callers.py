"""Who asks, and what he may. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckptapi.bodies import Scope
from ckptstore.errors import Forbidden

_WILD = frozenset("*?")


@dataclass(frozen=True, slots=True)
class Caller:
    """A token, without its secret."""

    name: str
    scopes: frozenset[Scope]
    runs: tuple[str, ...] = ()
    """Globs (* and ?) of the runs that it is bound to; none: it is not bound."""

    @property
    def bound(self) -> bool:
        """Some runs are none of its business."""
        return bool(self.runs)

    def sees(self, run: str) -> bool:
        """Whether a run is its business."""
        return not self.runs or any(fnmatchcase(run, glob) for glob in self.runs)

    def check_scope(self, scope: Scope) -> None:
        """Raises Forbidden unless it may do what the scope stands for."""
        if not {scope, Scope.ADMIN} & self.scopes:
            raise Forbidden(
                f"token {self.name!r} has no scope {scope.value!r}", "Use another token, or ask whoever made this one"
            )

    def check_run(self, run: str | None) -> None:
        """Raises Forbidden unless a run, or all runs that a glob names, are its business. None: all runs."""
        wild = run is None or not _WILD.isdisjoint(run)
        if self.runs and (run not in self.runs if wild else not self.sees(run or "")):
            asked = "all runs" if run is None else f"run {run!r}"
            raise Forbidden(f"token {self.name!r} is not for {asked}", f"It is for {', '.join(self.runs)}; name one")


ANYBODY = Caller("anybody", frozenset({Scope.ADMIN}))
"""Where no token is asked for."""

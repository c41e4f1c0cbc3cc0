"""Callers and their permissions. Pure."""

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
    """Globs (* and ?) of the runs that the token is bound to; empty if it is not bound."""

    @property
    def bound(self) -> bool:
        """Whether the token is restricted to some runs."""
        return bool(self.runs)

    def sees(self, run: str) -> bool:
        """Whether the token may access a run."""
        return not self.runs or any(fnmatchcase(run, glob) for glob in self.runs)

    def check_scope(self, scope: Scope) -> None:
        """Raises Forbidden unless the token has the scope or is an admin."""
        if not {scope, Scope.ADMIN} & self.scopes:
            raise Forbidden(
                f"token {self.name!r} has no scope {scope.value!r}",
                "Use another token, or ask an admin for one with this scope",
            )

    def check_run(self, run: str | None) -> None:
        """Raises Forbidden unless the token may access a run, or all runs that match a glob. None: all runs."""
        wild = run is None or not _WILD.isdisjoint(run)
        if self.runs and (run not in self.runs if wild else not self.sees(run or "")):
            which = "all runs" if run is None else f"run {run!r}"
            raise Forbidden(
                f"token {self.name!r} may not access {which}", f"Name one of its runs: {', '.join(self.runs)}"
            )


ANONYMOUS = Caller("anonymous", frozenset({Scope.ADMIN}))
"""The caller of every request if authentication is off."""

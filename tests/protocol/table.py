"""The notation of the protocol: each row of a table is one atomic operation on the store, and what follows each reply.

A program is the table of one actor. A row has a name; the reply to its operation selects the next row. A name without
a row ends the program. A row may carry a claim: what the actor believes, or has reported, as long as it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Key = tuple[str, ...]
"""The name of an object: kind, attempt, and what else its name contains."""
Value = str | tuple[str, ...]
Objects = Mapping[Key, Value]
Claim = tuple[str, ...]
"""Kind and attempt of a claim, and what else identifies it."""

Verb = Literal["put", "create", "get", "list", "delete", "expire", "begin"]


@dataclass(frozen=True)
class Op:
    """One atomic operation on the store.

    put and delete reply `ok`; create replies `won` or `exists`; get replies the value, or `absent`; list replies what
    `classify` makes of the objects found. expire is no operation but time: a lease that is live becomes expired. begin
    does nothing.
    """

    verb: Verb
    key: Key = ()
    value: Value = ""
    classify: Callable[[Objects], str] = lambda found: "some" if found else "none"

    def __str__(self) -> str:
        return f"{self.verb} {'/'.join(self.key)}" + (f" = {self.value}" if self.value else "")


@dataclass(frozen=True)
class Row:
    """One row: what is done, and where each reply leads.

    `unknown` is the reply that was lost, of a write that was done. Without an entry the write is repeated. For a get it
    is an error.
    """

    at: str
    op: Op | None
    then: Mapping[str, str] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True, eq=False)
class Program:
    """The table of one actor. The first row is its beginning."""

    rows: Mapping[str, Row]
    start: str

    def __getitem__(self, at: str) -> Row:
        return self.rows.get(at) or Row(at, None)

    def claiming(self, claim: Claim, after: Collection[str]) -> Program:
        """The same program; all rows but the first ones, `after`, carry a claim as well."""
        rows = {at: one if at in after else replace(one, claims=(*one.claims, claim)) for at, one in self.rows.items()}
        return Program(rows, self.start)

    def claims(self, at: str) -> tuple[Claim, ...]:
        """What the actor claims while it is there."""
        return self[at].claims


def program(*rows: Row | Iterable[Row]) -> Program:
    """A program of rows, and of groups of rows."""
    flat: list[Row] = []
    for one in rows:
        flat += [one] if isinstance(one, Row) else one
    table = {one.at: one for one in flat}
    if len(table) != len(flat):
        raise ValueError(f"two rows have one name: {[one.at for one in flat]}")
    return Program(table, flat[0].at)


def row(at: str, op: Op, *claims: Claim, **then: str) -> Row:
    """A row; `then` has the next row for each reply. A reply `else_` is for all others."""
    return Row(at, op, then, claims)


def end(at: str, *claims: Claim) -> Row:
    return Row(at, None, {}, claims)


def in_turn(first: str, ops: Iterable[Op], then: str, *claims: Claim) -> list[Row]:
    """Rows that do one operation after the other, whatever the reply."""
    todo = list(ops)
    places = [first, *(f"{first}, {number}" for number in range(2, len(todo) + 1)), then]
    return [Row(at, op, {"else_": after}, claims) for at, op, after in zip(places, todo, places[1:], strict=False)]


def put(*key: str, value: Value = "") -> Op:
    return Op("put", key, value)


def create(*key: str, value: Value = "") -> Op:
    return Op("create", key, value)


def get(*key: str) -> Op:
    return Op("get", key)


def delete(*key: str) -> Op:
    return Op("delete", key)


def listing(*prefix: str, classify: Callable[[Objects], str] | None = None) -> Op:
    return Op("list", prefix, classify=classify) if classify else Op("list", prefix)

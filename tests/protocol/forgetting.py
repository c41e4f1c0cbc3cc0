"""The actors that forget: old tombstones and aborted outcomes are replaced by a list of the dead. Who must look at it.

Each version of the list is an object that is created only if absent. The highest version counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tests.protocol.rules import Rules
from tests.protocol.table import (
    Claim,
    Objects,
    Op,
    Program,
    Row,
    create,
    delete,
    end,
    get,
    in_turn,
    listing,
    program,
    row,
)

_MOST_VERSIONS = 4
_NONE = "nothing"


def highest_version(found: Objects) -> int:
    return max((int(key[1]) for key in found if key[0] == "dead"), default=0)


def dead(found: Objects) -> frozenset[str]:
    """The attempts in the highest version."""
    return frozenset(found.get(("dead", str(highest_version(found))), ()))


def look_at_the_dead(at: str, a: str, yes: str, no: str, *claims: Claim) -> Row:
    """Whether an attempt is on the list."""
    return row(at, listing("dead", classify=lambda found: "dead" if a in dead(found) else "alive"), *claims,
               dead=yes, alive=no)  # fmt: skip


def cleaner(a: str, leftovers: Iterable[Op]) -> Program:
    """Removes what a committer that woke up has left of a dead attempt."""
    return program(look_at_the_dead("dead?", a, yes="remove", no="end"), in_turn("remove", leftovers, "end"))


def trimmer(version: int) -> Program:
    """Removes a version when there is a higher one."""

    def classify(found: Objects) -> str:
        return "yes" if highest_version(found) > version else "no"

    return program(
        row("is there a higher one?", listing("dead", classify=classify), yes="remove", no="end"),
        row("remove", delete("dead", str(version)), ok="end"),
    )


def forgetter(a: str, ids: Sequence[str], attempts: Sequence[str], rules: Rules) -> Program:
    """Forgets the tombstones of an attempt that was swept, at any age. attempts: those that may be on the list."""

    def swept(found: Objects) -> str:
        return "swept" if set(found.values()) == {"swept"} else "no"

    begin = "list" if rules.dead_before_tombstone else "forget"
    look = "outcome left?" if rules.forget_after_data else begin
    left = [
        row("outcome left?", get("commits", a), absent="folder left?", else_="end"),
        row("folder left?", listing("attempts", a), none=begin, some="end"),
    ]
    tombstones, fates = [delete("tombstones", a, id) for id in ids], [delete("fates", a, id) for id in ids]
    ops = [*tombstones, *fates] if rules.forget_tombstone_before_fate else [*fates, *tombstones]
    first = ("swept?", "outcome left?", "folder left?")
    return program(
        row("swept?", listing("fates", a, classify=swept), swept=look, no="end"),
        left if rules.forget_after_data else [],
        _add(a, attempts, rules, after="forget" if rules.dead_before_tombstone else "forgotten")
        if rules.dead_are_listed else row("list", Op("begin"), ok="forget"),
        in_turn("forget", ops, "forgotten" if rules.dead_before_tombstone else "list"),
        end("forgotten"),
    ).claiming(("swept", a, ids[0]), after=first)  # fmt: skip


def forgetter_of_aborted(a: str, attempts: Sequence[str], rules: Rules) -> Program:
    """Forgets an aborted outcome, at any age."""
    listed = rules.dead_are_listed and rules.aborted_are_listed
    look = "folder left?" if rules.forget_after_data else "list"
    return program(
        row("aborted?", get("commits", a), aborted=look, else_="end"),
        row("folder left?", listing("attempts", a), none="list", some="end"),
        _add(a, attempts, rules, after="forget") if listed else row("list", Op("begin"), ok="forget"),
        in_turn("forget", [delete("commits", a)], "forgotten"),
        end("forgotten"),
    ).claiming(("aborted", a), after=("aborted?",))


def forgetter_of_fate(a: str, id: str) -> Program:
    """Forgets the fate of a tombstone that was taken back and removed, at any age."""
    return program(
        row("taken back?", get("fates", a, id), **{"taken back": "tombstone left?", "else_": "end"}),
        row("tombstone left?", listing("tombstones", a, id), none="forget", some="end"),
        row("forget", delete("fates", a, id), ok="forgotten"),
        end("forgotten"),
    )


def _add(a: str, attempts: Sequence[str], rules: Rules, after: str) -> Iterator[Row]:
    """Create a version with `a`: the highest one, and `a`."""

    def highest(found: Objects) -> str:
        known = dead(found)
        return "listed" if a in known else f"add to version {highest_version(found)}, {_names(known)}"

    write = create if rules.version_is_create_only else lambda *key, value: Op("put", key, value)
    again = "list" if rules.versions_are_listed_again else after
    rows = []
    for number in range(_MOST_VERSIONS):
        for known in _subsets(attempts):
            value = tuple(sorted({*known, a} if rules.version_has_the_last_one else {a}))
            op = write("dead", str(number + 1), value=value)
            at = f"add to version {number}, {_names(known)}"
            rows.append(row(at, op, won=again, ok=again, exists="list", unknown="list"))
    yield row("list", listing("dead", classify=highest), listed=after, else_="end", **{one.at: one.at for one in rows})
    yield from rows


def _subsets(attempts: Sequence[str]) -> list[frozenset[str]]:
    found = [frozenset[str]()]
    for a in attempts:
        found += [known | {a} for known in found]
    return found


def _names(attempts: Iterable[str]) -> str:
    return "+".join(sorted(attempts)) or _NONE

"""The actors that delete, undelete and sweep, and those that hold: readers, pins, and time, which ends a lease."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.protocol.forgetting import look_at_the_dead
from tests.protocol.rules import Rules
from tests.protocol.saving import RANKS
from tests.protocol.table import (
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
    put,
    row,
)


def _holds(first: str, a: str, held: str, free: str, clock_is_wrong: bool = False) -> Iterator[Row]:
    """Pins, leases and marks are three listings; none of them may name the attempt."""

    def live(found: Objects) -> str:
        return "some" if "live" in found.values() and not clock_is_wrong else "none"

    yield row(first, listing("pins", a), some=held, none=f"{first} leases")
    yield row(f"{first} leases", listing("leases", a, classify=live), some=held, none=f"{first} marks")
    yield row(f"{first} marks", listing("references", a), some=held, none=free)


def _fate(at: str, a: str, id: str, wanted: str, rules: Rules, won: str, lost: str) -> list[Row]:
    """Create the fate of a tombstone, or obey the one that exists."""
    other = "swept" if wanted == "taken back" else "taken back"
    again = _after_fate(at, won, rules)
    return [
        row(at, create("fates", a, id, value=wanted), won=again, exists=f"{at}, read"),
        row(f"{at}, read", get("fates", a, id), **{wanted: again, other: lost, "absent": at, "unknown": at}),
        # The fate of a tombstone that was forgotten can be created a second time.
        row(f"{at}, tombstone left?", get("tombstones", a, id), absent=lost, else_=won),
    ]


def _after_fate(at: str, won: str, rules: Rules) -> str:
    return f"{at}, tombstone left?" if rules.tombstone_read_after_fate else won


def _remove(a: str, id: str, rules: Rules) -> list[Op]:
    """A tombstone was taken back. A key that is used again needs another fate."""
    tombstone = delete("tombstones", a, id)
    return [tombstone] if rules.own_tombstone_for_each_deletion else [tombstone, delete("fates", a, id)]


def deleter(a: str, id: str, rules: Rules) -> Program:
    """Hides a checkpoint, unless something holds it. `id` is the ULID of its tombstone."""
    again = "held now?" if rules.deleter_looks_after_its_tombstone else "hidden"
    return program(
        _holds("held?", a, held="end", free="hide"),
        row("hide", put("tombstones", a, id), ok=again),
        _holds("held now?", a, held="withdraw", free="hidden"),
        end("hidden", ("hidden", a, id)),
        _fate("withdraw", a, id, "taken back", rules, won="remove", lost="lost")
        if rules.withdrawal_needs_fate else row("withdraw", Op("begin"), ok="remove"),
        in_turn("remove", _remove(a, id, rules), "withdrawn"),
    )  # fmt: skip


def undeleter(a: str, ids: Sequence[str], rules: Rules) -> Program:
    """Pins a hidden checkpoint, decides about each tombstone that it finds, then removes these."""

    def found_ids(found: Objects) -> str:
        return "+".join(sorted(key[2] for key in found)) or "none"

    sets = [[ids[n] for n in range(len(ids)) if bits >> n & 1] for bits in range(1, 1 << len(ids))]
    rows: list[Row] = []
    for some in sets:
        which = "+".join(some)
        places = [*(f"take back {id} of {which}" for id in some), f"remove {which}"]
        for id, at, after in zip(some, places, places[1:], strict=False):
            rows += (
                _fate(at, a, id, "taken back", rules, won=after, lost="unpin")
                if rules.fate_decides
                else [row(at, get("tombstones", a, id), absent="unpin", else_=after)]
            )
        claim = ("undeleted", a, *some)
        rows += in_turn(places[-1], [op for id in some for op in _remove(a, id, rules)], f"undeleted {which}")
        rows.append(end(f"undeleted {which}", claim))
    starts = {"+".join(some): f"take back {some[0]} of {'+'.join(some)}" for some in sets}
    return program(
        row("pin", put("pins", a, "undeleted"), ok="tombstones"),
        row("tombstones", listing("tombstones", a, classify=found_ids), none="listed?", **starts),
        row("listed?", get("commits", a), committed="end", else_="unpin"),  # another undelete, or a sweep, was faster
        rows,
        row("unpin", delete("pins", a, "undeleted"), ok="sweep begun"),
    )


def sweeper(
    a: str, id: str, rules: Rules, ranks: Sequence[str] = RANKS, base: str = "", clock_is_wrong: bool = False
) -> Program:
    """Sweeps a checkpoint whose grace is over, by one tombstone. base: what it references, if anything."""
    if clock_is_wrong and rules.clock_is_probed:
        return program(row("probe the clock", Op("begin"), ok="end"))
    decided = ("swept", a, id)
    receipts = [delete("attempts", a, f"receipt {r}") for r in ranks]
    shards = [delete("attempts", a, f"shard {r}") for r in ranks]
    rest = [delete("attempts", a, "manifest"), *shards]
    data = [*receipts, *rest] if rules.receipts_deleted_first else [*rest, *receipts]
    ops = [delete("commits", a), *data]
    marks = [delete("references", base, a)] if base else []
    look = "held?" if rules.sweeper_looks_for_holds else "fate"
    return program(
        row("tombstone?", get("tombstones", a, id), absent="end", else_="fate?")
        if rules.tombstone_before_sweep else row("tombstone?", Op("begin"), ok="fate?"),
        row("fate?", get("fates", a, id),
            **{"absent": look, "swept": _after_fate("fate", "delete", rules), "taken back": "finish"})
        if rules.fate_decides else row("fate?", Op("begin"), ok=look),
        in_turn("finish", _remove(a, id, rules), "end"),  # the undelete died before it did this
        _holds("held?", a, held="end", free="fate", clock_is_wrong=clock_is_wrong),
        _fate("fate", a, id, "swept", rules, won="delete", lost="end")
        if rules.fate_decides else row("fate", get("tombstones", a, id), absent="end", else_="delete"),
        in_turn("delete", [*ops, *marks] if rules.marks_until_data_is_gone else [*marks, *ops], "swept", decided),
        end("swept", decided),
    )  # fmt: skip


def unmarker(base: str, by: str, rules: Rules) -> Program:
    """A collection removes marks of attempts whose folder is empty."""
    look = row("folder left?", listing("attempts", by), none="unmark", some="end")
    if not rules.marks_until_data_is_gone:
        look = row("folder left?", listing("tombstones", by), none="end", some="unmark")  # it is hidden
    return program(
        row("mark?", listing("references", base, by), some="folder left?", none="end"),
        look,
        row("unmark", delete("references", base, by), ok="end"),
    )


def reader(a: str, lease: str, rules: Rules, forgets: bool = False) -> Program:
    """Finds a checkpoint, takes a lease, looks for a tombstone again, and reads until it releases the lease."""
    forgets = forgets and rules.dead_are_listed
    again = forgets and rules.dead_read_after_lease
    look = "hidden now?" if rules.reader_looks_after_its_lease else "reading"
    order = ["committed?", "hidden?", *(["alive?"] if forgets else [])]
    if not rules.tombstones_listed_after_outcomes:
        order = ["hidden?", "committed?"]
    if forgets and not rules.dead_read_last:
        order = ["alive?", "committed?", "hidden?"]
    after = dict(zip(order, [*order[1:], "lease"], strict=True))
    looks = {
        "committed?": lambda then: row("committed?", get("commits", a), committed=then, else_="end"),
        "hidden?": lambda then: row("hidden?", listing("tombstones", a), none=then, some="end"),
        "alive?": lambda then: look_at_the_dead("alive?", a, yes="end", no=then),
    }
    return program(
        [looks[at](after[at]) for at in order],
        row("lease", put("leases", a, lease, value="live"), ok=look),
        row("hidden now?", listing("tombstones", a), none="dead now?" if again else "reading", some="release"),
        look_at_the_dead("dead now?", a, yes="release", no="reading"),
        row("reading", delete("leases", a, lease), ("reading", a, lease), ok="end"),
        row("release", delete("leases", a, lease), ok="end"),
    )


def pinner(a: str, rules: Rules, forgets: bool = False) -> Program:
    """Pins a checkpoint, unless it is being deleted."""
    again = forgets and rules.dead_are_listed and rules.dead_read_after_lease
    return program(
        row("pin", put("pins", a, "paper"), ok="hidden?" if rules.reader_looks_after_its_lease else "pinned"),
        row("hidden?", listing("tombstones", a), none="dead?" if again else "pinned", some="unpin"),
        look_at_the_dead("dead?", a, yes="unpin", no="pinned"),
        row("unpin", delete("pins", a, "paper"), ok="end"),
        end("pinned", ("pinned", a, "paper")),
    )


def time(a: str, lease: str) -> Program:
    """A lease expires at any moment."""
    return program(row("expire", Op("expire", ("leases", a, lease)), ok="expired"))

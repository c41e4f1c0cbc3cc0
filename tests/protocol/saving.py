"""The actors that save: ranks, committers, the collector of orphans, and trainers with a generation."""

from __future__ import annotations

from collections.abc import Sequence

from tests.protocol.forgetting import look_at_the_dead
from tests.protocol.rules import Rules
from tests.protocol.table import (
    Claim,
    Key,
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

RANKS = ("0", "1")


def late(after: Key, what: Program) -> Program:
    """The same program, which begins when an object is no longer there."""
    begin = row("late", listing(*after), none=what.start, some="late")
    return Program({**what.rows, "late": begin}, "late")


def rank(a: str, r: str, fails: bool = False) -> Program:
    """One rank's saver: its shard, then its receipt. One that fails aborts the attempt instead."""
    if fails:
        return program(
            row("abort", create("commits", a, value="aborted"), won="aborted", exists="end"),
            end("aborted", ("aborted", a)),
        )
    return program(
        row("shard", put("attempts", a, f"shard {r}"), ok="receipt"),
        row("receipt", put("attempts", a, f"receipt {r}"), ok="end"),
    )


def committer(
    a: str,
    rules: Rules,
    ranks: Sequence[str] = RANKS,
    base: str = "",
    wait: bool = False,
    forgets: bool = False,
    ready: bool = False,
) -> Program:
    """Commits an attempt whose receipts exist: the saver of rank 0 (which waits for them), the daemon, a new trainer.

    base: the attempt that it references, if any. forgets: whether the scenario has a list of the dead. ready: it
    has read the receipts.
    """

    def complete(found: Objects) -> str:
        return "complete" if {("attempts", a, f"receipt {r}") for r in ranks} <= found.keys() else "partial"

    first = "mark" if base else "commit"
    looks = forgets and rules.dead_are_listed and rules.dead_read_after_create
    return program(
        row("begin", Op("begin"), ok="manifest" if ready else "receipts"),
        row("receipts", listing("attempts", a, classify=complete),
            complete=f"read {ranks[0]}", partial="decided?" if wait else "end"),
        row("decided?", get("commits", a), absent="receipts", committed="dead?", aborted="aborted"),
        [row(f"read {r}", get("attempts", a, f"receipt {r}"), absent="end", else_=after)
         for r, after in zip(ranks, [*(f"read {r}" for r in ranks[1:]), "manifest"], strict=True)],
        row("manifest", create("attempts", a, "manifest"), won=first, exists="stored manifest"),
        row("stored manifest", get("attempts", a, "manifest"), absent="end", else_=first),
        _reference(a, base, rules, forgets) if base else [],
        _decide(a, rules),
        look_at_the_dead("dead?", a, yes="aborted", no="confirmed")
        if looks else row("dead?", Op("begin"), ok="confirmed"),
        end("confirmed", ("confirmed", a)),
        end("aborted", ("aborted", a)),
    )  # fmt: skip


def _reference(a: str, base: str, rules: Rules, forgets: bool) -> list[Row]:
    """The mark is durable before the look for a deletion of the base."""
    check = [
        row("base committed?", get("commits", base), committed="base hidden?", else_="reference lost"),
        row("base hidden?", listing("tombstones", base), none="base alive?", some="reference lost"),
        look_at_the_dead("base alive?", base, yes="reference lost", no="base checked")
        if forgets and rules.dead_are_listed and rules.base_may_be_dead
        else row("base alive?", Op("begin"), ok="base checked"),
    ]
    mark = put("references", base, a)
    if not rules.base_is_checked:
        return [row("mark", mark, ok="commit")]
    if rules.marks_before_check:
        return [row("mark", mark, ok="base committed?"), *check, row("base checked", Op("begin"), ok="commit")]
    return [row("mark", Op("begin"), ok="base committed?"), *check, row("base checked", mark, ok="commit")]


def _decide(a: str, rules: Rules) -> list[Row]:
    write = create if rules.outcome_is_create_only else put
    return [
        row("commit", write("commits", a, value="committed"), won="dead?", ok="dead?",
            exists="outcome" if rules.refusal_is_read_back else "dead?",
            unknown="outcome" if rules.lost_reply_is_read_back else "aborted"),
        row("outcome", get("commits", a), committed="dead?", aborted="aborted", absent="commit",
            unknown="commit"),
    ]  # fmt: skip


def collector(a: str, rules: Rules, ranks: Sequence[str] = RANKS) -> Program:
    """Aborts an orphan, at any age, and deletes its data. (It commits a complete one: that is a `committer`.)"""
    write = create if rules.outcome_is_create_only else put
    receipts = [delete("attempts", a, f"receipt {r}") for r in ranks]
    shards = [delete("attempts", a, f"shard {r}") for r in ranks]
    rest = [delete("attempts", a, "manifest"), *shards]
    data = [*receipts, *rest] if rules.receipts_deleted_first else [*rest, *receipts]
    decided = ("aborted", a)
    claims = [decided] if rules.abort_before_deleting else []
    return program(
        row("decided?", get("commits", a), committed="end", aborted="data",
            absent="abort" if rules.abort_before_deleting else "data"),
        row("abort", write("commits", a, value="aborted"), won="data", ok="data", exists="decided?",
            unknown="decided?"),
        in_turn("data", data, "collected", *claims),
        end("collected", decided),
    )  # fmt: skip


def trainer(name: str, steps: Sequence[str], rules: Rules, numbers: Sequence[str] = ("2", "3")) -> Program:
    """Begins the next generation of the run, then commits its steps; an attempt is GENERATION-STEP-TRAINER."""

    def newest(found: Objects) -> str:
        return max((key[1] for key in found), default="0")

    write = create if rules.generation_is_create_only else put
    after = {number: "begin " + str(int(number) + 1) for number in ("1", *numbers)}
    rows = [row("number", listing("generations", classify=newest), **after)]
    for number in numbers:
        rows.append(
            row(f"begin {number}", write("generations", number, value=name), won=f"save {number}", ok=f"save {number}",
                exists="number", unknown=f"mine {number}")
        )  # fmt: skip
        rows.append(row(f"mine {number}", get("generations", number), **{name: f"save {number}", "else_": "number"}))
        rows += saves(f"save {number}", [f"{number}-{step}-{name}" for step in steps], rules, number)
    return program(rows)


def saves(first: str, attempts: Sequence[str], rules: Rules, number: str) -> list[Row]:
    """The saves of one generation: data, a look for a newer generation, outcome."""

    def newer(found: Objects) -> str:
        return "newer" if any(key[1] > number for key in found) else "newest"

    rows: list[Row] = []
    done: list[Claim] = []
    for n, a in enumerate(attempts, 1):
        following = f"{first}, save {n + 1}" if n < len(attempts) else f"{first}, done"
        here = first if n == 1 else f"{first}, save {n}"
        rows += [
            row(here, put("attempts", a, "shard 0"), *done, ok=f"{here}, look"),
            row(f"{here}, look", listing("generations", classify=newer), *done,
                newest=f"{here}, commit", newer=f"{first}, superseded"),
            row(f"{here}, commit", create("commits", a, value="committed"), *done, won=following, exists=following),
        ]  # fmt: skip
        done.append(("confirmed", a))
    return [*rows, end(f"{first}, done", *done)]


def old_trainer(name: str, steps: Sequence[str], rules: Rules) -> Program:
    """A trainer whose generation is 1 already."""
    return program(saves("save 1", [f"1-{step}-{name}" for step in steps], rules, "1"))

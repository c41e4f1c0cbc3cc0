"""The actors. Each forgets, saves, deletes, or holds something from deletion.

Those that forget replace old tombstones and aborted outcomes by a list of the dead. Each version of the list is an
object that is created only if absent; the highest version counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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

_MOST_VERSIONS = 4
_NONE = "nothing"
THINNED = "thinned"
"""In the place of a thinning's id: the optimizer state is deleted."""


def highest_version(found: Objects) -> int:
    return max((int(key[1]) for key in found if key[0] == "dead"), default=0)


def dead(found: Objects) -> frozenset[str]:
    return frozenset(found.get(("dead", str(highest_version(found))), ()))


def look_at_the_dead(at: str, a: str, yes: str, no: str, *claims: Claim) -> Row:
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


RANKS = ("0", "1")


def late(after: Key, what: Program) -> Program:
    """The same program, which begins when an object is no longer there."""
    begin = row("late", listing(*after), none=what.start, some="late")
    return Program({**what.rows, "late": begin}, "late")


def rank(a: str, r: str, fails: bool = False, optimizer: bool = False) -> Program:
    """One rank's saver: its shard, or two, then its receipt. One that fails aborts the attempt instead."""
    if fails:
        return program(
            row("abort", create("commits", a, value="aborted"), won="aborted", exists="end"),
            end("aborted", ("aborted", a)),
        )
    return program(
        row("shard", put("attempts", a, f"shard {r}"), ok="second shard"),
        row("second shard", put("attempts", a, f"optimizer {r}") if optimizer else Op("begin"), ok="receipt"),
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
    earlier: str = "",
    optimizer: bool = False,
) -> Program:
    """Commits an attempt whose receipts exist: the saver of rank 0 (which waits for them), the daemon, a new trainer.

    base: the attempt that it references, if any. forgets: whether the scenario has a list of the dead. ready: it
    has read the receipts. earlier: the save of the step before it, which its receipt names. optimizer: it needs the
    optimizer state of `base`.
    """

    def complete(found: Objects) -> str:
        return "complete" if {("attempts", a, f"receipt {r}") for r in ranks} <= found.keys() else "partial"

    ends = bool(earlier) and rules.ends_earlier_saves
    first = "mark" if base else "end earlier" if ends else "commit"
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
        _reference(a, base, rules, forgets, optimizer) if base else [],
        row("end earlier", create("commits", earlier, value="aborted"), won="commit", exists="commit") if ends else [],
        _decide(a, rules),
        look_at_the_dead("dead?", a, yes="aborted", no="confirmed")
        if looks else row("dead?", Op("begin"), ok="confirmed"),
        end("confirmed", ("confirmed", a)),
        end("aborted", ("aborted", a)),
    )  # fmt: skip


def _reference(a: str, base: str, rules: Rules, forgets: bool, optimizer: bool = False) -> list[Row]:
    """The mark is durable before the look for a deletion of the base. optimizer: it needs its optimizer state."""
    looks = optimizer and rules.base_may_be_thinned
    check = [
        row("base committed?", get("commits", base), committed="base hidden?", else_="reference lost"),
        row("base hidden?", listing("tombstones", base), none="base thinned?", some="reference lost"),
        row("base thinned?", listing("thinnings", base), none="base alive?", some="reference lost")
        if looks
        else row("base thinned?", Op("begin"), ok="base alive?"),
        look_at_the_dead("base alive?", base, yes="reference lost", no="base checked")
        if forgets and rules.dead_are_listed and rules.base_may_be_dead
        else row("base alive?", Op("begin"), ok="base checked"),
    ]
    mark = put("references", base, a)
    if not rules.base_is_checked:
        return [row("mark", mark, ok="commit")]
    if rules.marks_before_check:
        own = optimizer and rules.optimizer_marks
        second = put("optimizer references", base, a) if own else Op("begin")
        marks = [row("mark", mark, ok="mark optimizer"), row("mark optimizer", second, ok="base committed?")]
        return [*marks, *check, row("base checked", Op("begin"), ok="commit")]
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


def _holds(
    first: str, a: str, held: str, free: str, clock_is_wrong: bool = False, reader: str = "", marks: str = "references"
) -> Iterator[Row]:
    """Pins, leases and marks are three listings; none of them may name the attempt. reader: whose mark does not count
    while it is hidden."""
    if reader:
        yield row(first, listing("tombstones", reader), some=f"{first} unread", none=f"{first} read")
        yield from _holds(f"{first} read", a, held, free, clock_is_wrong)
        unmarked = [one for one in _holds(f"{first} unread", a, held, free, clock_is_wrong) if "marks" not in one.at]
        yield from (Row(one.at, one.op, {**one.then, "none": one.then["none"].replace(f"{first} unread marks", free)})
                    for one in unmarked)  # fmt: skip
        return

    def live(found: Objects) -> str:
        return "some" if "live" in found.values() and not clock_is_wrong else "none"

    yield row(first, listing("pins", a), some=held, none=f"{first} leases")
    yield row(f"{first} leases", listing("leases", a, classify=live), some=held, none=f"{first} marks")
    yield row(f"{first} marks", listing(marks, a), some=held, none=free)


def _fate(
    at: str, a: str, id: str, wanted: str, rules: Rules, won: str, lost: str, tombstones: str = "tombstones"
) -> list[Row]:
    """Create the fate of a tombstone, or obey the one that exists."""
    other = "swept" if wanted == "taken back" else "taken back"
    again = _after_fate(at, won, rules)
    return [
        row(at, create("fates", a, id, value=wanted), won=again, exists=f"{at}, read"),
        row(f"{at}, read", get("fates", a, id), **{wanted: again, other: lost, "absent": at, "unknown": at}),
        # The fate of a tombstone that was forgotten can be created a second time.
        row(f"{at}, tombstone left?", get(tombstones, a, id), absent=lost, else_=won),
    ]


def _after_fate(at: str, won: str, rules: Rules) -> str:
    return f"{at}, tombstone left?" if rules.tombstone_read_after_fate else won


def _remove(a: str, id: str, rules: Rules) -> list[Op]:
    """A tombstone was taken back. A key that is used again needs another fate."""
    tombstone = delete("tombstones", a, id)
    return [tombstone] if rules.own_tombstone_for_each_deletion else [tombstone, delete("fates", a, id)]


def deleter(a: str, id: str, rules: Rules, reader: str = "") -> Program:
    """Hides a checkpoint, unless something holds it. `id` is the ULID of its tombstone. reader: see `_holds`."""
    again = "held now?" if rules.deleter_looks_after_its_tombstone else "hidden"
    return program(
        _holds("held?", a, held="end", free="hide", reader=reader),
        row("hide", put("tombstones", a, id), ok=again),
        _holds("held now?", a, held="withdraw", free="hidden", reader=reader),
        end("hidden", ("hidden", a, id)),
        _fate("withdraw", a, id, "taken back", rules, won="remove", lost="lost")
        if rules.withdrawal_needs_fate else row("withdraw", Op("begin"), ok="remove"),
        in_turn("remove", _remove(a, id, rules), "withdrawn"),
    )  # fmt: skip


def undeleter(a: str, ids: Sequence[str], rules: Rules, kind: str = "tombstones") -> Program:
    """Pins a hidden checkpoint, decides about each tombstone that it finds, then removes these. kind: the same for one
    that is being thinned."""
    thins = kind == "thinnings"

    def found_ids(found: Objects) -> str:
        return "+".join(sorted(key[2] for key in found if key[2] != THINNED)) or "none"

    sets = [[ids[n] for n in range(len(ids)) if bits >> n & 1] for bits in range(1, 1 << len(ids))]
    rows: list[Row] = []
    for some in sets:
        which = "+".join(some)
        looks = [f"thinned? {which}"] if thins and rules.thinned_read_after_fate else []
        places = [*(f"take back {id} of {which}" for id in some), *looks, f"remove {which}"]
        for id, at, after in zip(some, places, places[1:], strict=False):
            rows += (
                _fate(at, a, id, "taken back", rules, won=after, lost="unpin", tombstones=kind)
                if rules.fate_decides
                else [row(at, get(kind, a, id), absent="unpin", else_=after)]
            )
        if looks:
            rows.append(row(looks[0], get(kind, a, THINNED), absent=places[-1], else_="unpin"))
        claim = ("full again" if thins else "undeleted", a, *some)
        removals = [op for id in some for op in ([delete(kind, a, id)] if thins else _remove(a, id, rules))]
        rows += in_turn(places[-1], removals, f"undeleted {which}")
        rows.append(end(f"undeleted {which}", claim))
    starts = {"+".join(some): f"take back {some[0]} of {'+'.join(some)}" for some in sets}
    return program(
        row("pin", put("pins", a, "undeleted"), ok="tombstones"),
        row("tombstones", listing(kind, a, classify=found_ids), none="listed?", **starts),
        row("listed?", get("commits", a), committed="end", else_="unpin"),  # another undelete, or a sweep, was faster
        rows,
        row("unpin", delete("pins", a, "undeleted"), ok="sweep begun"),
    )


def sweeper(
    a: str, id: str, rules: Rules, ranks: Sequence[str] = RANKS, base: str = "", clock_is_wrong: bool = False,
    reader: str = "", thinnings: Sequence[str] = (),
) -> Program:  # fmt: skip
    """Sweeps a checkpoint whose grace is over, by one tombstone. base: what it references, if anything. reader: what
    references it. thinnings: what may be left of those."""
    if clock_is_wrong and rules.clock_is_probed:
        return program(row("probe the clock", Op("begin"), ok="end"))
    decided = ("swept", a, id)
    receipts = [delete("attempts", a, f"receipt {r}") for r in ranks]
    shards = [delete("attempts", a, f"shard {r}") for r in ranks]
    rest = [delete("attempts", a, "manifest"), *shards]
    data = [*receipts, *rest] if rules.receipts_deleted_first else [*rest, *receipts]
    left = (
        [*(delete("thinnings", a, id) for id in thinnings), delete("attempts", a, "optimizer 0")] if thinnings else []
    )
    ops = [*left[:-1], delete("commits", a), *data, *left[-1:]]
    marks = [delete("references", base, a)] if base else []
    look = "held?" if rules.sweeper_looks_for_holds else "fate"
    return program(
        row("tombstone?", get("tombstones", a, id), absent="end", else_="fate?")
        if rules.tombstone_before_sweep else row("tombstone?", Op("begin"), ok="fate?"),
        row("fate?", get("fates", a, id),
            **{"absent": look, "swept": _after_fate("fate", "delete", rules), "taken back": "finish"})
        if rules.fate_decides else row("fate?", Op("begin"), ok=look),
        in_turn("finish", _remove(a, id, rules), "end"),  # the undelete died before it did this
        _holds("held?", a, held="end", free="fate", clock_is_wrong=clock_is_wrong,
               reader="" if rules.hidden_readers_keep_data else reader),
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
    return program(row("expire", Op("expire", ("leases", a, lease)), ok="expired"))


def thinner(a: str, id: str, rules: Rules) -> Program:
    """Says that the optimizer state of a checkpoint will be deleted, unless something holds it."""
    marks = "optimizer references"
    again = "held now?" if rules.deleter_looks_after_its_tombstone else "thinning"
    return program(
        _holds("held?", a, held="end", free="thin", marks=marks),
        row("thin", put("thinnings", a, id), ok=again),
        _holds("held now?", a, held="withdraw", free="thinning", marks=marks),
        end("thinning"),
        _fate("withdraw", a, id, "taken back", rules, won="thinned?", lost="lost", tombstones="thinnings"),
        row("thinned?", get("thinnings", a, THINNED), absent="remove", else_="lost"),
        row("remove", delete("thinnings", a, id), ok="withdrawn"),
    )


def thinning_sweeper(a: str, id: str, rules: Rules) -> Program:
    """Deletes the optimizer state of a checkpoint, by one thinning."""
    look = "held?" if rules.sweeper_looks_for_holds else "fate"
    ops = [put("thinnings", a, THINNED), delete("thinnings", a, id)]
    decided = ("optimizer swept", a, id)
    return program(
        row("thinning?", get("thinnings", a, id), absent="end", else_="fate?"),
        row("fate?", get("fates", a, id),
            **{"absent": look, "swept": "fate, tombstone left?", "taken back": "finish"}),
        row("finish", delete("thinnings", a, id), ok="end"),
        _holds("held?", a, held="end", free="fate", marks="optimizer references"),
        _fate("fate", a, id, "swept", rules, won="delete", lost="end", tombstones="thinnings"),
        row("delete", delete("attempts", a, "optimizer 0"), decided, ok="state"),
        in_turn("state", ops if rules.thinned_before_thinning else ops[::-1], "swept", decided),
        end("swept", decided),
    )  # fmt: skip


def forgetter_of_thinning(a: str, id: str) -> Program:
    """Forgets the fate of a thinning whose tombstone is removed, at any age."""
    return program(
        row("decided?", get("fates", a, id), absent="end", else_="thinning left?"),
        row("thinning left?", listing("thinnings", a, id), none="forget", some="end"),
        row("forget", delete("fates", a, id), ok="forgotten"),
        end("forgotten"),
    )


def resumer(a: str, lease: str, rules: Rules) -> Program:
    """Finds a full checkpoint, takes a lease, looks again, and reads all of it until it releases the lease."""
    look = "thinned now?" if rules.resumer_looks_after_its_lease else "resuming"
    return program(
        row("committed?", get("commits", a), committed="hidden?", else_="end"),
        row("hidden?", listing("tombstones", a), none="thinned?", some="end"),
        row("thinned?", listing("thinnings", a), none="lease", some="end"),
        row("lease", put("leases", a, lease, value="live"), ok="hidden now?"),
        row("hidden now?", listing("tombstones", a), none=look, some="release"),
        row("thinned now?", listing("thinnings", a), none="resuming", some="release"),
        row("resuming", delete("leases", a, lease), ("resuming", a, lease), ("reading", a, lease), ok="end"),
        row("release", delete("leases", a, lease), ok="end"),
    )

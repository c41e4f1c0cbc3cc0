"""The scenarios that are explored: a few actors, one to three attempts, and what each checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.protocol.actors import (
    cleaner,
    collector,
    committer,
    deleter,
    forgetter,
    forgetter_of_aborted,
    forgetter_of_fate,
    forgetter_of_thinning,
    late,
    old_trainer,
    pinner,
    rank,
    reader,
    resumer,
    sweeper,
    thinner,
    thinning_sweeper,
    time,
    trainer,
    trimmer,
    undeleter,
    unmarker,
)
from tests.protocol.explore import Explored, Scenario, explore
from tests.protocol.invariants import Invariants
from tests.protocol.rules import Rules
from tests.protocol.table import Key, Op, Program, Value, delete

ONE = ("0",)
Actors = Callable[[Rules], Mapping[str, Program]]


@dataclass(frozen=True)
class Case:
    """A scenario for any rules."""

    actors: Actors
    shards: Mapping[str, Sequence[str]]
    """The attempts, and the ranks of each."""
    store: Mapping[Key, Value] = field(default_factory=dict)
    references: Mapping[str, str] = field(default_factory=dict)
    earlier: Mapping[str, str] = field(default_factory=dict)
    optimizers: Mapping[str, str] = field(default_factory=dict)
    """See Invariants."""
    paged: bool = False
    large: bool = False
    """Explored only if CKPTD_PROTOCOL=large."""

    def explore(self, name: str, rules: Rules) -> Explored:
        """All states under these rules, or those up to the first violation."""
        scenario = Scenario(name, self.actors(rules), self.store, self.paged)
        check = Invariants(self.shards, self.references, not rules.numbered_generations, self.earlier, self.optimizers)
        return explore(scenario, check)


def stored(a: str, ranks: Sequence[str] = ONE, outcome: str = "committed") -> dict[Key, Value]:
    """All objects of an attempt; without an outcome if it is empty."""
    names = [f"{kind} {r}" for r in ranks for kind in ("shard", "receipt")]
    objects: dict[Key, Value] = {("attempts", a, name): "" for name in names}
    if outcome:
        objects |= {("attempts", a, "manifest"): "", ("commits", a): outcome}
    return objects


def hidden(a: str, id: str, fate: str = "") -> dict[Key, Value]:
    objects: dict[Key, Value] = {("tombstones", a, id): ""}
    return objects | ({("fates", a, id): fate} if fate else {})


def _without(name: str, actors: Mapping[str, Program]) -> Mapping[str, Program]:
    return {other: program for other, program in actors.items() if other != name}


def leftovers(a: str) -> list[Op]:
    return [delete("commits", a), delete("attempts", a, "manifest")]


def _repeats(rules: Rules) -> Mapping[str, Program]:
    """Two saves of one step; a slow rank, a daemon and the next trainer commit them in any order."""
    first, last = committer("a", rules, ONE), committer("b", rules, ONE, earlier="a")
    return {
        "saver of a": first, "saver of b": last, "daemon": last, "trainer": first,
        "collector": collector("a", rules, ONE),
    }  # fmt: skip


def _commit(rules: Rules) -> Mapping[str, Program]:
    saver, daemon = committer("a", rules, wait=True), committer("a", rules)
    return {
        "rank 0": rank("a", "0"), "rank 1": rank("a", "1"), "saver": saver, "daemon": daemon, "trainer": daemon,
        "collector": collector("a", rules),
    }  # fmt: skip


def _two_deletions(rules: Rules) -> Mapping[str, Program]:
    second = "u" if rules.own_tombstone_for_each_deletion else "t"
    both = ["t", "u"] if rules.own_tombstone_for_each_deletion else ["t"]
    return {
        "deleter": deleter("a", "t", rules), "second deleter": deleter("a", second, rules),
        "undeleter": undeleter("a", both, rules), "sweeper": sweeper("a", "t", rules, ONE),
        "second sweeper": sweeper("a", second, rules, ONE),
    }  # fmt: skip


def _two_deletions_and_reader(rules: Rules) -> Mapping[str, Program]:
    return {
        "deleter": deleter("a", "t", rules), "second deleter": deleter("a", "u", rules),
        "sweeper": sweeper("a", "t", rules, ONE), "second sweeper": sweeper("a", "u", rules, ONE),
        "reader": reader("a", "l", rules),
    }  # fmt: skip


def _half_a_deletion(rules: Rules) -> Mapping[str, Program]:
    first = "receipt 0" if rules.receipts_deleted_first else "shard 0"
    return {
        "collector": collector("a", rules, ONE), "forgetter": forgetter_of_aborted("a", "a", rules),
        "roll-forward": late(("attempts", "a", first), committer("a", rules, ONE, forgets=True)),
    }  # fmt: skip


def _reference(rules: Rules) -> Mapping[str, Program]:
    return {
        "saver": committer("b", rules, ONE, base="a"), "daemon": committer("b", rules, ONE, base="a"),
        "deleter": deleter("a", "t", rules), "sweeper": sweeper("a", "t", rules, ONE),
        "collector": collector("b", rules, ONE), "unmarker": unmarker("a", "b", rules),
    }  # fmt: skip


def _delete_reference(rules: Rules) -> Mapping[str, Program]:
    return {
        "deleter of b": deleter("b", "u", rules), "sweeper of b": sweeper("b", "u", rules, ONE, base="a"),
        "undeleter of b": undeleter("b", ["u"], rules), "deleter": deleter("a", "t", rules, reader="b"),
        "sweeper": sweeper("a", "t", rules, ONE, reader="b"), "unmarker": unmarker("a", "b", rules),
    }  # fmt: skip


_UNDECIDED_ON_A = stored("a") | stored("b", outcome="")
_B_REFERENCES_A = {**stored("a"), **stored("b"), ("references", "a", "b"): ""}
_A = {"a": ONE}
_AB = {"a": ONE, "b": ONE}
_NAMES = [f"{g}-{s}-{t}" for g in "123" for s, t in ("4x", "5x", "3y", "2z")]


def full(*attempts: str) -> dict[Key, Value]:
    """With optimizer state of their own."""
    objects: dict[Key, Value] = {("attempts", a, "optimizer 0"): "" for a in attempts}
    for a in attempts:
        objects |= stored(a)
    return objects


_B_NEEDS_A = full("a") | stored("b", outcome="") | {("attempts", "b", "optimizer 0"): ""}


def _thin_reference(rules: Rules) -> Mapping[str, Program]:
    saver = committer("b", rules, ONE, base="a", optimizer=True)
    return {
        "saver": saver, "thinner": thinner("a", "t", rules), "sweeper": thinning_sweeper("a", "t", rules),
    }  # fmt: skip


CASES: dict[str, Case] = {
    "commit": Case(_commit, {"a": ("0", "1")}),
    "commit, listings in two pages": Case(
        lambda rules: _without("trainer", _commit(rules)), {"a": ("0", "1")}, paged=True),
    "commit, three committers, listings in two pages": Case(_commit, {"a": ("0", "1")}, paged=True, large=True),
    "repeated saves": Case(
        _repeats, {"a": ONE, "b": ONE}, {**stored("a", outcome=""), **stored("b", outcome="")}, earlier={"b": "a"}),
    "commit, failing rank": Case(lambda rules: {
        "saver": committer("a", rules, ONE, wait=True), "daemon": committer("a", rules, ONE),
        "rank 0": rank("a", "0"), "failing rank": rank("a", "1", fails=True), "collector": collector("a", rules, ONE),
        "other collector": collector("a", rules, ONE),
    }, _A),
    "delete against holds": Case(lambda rules: {
        "deleter": deleter("a", "t", rules), "sweeper": sweeper("a", "t", rules, ONE),
        "reader": reader("a", "l", rules), "time": time("a", "l"), "pinner": pinner("a", rules),
        "slow committer": committer("a", rules, ONE),
    }, _A, stored("a")),
    "two deletions and an undelete": Case(_two_deletions, _A, stored("a")),
    "two deletions and a reader": Case(_two_deletions_and_reader, _A, stored("a")),
    "two deletions and a reader, listings in two pages": Case(
        _two_deletions_and_reader, _A, stored("a"), paged=True, large=True),
    "wrong clock": Case(lambda rules: {
        "deleter": deleter("a", "t", rules), "reader": reader("a", "l", rules), "time": time("a", "l"),
        "sweeper": sweeper("a", "t", rules, ONE), "wrong clock": sweeper("a", "t", rules, ONE, clock_is_wrong=True),
    }, _A, stored("a")),
    "sleeping committer": Case(lambda rules: {
        "committer": committer("a", rules, ONE, forgets=True), "sweeper": sweeper("a", "t", rules, ONE),
        "forgetter": forgetter("a", ["t"], "a", rules), "reader": reader("a", "l", rules, forgets=True),
    }, _A, stored("a") | hidden("a", "t")),
    "sleeping reader": Case(lambda rules: {
        "deleter": deleter("a", "t", rules), "sweeper": sweeper("a", "t", rules, ONE),
        "forgetter": forgetter("a", ["t"], "a", rules), "reader": reader("a", "l", rules, forgets=True),
        "pinner": pinner("a", rules, forgets=True),
    }, _A, stored("a")),
    "sleeping committer of an orphan": Case(lambda rules: {
        "rank": rank("a", "0"), "committer": committer("a", rules, ONE, forgets=True),
        "collector": collector("a", rules, ONE), "forgetter": forgetter_of_aborted("a", "a", rules),
        "reader": reader("a", "l", rules, forgets=True), "cleaner": cleaner("a", leftovers("a")),
    }, _A),
    "forgetters": Case(lambda rules: {
        "forgetter of a": forgetter("a", ["t"], "abc", rules), "forgetter of b": forgetter("b", ["u"], "abc", rules),
        "forgetter of c": forgetter("c", ["v"], "abc", rules), "trimmer": trimmer(1),
        "zombie": committer("a", rules, ONE, forgets=True, ready=True),
    }, dict.fromkeys("abc", ONE),
        hidden("a", "t", "swept") | hidden("b", "u", "swept") | hidden("c", "v", "swept")),
    "crashed sweep": Case(lambda rules: {
        "sweeper": sweeper("a", "t", rules, ONE), "forgetter": forgetter("a", ["t"], "a", rules),
    }, _A, stored("a") | hidden("a", "t")),
    "half a deletion": Case(_half_a_deletion, _A, stored("a", outcome="")),
    "sleeping sweeper": Case(lambda rules: {
        "sweeper": sweeper("a", "t", rules, ONE), "undeleter": undeleter("a", ["t"], rules),
        "forgetter of fates": forgetter_of_fate("a", "t"), "forgetter": forgetter("a", ["t"], "a", rules),
        "other sweeper": sweeper("a", "t", rules, ONE),
    }, _A, stored("a") | hidden("a", "t")),
    "reference": Case(lambda rules: _without("daemon", _reference(rules)), _AB, _UNDECIDED_ON_A, {"b": "a"}),
    "reference, two committers": Case(_reference, _AB, _UNDECIDED_ON_A, {"b": "a"}, paged=True, large=True),
    "delete a reference, listings in two pages": Case(
        _delete_reference, _AB, _B_REFERENCES_A, {"b": "a"}, paged=True, large=True),
    "two deletions and an undelete, listings in two pages": Case(
        _two_deletions, _A, stored("a"), paged=True, large=True),
    "delete a reference": Case(_delete_reference, _AB, _B_REFERENCES_A, {"b": "a"}),
    "reference to a zombie": Case(lambda rules: {
        "zombie": committer("a", rules, ONE, forgets=True), "forgetter": forgetter("a", ["t"], "ab", rules),
        "saver": committer("b", rules, ONE, base="a", forgets=True), "sweeper": sweeper("a", "t", rules, ONE),
    }, _AB, hidden("a", "t") | _UNDECIDED_ON_A, {"b": "a"}),
    "thin against holds": Case(lambda rules: {
        "thinner": thinner("a", "t", rules), "sweeper": thinning_sweeper("a", "t", rules),
        "resumer": resumer("a", "l", rules), "time": time("a", "l"), "pinner": pinner("a", rules),
    }, _A, full("a"), optimizers={"a": ""}),
    "thin and undelete": Case(lambda rules: {
        "sweeper": thinning_sweeper("a", "t", rules), "second sweeper": thinning_sweeper("a", "t", rules),
        "undeleter": undeleter("a", ["t"], rules, "thinnings"), "forgetter": forgetter_of_thinning("a", "t"),
        "resumer": resumer("a", "l", rules),
    }, _A, full("a") | {("thinnings", "a", "t"): ""}, optimizers={"a": ""}),
    "two thinnings": Case(lambda rules: {
        "sweeper": thinning_sweeper("a", "t", rules), "second sweeper": thinning_sweeper("a", "u", rules),
        "undeleter": undeleter("a", ["t", "u"], rules, "thinnings"), "forgetter": forgetter_of_thinning("a", "t"),
    }, _A, full("a") | {("thinnings", "a", "t"): "", ("thinnings", "a", "u"): ""}, optimizers={"a": ""}),
    "thin and delete": Case(lambda rules: {
        "thinner": thinner("a", "u", rules), "thinning sweeper": thinning_sweeper("a", "u", rules),
        "sweeper": sweeper("a", "t", rules, ONE, thinnings=["u", "thinned"]), "deleter": deleter("a", "t", rules),
    }, _A, full("a"), optimizers={"a": ""}),
    "thin a reference": Case(_thin_reference, _AB, _B_NEEDS_A, {"b": "a"}, optimizers={"a": "", "b": "a"}),
    "generations": Case(lambda rules: {
        "old job": old_trainer("x", ["4", "5"], rules), "successor": trainer("y", ["3"], rules),
        "second successor": trainer("z", ["2"], rules),
    }, dict.fromkeys(_NAMES, ONE), {("generations", "1"): "x"}),
}  # fmt: skip

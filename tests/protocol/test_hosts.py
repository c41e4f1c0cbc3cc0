"""The local tier of hosts that share nothing (docs/decisions/0045): every order of saves, losses and new jobs.

Hosts 0, 1, 2 have a job of one rank each, whose rank 0 decides, and one copy of everything. It saves attempt a. A
second job may begin at any time on the hosts that are left and a new one, in another order, while processes of the
first still run; it saves b, which is an earlier step. A third one begins on all hosts that are left. Hosts vanish with
their disks and their processes at any moment. A write to a host that vanished fails. A partition is a host that a job
does not reach. The remote store has an older checkpoint.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product

import pytest

AGREE = "an attempt is reported as committed or as aborted, not both"
KEPT = "a job resumes from what was reported as committed before it began, while no more hosts than replicas are lost"
WHOLE = "a checkpoint that a job resumes from has all of its shards"
LATEST = "a job resumes from the newest generation"
SAID = "a job that cannot see what was reported as committed fails, or says that hosts are lost"

LARGE = os.environ.get("CKPTD_PROTOCOL") == "large"
MOST_LOST = 2 if LARGE else 1
REPLICAS = 1
HOSTS = (0, 1, 2, 3)
"""The last one is new."""
FIRST, SECOND = (0, 1, 2), (2, 3, 0)
"""The hosts of the first and of the second job: the first one of each decides."""


@dataclass(frozen=True)
class Rules:
    """What the implementation does. Each can be left out."""

    shards_are_copied: bool = True
    """A receipt follows the copy of the shard."""
    outcome_is_copied: bool = True
    """A commit is reported after its copy."""
    loser_copies: bool = True
    """A create that loses copies the decision of the winner before it is reported."""
    copies_are_of_the_winner: bool = True
    decider_is_one: bool = True
    """All create at the first host of the job; otherwise each at its own."""
    documents_meet: bool = True
    """The first hosts of a job copy the documents that they lack."""
    generations_order: bool = True
    """The newest generation counts; otherwise the highest step."""
    lost_are_counted: bool = True


Objects = frozenset[tuple[int, str, str]]
"""Host, name and content."""


@dataclass(frozen=True)
class State:
    """Everything that decides what may happen next."""

    objects: Objects = frozenset()
    gone: frozenset[int] = frozenset()
    places: tuple[int, ...] = (0,) * 8
    """Of the actors: three ranks, committer, second committer, failing rank, second job, third job."""
    said: frozenset[str] = frozenset()
    """Reports: "a committed", "second from a", ..."""

    def at(self, host: int, name: str) -> str | None:
        return next((content for where, key, content in self.objects if (where, key) == (host, name)), None)

    def has(self, host: int, name: str) -> bool:
        return self.at(host, name) is not None

    def put(self, host: int, name: str, content: str = "") -> State | None:
        """None: the host does not answer."""
        if host in self.gone:
            return None
        others = {one for one in self.objects if one[:2] != (host, name)}
        return replace(self, objects=frozenset(others | {(host, name, content)}))

    def move(self, actor: int, place: int, *said: str) -> State:
        places = (*self.places[:actor], place, *self.places[actor + 1 :])
        return replace(self, places=places, said=self.said | set(said))


RANKS = (0, 1, 2)
COMMITTER, OTHER_COMMITTER, FAILING, SECOND_JOB, THIRD_JOB = 3, 4, 5, 6, 7
ENDED = 99


def rank(state: State, own: int, rules: Rules) -> Iterator[State]:
    """Its shard on its own host and on the next one, in one step, then its receipt."""
    place = state.places[own]
    if own in state.gone or place == 2:
        return
    with_shard = state.put(own, f"shard {own}") if not place else state
    assert with_shard is not None
    copied = with_shard.put((own + 1) % 3, f"shard {own}") if not place and rules.shards_are_copied else with_shard
    after = copied or with_shard.move(own, place, "warned")  # no host takes it: the save goes on, and says so
    if place and (after := after.put(FIRST[0], f"receipt {own}") or state) is state:
        return
    yield after.move(own, place + 1)


def decide(state: State, actor: int, host: int, proposal: str, rules: Rules) -> Iterator[State]:
    """Create the outcome at the first host, copy what is there to the next one, then report it."""
    decider = FIRST[0] if rules.decider_is_one else host
    place, decided = state.places[actor], state.at(decider, "a")
    if host in state.gone or decider in state.gone:
        return
    match place:
        case 0 if proposal == "aborted" or all(state.has(FIRST[0], f"receipt {number}") for number in RANKS):
            if decided is None:
                done = state.put(decider, "a", proposal)
                assert done is not None
                yield done.move(actor, 1)
            else:
                yield state.move(actor, 1 if rules.loser_copies else 2)
        case 1:
            assert decided is not None
            copied = decided if rules.copies_are_of_the_winner else proposal
            if rules.outcome_is_copied and (done := state.put(FIRST[1], "a", copied)) is not None:
                yield done.move(actor, 2)
            else:
                yield state.move(actor, 2, *(["warned"] if rules.outcome_is_copied else []))
        case 2:
            assert decided is not None
            late = " late" if state.places[SECOND_JOB] else ""
            yield state.move(actor, ENDED, f"a {decided}{late}")


def meet(state: State, holders: Sequence[int], reached: Sequence[int]) -> State:
    """The holders copy the outcomes that they lack."""
    after = state
    for host, key in product(holders, ("a", "b")):
        found = next((at for other in reached if (at := state.at(other, key)) is not None), None)
        if found is not None and not after.has(host, key):
            after = after.put(host, key, found) or after
    return after


def begin(state: State, actor: int, name: str, hosts: tuple[int, ...], rules: Rules, apart: bool) -> Iterator[State]:
    """A job begins: its first hosts copy documents from all that they reach, and it resumes. apart: it does not reach
    host 1, which has not vanished. Its own save, b, is one step."""
    here = [host for host in hosts if host not in state.gone]
    reached = [host for host in HOSTS if host not in state.gone and not (apart and host == 1)]
    if len(here) < 2:
        return
    holders = here[: REPLICAS + 1]
    after = meet(state, holders, reached) if rules.documents_meet else state
    outcomes = {key: after.at(holders[0], key) or after.at(holders[1], key) for key in ("a", "b")}
    whole = {
        "a": all(any(state.has(host, f"shard {number}") for host in reached) for number in RANKS),
        "b": any(state.has(host, "shard of b") for host in reached),
    }
    # a is step 2 of generation 1; b is step 1 of generation 2.
    order = ("b", "a") if rules.generations_order else ("a", "b")
    usable = [key for key in order if outcomes[key] == "committed" and whole[key]]
    before = FIRST if name == "second" else SECOND
    lost = [host for host in before if host not in reached]
    said = [f"{name} from {usable[0] if usable else 'the remote store'}"]
    if rules.lost_are_counted and len(lost) > REPLICAS:
        said.append(f"{name} says that hosts are lost")
    if any(outcomes[key] == "committed" and not whole[key] for key in ("a", "b")):
        said.append(f"{name} says that shards are lost")
    after = after.move(actor, 1, *said, *([f"{name} is apart"] if apart else []))
    yield after
    if name == "second":
        saved: State | None = after
        for host in holders:
            for key, content in (("shard of b", ""), ("b", "committed")):
                saved = saved and saved.put(host, key, content)
        if saved is not None:
            yield saved.move(actor, 1, "b committed", *(["second after a"] if usable[:1] == ["a"] else []))


def lose(state: State) -> Iterator[State]:
    if len(state.gone) < MOST_LOST:
        for host in HOSTS:
            if host not in state.gone:
                left = frozenset(one for one in state.objects if one[0] != host)
                yield replace(state, objects=left, gone=state.gone | {host})


def steps(state: State, rules: Rules) -> Iterator[State]:
    for own in RANKS:
        yield from rank(state, own, rules)
    yield from decide(state, COMMITTER, 0, "committed", rules)
    yield from decide(state, OTHER_COMMITTER, 1, "committed", rules)
    yield from decide(state, FAILING, 2, "aborted", rules)
    if not state.places[SECOND_JOB]:
        for apart in (False, True):
            yield from begin(state, SECOND_JOB, "second", SECOND, rules, apart)
    elif not state.places[THIRD_JOB]:
        yield from begin(state, THIRD_JOB, "third", (1, 3, 2, 0), rules, apart=False)
    yield from lose(state)


def broken(before: State, after: State) -> str | None:
    """The invariant that a step breaks."""
    if {one.split()[1] for one in after.said if one.startswith("a ")} == {"committed", "aborted"}:
        return AGREE
    new = after.said - before.said
    for name in ("second", "third"):
        source = next((one.removeprefix(f"{name} from ") for one in new if one.startswith(f"{name} from ")), None)
        if source is None:
            continue
        says = any(one.startswith(f"{name} says") for one in after.said)
        confirmed = {key for key in ("a", "b") if f"{key} committed" in before.said}
        b_is_left = any(before.at(host, "b") == "committed" for host in HOSTS) and any(
            before.has(host, "shard of b") for host in HOSTS
        )
        if name == "third" and b_is_left and source == "a":
            return LATEST
        newest = "b" if "b" in confirmed and name == "third" else "a" if "a" in confirmed else None
        if name == "third" and newest == "a" and any(one.startswith("second says") for one in before.said):
            newest = None  # the second job has left it behind, and has said so
        if source not in (newest, "b") and newest is not None:
            if len(before.gone) <= REPLICAS and f"{name} is apart" not in after.said and "warned" not in before.said:
                return KEPT
            if not says and "warned" not in before.said:
                return SAID
        shards = {"a": [f"shard {number}" for number in RANKS], "b": ["shard of b"]}.get(source, [])
        if any(not any(before.has(host, shard) for host in HOSTS) for shard in shards):
            return WHOLE
    return None


@cache
def explored(*without: str) -> tuple[int, str | None]:
    """The number of states, and the first invariant that is broken."""
    rules = replace(Rules(), **dict.fromkeys(without, False))
    first = State()
    seen, queue = {first}, deque([first])
    while queue:
        state = queue.popleft()
        for after in steps(state, rules):
            if (found := broken(state, after)) is not None:
                return len(seen), found
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return len(seen), None


FOUND = {
    "shards_are_copied": KEPT,
    "outcome_is_copied": KEPT,
    "loser_copies": KEPT,
    "copies_are_of_the_winner": KEPT,
    "decider_is_one": SAID,
    "documents_meet": KEPT,
    "generations_order": LATEST,
    "lost_are_counted": SAID,
}


def test_the_invariants_hold_in_every_state() -> None:
    states, found = explored()
    print(f"\n{states} states")
    assert found is None
    assert states > 10_000


@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)] if LARGE else ["outcome_is_copied"])
def test_a_rule_that_is_left_out_is_missed(rule: str) -> None:
    assert explored(rule)[1] == FOUND[rule]

"""Breadth-first search through all orders in which the actors of a scenario can act.

A state is the set of objects in the store, as the bits of a number, and the row at which each actor is. A crash, or an
actor that sleeps for weeks, needs no step: it is an actor that does not act again, or not yet. A write whose reply is
lost is a step that has its effect. Actors with the same table are interchangeable: states that differ only by their
order count once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.protocol.table import Claim, Key, Op, Program, Row, Value

State = tuple[int, ...]
"""The objects in the store, then the row of each actor."""
Pair = tuple[Key, Value]


@dataclass(frozen=True)
class Scenario:
    """Actors, and what is in the store before they act."""

    name: str
    actors: Mapping[str, Program]
    store: Mapping[Key, Value] = field(default_factory=dict)
    paged: bool = False
    """Each listing with more than one object may take two requests, with any number of objects in the first one."""


@dataclass(frozen=True)
class Violation:
    """An invariant that does not hold, and the shortest way there."""

    invariant: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        steps = "\n".join(f"  {number}. {step}" for number, step in enumerate(self.trace, 1))
        return f"{self.invariant}, after {len(self.trace)} steps:\n{steps}"


@dataclass(frozen=True)
class Explored:
    """All states that a scenario can reach, or those up to the first violation."""

    states: int
    steps: int
    reached: frozenset[str]
    """`ACTOR: ROW` for each row that an actor was at."""
    violation: Violation | None = None


Check = Callable[[Mapping[Key, Value], Sequence[Claim]], str | None]
"""The invariant that objects and claims violate; None if all of them hold."""


def explore(scenario: Scenario, check: Check, most_states: int = 5_000_000) -> Explored:
    """Visit every reachable state once, nearest first."""
    machine = _Machine(scenario)
    first = machine.first()
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    queue, steps = deque([first]), 0
    checked = _Checked(machine, check)
    while queue:
        state = queue.popleft()
        if broken := checked(state):
            trace = tuple(_trace(came_from, state))
            return Explored(len(came_from), steps, machine.reached(came_from), Violation(broken, trace))
        for following, what in machine.steps(state):
            steps += 1
            if following not in came_from:
                came_from[following] = (state, what)
                queue.append(following)
        if len(came_from) > most_states:
            raise AssertionError(f"{scenario.name} has more than {most_states} states")
    return Explored(len(came_from), steps, machine.reached(came_from))


def _trace(came_from: Mapping[State, tuple[State, str] | None], state: State) -> list[str]:
    trace: list[str] = []
    while (before := came_from[state]) is not None:
        state, what = before
        trace.append(what)
    return trace[::-1]


class _Checked:
    """Remembers the verdict about each combination of objects and claims."""

    def __init__(self, machine: _Machine, check: Check) -> None:
        self._machine = machine
        self._check = check
        self._claims: dict[State, tuple[Claim, ...]] = {}
        self._verdicts: dict[tuple[int, tuple[Claim, ...]], str | None] = {}

    def __call__(self, state: State) -> str | None:
        places = state[1:]
        claims = self._claims.get(places)
        if claims is None:
            claims = self._claims.setdefault(places, self._machine.claims(places))
        known = (state[0], claims)
        if known not in self._verdicts:
            self._verdicts[known] = self._check(self._machine.objects(state[0]), claims)
        return self._verdicts[known]


@dataclass(frozen=True)
class _Page:
    """A listing that has returned its first page and will continue after it."""

    row: str
    after: int
    found: int


class _Machine:
    """A scenario with objects as bits and rows as numbers."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._programs = list(scenario.actors.values())
        self._names = list(scenario.actors)
        self._pairs = sorted(_universe(scenario), key=repr)
        self._bits = {pair: 1 << number for number, pair in enumerate(self._pairs)}
        self._masks: dict[Key, int] = {}
        self._places: list[dict[str | _Page, int]] = [{} for _ in self._programs]
        self._at: list[list[str | _Page]] = [[] for _ in self._programs]
        self._replies: dict[tuple[int, int, int], list[tuple[int, int, str]]] = {}
        alike: dict[Program, list[int]] = {}
        for number, one in enumerate(self._programs):
            alike.setdefault(one, []).append(number + 1)
        self._alike = [numbers for numbers in alike.values() if len(numbers) > 1]
        for numbers in self._alike:  # one numbering of rows for interchangeable actors
            for number in numbers[1:]:
                self._places[number - 1], self._at[number - 1] = self._places[numbers[0] - 1], self._at[numbers[0] - 1]

    def first(self) -> State:
        store = sum(self._bits[pair] for pair in self._scenario.store.items())
        return (store, *(self._place(actor, one.start) for actor, one in enumerate(self._programs)))

    def objects(self, store: int) -> dict[Key, Value]:
        return {key: value for number, (key, value) in enumerate(self._pairs) if store >> number & 1}

    def claims(self, places: State) -> tuple[Claim, ...]:
        found: list[Claim] = []
        for actor, place in enumerate(places):
            at = self._at[actor][place]
            found += self._programs[actor].claims(at.row if isinstance(at, _Page) else at)
        return tuple(found)

    def reached(self, states: Mapping[State, object]) -> frozenset[str]:
        return frozenset(f"{name}: {at}" for name, ats in zip(self._names, self._at, strict=True) for at in ats)

    def steps(self, state: State) -> Iterator[tuple[State, str]]:
        store = state[0]
        for actor, place in enumerate(state[1:]):
            known = (actor, place, store)
            found = self._replies.get(known)
            if found is None:
                found = self._replies.setdefault(known, list(self._act(actor, place, store)))
            for after, at, what in found:
                following = [*state]
                following[0], following[actor + 1] = after, at
                for numbers in self._alike:
                    places = [following[number] for number in numbers]
                    places.sort()
                    for number, one in zip(numbers, places):  # noqa: B905 - strict costs a third
                        following[number] = one
                yield tuple(following), what

    def _place(self, actor: int, at: str | _Page) -> int:
        places = self._places[actor]
        if at not in places:
            places[at] = len(places)
            self._at[actor].append(at)
        return places[at]

    def _mask(self, prefix: Key) -> int:
        if prefix not in self._masks:
            self._masks[prefix] = sum(bit for (key, _), bit in self._bits.items() if key[: len(prefix)] == prefix)
        return self._masks[prefix]

    def _act(self, actor: int, place: int, store: int) -> Iterator[tuple[int, int, str]]:
        at = self._at[actor][place]
        row = self._programs[actor][at.row if isinstance(at, _Page) else at]
        if row.op is None:
            return
        for after, reply in self._perform(row.op, store, at):
            goes = reply if isinstance(reply, _Page) else _next(row, reply)
            what = f"{self._names[actor]}, {row.at}: {row.op} -> {reply if isinstance(reply, str) else 'first page'}"
            yield after, self._place(actor, goes), what
        if row.op.verb == "get" and "unknown" in row.then:
            yield store, self._place(actor, row.then["unknown"]), f"{self._names[actor]}, {row.at}: {row.op} fails"

    def _perform(self, op: Op, store: int, at: str | _Page) -> Iterator[tuple[int, str | _Page]]:
        """The store after the operation, and the reply: all that can happen."""
        found = store & self._mask(op.key)
        if op.verb == "list":
            yield from ((store, reply) for reply in self._list(op, found, at))
        elif op.verb == "get":
            yield store, str(self._pairs[found.bit_length() - 1][1]) if found else "absent"
        elif op.verb == "create" and found:
            yield store, "exists"
        elif op.verb in ("put", "create", "delete"):
            after = store & ~self._mask(op.key) | (0 if op.verb == "delete" else self._bits[op.key, op.value])
            yield after, "won" if op.verb == "create" else "ok"
            yield after, "unknown"
        elif op.verb == "expire":
            if found & self._bits[op.key, "live"]:
                yield store & ~found | self._bits[op.key, "expired"], "ok"
        else:
            yield store, "ok"

    def _list(self, op: Op, found: int, at: str | _Page) -> Iterator[str | _Page]:
        if isinstance(at, _Page):
            yield op.classify(self.objects(at.found | found >> at.after << at.after))
            return
        yield op.classify(self.objects(found))
        if self._scenario.paged:
            for end in range(1, found.bit_length()):
                if found >> (end - 1) & 1:  # the first page ends with this object
                    yield _Page(at, end, found & ((1 << end) - 1))


def _next(row: Row, reply: str) -> str:
    if reply == "unknown" and "unknown" not in row.then:
        return row.at  # the write is repeated
    try:
        return row.then[reply] if reply in row.then else row.then["else_"]
    except KeyError:
        raise AssertionError(f"row {row.at!r} has no reply {reply!r}") from None


def _universe(scenario: Scenario) -> set[Pair]:
    """All objects that can ever be in the store."""
    pairs = set(scenario.store.items())
    for one in scenario.actors.values():
        for row in one.rows.values():
            if row.op is not None and row.op.verb in ("put", "create"):
                pairs.add((row.op.key, row.op.value))
            elif row.op is not None and row.op.verb == "expire":
                pairs |= {(row.op.key, "live"), (row.op.key, "expired")}
    return pairs

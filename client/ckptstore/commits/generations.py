"""Generations: the series of saves of one trainer between two restores, and the live lineage of a run.

A generation is created only if absent, before the first save of its trainer is uploaded. It names the checkpoint from
which the trainer resumed. `Lineage` follows these parents from the newest generation that has a checkpoint: what it
does not meet is abandoned. docs/decisions/0025 has the sequences.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from ckptstore import names
from ckptstore.errors import CorruptObject, ObjectMissing, StoreUnavailable
from ckptstore.format.documents import FORMAT, Generation, Outcome
from ckptstore.format.parsing import seal
from ckptstore.format.records import ORIGIN
from ckptstore.names import Attempt, derive_ulid
from ckptstore.retry import retry
from ckptstore.run import Run, origin
from ckptstore.stores import ObjectInfo
from ckptstore.stores.retrying import pauses_without
from ckptstore.threads import in_parallel
from ckptstore.values import Value

_DAY_S = 24 * 3600.0
SEEN = "far.seen"
"""The extension of a generation with `Session.seen`."""


class Session(Value):
    """The knowledge of a trainer's ranks about their generation before its number is known."""

    id: str
    """A ULID that the ranks share."""
    parent: Attempt | None
    """The checkpoint from which the trainer resumed; None if of none of this run."""
    seen: int = 0
    """The newest generation that the trainer saw in the remote store, if it saves to a local one (ckptstore.tiers)."""


class NewAttempt(Value):
    """An attempt whose generation the saver will find out."""

    session: Session
    step: int
    ulid: str
    number: int = 0
    """How many calls of the session saved this step before."""

    def earlier(self, generation: int) -> list[Attempt]:
        """The attempts of those calls in this generation, first call first."""
        ulids = (derive_ulid(self.session.id, self.step, number) for number in range(self.number))
        return [Attempt(self.step, ulid, generation=generation) for ulid in ulids]

    def of(self, generation: int) -> Attempt:
        """The attempt in this generation."""
        return Attempt(self.step, self.ulid, generation=generation)


class Begun(NamedTuple):
    """The generation of a session."""

    number: int
    created: bool
    """By this call, not by another rank or an earlier call."""


def begin_generation(run: Run, session: Session) -> Begun:
    """The generation of a session, which is created if it does not exist yet; durable on return.

    Any rank may call it, at any time: a session has one generation. Each number is tried in sequence, and a document
    that is there is read, so that a lost reply or the creation by another rank is recognised. Raises Unavailable.
    """
    listed = list(list_generations(run))
    for number in reversed(listed):
        found = read_generation(run, number)
        if found is not None and found.session == session.id:
            return Begun(number, created=False)
        if found is not None and found.at < names.ulid_time(session.id) - _DAY_S:
            break  # older than the session: no rank of it can have created this one, or one before it
    number = max(newest_generation(run, listed), session.seen) + 1
    while True:
        proposal = Generation(
            format=FORMAT, kind="generation", run=run.name, number=number, session=session.id,
            parent=str(session.parent) if session.parent is not None else None, by=run.by, at=run.clock(),
            extensions={ORIGIN: msgspec.to_builtins(origin()), **({SEEN: session.seen} if session.seen else {})},
        )  # fmt: skip
        if (created := create_generation(run, proposal)) is not None:
            return Begun(number, created)
        number += 1


def create_generation(run: Run, proposal: Generation) -> bool | None:
    """Create a generation; durable on return. False if its session had created it already; None if the number is taken.

    Raises Unavailable.
    """

    def once() -> bool | None:
        if run.store.put_if_absent(run.keys.generation(proposal.number), seal(proposal)):
            return True
        found = read_generation(run, proposal.number)
        return False if found is not None and found.session == proposal.session else None

    if proposal.number == 1:
        _refuse_old_readers(run)
    return retry(once, StoreUnavailable, pauses_without(run.store))


def newest_generation(run: Run, listed: Iterable[int] | None = None) -> int:
    """The highest generation that was begun, 0 if none was. listed: the numbers in a listing of the documents."""
    # A document may be missing. Its number must not be used again while there are checkpoints of it.
    decided = (attempt.generation for attempt, _, _ in run.listed(run.keys.commits))
    return max([*(list_generations(run) if listed is None else listed), *decided], default=0)


def superseded_by(run: Run, generation: int) -> int | None:
    """The generation after this one, if it exists: then no attempt of this one must be committed."""
    number = generation + 1
    try:
        run.store.size(run.keys.generation(number))
    except ObjectMissing:
        return None
    return number


def read_generation(run: Run, number: int) -> Generation | None:
    """The document of a generation; None if it is missing or damaged. Raises UnsupportedFormat or Unavailable."""
    try:
        found = run.read(run.keys.generation(number), Generation)
    except (CorruptObject, ObjectMissing):
        return None
    return found if (found.run, found.number) == (run.name, number) else None


def read_generations(run: Run, numbers: Iterable[int] | None = None) -> dict[int, Generation | None]:
    """The documents of all generations, or of some, by number; None for a damaged one."""
    wanted = list(list_generations(run) if numbers is None else numbers)
    return dict(zip(wanted, in_parallel(partial(read_generation, run), wanted), strict=True))


class HasParent(Protocol):
    """A generation whose parent is known."""

    @property
    def parent(self) -> str | None:
        """The attempt from which it continues; None if from none."""


ParentOf = Callable[[int], HasParent | None]
"""A generation; None if its document is damaged or missing, so that its parent is unknown."""


class Lineage:
    """The live attempts of a run. Pure, apart from `parent_of`, which is called when an answer depends on it.

    Show it the generations that have a checkpoint, newest first, with `add`, until `complete`.
    """

    def __init__(self, parent_of: ParentOf) -> None:
        self.parent_of = parent_of
        self._branches: list[_Branch] = []
        self.complete = False
        """Whether the head is known: older generations change nothing."""

    def add(self, generation: int, readable: bool) -> None:
        """The next older generation that has a visible checkpoint.

        readable: whether the outcome of one of them can be read. Otherwise all of them may be of aborted attempts, so
        the next older generation may be the head, and both lineages are live.
        """
        if not self.complete:
            self._branches.append(_Branch(generation, self.parent_of))
            self.complete = readable

    def includes(self, attempt: Attempt) -> bool:
        """Whether an attempt is live."""
        return any(branch.includes(attempt) for branch in self._branches)

    def left_by(self, attempt: Attempt, continuations: Continuations) -> int | None:
        """The generation that left an abandoned attempt behind, for the last time if its branch was revived.

        That is the next generation of the live lineage after the newest one that continues from the attempt.
        """
        last = continuations.newest(attempt)
        found = (branch.next_after(last) for branch in self._branches)
        return max((number for number in found if number is not None), default=None)


class Continuations:
    """Which generations continue from an attempt, directly or through others. Pure, apart from `parent_of`.

    Each parent is looked up once: a run may have a thousand generations.
    """

    def __init__(self, begun: Iterable[int], parent_of: ParentOf) -> None:
        """begun: the numbers of all generations."""
        self._from: dict[int, list[tuple[Attempt, int]]] = defaultdict(list)
        """By generation: the attempts from which others continue, and the newest generation that does."""
        self._unknown: list[tuple[int, int]] = []
        """Generations whose parent is unknown, and the newest one that continues from each."""
        found: dict[int, HasParent | None] = {}
        waiting = list(begun)
        while waiting:
            number = waiting.pop()
            if number and number not in found:
                found[number] = one = parent_of(number)
                if one is not None and one.parent is not None:
                    waiting.append(Attempt.parse(one.parent).generation)
        for number in sorted(found, reverse=True):
            newest, one = max((newest for _, newest in self._from[number]), default=number), found[number]
            if one is None:
                self._unknown.append((number, newest))
            elif one.parent is not None:
                parent = Attempt.parse(one.parent)
                self._from[parent.generation].append((parent, newest))

    def newest(self, attempt: Attempt) -> int:
        """The newest generation that continues from an attempt; its own if none does."""
        known = (n for end, n in self._from.get(attempt.generation, ()) if attempt.step < end.step or attempt == end)
        unknown = (newest for number, newest in self._unknown if number > attempt.generation)
        return max((*known, *unknown), default=attempt.generation)


class _Branch:
    """A generation, its parent and what is before the parent, and so on. Parents are looked up one by one."""

    def __init__(self, head: int, parent_of: ParentOf) -> None:
        self._ends: dict[int, Attempt | None] = {}
        """The last attempt of each generation that is met; None: all of its attempts are."""
        self._met: list[int] = []
        """These generations, each negative, so that they ascend."""
        self._lowest = head
        self._all_below = 0
        self._walk = self._meet(head, parent_of)
        next(self._walk)

    def includes(self, attempt: Attempt) -> bool:
        while attempt.generation < self._lowest and next(self._walk, None) is not None:
            pass
        if attempt.generation < self._all_below:
            return True
        if attempt.generation not in self._ends:
            return False
        end = self._ends[attempt.generation]
        return end is None or attempt.step < end.step or attempt == end

    def next_after(self, generation: int) -> int | None:
        """The lowest generation of the branch above one that `includes` was asked about."""
        newer = bisect_left(self._met, -generation)
        return -self._met[newer - 1] if newer else None

    def _meet(self, head: int, parent_of: ParentOf) -> Iterator[int]:
        generation, end = head, None
        while True:
            self._ends[generation], self._lowest = end, generation
            self._met.append(-generation)
            yield generation
            if generation == 0:
                return
            found = parent_of(generation)
            if found is None:
                self._all_below = generation
                return
            if found.parent is None:
                return
            end = Attempt.parse(found.parent)
            generation = end.generation


def list_generations(run: Run) -> dict[int, ObjectInfo]:
    """The documents of all generations in a listing, by number, in order."""
    found = {names.generation_number(info.key): info for info in run.store.list(run.keys.generations)}
    return {number: found[number] for number in sorted(number for number in found if number is not None)}


def _refuse_old_readers(run: Run) -> None:
    """Write the barrier; durable on return.

    A reader of format 1 ignores attempts that name a generation. Without the barrier it would continue from the newest
    checkpoint of generation 0, and prune without knowledge of the others.
    """
    barrier = names.BARRIER
    document = Outcome(
        format=FORMAT, kind="outcome", run=run.name, step=barrier.step, attempt=str(barrier),
        committed=None, nonce=barrier.ulid, by="generations need format 2", at=run.clock(),
    )  # fmt: skip
    run.write(run.keys.outcome(barrier), document)

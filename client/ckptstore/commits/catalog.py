"""Which checkpoints exist: the committed outcomes of a store, newest first.

There is no mutable pointer, and folders prove nothing: a checkpoint exists if its outcome is committed and it is not
hidden (hidden.py). Newest means: of the newest generation that has a checkpoint, the highest step. If two attempts of
one step and generation are committed, the later commit counts and the earlier one is superseded. Checkpoints outside
of the live lineage (generations.py) are abandoned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from math import isfinite, nan

from msgspec.structs import asdict

from ckptstore import names
from ckptstore.commits.commit import OPTIMIZER_BYTES, read_outcome
from ckptstore.commits.generations import (
    Continuations,
    Lineage,
    ParentOf,
    list_generations,
    newest_generation,
    read_generation,
    read_generations,
)
from ckptstore.commits.hidden import HiddenAttempts, hidden_attempts, listed_attempts, without_hidden
from ckptstore.errors import CorruptObject, InvalidRequest, NoCheckpoint
from ckptstore.format.documents import Outcome
from ckptstore.format.records import Best
from ckptstore.format.statistics import HEALTH, Health
from ckptstore.names import Attempt, Reference, checkpoint_id
from ckptstore.run import Run
from ckptstore.stores import Store
from ckptstore.threads import in_parallel


class State(StrEnum):
    """The state of a checkpoint in a listing."""

    COMMITTED = "committed"
    SUPERSEDED = "superseded"
    """A later commit of the same step and generation exists."""
    ABANDONED = "abandoned"
    """Outside of the live lineage: training went on from an earlier checkpoint. Never latest."""
    THINNED = "thinned"
    """Live, with weights and without optimizer state; never latest."""
    CORRUPT = "corrupt"
    """Its outcome cannot be read, or its bytes were found damaged; never latest."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One committed checkpoint, as its outcome describes it."""

    run: str
    attempt: Attempt
    state: State
    committed_at: float = 0.0
    created_at: float = 0.0
    """When the state was captured."""
    world_size: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    """Stored bytes of its own chunks."""
    referenced_bytes: int = 0
    """Stored bytes of the chunks that it references in earlier checkpoints."""
    num_entries: int = 0
    num_shards: int = 0
    manifest_digest: str = ""
    manifest_bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict, hash=False)
    tags: dict[str, str] = field(default_factory=dict, hash=False)
    problem: str = ""
    """Why it is corrupt."""
    optimizer_bytes: int = 0
    """The part of `stored_bytes` that thinning frees."""
    thinned: bool = False
    """Its optimizer state is deleted, or will be after a grace; not counted in `stored_bytes` any more."""
    not_finite: int | None = None
    """Number of elements that are NaN or Inf; None: it is not known. Masks do not count."""
    written_at: float = field(default=0.0, compare=False)
    """When its outcome was written, by the store's clock; 0 if it was read without a listing."""
    abandoned_at: float | None = field(default=None, compare=False)
    """When it was left behind: when the next newer generation of the live lineage began or, if that is later, when it
    was committed. By the store's clock. None: it is not abandoned, or was read without a listing."""
    parent: Attempt | None = field(default=None, compare=False)
    """The attempt from which its generation continues. None: from none, not known, or read without a listing."""
    tiers: tuple[str, ...] = field(default=(), compare=False)
    """Where it is: `local`, `remote`. Empty: it was read from a single store."""

    def __repr__(self) -> str:
        return f"<Checkpoint {self.id} {self.state}>"

    @property
    def id(self) -> str:
        """run@step.ulid."""
        return checkpoint_id(self.run, self.attempt)

    @property
    def step(self) -> int:
        """The optimizer step it was captured at."""
        return self.attempt.step

    @property
    def branch(self) -> str:
        """Its generation in words: 3, from step 300."""
        number = str(self.attempt.generation)
        return number if self.parent is None else f"{number}, from step {self.parent.step}"

    @property
    def branch_state(self) -> str:
        """Its generation, and whether a restore would use it, in words: 3, from step 300; live."""
        state = "live" if self.live else "abandoned" if self.state is State.ABANDONED else ""
        return f"{self.branch}; {state}" if state else self.branch

    @property
    def live(self) -> bool:
        """Whether it is in the live lineage and not superseded: committed or thinned."""
        return self.state in (State.COMMITTED, State.THINNED)

    @property
    def needed_bytes(self) -> int:
        """Stored bytes that a full read needs."""
        return self.stored_bytes + self.referenced_bytes

    def holder(self, attempt: str | None) -> Checkpoint:
        """The checkpoint of the same run that holds chunks for this one; None: itself. Raises InvalidName."""
        return self if attempt is None else replace(self, attempt=Attempt.parse(attempt))

    @property
    def save_seconds(self) -> float:
        """Time from capture to commit."""
        return max(0.0, self.committed_at - self.created_at)


def list_runs(store: Store) -> list[str]:
    """The names of the runs that have a folder in the store."""
    return sorted(filter(names.is_run, map(names.name_of, store.list_folders(""))))


def list_checkpoints(run: Run) -> list[Checkpoint]:
    """All checkpoints of a run that are not being deleted, newest generation and step first; reads every outcome."""
    written = _outcome_times(run)  # first, as in visible_attempts
    hidden = hidden_attempts(run)
    attempts, damaged = without_hidden(written, hidden), set(quarantined_attempts(run))
    found = in_parallel(lambda attempt: read_checkpoint(run, attempt, damaged, hidden.thinned), attempts)
    listed = (replace(c, written_at=written[c.attempt]) for c in found if c is not None)
    begun = list_generations(run)
    begun_at = {number: info.modified_at for number, info in begun.items()}
    parent_of = read_generations(run, begun).get
    return with_parents(with_states(listed, Lineage(parent_of), begun_at), parent_of)


def latest(run: Run) -> Checkpoint:
    """The newest checkpoint of a run: of the newest generation that has one, the highest step.

    Reads outcomes, newest first, until one is usable. Raises NoCheckpoint if the run has none.
    """
    for checkpoint in newest_first(run):
        return checkpoint
    raise NoCheckpoint(
        f"run {run.name!r} has no checkpoint in {run.store.url}",
        "The first save may not have finished yet. Otherwise check the names of the run and the store",
    )


def newest_first(run: Run) -> Iterator[Checkpoint]:
    """The checkpoints of a run that a restore may use: the live lineage, newest first. Outcomes are read lazily."""
    return (c for c in candidates(run) if c.state is State.COMMITTED)


def joined_generation(run: Run, step: int) -> int:
    """The generation of a checkpoint that no trainer saves, such as a copy: the newest that has begun.

    Raises InvalidRequest if the checkpoint would be the newest of the run although there is one of a later step.
    """
    generation = newest_generation(run)
    newest = next(newest_first(run), None)
    if newest is not None and newest.attempt.generation < generation and newest.step > step:
        raise InvalidRequest(
            f"step {step} would be the newest checkpoint of run {run.name!r} in {run.store.url}, before step "
            f"{newest.step}: generation {generation} has no checkpoint yet",
            "Repeat it after the next save of that run, or choose another run",
        )
    return generation


def candidates(run: Run, decided: Sequence[Attempt] | None = None) -> Iterator[Checkpoint]:
    """Like newest_first, but includes corrupt checkpoints, so that a restore can report what it skips.

    decided: those that were just listed, for a caller that takes a lease before it uses a checkpoint; None: list them.
    """
    leased, decided = decided is not None, decided_attempts(run) if decided is None else decided  # before the rest
    if not decided:
        return iter(())
    with ThreadPoolExecutor(3) as pool:  # the first outcome is likely to be needed
        newest = pool.submit(read_checkpoint, run, decided[0])
        hidden, damaged = pool.submit(HiddenAttempts, run, leased), pool.submit(quarantined_attempts, run)
    quarantine = set(damaged.result())
    visible = (attempt for attempt in decided if attempt not in hidden.result())  # reads only the lists it needs

    def read(attempt: Attempt) -> Checkpoint | None:
        thinned = hidden.result().thinned
        if attempt == decided[0] and attempt not in quarantine and attempt not in thinned:
            return newest.result()
        return read_checkpoint(run, attempt, quarantine, thinned)

    return walk(visible, read, lambda number: read_generation(run, number))


def walk(
    visible: Iterable[Attempt], read: Callable[[Attempt], Checkpoint | None], parent_of: ParentOf
) -> Iterator[Checkpoint]:
    """The checkpoints of the live lineage, newest first, and corrupt ones; no thinned ones. Outcomes are read lazily.

    visible: newest generation and step first. read: the checkpoint of an attempt; None if it was aborted.
    """
    lineage = Lineage(parent_of)
    for generation, attempts in groupby(visible, key=lambda attempt: attempt.generation):
        readable: list[bool] = []
        for _, of_step in groupby(attempts, key=lambda attempt: attempt.step):
            wanted = (attempt for attempt in of_step if not lineage.complete or lineage.includes(attempt))
            for c in supersede(c for c in map(read, wanted) if c is not None):
                readable.append(is_readable(c))
                if c.state is not State.SUPERSEDED and not c.thinned:
                    yield c
        if readable:
            lineage.add(generation, any(readable))


def find(store: Store, reference: Reference) -> Checkpoint:
    """The checkpoint of a reference, even if it is corrupt. Raises NoCheckpoint."""
    run = Run(store, reference.run)
    if reference.newest:
        return latest(run)
    decided = decided_attempts(run)
    hidden = hidden_attempts(run)
    visible = without_hidden(decided, hidden)
    if meant := list(filter(reference.means, visible)):
        damaged = quarantined_attempts(run)
        found = (read_checkpoint(run, attempt, damaged, hidden.thinned) for attempt in meant)
        if listed := with_states((c for c in found if c is not None), _lineage(run, visible)):
            return min(listed, key=lambda c: c.state is State.ABANDONED)
    raise NoCheckpoint(
        f"{reference.missing} in {store.url}",
        "ckptctl ls shows what there is",
    )


def named(checkpoints: Iterable[Checkpoint], reference: Reference, url: str) -> Checkpoint:
    """The checkpoint that a tag or best:METRIC:min|max names, of the labelled ones of its run. Pure.

    A tag names the newest that has it, first of the live lineage. Raises NoCheckpoint.
    """
    name = reference.name or ""
    usable = sorted(checkpoints, key=lambda c: (c.live, c.attempt), reverse=True)
    if name.startswith("best:"):
        live = [c for c in usable if c.live]
        found = ranked(Best.parse(f"{name.removeprefix('best:')}:1"), live)
    else:
        found = [c for c in usable if name in c.tags]
    if not found:
        raise NoCheckpoint(f"{reference.missing} in {url}", "ckptctl ls shows the tags and metrics")
    return found[0]


def ranked(best: Best, usable: Iterable[Checkpoint]) -> list[Checkpoint]:
    """The checkpoints that have the metric, best first; equal values in their order. Pure."""
    have = [c for c in usable if isfinite(c.metrics.get(best.metric, nan))]
    return sorted(have, key=lambda c: c.metrics[best.metric], reverse=best.highest)


def _lineage(run: Run, visible: Iterable[Attempt]) -> Lineage:
    """The live lineage. Reads outcomes, newest first, until one is readable, and generations when they are needed."""
    lineage = Lineage(lambda number: read_generation(run, number))
    for generation, attempts in groupby(visible, key=lambda attempt: attempt.generation):
        found = False
        for checkpoint in (read_checkpoint(run, attempt) for attempt in attempts):
            found = found or checkpoint is not None
            if checkpoint is not None and is_readable(checkpoint):
                lineage.add(generation, readable=True)
                return lineage
        if found:
            lineage.add(generation, readable=False)
    return lineage


def find_attempt(run: Run, reference: Reference) -> Attempt | None:
    """The decided attempt that a reference names by its ULID, even if it is hidden; None if there is none."""
    wanted = reference.step, reference.ulid
    return next((a for a in decided_attempts(run) if (a.step, a.ulid) == wanted), None)


def decided_attempts(run: Run) -> list[Attempt]:
    """Attempts that have an outcome, committed or aborted, newest generation and step first."""
    return list(_outcome_times(run))


def quarantined_attempts(run: Run) -> list[Attempt]:
    """Attempts whose bytes were found damaged."""
    return listed_attempts(run, run.keys.quarantine)


def visible_attempts(run: Run) -> list[Attempt]:
    """Attempts that have an outcome and are not hidden, newest generation and step first."""
    # Outcomes first: a checkpoint that is deleted between the two listings already has its tombstone.
    decided = decided_attempts(run)
    return without_hidden(decided, hidden_attempts(run))


def _outcome_times(run: Run) -> dict[Attempt, float]:
    """When each outcome was written, by the store's clock, newest step first."""
    listed = run.listed(run.keys.commits)
    found = {attempt: info.modified_at for attempt, _, info in listed if info.key == run.keys.outcome(attempt)}
    return dict(sorted(found.items(), reverse=True))


def from_outcome(outcome: Outcome) -> Checkpoint | None:
    """The checkpoint of a committed outcome; None if it is aborted."""
    if outcome.committed is None:
        return None
    summary, health = outcome.committed.summary, outcome.extension(HEALTH, Health)
    return Checkpoint(
        **asdict(summary),  # the same fields
        run=outcome.run,
        attempt=Attempt.parse(outcome.attempt),
        state=State.COMMITTED,
        committed_at=outcome.at,
        manifest_digest=outcome.committed.digest,
        manifest_bytes=outcome.committed.bytes,
        not_finite=health.nan + health.inf if health is not None else None,
        optimizer_bytes=outcome.extension(OPTIMIZER_BYTES, int) or 0,
    )


def supersede(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """The checkpoints of one step of a generation, latest commit first, with all others marked superseded. Pure."""
    ordered = sorted(checkpoints, key=lambda c: (c.state is State.COMMITTED, c.committed_at, c.attempt), reverse=True)
    return [
        c if i == 0 or c.state is State.CORRUPT else replace(c, state=State.SUPERSEDED) for i, c in enumerate(ordered)
    ]


def with_states(
    checkpoints: Iterable[Checkpoint], lineage: Lineage, begun_at: Mapping[int, float] | None = None
) -> list[Checkpoint]:
    """All visible checkpoints of a run, which are given newest generation and step first, with their states. Pure.

    begun_at: when all generations began, by the store's clock; None: it does not matter.
    """
    begun_at = begun_at or {}
    found: list[Checkpoint] = []
    for generation, of_generation in groupby(checkpoints, key=lambda c: c.attempt.generation):
        group = [c for _, of_step in groupby(of_generation, key=lambda c: c.step) for c in supersede(of_step)]
        lineage.add(generation, any(map(is_readable, group)))
        found += group
    continuations = Continuations(begun_at, lineage.parent_of)

    def settled(checkpoint: Checkpoint) -> Checkpoint:
        """Marked abandoned if it is usable otherwise and outside of the live lineage, or thinned."""
        if checkpoint.state is not State.COMMITTED or lineage.includes(checkpoint.attempt):
            thins = checkpoint.thinned and checkpoint.state is State.COMMITTED
            return replace(checkpoint, state=State.THINNED) if thins else checkpoint
        begun = begun_at.get(lineage.left_by(checkpoint.attempt, continuations) or 0)
        # An old job may commit long after its successor began.
        at = None if begun is None else max(begun, checkpoint.written_at)
        return replace(checkpoint, state=State.ABANDONED, abandoned_at=at)

    return [*map(settled, found)]


def with_parents(checkpoints: Iterable[Checkpoint], parent_of: ParentOf) -> list[Checkpoint]:
    """The checkpoints with the attempts from which their generations continue."""
    listed = list(checkpoints)
    begun = {c.attempt.generation for c in listed} - {0}
    parents = {n: Attempt.parse(one.parent) for n in begun if (one := parent_of(n)) and one.parent}
    return [replace(c, parent=parents[n]) if (n := c.attempt.generation) in parents else c for c in listed]


def has_branches(checkpoints: Iterable[Checkpoint]) -> bool:
    """Whether any run has checkpoints of more than one generation. Pure."""
    listed = {(c.run, c.attempt.generation) for c in checkpoints}
    return len(listed) > len({run for run, _ in listed})


def is_readable(checkpoint: Checkpoint) -> bool:
    """Whether its outcome could be read, so that it is certain that it was committed. Pure."""
    return checkpoint.state is not State.CORRUPT or bool(checkpoint.manifest_digest)


def read_checkpoint(
    run: Run, attempt: Attempt, damaged: Collection[Attempt] = (), thinned: Collection[Attempt] = ()
) -> Checkpoint | None:
    """The checkpoint of an attempt; None if it was aborted or is undecided. damaged: the attempts in quarantine.
    thinned: those without optimizer state."""
    found = read_decided(run, attempt, damaged, thinned)
    return found if isinstance(found, Checkpoint) else None


def read_decided(
    run: Run, attempt: Attempt, damaged: Collection[Attempt], thinned: Collection[Attempt] = ()
) -> Checkpoint | Attempt | None:
    """The checkpoint of an attempt; the attempt itself if it was aborted; None if it is undecided."""
    # A newer format is not damage and raises: skipping it would resume from the wrong step.
    try:
        outcome = read_outcome(run, attempt)
    except CorruptObject as error:
        return Checkpoint(run.name, attempt, State.CORRUPT, problem=str(error))
    if outcome is None:
        return None
    found = from_outcome(outcome)
    if found is not None and attempt in thinned:
        left = found.stored_bytes - found.optimizer_bytes
        found = replace(found, thinned=True, stored_bytes=left, optimizer_bytes=0)
    if found is not None and attempt in damaged:
        return replace(found, state=State.CORRUPT, problem=f"{found.id} was found damaged")
    return found or attempt

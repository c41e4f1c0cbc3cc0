"""Goodput: what became of the time of a run, computed from lives of its trainers. Pure.

A life is that of a trainer from its start, or a restore in place, to its end or the next restore. The newest life and
the checkpoint that it resumed from, the life that saved this one, and so on, kept their steps. All other training was
lost: its steps were done twice. docs/decisions/0031 defines the categories.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from ckptstore import names
from ckptstore.commits.catalog import Checkpoint, list_checkpoints
from ckptstore.commits.generations import read_generations
from ckptstore.commits.heartbeats import read_heartbeats
from ckptstore.errors import NoCheckpoint
from ckptstore.format.documents import Generation
from ckptstore.format.records import LOCAL_ONLY, ORIGIN, REVISION, Heartbeat, LocalOnly, Origin, TrainerEnd
from ckptstore.names import Attempt
from ckptstore.run import Run
from ckptstore.values import Record, Value

SILENT_S = 300.0
"""A trainer without a heartbeat for this time counts as gone."""


class Spent(StrEnum):
    """The categories of time."""

    PRODUCTIVE = "productive"
    """Steps whose result was kept."""
    STALL = "stall"
    """Saves held training up: copies, waits for slots and for the last save."""
    SLOWDOWN = "slowdown"
    """Steps took longer because a save was under way."""
    RESTORE = "restore"
    RESTART = "restart"
    """From the start of a process to its restore or first step: imports, process groups, compilation."""
    LOST = "lost"
    """Everything from the capture of the checkpoint that was resumed from to the end: its steps were done twice."""
    WAITING = "waiting"
    """No trainer ran: failures that are not noticed yet, queues, schedulers."""


BADPUT = {
    Spent.STALL: "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    Spent.SLOWDOWN: "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    Spent.RESTORE: "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    Spent.RESTART: "PROGRAM_STARTUP",
    Spent.LOST: "WASTED_PROGRESS_FROM_DISRUPTION",
    Spent.WAITING: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
}
"""The names of Google's ML Productivity Goodput; the slowdown has none there, and is added to the time of saves."""


class EndOf(StrEnum):
    """Why an attempt of the job ended."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """It closed the Checkpointer, and another one followed."""
    PREEMPTED = "preempted"
    """It closed the Checkpointer after a save was requested."""
    ERROR = "error"
    """It closed because of an exception."""
    DIED = "died"
    """The process ended without closing: killed, out of memory."""
    VANISHED = "vanished"
    """Trainer and saver ended together: the host or the container is gone, or both were preempted."""
    REWOUND = "rewound"
    """It restored in place."""


class Beat(NamedTuple):
    """A step, the moment it was reached, and what saves had cost by then, in seconds since the life began to train."""

    at: float
    step: int
    stalled_s: float = 0.0
    slowed_s: float = 0.0


class TrainerRun(Value):
    """One life of a trainer."""

    id: str
    began_at: float
    trains_at: float
    restored_s: float
    parent: Attempt | None
    generation: int | None
    beats: Sequence[Beat]
    """In order of time."""
    ended: TrainerEnd
    ended_at: float
    measured: bool = True
    """False: it left no heartbeat, and is known by its checkpoints only."""
    origin: Origin | None = None
    revision: str | None = None

    def with_captures(self, captures: Iterable[tuple[float, int]]) -> TrainerRun:
        """The life with the moments and steps of its checkpoints as further beats."""
        known = {beat.step for beat in self.beats}
        series = _Series.of(self)
        more = [
            series.at(at)._replace(at=at, step=step)
            for at, step in captures
            if step not in known and at >= self.trains_at
        ]
        if not more:
            return self
        beats = sorted([*self.beats, *more], key=lambda beat: beat.at)
        # The last heartbeat may be older than the last checkpoint.
        return replace(self, beats=beats, ended_at=max(self.ended_at, beats[-1].at))

    def later(self, seconds: float) -> TrainerRun:
        """The life by a clock that is so far ahead."""
        began_at, trains_at, ended_at = (at + seconds for at in (self.began_at, self.trains_at, self.ended_at))
        beats = [beat._replace(at=beat.at + seconds) for beat in self.beats]
        return replace(self, began_at=began_at, trains_at=trains_at, ended_at=ended_at, beats=beats)


class AttemptAccount(Record):
    """The account of one attempt of the job: of one life."""

    id: str
    generation: int | None
    began_at: float
    trains_at: float
    kept_until: float
    """From here on its training was lost; its end if nothing was."""
    ended_at: float
    ended: EndOf
    resumed_from: int | None
    """The step of the checkpoint that it restored; None if it began from scratch."""
    first_step: int
    last_step: int
    lost_steps: int
    seconds: dict[str, float]
    """By category."""
    measured: bool
    origin: Origin | None = None
    """Who ran it, and where; None if an older client did."""
    revision: str | None = None
    """The git commit of its code; None if it is not known."""


class Account(Record):
    """The wall-clock time of a run by category."""

    run: str
    began_at: float
    until: float
    step: int
    """The last step of the newest attempt."""
    lost_steps: int
    goodput: float
    """Productive time as a share of all time."""
    seconds: dict[str, float]
    """By category; they add up to all time."""
    badput: dict[str, float]
    """The unproductive seconds by the names of Google's ML Productivity Goodput."""
    attempts: list[AttemptAccount]
    """In order of time."""
    local_only: LocalOnly | None = None
    """The replication queue of the newest saver to this store; None: it has no local tier."""


def read_account(run: Run, checkpoints: Sequence[Checkpoint] | None = None) -> Account:
    """A breakdown of a run's wall-clock time. Reads all heartbeats and generations.

    checkpoints: those of the run; None: read all outcomes. Raises NoCheckpoint if there are neither heartbeats nor
    checkpoints, UnsupportedFormat or Unavailable.
    """
    if checkpoints is None:
        checkpoints = list_checkpoints(run)
    heartbeats = read_heartbeats(run)
    lives = lives_of(heartbeats, read_generations(run).values(), checkpoints)
    if not lives:
        raise NoCheckpoint(
            f"run {run.name!r} has neither a heartbeat nor a checkpoint in {run.store.url}",
            "The first heartbeat comes a minute after training began",
        )
    # The replication queue of another host does not count: its generation is superseded.
    local_only = heartbeats[-1].extension(LOCAL_ONLY, LocalOnly) if heartbeats else None
    return replace(account(run.name, lives, run.clock()), local_only=local_only)


def lives_of(
    heartbeats: Iterable[Heartbeat], generations: Iterable[Generation | None], checkpoints: Sequence[Checkpoint]
) -> list[TrainerRun]:
    """The lives that left heartbeats, and those of generations that did not. Pure."""
    captures: dict[int, list[tuple[float, int]]] = {}
    for checkpoint in checkpoints:
        if checkpoint.created_at:
            captures.setdefault(checkpoint.attempt.generation, []).append((checkpoint.created_at, checkpoint.step))
    lives = [_of_heartbeat(heartbeat) for heartbeat in heartbeats]
    known = {life.generation for life in lives}
    documents = {one.number: one for one in generations if one is not None}
    unknown = sorted((captures.keys() | documents.keys()) - known)
    lives += [_of_generation(number, documents.get(number), sorted(captures.get(number, ()))) for number in unknown]
    return _in_one_order(
        [life if life.generation is None else life.with_captures(captures.get(life.generation, ())) for life in lives],
        {checkpoint.attempt: checkpoint.created_at for checkpoint in checkpoints},
    )


def _in_one_order(lives: Iterable[TrainerRun], created_at: Mapping[Attempt, float]) -> list[TrainerRun]:
    """The lives by clocks that agree so far that none restores a checkpoint before it was saved.

    Each has the clock of a host, and a run may continue on another host.
    """
    behind: dict[int | None, float] = {}
    found = []
    for life in sorted(lives, key=lambda life: life.generation or inf):
        if (parent := life.parent) is not None:
            saved_at = created_at.get(parent, 0.0) + behind.get(parent.generation, 0.0)
            if saved_at > life.trains_at:
                behind[life.generation] = saved_at - life.began_at
                life = life.later(saved_at - life.began_at)
        found.append(life)
    return found


def _of_heartbeat(found: Heartbeat) -> TrainerRun:
    beats = map(Beat, found.at, found.step, found.stalled_s, found.slowed_s)
    return TrainerRun(
        id=found.id, began_at=found.began_at, trains_at=max(found.began_at, found.trains_at),
        restored_s=max(0.0, found.restored_s), generation=found.generation,
        parent=Attempt.parse(found.parent) if found.parent is not None else None,
        beats=sorted(beats, key=lambda beat: beat.at), ended=found.ended,
        ended_at=max(found.ended_at, found.began_at), origin=found.extension(ORIGIN, Origin),
        revision=found.extension(REVISION, str),
    )  # fmt: skip


def _of_generation(number: int, document: Generation | None, captures: Sequence[tuple[float, int]]) -> TrainerRun:
    """A life that is known by its generation: its document, or captures. Its saves seem to cost nothing, and its end is
    its last capture."""
    if document is not None:
        began_at = names.ulid_time(document.session)
        captures = [capture for capture in captures if capture[0] >= began_at]
    else:
        began_at = captures[0][0]
    ended_at = captures[-1][0] if captures else began_at
    return TrainerRun(
        id=document.session if document is not None else f"generation {number}", began_at=began_at, trains_at=began_at,
        restored_s=0.0, parent=Attempt.parse(document.parent) if document is not None and document.parent else None,
        generation=number, beats=[Beat(at, step) for at, step in captures], ended=TrainerEnd.NOT, ended_at=ended_at,
        measured=False, origin=document.extension(ORIGIN, Origin) if document is not None else None,
    )  # fmt: skip


def account(run: str, lives: Sequence[TrainerRun], now: float) -> Account:
    """The account of a run that has at least one life. One without a beat for SILENT_S has vanished."""
    lives = sorted(lives, key=lambda life: (life.began_at, life.id))
    attempts: list[AttemptAccount] = []
    waiting, until = 0.0, lives[0].began_at
    for life, kept_step, after in zip(lives, _kept_steps(lives), [*lives[1:], None], strict=True):
        waiting += max(0.0, life.began_at - until)
        attempts.append(_attempt(life, kept_step, after, now))
        until = max(until, attempts[-1].ended_at)
    seconds = {kind.value: sum(one.seconds[kind] for one in attempts) for kind in Spent}
    seconds[Spent.WAITING] = waiting
    total = sum(seconds.values())
    badput: dict[str, float] = dict.fromkeys(BADPUT.values(), 0.0)
    for kind, name in BADPUT.items():
        badput[name] += seconds[kind]
    return Account(
        run=run, began_at=lives[0].began_at, until=until, step=attempts[-1].last_step,
        lost_steps=sum(one.lost_steps for one in attempts), goodput=seconds[Spent.PRODUCTIVE] / total if total else 0.0,
        seconds=seconds, badput=badput, attempts=attempts,
    )  # fmt: skip


def _kept_steps(lives: Sequence[TrainerRun]) -> list[float]:
    """The last step of each life that was kept; -inf: none."""
    kept = [-inf] * len(lives)
    number, limit = len(lives) - 1, inf
    while number >= 0:
        kept[number] = limit
        parent = lives[number].parent
        if parent is None:
            break
        limit = parent.step
        savers = (before for before in range(number) if lives[before].generation == parent.generation)
        number = max(savers, default=-1)
    return kept


def _attempt(life: TrainerRun, kept_step: float, after: TrainerRun | None, now: float) -> AttemptAccount:
    ended_at = life.ended_at if life.ended else max(life.ended_at, life.trains_at)
    if after is not None:
        ended_at = min(ended_at, after.began_at)  # an old job may run on: its steps change nothing
    trains_at = min(life.trains_at, ended_at)
    series = _Series.of(life)
    kept_until = min(max(trains_at, series.reached(kept_step)), ended_at)
    last = series.at(ended_at)
    # Who dies was within a step. Who ends in another way after the last save repeats nothing.
    if life.ended and kept_step >= (inf if life.ended is TrainerEnd.DIED else last.step):
        kept_until = ended_at
    cut = series.at(kept_until)
    restored_s = min(life.restored_s, trains_at - life.began_at)
    # After its last beat, a trainer that closes waits for its saves; one that dies was within a step.
    last_beat = life.beats[-1].at if life.beats and life.ended in _CLOSING else ended_at
    closing_s = max(0.0, kept_until - max(trains_at, last_beat))
    stalled_s = min(cut.stalled_s + closing_s, kept_until - trains_at)
    slowed_s = min(cut.slowed_s, kept_until - trains_at - stalled_s)
    seconds = {
        Spent.PRODUCTIVE: kept_until - trains_at - stalled_s - slowed_s,
        Spent.STALL: stalled_s,
        Spent.SLOWDOWN: slowed_s,
        Spent.RESTORE: restored_s,
        Spent.RESTART: trains_at - life.began_at - restored_s,
        Spent.LOST: ended_at - kept_until,
        Spent.WAITING: 0.0,
    }
    return AttemptAccount(
        id=life.id, generation=life.generation, began_at=life.began_at, trains_at=trains_at, kept_until=kept_until,
        ended_at=ended_at, ended=_end(life, after, now),
        resumed_from=life.parent.step if life.parent is not None else None, first_step=series.beats[0].step,
        last_step=last.step, lost_steps=max(0, last.step - cut.step), seconds={k.value: s for k, s in seconds.items()},
        measured=life.measured, origin=life.origin, revision=life.revision,
    )  # fmt: skip


_CLOSING = (TrainerEnd.CLOSED, TrainerEnd.REQUESTED, TrainerEnd.ERROR)
_ENDS: Mapping[TrainerEnd, EndOf] = {
    TrainerEnd.REQUESTED: EndOf.PREEMPTED,
    TrainerEnd.ERROR: EndOf.ERROR,
    TrainerEnd.DIED: EndOf.DIED,
    TrainerEnd.REWOUND: EndOf.REWOUND,
}


def _end(life: TrainerRun, after: TrainerRun | None, now: float) -> EndOf:
    if life.ended in _ENDS:
        return _ENDS[life.ended]
    if life.ended is TrainerEnd.CLOSED:
        return EndOf.FINISHED if after is None else EndOf.STOPPED
    if after is None and now - life.ended_at < SILENT_S:
        return EndOf.RUNNING
    return EndOf.VANISHED


class _Series(NamedTuple):
    """The beats of a life as a function of time."""

    beats: Sequence[Beat]
    times: Sequence[float]

    @classmethod
    def of(cls, life: TrainerRun) -> _Series:
        """The beats after the beginning of training, which is a beat too."""
        start = Beat(life.trains_at, life.parent.step if life.parent is not None else 0)
        beats = [start, *(beat for beat in life.beats if beat.at > life.trains_at)]
        return cls(beats, [beat.at for beat in beats])

    def at(self, moment: float) -> Beat:
        """The beat at a moment, between two beats by interpolation."""
        after = bisect_right(self.times, moment)
        if after == 0:
            return self.beats[0]
        if after == len(self.beats):
            return self.beats[-1]
        one, other = self.beats[after - 1], self.beats[after]
        share = (moment - one.at) / (other.at - one.at)
        return Beat(
            moment,
            one.step + int((other.step - one.step) * share),
            one.stalled_s + (other.stalled_s - one.stalled_s) * share,
            one.slowed_s + (other.slowed_s - one.slowed_s) * share,
        )

    def reached(self, step: float) -> float:
        """When a step was reached; -inf if it is before the first one, inf if it never was."""
        if step < self.beats[0].step:
            return -inf
        for number, beat in enumerate(self.beats):
            if beat.step >= step:
                before = self.beats[number - 1] if number else beat
                span = beat.step - before.step
                return beat.at if span <= 0 else before.at + (beat.at - before.at) * (step - before.step) / span
        return inf


def openmetrics(accounts: Iterable[Account]) -> str:
    """The accounts as OpenMetrics text: seconds by category, goodput, and steps that were done twice."""
    listed = list(accounts)
    lines = (
        "# TYPE ckptd_goodput_seconds gauge\n# UNIT ckptd_goodput_seconds seconds",
        *(
            f'ckptd_goodput_seconds{{run="{one.run}",category="{kind}"}} {seconds:.3f}'
            for one in listed
            for kind, seconds in one.seconds.items()
        ),
        "# TYPE ckptd_goodput_ratio gauge\n# UNIT ckptd_goodput_ratio ratio",
        *(f'ckptd_goodput_ratio{{run="{one.run}"}} {one.goodput:.6f}' for one in listed),
        "# TYPE ckptd_lost_steps gauge",
        *(f'ckptd_lost_steps{{run="{one.run}"}} {one.lost_steps}' for one in listed),
        "# EOF\n",
    )
    return "\n".join(lines)

"""Simulated histories of runs, with the truth about their time. Seeded: equal seeds give equal histories."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from ckpt.saver.heartbeat_writer import Reading, SharedStep
from ckpt.saver.heartbeat_writer import TrainerRun as RecordedRun
from ckpt.saver.messages import TrainerStarted
from ckptstore.analysis.goodput import Spent
from ckptstore.format.records import Heartbeat, TrainerEnd
from ckptstore.names import Attempt, new_ulid
from ckptstore.run import Run

BEAT_S = 60.0


@dataclass(slots=True)
class _Save:
    attempt: Attempt
    captured_at: float
    durable_at: float
    life: _Life


@dataclass(slots=True)
class _Life:
    number: int
    began_at: float
    trains_at: float
    restored_s: float
    parent: _Save | None
    spans: list[tuple[float, float, Spent]] = field(default_factory=list)
    """Begin, end and category of everything that training did, apart from what was lost."""
    readings: list[Reading] = field(default_factory=list)
    saves: list[_Save] = field(default_factory=list)
    how: TrainerEnd = TrainerEnd.NOT
    ended_at: float = 0.0
    known_until: float = float("inf")
    """Where the heartbeats end, if the saver died too."""


class History:
    """A run with kills, preemptions, slow stores and rewinds in place."""

    def __init__(
        self, seed: int, num_lives: int = 6, slow_store: bool = False, began_at: float = 1_700_000_000.0
    ) -> None:
        self._random = random.Random(seed)
        self._slow_store = slow_store
        self.lives: list[_Life] = []
        self._now = began_at
        in_place = False
        for number in range(1, num_lives + 1):
            last, life = number == num_lives, self._begin(number, in_place)
            in_place = self._train(life, self._random.choice(("kill", "vanish", "preempt", "rewind")), last)
            if not in_place and not last:
                self._now += self._random.uniform(20, 900)

    def _begin(self, number: int, in_place: bool) -> _Life:
        began_at = self._now
        durable = [s for life in self.lives for s in life.saves if s.durable_at <= self._now]
        parent = max(durable, key=lambda s: s.attempt, default=None)
        if in_place and durable:
            parent = self._random.choice([s for s in durable if s.life is durable[-1].life])
        restored_s = self._random.uniform(5, 60) if parent is not None else 0.0
        self._now += restored_s + (0.0 if in_place else self._random.uniform(10, 120))
        life = _Life(number, began_at, self._now, restored_s, parent)
        self.lives.append(life)
        return life

    def _train(self, life: _Life, end: str, last: bool) -> bool:
        """Train until the end; whether the next life begins in place."""
        stop_at = self._now + self._random.uniform(1200, 9000)
        every = self._random.randint(20, 100)
        step_s, stall_s = self._random.uniform(2.0, 6.0), self._random.uniform(0.1, 4.0)
        slow, durable_s = self._random.uniform(1.0, 1.3), self._random.uniform(5, 60)
        if self._slow_store:
            durable_s *= 10
        step, stalled, slowed = life.parent.attempt.step if life.parent else 0, 0.0, 0.0
        while self._now < stop_at:
            usual = step_s * self._random.uniform(0.9, 1.1)
            under_way = bool(life.saves) and life.saves[-1].durable_at > self._now
            extra = usual * (slow - 1) if under_way else 0.0
            if self._now + usual + extra > stop_at and end in ("kill", "vanish") and not last:
                self._spend(life, stop_at - self._now, Spent.PRODUCTIVE)
                break
            self._spend(life, usual, Spent.PRODUCTIVE)
            self._spend(life, extra, Spent.SLOWDOWN)
            step, slowed = step + 1, slowed + extra
            life.readings.append(Reading(self._now, step, stalled, slowed, TrainerEnd.CLOSED))
            if step % every == 0 and not under_way:
                self._save(life, step, durable_s)
                self._spend(life, stall_s, Spent.STALL)
                stalled += stall_s
        return self._end(life, end, last, step)

    def _save(self, life: _Life, step: int, durable_s: float) -> None:
        attempt = Attempt(step, new_ulid(self._now), generation=life.number)
        life.saves.append(_Save(attempt, self._now, self._now + durable_s, life))

    def _end(self, life: _Life, end: str, last: bool, step: int) -> bool:
        if last or end == "preempt":
            self._save(life, step, 20.0)
            life.readings.append(Reading(self._now, step, *self._costs(life), TrainerEnd.CLOSED))
            self._spend(life, 20.0, Spent.STALL)  # the trainer closes, and waits
            life.how = TrainerEnd.CLOSED if last else TrainerEnd.REQUESTED
        elif end == "rewind":
            life.how = TrainerEnd.REWOUND
        elif end == "kill":
            life.how = TrainerEnd.DIED  # the saver goes on, and finishes what is under way
        else:
            life.known_until = self._now - self._random.uniform(0, BEAT_S)
            for save in life.saves:
                if save.durable_at > self._now:
                    save.durable_at = float("inf")
        life.ended_at = self._now
        return end == "rewind" and not last

    def _costs(self, life: _Life) -> tuple[float, float]:
        return life.readings[-1].stalled_s, life.readings[-1].slowed_s

    def _spend(self, life: _Life, seconds: float, kind: Spent) -> None:
        if seconds > 0:
            life.spans.append((self._now, self._now + seconds, kind))
            self._now += seconds

    @property
    def now(self) -> float:
        """The end of the history."""
        return self._now

    def heartbeats(self, run: Run) -> list[Heartbeat]:
        """What the savers wrote, through the code that thins out beats."""
        return [self._heartbeat(run, life) for life in self.lives]

    def _heartbeat(self, run: Run, life: _Life) -> Heartbeat:
        recorded = RecordedRun(
            TrainerStarted(
                id=new_ulid(life.began_at), parent=str(life.parent.attempt) if life.parent else None,
                began_at=life.began_at, trains_at=life.trains_at, restored_s=life.restored_s,
            ),
            SharedStep(),
        )  # fmt: skip
        if any(save.captured_at <= life.known_until for save in life.saves):
            recorded.generation = life.number
        due, last = life.trains_at + BEAT_S, Reading(0.0, 0, 0.0, 0.0, TrainerEnd.CLOSED)
        for reading in life.readings:
            if reading.at > life.known_until:
                break
            while reading.at > due:
                recorded.add(last)
                due += BEAT_S
            last = reading
        for save in life.saves:
            if save.captured_at <= life.known_until:
                before = [one for one in life.readings if one.at <= save.captured_at][-1]
                recorded.add(Reading(save.captured_at, save.attempt.step, *_costs_of(before), TrainerEnd.CLOSED))
        if life.how:
            recorded.add(last)
        recorded.ended = life.how
        return recorded.document(run, min(life.ended_at, life.known_until))

    def truth(self) -> dict[str, float]:
        """Seconds by category."""
        found = dict.fromkeys((kind.value for kind in Spent), 0.0)
        cuts, ended_at = self._cuts(), self.lives[0].began_at
        for life in self.lives:
            found[Spent.WAITING] += life.began_at - ended_at
            found[Spent.RESTORE] += life.restored_s
            found[Spent.RESTART] += life.trains_at - life.began_at - life.restored_s
            for begin, end, kind in life.spans:
                cut = min(max(cuts[life.number], begin), end)
                found[kind] += cut - begin
                found[Spent.LOST] += end - cut
            ended_at = life.ended_at
        return found

    def _cuts(self) -> dict[int, float]:
        """The moment from which the training of each life was lost."""
        cuts = {life.number: float("-inf") for life in self.lives}
        life, cut = self.lives[-1], float("inf")
        while True:
            cuts[life.number] = cut
            if life.parent is None:
                return cuts
            cut, life = life.parent.captured_at, life.parent.life


def _costs_of(reading: Reading) -> tuple[float, float]:
    return reading.stalled_s, reading.slowed_s

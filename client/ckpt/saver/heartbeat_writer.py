"""HeartbeatWriter: writes heartbeats, so that the time of a run can be accounted for (ckptctl goodput).

It runs in the saver of rank 0, in a thread of its own. It writes one small object per life of the trainer, again at
each beat. Nothing waits for it: if the store is away, a beat is lost.

The trainer shares memory with it (SharedStep), and writes a few numbers there per step: no system call, no lock, no
message. The saver reads them when a beat is due, also after the trainer was killed. Each number is written at once; a
reader may see numbers of two adjacent steps.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from enum import IntEnum

import msgspec

from ckpt.host.segment import Segment
from ckpt.saver.messages import SHARED_STEP_BYTES, LocalOnly, TrainerStarted
from ckptstore.errors import CkptError
from ckptstore.format.documents import FORMAT
from ckptstore.format.parsing import seal
from ckptstore.format.records import LOCAL_ONLY, ORIGIN, Heartbeat, TrainerEnd
from ckptstore.run import Run, origin

logger = logging.getLogger(__name__)


class ExpectedEnd(IntEnum):
    """The trainer's knowledge of its end before it comes."""

    NONE = 0
    REQUESTED = 1
    """A save was requested: it is about to be preempted."""
    ERROR = 2
    """It closes because of an exception."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The numbers of a shared step."""

    at: float
    """When the step was reached; 0: none was in this life."""
    step: int
    stalled_s: float
    slowed_s: float
    ending: ExpectedEnd


class SharedStep:
    """The numbers, in shared memory. One process writes, the other reads."""

    def __init__(self, segment: Segment | None = None) -> None:
        """segment: the memory of a received descriptor; None: create it."""
        self.segment = segment or Segment(SHARED_STEP_BYTES)
        self._numbers = self.segment.view.cast("d")

    def write(self, at: float, step: int, stalled_s: float, slowed_s: float) -> None:
        """A step is reached."""
        numbers = self._numbers
        numbers[1], numbers[2], numbers[3] = float(step), stalled_s, slowed_s
        numbers[0] = at

    def write_expected_end(self, ending: ExpectedEnd) -> None:
        """Note how the life will end, if it does."""
        self._numbers[4] = float(ending)

    def read(self) -> Reading:
        """The present numbers."""
        at, step, stalled_s, slowed_s, ending = self._numbers[:5].tolist()
        return Reading(at, int(step), stalled_s, slowed_s, ExpectedEnd(int(ending)))

    def close(self) -> None:
        """Close the descriptor; the memory stays until its last view is gone."""
        self.segment.close()


MOST_BEATS = 512
_CLOSE_TIMEOUT_S = 1.0
_ENDS_BY_EXPECTED = {
    ExpectedEnd.NONE: TrainerEnd.CLOSED,
    ExpectedEnd.REQUESTED: TrainerEnd.REQUESTED,
    ExpectedEnd.ERROR: TrainerEnd.ERROR,
}


@dataclass(slots=True)
class TrainerRun:
    """One life of the trainer. Not thread-safe."""

    began: TrainerStarted
    generation: int | None = None
    beats: list[Reading] = field(default_factory=list)
    ended: TrainerEnd = TrainerEnd.NOT
    ended_at: float | None = None
    """None: it goes on, or ends with the saver."""

    def add(self, beat: Reading) -> None:
        """Add a beat in order of time. If there are too many, every second one is forgotten."""
        if not beat.at:
            return
        place = bisect_left(self.beats, beat.at, key=lambda one: one.at)
        if place < len(self.beats):
            later = self.beats[place]
            if later.at == beat.at:
                return
            stalled_s, slowed_s = min(beat.stalled_s, later.stalled_s), min(beat.slowed_s, later.slowed_s)
            beat = replace(beat, step=min(beat.step, later.step), stalled_s=stalled_s, slowed_s=slowed_s)
        self.beats.insert(place, beat)
        if len(self.beats) > MOST_BEATS:
            self.beats = [*self.beats[1:-1:2], self.beats[-1]]

    def document(self, run: Run, now: float) -> Heartbeat:
        """The heartbeat at this moment."""
        began, beats = self.began, self.beats
        return Heartbeat(
            format=FORMAT, kind="heartbeat", run=run.name, id=began.id, by=run.by, began_at=began.began_at,
            trains_at=began.trains_at, restored_s=began.restored_s, parent=began.parent, generation=self.generation,
            at=[beat.at for beat in beats], step=[beat.step for beat in beats],
            stalled_s=[beat.stalled_s for beat in beats], slowed_s=[beat.slowed_s for beat in beats],
            ended=self.ended, ended_at=self.ended_at or now, extensions={ORIGIN: msgspec.to_builtins(origin())},
        )  # fmt: skip


class HeartbeatWriter:
    """Beats every `every_s` seconds while a life goes on. Any thread may call it."""

    def __init__(self, run: Run, every_s: float, replicated: bool = False) -> None:
        """every_s: 0 for no heartbeats.

        replicated: others write the checkpoints to this store. Where it has nothing of the run, its volume may not be
        mounted, so nothing is written.
        """
        self._run, self._replicated = run, replicated
        self._every_s = every_s
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._life: TrainerRun | None = None
        self._shared_step: SharedStep | None = None
        self._ended: list[TrainerRun] = []
        """Lives that have ended and are not written yet."""
        self._unnumbered: list[TrainerRun] = []
        """Lives that have ended and are written without their generation, which may begin later."""
        self._local_only: LocalOnly | None = None
        self._newest: Heartbeat | None = None
        """The document that was written last."""
        self._due = self._final = self._closing = False
        self._thread = threading.Thread(target=self._serve, name="ckpt-heartbeat", daemon=True)

    def begin(self, began: TrainerStarted, shared_step: SharedStep) -> None:
        """A life begins. The one before it, if there is one, ended with a restore in place."""
        if not self._every_s:
            return
        with self._changed:
            if self._life is not None and self._life.began.id != began.id:
                self._end(TrainerEnd.REWOUND, began.began_at)
            self._life, self._shared_step = TrainerRun(began), shared_step
            if not self._thread.is_alive():
                self._thread.start()

    def captured(self, step: int, at: float) -> None:
        """A checkpoint of this step was captured at this moment."""
        with self._changed:
            if self._life is not None and self._shared_step is not None:
                self._life.add(replace(self._shared_step.read(), at=at, step=step))

    def numbered(self, generation: int, captured_at: float) -> None:
        """The generation of a save that was captured at this moment. The life that saved may have ended by now."""
        with self._changed:
            lives = [*self._unnumbered, *self._ended, *([self._life] if self._life is not None else [])]
            began = [life for life in lives if life.began.trains_at <= captured_at]
            if began:
                life = max(began, key=lambda one: one.began.trains_at)
                life.generation = generation
                self._ended += [one for one in self._unnumbered if one is life]
                self._unnumbered = [one for one in self._unnumbered if one is not life]

    def stop(self, closed: bool) -> None:
        """The trainer has closed its end, or died: take the last beat. `close` writes it."""
        with self._changed:
            if self._life is None or self._shared_step is None:
                return
            now, reading = self._run.clock(), self._shared_step.read()
            if closed:
                self._life.add(replace(reading, at=now))
            # A trainer that closes waits for its saves: its life ends with those.
            self._end(_ENDS_BY_EXPECTED[reading.ending] if closed else TrainerEnd.DIED, None if closed else now)

    def local_only(self, now: LocalOnly) -> None:
        """The replication queue of the saver; it is part of each beat, also after the end of the trainer."""
        with self._changed:
            self._local_only = now

    def finish(self) -> None:
        """Nothing more is saved: write the end of the life. Beats go on while the saver replicates checkpoints."""
        with self._changed:
            self._due = self._final = True
            self._changed.notify()

    def close(self) -> None:
        """Write the last beat; waits at most _CLOSE_TIMEOUT_S for the store."""
        with self._changed:
            self._closing = self._final = True
            self._changed.notify()
            alive = self._thread.is_alive()
        if alive:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _end(self, how: TrainerEnd, at: float | None) -> None:
        if self._life is not None and self._shared_step is not None:
            self._life.add(self._shared_step.read())
            self._life.ended, self._life.ended_at = how, at
            self._ended.append(self._life)
            self._shared_step.close()
            self._life = self._shared_step = None

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._due, self._every_s)
                self._due, closing = False, self._closing
                documents, local_only = self._documents(), self._local_only
            for document in documents:
                self._write(document, local_only)
            if closing:
                return

    def _documents(self) -> list[Heartbeat]:
        """The heartbeats to write now."""
        life, ended, self._ended = self._life, self._ended, []
        if not self._final:  # the others have not ended yet
            self._ended = [one for one in ended if one.ended_at is None]
            ended = [one for one in ended if one.ended_at is not None]
            self._unnumbered += [one for one in ended if one.generation is None]
        if life is not None and self._shared_step is not None:
            life.add(self._shared_step.read())
        now = self._run.clock()
        if life is not None and not self._final:
            ended.append(life)
        documents = [one.document(self._run, now) for one in ended]
        if not documents and self._newest is not None and self._local_only is not None:
            documents.append(self._newest)  # the saver still replicates what it has saved
        return documents

    def _write(self, document: Heartbeat, local_only: LocalOnly | None) -> None:
        short = document.ended_at - document.began_at < self._every_s
        known = self._newest is not None and self._newest.id == document.id
        if short and document.ended is TrainerEnd.CLOSED and document.generation is None and not known:
            return  # a script that saved nothing
        if local_only is not None:
            found = {
                "checkpoints": local_only.checkpoints, "bytes": local_only.bytes, "since": local_only.since,
                "at": self._run.clock(),
            }  # fmt: skip
            document = msgspec.structs.replace(document, extensions=document.extensions | {LOCAL_ONLY: found})
        try:
            if self._replicated and not any(True for _ in self._run.store.list_folders(f"{self._run.name}/")):
                return
            self._run.store.put(self._run.keys.heartbeat(document.id), seal(document))
            self._newest = document
        except CkptError as error:
            logger.warning("a heartbeat was not written: %s", error)
        except Exception:
            logger.exception("a heartbeat was not written")

"""HeartbeatWriter: writes heartbeats, so that the time of a run can be accounted for (ckptctl goodput).

It runs in the saver of rank 0, in a thread of its own. It writes one small object per life of the trainer, again at
each beat. Nothing waits for it: if the store is away, a beat is lost.

The trainer shares memory with it (SharedStep), and writes a few numbers there per step: no system call, no lock, no
message. The saver reads them when a beat is due, also after the trainer was killed. Each number is written at once; a
reader may see numbers of two adjacent steps.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import asdict, replace

from ckpt.host.segment import Segment
from ckpt.saver.messages import SHARED_STEP_BYTES, LocalOnly, TrainerStarted
from ckpt.saver.scheduler import report_to_scheduler
from ckptstore.errors import CkptError
from ckptstore.format.documents import FORMAT
from ckptstore.format.records import LOCAL_ONLY, ORIGIN, REVISION, Heartbeat, TrainerEnd
from ckptstore.run import Run, origin

logger = logging.getLogger(__name__)


_ENDS = (TrainerEnd.CLOSED, TrainerEnd.REQUESTED, TrainerEnd.ERROR)
"""By number in shared memory: how a trainer ends, as far as it knows before. The second after a save was requested,
since it is about to be preempted; the last if it closes because of an exception."""


class Reading(NamedTuple):
    """The numbers of a shared step."""

    at: float
    """When the step was reached; 0: none was in this life."""
    step: int
    stalled_s: float
    slowed_s: float
    ending: TrainerEnd


class SharedStep:
    """The numbers, in shared memory. One process writes, the other reads."""

    def __init__(self, segment: Segment | None = None) -> None:
        """segment: the memory of a received descriptor; None: create it."""
        self.segment = segment or Segment(SHARED_STEP_BYTES)
        self._numbers = self.segment.view.cast("d")

    def write(self, at: float, step: int, stalled_s: float, slowed_s: float) -> None:
        """A step is reached."""
        numbers = self._numbers
        numbers[1], numbers[2], numbers[3] = step, stalled_s, slowed_s
        numbers[0] = at

    def write_expected_end(self, ending: TrainerEnd) -> None:
        """Note how the life will end, if it does: one of _ENDS."""
        self._numbers[4] = _ENDS.index(ending)

    def read(self) -> Reading:
        """The present numbers."""
        at, step, stalled_s, slowed_s, ending = self._numbers[:5].tolist()
        return Reading(at, int(step), stalled_s, slowed_s, _ENDS[int(ending)])

    def close(self) -> None:
        """Close the descriptor; the memory stays until its last view is gone."""
        self.segment.close()


MOST_BEATS = 512
_CLOSE_TIMEOUT_S = 1.0
_GIT_TIMEOUT_S = 0.5


class TrainerRun(msgspec.Struct):
    """One life of the trainer. Not thread-safe."""

    began: TrainerStarted
    shared_step: SharedStep
    """Closed when it has ended."""
    written: bool = False
    """Its end is written, with the generation that is known."""
    generation: int | None = None
    beats: list[Reading] = []
    ended: TrainerEnd = TrainerEnd.NOT
    ended_at: float | None = None
    """None: it goes on, or ends with the saver."""

    @property
    def goes_on(self) -> bool:
        """Whether it has not ended."""
        return self.ended is TrainerEnd.NOT

    def beat(self) -> None:
        """Add the present numbers, while it goes on."""
        if self.goes_on:
            self.add(self.shared_step.read())

    def end(self, how: TrainerEnd, at: float | None) -> None:
        """Take the last beat."""
        self.beat()
        self.shared_step.close()
        self.ended, self.ended_at = how, at

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
            beat = beat._replace(step=min(beat.step, later.step), stalled_s=stalled_s, slowed_s=slowed_s)
        self.beats.insert(place, beat)
        if len(self.beats) > MOST_BEATS:
            self.beats = [*self.beats[1:-1:2], self.beats[-1]]

    def document(self, run: Run, now: float) -> Heartbeat:
        """The heartbeat at this moment."""
        began, names = self.began, ("at", "step", "stalled_s", "slowed_s")
        columns = {name: [getattr(beat, name) for beat in self.beats] for name in names}
        return Heartbeat(
            format=FORMAT, kind="heartbeat", run=run.name, id=began.id, by=run.by, began_at=began.began_at,
            trains_at=began.trains_at, restored_s=began.restored_s, parent=began.parent, generation=self.generation,
            **columns, ended=self.ended, ended_at=self.ended_at or now,
            extensions={ORIGIN: msgspec.to_builtins(replace(origin(), trackers=began.trackers))},
        )  # fmt: skip


def _revision() -> str:
    """The git commit of the code in the working directory; empty if it has none, or git is slow."""
    command = ("git", "--no-optional-locks", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty")
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S).stdout.strip()
    return ""


@dataclass
class HeartbeatWriter:
    """Beats regularly while a life goes on. Any thread may call it."""

    _run: Run
    _every_s: float
    """0 for no heartbeats."""
    _replicated: bool = False
    """Others write the checkpoints to this store. Where it has nothing of the run, its volume may not be mounted, so
    nothing is written."""
    _ranks: int = 1
    """The number of ranks of the job, for its scheduler."""

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._lives: list[TrainerRun] = []
        """One that goes on, after those that have ended and whose generation may begin later."""
        self._local_only: LocalOnly | None = None
        self._committed: tuple[float, int] | None = None
        """When the newest committed checkpoint of this process was captured, and its step."""
        self._newest: Heartbeat | None = None
        """The document that was made last."""
        self._due = self._final = self._closing = False
        self._thread = threading.Thread(target=self._serve, name="ckpt-heartbeat", daemon=True)

    def begin(self, began: TrainerStarted, shared_step: SharedStep) -> None:
        """A life begins. The one before it, if there is one, ended with a restore in place."""
        if not self._every_s:
            return
        with self._changed:
            if (before := self._life) is not None:
                before.end(TrainerEnd.REWOUND, began.began_at)
            self._lives.append(TrainerRun(began, shared_step))
            if not self._thread.is_alive():
                self._thread.start()

    @property
    def _life(self) -> TrainerRun | None:
        return self._lives[-1] if self._lives and self._lives[-1].goes_on else None

    def captured(self, step: int, at: float) -> None:
        """A checkpoint of this step was captured at this moment."""
        with self._changed:
            if (life := self._life) is not None:
                life.add(life.shared_step.read()._replace(at=at, step=step))

    def committed(self, step: int, at: float) -> None:
        """The checkpoint that was captured at this moment is committed."""
        with self._changed:
            self._committed = max(self._committed or (at, step), (at, step))

    def numbered(self, generation: int, captured_at: float) -> None:
        """The generation of a save that was captured at this moment. The life that saved may have ended by now."""
        with self._changed:
            if began := [life for life in self._lives if life.began.trains_at <= captured_at]:
                began[-1].generation, began[-1].written = generation, False

    def stop(self, closed: bool) -> None:
        """The trainer has closed its end, or died: take the last beat. `close` writes it."""
        with self._changed:
            if (life := self._life) is None:
                return
            now, reading = self._run.clock(), life.shared_step.read()
            if closed:
                life.add(reading._replace(at=now))
            # A trainer that closes waits for its saves: its life ends with those.
            life.end(reading.ending if closed else TrainerEnd.DIED, None if closed else now)

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

    def _serve(self) -> None:
        extensions: dict[str, Any] = {REVISION: found} if (found := _revision()) else {}
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._due, self._every_s)
                self._due, closing = False, self._closing
                documents, local_only = self._documents(), self._local_only
                committed, life = self._committed, self._lives[-1] if self._lives else None
            if local_only is not None:
                extensions[LOCAL_ONLY] = asdict(local_only) | {"at": self._run.clock()}
            for document in documents:
                self._write(replace(document, extensions=document.extensions | extensions))
            if life is not None:
                try:
                    report_to_scheduler(self._run.clock(), committed, life.began.trains_at, self._ranks)
                except (OSError, KeyError, subprocess.SubprocessError, CkptError) as error:
                    logger.warning("the scheduler did not take the last checkpoint: %r", error)
            if closing:
                return

    def _documents(self) -> list[Heartbeat]:
        """The heartbeats to write now."""
        for life in self._lives:
            life.beat()
        # While the saver saves, a life that ends with it has not ended yet; at the end, none that goes on is due.
        due = [
            life
            for life in self._lives
            if not life.written and (life.ended_at is not None or life.goes_on is not self._final)
        ]
        for life in due:
            life.written = not life.goes_on
        self._lives = [life for life in self._lives if not life.written or life.generation is None]
        now = self._run.clock()
        documents = [life.document(self._run, now) for life in due]
        if not documents and self._newest is not None and self._local_only is not None:
            documents.append(self._newest)  # the saver still replicates what it has saved
        return documents

    def _write(self, document: Heartbeat) -> None:
        short = document.ended_at - document.began_at < self._every_s
        known = self._newest is not None and self._newest.id == document.id
        if short and document.ended is TrainerEnd.CLOSED and document.generation is None and not known:
            return  # a script that saved nothing
        self._newest = document  # written again while checkpoints are replicated, if it cannot be written now
        try:
            if self._replicated and not any(True for _ in self._run.store.list_folders(f"{self._run.keys.folder}/")):
                return
            self._run.write(self._run.keys.heartbeat(document.id), document)
        except CkptError as error:
            logger.warning("a heartbeat was not written: %s", error)
        except Exception:
            logger.exception("a heartbeat was not written")

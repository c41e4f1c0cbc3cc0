"""Commit: the receipt of this rank, then the checkpoint of all ranks. Uses no collective.

Rank 0 polls the store for the receipts of the other ranks, which poll it for the outcome. All attempts that wait are
polled by one thread, so that one which lacks a rank does not delay later ones that are complete. Rank 0 reads receipts
as they appear: when the last one is there, only that one is left to read. Pauses grow with the number of ranks, because
all of them send requests to the same prefix of the store (docs/decisions/0041).

Numbering finds the generation of the attempts. `notify` sends a commit to the daemon: the daemon finds it later by
listing, so nothing waits for a notification.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import msgspec

from ckpt.saver.messages import Setup
from ckptstore.commits.catalog import newest_first
from ckptstore.commits.commit import (
    Known,
    abort_attempt,
    aborted_by,
    check_alive,
    commit_attempt,
    earlier_saves,
    end_if_superseded,
    read_outcome,
    read_receipts,
    receipt_ranks,
    superseded,
)
from ckptstore.commits.generations import NewAttempt, Session, begin_generation
from ckptstore.errors import AttemptAborted, CkptError, ObjectMissing, RankFailed, SaveFailed, SaveSkipped
from ckptstore.format.documents import Outcome
from ckptstore.format.merging import StoredReceipt, difference, replicas
from ckptstore.names import Attempt
from ckptstore.run import Run

logger = logging.getLogger(__name__)


@dataclass
class Numbering:
    """The generations of the sessions of one saver. For any thread."""

    run: Run
    _warn: Callable[[str], object]
    """Called with a message for the user, if a session leaves all checkpoints of the run behind."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}

    def attempt(self, new: NewAttempt) -> Attempt:
        """The attempt with its generation, which is durable on return. Raises Unavailable."""
        session = new.session
        with self._lock:
            if session.id not in self._numbers:
                self._numbers[session.id] = self._begin(session)
            return new.of(self._numbers[session.id])

    def session_of(self, generation: int) -> str | None:
        """The session of this saver with that generation."""
        with self._lock:
            return next((session for session, number in self._numbers.items() if number == generation), None)

    def _begin(self, session: Session) -> int:
        begun, parent = begin_generation(self.run, session), session.parent
        if not begun.created:
            return begun.number
        newest = next((c for c in newest_first(self.run) if c.attempt.generation < begun.number), None)
        if newest is not None and (parent is None or newest.attempt > parent):
            start = "from nothing" if parent is None else f"from step {parent.step}"
            self._warn(
                f"run {self.run.name!r} has checkpoints, the newest is {newest.id}, that this trainer has not "
                f"restored: it continues {start}. From its first commit on it is the run's newest generation "
                f"({begun.number}), and earlier checkpoints that are not before that step are abandoned: they are not "
                "restored unless they are named. Restore before the first save to continue the run, or use another run"
            )
        return begun.number


_TIMEOUT_S = 5.0


def notify(setup: Setup, attempt: Attempt) -> None:
    """Report a commit to the daemon. Never raises CkptError."""
    # Imported here, so that savers without a daemon do not load the HTTP client.
    import httpx

    from ckptapi.client import DaemonClient

    assert setup.daemon is not None
    with closing(DaemonClient(setup.daemon, setup.token, timeout=httpx.Timeout(_TIMEOUT_S), retries=0)) as client:
        try:
            client.notify(setup.run, attempt)
        except CkptError as error:
            logger.warning("could not notify the daemon of %s: %s", attempt, error)


_SHORTEST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 2.0
_URGENT_PAUSE_S = 0.1
"""The longest pause when this host is about to go."""
_OLD_PAUSE_SHARE = 1 / 30
"""Pauses of attempts that have waited for more than a minute: many of them may wait at the same time."""
_LOOKS_PER_S = 1000
"""Most requests of all ranks but 0 together for the outcome of one attempt."""
_LISTED_PER_S = 50_000
"""Most ranks whose receipts rank 0 looks for."""
_RANKS_PER_LOOK = 32
"""Rank 0 may look more often than every _LONGEST_PAUSE_S where it does so for more ranks."""
_READ_AHEAD = 2
"""The newest attempts, whose receipts rank 0 keeps before they are complete."""
_LOST_S = 10.0, 60.0
"""How long rank 0, and another rank, waits without news before it looks whether another trainer continues the run."""
_DRIFTED = (
    "the checkpoint of step {} has the state of the lowest rank only, and replicas have drifted apart: {}. Make them "
    "equal before a save, or save what each rank has as a run of its own"
)
_NEVER_FORGOTTEN_S = 24 * 3600.0
"""An attempt whose snapshot is younger is on no list of deleted attempts: an attempt is on it a week after its
deletion."""

OnEnd = Callable[[Outcome | BaseException], None]


class _Waiting(msgspec.Struct, eq=False):
    """An attempt that is not decided, with times of time.monotonic()."""

    attempt: Attempt
    own: StoredReceipt
    ended: OnEnd
    since: float
    look_at: float
    changed_at: float
    """When rank 0 last found another receipt."""
    found: dict[int, StoredReceipt] = {}
    """Receipts that rank 0 has read, by rank."""
    entries: Known = {}
    """The entries of these receipts."""
    earlier: Sequence[Attempt] = ()
    """Attempts of earlier saves of this step in the session."""


@dataclass
class Committer:
    """Commits attempts as soon as all of their receipts exist, in any order. Each has a time-out of its own."""

    _run: Run
    _setup: Setup
    _warn: Callable[[str], object] | None = logger.warning
    """Called with a message for the user, once replicas of different ranks have drifted apart."""

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._waiting: list[_Waiting] = []
        self._polling = self._urgent = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-commit")

    def add(self, attempt: Attempt, own: StoredReceipt, ended: OnEnd) -> None:
        """Commit an attempt once it is complete, or on ranks other than 0 wait for its outcome. For any thread.

        The last save of a step counts, so rank 0 waits for earlier ones by this trainer that are under way.

        ended: called once, by the committer's thread: with the outcome when the checkpoint exists; with SaveFailed
        if ranks are not done within the time-out, SaveSkipped if a rank skipped the attempt, RankFailed if a rank
        aborted it after an error, Superseded if a newer generation has begun, AttemptAborted if a collector aborted it;
        or with another error of the commit.
        """
        now = time.monotonic()
        look_at = now + _first_pause(self._setup)
        with self._changed:
            self._waiting.append(
                _Waiting(attempt, own, ended, now, look_at, changed_at=now, earlier=earlier_saves(own.receipt))
            )
            self._changed.notify()
            if not self._polling:
                self._polling = True
                self._thread.submit(self._poll)

    def expedite(self) -> None:
        """Look often from now on: this host is about to go. For any thread."""
        with self._changed:
            self._urgent = True
            for one in self._waiting:
                one.look_at = 0.0
            self._changed.notify()

    def close(self) -> None:
        """Return when all attempts have ended."""
        self._thread.shutdown(wait=True)

    def _poll(self) -> None:
        while due := self._wait_for_due():
            for one in due:
                self._look(one)

    def _wait_for_due(self) -> list[_Waiting]:
        """The attempts to look at now, oldest first; empty if none waits any more."""
        with self._changed:
            while self._waiting:
                now = time.monotonic()
                if due := [one for one in self._waiting if one.look_at <= now]:
                    return due
                self._changed.wait(min(one.look_at for one in self._waiting) - now)
            self._polling = False
            return []

    def _look(self, one: _Waiting) -> None:
        result: Outcome | BaseException | None
        try:
            with self._changed:
                ahead = one in self._waiting[-_READ_AHEAD:]
                under_way = any(other.attempt in one.earlier for other in self._waiting)
            result = None if under_way else self._try_commit(one, ahead)
            now, timeout_s = time.monotonic(), self._setup.peer_timeout_s
            waited_s, idle_s = now - one.since, now - one.changed_at
            if result is None and idle_s >= _LOST_S[min(1, self._setup.rank)]:
                end_if_superseded(self._run, one.attempt)
            if result is None and waited_s >= timeout_s:
                result = _timed_out(self._run, self._setup, one.attempt)
        except BaseException as error:
            result = error
        if result is None:
            with self._changed:
                pause_s = _pause(self._setup, len(one.found), waited_s, idle_s, self._urgent)
                one.look_at = one.since + min(timeout_s, waited_s + pause_s)
            return
        with self._changed:
            self._waiting.remove(one)
        try:
            one.ended(result)
        except Exception:
            logger.exception("the end of attempt %s was not reported", one.attempt)

    def _try_commit(self, one: _Waiting, ahead: bool) -> Outcome | None:
        """The outcome of a committed attempt; None if ranks are missing. Raises if it cannot be committed any more.

        ahead: read and keep the receipts that are there, although others are missing.
        """
        run, setup, attempt = self._run, self._setup, one.attempt
        if setup.rank == 0 and _gather(run, setup, one, ahead):
            receipts = [one.own, *(one.found[rank] for rank in range(1, setup.world_size))]
            committed = commit_attempt(run, receipts)
            different = difference(replicas(stored).sampled for stored in receipts)
            if different and self._warn is not None:
                self._warn(_DRIFTED.format(attempt.step, different))
                self._warn = None
            return committed
        outcome = read_outcome(run, attempt)
        if outcome is not None and outcome.committed is None:
            raise _aborted(run.name, attempt, outcome)
        if outcome is not None and abs(run.clock() - one.own.receipt.created_at) > _NEVER_FORGOTTEN_S:
            check_alive(run, attempt)
        return outcome


def _pause(setup: Setup, found: int, waited_s: float, idle_s: float, urgent: bool = False) -> float:
    """Seconds until the next look at an attempt that has waited so long, and so long without a new receipt. Pure.

    found: the number of receipts that rank 0 has read.
    """
    longest = _LONGEST_PAUSE_S * (1.0 if setup.rank else min(1.0, _RANKS_PER_LOOK / setup.world_size))
    longest = _URGENT_PAUSE_S if urgent else max(longest, idle_s * _OLD_PAUSE_SHARE)
    return max(_shortest_pause(setup, found), min(waited_s / 2, longest))


def _shortest_pause(setup: Setup, found: int = 0) -> float:
    return max(_SHORTEST_PAUSE_S, (setup.world_size - found) / (_LOOKS_PER_S if setup.rank else _LISTED_PER_S))


def _first_pause(setup: Setup) -> float:
    """Seconds from a rank's receipt to its first look: no outcome exists before rank 0 has read the receipt. Pure."""
    # Ranks finish their uploads together, and should not look together.
    return _shortest_pause(setup) * (0.5 + setup.rank / setup.world_size) if setup.rank else 0.0


def _gather(run: Run, setup: Setup, one: _Waiting, ahead: bool) -> bool:
    """Read the receipts that have appeared since the last look. True if those of all other ranks have been read."""
    if not ahead:
        one.found.clear()
    missing = set(range(1, setup.world_size)) - one.found.keys()
    new = missing & receipt_ranks(run, one.attempt, missing) if missing else set()
    if new and (ahead or new == missing):
        ranks = sorted(new)
        try:
            one.found |= zip(ranks, read_receipts(run, one.attempt, ranks, one.entries), strict=True)
        except ObjectMissing:
            return False  # a collector deletes those of an aborted attempt
        one.changed_at = time.monotonic()
    return len(one.found) == setup.world_size - 1


def _timed_out(run: Run, setup: Setup, attempt: Attempt) -> SaveFailed:
    if setup.rank:
        return SaveFailed(
            f"attempt {attempt} of run {run.name!r} was not committed within {setup.peer_timeout_s:.0f} s",
            "Check rank 0: its saver commits for all ranks",
        )
    missing = sorted(set(range(1, setup.world_size)) - receipt_ranks(run, attempt))
    return SaveFailed(
        f"ranks {missing[:8]} of {setup.world_size} did not finish attempt {attempt} of run {run.name!r} "
        f"within {setup.peer_timeout_s:.0f} s",
        "Check those ranks. Nothing was committed, and earlier checkpoints are unchanged",
    )


def _aborted(run: str, attempt: Attempt, outcome: Outcome) -> CkptError:
    abort = aborted_by(outcome)
    if abort is None:
        return superseded(outcome) or AttemptAborted(
            f"attempt {attempt} of run {run!r} was aborted by {outcome.by}", "Save again"
        )
    step = f"step {attempt.step} of run {run!r}"
    if abort.failure is None:
        return SaveSkipped(f"{step} was skipped by rank {abort.rank}, which was busy with earlier saves")
    return RankFailed(
        f"rank {abort.rank} could not save {step}: {abort.failure}",
        "Check that rank. Nothing was committed, and earlier checkpoints are unchanged",
    )


def abort_attempts(numbering: Numbering, rank: int, attempts: Iterable[NewAttempt], failure: str | None) -> None:
    """Abort attempts that this rank takes no part in, so that the other ranks do not wait for it. Never raises.

    failure: what went wrong on this rank; None if it skips the attempts.
    """
    try:
        for attempt in attempts:
            abort_attempt(numbering.run, numbering.attempt(attempt), rank, failure)
    except CkptError as error:
        logger.warning("could not abort the attempt; other ranks will wait until their timeout: %s", error)


def describe(error: BaseException) -> str:
    """The message about an error for other ranks."""
    return f"{error.code}: {error.message}" if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"

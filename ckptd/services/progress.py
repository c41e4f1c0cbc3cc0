"""The state of a restore session from the reports of its ranks: its end, silent ranks, stragglers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

from ckptapi.bodies import Phase, RankReport, RestoreState
from ckptd.index import RankProgress, Restore

MAX_STRAGGLERS = 100
_MAX_PROBLEM = 1000
_NAMED = 16


def join(restore: Restore, before: RankProgress | None, rank: int, now: float) -> tuple[Restore, RankProgress | None]:
    """Add a rank to a session. A rank that joins again keeps its earlier report."""
    if not restore.live:
        return restore, before
    if before is not None:
        return restore, replace(before, reported_at=now)
    return replace(restore, num_joined=restore.num_joined + 1), RankProgress(rank, Phase.JOINED, 0, 0, now)


def advance(
    restore: Restore, before: RankProgress | None, rank: int, report: RankReport, now: float
) -> tuple[Restore, RankProgress | None]:
    """Apply the report of a rank; the last restored rank and the first failed rank end the session.

    An ended session does not change. A restored rank can fail but not go back: reports may arrive out of order.
    """
    if not restore.live:
        return restore, before
    restore, joined = join(restore, before, rank, now)
    assert joined is not None
    if joined.phase is Phase.RESTORED and report.phase is not Phase.FAILED:
        return restore, joined
    problem = report.problem.replace("\0", "?")[:_MAX_PROBLEM]
    latest = RankProgress(rank, report.phase, report.done_bytes, report.total_bytes, now, problem)
    restore = replace(
        restore,
        num_restored=restore.num_restored + (latest.phase is Phase.RESTORED) - (joined.phase is Phase.RESTORED),
        done_bytes=restore.done_bytes + latest.done_bytes - joined.done_bytes,
        total_bytes=restore.total_bytes + latest.total_bytes - joined.total_bytes,
    )
    if latest.phase is Phase.FAILED:
        why = problem or "it gave no reason"
        restore = replace(restore, state=RestoreState.FAILED, ended_at=now, problem=f"rank {rank} failed: {why}")
    elif restore.num_restored == restore.world_size:
        restore = replace(restore, state=RestoreState.RESTORED, ended_at=now)
    return restore, latest


def fraction(progress: RankProgress) -> float:
    """The fraction of its restore that a rank has done, from 0 to 1."""
    if progress.phase is Phase.RESTORED:
        return 1.0
    return min(1.0, progress.done_bytes / progress.total_bytes) if progress.total_bytes else 0.0


def mean(restore: Restore, ranks: Iterable[RankProgress]) -> float:
    """The fraction of a session that is done, from 0 to 1."""
    return sum(map(fraction, ranks)) / restore.world_size


def slowest(ranks: Iterable[RankProgress]) -> RankProgress | None:
    """The rank with the least progress among those that joined and are not restored."""
    waiting = (progress for progress in ranks if progress.phase is not Phase.RESTORED)
    return min(waiting, key=lambda progress: (fraction(progress), progress.rank), default=None)


def stragglers(restore: Restore, ranks: Sequence[RankProgress], now: float) -> list[int]:
    """Ranks that are not restored and are behind: less than half of the median rank's progress, or silent for more
    than a quarter of ttl_s. Sorted, MAX_STRAGGLERS at most.

    Ranks that never joined have no progress and have been silent since the session began.
    """
    if not restore.live:
        return []
    half = _median(restore.world_size, [fraction(progress) for progress in ranks]) / 2
    late = now - restore.ttl_s / 4
    behind = [
        progress.rank
        for progress in ranks
        if progress.phase is not Phase.RESTORED and (fraction(progress) < half or progress.reported_at < late)
    ]
    if half > 0 or restore.created_at < late:
        behind += _absent(restore.world_size, ranks)
    return sorted(behind)[:MAX_STRAGGLERS]


def silence(restore: Restore, ranks: Sequence[RankProgress], now: float, since: float) -> str:
    """Why the session expires: the ranks that were silent for all of ttl_s, with their phases. Empty if none was.

    since: silence before this time does not count, because no daemon was running to receive reports.
    """
    last_call = now - restore.ttl_s
    if since > last_call:
        return ""
    silent = [
        f"rank {progress.rank} ({progress.phase})"
        for progress in ranks
        if progress.phase is not Phase.RESTORED and progress.reported_at <= last_call
    ]
    num_silent = len(silent)
    if restore.created_at <= last_call:
        silent += [f"rank {rank} (never joined)" for rank in _absent(restore.world_size, ranks)]
        num_silent += restore.world_size - len(ranks)
    if not silent:
        return ""
    more = f" and {num_silent - _NAMED} more" if num_silent > _NAMED else ""
    return f"no report for {restore.ttl_s:g} s from {', '.join(silent[:_NAMED])}{more}"


def _median(world_size: int, fractions: Sequence[float]) -> float:
    num_absent = world_size - len(fractions)
    ordered = sorted(fractions)
    middle = [i - num_absent for i in ((world_size - 1) // 2, world_size // 2)]
    return sum(ordered[i] for i in middle if i >= 0) / 2


def _absent(world_size: int, ranks: Sequence[RankProgress]) -> list[int]:
    """The first ranks that never joined, MAX_STRAGGLERS at most."""
    present = {progress.rank for progress in ranks}
    return list(islice((rank for rank in range(world_size) if rank not in present), MAX_STRAGGLERS))

"""Retention: from a policy and the checkpoints of one run to the reasons why each one stays. Pure: no I/O, no clock.

A checkpoint stays if any rule gives a reason, or if something holds it. The newest one and the last one that was
found whole always stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite

from ckptstore.catalog import Checkpoint, State
from ckptstore.errors import InvalidPolicy
from ckptstore.names import Attempt

_HOUR_S = 3600
_DAY_S = 24 * _HOUR_S
_PERIODS: dict[str, Callable[[float], int]] = {
    "hourly": lambda at: int(at // _HOUR_S),
    "daily": lambda at: int(at // _DAY_S),
    "weekly": lambda at: int((at // _DAY_S + 3) // 7),  # weeks begin on Monday; 1970 began on a Thursday
}


@dataclass(frozen=True, slots=True)
class Best:
    """The so many checkpoints with the best values of a metric."""

    metric: str
    highest: bool
    """Whether more is better."""
    count: int

    def __str__(self) -> str:
        return f"{self.metric}:{'max' if self.highest else 'min'}:{self.count}"

    @staticmethod
    def parse(text: str) -> Best:
        """What `str` writes: METRIC:min:N or METRIC:max:N. Raises InvalidPolicy."""
        metric, _, rest = text.rpartition(":")
        metric, _, direction = metric.rpartition(":")
        number = int(rest) if rest.isascii() and rest.isdigit() and len(rest) < 10 else 0
        if not metric or direction not in ("min", "max") or number < 1:
            raise InvalidPolicy(f"{text!r} names no best checkpoints", "Write METRIC:min:N or METRIC:max:N")
        return Best(metric, direction == "max", number)


@dataclass(frozen=True, slots=True)
class Policy:
    """What to keep of a run. A rule that is 0 or empty is not used; at least one must be. Raises InvalidPolicy."""

    keep_last: int = 0
    """The newest so many steps."""
    keep_every: int = 0
    """The first step at or after each multiple of so many steps."""
    keep_hourly: int = 0
    """The last checkpoint of each of the newest so many hours (of UTC) that have one."""
    keep_daily: int = 0
    keep_weekly: int = 0
    keep_best: tuple[Best, ...] = ()
    keep_within_s: float = 0.0
    """Everything that was committed in the last so many seconds."""
    max_bytes: int = 0
    """Not a reason but a limit: of what rules keep, or of everything if there is no other rule, the newest so many
    stored bytes."""

    def __post_init__(self) -> None:
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "keep_best"}
        for name, value in numbers.items():
            allowed = (int, float) if name == "keep_within_s" else int
            if isinstance(value, bool) or not isinstance(value, allowed) or not 0 <= value < 1 << 62:
                raise InvalidPolicy(f"{name} cannot be {value!r}", "Use a number from 0 on; 0: not used")
        if not any(numbers.values()) and not self.keep_best:
            raise InvalidPolicy(
                "the policy keeps nothing", "Keep at least something: the last 1, every 1000, within a day ..."
            )


@dataclass(frozen=True, slots=True)
class Verdict:
    """One checkpoint and why it stays; no reasons: it goes."""

    checkpoint: Checkpoint
    reasons: tuple[str, ...]


def judge(
    policy: Policy,
    checkpoints: Sequence[Checkpoint],
    holds: Mapping[Attempt, Iterable[str]],
    now: float,
    verified: Attempt | None = None,
) -> list[Verdict]:
    """A verdict per checkpoint of one run, in the order given.

    holds: why attempts must stay whatever the policy says. verified: the one that was last found whole. Corrupt
    ones stay until somebody looks at them: what they were cannot be known, or may be worth repairing.
    """
    usable = sorted((c for c in checkpoints if c.state is State.COMMITTED), key=lambda c: c.step, reverse=True)
    reasons = _limited(policy, usable, _by_rules(policy, usable, now))
    if usable and not reasons.get(usable[0].attempt):
        reasons[usable[0].attempt] = ["newest"]

    def of(checkpoint: Checkpoint) -> Iterable[str]:
        if checkpoint.state is State.CORRUPT:
            yield "corrupt"
        yield from reasons.get(checkpoint.attempt, ())
        if checkpoint.attempt == verified:
            yield "last-verified"
        yield from holds.get(checkpoint.attempt, ())

    return [Verdict(checkpoint, tuple(of(checkpoint))) for checkpoint in checkpoints]


def _by_rules(policy: Policy, usable: Sequence[Checkpoint], now: float) -> dict[Attempt, list[str]]:
    """usable: by falling step."""
    reasons: dict[Attempt, list[str]] = defaultdict(list)
    for i, checkpoint in enumerate(usable[: policy.keep_last], 1):
        reasons[checkpoint.attempt].append(f"last-{i}")
    for checkpoint in _first_of_each(policy.keep_every, usable):
        reasons[checkpoint.attempt].append(f"every-{policy.keep_every}")
    by_age = sorted(usable, key=lambda c: (c.committed_at, c.step), reverse=True)
    for period, bucket in _PERIODS.items():
        last_of: dict[int, Checkpoint] = {}
        for checkpoint in by_age:
            last_of.setdefault(bucket(checkpoint.committed_at), checkpoint)
        for i, checkpoint in enumerate(list(last_of.values())[: getattr(policy, f"keep_{period}")], 1):
            reasons[checkpoint.attempt].append(f"{period}-{i}")
    for best in policy.keep_best:
        for i, checkpoint in enumerate(_ranked(best, usable)[: best.count], 1):
            reasons[checkpoint.attempt].append(f"best-{best.metric}-{i}")
    for checkpoint in usable:
        if policy.keep_within_s and now - checkpoint.committed_at <= policy.keep_within_s:
            reasons[checkpoint.attempt].append("within")
    return reasons


def _first_of_each(every: int, usable: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The lowest step from each multiple up to the next one. Before the first multiple only step 0 counts."""
    if not every:
        return []
    first = {c.step // every: c for c in usable if c.step >= every or c.step == 0}
    return list(first.values())


def _ranked(best: Best, usable: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Those that have the metric, the best first; of equal ones the newer."""
    have = [c for c in usable if isfinite(c.metrics.get(best.metric, float("nan")))]
    return sorted(have, key=lambda c: c.metrics[best.metric], reverse=best.highest)


def _limited(
    policy: Policy, usable: Sequence[Checkpoint], reasons: dict[Attempt, list[str]]
) -> dict[Attempt, list[str]]:
    """The reasons of the newest that fit into `max_bytes` together."""
    if not policy.max_bytes:
        return reasons
    if policy == Policy(max_bytes=policy.max_bytes):
        reasons = {c.attempt: ["fits"] for c in usable}
    total = 0
    for checkpoint in usable:
        if reasons.get(checkpoint.attempt):
            total += checkpoint.stored_bytes
            if total > policy.max_bytes:
                reasons[checkpoint.attempt] = []
    return reasons

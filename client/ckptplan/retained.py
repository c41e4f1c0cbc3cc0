"""How much a run stores under its retention rules, by the same function that prunes it. Pure."""

from __future__ import annotations

from math import floor

import msgspec

from ckptplan.failures import DAY_S
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import InvalidRequest
from ckptstore.format.records import Best, Policy
from ckptstore.names import Attempt
from ckptstore.retention.policy import evaluate

_MOST_SAVES = 200_000
_ULID = "0" * 26


class Retained(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored at the end of a run."""

    num_saves: int
    num_kept: int
    stored_bytes: int
    """Every checkpoint counts whole: savings by references to earlier checkpoints are not in it."""
    price_per_month: float | None
    """Price of GB-month × stored GB (10^9 bytes)."""


def retained(
    policy: Policy | None, num_saves: int, interval_s: float, step_s: float, stored_bytes: int, price: float | None
) -> Retained:
    """Evaluate the policy at the end of a run that saved at even intervals. policy None: everything is kept.

    The best checkpoints by a metric are assumed to be the oldest, which gives the upper bound. price: of a GB-month.
    Raises InvalidRequest for more saves than can be evaluated.
    """
    if num_saves > _MOST_SAVES and policy is not None:
        raise InvalidRequest(
            f"{num_saves:,} saves are too many to apply rules to", f"Give --interval for at most {_MOST_SAVES:,}"
        )
    kept = num_saves if policy is None else _num_kept(policy, num_saves, interval_s, step_s, stored_bytes)
    total = kept * stored_bytes
    monthly = None if price is None else price * total / 1e9
    return Retained(num_saves=num_saves, num_kept=kept, stored_bytes=total, price_per_month=monthly)


def _num_kept(policy: Policy, num_saves: int, interval_s: float, step_s: float, stored_bytes: int) -> int:
    metrics = {Best.parse(text).metric: Best.parse(text).highest for text in policy.keep_best}
    saves = []
    for number in range(num_saves, 0, -1):
        at = DAY_S + number * interval_s  # a time of 0 would count as unknown
        saves.append(
            Checkpoint(
                run="plan",
                attempt=Attempt(floor(number * interval_s / step_s), _ULID),
                state=State.COMMITTED,
                committed_at=at,
                written_at=at,
                stored_bytes=stored_bytes,
                metrics={name: float(-number if highest else number) for name, highest in metrics.items()},
            )
        )
    now = DAY_S + num_saves * interval_s
    return sum(bool(decision.reasons) for decision in evaluate(policy, saves, {}, now))

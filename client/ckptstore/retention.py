"""Retention: from a policy and the checkpoints of one run to the reasons why each one stays. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptstore.catalog import Checkpoint, State
from ckptstore.errors import InvalidPolicy
from ckptstore.names import Attempt


@dataclass(frozen=True, slots=True)
class Policy:
    """What to keep of a run."""

    keep_last: int
    """The newest so many steps; at least 1."""

    def __post_init__(self) -> None:
        if isinstance(self.keep_last, bool) or not isinstance(self.keep_last, int) or self.keep_last < 1:
            raise InvalidPolicy(
                f"cannot keep the last {self.keep_last} checkpoints",
                "The newest checkpoint is never deleted: keep at least 1",
            )


@dataclass(frozen=True, slots=True)
class Verdict:
    """One checkpoint and why it stays; no reasons: it goes."""

    checkpoint: Checkpoint
    reasons: tuple[str, ...]


def judge(policy: Policy, checkpoints: Sequence[Checkpoint], held: Mapping[Attempt, Iterable[str]]) -> list[Verdict]:
    """A verdict per checkpoint of one run, in the order given.

    held: who holds a lease on which attempt. Corrupt outcomes stay until somebody looks at them:
    what they were cannot be known.
    """
    steps = sorted({c.step for c in checkpoints if c.state is State.COMMITTED}, reverse=True)
    rank = {step: i + 1 for i, step in enumerate(steps)}

    def reasons(checkpoint: Checkpoint) -> Iterable[str]:
        if checkpoint.state is State.CORRUPT:
            yield "corrupt"
        if checkpoint.state is State.COMMITTED and rank[checkpoint.step] <= policy.keep_last:
            yield f"last-{rank[checkpoint.step]}"
        for holder in held.get(checkpoint.attempt, ()):
            yield f"lease:{holder}"

    return [Verdict(checkpoint, tuple(reasons(checkpoint))) for checkpoint in checkpoints]

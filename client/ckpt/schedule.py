"""When to save: as often as the measured cost allows. Rank 0 decides, and all ranks have its decision in time.

Rank 0 decides ahead: it publishes a horizon and the steps up to it at which to save. It moves the horizon on long
before any rank reaches it, so ranks answer from the decision they have, without a collective.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from typing import Literal, NamedTuple

from msgspec.structs import replace

from ckpt.config import Group
from ckpt.preemption import Preemption, SaveEstimate
from ckpt.ranks.broadcast import Cost, SaveBroadcast, SaveDecision
from ckpt.ranks.world import World
from ckpt.saver.launcher import EXIT_BEHIND, EXIT_SAVED
from ckpt.snapshot.costs import FIRST_AFTER_TICKS, Costs, StepClock
from ckpt.snapshot.handle import SaveHandle
from ckptplan.training import best_interval
from ckptstore.errors import InvalidRequest, RankLost
from ckptstore.format.records import SaveCost
from ckptstore.stores import REHEARSAL

logger = logging.getLogger(__name__)

LEAD_S = 2.0
"""How far ahead of its own step rank 0 decides."""
_POLLS_PER_LEAD = 5
_FIRST_WINDOW = 16  # steps
_REMEMBERED = 16  # saves in a decision: no rank is that far behind

OVERHEAD = 0.01
"""The share of time that saves may cost, unless it or a failure rate is given."""
_DURABLE_SHARE = 0.5  # of the time a save is under way, at most: without the rest there is nothing to compare with


class Limits(NamedTuple):
    """The limits of the interval between saves. None: it has no effect."""

    seconds: float | None
    overhead: float | None
    mtbf_s: float | None = None

    @classmethod
    def of(cls, seconds: float | None, overhead: float | Literal["auto"] | None, mtbf_s: float | None) -> Limits:
        """The arguments of `Checkpointer.every`. Raises InvalidRequest."""
        share = (OVERHEAD if mtbf_s is None else None) if overhead == "auto" else overhead
        if seconds is None and share is None and mtbf_s is None:
            raise InvalidRequest("neither seconds, overhead nor mtbf_s is given", "Give at least one of them")
        for name, value in (("seconds", seconds), ("mtbf_s", mtbf_s)):
            if value is not None and not 0 < value < math.inf:
                raise InvalidRequest(f"{name} {value} is not positive", "Give seconds, such as 600")
        if share is not None and not 0 < share <= 1:
            raise InvalidRequest(
                f"overhead {share} must be above 0 and at most 1", "Give a share of the time, such as 0.01"
            )
        return cls(seconds, share, mtbf_s)

    def interval_s(self, cost_s: float, durable_s: float) -> float:
        """The shortest interval after a save with this cost that was durable after so long."""
        shortest = max(self.seconds or 0.0, durable_s / _DURABLE_SHARE)
        if self.overhead is not None:
            shortest = max(shortest, cost_s / self.overhead)
        if self.mtbf_s is not None:
            best = best_interval(cost_s, self.mtbf_s, durable_s=durable_s)
            shortest = max(shortest, best if math.isfinite(best) else 0.0)
        return shortest


@dataclass(eq=False)
class Schedule:
    """Decides when the training loop saves; see `Checkpointer.every`. All but `request` is for the training thread."""

    _newest: Callable[[], SaveHandle | None]
    """The save that began last."""
    _limits: Limits
    _peer_timeout_s: float
    _steps: StepClock
    """Gets the steps of `due`, for heartbeats."""
    _preemption: Preemption
    """Gives notice, and says what to do about it."""
    _group: Group = "all"
    _optimizer_steps: Callable[[], int] | None = None
    """Their number so far: no step of `due` is chosen within an accumulation window."""
    _clock: Callable[[], float] = time.monotonic
    _lead_s: float = LEAD_S

    def __post_init__(self) -> None:
        self._stopping: SaveEstimate | None = None
        self._poll_s = self._lead_s / _POLLS_PER_LEAD
        self._costs = Costs()
        self._count_steps = self._optimizer_steps or (lambda: 0)
        self._num_optimizer_steps = self._count_steps()
        self._whole = self._window = 0
        """The last step after which no accumulation window was open, and the longest one so far, in steps."""
        self._looks = _FIRST_WINDOW if self._optimizer_steps is None else 0
        self._rank = self._global_rank = 0
        self._broadcast: SaveBroadcast | None = None
        self._step: int | None = None
        self._stride = 1
        self._decision = SaveDecision(-1, 0, ())
        self._taken = 0
        self._requests = self._served = 0

    def due(self, step: int) -> bool:
        """Whether to save now. Call it once per step, on every rank with the same, increasing steps.

        All ranks get the same answers. Steps may be left out: what was decided for one of them is due at the next
        call. It takes microseconds; only a rank that is ahead of rank 0's decision waits for the next one, at most
        peer_timeout_s. The first call must come after the process group is made. Raises InvalidRequest or RankLost.
        """
        if self._step is None:
            self._begin()
        elif step <= self._step:
            raise InvalidRequest(
                f"step {step} comes after step {self._step}", "Steps increase; after going back, make a new schedule"
            )
        else:
            self._stride = step - self._step
        self._step = step
        self._steps.reached(step)
        self._preemption.notice.look()
        now = self._clock()
        self._costs.tick(now, self._newest())
        self._look_at_optimizers(step)
        if REHEARSAL in os.environ:  # each run saves the same steps, whatever time it takes
            return self._whole == step or (not self._window and self._looks >= _FIRST_WINDOW)
        if self._rank == 0:
            self._decide(step, now)
        else:
            self._listen(step)
        return self._take(step)

    def request(self) -> None:
        """Request a save at the next step that all ranks can agree on, whatever it costs; on any rank.

        Any thread may call it, and so may a signal handler.
        """
        self._requests += 1
        self._steps.requested()
        if self._broadcast is not None and self._rank:
            self._broadcast.request()

    @property
    def noticed(self) -> bool:
        """Whether this rank, or another one, has notice of a preemption. For any thread; ranks learn of it within a
        second of each other. A loop without `due`, such as an evaluation, may look at it and end early.
        """
        return self._deadline() is not None

    @property
    def stop(self) -> bool:
        """Whether the loop should end now, because of a preemption: true on all ranks after the same `due(step)`."""
        return self._stopping is not None

    @property
    def exit_code(self) -> int | None:
        """With what to exit after `stop`: 75 if the last step is saved, 76 if the newest checkpoint is older.

        Both request to start the job again. None before.
        """
        return None if self._stopping is None else EXIT_SAVED if self._stopping else EXIT_BEHIND

    @property
    def slowdown_s(self) -> float | None:
        """The slowdown of this rank's steps during the newest save, in seconds; None if it is not known."""
        return self._costs.slowdown_s

    def close(self) -> None:
        """End the thread that exchanges messages with the other ranks. due() must not be called afterwards."""
        if self._broadcast is not None:
            self._broadcast.close()

    def _begin(self) -> None:
        world = World(self._peer_timeout_s, self._group)
        if world.size > 1:
            self._rank, self._global_rank = world.rank, world.global_rank
            preemption = self._preemption
            self._broadcast = SaveBroadcast(
                world.private_store(), world.rank, self._poll_s, world.members,
                lambda: preemption.notice.deadline, preemption.clock,
            )  # fmt: skip
            if self._requests and self._rank:
                self._broadcast.request()

    def _listen(self, step: int) -> None:
        """On other ranks: report the cost of the last save, and wait for a decision on this step."""
        assert self._broadcast is not None
        self._broadcast.report(Cost(self._taken, self._costs.cost_s))
        if self._decision.horizon < step:
            self._decision = self._broadcast.wait_for(lambda decision: decision.horizon >= step, self._peer_timeout_s)

    def _decide(self, step: int, now: float) -> None:
        """On rank 0: decide on the steps that are still open, far enough ahead."""
        decision, lead = self._decision, self._lead()
        horizon, saves = decision.horizon, decision.saves
        # Optimizers that were not seen to step in so long may call no hook.
        may_be_within = not self._window and self._looks < _FIRST_WINDOW
        wanted = not may_be_within and self._requested()
        pending = decision.num_saves > self._taken
        if decision.stop_at < 0 and not pending and (deadline := self._deadline()) is not None:
            self._publish(self._stop(self._between_windows(max(step, horizon + 1)), step, deadline))
            return
        others_s = self._broadcast.cost.seconds if self._broadcast is not None else 0.0
        if not (pending or may_be_within) and (
            wanted or self._costs.may_save(now, self._limits.seconds, self._limits.interval_s, others_s)
        ):
            save_at = self._between_windows(max(step, horizon + 1))
            horizon, saves = save_at, (*saves, save_at)[-_REMEMBERED:]
        if horizon < step + lead / 2:
            horizon = step + lead
        if (horizon, saves) != (decision.horizon, decision.saves):
            num_saves = decision.num_saves + (saves != decision.saves)
            self._publish(replace(decision, horizon=horizon, num_saves=num_saves, saves=saves))

    def _look_at_optimizers(self, step: int) -> None:
        self._looks += 1
        if (made := self._count_steps()) != self._num_optimizer_steps:
            window = step - self._whole if self._window else self._looks * self._stride
            self._window = max(self._window, window)
            self._whole, self._num_optimizer_steps = step, made

    def _between_windows(self, step: int) -> int:
        """This step or the next one after which optimizers have used all gradients, if windows go on as before."""
        return step + (self._whole - step) % self._window if self._window else step

    def _publish(self, decision: SaveDecision) -> None:
        self._decision = decision
        if self._broadcast is not None:
            self._broadcast.publish(decision)

    def _deadline(self) -> float | None:
        """When the job must be done, in seconds since the epoch, as far as this rank knows."""
        known = self._broadcast.notice if self._broadcast is not None else None, self._preemption.notice.deadline
        return min((deadline for deadline in known if deadline is not None), default=None)

    def _stop(self, stop_at: int, step: int, deadline: float) -> SaveDecision:
        """On rank 0: how to end at `stop_at`."""
        steps_s = (stop_at - step) / self._stride * (self._costs.step_s or 0.0)
        # Another rank may evaluate until it learns of the notice as well.
        unaware_s = self._poll_s if self._broadcast is not None else 0.0
        fit = self._preemption.fits(deadline - self._preemption.clock() - steps_s - unaware_s, steps_s)
        before = self._decision
        saves = (*before.saves, stop_at)[-_REMEMBERED:] if fit else before.saves
        return SaveDecision(stop_at, before.num_saves + bool(fit), saves, stop_at, astuple(fit))

    def _lead(self) -> int:
        """The number of steps from here to the horizon."""
        if self._broadcast is None:
            return 0
        step_s = self._costs.step_s
        calls = FIRST_AFTER_TICKS if step_s is None else max(1, math.ceil(self._lead_s / max(step_s, 1e-6)))
        return calls * self._stride

    def _requested(self) -> bool:
        asked = self._requests + (self._broadcast.requests if self._broadcast is not None else 0)
        requested = asked > self._served
        self._served = asked
        return requested

    def _take(self, step: int) -> bool:
        """Whether saves that due() has not answered yet are due by now."""
        decision = self._decision
        first = decision.num_saves - len(decision.saves)
        if self._taken < first:
            raise RankLost(
                f"rank {self._global_rank} is more than {_REMEMBERED} saves behind the rank that decides",
                "Every rank calls due() with the same steps",
            )
        before = self._taken
        self._taken = first + sum(save_at <= step for save_at in decision.saves)
        if self._taken > before and self._rank == 0:
            self._costs.asked(self._clock())
        if 0 <= decision.stop_at <= step and self._stopping is None:
            self._end(decision)
        return self._taken > before

    def _end(self, decision: SaveDecision) -> None:
        """All ranks have come to the step after which the loop ends."""
        self._stopping = SaveEstimate(*decision.estimate)
        self._steps.requested()
        if self._stopping:
            self._preemption.expedite()
        if self._rank == 0:
            source = self._preemption.notice.source or "another rank"
            logger.warning("preempted at step %d (%s): %s", decision.stop_at, source, self._stopping)


def cost_of(newest: SaveHandle | None, schedules: Iterable[Schedule]) -> SaveCost | None:
    """The cost of the newest save for this rank so far; None if there is none, or it was skipped."""
    if newest is None or newest.skipped:
        return None
    slowdowns = [schedule.slowdown_s for schedule in schedules]
    known = [seconds for seconds in slowdowns if seconds is not None]
    timings = newest.timings
    return SaveCost(
        step=newest.step, stall_s=timings.blocked_s + timings.held_s, slowdown_s=max(known) if known else None
    )

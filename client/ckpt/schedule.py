"""When to save: as often as the measured cost allows, decided by rank 0 and known to all ranks in time.

Rank 0 decides ahead: up to which step nothing is due, and at which step the next save is. The horizon is pushed on
long before anybody reaches it, so that ranks answer from what they have heard, without a collective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ckpt.bulletin import Bulletin, Cost, News
from ckpt.costs import FIRST_AFTER_TICKS, Costs
from ckpt.distributed import World
from ckpt.saving.handle import SaveHandle
from ckptstore.errors import InvalidRequest, RankLost

LEAD_S = 2.0
"""How far ahead of rank 0 its decisions reach."""
_POLLS_PER_LEAD = 5
_REMEMBERED = 16  # saves that rank 0 tells of: a rank is never that far behind


class Schedule:
    """Tells the training loop when to save; see `Checkpointer.every`. All but `request` is for the training thread."""

    def __init__(
        self,
        newest: Callable[[], SaveHandle | None],
        seconds: float | None,
        overhead: float | None,
        peer_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        lead_s: float = LEAD_S,
    ) -> None:
        """newest: the save that was begun last."""
        if seconds is None and overhead is None:
            raise InvalidRequest("neither seconds nor overhead is given", "Give at least one of them")
        if seconds is not None and not 0 < seconds < math.inf:
            raise InvalidRequest(f"an interval of {seconds} s is not positive", "Give seconds, such as 600")
        if overhead is not None and not 0 < overhead <= 1:
            raise InvalidRequest(f"overhead {overhead} is no share of time", "Give a number such as 0.01")
        self._newest = newest
        self._seconds, self._overhead = seconds, overhead
        self._peer_timeout_s = peer_timeout_s
        self._clock = clock
        self._lead_s = lead_s
        self._costs = Costs()
        self._rank = 0
        self._bulletin: Bulletin | None = None
        self._step: int | None = None
        self._stride = 1
        self._news = News(-1, 0, ())
        self._taken = 0
        self._requests = self._served = 0

    def due(self, step: int) -> bool:
        """Whether to save now. Call it once per step, on every rank with the same, increasing steps.

        All ranks get the same answers. Steps may be left out: what was decided for one of them is due at the next
        call. It takes microseconds; only a rank that is ahead of rank 0's news waits for them, at most
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
        now = self._clock()
        self._costs.tick(now, self._newest())
        if self._rank == 0:
            self._decide(step, now)
        else:
            self._listen(step)
        return self._take(step)

    def request(self) -> None:
        """Ask for a save as soon as all ranks can know of it, whatever it costs; on any rank.

        Any thread may call it, and so may a signal handler.
        """
        self._requests += 1
        if self._bulletin is not None and self._rank:
            self._bulletin.request()

    def close(self) -> None:
        """End the thread that speaks with the other ranks. Whoever calls due() afterwards waits in vain."""
        if self._bulletin is not None:
            self._bulletin.close()

    def _begin(self) -> None:
        world = World(self._peer_timeout_s)
        if world.size > 1:
            self._rank = world.rank
            self._bulletin = Bulletin(world.private_store(), world.rank, self._lead_s / _POLLS_PER_LEAD)
            if self._requests and self._rank:
                self._bulletin.request()

    def _listen(self, step: int) -> None:
        """Of the other ranks: tell what the last save cost, and hear what is decided."""
        assert self._bulletin is not None
        self._bulletin.report(Cost(self._taken, self._costs.cost_s))
        if self._news.horizon < step:
            self._news = self._bulletin.hear(lambda news: news.horizon >= step, self._peer_timeout_s)

    def _decide(self, step: int, now: float) -> None:
        """Of rank 0: what is still open, far enough ahead."""
        news, lead = self._news, self._lead()
        horizon, saves = news.horizon, news.saves
        wanted = self._requested()
        pending = news.num_saves > self._taken
        others_s = self._bulletin.cost.seconds if self._bulletin is not None else 0.0
        if not pending and (wanted or self._costs.may_save(now, self._seconds, self._overhead, others_s)):
            save_at = max(step, horizon + 1)
            horizon, saves = save_at, (*saves, save_at)[-_REMEMBERED:]
        if horizon < step + lead / 2:
            horizon = step + lead
        if (horizon, saves) != (news.horizon, news.saves):
            self._news = News(horizon, news.num_saves + (saves != news.saves), saves)
            if self._bulletin is not None:
                self._bulletin.tell(self._news)

    def _lead(self) -> int:
        """How many steps ahead the horizon is to be."""
        if self._bulletin is None:
            return 0
        step_s = self._costs.step_s
        calls = FIRST_AFTER_TICKS if step_s is None else max(1, math.ceil(self._lead_s / max(step_s, 1e-6)))
        return calls * self._stride

    def _requested(self) -> bool:
        asked = self._requests + (self._bulletin.requests if self._bulletin is not None else 0)
        requested = asked > self._served
        self._served = asked
        return requested

    def _take(self, step: int) -> bool:
        """Whether saves that were not answered yet are due by now."""
        news = self._news
        first = news.num_saves - len(news.saves)
        if self._taken < first:
            raise RankLost(
                f"rank {self._rank} is more than {_REMEMBERED} saves behind rank 0",
                "Every rank calls due() with the same steps",
            )
        before = self._taken
        self._taken = first + sum(save_at <= step for save_at in news.saves)
        if self._taken > before and self._rank == 0:
            self._costs.asked(self._clock())
        return self._taken > before

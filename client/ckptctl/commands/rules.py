"""Retention rules as options of several commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer

from ckptstore import human
from ckptstore.format.records import Policy


def _count(name: str, text: str) -> Any:
    return typer.Option(name, metavar="N", help=text, show_default=False)


KeepOption = Annotated[int | None, _count("--keep", "Keep the newest N steps of each run.")]
KeepEveryOption = Annotated[int, _count("--keep-every", "Keep the first step from each multiple of N on.")]
KeepHourlyOption = Annotated[int, _count("--keep-hourly", "Keep the last of each of the newest N hours.")]
KeepDailyOption = Annotated[int, _count("--keep-daily", "Keep the last of each of the newest N days.")]
KeepWeeklyOption = Annotated[int, _count("--keep-weekly", "Keep the last of each of the newest N weeks.")]
KeepBestOption = Annotated[
    list[str] | None,
    typer.Option(metavar="METRIC:min|max:N", help="Keep the N best by a metric. Repeatable.", show_default=False),
]
KeepHealthyOption = Annotated[
    bool, typer.Option("--keep-healthy", help="Keep the newest checkpoint without NaN and Inf.")
]
KeepWithinOption = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Keep checkpoints younger than this: 90s, 30m, 24h, 7d.", show_default=False),
]
MaxBytesOption = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Maximum total size to keep: 500GB, 4GiB.", show_default=False)
]
KeepAbandonedOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Keep abandoned checkpoints for this time after they were left behind; 0s: delete them.  [default: 7d]",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class RuleOptions:
    """The values of these options."""

    keep: int | None
    every: int
    hourly: int
    daily: int
    weekly: int
    best: list[str] | None
    within: str | None
    max_bytes: str | None
    abandoned: str | None
    healthy: bool = False

    def policy(self) -> Policy | None:
        """The policy of the options; None without options. Raises InvalidRequest."""
        others = (
            self.every, self.hourly, self.daily, self.weekly, self.best, self.within, self.max_bytes, self.abandoned,
            self.healthy,
        )  # fmt: skip
        if self.keep is None and not any(others):
            return None
        policy = Policy(
            keep_last=self.keep or 0,
            keep_every=self.every,
            keep_hourly=self.hourly,
            keep_daily=self.daily,
            keep_weekly=self.weekly,
            keep_best=tuple(self.best or ()),
            keep_healthy=int(self.healthy),
            keep_within_s=human.parse_duration(self.within) if self.within else 0.0,
            max_bytes=human.parse_size(self.max_bytes) if self.max_bytes else 0,
        )
        if self.abandoned is None:
            return policy
        return msgspec.structs.replace(policy, keep_abandoned_s=human.parse_duration(self.abandoned))

"""What the model of a whole life is made of: what is known of an attempt, and what may be drawn."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ckptstore.format.records import Policy
from ckptstore.names import Attempt
from tests.support.stores import Faults

HOUR_S = 3600.0

faults = st.none() | st.builds(Faults, st.integers(0, 60), st.sampled_from(["before", "after"]))
graces = st.sampled_from([0.0, HOUR_S, 24 * HOUR_S])
policies = st.builds(
    Policy,
    keep_last=st.integers(1, 3),
    keep_every=st.sampled_from([0, 3]),
    keep_best=st.sampled_from([(), ("loss:min:1",)]),
    max_bytes=st.sampled_from([0, 1000]),
)
pick = st.integers(0, 1000)


@dataclass
class Life:
    """What the model knows of one committed attempt."""

    step: int
    frozen: Attempt
    """Who holds the chunk that is the same in all of them: itself, or an earlier one that it references."""
    state: Literal["visible", "hidden", "gone"] = "visible"
    flipped: set[int] = field(default_factory=set)
    """Bytes of its shard that are not as they were written: 0 is of its own chunk, -1 the last one of all."""
    quarantined: bool = False
    pins: set[str] = field(default_factory=set)


def lives(few: int) -> settings:
    """How many are tried: as many as CKPTD_LIFE_CYCLES says, or a few."""
    number = int(os.environ.get("CKPTD_LIFE_CYCLES", few))
    return settings(max_examples=number, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))

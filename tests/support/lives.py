"""What the model of a whole life is made of: what is known of an attempt, and what may be drawn."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
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


def states() -> Iterator[dict[str, npt.NDArray[Any]]]:
    """What is saved in turn: one chunk that never changes, after one that always does."""
    for number in count(1):
        yield {"model/a": np.arange(40, dtype=np.float32), "model/step": np.array([number, 1], np.int64)}


def lineage(visible: Collection[Attempt], parents: Mapping[int, Attempt | None]) -> set[Attempt]:
    """What a trainer may resume from: what is visible of the newest generation, of its parent and before, and so on."""
    generation, end, live = max((a.generation for a in visible), default=0), None, set[Attempt]()
    while True:
        live |= {a for a in visible if a.generation == generation and (end is None or a.step < end.step or a == end)}
        end = parents.get(generation)
        if end is None:
            return live
        generation = end.generation


def lives(few: int) -> settings:
    """How many are tried: as many as CKPTD_LIFE_CYCLES says, or a few."""
    number = int(os.environ.get("CKPTD_LIFE_CYCLES", few))
    return settings(max_examples=number, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))

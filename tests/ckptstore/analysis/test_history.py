from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ckptstore.analysis.history import Cause, RunFinding, first_trouble
from ckptstore.analysis.statistics import CheckpointStatistics, TensorStatistics
from ckptstore.format.statistics import Table, named_document
from ckptstore.stores import open_store
from tests.support.checkpoints import sample_arrays, write_checkpoint


def found(
    largest: Sequence[float], dtype: str = "float32", nan_at: int | None = None, name: str = "w", elements: int = 4
) -> RunFinding:
    """The finding about one tensor, whose largest magnitudes are given by step."""
    checkpoint = write_checkpoint(open_store("memory://history"), "r", 1, sample_arrays())
    steps = [
        CheckpointStatistics(
            checkpoint,
            {
                name: TensorStatistics(
                    name=name, dtype=dtype, shape=[elements], elements=elements, nan=int(step == nan_at),
                    positive_inf=0, negative_inf=0, minimum=-value, maximum=value / 2, is_finite=step != nan_at,
                )
            },
            (),
        )
        for step, value in enumerate(largest)
    ]  # fmt: skip
    return first_trouble("r", steps)


@pytest.mark.parametrize(
    ("largest", "cause"),
    [
        ((1, 1, 15), None),
        ((1, 1, 17), Cause.LEFT_RANGE),
        ((1, 2, 31), None),  # it has varied by a factor of 2
        ((1, 2, 65), Cause.LEFT_RANGE),
        ((1, 10, 100, 1000, 10_000), None),  # it grows steadily
        ((1, 1e9), None),  # too little history
        ((1, 1, 0), Cause.ALL_ZEROS),
        ((0, 1, 1, 0), None),  # it was so before
        ((0, 0, 0), None),
    ],
)
def test_a_tensor_leaves_its_range(largest: Sequence[float], cause: Cause | None) -> None:
    finding = found(largest)
    assert [one.cause for one in finding.tensors] == ([] if cause is None else [cause])
    if cause is not None:
        (one,) = finding.tensors
        assert (one.found.largest, one.before is not None, one.after) == (largest[-1], True, None)
    assert found(largest, dtype="int64").checkpoint is None, "counters may grow"


def test_nan_needs_no_history_and_has_its_neighbours() -> None:
    finding = found((1, 1), nan_at=0)
    (one,) = finding.tensors
    assert (one.cause, one.text, one.before) == (Cause.NOT_FINITE, "1 NaN and 0 Inf of 4", None)
    assert one.after is not None
    assert (finding.num_checkpoints, finding.num_tensors) == (2, 1)


@pytest.mark.parametrize(
    ("name", "elements", "wrong"),
    [("trainer/callbacks/best_score", 1, False), ("trainer/average", 4, True), ("model/scale", 1, True)],
)
def test_a_number_of_a_framework_does_not_go_wrong(name: str, elements: int, wrong: bool) -> None:
    """A best score begins as Inf."""
    for finding in (
        found((1, 1), nan_at=0, name=name, elements=elements),
        found((1, 1, 17), name=name, elements=elements),
    ):
        assert bool(finding.tensors) == wrong
    counts = np.array([elements])
    zeros, numbers = np.zeros(1, np.int64), np.full(1, np.nan)
    table = Table(counts, np.ones(1, np.int64), zeros, zeros, numbers, numbers)
    assert named_document(b"", table, [name]).nan == wrong

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import InvalidRequest
from ckptstore.units import MOST_BYTES, MOST_TARGETS, Part, Unit, units_of

SINGLES = st.lists(
    st.builds(
        lambda run, step, size: Unit((f"run-{run}@{step}",), size),
        st.integers(0, 3),
        st.integers(0, 10**6),
        st.one_of(st.integers(0, 1000), st.integers(MOST_BYTES // 3, 2 * MOST_BYTES)),
    ),
    unique_by=lambda unit: unit.targets,
    max_size=80,
)


@given(SINGLES)
def test_each_target_is_in_one_unit_of_its_run_and_no_unit_exceeds_the_limits(singles: list[Unit]) -> None:
    units = list(units_of(singles))
    assert sorted(target for unit in units for target in unit.targets) == sorted(s.targets[0] for s in singles)
    sizes = {single.targets[0]: single.bytes for single in singles}
    for unit in units:
        assert unit.bytes == sum(sizes[target] for target in unit.targets)
        assert len({target.partition("@")[0] for target in unit.targets}) == 1
        assert len(unit.targets) == 1 or (len(unit.targets) <= MOST_TARGETS and unit.bytes <= MOST_BYTES)
    assert units == list(units_of(singles))
    for run in {unit.targets[0].partition("@")[0] for unit in units}:
        of_run = [target for unit in units for target in unit.targets if target.startswith(f"{run}@")]
        assert of_run == [s.targets[0] for s in singles if s.targets[0].startswith(f"{run}@")]  # the order stays


@given(st.lists(st.text(), unique=True), st.integers(1, 20))
def test_each_target_belongs_to_one_part_whatever_else_there_is(targets: list[str], count: int) -> None:
    parts = [Part.parse(f"{number}/{count}", {}) for number in range(1, count + 1)]
    for target in targets:
        assert sum(part.has(target) for part in parts) == 1


def slurm(task: int, first: int, count: int) -> dict[str, str]:
    values = {"ID": task, "MIN": first, "MAX": first + count - 1, "COUNT": count}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("environment", "part"),
    [
        (slurm(0, 0, 8), (1, 8)),
        (slurm(7, 0, 8), (8, 8)),
        (slurm(5, 5, 1), (1, 1)),
        ({"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "4"}, (1, 4)),
        ({"JOB_COMPLETION_INDEX": "3", "JOB_COMPLETIONS": "4"}, (4, 4)),
    ],
)
def test_auto_is_the_task_of_an_array_or_of_an_indexed_job(environment: dict[str, str], part: tuple[int, int]) -> None:
    assert Part.parse("auto", environment) == part


@pytest.mark.parametrize(
    ("text", "environment"),
    [
        ("0/8", {}), ("9/8", {}), ("1/0", {}), ("-1/8", {}), ("8", {}), ("a/b", {}), ("1/2/3", {}), ("", {}),
        ("auto", {}),
        ("auto", {"JOB_COMPLETION_INDEX": "3"}),
        ("auto", {"JOB_COMPLETION_INDEX": "4", "JOB_COMPLETIONS": "4"}),
        ("auto", {"JOB_COMPLETION_INDEX": "x", "JOB_COMPLETIONS": "4"}),
        ("auto", slurm(7, 1, 3)),  # --array=1,4,7
    ],
)  # fmt: skip
def test_what_is_no_part_is_refused(text: str, environment: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        Part.parse(text, environment)

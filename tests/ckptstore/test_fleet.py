from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import CorruptObject, InvalidRequest
from ckptstore.fleet import (
    MOST_BYTES,
    MOST_TARGETS,
    Part,
    Unit,
    UnitResult,
    UnitResults,
    open_engine,
    run_units,
    units_of,
)
from ckptstore.format.documents import FORMAT
from ckptstore.stores import open_store
from tests.support.dask_cluster import running_dask
from tests.support.ray_cluster import running_ray
from tests.support.waiting import wait_until

UNITS = [Unit((f"run@{number}",), number) for number in range(12)]


@pytest.fixture(params=["local", "dask", "ray"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Two workers."""
    if request.param == "local":
        yield "local:2"
        return
    if request.param == "ray":
        with tempfile.TemporaryDirectory(prefix="ray-") as folder, running_ray(2, Path(folder)) as address:
            yield address
        return
    with running_dask(2) as (_, address):
        yield address


def note(folder: Path, kills: str, unit: Unit) -> int:
    """Leave a file for each call of a unit; kill the worker in the first call of one unit, or in every call of it."""
    calls = len(list(folder.glob(f"{unit.bytes}.*")))
    (folder / f"{unit.bytes}.{calls}").touch()
    if unit.bytes == 5 and (kills == "always" or (kills == "once" and calls == 0)):
        os.kill(os.getpid(), signal.SIGKILL)
    if unit.bytes == 7:
        raise CorruptObject("broken", "Mend it")
    return 10 * unit.bytes


def run(engine: str, folder: Path, kills: str) -> dict[int, Any]:
    with open_engine(engine) as (executor, slots):
        assert slots == 2
        return {unit.bytes: found for unit, found in run_units(executor, partial(note, folder, kills), UNITS)}


def test_a_killed_worker_costs_one_unit_and_an_error_ends_only_its_own(engine: str, tmp_path: Path) -> None:
    found = run(engine, tmp_path, "once")
    error = found.pop(7)
    assert isinstance(error, CorruptObject)
    assert error.hint == "Mend it"
    assert found == {number: 10 * number for number in range(12) if number != 7}
    assert len(list(tmp_path.glob("5.*"))) == 2
    if engine.startswith("local"):  # Dask also repeats what its scheduler had sent ahead to that worker
        assert len(list(tmp_path.iterdir())) == 13


def test_dask_keeps_no_result_that_was_taken(tmp_path: Path) -> None:
    with running_dask(1) as (cluster, address):
        observer = cluster.get_client()
        with observer, open_engine(address) as (executor, _):
            taken = run_units(executor, partial(note, tmp_path, "never"), UNITS[:4])
            for _ in range(3):
                next(taken)
            wait_until(lambda: len(observer.who_has()) <= 2, "the release of results")  # the third, and the last one
            assert len(list(taken)) == 1


def test_a_unit_that_kills_every_worker_fails_alone(tmp_path: Path) -> None:
    found = run("local:2", tmp_path, "always")
    assert "terminated abruptly" in str(found.pop(5))
    assert isinstance(found.pop(7), CorruptObject)
    assert found == {number: 10 * number for number in range(12) if number not in (5, 7)}


@pytest.mark.parametrize("where", ["local:0", "local:x", "local", "spark://host", "", "ray:x"])
def test_what_is_no_engine_is_refused(where: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot work on"), open_engine(where):
        pass


def test_results_count_for_a_day_until_they_are_forgotten(tmp_path: Path) -> None:
    results = UnitResults(open_store(str(tmp_path)), "_units/abc/")
    other = UnitResults(results.store, "_units/abd/")
    made = [UnitResult(format=FORMAT, kind="unit", targets=(f"b@{n}", f"b@{n}1"), body=[{"n": n}]) for n in (2, 1)]
    for result in made:
        results.write(result)
        results.write(result)  # repeated: the same object
    other.write(made[0])
    now = max(info.modified_at for info in results.store.list("_units/"))
    assert results.read(now) == made[::-1]
    assert results.read(now + 25 * 3600) == []
    results.forget()
    assert (results.read(now), other.read(now)) == ([], made[:1])


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


def test_a_damaged_result_is_no_result_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    results = UnitResults(open_store(str(tmp_path)), "_units/abc/")
    made = [UnitResult(format=FORMAT, kind="unit", targets=(f"b@{n}",), body=[{"n": n}]) for n in (1, 2)]
    for result in made:
        results.write(result)
    now = max(info.modified_at for info in results.store.list("_units/"))
    (broken,) = (path for path in tmp_path.glob("_units/abc/*") if b'"b@1"' in path.read_bytes())
    broken.write_bytes(broken.read_bytes()[:-9])
    assert results.read(now) == made[1:]
    assert [str(broken) in record.message for record in caplog.records] == [True]
    results.write(made[0])
    assert results.read(now) == made

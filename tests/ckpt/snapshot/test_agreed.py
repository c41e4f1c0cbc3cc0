"""Saves by several ranks: without collectives, with replicas written together, and after the layout has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptstore.format.planning import derived_bytes, entry_bytes
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores import open_store
from tests.ckpt.snapshot.saving_ranks import RUN
from tests.support.parallel.matrix import Matrix, check_restored, run_matrix
from tests.support.parallel.runner import Outcome, Scenario, run_scenarios

_LAYOUTS = ("ddp", "fsdp2", "tp_fsdp2", "fsdp1", "zero", "pp")
_SPREAD = [("ddp", "ddp"), ("ddp", "single"), ("hsdp", "fsdp2"), ("hsdp", "hsdp")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Outcome]:
    scenarios = {
        layout: Scenario(
            "tests.ckpt.snapshot.saving_ranks:without_collectives",
            4 if layout == "tp_fsdp2" else 2,
            {"store": str(folder / layout), "layout": layout},
        )
        for layout in _LAYOUTS
    }
    for name in ("change_layout", "fail_to_describe", "derive_under_fsdp2"):
        scenarios[name] = Scenario(f"tests.ckpt.snapshot.saving_ranks:{name}", 2, {"store": str(folder / name)})
    (folder / "ranks").mkdir()
    return dict(zip(scenarios, run_scenarios(list(scenarios.values()), folder / "ranks"), strict=True))


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_no_rank_meets_another_in_a_save_after_the_first(outcomes: dict[str, Outcome], layout: str) -> None:
    """Whatever would have made it wait raises; the first save was made before optimizers had any state."""
    for result in outcomes[layout].result():
        assert result["steps"] == [1, 2, 3]
        assert result["caught"] == [True] * 4


def test_a_layout_that_changes_on_one_rank_is_an_error_until_all_have_prepared(
    outcomes: dict[str, Outcome], folder: Path
) -> None:
    first, second = outcomes["change_layout"].result()
    assert second["code"] == "layout_changed"
    assert "on rank 1 'model/1." in second["said"]
    assert "prepare()" in second["said"]
    assert first["code"] == "rank_failed"
    assert "rank 1 could not save step 2 of run 'saving': layout_changed: " in first["said"]
    for result in (first, second):
        assert (result["restored"], result["ones"]) == (3, True)
    source = StoreSource(open_store(str(folder / "change_layout")))
    assert [checkpoint.step for checkpoint in source.checkpoints(RUN)] == [3, 1]


def test_a_rank_that_cannot_describe_its_state_tells_the_others_at_once(outcomes: dict[str, Outcome]) -> None:
    first, second = outcomes["fail_to_describe"].result()
    assert "rank 1: cannot describe its state: RuntimeError('a hook of rank 1 fails')" in first["said"]
    assert second["said"] == "a hook of rank 1 fails"


@pytest.mark.parametrize("split_replicas", [False, True])
def test_ranks_derive_their_slices_of_sharded_weights(
    outcomes: dict[str, Outcome], folder: Path, split_replicas: bool
) -> None:
    for result in outcomes["derive_under_fsdp2"].result():
        assert result["alike"] == [True] * 8
    source = StoreSource(open_store(str(folder / "derive_under_fsdp2" / str(split_replicas))))
    content = read_manifest(source, source.latest(RUN)).content
    assert derived_bytes(content) == {f"model/{layer}.weight": 2 * 256 * 512 for layer in (0, 1)}


def test_unmarked_state_of_a_shard_is_refused(outcomes: dict[str, Outcome]) -> None:
    """It would be taken for what all ranks hold alike."""
    for result in outcomes["derive_under_fsdp2"].result():
        assert result["code"] == "unsupported_object"
        assert "optim/state/0.weight/" in result["said"]


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return run_matrix(_SPREAD, tmp_path_factory.mktemp("spread"), save="tests.ckpt.snapshot.saving_ranks:save_spread")


@pytest.mark.parametrize(("saved", "restored"), _SPREAD)
def test_what_replicas_have_written_together_is_restored(spread: Matrix, saved: str, restored: str) -> None:
    check_restored(spread, saved, restored)


@pytest.mark.parametrize(("layout", "writers"), [("ddp", 2), ("hsdp", 4)])
def test_replicas_write_about_as_many_bytes(spread: Matrix, layout: str, writers: int) -> None:
    source = StoreSource(open_store(str(spread.folder / layout / "store")))
    content = read_manifest(source, source.latest("matrix")).content
    written = {shard.rank: int(shard.chunks.raw.sum()) for shard in content.shards}
    assert sorted(written) == list(range(writers))
    # A parameter and what its optimizer keeps stay together.
    largest = 3 * max(entry_bytes(content).values())
    assert max(written.values()) - min(written.values()) <= largest
    assert max(written.values()) < 1.5 * sum(written.values()) / writers

"""Data parallel, two gloo processes: one shard file, every rank's own state, no collective after the first save."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptstore.reading.source import StoreSource, read_manifest, read_receipt
from ckptstore.reading.verify import verify
from ckptstore.stores import open_store
from tests.ckpt.ddp import lines, run_ranks


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A folder for ranks to meet in, and the store."""
    for name in ("meet", "store"):
        (tmp_path / name).mkdir()
    return tmp_path / "meet", tmp_path / "store"


def test_two_ranks_resume_exactly_and_write_one_shard(places: tuple[Path, Path]) -> None:
    meet, folder = places
    (folder / "whole").mkdir()
    whole = run_ranks("tests.ckpt.ddp_train", 2, meet, str(folder / "whole"), "8", "-1")
    first = run_ranks("tests.ckpt.ddp_train", 2, meet, str(folder), "4", "3")
    second = run_ranks("tests.ckpt.ddp_train", 2, meet, str(folder), "8", "-1")
    for rank in range(2):
        joined = eval(lines(first[rank])[-2]) + eval(lines(second[rank])[-2])
        assert joined == eval(lines(whole[rank])[-2])
        assert lines(second[rank])[-1] == f"rank {rank}"

    source = StoreSource(open_store(str(folder)))
    checkpoint = source.latest("ddp")
    assert (checkpoint.world_size, checkpoint.num_shards) == (2, 1)
    manifest = read_manifest(source, checkpoint)
    states = [read_receipt(source, checkpoint, manifest, rank).local["rng"] for rank in range(2)]
    assert states[0] != states[1]
    assert verify(source, checkpoint).ok


def test_gradients_of_each_rank_in_the_middle_of_a_window(places: tuple[Path, Path]) -> None:
    meet, folder = places
    outputs = run_ranks("tests.ckpt.ddp_train", 2, meet, str(folder), "0", "0", "accumulate")
    assert [lines(output)[-1] for output in outputs] == ["same gradients"] * 2
    # Large state of a rank's own goes into a shard of its own.
    assert StoreSource(open_store(str(folder))).latest("ddp").num_shards == 2


def test_no_collective_after_the_first_save(places: tuple[Path, Path]) -> None:
    meet, folder = places
    run_ranks("tests.ckpt.ddp_train", 2, meet, str(folder), "3", "1", "forbid-collectives")
    assert StoreSource(open_store(str(folder))).latest("ddp").step == 1001


def test_checkpoint_of_two_ranks_restores_in_one(places: tuple[Path, Path]) -> None:
    meet, folder = places
    run_ranks("tests.ckpt.ddp_train", 2, meet, str(folder), "2", "1")
    with pytest.raises(AssertionError, match=r"state_mismatch.*saved by 2 ranks.*seen differed"):
        run_ranks("tests.ckpt.ddp_train", 1, meet, str(folder), "3", "-1")


def test_a_store_that_fails_rank_zero_fails_every_rank_at_once(places: tuple[Path, Path]) -> None:
    meet, folder = places
    (folder / "ddp").mkdir()
    (folder / "ddp" / "attempts").write_text("a file where a folder should be")
    with pytest.raises(AssertionError) as caught:
        run_ranks("tests.ckpt.ddp_train", 2, meet, str(folder), "2", "1", timeout=60)
    assert str(caught.value).count("store_unavailable: ") == 2


def test_an_unforeseen_error_of_one_rank_reaches_the_others(places: tuple[Path, Path]) -> None:
    meet, folder = places
    run_ranks("tests.ckpt.ddp_train", 2, meet, str(folder), "2", "1")
    with pytest.raises(AssertionError) as caught:
        run_ranks("tests.ckpt.ddp_train", 2, meet, str(folder), "3", "-1", "broken", timeout=60)
    assert "restore_failed: rank 1 cannot restore: RuntimeError('a hook of rank 1 fails')" in str(caught.value)


def test_ranks_with_different_models_are_refused(places: tuple[Path, Path]) -> None:
    meet, folder = places
    with pytest.raises(
        AssertionError, match=r"unsupported_object: ranks 0 and 1 hold different tensors under the name"
    ):
        run_ranks("tests.ckpt.ddp_train", 2, meet, str(folder), "2", "1", "different")

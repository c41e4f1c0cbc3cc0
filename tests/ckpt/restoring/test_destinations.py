"""Tensors of plain values are filled in place where the caller gives one that fits, and are new everywhere else."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from ckptstore.errors import CorruptObject
from ckptstore.names import RunKeys, shard_name
from tests.ckpt.loops import open_run
from tests.support.checkpoints import flip
from tests.support.waiting import present

LARGE = 70_000
"""Elements of a tensor that is an entry; a small one of this rank lies in a receipt."""


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[torch.Tensor]


def value() -> dict[str, Any]:
    return {"large": torch.rand(LARGE), "small": torch.rand(3), "pair": Pair(torch.rand(2, LARGE), [torch.rand(4)])}


def tensors(found: dict[str, Any]) -> list[torch.Tensor]:
    return [found["large"], found["small"], found["pair"].first, *found["pair"].second]


def zeros() -> dict[str, Any]:
    return {"large": torch.zeros(LARGE), "small": torch.zeros(3), "pair": Pair(torch.zeros(2, LARGE), [torch.zeros(4)])}


def restored(folder: Path, saved: Any, given: Any) -> Any:
    """A value of this rank that was saved, restored where another is given."""
    with open_run(folder) as checkpointer:
        checkpointer.save(None, None, 1, own=saved)
        return present(checkpointer.restore(own=given)).values["own"]


def test_tensors_of_shared_and_own_values_are_filled_in_place(tmp_path: Path) -> None:
    own, shared, mine, ours = value(), value(), zeros(), zeros()
    before = [tensor.data_ptr() for tensor in (*tensors(mine), *tensors(ours))]
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(None, None, 1, own=own, shared={"all": shared})
        values = present(checkpointer.restore(own=mine, shared={"all": ours})).values
    for saved, given, name in ((own, mine, "own"), (shared, ours, "all")):
        for wanted, live, found in zip(tensors(saved), tensors(given), tensors(values[name]), strict=True):
            assert found is live
            assert torch.equal(live, wanted)
        assert type(values[name]["pair"]) is Pair
    assert [tensor.data_ptr() for tensor in (*tensors(mine), *tensors(ours))] == before


def test_tensors_in_any_dict_are_filled_in_place(tmp_path: Path) -> None:
    kinds: list[dict[Any, Any]] = [{7: 0, "a": 0}, OrderedDict(layer=0), {("of", 2): 0}, {"$": 0}]
    saved, given = ([type(kind)({key: torch.rand(LARGE) for key in kind}) for kind in kinds] for _ in range(2))
    for wanted, live, found in zip(saved, given, restored(tmp_path, saved, given), strict=True):
        assert type(found) is type(wanted)
        assert all(found[key] is live[key] and torch.equal(found[key], wanted[key]) for key in wanted)


def test_tensors_at_equal_paths_stay_distinct(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"a/b": torch.rand(3), "a": {"b": torch.rand(3)}}
    found = restored(tmp_path, saved, {"a/b": torch.rand(3), "a": {"b": torch.rand(3)}})
    assert torch.equal(found["a/b"], saved["a/b"])
    assert torch.equal(found["a"]["b"], saved["a"]["b"])


@pytest.mark.parametrize(
    "live",
    [
        torch.zeros(LARGE, dtype=torch.float64), torch.zeros(LARGE + 1), torch.zeros(1, LARGE),
        torch.zeros(1).expand(LARGE), torch.zeros(2, LARGE)[0], torch.zeros(LARGE, requires_grad=True) * 1,
        torch.from_numpy(np.zeros(LARGE, np.float32)),
    ],
    ids=["type", "size", "shape", "expanded", "part", "computed", "memory of others"],
)  # fmt: skip
def test_what_does_not_fit_is_left_alone_and_a_new_tensor_comes_back(live: torch.Tensor, tmp_path: Path) -> None:
    saved, before = torch.rand(LARGE), live.detach().clone()
    found = restored(tmp_path, {"x": saved}, {"x": live})["x"]
    assert torch.equal(found, saved)
    assert found is not live
    assert torch.equal(live, before)


def test_memory_that_two_saved_tensors_would_fill_takes_one_of_them(tmp_path: Path) -> None:
    first, second, live, model = torch.rand(LARGE), torch.rand(LARGE), torch.zeros(LARGE), nn.Linear(300, 300)
    weight = model.weight.detach().clone()
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(model, None, 1, own=[first, second, torch.rand(300, 300)])
        found = present(checkpointer.restore(model, own=[live, live, model.weight.detach()])).values["own"]
    assert found[0] is live
    assert torch.equal(live, first)
    assert torch.equal(found[1], second)
    assert found[1] is not live
    assert torch.equal(model.weight, weight)  # and not the other tensor of its shape
    assert found[2].data_ptr() != model.weight.data_ptr()


@pytest.mark.parametrize("size", [3, LARGE])
def test_memory_that_is_given_for_two_values_takes_one_of_them(size: int, tmp_path: Path) -> None:
    first, second, live = torch.rand(size), torch.rand(size), torch.zeros(size)
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(None, None, 1, best=[first], newest=[second])
        values = present(checkpointer.restore(best=[live], newest=[live])).values
    assert torch.equal(values["best"][0], first)
    assert torch.equal(values["newest"][0], second)


def test_tied_tensors_fill_each_given_one(tmp_path: Path) -> None:
    tied, live, other = torch.rand(LARGE), torch.zeros(LARGE), torch.zeros(LARGE)
    values = restored(tmp_path, [tied, tied, tied], [live, live, other])
    assert [found.data_ptr() for found in values] == [t.data_ptr() for t in (live, live, other)]
    assert torch.equal(live, tied)
    assert torch.equal(other, tied)


def test_restored_tensors_are_freed_with_their_last_reference(tmp_path: Path) -> None:
    """Not with the next full garbage collection: until then a second restore would need as much memory again."""
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(None, None, 1, own=torch.rand(LARGE), shared={"all": np.ones(LARGE)})
        gc.disable()
        try:
            done = present(checkpointer.restore(own=None, shared={"all": None}))
            found = [weakref.ref(value) for value in done.values.values()]
            del done
            assert [one() for one in found] == [None, None]
        finally:
            gc.enable()


def test_a_given_tensor_that_the_next_checkpoint_does_not_refill_is_a_mixture(tmp_path: Path) -> None:
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(None, None, 1, own={"y": torch.rand(LARGE)})
        newest = checkpointer.save(None, None, 2, own={"x": torch.rand(LARGE)})
        shard = tmp_path / RunKeys("r").shard(newest.attempt, shard_name(0))
        flip(shard, 100, 4)
        with pytest.raises(CorruptObject, match=r"cannot be read to the end, and .* does not have own/x"):
            checkpointer.restore(own={"x": torch.zeros(LARGE)})

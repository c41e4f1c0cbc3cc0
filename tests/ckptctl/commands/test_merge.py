"""ckptctl merge, beside averages by torch."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckptstore.names import Reference
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.stores import open_store
from tests.support.command_line import invoke, succeed

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)


class Net(nn.Module):
    """Parameters of all types, tied weights and the counter of a BatchNorm."""

    def __init__(self, rows: int = 700) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {
                f"of_{str(dtype)[6:]}": nn.Parameter(torch.randn(rows, 9, dtype=torch.cdouble).to(dtype))
                for dtype in DTYPES[4:]
            }
            | {f"of_{str(dtype)[6:]}": nn.Parameter(torch.randn(rows, 9).to(dtype)) for dtype in DTYPES[:4]}
        )
        self.norm = nn.BatchNorm1d(3)
        self.tied = self.weights["of_float32"]
        self.register_buffer("table", torch.arange(12))


def saved(store: Path, run: str, *steps: int, rows: int = 700) -> list[dict[str, torch.Tensor]]:
    """The states of these steps; the optimizer of each is saved, too."""
    found = []
    for step in steps:
        torch.manual_seed(step)
        model = Net(rows)
        assert model.norm.num_batches_tracked is not None
        model.norm.num_batches_tracked.fill_(step)
        with ckpt.Checkpointer(str(store), run=run, writer="thread") as checkpointer:
            checkpointer.save(model, torch.optim.SGD(model.parameters(), momentum=0.9), step)
        found.append({name: value.detach().clone() for name, value in model.state_dict().items()})
    return found


def restored(store: Path, run: str) -> tuple[Net, Any]:
    model = Net()
    with ckpt.Checkpointer(str(store), run=run, writer="thread") as checkpointer:
        return model, checkpointer.restore(model)


def check(store: Path, run: str, states: list[dict[str, torch.Tensor]], shares: list[Fraction]) -> None:
    """All elements are the exact average, rounded to the type; the last checkpoint has the counters."""
    model, found = restored(store, run)
    assert found.unused == [], found.unused
    for name, value in model.state_dict().items():
        if not (value.is_floating_point() or value.is_complex()):
            assert torch.equal(value, states[-1][name]), name
            continue
        wide = torch.complex128 if value.is_complex() else torch.float64
        total = sum((state[name].to(wide) * float(share) for state, share in zip(states, shares, strict=True)))
        assert isinstance(total, torch.Tensor)
        if value.dtype == torch.float16:  # torch rounds twice
            expected = torch.from_numpy(total.numpy().astype(np.float16))
        else:
            expected = total.to(torch.float32 if value.dtype == torch.bfloat16 else value.dtype).to(value.dtype)
        assert torch.equal(value, expected), name
    assert model.tied is model.weights["of_float32"]


@pytest.mark.parametrize(
    ("option", "shares"),
    [
        ((), [Fraction(1, 3)] * 3),
        (("--weights", "1,2,1"), [Fraction(1, 4), Fraction(1, 2), Fraction(1, 4)]),
        (("--ema", "0.75"), [Fraction(9, 16), Fraction(3, 16), Fraction(1, 4)]),
    ],
)
def test_the_average_is_that_of_torch(tmp_path: Path, option: tuple[str, ...], shares: list[Fraction]) -> None:
    states = saved(tmp_path, "gpt", 1, 2, 3)
    done = succeed("merge", "gpt@1", "gpt@2", "gpt@3", *option, "--to", "soup", "--store", tmp_path, "-o", "json")
    check(tmp_path, "soup", states, shares)
    assert done.json["id"].startswith("soup@3.")
    assert done.json["weights"] == pytest.approx([float(share) for share in shares])
    assert done.json["from_last"] == ["norm.num_batches_tracked"]
    assert "average: norm.num_batches_tracked" in done.stderr
    source = StoreSource(open_store(str(tmp_path)))
    merged = source.find(Reference("soup", 3))
    assert verify(source, merged).ok
    parents = [source.find(Reference("gpt", step)).id for step in (1, 2, 3)]
    assert done.json["parents"] == parents
    assert [merged.tags[f"parent-{n}"].split()[0] for n in range(3)] == parents


def test_a_decay_of_0_999_is_that_of_a_loop(tmp_path: Path) -> None:
    states = saved(tmp_path, "gpt", 1, 2, 3)
    succeed("merge", "gpt@1", "gpt@2", "gpt@3", "--ema", 0.999, "--to", "ema@7", "--store", tmp_path)
    average = {name: value.double() for name, value in states[0].items() if value.dtype == torch.float32}
    for state in states[1:]:
        average = {name: 0.999 * value + 0.001 * state[name].double() for name, value in average.items()}
    model, found = restored(tmp_path, "ema")
    assert found.step == 7
    for name, value in average.items():
        torch.testing.assert_close(model.state_dict()[name].double(), value, rtol=1e-7, atol=1e-9)


def test_equal_checkpoints_merge_to_themselves(tmp_path: Path) -> None:
    states = saved(tmp_path, "gpt", 5)
    succeed("merge", "gpt", "gpt", "--to", "twice", "--store", tmp_path)
    model, _ = restored(tmp_path, "twice")
    assert all(torch.equal(value, states[0][name]) for name, value in model.state_dict().items())


def test_what_does_not_fit_is_refused_by_a_table(tmp_path: Path) -> None:
    saved(tmp_path, "gpt", 1)
    saved(tmp_path, "wide", 1, rows=701)
    done = invoke("merge", "gpt", "wide", "--to", "soup", "--store", tmp_path)
    assert done.code == 2
    assert "weights.of_float16" in done.stdout
    assert "[700, 9] float16" in done.stdout
    assert "[701, 9] float16" in done.stdout
    assert "5 tensors not alike in all checkpoints, first " in done.stderr
    assert "norm.weight" not in done.stdout
    assert invoke("ls", "soup", "--store", tmp_path).code == 4


def test_integers_that_are_no_counters_have_no_average(tmp_path: Path) -> None:
    for step in (1, 2):
        model = Net()
        assert isinstance(model.table, torch.Tensor)
        model.table += step
        with ckpt.Checkpointer(str(tmp_path), run="gpt", writer="thread") as checkpointer:
            checkpointer.save(model, None, step)
    done = invoke("merge", "gpt@1", "gpt@2", "--to", "soup", "--store", tmp_path)
    assert done.code == 2
    assert "table differs, and is int64" in done.stderr
    assert invoke("ls", "soup", "--store", tmp_path).code == 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gpt"], "1 checkpoint cannot be merged so"),
        (["gpt", "gpt", "--weights", "1,2", "--ema", "0.9"], "or --ema, or neither"),
        (["gpt", "gpt", "--weights", "1,2,3"], "2 checkpoints cannot be merged so"),
        (["gpt", "gpt", "--weights", "a,b"], "2 checkpoints cannot be merged so"),
        (["gpt", "gpt", "--weights", "1,-1"], "2 checkpoints cannot be merged so"),
        (["gpt", "gpt", "--ema", "1.1"], "'--ema'"),
        (["gpt", "gpt@1"], "exists"),
    ],
)
def test_what_cannot_be_merged_says_why(tmp_path: Path, arguments: list[str], text: str) -> None:
    saved(tmp_path, "gpt", 1)
    done = invoke("merge", *arguments, "--to", "gpt", "--store", tmp_path)
    assert done.code == 2
    assert text in done.stderr


def test_memory_does_not_grow_with_the_checkpoints(tmp_path: Path) -> None:
    """160 MB in each; both at once would be twice as much."""
    for step in (1, 2):
        model = nn.ParameterDict({str(n): nn.Parameter(torch.full((10, 1_000_000), float(step))) for n in range(4)})
        with ckpt.Checkpointer(str(tmp_path), run="big", writer="thread") as checkpointer:
            checkpointer.save(model, None, step)
    tracemalloc.start()
    try:
        succeed("merge", "big@1", "big@2", "--to", "soup", "--store", tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 160_000_000, peak
    found = ckpt.load(f"{tmp_path}/soup@2")
    assert all(np.all(value.numpy() == 1.5) for value in found.values())

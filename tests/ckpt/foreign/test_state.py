import mmap
import os
import sys
import warnings
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.serialization import skip_data

from ckpt import Checkpointer
from ckpt.foreign.state import read_torch
from ckptstore.codecs.dtypes import ITEM_BYTES
from tests.ckpt.dcp_state import make_model, make_optimizer, same
from tests.ckpt.foreign.conftest import Payload, assert_restores, given_back, refused, restore, take
from tests.support.command_line import Finished
from tests.support.entries import tensor_bytes
from tests.support.waiting import present


def imported(store: Path, state: object, *more: object) -> Finished:
    torch.save(state, store.parent / "in.pt")
    done = take(store, store.parent / "in.pt", "r", *more)
    assert done.code == 0, done.stderr
    return done


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model, optim: {"model": model, "optimizer": optim, "step": 5},
        lambda model, optim: {"state_dict": model, "optimizer_state_dict": optim, "epoch": 1},
        lambda model, optim: {"model": {f"module.{k}": v for k, v in model.items()}, "optim": optim},
        lambda model, optim: {"model": {f"_orig_mod.{k}": v for k, v in model.items()}, "optim": optim},
    ],
)
def test_a_training_state_restores_into_a_model_and_its_optimizer(store: Path, wrap: Callable[[Any, Any], Any]) -> None:
    model = make_model(1)
    optim = make_optimizer(model)
    done = imported(store, wrap(model.state_dict(), optim.state_dict()))
    assert {"model", "optim"} <= set(done.json["items"])
    assert_restores(store, model, optim)


def test_parameters_that_are_called_like_an_optimizers_state_stay_parameters(store: Path) -> None:
    imported(store, {"model": {"state.a.w": torch.ones(2), "state.b.w": torch.zeros(2)}})
    assert set(given_back(store)["model"]) == {"state.a.w", "state.b.w"}


def test_a_plain_state_dict_restores_into_a_model(store: Path) -> None:
    model, other = make_model(1), make_model(2)
    assert imported(store, model.state_dict()).json["items"] == ["model"]
    restore(store, other)
    assert same(other.state_dict(), model.state_dict())


def test_an_optimizer_that_knows_its_parameters_names_restores_whatever_its_groups(store: Path) -> None:
    model = make_model(1)
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [{"params": named[3:]}, {"params": named[:3], "weight_decay": 0.0}]
    optim = torch.optim.AdamW(groups, lr=0.01)
    for number, (_, parameter) in enumerate(named):
        parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    optim.step()
    assert imported(store, {"model": model.state_dict(), "optimizer": optim.state_dict()}).json["notes"] == []
    other = make_model(2)
    parameters = list(other.parameters())
    fresh = torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}], lr=1.0)
    restore(store, other, fresh)
    for (_, parameter), twin in zip(named, other.parameters(), strict=True):
        assert same(dict(fresh.state[twin]), dict(optim.state[parameter]))
    assert [group["weight_decay"] for group in fresh.param_groups] == [0.0, 0.01]


@pytest.mark.parametrize("change", ["groups", "frozen", "shapes", "alone"])
def test_an_optimizer_without_names_is_kept_as_it_is_with_a_note(store: Path, change: str) -> None:
    model = make_model(1)
    parameters = list(model.parameters())
    chosen: Any = {
        "groups": [{"params": parameters[:2]}, {"params": parameters[2:]}],
        "frozen": parameters[1:],
        "shapes": parameters[::-1],
        "alone": parameters,
    }[change]
    optim = torch.optim.SGD(chosen, lr=0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optim.step()
    state = {"model": model.state_dict()} if change != "alone" else {}
    done = imported(store, {**state, "optim": optim.state_dict()})
    assert ["by parameter number" in note for note in done.json["notes"]] == [True]
    assert same(given_back(store)["optim_by_number"], optim.state_dict())
    fresh = torch.optim.SGD([{**group, "lr": 1.0, "momentum": 0.0} for group in optim.param_groups])
    with Checkpointer(str(store), run="r", writer="thread") as checkpointer:
        restored = present(checkpointer.restore(model if state else None, optim_by_number=None))
    fresh.load_state_dict(restored.values["optim_by_number"])
    assert same(fresh.state_dict(), optim.state_dict())


def test_every_kind_of_tensor_and_value_keeps_its_bits(store: Path) -> None:
    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    dtypes = [getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)]
    state: dict[str, Any] = {
        "model": OrderedDict(
            {str(dtype): torch.arange(1, 49, dtype=torch.uint8).view(dtype) for dtype in dtypes if dtype != torch.bool},
            bool=torch.tensor([True, False]),
            empty=torch.zeros(0, 3),
            scalar=torch.tensor(3, dtype=torch.int16),
            transposed=base.permute(2, 0, 1),
            strided=base[:, 1:3, ::2],
            conjugate=torch.tensor([1 + 2j, 3 - 1j]).conj(),
            tied=base,
            again=base,
            parameter=nn.Parameter(torch.ones(2)),
        ),
        "misc": {
            "none": None, "list": [1, (2.5, "x")], "size": torch.Size([2]), 3: torch.bfloat16, "nan": float("inf"),
        },
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        imported(store, state)
        found = given_back(store)
    assert found["misc"] == state["misc"]
    model = found["model"]
    assert model["tied"].data_ptr() == model["again"].data_ptr()
    for name, tensor in state["model"].items():
        assert (model[name].dtype, model[name].shape) == (tensor.dtype, tensor.shape)
        assert tensor_bytes(model[name]) == tensor_bytes(tensor.detach().resolve_conj().contiguous()), name


def test_a_large_tensor_in_odd_order_keeps_its_bits(store: Path) -> None:
    tensor = torch.arange(3_000_000, dtype=torch.int32).reshape(1000, 3000)
    imported(store, {"w": tensor.t(), "v": tensor})
    assert torch.equal(given_back(store)["model"]["w"], tensor.t())


class Color(Enum):
    RED = 1


@dataclass
class Settings:
    lr: float = 0.1
    weights: torch.Tensor | None = None


ODD = {
    "best": np.float32(0.5), "random": np.random.RandomState(3).get_state(), "empty": np.zeros((0, 3)),
    "columns": np.arange(6, dtype=">i4").reshape(2, 3, order="F"), "when": [datetime(2026, 1, 2, 3), date(2026, 1, 2)],
    "took": timedelta(1, 2, 3), "counts": defaultdict(int, a=1), "args": Namespace(lr=0.1, to=Path("x")),
    "bytes": [b"", b"x"], "kinds": frozenset({1}),
}  # fmt: skip


def test_values_of_usual_scripts_are_imported_and_others_left_out(store: Path) -> None:
    left = {"items": [Decimal("1.5"), 2], "zone": [UTC], "by": {Color.RED: 1}, "own": Settings(), "t": np.dtype("f4")}
    notes = imported(store, {"model": {"w": torch.ones(2)}, "others": {**ODD, **left}}).json["notes"]
    with Checkpointer(str(store), run="r", writer="thread") as checkpointer:
        restored = present(checkpointer.restore(others=None))
    found = restored.values["others"]
    plain = {**ODD, "counts": {"a": 1}, "args": {"lr": 0.1, "to": Path("x")}, "items": [None, 2], "zone": [None]}
    assert repr(found) == repr({**plain, "by": {}}).replace("'>i4'", "int32")
    assert found["columns"].dtype == np.int32
    assert sorted(note.split()[0] for note in notes) == [
        "others/by/key", "others/items/0", "others/own", "others/t", "others/zone/0",
    ]  # fmt: skip


def test_nothing_in_a_file_is_executed(store: Path, tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "x": Payload(tmp_path / "pwned")}, tmp_path / "evil.pt")
    done = take(store, tmp_path / "evil.pt")
    assert done.json["notes"] == ["x is left out: a posix.mkdir cannot be imported"]
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (Settings(), ["Settings"]),
        ({"model": Settings()}, ["Settings"]),
        ({"m": torch.ones(2), "s": [Settings(weights=torch.ones(2))]}, ["Settings"]),
        (nn.Linear(2, 2), ["torch.nn.modules.linear.Linear"]),
        ({"w": torch.ones(1).expand(1 << 40)}, ["/w", "larger than its storage"]),
        ({"w": torch.eye(3).to_sparse()}, ["/w", "sparse_tensor"]),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(store: Path, tmp_path: Path, state: object, said: list[str]) -> None:
    torch.save(state, tmp_path / "in.pt")
    error = refused(store, tmp_path / "in.pt")
    assert (error["code"], [one for one in said if one not in error["message"]]) == ("unsupported_object", [])


@pytest.mark.parametrize("keep", [0, 3, 100, 5_000, -1, -500])
def test_a_truncated_file_is_damage(store: Path, tmp_path: Path, keep: int) -> None:
    torch.save({"w": torch.ones(5_000)}, tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:keep])
    assert refused(store, tmp_path / "cut.pt")["code"] == "corrupt"


def test_the_format_before_zip_is_named(store: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    error = refused(store, tmp_path / "old.pt")
    assert (error["code"], "before torch 1.6" in error["hint"]) == ("corrupt", True)


def test_nothing_is_no_checkpoint(store: Path, tmp_path: Path) -> None:
    torch.save({}, tmp_path / "empty.pt")
    assert refused(store, tmp_path / "empty.pt")["code"] == "invalid_request"


def write_larger_than_memory(path: Path) -> int:
    """A file of torch.save with a tensor of zeros that takes no room on the disk; returns its bytes."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 2
    unreserved = 0x4000  # MAP_NORESERVE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved)
    with skip_data(), open(path, "wb") as file:
        torch.save({"w": torch.frombuffer(memory, dtype=torch.int32)}, file)
    return size


def test_a_file_larger_than_the_memory_can_be_read(tmp_path: Path) -> None:
    size = write_larger_than_memory(tmp_path / "large.pt")
    (part,) = read_torch(tmp_path / "large.pt", "model").parts
    assert part.slice.bytes == size
    buffer = bytearray(b"x" * 4096)
    part.read(size - 4096, memoryview(buffer))
    assert bytes(buffer) == bytes(4096)


def test_a_file_of_the_other_byte_order_is_read_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "big.pt"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "byteorder", "big")  # torch writes this name, and native numbers
        torch.save({"w": torch.tensor([1, 2], dtype=torch.int32)}, path)
    path.chmod(0o400)
    before = path.read_bytes()
    (part,) = read_torch(path, "model").parts
    buffer = bytearray(8)
    part.read(0, memoryview(buffer))
    assert (bytes(buffer), path.read_bytes()) == (bytes([0, 0, 0, 1, 0, 0, 0, 2]), before)

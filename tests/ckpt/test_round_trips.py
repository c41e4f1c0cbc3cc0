"""How many requests of a save and of a restore wait for one another: over a network each of them takes a round trip."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.dtypes import BY_NAME
from ckptstore.stores import multipart
from tests.ckptstore.proxies import Answered, LossyProxy, lossy_proxy
from tests.support.seaweed import BUCKET, S3Service
from tests.support.training import tensor_bits
from tests.support.waiting import present

PART_BYTES = 5 << 20
ROUND_TRIP_S = 0.05
TRIES = 6
"""On a busy machine, threads that send requests together may be late: only the best of some tries counts."""

SAVE = [
    "POST shard ?uploads", "PUT shard", "POST shard ?uploadId", "PUT receipt", "PUT manifest", "PUT commits",
    "GET dead",
]  # fmt: skip
RESTORE = ["GET commits", "GET dead", "PUT leases", "GET tombstones", "GET dead", "GET shard"]


@pytest.fixture
def proxy(s3_service: S3Service) -> Iterator[LossyProxy]:
    with lossy_proxy(s3_service.endpoint) as found:
        yield found


@pytest.fixture
def over_network(s3_service: S3Service, proxy: LossyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkpointer]:
    monkeypatch.setattr(multipart, "PART_BYTES", PART_BYTES)
    options = {**s3_service.options, "endpoint_url": proxy.url}
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    with Checkpointer(url, run="gpt", options=options, writer="thread", compress="off", slots=1) as found:
        yield found


@pytest.fixture
def model() -> torch.nn.Module:
    """Of two parts."""
    return torch.nn.Linear(1024, 1600)


def kind(request: str) -> str:
    """PUT commits, GET shard, ..."""
    verb, _, where = request.partition(" ")
    path, _, query = where.partition("?")
    prefix = re.search(r"prefix=([^&]*)", query)
    names = (prefix[1].replace("%2F", "/") if prefix else path.removeprefix(f"/{BUCKET}/")).split("/")
    at = names[names.index("gpt") + 1 :]
    parts = {"ckpt": "shard", "json": "receipt", "json.zst": "manifest"}
    name = parts[at[2].partition(".")[2]] if at[2:] and at[2] else at[0]
    return f"{verb} {name}" + (f" ?{query.partition('=')[0]}" if verb == "POST" else "")


def in_a_row(answered: list[Answered]) -> list[str]:
    """The longest sequence of requests each of which began after the reply to the one before."""
    found: list[Answered] = []
    for one in sorted(answered, key=lambda one: one.replied_at):
        if not found or one.received_at >= found[-1].replied_at:
            found.append(one)
    return [kind(one.request) for one in found]


def shortest(proxy: LossyProxy, act: Callable[[], object], wanted: int) -> tuple[list[str], list[str]]:
    """The requests in a row of one act, and all of its requests, but for what is deleted after it."""
    best: list[str] | None = None
    for _ in range(TRIES):
        proxy.arm(None)
        act()
        answered = [one for one in proxy.answered if not one.request.startswith("DELETE")]
        row = in_a_row(answered)
        if best is None or len(row) < len(best):
            best, everything = row, sorted(kind(one.request) for one in answered)
        if len(best) <= wanted:
            break
    assert best is not None
    return best, everything


def test_a_save(proxy: LossyProxy, over_network: Checkpointer, model: torch.nn.Module) -> None:
    def save() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        over_network.save(model, None, step=next(steps))

    steps = iter(range(1, 100))
    save()  # begins a generation, and finds out what the store guarantees
    proxy.round_trip_s = ROUND_TRIP_S
    row, everything = shortest(proxy, save, len(SAVE))
    assert len(row) <= len(SAVE), row
    beside = ["PUT shard", "HEAD generations"]
    assert everything == sorted(SAVE + beside)


def test_a_restore(proxy: LossyProxy, over_network: Checkpointer, model: torch.nn.Module) -> None:
    over_network.save(model, None, step=1)
    proxy.round_trip_s = ROUND_TRIP_S
    row, everything = shortest(proxy, lambda: over_network.restore(model), len(RESTORE))
    assert len(row) <= len(RESTORE), row
    beside = ["GET attempts", "GET tombstones", "GET commits", "GET quarantine", "GET manifest", "GET receipt"]
    assert [one for one in everything if one != "GET shard"] == sorted([*RESTORE[:-1], *beside])


class Bag(nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def random_bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Elements of any bits: NaN payloads, negative zeros, denormals."""
    generator = torch.Generator().manual_seed(7)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator, dtype=torch.uint8).view(torch.bool)
    return torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


def round_trip(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Saved from one module and restored into another, whose tensors are contiguous zeros."""
    blank = Bag({name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()})
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        checkpointer.save(Bag(tensors), None, 0)
        assert checkpointer.restore(blank) is not None
        loaded = checkpointer.load(names="model/*")
    found = dict(blank.named_buffers())
    for name, tensor in found.items():
        assert tensor_bits(tensor) == tensor_bits(loaded[f"model/{name}"])
    return found


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_all_dtypes(tmp_path: Path) -> None:
    tensors = {f"a_{name}": random_bits(dtype, 1000).reshape(20, 50) for name, dtype in BY_NAME.items()}
    assert {"a_float8_e4m3fn", "a_bfloat16", "a_complex64", "a_uint16"} <= tensors.keys()
    for name, tensor in round_trip(tmp_path, tensors).items():
        assert (tensor.dtype, tensor_bits(tensor)) == (tensors[name].dtype, tensor_bits(tensors[name]))


def test_shapes_and_layouts(tmp_path: Path) -> None:
    base = random_bits(torch.float32, 600).reshape(20, 30)
    tensors = {
        "empty": torch.zeros(0, 5),
        "scalar": torch.tensor(-0.0),
        "transposed": base.t(),
        "strided": base[::2, ::3],
        "expanded": torch.arange(4.0).reshape(4, 1).expand(4, 9),
        "offset": base[3:7],
        "channels_last": random_bits(torch.float16, 240).reshape(2, 3, 8, 5).to(memory_format=torch.channels_last),
        "conjugate": random_bits(torch.complex64, 10).nan_to_num().conj(),
        "odd": random_bits(torch.uint8, 7),
    }
    for name, tensor in round_trip(tmp_path, tensors).items():
        assert tensor.shape == tensors[name].shape
        assert tensor_bits(tensor) == tensor_bits(tensors[name]), name


def test_restore_into_non_contiguous_tensors(checkpointer: Checkpointer) -> None:
    value = random_bits(torch.float32, 600).reshape(20, 30)
    target = Bag({"x": torch.zeros(30, 20).t()})
    checkpointer.save(Bag({"x": value}), None, 0)
    checkpointer.restore(target)
    assert tensor_bits(target.x) == tensor_bits(value)  # type: ignore[arg-type]


@pytest.mark.slow
def test_tensor_of_more_than_two_gigabytes(tmp_path: Path) -> None:
    size = (2 << 30) + 12_345
    tensor = torch.zeros(size, dtype=torch.uint8)
    tensor[:: 1 << 20] = 7
    tensor[-1] = 9
    model = Bag({"x": tensor})
    with Checkpointer(str(tmp_path), run="r", slots=1, writer="thread", compress="fast") as checkpointer:
        checkpointer.save(model, None, 0)
        tensor.fill_(1)
        checkpointer.restore(model)
    assert (int(tensor[-1]), int(tensor.count_nonzero())) == (9, len(range(0, size, 1 << 20)) + 1)
    assert bool((tensor[:: 1 << 20] == 7).all())


def test_plain_data_keeps_values_and_types(checkpointer: Checkpointer) -> None:
    value: dict[Any, Any] = {
        "none": None, "big": 2**200, "floats": [0.1, -0.0, float("inf"), float("nan")],
        "tuple": (1, ("x", b"\x00\xff")), "set": {3, 4}, 1: "integer key", "$": "dollar key",
        "array": np.arange(6, dtype=np.int16).reshape(2, 3), "scalar": np.float32(0.25), "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16, "tensor": torch.tensor([1.5, float("nan")]), "large": torch.arange(40_000),
    }  # fmt: skip
    checkpointer.save(None, None, 0, value=value)
    restored = present(checkpointer.restore(value=None))
    found = restored.values["value"]
    assert (repr(found), [type(one) for one in found.values()]) == (repr(value), [type(one) for one in value.values()])
    assert tensor_bits(found["tensor"]) == tensor_bits(value["tensor"])
    assert tensor_bits(found["large"]) == tensor_bits(value["large"])

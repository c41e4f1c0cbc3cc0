"""Weights that are casts of masters in the same state: found, not stored, and made from them wherever they are read."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.saver.messages import Done, Failed, Report
from ckpt.saver.pipeline import SavePipeline
from ckptstore.clock import system_clock
from ckptstore.codecs.dtypes import CAST_TYPES, cast, cast_into, is_cast
from ckptstore.errors import CorruptObject
from ckptstore.format.boxes import Box, Want
from ckptstore.format.columns import column
from ckptstore.format.documents import Content
from ckptstore.format.parsing import check_manifest
from ckptstore.format.planning import derived_bytes, plan_reads
from ckptstore.format.shards import Placed, Slice
from ckptstore.names import new_ulid
from ckptstore.reading.fetch import fetch
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.reading.verify import verify
from ckptstore.stores import Store, open_store
from tests.ckpt.dcp_state import load as dcp_load
from tests.ckpt.saver.attempts import new_attempt, new_job, new_setup

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPE = (512, 160)
both_types = pytest.mark.parametrize("dtype", CAST_TYPES)
Words = npt.NDArray[Any]


def torch_cast(bits: Words, dtype: str) -> Words:
    words: Words = torch.from_numpy(bits.view(np.float32)).to(TORCH[dtype]).view(torch.int16).numpy().view(np.uint16)
    return words


@both_types
def test_casts_are_those_of_torch(dtype: str) -> None:
    top = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    for low in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = top | np.uint32(low)
        assert np.array_equal(cast(bits, dtype), torch_cast(bits, dtype)), hex(low)
    anything = np.random.default_rng(0).integers(0, 1 << 32, 1 << 19, dtype=np.uint32)
    assert np.array_equal(cast(anything, dtype), torch_cast(anything, dtype))
    assert is_cast(anything, dtype, torch_cast(anything, dtype))


@both_types
def test_casts_of_strided_memory(dtype: str) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, (300, 501), dtype=np.uint32)
    for source in (bits[::2, 1:-1:3], bits.T[5:], bits[:, 7]):
        target = np.zeros((2, *source.shape), np.uint16)[0]
        cast_into(source, dtype, target)
        assert np.array_equal(target, torch_cast(np.ascontiguousarray(source), dtype))


class Masters(torch.optim.Optimizer):
    """Keeps float32 masters, as training in mixed precision does, and sets the weights to their casts."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__(model.parameters(), {})
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            state = self.state[parameter]
            state["exp_avg"] = torch.randn(parameter.shape, generator=generator)
            state["master"] = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(state["master"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Not used."""


def training(dtype: torch.dtype, seed: int = 0) -> tuple[nn.Module, Masters]:
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 200, bias=False)).to(dtype)
    return model, Masters(model, seed)


def bits_of(model: nn.Module) -> list[bytes]:
    return [tensor.view(torch.int16).numpy().tobytes() for tensor in model.state_dict().values()]


def derived_of(store: str) -> dict[str, int]:
    source = StoreSource(open_store(store))
    return derived_bytes(read_manifest(source, source.latest("r")).content)


@both_types
@pytest.mark.parametrize("compress", ["off", "fast"])
def test_casts_of_masters_come_back_unstored(tmp_path: Path, dtype: str, compress: Literal["off", "fast"]) -> None:
    model, optim = training(TORCH[dtype])
    with Checkpointer(str(tmp_path), run="r", dedup_casts=True, compress=compress, writer="thread") as checkpointer:
        first = checkpointer.save(model, optim, step=1)
        assert derived_of(str(tmp_path)) == {"model/0.weight": 2 * 300 * 200, "model/1.weight": 2 * 200 * 200}
        assert verify(StoreSource(open_store(str(tmp_path))), first).ok
        second = checkpointer.save(model, optim, step=2)
        assert second.referenced_bytes > 0.9 * first.stored_bytes, "derived slices do not prevent references"
        other, other_optim = training(TORCH[dtype], seed=1)
        checkpointer.restore(other, other_optim)
        assert bits_of(other) == bits_of(model)
        alone = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 200, bias=False)).to(TORCH[dtype])
        checkpointer.restore(alone)
        assert bits_of(alone) == bits_of(model), "without the optimizer"
        (weight,) = checkpointer.load(names="model/1.weight").values()
        assert weight.dtype == TORCH[dtype]
        assert torch.equal(weight, model.get_parameter("1.weight"))
    loaded = dcp_load(open_store(str(tmp_path)), {"model": {"1.weight": torch.zeros(200, 200, dtype=TORCH[dtype])}})
    assert torch.equal(loaded["model"]["1.weight"], weight)


def derived_and_restored(folder: Path, model: nn.Module, optim: Masters) -> list[str]:
    """Save, and restore the same bits; the entries that were derived."""
    with Checkpointer(str(folder), run="r", dedup_casts=True, writer="thread") as checkpointer:
        checkpointer.save(model, optim, step=1)
        other, other_optim = training(torch.bfloat16, seed=1)
        checkpointer.restore(other, other_optim)
    assert bits_of(other) == bits_of(model)
    return list(derived_of(str(folder)))


def test_one_bit_of_one_element_is_enough_to_be_stored(tmp_path: Path) -> None:
    model, optim = training(torch.bfloat16)
    model.get_parameter("0.weight").data.view(torch.int16)[123, 45] ^= 1
    assert derived_and_restored(tmp_path, model, optim) == ["model/1.weight"]


def test_nans_keep_their_bits_whether_derived_or_not(tmp_path: Path) -> None:
    model, optim = training(torch.bfloat16)
    for name, parameter in model.named_parameters():
        master = optim.state[parameter]["master"]
        master.view(torch.int32)[:4] = (
            0x7F800000 + torch.arange(4, dtype=torch.int32)[:, None] if master.ndim > 1 else 0
        )
        parameter.data.copy_(master)
        if name == "1.weight":
            parameter.data.view(torch.int16)[0, 0] = 0x7FC1
    assert derived_and_restored(tmp_path, model, optim) == ["model/0.weight"]


def test_nothing_is_derived_unless_asked_for(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        checkpointer.save(*training(torch.bfloat16), step=1)
    assert derived_of(str(tmp_path)) == {}


def save_halves(store: Store, cut: int) -> tuple[Content, Words]:
    """The state of two ranks: boxes of masters and of their casts, cut in the dimension `cut`."""
    bits = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32).view(np.uint32)
    weights = cast(bits, "bfloat16")
    attempt, reports = new_attempt(1), queue.SimpleQueue[Report]()
    pipelines = []
    for rank in range(2):
        sizes = [length // (2 if dimension == cut else 1) for dimension, length in enumerate(SHAPE)]
        offsets = [rank * size if dimension == cut else 0 for dimension, size in enumerate(sizes)]
        region = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        box = (*offsets, *sizes)
        raw = np.zeros(bits[region].size, np.float32).tobytes() + bits[region].tobytes() + weights[region].tobytes()
        third = 4 * bits[region].size
        rows = [
            Placed(Slice("optim/m", "float32", SHAPE, box), 0),
            Placed(Slice("optim/master", "float32", SHAPE, box), third),
            Placed(Slice("model/w", "bfloat16", SHAPE, box), 2 * third),
        ]
        setup = new_setup(store.url, rank=rank, world_size=2, compress="fast", dedup_casts=True)
        job = new_job(attempt, slot=0, slices=rows)
        pipelines.append(SavePipeline(store, setup, reports.put))
        pipelines[-1].submit(job, memoryview(raw))
    for pipeline in pipelines:
        pipeline.close()
    found = [reports.get_nowait() for _ in range(reports.qsize())]
    assert not [report for report in found if isinstance(report, Failed)]
    assert len([report for report in found if isinstance(report, Done)]) == 2
    source = StoreSource(store)
    return read_manifest(source, source.latest("r")).content, weights


@pytest.mark.parametrize("cut", [0, 1])
def test_any_box_of_a_derived_entry_can_be_read_from_any_layout(cut: int) -> None:
    store = open_store(f"memory://{new_ulid(system_clock())}")
    content, weights = save_halves(store, cut)
    assert derived_bytes(content) == {"model/w": weights.nbytes}
    source = StoreSource(store)
    boxes: list[Box] = [
        (0, 0, *SHAPE), (0, 0, 256, 160), (200, 0, 160, 160), (0, 33, 512, 100), (7, 79, 200, 2), (511, 159, 1, 1),
    ]  # fmt: skip
    for box in boxes:
        into, wants = np.zeros(box[2:], np.uint16), [Want("model/w", box, "x")]
        fetch(source, source.latest("r"), plan_reads(content, wants), {"x": into.view(np.uint8).reshape(-1).data})
        assert np.array_equal(into, weights[box[0] : box[0] + box[2], box[1] : box[1] + box[3]]), box


def hostile(content: Content, **changes: Any) -> Content:
    return msgspec.structs.replace(content, slices=msgspec.structs.replace(content.slices, **changes))


def test_documents_with_impossible_derivations_are_refused() -> None:
    store = open_store(f"memory://{new_ulid(system_clock())}")
    content, _ = save_halves(store, 0)
    source = StoreSource(store)
    manifest, slices = read_manifest(source, source.latest("r")), content.slices
    assert slices.derived is not None
    rows = slices.derived.tolist()
    one = rows[0]

    def moved(to: int) -> Any:
        at = slices.at.copy()
        at[one] = to
        return at

    for changed, message in (
        (hostile(content, derived=column(rows[::-1])), "not in order"),
        (hostile(content, derived=column([*rows, 99])), "is none"),
        (hostile(content, derived=column([])), "not in order"),
        (hostile(content, derived=None), "share bytes"),
        (hostile(content, at=moved(4)), "derived from none"),
        (hostile(content, at=moved(1 << 60)), "derived from none"),
        (hostile(content, derived=column([one - 1, *rows])), "two slices are derived from one"),
        (with_dtype(content, "optim/master", "int32"), "another type"),
        (with_dtype(content, "model/w", "int16"), "another type"),
        (hostile(content, box=halved(slices.box, one)), "another size"),
    ):
        with pytest.raises(CorruptObject, match=message):
            check_manifest(msgspec.structs.replace(manifest, content=changed), "a manifest")


def with_dtype(content: Content, name: str, dtype: str) -> Content:
    entries = content.entries
    changed = [dtype if each == name else old for each, old in zip(entries.name, entries.dtype, strict=True)]
    return msgspec.structs.replace(content, entries=msgspec.structs.replace(entries, dtype=changed))


def halved(boxes: Any, row: int) -> Any:
    changed = boxes.copy()
    changed[4 * row + 2] //= 2
    return changed

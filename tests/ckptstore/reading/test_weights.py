from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as with_fields
from safetensors import safe_open
from safetensors.torch import load

from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CorruptObject, InvalidRequest
from ckptstore.names import RunKeys, shard_name
from ckptstore.reading import weights
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.reading.weights import INDEX, ONLY, Part, VirtualFile, Weights
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import SMALL, Arrays, flip, write_checkpoint
from tests.support.layouts import Layout, layouts

RNG = np.random.default_rng(5)
ARRAYS: Arrays = {
    "model/module.emb": RNG.standard_normal((1000, 700)).astype(np.float32),
    "model/module.head._orig_mod.bias": np.array([1.0, np.nan, -np.inf, 1e-40, 3.4e38], np.float32),
    "model/module.steps": np.arange(3),
    "ema/emb": RNG.standard_normal((30, 7)).astype(np.float16),
    "optim/m": RNG.standard_normal(100).astype(np.float32),
}


def opened(
    store: Store, checkpoint: Checkpoint, item: str = "model", dtype: str | None = None
) -> tuple[StoreSource, Weights]:
    source = StoreSource(store)
    return source, Weights.of(read_manifest(source, checkpoint).content, item, dtype)


def whole(source: StoreSource, checkpoint: Checkpoint, file: VirtualFile) -> bytes:
    return b"".join(map(bytes, file.pieces(source, checkpoint, 0, file.bytes)))


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Checkpoint]:
    store = open_store(str(tmp_path_factory.mktemp("weights") / "store"))
    return store, write_checkpoint(store, "gpt", 1, ARRAYS)


@given(layout=layouts(), fractions=st.lists(st.floats(0, 1), min_size=6, max_size=6), piece=st.integers(1, 200))
def test_every_range_of_every_layout_has_the_bytes_of_the_file(
    layout: Layout, fractions: list[float], piece: int
) -> None:
    store = open_store("memory://weights")
    checkpoint = write_checkpoint(store, "gpt", 1, SMALL)
    shards = [with_fields(shard, name=shard_name(90 + shard.rank)) for shard in layout.content.shards]
    for shard, stream in zip(shards, layout.streams.values(), strict=True):
        store.put(RunKeys("gpt").shard(checkpoint.attempt, shard.name), stream)
    content = with_fields(layout.content, shards=shards)
    held = {name: array.reshape(-1) for name, array in layout.arrays.items() if array.itemsize < 16}
    names = {f"t.{name}": Part(name, 0, layout.arrays[name].shape) for name in held}
    names |= {f"u.{name}": Part(name, len(flat) // 3, (len(flat) // 2,)) for name, flat in held.items()}
    turned = {name: layout.arrays[name].T for name, flat in held.items() if flat.size}
    for name, array in turned.items():
        axes = zip(array.shape, (step // array.itemsize for step in array.strides), strict=True)
        names[f"v.{name}"] = Part(name, 0, array.shape, tuple(axis for axis in axes if axis[0] > 1))
    file = Weights(content, {name: name for name in held}).named(names).file(names)
    parts = [(tensor, names[tensor.name].of, names[tensor.name].first) for tensor in file.tensors]
    arrays = b"".join(
        turned[name].tobytes() if tensor.name[0] == "v" else held[name][first:][: prod(tensor.shape)].tobytes()
        for tensor, name, first in parts
    )
    expected, source = file.header + arrays, StoreSource(store)
    assert len(expected) == file.bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "PIECE_BYTES", piece)
        assert whole(source, checkpoint, file) == expected
    for low, high in zip(fractions[::2], fractions[1::2], strict=True):
        start, stop = sorted(int(fraction * file.bytes) for fraction in (low, high))
        into = bytearray(stop - start)
        file.read(source, checkpoint, start, memoryview(into))
        assert into == expected[start:stop]
        file.read(source, checkpoint, start, memoryview(bytearray()))


@pytest.mark.parametrize("dtype", [None, "bf16", "float16"])
def test_readers_see_names_types_and_values(held: tuple[Store, Checkpoint], dtype: str | None) -> None:
    source, view = opened(*held, dtype=dtype)
    (file,) = view.files().values()
    found = load(whole(source, held[1], file))
    kind = {None: torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}[dtype]
    for name, entry in (("emb", "model/module.emb"), ("head.bias", "model/module.head._orig_mod.bias")):
        expected = torch.from_numpy(ARRAYS[entry]).to(kind)
        assert torch.equal(found.pop(name).view(torch.uint8), expected.view(torch.uint8))
    assert (found.pop("steps").tolist(), found) == ([0, 1, 2], {})
    emb = opened(*held, "ema", dtype)[1].files()[ONLY]
    assert torch.equal(load(whole(source, held[1], emb))["emb"], torch.from_numpy(ARRAYS["ema/emb"]))


def test_large_weights_are_several_files_with_an_index(held: tuple[Store, Checkpoint], tmp_path: Path) -> None:
    source, view = opened(*held)
    files = replace(view, aliases={"tied": "emb"}).files(max_bytes=1000)
    for name, file in files.items():
        (tmp_path / name).write_bytes(whole(source, held[1], file))
    index = json.loads((tmp_path / INDEX).read_bytes())
    assert index["metadata"]["total_size"] == sum(ARRAYS[e].nbytes for e in view.entries.values())
    assert sorted(index["weight_map"]) == ["emb", "head.bias", "steps"]
    with safe_open(tmp_path / index["weight_map"]["emb"], "np") as opened_file:
        assert np.array_equal(opened_file.get_tensor("emb"), ARRAYS["model/module.emb"])
        assert opened_file.metadata() == {"format": "pt", "tied": "emb"}


def test_a_view_that_cannot_be_is_refused(held: tuple[Store, Checkpoint]) -> None:
    with pytest.raises(InvalidRequest, match="no tensors of 'modle'"):
        opened(*held, item="modle")
    with pytest.raises(InvalidRequest, match="cast to 'int8'"):
        opened(*held, dtype="int8")
    source = StoreSource(held[0])
    turned = [((700, 701), (1000, 1)), ((700_000, 1),), ((700, 1), (1000, -700)), ((700, 1),), ((0, 1), (0, 700))]
    for wrong, error in (
        (Part("x", 0, (1,)), InvalidRequest),
        (Part("emb", 699_999, (2,)), CorruptObject),
        (Part("emb", -1, (700,), ((700, 1),)), CorruptObject),
        *((Part("emb", 0, (1000, 700), axes), CorruptObject) for axes in turned),
    ):
        with pytest.raises(error):
            opened(*held)[1].named({"new": wrong})
    with pytest.raises(InvalidRequest, match="one name"):
        Weights.of(read_manifest(source, held[1]).content, naming=lambda name: "x")


def test_a_damaged_byte_is_never_read(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    checkpoint = write_checkpoint(store, "gpt", 1, ARRAYS)
    source, view = opened(store, checkpoint)
    flip(tmp_path / "store" / RunKeys("gpt").shard(checkpoint.attempt, "shard-00000.ckpt"), 1_000_000)
    with pytest.raises(CorruptObject, match="checksum"):
        whole(source, checkpoint, view.files()[ONLY])


def test_signatures_say_what_has_changed(held: tuple[Store, Checkpoint]) -> None:
    store, before = held
    arrays = {**ARRAYS, "model/module.emb": ARRAYS["model/module.emb"] + 1}
    first = opened(store, before)[1].signatures()
    assert first == opened(store, write_checkpoint(store, "gpt", 2, ARRAYS))[1].signatures()
    second = opened(store, write_checkpoint(store, "gpt", 3, arrays))[1].signatures()
    assert {name for name in first if first[name] != second[name]} == {"emb"}
    assert set(opened(store, before, dtype="bf16")[1].signatures().items()).isdisjoint(
        {item for item in first.items() if item[0] != "steps"}
    )

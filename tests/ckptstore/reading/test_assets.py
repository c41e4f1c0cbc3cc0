from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace
from safetensors.torch import load

from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CorruptObject
from ckptstore.format.documents import JSON, Content
from ckptstore.format.trees import encode_bytes
from ckptstore.reading.assets import NAMES, asset_files, folder_files, open_weights
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores import Store
from tests.support.checkpoints import write_checkpoint

TOKENIZER = np.random.default_rng(0).integers(0, 255, 3_000_000, dtype=np.uint8)


def leaf(name: str) -> JSON:
    return {"$": "array", "name": name}


def inline(data: bytes, dtype: str = "uint8") -> JSON:
    return {"$": "array", "dtype": dtype, "shape": [len(data)], "data": encode_bytes(data)}


def read_assets(source: StoreSource, checkpoint: Checkpoint, content: Content) -> dict[str, bytes]:
    files = asset_files(content)
    return {name: b"".join(map(bytes, one.pieces(source, checkpoint, 0, one.bytes))) for name, one in files.items()}


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_files_are_read_by_name_and_what_is_no_file_is_left_alone(store: Store) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {
        "assets/tokenizer.json": TOKENIZER,
        "assets/empty": np.zeros(0, np.uint8),
        "assets/w": np.zeros((2, 2)),
    }
    checkpoint = write_checkpoint(store, arrays=arrays)
    content, source = read_manifest(StoreSource(store), checkpoint).content, StoreSource(store)
    assert read_assets(source, checkpoint, replace(content, trees={})) == {}
    tree: JSON = {
        **{name.removeprefix("assets/"): leaf(name) for name in arrays},
        "config.json": inline(b"{}"),
        "chat/x.jinja": inline(b"x"),
        "floats": inline(bytes(8), "float64"),
        "number": 1,
    }
    content = replace(content, trees={"assets": tree})
    expected = {
        "tokenizer.json": TOKENIZER.tobytes(), "empty": b"", "config.json": b"{}", "chat/x.jinja": b"x"
    }  # fmt: skip
    assert read_assets(source, checkpoint, content) == expected
    files = asset_files(content)
    assert {name: file.bytes for name, file in files.items()} == {name: len(data) for name, data in expected.items()}
    other = replace(content, trees={"assets": {**tree, "config.json": inline(b"[]")}})
    assert {name for name, file in asset_files(other).items() if file.version != files[name].version} == {"config.json"}


@pytest.mark.parametrize("store", ["memory"], indirect=True)
@pytest.mark.parametrize("data", [b'{"b.0": ["w", 0, [2]], "b.1": ["w", 2, [1, 2]]}', b"[]", b'{"b": ["w", -1, [1]]}'])
def test_weights_have_the_names_that_an_asset_gives(store: Store, data: bytes) -> None:
    weights, names = np.arange(4, dtype=np.int32), np.frombuffer(data, np.uint8)
    checkpoint = write_checkpoint(store, arrays={"model/w": weights, f"assets/{NAMES}": names})
    if not data.endswith(b"2]]}"):
        with pytest.raises(CorruptObject):
            open_weights(StoreSource(store), checkpoint)
        return
    view = open_weights(StoreSource(store), checkpoint)
    files = folder_files(view)
    file = files["model.safetensors"]
    found = load(b"".join(map(bytes, file.pieces(StoreSource(store), checkpoint, 0, file.bytes))))
    assert {name: value.tolist() for name, value in found.items()} == {"b.0": [0, 1], "b.1": [[2, 3]]}
    assert list(files) == ["model.safetensors"]


@pytest.mark.parametrize("store", ["memory"], indirect=True)
@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", ".", "a//b"])
def test_a_name_that_leads_out_of_a_folder_is_refused(store: Store, name: str) -> None:
    content = read_manifest(StoreSource(store), write_checkpoint(store)).content
    with pytest.raises(CorruptObject, match="leads out"):
        asset_files(replace(content, trees={"assets": {name: inline(b"x")}}))

"""Assets: the files that belong to a model (its configuration, its tokenizer) and are saved with a checkpoint.

They are a shared item of the checkpoint: a dict from a file's name to its bytes, as an array. An item of this name that
was saved as something else is read as far as it has this form. Nothing is ever written outside of a folder: a name that
leads out of one is refused, when it is saved and when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from posixpath import basename, dirname, join, normpath
from typing import Any

import msgspec

from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CorruptObject
from ckptstore.format.decoding import decode_json
from ckptstore.format.documents import Content
from ckptstore.format.trees import decode_bytes, leaves
from ckptstore.reading.safetensors import StoredTensor
from ckptstore.reading.source import Source, read_manifest
from ckptstore.reading.weights import MAX_FILE_BYTES, Part, VirtualFile, Weights, plain_file

ASSETS = "assets"
NAMES = "ckptd-names.json"
"""The asset with the names by which readers know the model's tensors: for each the fields of a Part of a tensor of the
module. It is in no folder. Names of tensors of adapters follow the folder of their file."""
ADAPTER = "adapter_model.safetensors"
"""The file of an adapter's tensors, as PEFT has it: beside an asset with its configuration."""


def stays_inside(name: str) -> bool:
    """Whether a file of this name lies in the folder that it is written to, or in a folder inside it."""
    below = f"folder/{name}"
    return normpath(below) == below


def asset_files(content: Content) -> dict[str, VirtualFile]:
    """The files by their names; empty if there are none. Raises CorruptObject for a name that leads out of a folder."""
    return {
        name: VirtualFile(b"", (StoredTensor(name, "uint8", (size,), 0),), size, content, {name: leaf["name"]})
        if "name" in leaf
        else plain_file(decode_bytes(leaf["data"]), content)
        for name, leaf, size in _assets(content)
    }


def folder_files(weights: Weights, max_bytes: int = MAX_FILE_BYTES) -> dict[str, VirtualFile]:
    """The files of a Hugging Face folder: assets, and weights in files of at most `max_bytes`; or those of PEFT, with
    the weights of adapters alone. Raises as these do.
    """
    files = asset_files(weights.content)
    named = files.pop(NAMES, None) is not None and weights.parts
    places = [dirname(name) for name in files if named and basename(name) == "adapter_config.json"]
    for place in places:
        own = {basename(name): entry for name, entry in weights.entries.items() if dirname(name) == place}
        tensors = replace(weights, entries=own, parts={}).file(own)
        files[join(place, ADAPTER)] = tensors
    return files if places else {**files, **weights.files(max_bytes)}


def open_weights(source: Source, checkpoint: Checkpoint, item: str = "model", dtype: str | None = None) -> Weights:
    """The tensors of an item by their module's names, or by those that the asset NAMES gives to the model's.

    Raises as `Weights.of` and `Weights.named`, Damaged or Unavailable.
    """
    content = read_manifest(source, checkpoint).content
    weights, file = Weights.of(content, item, dtype), asset_files(content).get(NAMES)
    if file is None or item != "model":
        return weights
    data = b"".join(file.pieces(source, checkpoint, 0, file.bytes))
    try:
        return weights.named(decode_json(data, dict[str, Part]))
    except msgspec.DecodeError as error:
        raise CorruptObject(f"{NAMES} of {checkpoint.id} is malformed: {error}") from error


def _assets(content: Content) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Name, leaf and size of each file."""
    tree = content.trees.get(ASSETS)
    types = content.entries.types() if tree else {}
    for path, leaf in leaves(tree, ASSETS) if isinstance(tree, dict) else ():
        dtype, shape = types.get(leaf.get("name", ""), (leaf.get("dtype"), leaf.get("shape")))
        if dtype != "uint8" or shape is None or len(shape) != 1:
            continue
        name = path.removeprefix(f"{ASSETS}/")
        if not stays_inside(name):
            raise CorruptObject(f"an asset has the name {name!r}, which leads out of its folder")
        yield name, leaf, prod(shape)

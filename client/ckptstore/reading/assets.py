"""Assets: the files that belong to a model (its configuration, its tokenizer) and are saved with a checkpoint.

They are a shared item of the checkpoint: a dict from a file's name to its bytes, as an array. An item of this name that
somebody made by other means is read as far as it has this form, and nothing of it is ever written outside of a folder:
a name that leads out of one is refused, when it is saved and when it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod
from pathlib import PurePosixPath
from typing import Any

from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CorruptObject
from ckptstore.format.boxes import Want
from ckptstore.format.documents import Content
from ckptstore.format.planning import plan_reads
from ckptstore.format.trees import decode_bytes, leaves
from ckptstore.reading.fetch import fetch
from ckptstore.reading.source import ShardSource

ASSETS = "assets"


def stays_inside(name: str) -> bool:
    """Whether a file of this name lies in the folder that it is written to, or in a folder inside it."""
    path = PurePosixPath(name)
    return bool(path.parts) and str(path) == name and not path.is_absolute() and ".." not in path.parts


def asset_sizes(content: Content) -> dict[str, int]:
    """The size of each file in bytes, by its name. Raises CorruptObject for a name that leads out of a folder."""
    return {name: size for name, _, size in _assets(content)}


def read_assets(
    source: ShardSource, checkpoint: Checkpoint, content: Content, names: Collection[str] | None = None
) -> dict[str, bytes]:
    """The bytes of the files of these names, by default of all, each chunk verified; empty if there are none.

    Raises Damaged, ObjectMissing or Unavailable.
    """
    found = {name: (leaf, size) for name, leaf, size in _assets(content) if names is None or name in names}
    buffers = {name: bytearray(size) for name, (_, size) in found.items()}
    wants = [Want(leaf["name"], None, name) for name, (leaf, _) in found.items() if "name" in leaf]
    fetch(source, checkpoint, plan_reads(content, wants), {name: memoryview(one) for name, one in buffers.items()})
    return {
        name: bytes(buffers[name]) if "name" in leaf else decode_bytes(leaf["data"])
        for name, (leaf, _) in found.items()
    }


def _assets(content: Content) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Name, leaf and size of each file."""
    tree = content.trees.get(ASSETS)
    shapes = {name: (dtype, shape) for name, dtype, shape in content.entries.rows()} if tree else {}
    for path, leaf in leaves(tree, ASSETS) if isinstance(tree, dict) else ():
        dtype, shape = shapes.get(leaf.get("name", ""), (leaf.get("dtype"), leaf.get("shape")))
        if dtype != "uint8" or shape is None or len(shape) != 1:
            continue
        name = path.removeprefix(f"{ASSETS}/")
        if not stays_inside(name):
            raise CorruptObject(f"an asset has the name {name!r}, which leads out of its folder")
        yield name, leaf, prod(shape)

"""Writers of the export formats. Torch is loaded for its own formats only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path

import msgspec

from ckptctl.exporting import Entry, Export, FileFormat, mapped
from ckptctl.safetensors_file import Layout, plan_file
from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.errors import InvalidRequest
from ckptstore.format.overlaps import Want

ExportWriter = Callable[[Export, Path], None]
"""Writes to a path: an existing empty file, or a folder. Not yet durable on return."""

INDEX = "model.safetensors.index.json"
ONLY = "model.safetensors"
_AVERAGED = "module."
"""What torch.optim.swa_utils.AveragedModel puts before the names of its model."""


def writer_of(kind: FileFormat, max_shard_bytes: int) -> ExportWriter:
    """The writer of a format. Raises InvalidRequest if a package that it needs is not installed."""
    if kind is FileFormat.SAFETENSORS:
        return write_safetensors
    if kind is FileFormat.HUGGINGFACE:
        return lambda export, folder: write_huggingface(export, folder, max_shard_bytes)
    try:
        from ckpt.foreign.writing import require_loadable, write_dcp, write_torch
    except ModuleNotFoundError as error:
        raise missing_torch(error) from error
    write = write_dcp if kind is FileFormat.DCP else write_torch

    def write_state(export: Export, path: Path) -> None:
        content, items = export.content, export.selection.items
        require_loadable(content, items)
        with export.scratch(path if kind.is_folder else path.parent) as data:
            write(content, items, data, path)

    return write_state


def missing_torch(error: ModuleNotFoundError) -> InvalidRequest:
    """The error for a format that needs torch if torch is not installed."""
    if error.name is None or error.name.partition(".")[0] != "torch":
        raise error
    return InvalidRequest(
        "this format needs the package torch, which is not installed",
        "pip install 'ckptd[torch]', or use the format safetensors",
    )


def write_safetensors(export: Export, path: Path) -> None:
    """Write all selected entries to one file, by their full names; its metadata maps aliases to them.

    Raises UnsupportedObject for an element type that safetensors does not have, and OSError.
    """
    metadata = {"format": "pt", "checkpoint": export.checkpoint.id, **export.aliases()}
    _fill(export, {path: plan_file(export.entries(), metadata)}, lambda name: name)


def write_huggingface(export: Export, folder: Path, max_shard_bytes: int) -> None:
    """Write one item's tensors by their module's names, in files of at most `max_shard_bytes`, and an index.

    The layout is that of transformers: one file without an index if all tensors fit, and tied weights once. The
    metadata of each file maps aliases to the tensors in it. Raises InvalidRequest if more than one item is selected,
    UnsupportedObject and OSError.
    """
    prefix = _prefix(export)
    groups = list(_groups(export.entries(), max_shard_bytes))
    aliases = {alias.removeprefix(prefix): name.removeprefix(prefix) for alias, name in export.aliases().items()}
    layouts: dict[Path, Layout] = {}
    for number, group in enumerate(groups, 1):
        tensors = [(name.removeprefix(prefix), dtype, shape) for name, dtype, shape in group]
        held = {name for name, _, _ in tensors}
        metadata = {"format": "pt", **{alias: name for alias, name in aliases.items() if name in held}}
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else ONLY
        layouts[folder / name] = plan_file(tensors, metadata)
    _fill(export, layouts, lambda name: prefix + name)
    if len(groups) > 1:
        weight_map = {tensor.name: path.name for path, layout in layouts.items() for tensor in layout.tensors}
        index = {"metadata": {"total_size": export.selection.raw_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n")


def _fill(export: Export, layouts: dict[Path, Layout], entry_of: Callable[[str], str]) -> None:
    wants: list[Want] = []
    buffers: dict[str, memoryview] = {}
    for path, layout in layouts.items():
        with open(path, "wb+") as file:
            view = mapped(file.fileno(), layout.bytes)
        view[: len(layout.header)] = layout.header
        buffers[str(path)] = view
        wants += [Want(entry_of(tensor.name), None, str(path), tensor.at) for tensor in layout.tensors]
    export.fetch(wants, buffers)


def _prefix(export: Export) -> str:
    """What the entries' names begin with and the module's names do not: the item, and AveragedModel's `module.`."""
    names = [*export.selection.entries, *export.aliases()]
    items = {name.partition("/")[0] for name in names}
    if len(items) != 1:
        raise InvalidRequest(
            f"a Hugging Face folder holds one model, but {', '.join(sorted(items)) or 'nothing'} is selected",
            "Select it with --names, for example --names 'model/*'",
        )
    item = f"{items.pop()}/"
    averaged = f"{item}{_AVERAGED}"
    return averaged if all(name.startswith(averaged) for name in names) else item


def _groups(entries: Iterable[Entry], max_bytes: int) -> Iterator[list[Entry]]:
    """The entries in order, in groups of at most `max_bytes`; a larger entry has its own group."""
    group: list[Entry] = []
    held = 0
    for entry in entries:
        size = prod(entry[2]) * ITEM_BYTES[entry[1]]
        if group and held + size > max_bytes:
            yield group
            group, held = [], 0
        group.append(entry)
        held += size
    if group:
        yield group

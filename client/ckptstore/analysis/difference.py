"""The difference between two checkpoints, of one run or two, in the same or different layouts. Reads only what differs.

The elements of an entry are divided into parts: the part of a slice in one chunk. Two parts that cover the same
elements and come from the same place of equal chunks are equal, and are not read. All other elements are read from both
checkpoints, in batches, and compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod, sqrt
from operator import add, mul
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ckptstore.codecs.dtypes import ITEM_BYTES, SOURCE, numbers_of
from ckptstore.commits.catalog import Checkpoint
from ckptstore.format import boxes
from ckptstore.format.boxes import Box, Want
from ckptstore.format.columns import column
from ckptstore.format.documents import Content
from ckptstore.format.planning import batches, plan_reads
from ckptstore.format.shards import ChunkTable
from ckptstore.format.trees import children, decode_tree
from ckptstore.reading.fetch import Progress, fetch
from ckptstore.reading.source import Source, read_local, read_manifest
from ckptstore.values import Record

_BATCH_BYTES = 64 << 20
_BUFFER = "compared"

_Identity = tuple[str, str, int, int, int, str]
"""Digest, codec and raw size of a chunk; begin and end of the part in it, in bytes; the type of casts, else empty."""


class TensorChange(Record):
    """A tensor that both checkpoints have, with the same type and shape, and different bytes."""

    name: str
    dtype: str
    shape: list[int]
    compared: int
    """Elements that were read: the others are in chunks that are equal byte for byte. Both parts of a complex element
    count as elements."""
    changed: int
    """Elements with different bits."""
    not_finite: int
    """Changed elements that are NaN or Inf in either checkpoint. The next two fields leave them out."""
    relative_norm: float | None
    """Norm of the difference over the norm of the compared elements before; null if that is 0."""
    largest: float
    """Largest magnitude of a difference."""


class Reshaped(Record):
    """A tensor whose type or shape differs."""

    name: str
    dtype_before: str
    dtype_after: str
    before: list[int]
    after: list[int]


class Difference(Record):
    """Everything that differs between two checkpoints, but for random number generators and the state of ranks other
    than 0."""

    before: str
    after: str
    added: list[str]
    removed: list[str]
    reshaped: list[Reshaped]
    changed: list[TensorChange]
    """By relative norm, the largest first."""
    values: dict[str, tuple[str, str]]
    """Numbers and strings beside tensors, before and after; empty where it has none."""
    num_equal: int
    read_bytes: int
    """Stored bytes that were read from both checkpoints, without documents."""

    @property
    def names(self) -> list[str]:
        """The tensors that differ."""
        return self.removed + self.added + [one.name for one in self.reshaped] + [one.name for one in self.changed]


class Side(NamedTuple):
    """One of the two checkpoints."""

    source: Source
    checkpoint: Checkpoint
    content: Content

    @staticmethod
    def open(source: Source, checkpoint: Checkpoint) -> Side:
        """Read the manifest. Raises Damaged, ObjectMissing or Unavailable."""
        return Side(source, checkpoint, read_manifest(source, checkpoint).content)


class _Region(NamedTuple):
    """Elements to compare."""

    name: str
    dtype: str
    box: Box

    @property
    def bytes(self) -> int:
        return prod(boxes.sizes(self.box)) * ITEM_BYTES[self.dtype]


class _Sums(msgspec.Struct):
    compared: int = 0
    changed: int = 0
    not_finite: int = 0
    difference: float = 0.0
    before: float = 0.0
    largest: float = 0.0


def compare(before: Side, after: Side, progress: Progress = lambda _: None) -> Difference:
    """Compare the tensors of two checkpoints. progress: called with the raw bytes of each chunk that was read.

    Raises Damaged, ObjectMissing or Unavailable. Both checkpoints should be leased.
    """
    old, new = before.content.entries.types(), after.content.entries.types()
    common = {name: old[name] for name in old if new.get(name) == old[name]}
    regions = list(_regions(before.content, after.content, common))
    found: dict[str, _Sums] = defaultdict(_Sums)
    groups = batches(regions, lambda region: region.bytes, _BATCH_BYTES)
    read_bytes = sum(_compare_batch(before, after, batch, found, progress) for batch in groups)
    changed = [
        TensorChange(
            name=name, dtype=common[name][0], shape=list(common[name][1]), compared=sums.compared, changed=sums.changed,
            not_finite=sums.not_finite, relative_norm=sqrt(sums.difference / sums.before) if sums.before > 0 else None,
            largest=sums.largest,
        )
        for name, sums in found.items()
        if sums.changed
    ]  # fmt: skip
    texts = [saved_values(side.source, side.checkpoint) for side in (before, after)]
    values = {name: (texts[0].get(name, ""), texts[1].get(name, "")) for name in texts[0] | texts[1]}
    return Difference(
        before=before.checkpoint.id,
        after=after.checkpoint.id,
        added=[name for name in new if name not in old],
        removed=[name for name in old if name not in new],
        reshaped=[
            Reshaped(
                name=name, dtype_before=old[name][0], dtype_after=new[name][0], before=list(old[name][1]),
                after=list(new[name][1]),
            )
            for name in old
            if name in new and name not in common
        ],
        changed=sorted(changed, key=lambda one: -(one.relative_norm if one.relative_norm is not None else np.inf)),
        values={name: pair for name, pair in values.items() if pair[0] != pair[1]},
        num_equal=len(common) - len(changed),
        read_bytes=read_bytes,
    )  # fmt: skip


def saved_values(source: Source, checkpoint: Checkpoint) -> dict[str, str]:
    """The numbers and strings beside tensors, as text by path: what all ranks share, then the state of rank 0.

    A list without containers is one text. Raises Damaged, ObjectMissing or Unavailable.
    """
    manifest = read_manifest(source, checkpoint)
    trees = read_local(source, checkpoint, manifest, 0) | manifest.content.trees
    return {path[1:]: text for path, text in _texts(decode_tree(trees, "", lambda *_: None), "")}


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    within = children(value)
    if within is None or (isinstance(value, (list, tuple)) and all(children(one) is None for one in value)):
        if value is not None:
            yield path, _text(value)
        return
    for key, child in within:
        yield from _texts(child, f"{path}/{key}")


def _text(value: Any) -> str:
    try:
        return str(value)
    except ValueError:  # an int of more than the 4,300 digits that Python writes
        return f"{value:#x}" if isinstance(value, int) else str([_text(one) for one in value])


def _regions(before: Content, after: Content, common: Mapping[str, tuple[str, tuple[int, ...]]]) -> Iterator[_Region]:
    """The elements of common entries that are not known to be equal."""
    old, new = _parts(before, common), _parts(after, common)
    for name, parts in old.items():
        dtype, others = common[name][0], new.get(name, {})
        for key, identity in parts.items():
            if others.get(key) != identity:
                box, begin, end = key
                for part in boxes.flat_boxes(boxes.sizes(box), begin, end):
                    offsets = map(add, boxes.offsets(box), boxes.offsets(part))
                    yield _Region(name, dtype, (*offsets, *boxes.sizes(part)))


_Key = tuple[Box, int, int]
"""A box of an entry, and a range of its elements in row-major order."""


def _parts(content: Content, common: Mapping[str, object]) -> dict[str, dict[_Key, _Identity]]:
    """The parts of common entries, and the bytes that they come from. Contiguous slices are ranges of whole entries."""
    if not content.shards:
        return {}
    table = ChunkTable.of(content, range(len(content.shards)))
    found: dict[str, dict[_Key, _Identity]] = {}
    slices, derived = content.slices, set(content.slices.derived_rows.tolist())
    for group in boxes.same_dimensions(content, np.arange(len(slices.entry))):
        filled = group.bytes > 0
        rows, sizes = group.rows[filled], group.bytes[filled]
        entries = slices.entry[rows].tolist()
        names, dtypes = ([given[entry] for entry in entries] for given in (content.entries.name, content.entries.dtype))
        casts = [dtype if row in derived else "" for row, dtype in zip(rows.tolist(), dtypes, strict=True)]
        items = column(ITEM_BYTES[SOURCE if cast else dtype] for dtype, cast in zip(dtypes, casts, strict=True))
        counts = sizes // column(ITEM_BYTES[dtype] for dtype in dtypes)
        begin = table.streams[slices.shard[rows]] + slices.at[rows]
        which, chunk, low, high = table.split(begin, begin + counts * items)
        given_boxes, shapes = group.boxes[filled].tolist(), group.shapes[filled].tolist()
        for one, row, start, stop in zip(which.tolist(), chunk.tolist(), low.tolist(), high.tolist(), strict=True):
            if names[one] not in common:
                continue
            first, item = int(begin[one]), int(items[one])
            key = _key(tuple(given_boxes[one]), shapes[one], (start - first) // item, (stop - first) // item)
            chunks, index = content.shards[table.shard[row]].chunks, int(table.index[row])
            at = int(table.begin[row])
            identity = (
                chunks.digest_of(index), chunks.codec_of(index), int(table.raw[row]), start - at, stop - at, casts[one],
            )  # fmt: skip
            found.setdefault(names[one], {})[key] = identity
    return found


def _key(box: Box, shape: Sequence[int], begin: int, end: int) -> _Key:
    """The key of a range of a slice. Slices that are contiguous in their entry are counted in the whole entry."""
    lengths, offsets = boxes.sizes(box), boxes.offsets(box)
    inner = len(shape)
    while inner and lengths[inner - 1] == shape[inner - 1]:
        inner -= 1
    if any(length != 1 for length in lengths[: max(0, inner - 1)]):
        return box, begin, end
    first = sum(map(mul, offsets, boxes.strides(shape)))
    return boxes.whole(shape), first + begin, first + end


def _compare_batch(
    before: Side, after: Side, batch: Sequence[_Region], found: dict[str, _Sums], progress: Progress
) -> int:
    """Add what differs to the sums of each entry; returns the stored bytes that were read."""
    places, at, read_bytes = [], 0, 0
    for region in batch:
        places.append(at)
        at += -(-region.bytes // 16) * 16
    wants = [Want(region.name, region.box, _BUFFER, place) for region, place in zip(batch, places, strict=True)]
    sides = []
    for side in (before, after):
        memory = memoryview(np.empty(at, np.uint8).data)
        reads = plan_reads(side.content, wants)
        fetch(side.source, side.checkpoint, reads, {_BUFFER: memory}, progress)
        read_bytes += sum(read.bytes for read in reads)
        sides.append(memory)
    for region, place in zip(batch, places, strict=True):
        old, new = (memory[place : place + region.bytes] for memory in sides)
        _add(found[region.name], region.dtype, old, new)
    return read_bytes


def _add(sums: _Sums, dtype: str, old: memoryview, new: memoryview) -> None:
    with np.errstate(invalid="ignore", over="ignore"):
        before, after = (numbers_of(dtype, raw).astype(np.float64) for raw in (old, new))
        word = f"u{len(old) // len(before)}"
        differs = np.frombuffer(old, word) != np.frombuffer(new, word)
        is_finite = np.isfinite(before) & np.isfinite(after)
        before, after = np.where(is_finite, before, 0.0), np.where(is_finite, after, 0.0)
        step = after - before
        sums.difference += float(step @ step)
        sums.before += float(before @ before)
    sums.compared += len(before)
    sums.changed += int(np.count_nonzero(differs))
    sums.not_finite += int(np.count_nonzero(differs & ~is_finite))
    sums.largest = max(sums.largest, float(np.max(np.abs(step))))

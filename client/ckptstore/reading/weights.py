"""Weights as other programs read them: safetensors files that are produced when they are read, never written.

A view of a checkpoint selects the tensors of one item and gives them names and types. The header of a file follows from
the manifest, so its length is known before any byte is read; any range is produced from the chunks that it needs, each
verified. Values are cast as derived slices are: exactly rounded from float32.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from operator import add, gt
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace as with_fields

from ckptstore.codecs.dtypes import CAST_TYPES, ITEM_BYTES, SOURCE
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CorruptObject, InvalidRequest
from ckptstore.format.boxes import Box, Want, flat_boxes, offsets, sizes, strides, whole
from ckptstore.format.documents import Content, digest
from ckptstore.format.planning import ChunkRead, batches, chunks_of, plan_reads
from ckptstore.reading.fetch import fetch
from ckptstore.reading.safetensors import StoredTensor, plan_file
from ckptstore.reading.source import ShardSource

ONLY = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 5_000_000_000
"""The largest file of weights, as transformers writes them, unless a single tensor is larger."""
PIECE_BYTES = 16 << 20
"""The most that is read of a file at once."""
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")

Naming = Callable[[str], str]
"""The name that readers expect, by the name in the item."""


def module_name(name: str) -> str:
    """The name of a parameter without the prefixes of torch's wrappers: AveragedModel, DDP, FSDP, compile."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


class Part(NamedTuple):
    """A tensor that is not all of another one, or has another shape, or its elements in another order."""

    of: str
    """The name of the other one."""
    first: int
    """Its first element in the other one's row-major order."""
    shape: tuple[int, ...]
    axes: tuple[tuple[int, int], ...] = ()
    """Where the others are: length and stride of each axis, slowest first. None: they follow."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The shape of the axes."""
        return tuple(length for length, _ in self.axes)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape has such a part, none of whose axes goes through several dimensions."""
        if not self.axes:
            return 0 <= self.first <= self.first + prod(self.shape) <= prod(shape)
        try:
            box, _ = self.around(shape, whole(self.lengths))
        except ValueError:  # an element is not there
            return False
        ends = map(add, offsets(box), sizes(box))
        return prod(self.lengths) == prod(self.shape) and min(sizes(box)) > 0 and not any(map(gt, ends, shape))

    def around(self, shape: tuple[int, ...], box: Box) -> tuple[Box, list[int]]:
        """The smallest box of the other tensor, of this shape, with all elements of a box of the axes, whose first is
        its first; and the strides of the axes in it.
        """
        steps = np.array([np.unravel_index(stride, shape) for _, stride in self.axes])
        low = np.array(np.unravel_index(self.first, shape)) + offsets(box) @ steps
        lengths = (1 + (np.array(sizes(box)) - 1) @ steps).tolist()
        return (*low.tolist(), *lengths), (steps @ strides(lengths)).tolist()


_WHOLE = Part("", 0, ())


@dataclass(frozen=True)
class VirtualFile:
    """A file of a checkpoint. Any range may be read, from any thread."""

    header: bytes
    """Its first bytes; all of them if it has no tensors."""
    tensors: tuple[StoredTensor, ...]
    """By offset, without gaps after the header."""
    bytes: int
    content: Content
    """The manifest's, with the types of the view."""
    entries: Mapping[str, str]
    """The entry of each tensor."""
    parts: Mapping[str, Part] = field(default_factory=dict)

    def read(self, source: ShardSource, checkpoint: Checkpoint, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on. Raises Damaged, ObjectMissing or Unavailable."""
        stop = start + len(into)
        head = self.header[start:stop]
        into[: len(head)] = head
        wants, buffers, gathered = list[Want](), {"": into}, list[tuple[int, slice, list[np.ndarray[Any, Any]]]]()
        begin = bisect_right(self.tensors, start, key=lambda tensor: tensor.at + tensor.bytes)
        end = bisect_left(self.tensors, stop, begin, key=lambda tensor: tensor.at) if into else begin
        for tensor in self.tensors[begin:end]:
            item = ITEM_BYTES[tensor.dtype]
            low, high = max(start, tensor.at) - tensor.at, min(stop, tensor.at + tensor.bytes) - tensor.at
            first, last = low // item, -(-high // item)
            at, name, entry = tensor.at + low - start, f"{len(buffers)}", self.entries[tensor.name]
            part, found = self.parts.get(tensor.name, _WHOLE), list[np.ndarray[Any, Any]]()
            for box in flat_boxes(part.lengths, first, last) if part.axes else ():
                around, steps = part.around(self._shapes[entry], box)
                read = np.empty(prod(sizes(around)) * item, np.uint8)
                found.append(np.ndarray(sizes(box), f"V{item}", read, 0, [step * item for step in steps]))
                buffers[f"{name} {box}"] = read.data
                wants.append(Want(entry, around, f"{name} {box}"))
            if not found and (first * item, last * item) == (low, high):
                wants += self._wants(tensor, first, last, "", at)
                continue
            if not found:  # the range cuts elements
                found = [np.empty((last - first) * item, np.uint8)]
                buffers[name] = found[0].data
                wants += self._wants(tensor, first, last, name, 0)
            gathered.append((at, slice(low - first * item, high - first * item), found))
        if wants:
            fetch(source, checkpoint, plan_reads(self.content, wants), buffers)
        for at, cut, found in gathered:
            data = b"".join(map(np.ndarray.tobytes, found))[cut]
            into[at : at + len(data)] = data

    def pieces(self, source: ShardSource, checkpoint: Checkpoint, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes of a range in pieces of at most 16 MiB, which end where chunks end if they can."""
        while start < stop:
            end = min(stop, start + PIECE_BYTES)
            if end < stop and len(cuts := self._cuts[slice(*np.searchsorted(self._cuts, (start + 1, end + 1)))]):
                end = int(cuts[-1])
            piece = np.empty(end - start, np.uint8).data
            self.read(source, checkpoint, start, piece)
            yield piece
            start = end

    @cached_property
    def version(self) -> str:
        """A digest that is equal for equal files, in this checkpoint and in others, if they are stored alike."""
        parts = [self.parts.get(tensor.name) for tensor in self.tensors]
        return digest(self.header + repr((parts, _seen(self.content, self.wants(""))[""])).encode())

    def wants(self, buffer: str) -> list[Want]:
        """All tensors, at their places in a buffer for the whole file; of one with axes, all of its entry."""
        return [
            want for tensor in self.tensors for want in self._wants(tensor, 0, prod(tensor.shape), buffer, tensor.at)
        ]

    def _wants(self, tensor: StoredTensor, first: int, last: int, buffer: str, at: int) -> Iterator[Want]:
        """Elements of a tensor, at a place in a buffer."""
        entry = self.entries[tensor.name]
        shape, begin = tensor.shape, 0
        if part := self.parts.get(tensor.name):
            shape, begin = self._shapes[entry], part.first
            if part.axes:
                yield Want(entry, None, buffer, at)
                return
        for box in flat_boxes(shape, begin + first, begin + last):
            yield Want(entry, box, buffer, at)
            at += prod(sizes(box)) * ITEM_BYTES[tensor.dtype]

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(shape) for name, _, shape in self.content.entries.rows()}

    @cached_property
    def _cuts(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The bytes of the file at which no chunk lies on both sides, ascending."""
        extents = sorted(map(_extent, chunks_of(plan_reads(self.content, self.wants("")))))
        begins = np.array([begin for begin, _ in extents], np.int64)
        ends = np.maximum.accumulate(np.array([end for _, end in extents], np.int64))
        return begins[1:][begins[1:] >= ends[:-1]]


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors of a checkpoint by the names that readers expect."""

    content: Content
    entries: Mapping[str, str]
    """The entry of each tensor, in order."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of tensors: tied weights."""
    parts: Mapping[str, Part] = field(default_factory=dict)

    @staticmethod
    def of(content: Content, item: str = "model", dtype: str | None = None, naming: Naming = module_name) -> Weights:
        """The tensors of an item. dtype: the type of what is stored as float32: bfloat16 or float16. Pure.

        Raises InvalidRequest if there is no such item or type, or if two tensors would have one name.
        """
        prefix = f"{item}/"
        found = {name: naming(name.removeprefix(prefix)) for name in content.entries.name if name.startswith(prefix)}
        if not found:
            held = sorted({name.partition("/")[0] for name in content.entries.name})
            raise InvalidRequest(f"the checkpoint has no tensors of {item!r}", f"It has {', '.join(held) or 'none'}")
        if len(set(found.values())) < len(found):
            raise InvalidRequest(f"two tensors of {item!r} would have one name", "Use other names")
        aliases = {naming(a.removeprefix(prefix)): found[e] for a, e in content.aliases.items() if e in found}
        return Weights(cast_content(content, dtype), {new: entry for entry, new in found.items()}, aliases)

    def rows(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Name, type and shape of each tensor."""
        known = self.content.entries.types()
        for name, entry in self.entries.items():
            dtype, shape = known[entry]
            yield name, dtype, self.parts[name].shape if name in self.parts else shape

    def named(self, names: Mapping[str, Part]) -> Weights:
        """Only these tensors, which are parts of the tensors here. Pure.

        Raises InvalidRequest for a name that is not here, and CorruptObject for elements that are not.
        """
        known = {name: shape for name, _, shape in self.rows()}
        for name, part in names.items():
            if (shape := known.get(part.of)) is None:
                raise InvalidRequest(
                    f"{name!r} is to be {part.of!r}, which the checkpoint does not have", "Name others"
                )
            if not part.fits(shape):
                raise CorruptObject(f"{name!r} is to be elements that {part.of!r} does not have")
        return Weights(self.content, {name: self.entries[part.of] for name, part in names.items()}, {}, names)

    def files(self, max_bytes: int = MAX_FILE_BYTES) -> dict[str, VirtualFile]:
        """The files of a Hugging Face folder: one, or several with an index; tied weights once. Pure.

        The metadata of each file maps further names to the tensors in it. Raises UnsupportedObject for a type that
        safetensors lacks.
        """
        groups = list(batches(self.rows(), lambda row: prod(row[2]) * ITEM_BYTES[row[1]], max_bytes))
        files = {}
        for number, group in enumerate(groups, 1):
            name = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else ONLY
            files[name] = self.file(row[0] for row in group)
        if len(groups) > 1:
            weight_map = {tensor.name: name for name, file in files.items() for tensor in file.tensors}
            total = sum(tensor.bytes for file in files.values() for tensor in file.tensors)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            data = msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"
            files[INDEX] = plain_file(data, self.content)
        return files

    def file(self, names: Iterable[str], **metadata: str) -> VirtualFile:
        """One file with these tensors."""
        chosen = set(names)
        aliases = {alias: name for alias, name in self.aliases.items() if name in chosen}
        rows = (row for row in self.rows() if row[0] in chosen)
        layout = plan_file(rows, {"format": "pt", **metadata, **aliases})
        return VirtualFile(*layout, self.content, self.entries, self.parts)

    def signatures(self) -> dict[str, str]:
        """A digest of each tensor, from its chunks' digests: equal for equal stored bytes in equal places. Pure.

        Tensors that share a chunk change together.
        """
        seen = _seen(self.content, [Want(entry, None, name) for name, entry in self.entries.items()])
        rows, parts = self.rows(), self.parts
        return {name: digest(repr((dtype, shape, parts.get(name), seen[name])).encode()) for name, dtype, shape in rows}


def plain_file(data: bytes, content: Content) -> VirtualFile:
    """A file without tensors."""
    return VirtualFile(data, (), len(data), content, {})


def cast_content(content: Content, dtype: str | None) -> Content:
    """The content as if float32 entries had another type, and all their slices were derived. Pure.

    dtype: bfloat16 or float16, also bf16, fp16, or None. Raises InvalidRequest for others.
    """
    if dtype is None:
        return content
    dtype = _SHORT.get(dtype, dtype)
    if dtype not in CAST_TYPES:
        raise InvalidRequest(f"weights cannot be cast to {dtype!r}", f"Use {' or '.join(CAST_TYPES)}")
    return cast_entries(content, {name: dtype for name, kind, _ in content.entries.rows() if kind == SOURCE})


def cast_entries(content: Content, types: Mapping[str, str]) -> Content:
    """The same, of some float32 entries. types: the type of 16 bits for each, by name."""
    entries, slices = content.entries, content.slices
    rows = np.flatnonzero(np.array([name in types for name in entries.name], bool)[slices.entry])
    return with_fields(
        content,
        entries=with_fields(entries, dtype=[types.get(name, kind) for name, kind, _ in entries.rows()]),
        slices=with_fields(slices, derived=np.union1d(slices.derived_rows, rows)),
    )


def _seen(content: Content, wants: Sequence[Want]) -> Mapping[str, list[str]]:
    """The parts of chunks in each buffer, and their digests, in an order that does not depend on where they lie."""
    found = defaultdict[str, list[str]](list)
    for chunk in chunks_of(plan_reads(content, wants)):
        for piece in chunk.pieces:
            place = (piece.at, piece.shape, piece.from_strides, piece.to_strides, piece.cast)
            found[piece.buffer].append(f"{piece.to:020} {chunk.codec} {chunk.raw} {chunk.digest} {place}")
    return defaultdict(list, {name: sorted(parts) for name, parts in found.items()})


def _extent(chunk: ChunkRead) -> tuple[int, int]:
    """The first byte of the buffer that a chunk has a part in, and the last one plus one."""
    begin = min(piece.to for piece in chunk.pieces)
    end = max(
        piece.to + sum((n - 1) * step for n, step in zip(piece.shape, piece.to_strides, strict=True))
        + (ITEM_BYTES[piece.cast] if piece.cast else piece.item)
        for piece in chunk.pieces
    )  # fmt: skip
    return begin, end

"""Tensors in mapped files, read piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from ckpt.foreign.parts import Read
from ckptstore.format import boxes


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The memory of one or several tensors in a file."""

    memory: memoryview
    dtype: torch.dtype = torch.uint8
    swapped: bool = False
    """Its numbers are big-endian."""


@dataclass(frozen=True, slots=True, eq=False)
class StridedTensor:
    """A tensor in a file. Strides and offset are in elements, and are not checked before `reader` is called."""

    storage: Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    conjugated: bool = False
    negated: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def place(self) -> tuple[Storage, int]:
        """Where its first element is."""
        return self.storage, self.offset * self.dtype.itemsize

    def reader(self) -> Read:
        """Reads the elements, row-major and little-endian. ValueError if some are outside the storage."""
        read = strided_read(self.storage.memory, self.dtype.itemsize, self.shape, self.strides, self.offset)
        if not (self.storage.swapped or self.conjugated or self.negated):
            return read

        def read_resolved(start: int, buffer: memoryview) -> None:
            read(start, buffer)
            self._resolve(buffer)

        return read_resolved

    def _resolve(self, buffer: memoryview) -> None:
        """Apply byte order and signs to whole elements."""
        size = self.dtype.itemsize // (2 if self.dtype.is_complex else 1)
        numbers = np.frombuffer(buffer, f"<u{size}")
        if self.storage.swapped:
            numbers.byteswap(inplace=True)
        sign = numbers.dtype.type(1 << (8 * size - 1))
        if self.conjugated:
            numbers[1::2] ^= sign
        if self.negated:
            numbers ^= sign


class NotDense:
    """A tensor that is sparse, quantized, without memory, or of a class of its own."""

    def __init__(self, *_: object) -> None:
        """Nothing about it is kept."""


def strided_read(memory: memoryview, item: int, shape: Sequence[int], strides: Sequence[int], offset: int) -> Read:
    """Reads elements of `item` bytes in memory. Strides and offset are in elements. ValueError if out of bounds."""
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if 0 not in shape and (min(offset, *strides, 0) < 0 or (last + 1) * item > len(memory)):
        raise ValueError("elements lie outside the storage")  # numpy does not check an empty storage
    array = np.ndarray(tuple(shape), np.dtype(f"V{item}"), memory, offset * item, [step * item for step in strides])

    def read(start: int, buffer: memoryview) -> None:
        if array.flags.c_contiguous:
            buffer[:] = memory[offset * item + start :][: len(buffer)]
            return
        done = 0
        for box in boxes.flat_boxes(array.shape, start // item, (start + len(buffer)) // item):
            ends = zip(boxes.offsets(box), boxes.sizes(box), strict=True)
            data = array[tuple(slice(first, first + size) for first, size in ends)].tobytes()
            buffer[done : done + len(data)] = data
            done += len(data)

    return read

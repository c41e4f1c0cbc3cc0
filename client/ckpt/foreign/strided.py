"""Reads tensors in mapped files piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ckpt.foreign.parts import Read
from ckptstore.format import boxes


def tensor_read(tensor: torch.Tensor) -> Read:
    """Reads the elements of a tensor in host memory."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    memory = storage.numpy().data.toreadonly() if storage.numel() else memoryview(b"")
    return strided_read(memory, tensor.element_size(), tensor.shape, tensor.stride(), int(tensor.storage_offset()))


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

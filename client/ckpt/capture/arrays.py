"""Arrays as leaves: numpy's, and those of JAX under any sharding. Does not import torch or JAX, and copies little.

An array of JAX exists only in a process that has loaded JAX. It is read at its address, and never as a numpy array: a
numpy view of it would keep JAX from donating its memory.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from importlib import import_module
from math import prod
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckptstore.codecs.dtypes import ITEM_BYTES, NUMPY
from ckptstore.errors import UnsupportedFormat, UnsupportedObject
from ckptstore.format import boxes
from ckptstore.format.boxes import Box

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Array = np.ndarray[Any, Any]

_KEY_BYTES = 16


class HostArray:
    """Contiguous bytes in host memory, with the part of a tensor's interface that staging uses."""

    is_cpu, is_cuda = True, False
    device = SimpleNamespace(type="host")

    def __init__(self, raw: Array, origin: object = None) -> None:
        """raw: one dimension of bytes, which own the memory or refer to its owner. origin: kept alive too."""
        self._raw = raw
        self._origin = origin
        self.nbytes = raw.nbytes

    @property
    def raw(self) -> Array:
        """The bytes."""
        return self._raw

    def data_ptr(self) -> int:
        """The address of the first byte."""
        return int(self.raw.__array_interface__["data"][0])

    def is_contiguous(self) -> bool:
        """Always."""
        return True

    def is_conj(self) -> bool:
        """Never."""
        return False

    is_neg = is_conj

    def detach(self) -> HostArray:
        """Itself."""
        return self


class _DeviceArray(HostArray):
    """The elements of an array of JAX on one device. They are on their way to the host until they are asked for."""

    def __init__(self, array: Any, num_bytes: int) -> None:
        self._array = _in_host_memory(array)
        self.nbytes = num_bytes

    @property
    def raw(self) -> Array:
        """The bytes; waits until they are computed and on the host."""
        if isinstance(self._array, np.ndarray):
            return byte_view(self._array)
        memory: Any = (ctypes.c_char * self.nbytes).from_address(
            self._array.block_until_ready().unsafe_buffer_pointer()
        )
        memory.owner = self._array
        return np.frombuffer(memory, np.uint8)


class ArrayPiece(NamedTuple):
    """One box of a global array, and its elements: a tensor, as far as staging uses it."""

    box: Box
    tensor: HostArray


class ArrayPart(NamedTuple):
    """The part of an array or tensor that this process writes."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[Any]
    """ArrayPiece or TensorPiece."""
    key: object
    """Equal for parts that lie in the same memory."""
    ranks: Sequence[int] | None = None
    holders: Sequence[int] = ()
    """As in TensorPart: every rank that has an array holds all of it."""


def is_array(value: object) -> bool:
    """Whether a value is an array of numpy or JAX."""
    return isinstance(value, np.ndarray) or is_jax(value)


def loaded_jax() -> ModuleType | None:
    """JAX, if this process has loaded it."""
    jax = sys.modules.get("jax")
    return jax if jax is not None and hasattr(jax, "Array") else None


def is_jax(value: object) -> TypeIs[Any]:
    """Whether a value is an array of JAX."""
    return (jax := loaded_jax()) is not None and isinstance(value, jax.Array)


def is_template(value: object) -> bool:
    """Whether a value is an array of JAX, or describes one (`jax.ShapeDtypeStruct`)."""
    return is_jax(value) or ((jax := loaded_jax()) is not None and isinstance(value, jax.ShapeDtypeStruct))


def is_key(value: Any) -> bool:
    """Whether an array of JAX holds typed keys of random numbers (`jax.random.key`)."""
    jax: Any = loaded_jax()
    return bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))


def array_fields(value: Any) -> dict[str, str]:
    """The tree's record of an array, in addition to its elements: of typed keys the kind of generator."""
    jax: Any = loaded_jax()
    return {"key": str(jax.random.key_impl(value))} if is_jax(value) and is_key(value) else {}


def array_bytes(path: str, value: Any) -> int:
    """The size of an array; of keys, about. Raises UnsupportedObject for one that cannot be stored."""
    if isinstance(value, np.ndarray):
        return prod(value.shape) * ITEM_BYTES[_numpy_name(path, value)]
    size: int = prod(value.shape)
    return size * (_KEY_BYTES if is_key(value) else ITEM_BYTES[_jax_name(path, value)])


def is_distributed(value: Any) -> bool:
    """Whether other processes hold parts of an array."""
    return is_jax(value) and not value.is_fully_addressable


def array_part(path: str, value: Any) -> ArrayPart:
    """The part of an array that this process writes. Raises UnsupportedObject."""
    if isinstance(value, np.ndarray):
        name = _numpy_name(path, value)
        memory = HostArray(byte_view(np.ascontiguousarray(value)), value)
        address = value.__array_interface__["data"][0]
        seen: object = ("numpy", address, name, value.shape, value.strides) if value.size else object()
        return ArrayPart(name, value.shape, (ArrayPiece(boxes.whole(value.shape), memory),), seen)
    # Processes find other parts in their memory, and must agree on names: there, each array has one of its own.
    key = object() if is_distributed(value) or not value.size else ("jax", id(value))
    if value.is_deleted():
        raise UnsupportedObject(
            f"array at {path!r} was deleted or donated", "Save the state that the step returned, not the one it took"
        )
    if is_key(value):
        jax: Any = loaded_jax()
        value = jax.random.key_data(value)
    name, shape = _jax_name(path, value), tuple(value.shape)
    pieces = [
        ArrayPiece(box_of(shard.index, shape), _DeviceArray(shard.data, shard.data.size * ITEM_BYTES[name]))
        for shard in value.addressable_shards
        if shard.replica_id == 0
    ]
    return ArrayPart(name, shape, pieces, key)


def inline_array(path: str, value: Any) -> tuple[str, list[int], memoryview]:
    """Type, shape and bytes of a small array that this process holds alone. Raises UnsupportedObject."""
    part = array_part(path, value)
    whole = np.empty(part.shape, numpy_type(part.dtype))
    for box, memory in part.pieces:
        whole[slices_of(box)] = memory.raw.view(whole.dtype).reshape(boxes.sizes(box))
    return part.dtype, list(part.shape), byte_view(whole).data


def _numpy_name(path: str, array: Array) -> str:
    name: str = array.dtype.name
    # dtype.name does not distinguish byte orders.
    if type(array) is not np.ndarray or name not in ITEM_BYTES or array.dtype != numpy_type(name):
        raise UnsupportedObject(
            f"array at {path!r} is a {type(array).__name__} of type {array.dtype}",
            "Store plain arrays of numbers or booleans in native byte order",
        )
    return name


def _jax_name(path: str, value: Any) -> str:
    """The type of an array of JAX, in documents."""
    jax: Any = loaded_jax()
    if isinstance(value, jax.core.Tracer):
        raise UnsupportedObject(f"array at {path!r} is a {type(value).__name__}", "Save outside of jitted functions")
    name: str = value.dtype.name
    if name not in ITEM_BYTES:
        raise UnsupportedObject(f"array at {path!r} has type {value.dtype}", "Convert it to another type")
    return name


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box that a shard's index selects."""
    ranges = [one.indices(size) for one, size in zip(index, shape, strict=True)]
    return (*(start for start, _, _ in ranges), *(stop - start for start, stop, _ in ranges))


def slices_of(box: Box) -> tuple[slice, ...]:
    """The index that selects a box of an array."""
    return tuple(slice(start, start + size) for start, size in zip(boxes.offsets(box), boxes.sizes(box), strict=True))


def _in_host_memory(array: Any) -> Any:
    """An array of one device, or a copy of it on its way to the host, whose memory holds its elements in order."""
    jax: Any = loaded_jax()
    order = array.format.layout.major_to_minor
    if order is not None and tuple(order) != tuple(range(array.ndim)):
        return np.array(array)
    if next(iter(array.devices())).platform == "cpu":
        return array
    try:
        return jax.device_put(array, jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX has no CPU backend here
        return np.array(array)


def numpy_type(name: str) -> np.dtype[Any]:
    """The type of numpy, or of ml_dtypes, with this name in documents. Raises UnsupportedFormat."""
    if name in NUMPY:
        return NUMPY[name]
    try:
        found: np.dtype[Any] = np.dtype(getattr(import_module("ml_dtypes"), name))
        return found
    except (ImportError, AttributeError, TypeError):
        raise UnsupportedFormat(
            f"elements have type {name}, which numpy does not know", "Install ml_dtypes, which JAX brings, or torch"
        ) from None


def byte_view(array: Array) -> Array:
    """The bytes of a contiguous array, in one dimension; they share its memory."""
    return array.reshape(-1).view(np.uint8)

"""Reads what torch.save wrote: a zip archive with one pickle, and one record per storage.

Records are never compressed, lie inside the file, and do not overlap, so an archive needs no more memory than its file
has bytes. Tensors are described, and read later. docs/decisions/0009 has the reasons.
"""

from __future__ import annotations

import io
import zipfile
from collections import Counter
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Struct

from ckpt.capture.arrays import Array
from ckpt.dtypes import BY_NAME
from ckpt.foreign.inert import (
    Budget,
    LeftOut,
    Maker,
    Malformed,
    PickleReader,
    Record,
    called,
    check_key,
    ordered_dict,
)
from ckpt.foreign.parts import Read, box_read
from ckptstore.errors import CkptError, CorruptObject, UnsupportedObject
from ckptstore.values import Value


class Storage(Value, eq=False):
    """The memory of one or several tensors in a file."""

    memory: memoryview
    dtype: torch.dtype = torch.uint8
    swapped: bool = False
    """Its numbers are big-endian."""


class StridedTensor(Value, eq=False):
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
        memory, item, shape = self.storage.memory, self.dtype.itemsize, self.shape
        last = self.offset + sum((size - 1) * step for size, step in zip(shape, self.strides, strict=True))
        if 0 not in shape and (min(self.offset, *self.strides, 0) < 0 or (last + 1) * item > len(memory)):
            raise ValueError("elements lie outside the storage")  # numpy does not check an empty storage
        begin = self.offset * item
        array = np.ndarray(shape, np.dtype(f"V{item}"), memory, begin, [step * item for step in self.strides])
        read_boxes = None if array.flags.c_contiguous else box_read(array, shape, item)

        def read(start: int, buffer: memoryview) -> None:
            if read_boxes is None:
                buffer[:] = memory[begin + start :][: len(buffer)]
            else:
                read_boxes(start, buffer)
            if not (self.storage.swapped or self.conjugated or self.negated):
                return
            size = item // (2 if self.dtype.is_complex else 1)
            numbers = np.frombuffer(buffer, f"<u{size}")
            if self.storage.swapped:
                numbers.byteswap(inplace=True)
            sign = numbers.dtype.type(1 << (8 * size - 1))
            if self.conjugated:
                numbers[1::2] ^= sign
            if self.negated:
                numbers ^= sign

        return read


class NumpyType(Record):
    """The type of an array or number of numpy."""

    def __init__(self, code: Any, *_: Any) -> None:
        found = np.dtype(code) if type(code) is str and len(code) < 4 else None
        self.made = found if found is not None and found.name in BY_NAME else None
        """None unless a checkpoint can hold it."""

    def set(self, state: object) -> None:
        """Its byte order."""
        match state:
            case (_, "<" | ">" as order, *_) if self.made is not None:
                self.made = self.made.newbyteorder(order)


class NumpyArray(Record):
    """An array of numpy."""

    made: Array | LeftOut = LeftOut("numpy.ndarray")
    """The elements, in the byte order of this machine."""

    def set(self, state: object) -> None:
        """Shape, type, order and elements."""
        self.state = state
        match state:
            case (_, tuple(shape), NumpyType(made=np.dtype() as kind), fortran, bytes(data)):
                array = np.frombuffer(data, kind).reshape(size(shape), order="F" if fortran else "C")
                self.made = np.ascontiguousarray(array, kind.newbyteorder("=")).reshape(array.shape)


def _scalar(kind: Any, data: Any) -> Any:
    """A number of numpy."""
    if type(kind) is NumpyType and kind.made is not None and type(data) is bytes:
        return np.frombuffer(data, kind.made).astype(kind.made.newbyteorder("="))[0]
    return LeftOut("numpy.generic", [data])


ZIP = b"PK\x03\x04"
_PICKLE = "/data.pkl"
_LARGEST = 1 << 62
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
PATHS = [
    f"{m}.{n}" for m in ("pathlib", "pathlib._local") for n in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")
]


class _StorageType(Value):
    dtype: torch.dtype


def read_archive(memory: memoryview, what: str, budget: Budget) -> Any:
    """The object in an archive, with a StridedTensor for each tensor.

    Raises UnsupportedObject for objects that need code to be executed, for compressed records and if the budget is
    exceeded; CorruptObject for a damaged or truncated archive.
    """
    if bytes(memory[: len(ZIP)]) != ZIP:
        raise CorruptObject(
            f"{what} is not a file of torch.save",
            "Copy it again. Load and save it again if it was written before torch 1.6",
        )
    try:
        with zipfile.ZipFile(_Window(memory)) as archive:
            return _Archive(memory, what, budget, archive).read()
    except CkptError:
        raise
    except Exception as error:  # zipfile raises almost anything for a damaged file
        raise CorruptObject(f"{what} cannot be read: {error or type(error).__name__}", "Copy it again") from error


class _Archive(Struct):
    memory: memoryview
    what: str
    budget: Budget
    archive: zipfile.ZipFile
    prefix: str = ""
    swapped: bool = False
    records: dict[str, zipfile.ZipInfo] = {}
    storages: dict[str, Storage] = {}

    def read(self) -> Any:
        infos = self.archive.infolist()
        packed = next((info for info in infos if info.compress_type != zipfile.ZIP_STORED), None)
        if packed is not None:
            raise UnsupportedObject(
                f"{self.what} is compressed ({packed.filename}), which torch.save never does",
                "Unpack it and pack it again without compression, or load it where it was written and save it again",
            )
        if sum(info.file_size for info in infos) > len(self.memory):
            raise Malformed("its records overlap")
        self.records = {info.filename: info for info in infos}
        if len(self.records) < len(infos):
            raise Malformed("it has two records of one name")
        (pickle,) = (info for info in infos if info.filename.endswith(_PICKLE) and info.filename.count("/") == 1)
        self.prefix = pickle.filename.removesuffix(_PICKLE)
        self.swapped = f"{self.prefix}/byteorder" in self.records and bytes(self._record("byteorder")) == b"big"
        self.budget.grant(pickle.file_size)
        data = self.archive.read(pickle)  # checks its checksum
        return PickleReader(data, self.what, self._names(), self.budget, self._storage).read()

    def _record(self, name: str) -> memoryview:
        info = self.records.get(f"{self.prefix}/{name}")
        if info is None:
            raise Malformed(f"it has no record {name!r}")
        header = self.memory[info.header_offset :][: zipfile.sizeFileHeader]  # type: ignore[attr-defined]
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        begin = info.header_offset + len(header) + lengths
        found = self.memory[begin : begin + info.file_size]
        if bytes(header[: len(ZIP)]) != ZIP or len(found) < info.file_size:
            raise Malformed(f"the record {name!r} is truncated")
        return found

    def _storage(self, id: Any) -> Storage:
        match id:
            case ("storage", _StorageType(dtype), str(key), str(), int(numel)) if 0 <= numel < _LARGEST:
                if key not in self.storages:
                    self.storages[key] = Storage(self._record(f"data/{key}"), dtype, self.swapped)
                found = self.storages[key]
                if found.dtype is not dtype or len(found.memory) < numel * dtype.itemsize:
                    raise Malformed(f"the storage {key!r} is shorter than its record says")
                return found
        raise Malformed("a storage is malformed")

    def _names(self) -> dict[str, Any]:
        makers: dict[str, Callable[..., Any]] = {
            "torch._utils._rebuild_tensor": _tensor,
            "torch._utils._rebuild_tensor_v2": _tensor,
            "torch._utils._rebuild_tensor_v3": lambda storage, offset, sizes, strides, _, __, dtype, signs=None: (
                _tensor(storage, offset, sizes, strides, signs=signs, dtype=dtype)
            ),
            "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
            "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
            # A tensor with attributes, which are left out.
            "torch._tensor._rebuild_from_type_v2": lambda maker, _, args, __: called(maker, args),
            "torch.Size": size,
            "torch.device": torch.device,
            "collections.OrderedDict": ordered_dict,
            "collections.Counter": self._counter,
            "builtins.set": self._set,
            "builtins.frozenset": lambda *items: frozenset(self._set(*items)),
            "numpy.dtype": NumpyType,
            **{f"{module}.scalar": _scalar for module in _NUMPY},
            **{f"{module}._reconstruct": lambda *_: NumpyArray() for module in _NUMPY},
            **dict.fromkeys(("collections.defaultdict", "argparse.Namespace", "types.SimpleNamespace"), lambda *_: {}),
            **{f"datetime.{kind.__name__}": kind for kind in (date, datetime, timedelta, timezone)},
            **dict.fromkeys(PATHS, Path),
            "builtins.complex": complex,
            "builtins.bytes": lambda: b"",
            "_codecs.encode": self._bytes,
        }
        storages = torch.storage._dtype_to_storage_type_map()
        return {
            **{name: Maker(make) for name, make in makers.items()},
            **{f"torch.{name}": dtype for name, dtype in BY_NAME.items()},
            **{f"torch.{name}": _StorageType(dtype) for dtype, name in storages.items()},
            "torch.storage.UntypedStorage": _StorageType(torch.uint8),
        }

    def _counter(self, items: Any = None) -> Counter[Any]:
        if type(items) not in (dict, type(None)):
            raise Malformed("a Counter is malformed")
        self.budget.spend(64 + 64 * len(items or ()))
        return Counter(items)

    def _set(self, items: Any = ()) -> set[Any]:
        if type(items) not in (list, tuple):
            raise Malformed("a set is malformed")
        self.budget.spend(256 + 64 * len(items))
        for item in items:
            check_key(item, self.budget)
        return set(items)

    def _bytes(self, value: Any, codec: Any = None) -> bytes:
        if type(value) is not str or codec not in ("latin1", "latin-1"):
            raise Malformed("bytes are malformed")
        self.budget.spend(64 + len(value))
        return value.encode("latin-1")


def _tensor(
    storage: Any, offset: Any, sizes: Any, strides: Any, _: Any = None, __: Any = None, signs: Any = None, **typed: Any
) -> StridedTensor:
    """typed: its dtype if that is not the storage's."""
    dtype: Any = typed.get("dtype", getattr(storage, "dtype", None))
    shape, steps, signs = size(sizes), size(strides), signs or {}
    if (
        (type(storage), type(dtype), type(signs)) != (Storage, torch.dtype, dict)
        or len(shape) != len(steps)
        or not size((offset,))
    ):
        raise Malformed("a tensor is malformed")
    conjugated, negated = signs.get("conj") is True, signs.get("neg") is True
    if (conjugated and not dtype.is_complex) or (negated and not (dtype.is_complex or dtype.is_floating_point)):
        raise Malformed("a tensor of integers has a sign of its own")
    return StridedTensor(storage, dtype, shape, steps, offset, conjugated, negated)


def size(sizes: Any = ()) -> torch.Size:
    """A size of at most 64 dimensions."""
    if type(sizes) not in (tuple, list, torch.Size) or not all(type(n) is int and 0 <= n < _LARGEST for n in sizes):
        raise Malformed("a size is malformed")
    if len(sizes) > 64:
        raise Malformed("a size has more than 64 dimensions")
    return torch.Size(sizes)


class _Window(io.RawIOBase):
    """Memory as a file that zipfile can read, without a copy."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._at = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._at, len(self._memory))[whence]  # SEEK_SET, SEEK_CUR, SEEK_END
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._memory[self._at : self._at + len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

"""Reads files that torch.save wrote, without executing code in them; tensors are read when they are needed."""

from __future__ import annotations

import errno
import mmap
import os
import pickle  # noqa: TID251 - only for the type of the error that torch raises
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, set_default_mmap_options

from ckpt.foreign.parts import ForeignState
from ckpt.foreign.state import to_foreign
from ckptstore.errors import CkptError, CorruptObject, UnsupportedObject

_ZIP = b"PK\x03\x04"
_REMEDY = "Load it where it was written, keep only tensors, numbers, strings, lists and dicts, and save that"


def read_torch(path: Path, item: str) -> ForeignState:
    """The state in a file. `item` names it unless it is a dict of items.

    Raises UnsupportedObject if it needs code to be executed, CorruptObject if it is damaged or truncated.
    """
    with open(path, "rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            raise CorruptObject(
                f"{path} is not a file of torch.save",
                "Copy it again. Load and save it again if it was written before torch 1.6",
            )
    try:
        state = _load(path)
    except pickle.UnpicklingError as error:
        raise refusal(str(path), path, error) from error
    except Exception as error:  # torch raises almost anything for a damaged file, OSError too
        raise CorruptObject(f"{path} cannot be read: {first_sentence(error)}", "Copy it again") from error
    return to_foreign(state, item, str(path))


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except RuntimeError as error:
        if os.strerror(errno.ENOMEM) not in str(error) or not _is_native(path):
            raise
    # Linux refuses a private mapping that is larger than memory, even if it is never written; a shared one is allowed.
    with set_default_mmap_options(mmap.MAP_SHARED):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _is_native(path: Path) -> bool:
    """Whether the file has the native byte order; torch would swap the bytes of others in place."""
    with zipfile.ZipFile(path) as archive:
        orders = [archive.read(name) for name in archive.namelist() if name.endswith("/byteorder")]
    return set(orders) <= {sys.byteorder.encode()}


def refusal(what: str, file: Any, error: Exception) -> CkptError:
    """The error for a file that torch.load(weights_only=True) rejected."""
    try:
        refused = get_unsafe_globals_in_checkpoint(file)
    except Exception:  # an error here is no reason to trust the file
        refused = []
    if refused:
        return UnsupportedObject(
            f"{what} holds {', '.join(sorted(refused))}, which loading without executing code refuses", _REMEDY
        )
    return CorruptObject(f"{what} cannot be read: {first_sentence(error)}", _REMEDY)


def first_sentence(error: Exception) -> str:
    """The first sentence of an error message, without torch's advice."""
    return str(error).partition(". ")[0].partition("\n")[0] or type(error).__name__

"""Reading what torch.save wrote. Nothing in the file is executed, and tensors are read from it when they are needed."""

from __future__ import annotations

import pickle  # noqa: TID251 - only the name of torch's refusal
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from ckpt.foreign.parts import Foreign
from ckpt.foreign.state import to_foreign
from ckptstore.errors import CkptError, CorruptObject, UnsupportedObject

_ZIP = b"PK\x03\x04"
_REMEDY = "Load it where it was written, keep only tensors, numbers, strings, lists and dicts, and save that"


def read_torch(path: Path, item: str) -> Foreign:
    """The state in a file. `item` names it unless it is a dict of items.

    Raises UnsupportedObject if it needs code to be executed, CorruptObject if it is not whole.
    """
    with open(path, "rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            raise CorruptObject(
                f"{path} is no file of torch.save",
                "Copy it again; one from before torch 1.6 must be loaded and saved once more",
            )
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise refusal(str(path), path, error) from error
    except Exception as error:  # torch raises almost anything for a damaged file, OSError too
        raise CorruptObject(f"{path} cannot be read: {first_sentence(error)}", "Copy it again") from error
    return to_foreign(state, item, str(path))


def refusal(what: str, file: Any, error: Exception) -> CkptError:
    """The error for something that torch.load(weights_only=True) did not take."""
    try:
        refused = get_unsafe_globals_in_checkpoint(file)
    except Exception:  # whatever it is, it is no reason to trust the file
        refused = []
    if refused:
        return UnsupportedObject(
            f"{what} holds {', '.join(sorted(refused))}, which loading without executing code refuses", _REMEDY
        )
    return CorruptObject(f"{what} cannot be read: {first_sentence(error)}", _REMEDY)


def first_sentence(error: Exception) -> str:
    """What an error says, without torch's advice."""
    return str(error).partition(". ")[0].partition("\n")[0] or type(error).__name__

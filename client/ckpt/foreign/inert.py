"""Reads pickles of plain records without running any code that they name.

The only place that reads a pickle: the metadata of torch.distributed.checkpoint. Every name in it must be on an
allowlist, and is replaced by an inert class that only stores its state.
"""

from __future__ import annotations

import pickle  # noqa: TID251
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptstore.errors import CkptError, CorruptObject, UnsupportedObject

GlobalName = tuple[str, str]
"""Module and name of a global in a pickle."""


class Record:
    """An object of a pickle. Its fields are attributes, or in `state` if they are not named."""

    state: object = None

    def __new__(cls, *_: object) -> Record:
        """Arguments are ignored: the records that are read have none."""
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


def read_records(path: Path, records: frozenset[GlobalName], plain: Mapping[GlobalName, Any]) -> Any:
    """Load a pickle, with Records for objects of the classes `records`, and the values of `plain` for its names.

    Raises UnsupportedObject for any other name, CorruptObject if the pickle is damaged or truncated.
    """
    made: dict[GlobalName, type[Record]] = {}

    class Inert(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            """Raises UnsupportedObject for names that are not on the allowlist."""
            if (module, name) in plain:
                return plain[module, name]
            if (module, name) not in records:
                raise UnsupportedObject(
                    f"{path} names {module}.{name}, which importing without executing code refuses",
                    "Load it where it was written and save plain tensors and numbers",
                )
            return made.setdefault((module, name), type(name, (Record,), {}))

    try:
        with open(path, "rb") as file:
            return Inert(file).load()
    except (CkptError, OSError):
        raise
    except Exception as error:  # a malformed pickle makes the unpickler raise almost anything
        raise CorruptObject(f"{path} cannot be read: {type(error).__name__}: {error}", "Copy it again") from error

"""Pickles of plain records, read without running anything they name.

The one place that reads a pickle: the metadata of torch.distributed.checkpoint is one. Every name in it must stand in
a list, and becomes a class made here for this file alone, which keeps what it is given and does nothing.
"""

from __future__ import annotations

import pickle  # noqa: TID251
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptstore.errors import CkptError, CorruptObject, UnsupportedObject

GlobalName = tuple[str, str]
"""Module and name of a global."""


class Record:
    """An object of a pickle: its fields are attributes, or `state` if it has no names for them."""

    state: object = None

    def __new__(cls, *_: object) -> Record:
        """Arguments are not kept: no record that we read has any."""
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


def read_records(path: Path, records: frozenset[GlobalName], plain: Mapping[GlobalName, Any]) -> Any:
    """What a pickle holds: Records in the place of objects of the classes `records`, harmless things for `plain` names.

    Raises UnsupportedObject for any other name, CorruptObject if it is not a whole pickle.
    """
    made: dict[GlobalName, type[Record]] = {}

    class Inert(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            """Raises UnsupportedObject."""
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

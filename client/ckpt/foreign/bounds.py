"""Bounds on the memory and time of an import: a small file never expands to a large state.

Objects of a pickle may be shared, and a checkpoint stores each of them as often as it is referenced. So the size of a
file says nothing about the size of its state unless both are compared.
"""

from __future__ import annotations

from typing import Any

from ckptstore.errors import UnsupportedObject

MAX_DEPTH = 100
_FREE = 1 << 20
_PER_BYTE = 64
_CONTAINER = 64
_VALUE = 8


class Budget:
    """The size that the state in one file may have, in units of about a byte. For one thread."""

    def __init__(self, path: str, most: int) -> None:
        """most: limit for files of any size."""
        self._path = path
        self._most = most
        self._granted = self._left = min(_FREE, most)

    @property
    def left(self) -> int:
        """The units that are left."""
        return self._left

    def grant(self, num_bytes: int) -> None:
        """Call it before a pickle of this size is read. Raises UnsupportedObject if it is too large to be read."""
        if num_bytes > self._most:
            raise UnsupportedObject(
                f"{self._path} has a pickle of {num_bytes} bytes; the limit is {self._most}",
                "Store numbers as tensors, or import the state in parts",
            )
        more = min(_PER_BYTE * num_bytes, self._most - self._granted)
        self._granted += more
        self._left += more

    def spend(self, units: int) -> None:
        """Raises UnsupportedObject if less is left."""
        self._left -= units
        if self._left < 0:
            raise self.exceeded()

    def exceeded(self) -> UnsupportedObject:
        """The error of a file that needs more than the budget."""
        return UnsupportedObject(
            f"the state in {self._path} is too large: it has too many objects, or repeats some too often",
            "Load it where it was written, and save it with numbers as tensors and without lists, dicts or texts that "
            "are shared many times",
        )

    def spend_on(self, value: Any) -> None:
        """Spend what a tree of containers takes if nothing in it is shared. Raises UnsupportedObject."""
        todo = [(value, 0, 0)]
        while todo:
            item, path_chars, depth = todo.pop()
            kind = type(item)
            if item is None or kind in (bool, float, complex):
                self.spend(_VALUE)
            elif kind is int:
                self.spend(_VALUE + item.bit_length() // 8)
            elif isinstance(item, str | bytes):
                self.spend(_VALUE + len(item))
            else:
                children = _children(item)
                # The name of a leaf, such as a tensor, is its path.
                self.spend(_CONTAINER + 2 * _VALUE * len(children) if children else _CONTAINER + path_chars)
                if children and depth == MAX_DEPTH:
                    raise UnsupportedObject(
                        f"the state in {self._path} is nested more than {MAX_DEPTH} deep", "Does it contain itself?"
                    )
                todo += [(child, path_chars + chars, depth + 1) for child, chars in children]


def _children(item: Any) -> list[tuple[Any, int]]:
    """The objects in a container, and the characters that each adds to the path."""
    if isinstance(item, dict):
        chars = [len(key) if isinstance(key, str) else _VALUE for key in item]
        return [*((key, 0) for key in item), *zip(item.values(), chars, strict=True)]
    if isinstance(item, list | tuple | set | frozenset):
        return [(child, _VALUE) for child in item]
    return [(child, 0) for child in getattr(item, "__dict__", {}).values()]

"""Bases of immutable values: structs of msgspec, which are fast to make, to compare, to encode and to decode."""

from __future__ import annotations

from typing import Any, dataclass_transform

from msgspec import Struct, StructMeta, field


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Value(Struct, frozen=True):
    """Base of values. A class statement takes the other options of `msgspec.Struct`."""


class _KeywordsOnly(StructMeta):
    """Unlike `frozen`, `kw_only` is not inherited."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return super().__new__(cls, *args, kw_only=True, **options)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Record(Value, metaclass=_KeywordsOnly):
    """Base of values whose fields are given by name."""

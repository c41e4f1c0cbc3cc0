"""Places in a listing as opaque text."""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode

import msgspec

from ckptd.index import Place, Sort, types_of
from ckptstore.errors import BadInput, InvalidRequest
from ckptstore.names import check_run, check_step, check_ulid


class _Cursor(msgspec.Struct, array_like=True):
    sort: Sort
    values: list[str | int | float]


def write_cursor(sort: Sort, place: Place) -> str:
    """The text that leads to what comes after a place."""
    return urlsafe_b64encode(msgspec.json.encode(_Cursor(sort, list(place)))).decode().rstrip("=")


def read_cursor(text: str, sort: Sort) -> Place:
    """The place in a cursor of a listing in that order. Raises InvalidRequest."""
    try:
        cursor = msgspec.json.decode(urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=_Cursor)
        if cursor.sort is not sort:
            raise ValueError("it belongs to a listing in another order")
        place = tuple(msgspec.convert(cursor.values, type=tuple[types_of(sort)]))  # type: ignore[misc]
        _check(sort, place)
    except (binascii.Error, ValueError, msgspec.DecodeError, BadInput) as error:
        raise InvalidRequest(f"the cursor is not one of ours: {error}", "Pass on next_cursor unchanged") from error
    return place


def _check(sort: Sort, place: Place) -> None:
    """What a database would choke on is no place."""
    for value in place:
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ValueError("a number is too large")
    run, ulid = (value for value in place if isinstance(value, str))
    check_run(run)
    check_ulid(ulid)
    check_step(place[1] if sort is Sort.RUN else place[0] if sort in (Sort.STEP, Sort.STEP_FALLING) else place[2])

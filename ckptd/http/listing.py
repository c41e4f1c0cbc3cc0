"""Filters, sort order and cursor of a listing, as query parameters."""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Query

from ckptapi.listing import Bound, Filter, Sort, Tagged, check_glob
from ckptd.index import PageKey, key_types
from ckptd.services.tokens import Caller
from ckptstore.commits.catalog import State
from ckptstore.errors import BadInput, InvalidRequest
from ckptstore.format.decoding import convert, decode_json
from ckptstore.names import MAX_STEP, check_generation, check_run, check_step, check_ulid

_MAX_BOUNDS = 8
_MAX_AT = 1e12

Step = Annotated[int | None, Query(ge=0, le=MAX_STEP)]
Moment = Annotated[float | None, Query(ge=0, le=_MAX_AT, description="Commit time in seconds since the epoch")]


@dataclass(frozen=True, slots=True)
class ListingParameters:
    """Query parameters of a listing. FastAPI builds it."""

    run: Annotated[str | None, Query(max_length=128, description="A run; * and ? are wildcards")] = None
    state: Annotated[list[State] | None, Query(max_length=len(State))] = None
    min_step: Step = None
    max_step: Step = None
    since: Moment = None
    until: Moment = None
    metric: Annotated[
        list[str] | None, Query(max_length=_MAX_BOUNDS, description="For example val_loss<=2.5 or accuracy>=0.9")
    ] = None
    tag: Annotated[list[str] | None, Query(max_length=_MAX_BOUNDS, description="For example paper or owner=ann")] = None
    sort: Sort = Sort.RUN
    cursor: Annotated[str | None, Query(max_length=1024, description="next_cursor of the previous page")] = None

    def filter(self, caller: Caller) -> Filter:
        """The filter, limited to the runs that the caller may see. Raises InvalidName or InvalidRequest."""
        return Filter(
            run=check_glob(self.run) if self.run is not None else None,
            globs=caller.runs,
            states=frozenset(self.state or ()),
            min_step=self.min_step,
            max_step=self.max_step,
            since=self.since,
            until=self.until,
            bounds=tuple(Bound.parse(text) for text in self.metric or ()),
            tags=tuple(Tagged.parse(text) for text in self.tag or ()),
        )

    def place(self) -> PageKey | None:
        """The sort key after which the page begins. Raises InvalidRequest."""
        return read_cursor(self.cursor, self.sort) if self.cursor is not None else None


ListingQuery = Annotated[ListingParameters, Depends()]


class _Cursor(msgspec.Struct, array_like=True):
    sort: Sort
    values: list[str | int | float]


def write_cursor(sort: Sort, place: PageKey) -> str:
    """The cursor for the page after a sort key."""
    return urlsafe_b64encode(msgspec.json.encode(_Cursor(sort, list(place)))).decode().rstrip("=")


def read_cursor(text: str, sort: Sort) -> PageKey:
    """The sort key in a cursor of a listing with this sort order. Raises InvalidRequest."""
    try:
        cursor = decode_json(urlsafe_b64decode(text + "=" * (-len(text) % 4)), _Cursor)
        if cursor.sort is not sort:
            raise ValueError("it belongs to a listing with another sort order")
        kind: Any = tuple[tuple(key_types(sort).values())]  # type: ignore[misc]
        place = tuple(convert(cursor.values, kind))
        _check(sort, place)
    except (binascii.Error, ValueError, msgspec.DecodeError, BadInput) as error:
        raise InvalidRequest(f"the cursor is invalid: {error}", "Pass next_cursor unchanged") from error
    return place


def _check(sort: Sort, place: PageKey) -> None:
    """Reject values that the database cannot store."""
    for value in place:
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ValueError("a number is too large")
    values = dict(zip(key_types(sort), place, strict=True))
    check_run(values["run"])
    check_ulid(values["ulid"])
    check_step(values["step"])
    check_generation(values["generation"])

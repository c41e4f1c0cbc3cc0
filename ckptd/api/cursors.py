"""Positions in a listing as opaque text."""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode

import msgspec

from ckptd.index import Position
from ckptstore.errors import BadInput, InvalidRequest
from ckptstore.names import Attempt, check_run


def write_cursor(position: Position) -> str:
    """The text that leads to what comes after `position`."""
    return urlsafe_b64encode(msgspec.json.encode(position)).decode().rstrip("=")


def read_cursor(text: str, run: str | None) -> Position:
    """The position in a cursor of a listing of `run` (None: of all). Raises InvalidRequest."""
    try:
        position = msgspec.json.decode(urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=Position)
        check_run(position.run)
        Attempt(position.step, position.ulid)
        if run not in (None, position.run):
            raise ValueError("it belongs to a listing of another run")
    except (binascii.Error, ValueError, msgspec.DecodeError, BadInput) as error:
        raise InvalidRequest(f"the cursor is not one of ours: {error}", "Pass on next_cursor unchanged") from error
    return position

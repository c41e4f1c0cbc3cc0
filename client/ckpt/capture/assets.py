"""The files that `assets=` names: the setting's are read once, and a save's own at each capture.

The rank that stores them reads them. Bytes that stay in the same memory cost a save nothing but their copy; chunks that
have not changed are referenced, as in any other entry.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from glob import glob
from pathlib import Path

from ckpt.config import Assets
from ckptstore import human
from ckptstore.errors import InvalidRequest
from ckptstore.reading.assets import stays_inside

MOST_BYTES = 256 << 20
"""Most bytes of all files. Each save copies them, as it copies the weights."""


def read_files(given: Assets) -> dict[str, bytes]:
    """The bytes of each file by its name: relative to the folder that was given, otherwise the last part of its path.

    Hidden files of a folder, and those in hidden folders, are left out. Raises InvalidRequest if there is no such file,
    two have the same name, or they are larger than what belongs to a model.
    """
    places = [given] if isinstance(given, str | os.PathLike) else given
    pairs = places.items() if isinstance(places, Mapping) else (("", place) for place in places)
    found: dict[str, Path | bytes] = {}
    for given_name, place in pairs:
        for own, one in [("", place)] if isinstance(place, bytes) else _matches(Path(place)):
            name = given_name or own
            if not stays_inside(name) or found.setdefault(name, one) != one:
                raise InvalidRequest(
                    f"an asset cannot be saved as {name!r}, or two have this name", "Pass {name: path}"
                )
    size = sum(len(one) if isinstance(one, bytes) else one.stat().st_size for one in found.values())
    if size > MOST_BYTES:
        raise InvalidRequest(
            f"assets have {human.size(size)}, and may have {human.size(MOST_BYTES)}",
            "Name single files, such as 'folder/*.json': weights are saved with the model",
        )
    return {name: one if isinstance(one, bytes) else one.read_bytes() for name, one in found.items()}


def _matches(place: Path) -> list[tuple[str, Path]]:
    """The names and paths of the files in a folder, of one file, or of those that match a glob in a folder."""
    folder, pattern = (place, "**") if place.is_dir() else (place.parent, place.name)
    names = sorted(glob(pattern, root_dir=folder, recursive=True))
    found = [(name, folder / name) for name in names if (folder / name).is_file()]
    if not found:
        near = get_close_matches(pattern, glob("*", root_dir=folder), 3)
        raise InvalidRequest(
            f"there is no file {place} to save as an asset", f"In {folder} is {', '.join(near) or 'none like it'}"
        )
    return found

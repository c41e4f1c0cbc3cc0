"""Extensions: additions that a reader must know, or may ignore."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ckptstore.clock import system_clock
from ckptstore.errors import CorruptObject, UnsupportedFormat
from ckptstore.format.documents import FORMAT
from ckptstore.format.merging import merge
from ckptstore.names import Attempt, new_ulid
from ckptstore.stores import open_store
from tests.ckptstore.format.sealed import SAMPLES
from tests.ckptstore.format.test_parsing import body, parse_json
from tests.support.checkpoints import sample_arrays, write_rank


@pytest.mark.parametrize("kind", SAMPLES)
def test_extensions(kind: str) -> None:
    plain = {"note": {"any": [1, None]}, "critically": 1}
    assert parse_json(kind, {**body(kind), "extensions": plain}).extensions == plain
    for name in ("critical.", "critical.boundary"):
        # As with a newer version, the rest may have any shape.
        with pytest.raises(UnsupportedFormat, match=name) as caught:
            parse_json(kind, {"format": FORMAT, "news": 1, "extensions": {**plain, name: None}})
        assert "Upgrade" in caught.value.hint
    strange: list[Any] = [None, [], "critical.x", 1]
    for wrong in strange:
        with pytest.raises(CorruptObject):
            parse_json(kind, {**body(kind), "extensions": wrong})


def test_a_manifest_has_the_extensions_of_the_lowest_rank_that_gives_them() -> None:
    store, attempt = open_store("memory://extensions"), Attempt(1, new_ulid(system_clock()))
    ranks = [write_rank(store, "gpt", attempt, sample_arrays() if rank == 0 else {}, rank, 3) for rank in range(3)]
    given: list[dict[str, Any]] = [{"a": 0}, {"b": 1, "a": 1}, {"b": 2, "c": 2}]
    changed = [
        replace(stored, receipt=msgspec.structs.replace(stored.receipt, extensions=extensions))
        for stored, extensions in zip(ranks, given, strict=True)
    ]
    assert merge(changed).extensions == {"a": 0, "b": 1, "c": 2}
    assert merge(ranks).extensions == {}

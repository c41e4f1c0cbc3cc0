from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import xxhash

from ckptstore.errors import CorruptObject
from ckptstore.format.parsing import parse_sealed, seal
from ckptstore.format.statistics import Statistics, Table
from ckptstore.names import Attempt

ATTEMPT = Attempt(7, "01M81Q1ERSKVSH8DW9YGQQS8GG")


def as_sealed(document: dict[str, object]) -> bytes:
    """The document as a writer would seal it."""
    [body, trailer] = seal(Statistics.of(ATTEMPT, 0, Table.of([(1, 0, 0, 0, 1.0, 1.0)]))).split(b"\n")[:2]
    old = xxhash.xxh3_128_hexdigest(body).encode()
    assert old in trailer
    changed = json.dumps({**json.loads(body), **document}).encode()
    return changed + b"\n" + trailer.replace(old, xxhash.xxh3_128_hexdigest(changed).encode()) + b"\n"


def test_moments_and_histograms_of_earlier_writers_are_ignored() -> None:
    number = base64.b64encode(np.array([2.5], "<f8").tobytes()).decode()
    old = {"sampled": "AQ==", "zeros": "AA==", "buckets": "AQ==", "mean": number, "rms": number}
    table = parse_sealed(as_sealed({**old, "minimum": number}), Statistics, "key").table("key")
    assert (table.elements.tolist(), table.minimum.tolist(), table.maximum.tolist()) == ([1], [2.5], [1.0])


@pytest.mark.parametrize("wrong", [{"minimum": "AAAA"}, {"maximum": ""}])
def test_columns_that_do_not_fit_together(wrong: dict[str, object]) -> None:
    with pytest.raises(CorruptObject, match="do not fit together"):
        parse_sealed(as_sealed(wrong), Statistics, "key").table("key")

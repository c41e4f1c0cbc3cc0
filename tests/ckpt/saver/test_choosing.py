"""Which coding each element type gets: tables of cases, the best of all choices, and what must never get worse."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.saver.choosing import INTERVAL_SHARE, CodingCost, choose
from ckptstore.codecs.chunk_codecs import Coding

GB = 1_000_000_000
RAW, SPLIT, ZSTD, ZSTD_MORE = Coding("raw"), Coding("float-split/float32"), Coding("zstd"), Coding("zstd", 9)
FLOATS = {RAW: CodingCost(0.1 / GB, 1.0), SPLIT: CodingCost(1 / GB, 0.83)}
NUMBERS = {RAW: CodingCost(0.1 / GB, 1.0), ZSTD: CodingCost(2 / GB, 0.5), ZSTD_MORE: CodingCost(40 / GB, 0.3)}
NOISE = {RAW: CodingCost(0.1 / GB, 1.0), ZSTD: CodingCost(2 / GB, 0.999)}


@pytest.mark.parametrize(
    ("upload_gb_s", "threads", "interval_s", "floats", "numbers"),
    [
        pytest.param(2.0, 1, None, RAW, RAW, id="a fast disk, an only save"),
        pytest.param(2.0, 1, 0.6, RAW, RAW, id="a fast disk, back to back"),
        pytest.param(0.1, 1, None, SPLIT, ZSTD, id="a slow sink, an only save"),
        pytest.param(0.1, 1, 10.0, SPLIT, ZSTD, id="a slow sink, back to back"),
        pytest.param(0.01, 1, 60.0, SPLIT, ZSTD_MORE, id="a sink so slow that everything helps"),
        pytest.param(2.0, 1, 4.3, RAW, ZSTD, id="time for half of it: first what saves most per second"),
        pytest.param(2.0, 1, 6.1, SPLIT, ZSTD, id="time for what is fast"),
        pytest.param(2.0, 1, 600.0, SPLIT, ZSTD_MORE, id="a long interval"),
        pytest.param(2.0, 4, 1.6, SPLIT, ZSTD, id="more threads encode more in the same time"),
    ],
)
def test_choices_of_a_gigabyte_each(
    upload_gb_s: float, threads: int, interval_s: float | None, floats: Coding, numbers: Coding
) -> None:
    choice = choose(
        {"float32": GB, "int32": GB}, {"float32": FLOATS, "int32": NUMBERS}, 1 / (upload_gb_s * GB), threads, interval_s
    )
    assert choice.codings == {"float32": floats, "int32": numbers}


@pytest.mark.parametrize(
    ("upload_gb_s", "interval_s", "price", "codings"),
    [
        pytest.param(2.0, 60.0, 0.0, (SPLIT, ZSTD), id="cores that nobody else needs"),
        pytest.param(2.0, 60.0, 0.3, (RAW, RAW), id="a fast disk: encoding gains less than it costs"),
        pytest.param(2.0, 60.0, 0.06, (RAW, ZSTD), id="part of it gains enough"),
        pytest.param(0.1, 60.0, 0.3, (SPLIT, ZSTD), id="a slow store: the upload gains more"),
        pytest.param(2.0, 6000.0, 0.3, (SPLIT, ZSTD), id="saves so rare that the cost does not matter"),
        pytest.param(2.0, None, 1.0, (RAW, RAW), id="an only save"),
    ],
)
def test_what_encoding_costs_training(
    upload_gb_s: float, interval_s: float | None, price: float, codings: tuple[Coding, Coding]
) -> None:
    costs = {"float32": FLOATS, "int32": {RAW: NUMBERS[RAW], ZSTD: NUMBERS[ZSTD]}}
    given = {"float32": GB, "int32": GB}, costs, 1 / (upload_gb_s * GB), 1, interval_s
    choice, free = choose(*given, price), choose(*given)
    assert tuple(choice.codings.values()) == codings
    assert choice.spares == (choice.codings != free.codings)


def test_what_does_not_compress_stays_as_it_is() -> None:
    choice = choose({"uint8": GB, "float32": GB}, {"uint8": NOISE, "float32": FLOATS}, 1 / (0.001 * GB), 1, 3600.0)
    assert choice.codings == {"uint8": RAW, "float32": SPLIT}


def test_nothing_to_save() -> None:
    choice = choose({}, {}, 1.0, 1, None)
    assert (choice.codings, choice.durable_s, choice.stored_bytes) == ({}, 0.0, 0.0)


CODINGS = [Coding("raw"), *(Coding("zstd", level) for level in (1, 3, 9))]
SECONDS = st.floats(0.01, 100).map(lambda s: s / GB)
FIGURES = st.lists(st.tuples(SECONDS, st.integers(1, 20)), min_size=1, max_size=4).map(
    lambda rows: {CODINGS[i]: CodingCost(seconds, part / 20) for i, (seconds, part) in enumerate(rows)}
)
TYPES = st.dictionaries(st.sampled_from(["float32", "bfloat16", "int64"]), FIGURES, min_size=1)
UPLOAD = st.floats(0.01, 100).map(lambda s: s / GB)
INTERVAL = st.none() | st.floats(0.001, 1000)
BYTES = st.integers(1, 10 * GB)
PRICE = st.sampled_from([0.0, 0.01, 0.3, 2.0])


@given(FIGURES, BYTES, UPLOAD, st.integers(1, 8), INTERVAL)
def test_of_one_element_type_the_best_is_chosen(
    costs: Mapping[Coding, CodingCost], count: int, upload_s: float, threads: int, interval_s: float | None
) -> None:
    choice = choose({"t": count}, {"t": costs}, upload_s, threads, interval_s)
    durable = {c: max(count * f.seconds / threads, count * f.stored * upload_s) for c, f in costs.items()}
    in_time = [c for c in costs if interval_s is not None and durable[c] <= INTERVAL_SHARE * interval_s]
    chosen = choice.codings["t"]
    if in_time:
        assert chosen in in_time
        assert costs[chosen].stored == min(costs[c].stored for c in in_time)
    else:
        assert durable[chosen] == pytest.approx(min(durable.values()))


@given(TYPES, st.data(), UPLOAD, st.integers(1, 8), INTERVAL)
def test_never_later_than_without_compression_unless_there_is_time(
    types: Mapping[str, Mapping[Coding, CodingCost]],
    data: st.DataObject,
    upload_s: float,
    threads: int,
    interval_s: float | None,
) -> None:
    sizes = {dtype: data.draw(BYTES) for dtype in types}
    choice = choose(sizes, types, upload_s, threads, interval_s)
    soonest = {dtype: min(costs.values()) for dtype, costs in types.items()}
    encode_s = sum(count * soonest[dtype].seconds for dtype, count in sizes.items()) / threads
    upload = sum(count * soonest[dtype].stored for dtype, count in sizes.items()) * upload_s
    assert choice.durable_s <= max(encode_s, upload, INTERVAL_SHARE * (interval_s or 0.0)) * (1 + 1e-9)


@given(TYPES, st.data(), st.lists(UPLOAD, min_size=2, max_size=2), st.integers(1, 8), INTERVAL)
def test_a_slower_store_never_makes_checkpoints_larger(
    types: Mapping[str, Mapping[Coding, CodingCost]],
    data: st.DataObject,
    uploads: list[float],
    threads: int,
    interval_s: float | None,
) -> None:
    sizes, price = {dtype: data.draw(BYTES) for dtype in types}, data.draw(PRICE)
    fast, slow = (choose(sizes, types, upload_s, threads, interval_s, price) for upload_s in sorted(uploads))
    assert slow.stored_bytes <= fast.stored_bytes


@given(TYPES, st.data(), UPLOAD, st.integers(1, 8), st.lists(st.floats(0.001, 1000), min_size=2, max_size=2))
def test_a_longer_interval_never_makes_checkpoints_larger(
    types: Mapping[str, Mapping[Coding, CodingCost]],
    data: st.DataObject,
    upload_s: float,
    threads: int,
    intervals: list[float],
) -> None:
    sizes, price = {dtype: data.draw(BYTES) for dtype in types}, data.draw(PRICE)
    short, long = (choose(sizes, types, upload_s, threads, interval_s, price) for interval_s in sorted(intervals))
    assert long.stored_bytes <= short.stored_bytes

import pytest

from ckptstore import human
from ckptstore.errors import InvalidRequest


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (102_348, "99.9 KiB"), (102_400, "100 KiB"),
        (1_048_000, "1.0 MiB"), (3 << 30, "3.0 GiB"), (1 << 62, "4096 PiB"),
    ],
)  # fmt: skip
def test_sizes_have_binary_units_and_three_digits(count: int, text: str) -> None:
    assert human.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),  # clocks of two machines differ
        (59.9, "59s"), (60, "1m"), (3599, "59m"), (3600 + 300, "1h 05m"), (86_400 * 2 + 3600 * 7, "2d 07h"),
        (86_400 * 45, "45d"),
    ],
)  # fmt: skip
def test_ages(seconds: float, text: str) -> None:
    assert human.age(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0s"), (9.94, "9.9s"), (9.96, "10s"), (59.6, "1m 00s"), (3725, "1h 02m")]
)
def test_durations(seconds: float, text: str) -> None:
    assert human.duration(seconds) == text


def test_counts_agree_in_number() -> None:
    assert [human.count(n, "shard") for n in (0, 1, 2000)] == ["0 shards", "1 shard", "2,000 shards"]
    assert [human.count(n, "entry") for n in (1, 2)] == ["1 entry", "2 entries"]


def test_metrics_are_sorted_and_short() -> None:
    assert human.metrics({"val": 0.5, "loss": 2.345678, "bad": float("nan")}) == "bad=nan loss=2.346 val=0.5"


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("0.2s", "s", 0.2), ("90s", "s", 90), ("1.5h", "s", 5400), ("7d", "s", 604_800), ("20ms", "s", 0.02),
        ("500MB", "bytes", 500_000_000), ("2.5GB", "bytes", 2.5e9), ("1kB", "bytes", 1000),
        ("888GiB", "bytes", 888 << 30), ("7TB", "bytes", 7e12),
        ("70B", "count", 70e9), ("70e9", "count", 70e9), ("8.03B", "count", 8.03e9),
    ],
)  # fmt: skip
def test_quantities(text: str, unit: str, value: float) -> None:
    assert human.quantity(text, unit) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["", "s", "h", "24", "-1h", "1w", "²h", "nans", "infs", "1e999s", "1s2s", "0x10s", "1_0s"]
)
def test_other_lengths_of_time_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="24h"):
        human.parse_duration(text)


@pytest.mark.parametrize("text", ["", "GB", "5", "-5GB", "0GB", "5B", "5gb", "²GB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="5GB"):
        human.parse_size(text)

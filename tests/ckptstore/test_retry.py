"""Backoff and retries. No test sleeps or reads a clock: `Time` does both."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from ckptstore.retry import pauses, retry


class Time:
    """A clock that moves only while something sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Flaky:
    """Fails with each of the given errors, then returns the number of calls."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.calls


@pytest.fixture
def time() -> Time:
    return Time()


def test_pauses_grow_up_to_the_longest(time: Time) -> None:
    assert list(islice(pauses(1.0, 5.0, jitter=False, clock=time), 5)) == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert list(pauses(1.0, factor=1.5, tries=4, jitter=False, clock=time)) == [1.0, 1.5, 2.25]


def test_jitter_shortens_a_pause_by_up_to_half_and_leaves_the_random_state_alone(time: Time) -> None:
    before = random.getstate()
    found = list(islice(pauses(1.0, 1.0, clock=time), 200))
    assert all(0.5 <= pause <= 1.0 for pause in found)
    assert (len(set(found)) > 100, random.getstate()) == (True, before), "the trainer's"


def test_the_last_pause_ends_at_the_timeout_which_includes_the_first_try(time: Time) -> None:
    waits = pauses(1.0, timeout_s=5.0, jitter=False, clock=time)
    for pause in pauses(1.0, timeout_s=5.0, jitter=False, clock=time):
        time.sleep(pause)
    assert time.slept == [1.0, 2.0, 2.0]
    assert list(waits) == []


@pytest.mark.parametrize("none", [{"tries": 1}, {"timeout_s": 0.0}])
def test_without_a_pause_a_call_is_not_retried(time: Time, none: dict[str, float]) -> None:
    call = Flaky(OSError("first"))
    with pytest.raises(OSError, match="first"):
        retry(call, OSError, pauses(1.0, clock=time, **none), sleep=time.sleep)  # type: ignore[arg-type]
    assert (call.calls, time.slept) == (1, [])


def test_a_call_is_retried_until_it_succeeds(time: Time) -> None:
    call = Flaky(OSError(), KeyError())
    assert retry(call, (OSError, KeyError), pauses(1.0, jitter=False, clock=time), sleep=time.sleep) == 3
    assert time.slept == [1.0, 2.0]


def test_the_last_error_is_raised_when_the_tries_are_used_up(time: Time) -> None:
    with pytest.raises(OSError, match="second"):
        retry(Flaky(OSError("first"), OSError("second")), OSError, pauses(1.0, tries=2, clock=time), sleep=time.sleep)
    assert len(time.slept) == 1


@pytest.mark.parametrize("error", [ValueError("other"), FileNotFoundError("other")])
def test_other_errors_and_exceptions_to_the_rule_are_not_retried(time: Time, error: Exception) -> None:
    with pytest.raises(type(error), match="other"):
        retry(
            Flaky(error), OSError, pauses(1.0, clock=time), unless=lambda error: isinstance(error, FileNotFoundError),
            sleep=time.sleep,
        )  # fmt: skip
    assert time.slept == []


def test_a_sleep_that_is_interrupted_ends_the_retries(time: Time) -> None:
    call = Flaky(OSError("first"), OSError("second"))
    with pytest.raises(OSError, match="first"):
        retry(call, OSError, pauses(1.0, clock=time), sleep=lambda _: True)
    assert call.calls == 1

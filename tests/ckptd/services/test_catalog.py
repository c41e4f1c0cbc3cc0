"""Which answers of the index count while the store does not answer."""

from __future__ import annotations

import pytest

from ckptd.services.catalog import Freshness
from ckptstore.clock import system_clock
from ckptstore.errors import StoreUnavailable, UnsupportedFormat
from tests.support.stores import MovableClock


def test_what_is_believed_follows_the_last_listings() -> None:
    clock = MovableClock()
    freshness = Freshness(clock, 60)
    failure = StoreUnavailable("down")

    def believed(run: str | None, found: bool) -> bool:
        try:
            freshness.check(run, found)
        except StoreUnavailable:
            return False
        return True

    assert not believed("a", True)
    freshness.report(clock(), ["a", "b"], {"b": failure})
    assert believed("a", True)
    assert believed("a", False)
    assert not believed("b", True)
    assert not believed("b", False)
    assert not believed(None, True)
    freshness.report(clock(), ["a", "b"], {})
    assert believed(None, False)
    freshness.report_failure(failure)
    assert believed("b", True)
    assert not believed("b", False)
    assert freshness.problem() == "down"
    freshness.report(clock(), ["a", "b"], {})
    clock.advance(61)
    assert believed("a", True)
    assert not believed("a", False)
    assert freshness.lag_s() == pytest.approx(61, abs=30)


def test_a_newer_format_is_passed_on_instead_of_an_older_step() -> None:
    freshness = Freshness(system_clock, 60)
    freshness.report(system_clock(), ["a", "b"], {})
    freshness.report(system_clock(), ["a", "b"], {"a": UnsupportedFormat("version 9", "Upgrade ckptd")})
    with pytest.raises(UnsupportedFormat):
        freshness.check("a", True)
    freshness.check("b", True)

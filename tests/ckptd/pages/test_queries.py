from __future__ import annotations

from ckptd.pages.queries import RunPageQuery


def test_a_metric_is_added_to_the_plot_and_removed_again() -> None:
    query = RunPageQuery(metric="a")
    assert (query.toggled("a"), query.toggled("b")) == ("?metric=a", "?metric=a&also=b")
    query = RunPageQuery(metric="a", also=("b", "c", "d", "e"), other="run")
    assert query.toggled("a") == "?metric=b&also=c&also=d&also=e&other=run"
    assert query.toggled("f") == "?metric=a&also=b&also=c&also=d&also=f&other=run"
    assert (query.values("also"), query.values("other"), query.values("state")) == (["b", "c", "d", "e"], ["run"], [])

"""Line charts stay on the plane, with round ticks, whatever is drawn."""

from __future__ import annotations

import itertools
import math
import sys
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import human
from ckptstore.analysis.charts import Point, compact, plot, sparkline, svg

ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.lists(st.tuples(ANY_FLOAT, ANY_FLOAT), max_size=20), min_size=1, max_size=3), st.data())
def test_whatever_is_plotted_stays_on_the_plane(lines: list[list[tuple[float, float]]], data: st.DataObject) -> None:
    log, ages, from_zero = (data.draw(st.booleans()) for _ in range(3))
    points = [[Point(x, y, "") for x, y in line] for line in lines]
    drawn = plot(points, log=log, ages=ages, from_zero=from_zero and not log)
    for line, values in zip(drawn.lines, lines, strict=True):
        assert len(line.marks) == sum(math.isfinite(x) and math.isfinite(y) and (y > 0 or not log) for x, y in values)
        assert line.points.split() == [f"{mark.x},{mark.y}" for mark in line.marks]
        filled = from_zero and not log  # what lies below a line means something only above 0
        assert len(line.area.split()) == (len(line.marks) + 2 * bool(line.marks)) * filled
        for mark in line.marks:
            assert drawn.left <= mark.x <= drawn.right
            assert drawn.top <= mark.y <= drawn.bottom
    for tick in drawn.y_ticks:
        assert drawn.top <= tick.at <= drawn.bottom
    assert len(drawn.x_ticks) < 20
    assert all(drawn.left <= tick.at <= drawn.right for tick in drawn.x_ticks)


def test_a_logarithmic_axis_has_equal_steps_for_equal_ratios() -> None:
    drawn = plot([[Point(step, 10.0**-step, "") for step in range(5)]], log=True)
    heights = [mark.y for mark in drawn.lines[0].marks]
    assert len({round(after - before, 0) for before, after in itertools.pairwise(heights)}) == 1
    assert [tick.label for tick in drawn.y_ticks] == ["0.0001", "0.001", "0.01", "0.1", "1"]


def test_an_axis_of_ages_has_round_ages_and_one_of_sizes_begins_at_zero() -> None:
    drawn = plot([[Point(-3600.0 * hours, 5.0 + hours, "") for hours in range(15)]], ages=True, from_zero=True)
    assert [tick.label for tick in drawn.x_ticks] == ["12h ago", "9h ago", "6h ago", "3h ago", "now"]
    assert drawn.y_ticks[0].label == "0"
    for largest, last in ((700 << 20, "600 MiB"), (5 << 28, "1.0 GiB"), (5 << 40, "4.0 TiB"), (3, "3 B")):
        drawn = plot([[Point(0, 0.0, ""), Point(1, largest, "")]], human.size)
        assert drawn.y_ticks[-1].label == last


@pytest.mark.parametrize("values", [[sys.float_info.max], [1e308, sys.float_info.max], [5e-324, sys.float_info.max]])
def test_a_logarithmic_axis_has_labels_up_to_the_largest_number(values: list[float]) -> None:
    drawn = plot([[Point(step, value, "") for step, value in enumerate(values)]], log=True)
    assert drawn.y_ticks
    assert len(drawn.lines[0].marks) == len(values)


def test_a_long_line_is_thinned_but_keeps_its_ends() -> None:
    marks = plot([[Point(step, -step, str(step)) for step in range(5000)]]).lines[0].marks
    assert (len(marks), marks[0].title, marks[-1].title) == (300, "0", "4999")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [((0, 1000), ["0", "200", "400", "600", "800", "1k"]), ((7,), ["7"]), ((1, 3), ["1", "2", "3"])],
)
def test_axes_have_round_numbers(steps: tuple[int, ...], expected: list[str]) -> None:
    assert [tick.label for tick in plot([[Point(step, 0, "") for step in steps]]).x_ticks] == expected


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (0.00001, "1e-05"), (0.25, "0.25"), (1500, "1.5k"), (-2e6, "-2M"), (1e30, "1e+30"), (math.inf, "inf")],
)
def test_numbers_are_compact(number: float, text: str) -> None:
    assert compact(number) == text


@given(st.lists(ANY_FLOAT, max_size=20))
def test_a_sparkline_stays_in_its_box(values: list[float]) -> None:
    spark = sparkline(values)
    points = [tuple(map(float, point.split(","))) for point in (spark.points if spark else "").split()]
    assert len(points) in (0, sum(map(math.isfinite, values)))
    assert all(2 <= x <= 118 and 2 <= y <= 22 for x, y in points)


def test_a_file_has_title_legend_dots_and_notes_and_is_valid_whatever_the_names() -> None:
    drawn = plot([[Point(1, 2.0, "a<b"), Point(2, 3.0, "")], [Point(2, 4.0, "NaN")]], width=400)
    root = ElementTree.fromstring(svg("loss & rms", drawn, ["<x>", "n" * 60], ["note"]))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    dots = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert texts[0] == "loss & rms"
    assert {"<x>", "…" + "n" * 43, "note"} <= set(texts)
    assert len(dots) == 2, "points without a title have none"
    assert all(drawn.left <= float(dot.attrib["cx"]) <= drawn.right for dot in dots)


def test_a_smoothed_line_follows_the_means_of_earlier_points() -> None:
    values = [0.0, 8.0, 8.0]
    flat, smooth = (plot([[Point(x, y, "") for x, y in enumerate(values)]], smooth=w).lines[0] for w in (0.0, 0.5))
    assert flat.smooth == flat.points == smooth.points
    bottom, top = flat.marks[0].y, flat.marks[1].y
    heights = [(bottom - float(place.partition(",")[2])) / (bottom - top) for place in smooth.smooth.split()]
    assert heights == pytest.approx([0, 2 / 3, 6 / 7], abs=0.01)  # the weights are 1; 1, 1/2; 1, 1/2, 1/4

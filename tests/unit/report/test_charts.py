"""Pictures hold their points, round ticks, and no markup of others."""

import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from retool_mcore.report.charts import (
    HEIGHT,
    MANY_POINTS,
    MOST_POINTS,
    WIDTH,
    Bar,
    LegendEntry,
    Line,
    bar_chart,
    line_chart,
    smoothed,
    thinned,
)
from retool_mcore.report.numbers import duration, number
from retool_mcore.report.watch import BLOCKS, sparkline

NUMBERS = st.floats(-1e12, 1e12, allow_subnormal=False)
SVG = "{http://www.w3.org/2000/svg}"


@given(values=st.lists(NUMBERS, min_size=1, max_size=200), start=st.integers(0, 10**6), from_zero=st.booleans())
def test_every_point_is_inside_the_picture(values: list[float], start: int, from_zero: bool):
    points = [(start + index, value) for index, value in enumerate(values)]
    svg = line_chart([Line(label="a", points=points)], from_zero=from_zero, title="t")
    tree = ElementTree.fromstring(svg)
    paths = [path.attrib["d"] for path in tree.iter(f"{SVG}path")]
    assert len(paths) == (2 if len(points) >= MANY_POINTS else 1)
    for path in paths:
        places = [[float(each) for each in pair.split()] for pair in re.split("[ML]", path)[1:]]
        assert len(places) == len(points)
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)


def test_a_higher_value_is_drawn_higher_and_a_later_step_further_right():
    svg = line_chart([Line(label="a", points=[(1, 0.0), (2, 1.0), (4, 0.5)])], title="t")
    path = next(ElementTree.fromstring(svg).iter(f"{SVG}path")).attrib["d"]
    (x1, y1), (x2, y2), (x3, y3) = ([float(each) for each in pair.split()] for pair in re.split("[ML]", path)[1:])
    assert y2 < y3 < y1 and abs((x3 - x2) - 2 * (x2 - x1)) < 0.5


def test_ticks_are_round_and_hold_all_values():
    svg = line_chart([Line(label="a", points=[(1, 0.34), (24, 0.94)])], title="t")
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert texts == ["0", "0.25", "0.5", "0.75", "1", "1", "10", "20", "24"]


def test_names_cannot_bring_markup_into_a_picture():
    hostile = "</text></svg><script>alert(1)</script>\"'"
    for svg in (
        line_chart([Line(label=hostile, points=[(1, 1.0)])], [LegendEntry(label=hostile, colour=0)], title=hostile),
        bar_chart([Bar(label=hostile, value=1.0, text=hostile)], title=hostile),
    ):
        assert "<script" not in svg
        assert ElementTree.fromstring(svg).attrib["aria-label"] == hostile


@given(values=st.lists(st.floats(0, 1e9), max_size=20))
def test_bars_are_as_long_as_their_values_and_stay_inside(values: list[float]):
    bars = [Bar(label="b", value=value, text="t") for value in values]
    widths = [
        float(rect.attrib["width"]) for rect in ElementTree.fromstring(bar_chart(bars, title="")).iter(f"{SVG}rect")
    ]
    assert len(widths) == len(values) and all(1 <= width <= WIDTH for width in widths)
    assert all(
        a <= b for (x, a) in zip(values, widths, strict=True) for (y, b) in zip(values, widths, strict=True) if x <= y
    )


def test_a_running_mean_lies_within_its_window():
    points = [(step, float(step % 2)) for step in range(200)]
    assert all(0.3 < value < 0.7 for _, value in smoothed(points))
    assert [step for step, _ in smoothed(points)] == [step for step, _ in points]


def test_a_long_run_stays_small_and_keeps_its_peaks():
    points = [(step, 1.0) for step in range(50_000)]
    points[31_234] = (31_234, 9.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS and (31_234, 9.0) in kept and kept == sorted(kept)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert thinned(points[:MOST_POINTS]) == points[:MOST_POINTS]


@given(values=st.lists(NUMBERS, min_size=1, max_size=500), width=st.integers(1, 60))
def test_a_sparkline_has_the_lowest_and_the_highest_block_and_its_width(values: list[float], width: int):
    line = sparkline(values, width)
    assert len(line) == min(width, len(values)) and set(line) <= set(BLOCKS)
    if len(values) <= width and len(set(values)) > 1:
        assert line[values.index(max(values))] == BLOCKS[-1] and line[values.index(min(values))] == BLOCKS[0]


def test_numbers_and_times_read_as_a_person_writes_them():
    assert [number(each) for each in (0.0, 0.34375, 12345.6, 1e-9, 4.2e9, -0.5)] == [
        *("0", "0.3438", "12,346", "1.00e-9", "4.20e9", "-0.5")
    ]
    assert [duration(each) for each in (0.24, 5.8, 45, 59.9, 750, 11_100, 187_200)] == [
        *("0.24 s", "5.8 s", "45 s", "60 s", "12 min 30 s", "3 h 5 min", "2 d 4 h")
    ]

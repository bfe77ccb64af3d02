"""SVG charts for reports: line charts over steps, and bar charts.

Each SVG works both as a separate file and inside HTML, where the page's colours apply. This module
computes the layout; the templates escape all texts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from retool_mcore.report.document import environment
from retool_mcore.report.numbers import number

WIDTH, HEIGHT = 400.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 14.0, 12.0, 24.0
LEGEND_HEIGHT = 18.0
TICKS = 4
MANY_POINTS = 80  # lines with this many points also get a running mean
MAX_POINTS = 800  # per line; a chart has fewer pixel columns than this
DASHES = ("", "5 3", "1.5 3")
COLOURS = ("#2f6f9f", "#c2703d", "#5b8c5a", "#8a6fae", "#a8873a", "#6b7885")
BAR_HEIGHT, BAR_GAP, BAR_LABEL, BAR_VALUE = 14.0, 8.0, 150.0, 96.0
LEGEND_GAP = 34.0
LETTER = 5.6  # approximate width of a character at the charts' font size


@dataclass(frozen=True, kw_only=True)
class Line:
    """Values over steps. ``style``: 0 solid, 1 dashed, 2 dotted."""

    label: str
    points: Sequence[tuple[int, float]]
    colour: int = 0
    style: int = 0


@dataclass(frozen=True, kw_only=True)
class LegendEntry:
    """An entry of the legend. Without a colour, it explains only a line style."""

    label: str
    colour: int | None
    style: int = 0


@dataclass(frozen=True, kw_only=True)
class Bar:
    label: str
    value: float
    text: str
    colour: int = 0


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """A line in chart coordinates, as SVG path data."""

    path: str
    mean: str
    end: tuple[float, float]
    colour: str
    index: int
    dash: str
    tip: str


@dataclass(frozen=True, kw_only=True)
class _Axis:
    low: float
    high: float
    ticks: Sequence[float] = field(default_factory=tuple[float, ...])

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def line_chart(
    lines: Sequence[Line],
    legend: Sequence[LegendEntry] = (),
    *,
    from_zero: bool = True,
    least: float = 0.0,
    title: str,
) -> Markup:
    """Draw lines over steps. Each line needs at least one point, and all values must be finite.

    ``least``: minimum range of the y axis, so that noise does not look like a trend.
    """
    values = [value for line in lines for _, value in line.points]
    steps = [step for line in lines for step, _ in line.points]
    low, high = min([0.0, *values] if from_zero else values), max(values)
    y = _axis(low, max(high, low + least))
    first, last = min(steps), max(steps)
    x = _Axis(low=first, high=last if last > first else first + 1)
    top = TOP + (LEGEND_HEIGHT if legend else 0.0)

    def place(step: float, value: float) -> tuple[float, float]:
        across = LEFT + x.share(step) * (WIDTH - LEFT - RIGHT)
        return round(across, 1), round(top + (1 - y.share(value)) * (HEIGHT - top - BOTTOM), 1)

    drawn = [
        _Drawn(
            path=_path([place(*point) for point in thinned(line.points)]),
            mean=_path([place(*point) for point in thinned(smoothed(line.points))])
            if len(line.points) >= MANY_POINTS
            else "",
            end=place(*line.points[-1]),
            colour=colour(line.colour),
            index=line.colour % len(COLOURS),
            dash=DASHES[line.style],
            tip=f"{line.label}: {number(line.points[-1][1])} at step {line.points[-1][0]}",
        )
        for line in lines
    ]
    return Markup(
        environment()
        .get_template("lines.svg.jinja")
        .render(
            width=WIDTH,
            height=HEIGHT,
            title=title,
            lines=drawn,
            legend=_legend(legend),
            rows=[(place(first, tick)[1], number(tick)) for tick in y.ticks],
            columns=[(place(step, y.low)[0], step) for step in _step_ticks(first, last)],
            left=LEFT,
            right=WIDTH - RIGHT,
            bottom=HEIGHT - BOTTOM,
        )
    )


def bar_chart(bars: Sequence[Bar], *, title: str = "") -> Markup:
    """Draw horizontal bars in the given order. Values must be >= 0."""
    longest = max((bar.value for bar in bars), default=0.0) or 1.0
    room = WIDTH - BAR_LABEL - BAR_VALUE
    rows = [
        {
            "y": index * (BAR_HEIGHT + BAR_GAP),
            "width": round(max(1.0, bar.value / longest * room), 1),
            "bar": bar,
            "colour": colour(bar.colour),
            "index": bar.colour % len(COLOURS),
        }
        for index, bar in enumerate(bars)
    ]
    height = max(1.0, len(bars) * (BAR_HEIGHT + BAR_GAP))
    template = environment().get_template("bars.svg.jinja")
    sizes = {"width": WIDTH, "height": height, "left": BAR_LABEL, "thick": BAR_HEIGHT}
    return Markup(template.render(title=title, rows=rows, **sizes))


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the centred running mean over one twentieth of the points."""
    reach = max(1, len(points) // 40)
    out: list[tuple[int, float]] = []
    for index, (step, _) in enumerate(points):
        window = [value for _, value in points[max(0, index - reach) : index + reach + 1]]
        out.append((step, sum(window) / len(window)))
    return out


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Reduce to at most MAX_POINTS: the ends, and the minimum and maximum of each interval."""
    if len(points) <= MAX_POINTS:
        return list(points)
    stretches = MAX_POINTS // 2 - 1
    kept = {0, len(points) - 1}
    for index in range(stretches):
        stretch = range(len(points) * index // stretches, len(points) * (index + 1) // stretches)
        kept |= {min(stretch, key=lambda each: points[each][1]), max(stretch, key=lambda each: points[each][1])}
    return [points[index] for index in sorted(kept)]


def _axis(low: float, high: float) -> _Axis:
    """Return an axis that covers ``low`` to ``high``, with about TICKS round tick values."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(power * step for step in (1, 2, 2.5, 5, 10) if power * step >= rough * 0.999)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return _Axis(low=first * size, high=last * size, ticks=[tick * size for tick in range(first, last + 1)])


def _step_ticks(first: int, last: int) -> list[int]:
    if last - first < 2:
        return sorted({first, last})
    axis = _axis(first, last)
    inner = [int(tick) for tick in axis.ticks if tick == int(tick) and first < tick < last]
    margin = (last - first) / 12
    return [first, *(tick for tick in inner if first + margin < tick < last - margin), last]


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in places)


def _legend(keys: Sequence[LegendEntry]) -> list[dict[str, object]]:
    """Lay out the legend's entries from left to right; truncate labels that do not fit."""
    out: list[dict[str, object]] = []
    at = LEFT
    each = (WIDTH - RIGHT - LEFT) / max(1, len(keys))
    crowded = sum(len(key.label) * LETTER + LEGEND_GAP for key in keys) > WIDTH - RIGHT - LEFT
    for key in keys:
        fits = not crowded or len(key.label) * LETTER + LEGEND_GAP <= each
        shown = key.label if fits else f"{key.label[: max(1, int((each - LEGEND_GAP) / LETTER) - 1)]}…"
        out.append({"x": round(at, 1), "text": shown, "stroke": _stroke(key.colour), "dash": DASHES[key.style]})
        at += len(shown) * LETTER + LEGEND_GAP
    return out


def _stroke(index: int | None) -> str:
    return "var(--quiet, #66707c)" if index is None else f"var(--series-{index % len(COLOURS)}, {colour(index)})"

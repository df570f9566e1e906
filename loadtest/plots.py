"""Line plots as SVG text, drawn here so that a report needs nothing but a browser.

Knows numbers and labels, no requests. A plot is one <svg> of WIDTH x HEIGHT; `sheet` puts several
into one picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 290
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 42
COLOURS = (
    "#2563ab", "#d1651a", "#2c8a53", "#a23b72", "#7a5cc0", "#8c6d1f", "#3b8ea5", "#c0392b",
)  # fmt: skip
INK, PALE, PAPER = "#24292f", "#e3e6ea", "#ffffff"
FONT = "font-family='system-ui, -apple-system, Segoe UI, sans-serif'"
LEGEND_MAX = 8
TICKS = 5
NAME_PX = 5.0  # of a letter beside a dot, about
LOG_TICKS_MAX = 9
LOG_SPAN_MIN = 20.0  # a smaller range is read more easily on a linear scale


@dataclass(frozen=True)
class Series:
    """A line, or dots, with its label; `marks` are dots on a line. Points are (x, y), in the order
    in which they are joined; `names`, if any, are written beside them, one each."""

    label: str
    points: Sequence[tuple[float, float]]
    dots: bool = False
    marks: bool = False
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Plot:
    """What to draw. With `log_x` the x axis is logarithmic if values are spread that far; `y_max`
    sets the upper end of the y axis, which begins at 0."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    y_max: float | None = None


@dataclass(frozen=True)
class _Axis:
    """From values to pixels."""

    low: float
    high: float
    first_px: float
    last_px: float
    log: bool = False

    def px(self, value: float) -> float:
        low, high = self._bent(self.low), self._bent(self.high)
        share = (self._bent(value) - low) / (high - low)
        return self.first_px + share * (self.last_px - self.first_px)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high)

    def _bent(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.log else value


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high."""
    raw = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [(first + number) * step for number in range(count)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    every = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    found = [tick for tick in every if low * 0.999 <= tick <= high * 1.001]
    return found[:: -(-len(found) // LOG_TICKS_MAX)] if found else []


def _shown(value: float) -> str:
    """A tick's number, short."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:,.4g}k"
    return f"{value:.4g}"


def _x_axis(plot: Plot, values: Sequence[float]) -> _Axis:
    low, high = min(values), max(values)
    positive = [value for value in values if value > 0]
    if plot.log_x and positive and high / min(positive) >= LOG_SPAN_MIN:
        low = min(positive)
        return _Axis(low, high, LEFT, WIDTH - RIGHT, log=True)
    low = min(0.0, low)
    return _Axis(low, high if high > low else low + 1.0, LEFT, WIDTH - RIGHT)


def _y_axis(plot: Plot, values: Sequence[float]) -> _Axis:
    high = plot.y_max if plot.y_max is not None else max(values) * 1.06
    return _Axis(0.0, high if high > 0 else 1.0, HEIGHT - BOTTOM, TOP)


def _text(x: float, y: float, words: str, *, size: int = 11, more: str = "") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{INK}' {FONT} {more}>"
        f"{escape(words)}</text>"
    )


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts = []
    for tick in y_axis.ticks():
        y = y_axis.px(tick)
        parts.append(f"<path d='M{LEFT} {y:.1f}H{WIDTH - RIGHT}' stroke='{PALE}'/>")
        parts.append(_text(LEFT - 6, y + 4, _shown(tick), more="text-anchor='end'"))
    for tick in x_axis.ticks():
        x = x_axis.px(tick)
        parts.append(f"<path d='M{x:.1f} {TOP}V{HEIGHT - BOTTOM}' stroke='{PALE}'/>")
        parts.append(_text(x, HEIGHT - BOTTOM + 15, _shown(tick), more="text-anchor='middle'"))
    return parts


def _line(series: Series, x_axis: _Axis, y_axis: _Axis, colour: str) -> str:
    points = [(x_axis.px(x), y_axis.px(min(y, y_axis.high))) for x, y in series.points]
    marks = "".join(
        f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='{colour}'/>" for x, y in points
    ) + _names(series, points)
    if series.dots or len(points) == 1:
        return marks
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f"<polyline points='{joined}' fill='none' stroke='{colour}' stroke-width='1.8' "
        "stroke-linejoin='round'/>"
    ) + (marks if series.marks else "")


def _names(series: Series, points: Sequence[tuple[float, float]]) -> str:
    """Beside the dots, to their left where the plot ends."""
    parts = []
    for (x, y), name in zip(points, series.names, strict=False):
        end = x + 6 + NAME_PX * len(name) > WIDTH - RIGHT
        more = "text-anchor='end'" if end else ""
        parts.append(_text(x - 6 if end else x + 6, y - 5, name, size=9, more=more))
    return "".join(parts)


def _legend(series: Sequence[Series]) -> list[str]:
    """Labels from right to left above the plot's field, none for a single unnamed line."""
    named = [(number, one.label) for number, one in enumerate(series) if one.label]
    parts, x = [], float(WIDTH - RIGHT)
    for number, label in reversed(named[:LEGEND_MAX]):
        x -= 6.2 * len(label) + 18
        if x < LEFT + 90:
            break
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f"<rect x='{x:.1f}' y='13' width='10' height='10' fill='{colour}'/>")
        parts.append(_text(x + 13, 22, label, size=10))
    return parts


def svg(plot: Plot) -> str:
    """One plot; without any points it says so."""
    points = [point for series in plot.series for point in series.points]
    parts = [f"<rect width='{WIDTH}' height='{HEIGHT}' fill='{PAPER}'/>"]
    parts.append(_text(10, 22, plot.title, size=13, more="font-weight='600'"))
    if points:
        x_axis = _x_axis(plot, [x for x, _ in points])
        y_axis = _y_axis(plot, [y for _, y in points])
        parts += _grid(x_axis, y_axis)
        for number, series in enumerate(plot.series):
            parts.append(_line(series, x_axis, y_axis, COLOURS[number % len(COLOURS)]))
        parts += _legend(plot.series)
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, plot.x_label,
                           more="text-anchor='middle'"))  # fmt: skip
        middle_px = (TOP + HEIGHT - BOTTOM) / 2
        turned = f"text-anchor='middle' transform='rotate(-90 13 {middle_px:.1f})'"
        parts.append(_text(13, middle_px, plot.y_label, more=turned))
    else:
        middle = "text-anchor='middle'"
        parts.append(_text(WIDTH / 2, HEIGHT / 2, "not known for this run", more=middle))
    return _framed(WIDTH, HEIGHT, parts)


def sheet(plots: Sequence[Plot], title: str, columns: int = 3) -> str:
    """All plots in one picture under a title."""
    head, gap = 34, 8
    count = -(-len(plots) // columns)
    width = columns * WIDTH + (columns + 1) * gap
    height = head + count * (HEIGHT + gap)
    parts = [f"<rect width='{width}' height='{height}' fill='{PALE}'/>"]
    parts.append(_text(gap + 4, 23, title, size=14, more="font-weight='600'"))
    for number, plot in enumerate(plots):
        x = gap + number % columns * (WIDTH + gap)
        y = head + number // columns * (HEIGHT + gap)
        parts.append(f"<g transform='translate({x} {y})'>{svg(plot)}</g>")
    return _framed(width, height, parts)


def _framed(width: int, height: int, parts: Sequence[str]) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}' role='img'>{''.join(parts)}</svg>"
    )

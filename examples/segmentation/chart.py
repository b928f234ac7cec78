# SPDX-License-Identifier: Apache-2.0
"""Line charts as inline SVG, coloured by the page's style sheet; axes for other charts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

# Size in the chart's own units; the page scales it. Text of 13 units stays legible on a phone.
WIDTH, HEIGHT = 440, 300
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 12, 40

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line, and the name under which the legend has it."""

    name: str
    points: list[Point]


@dataclass(frozen=True)
class Axis:
    """A range of values laid over a range of chart units."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Where a value lies, in chart units."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """About five round numbers within the range.

        Example:
            >>> Axis(0.0, 0.23, 0, 100).ticks()
            [0.0, 0.05, 0.1, 0.15, 0.2]
        """
        step = _round_step((self.high - self.low) / 6)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [round(i * step, 10) for i in range(first, last + 1)]


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(
        factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9)
    )


def line_chart(x_label: str, y_label: str, series: list[Series]) -> str:
    """Draws lines over axes; the y axis begins at 0 where no value is below it.

    Returns:
        An `svg` element; line number i has the class `series-i`.
    """
    points = [point for line in series for point in line.points]
    x = _axis([point[0] for point in points], LEFT, WIDTH - RIGHT)
    y = _axis([point[1] for point in points], HEIGHT - BOTTOM, TOP)
    lines = [_line(line, i, x, y) for i, line in enumerate(series)]
    return svg(y_label, [*frame(x, y, x_label), *lines])


def svg(name: str, parts: list[str]) -> str:
    """Joins the parts of a chart into an element that has a name for those who cannot see it."""
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">'
    return "".join([head, *parts, "</svg>"])


def frame(x: Axis, y: Axis, x_label: str) -> list[str]:
    """Draws what every chart has: rules, the numbers of both axes, and the name of the x axis."""
    return [
        *(_horizontal_rule(y.place(tick), f"{tick:g}") for tick in y.ticks()),
        *(text(x.place(tick), HEIGHT - BOTTOM + 18, "middle", f"{tick:g}") for tick in x.ticks()),
        text(LEFT, HEIGHT - 5, "start", x_label),
    ]


def text(x: float, y: float, anchor: str, content: str) -> str:
    """Draws a line of text whose baseline is at y."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _axis(values: list[float], start: float, end: float) -> Axis:
    low, high = min(0.0, *values), max(values)
    return Axis(low, high if high > low else low + 1, start, end)


def _horizontal_rule(y: float, label: str) -> str:
    rule = f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return rule + text(LEFT - 6, y + 4, "end", label)


def _line(line: Series, index: int, x: Axis, y: Axis) -> str:
    places = " ".join(f"{x.place(a):.1f},{y.place(b):.1f}" for a, b in line.points)
    return (
        f'<polyline class="series-{index}" points="{places}">'
        f"<title>{escape(line.name)}</title></polyline>"
    )

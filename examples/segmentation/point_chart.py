# SPDX-License-Identifier: Apache-2.0
"""Charts of named points with error bars as inline SVG."""

from __future__ import annotations

from dataclasses import dataclass

from chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, frame, svg, text
from outcomes import Spread

# In the chart's units.
RADIUS = 5.0
LETTER_WIDTH = 7.2
LINE_HEIGHT = 15.0
LABEL_GAP = 5.0
BASELINE = 4.0  # below the middle of a line of text

# Lines of text above and below a point where its name may stand.
ROWS = HEIGHT // int(LINE_HEIGHT)

# How far the axes reach beyond the points, as a share of the points' range.
MARGIN = 0.12


@dataclass(frozen=True)
class Mark:
    """A point, and the name that stands beside it."""

    name: str
    x: Spread
    y: Spread


@dataclass(frozen=True)
class Box:
    """A rectangle that something is drawn in."""

    left: float
    right: float
    top: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Whether the two overlap."""
        beside = self.right < other.left or other.right < self.left
        return not (beside or self.bottom < other.top or other.bottom < self.top)

    def within(self, other: Box) -> bool:
        """Whether the other one holds it."""
        beside = self.left < other.left or self.right > other.right
        return not (beside or self.top < other.top or self.bottom > other.bottom)


PLOT = Box(LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM)


@dataclass(frozen=True)
class Cross:
    """A point and the ends of its error bars, in chart units."""

    x: float
    y: float
    bars: Box

    def boxes(self) -> list[Box]:
        """What it covers: the point and both bars."""
        return [
            Box(self.x - RADIUS, self.x + RADIUS, self.y - RADIUS, self.y + RADIUS),
            Box(self.bars.left, self.bars.right, self.y, self.y),
            Box(self.x, self.x, self.bars.top, self.bars.bottom),
        ]


def point_chart(x_label: str, y_label: str, marks: list[Mark]) -> str:
    """Draws points over an x axis that begins at 0 and a y axis that fits them.

    Returns:
        An `svg` element; point number i has the class `series-i`.
    """
    x = _axis([0.0, *_ends([mark.x for mark in marks])], LEFT, WIDTH - RIGHT)
    y = _axis(_ends([mark.y for mark in marks]), HEIGHT - BOTTOM, TOP)
    crosses = [_cross(mark, x, y) for mark in marks]
    names = [mark.name for mark in marks]
    labels = zip(names, crosses, place_labels(names, crosses), strict=True)
    parts = [
        *frame(x, y, x_label),
        *(_label(name, cross, box) for name, cross, box in labels),
        *(_error_bars(i, cross) for i, cross in enumerate(crosses)),
        *(_point(i, cross) for i, cross in enumerate(crosses)),
    ]
    return svg(f"{y_label}, {x_label}", parts)


def place_labels(names: list[str], crosses: list[Cross]) -> list[Box]:
    """Finds each name a place near its point where it covers no point, no bar and no other name.

    Right of the point is best, then left; then further and further above and below. Where all
    of the chart is full it stands right of the point.
    """
    taken = [box for cross in crosses for box in cross.boxes()]
    labels = []
    for name, cross in zip(names, crosses, strict=True):
        candidates = _candidates(len(name) * LETTER_WIDTH, cross)
        free = (box for box in candidates if box.within(PLOT) and not any(map(box.meets, taken)))
        labels.append(next(free, candidates[0]))
        taken.append(labels[-1])
    return labels


def _candidates(width: float, cross: Cross) -> list[Box]:
    rows = sorted(range(-ROWS, ROWS + 1), key=lambda row: (abs(row), row))
    right = max(cross.x + RADIUS, cross.bars.right) + LABEL_GAP
    left = min(cross.x - RADIUS, cross.bars.left) - LABEL_GAP - width
    return [
        Box(start, start + width, middle - LINE_HEIGHT / 2, middle + LINE_HEIGHT / 2)
        for middle in (cross.y + row * LINE_HEIGHT for row in rows)
        for start in (right, left)
    ]


def _ends(spreads: list[Spread]) -> list[float]:
    return [end for spread in spreads for end in _bar(spread)]


def _bar(spread: Spread) -> tuple[float, float]:
    deviation = spread.deviation or 0.0
    return spread.mean - deviation, spread.mean + deviation


def _axis(values: list[float], start: float, end: float) -> Axis:
    low, high = min(values), max(values)
    margin = MARGIN * (high - low) or 0.5
    return Axis(low - margin, high + margin, start, end)


def _cross(mark: Mark, x: Axis, y: Axis) -> Cross:
    (left, right), (low, high) = _bar(mark.x), _bar(mark.y)
    bars = Box(x.place(left), x.place(right), y.place(high), y.place(low))
    return Cross(x.place(mark.x.mean), y.place(mark.y.mean), bars)


def _error_bars(index: int, cross: Cross) -> str:
    """A bar of one standard deviation to each side; without a deviation it has no length."""
    bars, style = cross.bars, f"series-{index}"
    return _line(style, bars.left, cross.y, bars.right, cross.y) + _line(
        style, cross.x, bars.top, cross.x, bars.bottom
    )


def _line(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _point(index: int, cross: Cross) -> str:
    return f'<circle class="series-{index}" cx="{cross.x:.1f}" cy="{cross.y:.1f}" r="{RADIUS}"/>'


def _label(name: str, cross: Cross, box: Box) -> str:
    """The name, and a line to its point where it stands in another row."""
    middle = (box.top + box.bottom) / 2
    edge, anchor = (box.left, "start") if box.left > cross.x else (box.right, "end")
    label = text(edge, middle + BASELINE, anchor, name)
    return label if middle == cross.y else _line("leader", cross.x, cross.y, edge, middle) + label

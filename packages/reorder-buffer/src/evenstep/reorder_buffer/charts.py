"""Small SVG charts for a page that may load nothing."""

import html
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Band", "Line", "bar_chart", "line_chart"]

_WIDTH, _HEIGHT = 860, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 96, 14, 30  # room for numbers, and for the lines' names
_MOST_POINTS = 400  # more than a screen shows; each is the largest of the windows it stands for
_BAR = 26


class Line(NamedTuple):
    """A curve over windows.

    Attributes:
        name: Written at its end.
        color: Any CSS color.
        values: One per window.
    """

    name: str
    color: str
    values: Sequence[float]


class Band(NamedTuple):
    """A horizontal bar.

    Attributes:
        name: Written before it.
        value: Its length.
        color: Any CSS color.
    """

    name: str
    value: float
    color: str


def line_chart(lines: Sequence[Line], *, low: float) -> str:
    """Return an SVG of curves over windows, from `low` upwards."""
    count = max(len(line.values) for line in lines)
    high = _rounded_up(max(max(line.values) for line in lines), low)
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(index: int) -> float:
        return _LEFT + (inner_width * index / (count - 1) if count > 1 else inner_width / 2)

    def y(value: float) -> float:
        return _TOP + inner_height * (1 - (value - low) / (high - low))

    parts = []
    for step in range(5):
        value = low + (high - low) * step / 4
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            'stroke="var(--line)"/>'
            f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>'
        )
    for index, anchor in ((0, "start"), (count - 1, "end")):
        parts.append(
            f'<text x="{x(index):.1f}" y="{_HEIGHT - 8}" text-anchor="{anchor}">'
            f"window {index}</text>"
        )
    label_heights = _apart([y(line.values[-1]) for line in lines])
    for line, label in zip(lines, label_heights, strict=True):
        points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in _thinned(line.values))
        marks = f'<circle cx="{x(0):.1f}" cy="{y(line.values[0]):.1f}" r="3" fill="{line.color}"/>'
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{line.color}" stroke-width="1.8" '
            f'stroke-linejoin="round"/>{marks if count == 1 else ""}'
            f'<text x="{x(len(line.values) - 1) + 8:.1f}" y="{label + 4:.1f}" '
            f'style="fill:{line.color}">{html.escape(line.name)}</text>'
        )
    return _svg(_HEIGHT, parts)


def bar_chart(bands: Sequence[Band]) -> str:
    """Return an SVG of horizontal bars with their values."""
    longest = max(*(band.value for band in bands), 1e-9)  # all may be 0
    start, room = 120, _WIDTH - 120 - 80
    parts = []
    for row, (name, value, color) in enumerate(bands):
        top, length = row * _BAR, room * value / longest
        parts.append(
            f'<text x="{start - 10}" y="{top + 17}" text-anchor="end">{html.escape(name)}</text>'
            f'<rect x="{start}" y="{top + 4}" width="{length:.1f}" height="{_BAR - 8}" rx="2" '
            f'fill="{color}"/>'
            f'<text x="{start + length + 8:.1f}" y="{top + 17}">{value:.2f}</text>'
        )
    return _svg(_BAR * len(bands), parts)


def _svg(height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _thinned(values: Sequence[float]) -> list[tuple[int, float]]:
    step = -(-len(values) // _MOST_POINTS)
    return [(i, max(values[i : i + step])) for i in range(0, len(values), step)]


def _rounded_up(value: float, low: float) -> float:
    """Return the end of an axis: low plus the next of 1, 2, 4, 6 or 8 times a power of ten."""
    span = max(value - low, 1e-3)
    power = 10.0 ** math.floor(math.log10(span))
    return low + power * next((step for step in (1, 2, 4, 6, 8) if step * power >= span), 10)


def _apart(heights: Sequence[float]) -> list[float]:
    """Return heights of labels that do not overlap, in the order given."""
    placed = [*heights]
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    for above, below in pairwise(order):
        placed[below] = max(placed[below], placed[above] + 14)
    return placed

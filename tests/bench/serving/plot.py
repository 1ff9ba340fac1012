"""A chart as SVG, drawn by hand: two axes and lines need no library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 40, 50
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Distinguishable for colour-blind readers: Okabe and Ito 2008."""
TICKS = 5
"""How many an axis has beyond zero, at most."""
ROUND = (1, 2, 5, 10)


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]


def chart(title: str, x_name: str, y_name: str, lines: Sequence[Line]) -> str:
    x_ticks = _ticks(max((x for line in lines for x, _ in line.points), default=0.0) or 1.0)
    y_ticks = _ticks(max((y for line in lines for _, y in line.points), default=0.0) or 1.0)
    right, top = x_ticks[-1], y_ticks[-1]

    def x_of(x: float) -> float:
        return LEFT + x / right * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        _text(WIDTH / 2, 20, title, "middle"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_name, "middle"),
        _text(LEFT, TOP - 8, y_name, "middle"),
        *(_grid(y_of(y), y) for y in y_ticks),
        *(_text(x_of(x), HEIGHT - BOTTOM + 18, f"{x:.3g}", "middle") for x in x_ticks),
    ]
    for n, line in enumerate(lines):
        parts += [_line(n, [(x_of(x), y_of(y)) for x, y in line.points]), _legend(n, line.name)]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _ticks(end: float) -> list[float]:
    """Round numbers from zero to the first one that is no less than `end`."""
    power = 10 ** math.floor(math.log10(end / TICKS))
    step = next(power * each for each in ROUND if power * each * TICKS >= end)
    return [step * n for n in range(math.ceil(end / step) + 1)]


def _grid(height: float, y: float) -> str:
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"'
        ' stroke="#ddd"/>' + _text(LEFT - 6, height + 4, f"{y:.3g}", "end")
    )


def _line(n: int, places: Iterable[tuple[float, float]]) -> str:
    colour = COLOURS[n % len(COLOURS)]
    at = [(round(x, 1), round(y, 1)) for x, y in places]
    path = " ".join(f"{x},{y}" for x, y in at)
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in at)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'


def _legend(n: int, name: str) -> str:
    x, y = WIDTH - RIGHT + 16, TOP + 10 + 20 * n
    square = (
        f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLOURS[n % len(COLOURS)]}"/>'
    )
    return square + _text(x + 16, y, name, "start")


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'

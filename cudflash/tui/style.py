"""Colours, glyphs and lines: the few things all panels draw with.

Owns the one theme. Must not know what is shown. Only the sixteen colours of the terminal are used
and no background, so light and dark terminals show what their owner has chosen; whatever a colour
says is also said by bold, underline, a number or a word.

A line is a list of Rich segments.
"""

from dataclasses import dataclass
from functools import cache

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

THEME = {
    "": "",
    "accepted": "green",
    "bonus": "bold magenta",
    "corrected": "underline red",
    "plain": "",
    "pending": "dim",
    "title": "bold",
    "dim": "dim",
    "good": "green",
    "bad": "bold red",
    "draft": "magenta",
    "verify": "blue",
    "decide": "cyan",
    "sink": "bold magenta",
    "window": "green",
}


@cache
def style(name):
    """Return the Rich style of a name of the theme."""
    return Style.parse(THEME[name])


@cache
def _segment(text, name):
    return Segment(text, style(name))


def line(*parts):
    """Return a line of parts: texts, or (text, name of a style)."""
    return [_segment(p, "") if isinstance(p, str) else _segment(*p) for p in parts]


def fitted(segments, width):
    """Crop or fill a line to a width in cells."""
    return Segment.adjust_line_length(segments, max(0, width), pad=True)


def length(segments):
    """Width of a line in cells."""
    return sum(cell_len(s.text) for s in segments)


@dataclass(frozen=True)
class Glyphs:
    """Characters to draw with: those of Unicode, or ASCII for terminals without."""

    rule: str
    eighths: str  # of a cell, filled from the left; the last one is full
    heights: str  # of a cell, filled from below; the last one is full
    floor: str  # a line at the lower edge of a cell
    dot: str
    ellipsis: str
    shades: str  # four textures that differ without colour


UNICODE = Glyphs("─", "▏▎▍▌▋▊▉█", "▁▂▃▄▅▆▇█", "▁", "·", "…", "█▓▒░")
ASCII = Glyphs("-", "#", "_-=#", "_", ".", ".", "#=+-")


def title(glyphs, width, *parts):
    """A rule with words in it."""
    head = line((glyphs.rule * 2 + " ", "dim"), *parts, " ")
    return [*head, _segment(glyphs.rule * max(0, width - length(head)), "dim")]


def bar(glyphs, width, share, name):
    """A horizontal bar of a share of ``width`` cells."""
    steps = len(glyphs.eighths)
    filled = round(min(max(share, 0.0), 1.0) * width * steps)
    if share > 0 and not filled:
        filled = 1  # something is not nothing
    whole, rest = divmod(filled, steps)
    text = glyphs.eighths[-1] * whole + (glyphs.eighths[rest - 1] if rest else "")
    return [_segment(text, name), _segment(" " * (width - len(text)), "")]


def stacked(glyphs, width, parts):
    """One bar of several shares that sum to 1: (share, shade, style), whole cells."""
    cells, edge, total = [], 0, 0.0
    for share, shade, name in parts:
        total += share
        end = min(width, round(total * width))
        if share > 0 and end == edge and edge < width:
            end += 1
        cells.append(_segment(glyphs.shades[shade] * max(0, end - edge), name))
        edge = max(edge, end)
    return [*cells, _segment(" " * (width - edge), "")]


def human_bytes(n_bytes):
    """Bytes for people."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def percent(share):
    """A share for people, four cells wide."""
    return f"{share:4.0%}"

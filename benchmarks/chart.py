"""A plain bar chart as SVG, readable on light and on dark pages."""

from __future__ import annotations

import math
from html import escape
from typing import NamedTuple

WIDTH, LABEL, LINE, PAD = 720, 210, 24, 16
STYLE = """
svg { color: #1f2328; font: 13px system-ui, sans-serif }
text { fill: currentColor } .title { font-weight: 600 } .axis { opacity: .7; font-size: 11px }
rect { fill: currentColor; opacity: .35 } .ours { fill: #0a6b5e; opacity: 1 }
line { stroke: currentColor; opacity: .15 }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3 } .ours { fill: #3fc1ad } }
"""


class Bar(NamedTuple):
    """One system."""

    label: str
    value: float
    is_ours: bool


class Panel(NamedTuple):
    """Bars that may be compared."""

    title: str
    bars: list[Bar]


def draw(title: str, panels: list[Panel]) -> str:
    """Return the chart; each panel has a logarithmic axis that 1 is on."""
    wide = WIDTH - LABEL - 70
    parts, y = [text(PAD, PAD + 8, title, "title")], PAD + 34
    for panel in panels:
        known = [math.log10(bar.value) for bar in panel.bars]
        first, last = min(0, math.floor(min(known))), max(1, math.ceil(max(known)))
        parts.append(text(PAD, y + 4, panel.title, "title"))
        top, y = y + 12, y + 12
        for bar in panel.bars:
            css = ' class="ours"' if bar.is_ours else ""
            parts.append(text(PAD, y + 16, bar.label))
            end = LABEL + max(2.0, wide * (math.log10(bar.value) - first) / (last - first))
            parts.append(f'<rect{css} x="{LABEL}" y="{y + 4}" width="{end - LABEL:.1f}" height="16" rx="2"/>')
            parts.append(text(end + 6, y + 16, f"{bar.value:.3g} x"))
            y += LINE
        for decade in range(first, last + 1):
            x = LABEL + wide * (decade - first) / (last - first)
            parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{y}"/>')
            parts.append(text(x, y + 13, f"{10.0**decade:g} x", "axis"))
        y += 44
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - 16}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def text(x: float, y: float, words: str, css: str = "") -> str:
    """Return a text element."""
    named = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y}"{named}>{escape(words)}</text>'

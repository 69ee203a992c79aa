# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A timeline as one self-contained SVG with one row per warp, for light and dark pages."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from kvarn.timeline.recording import Span, Timeline

# The palette of Okabe and Ito, which is safe for colour-blind readers; waits are grey.
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#7a5cc0")
WAITS = ("#9a9a9a", "#c4c4c4", "#777777")
LEFT, WIDTH, ROW, GAP, TOP = 120, 960, 14, 4, 34
_STYLE = """
text { font: 11px system-ui, sans-serif; fill: #222; } .axis { stroke: #999; } .rule { stroke: #ddd; }
@media (prefers-color-scheme: dark) { text { fill: #ddd; } .axis { stroke: #777; } .rule { stroke: #444; } }
"""


def colors(labels: list[str]) -> dict[str, str]:
    """A colour for each label; waits are grey."""
    found: dict[str, str] = {}
    for label in labels:
        palette = WAITS if label.startswith("wait") else COLORS
        taken = sum(color in palette for color in found.values())
        found[label] = palette[taken % len(palette)]
    return found


def _step(span: float) -> float:
    """A round tick distance that divides an axis into about ten."""
    step = 1.0
    while step * 10 < span:
        step *= 10 if step * 100 <= span else 2.5 if step * 25 >= span else 5
    return step


def chosen(timeline: Timeline, launch: int | None) -> list[Span]:
    """The spans of a launch, by default the longest."""
    lengths: dict[int, tuple[float, float]] = {}
    for s in timeline.spans:
        low, high = lengths.get(s.launch, (s.begin, s.end))
        lengths[s.launch] = min(low, s.begin), max(high, s.end)
    if launch is None:
        launch = max(lengths, key=lambda n: lengths[n][1] - lengths[n][0], default=0)
    elif launch not in lengths:
        raise ValueError(f"launch must be one of {', '.join(map(str, sorted(lengths))) or 'none'}, got {launch}")
    return [s for s in timeline.spans if s.launch == launch]


def drawing(timeline: Timeline, rows: int, launch: int | None) -> str:
    """The drawing of ``Timeline.svg``."""
    spans = chosen(timeline, launch)
    warps = sorted({(s.block, s.warp) for s in spans})[:rows]
    place = {warp: i for i, warp in enumerate(warps)}
    spans = [s for s in spans if (s.block, s.warp) in place]
    low = min((s.begin for s in spans), default=0.0)
    length = max((s.end for s in spans), default=1.0) - low or 1.0
    color = colors(sorted({s.label for s in spans}))
    scale = WIDTH / length
    bottom = TOP + len(warps) * (ROW + GAP)
    out: list[str] = []
    unit, per = ("instructions", 1.0) if timeline.unit == "instructions" else ("\u00b5s", 1e3)
    step, tick = _step(length), 0.0
    while tick <= length:
        x = LEFT + tick * scale
        out.append(f'<line class="rule" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}"/>')
        out.append(f'<text x="{x:.1f}" y="{TOP - 6}" text-anchor="middle">{tick / per:g}</text>')
        tick += step
    for (block, warp), i in place.items():
        y = TOP + i * (ROW + GAP)
        out.append(f'<text x="{LEFT - 8}" y="{y + ROW - 3}" text-anchor="end">block {block} warp {warp}</text>')
    for s in sorted(spans, key=lambda s: s.depth):
        y = TOP + place[s.block, s.warp] * (ROW + GAP) + min(s.depth, 3) * 3
        tip = f"{s.label}: {(s.end - s.begin) / per:.4g} {unit}, from {(s.begin - low) / per:.4g}"
        out.append(
            f'<rect x="{LEFT + (s.begin - low) * scale:.2f}" y="{y}" width="{max((s.end - s.begin) * scale, 0.3):.2f}" '
            f'height="{ROW - 2 * min(s.depth, 3) * 3 if s.depth < 2 else 4}" fill="{color[s.label]}">'
            f"<title>{escape(tip)}</title></rect>"
        )
    for i, (label, fill) in enumerate(color.items()):
        x, y = LEFT + i % 4 * (WIDTH // 4), bottom + 22 + i // 4 * 18
        out.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{fill}"/>')
        out.append(f'<text x="{x + 18}" y="{y}">{escape(label)}</text>')
    height = bottom + 40 + (len(color) + 3) // 4 * 18
    title = f"{spans[0].kernel}, launch {spans[0].launch}, {unit}" if spans else "nothing was traced"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" role="img">'
        f'<style>{_STYLE}</style><text x="8" y="14">{escape(title)}</text>{"".join(out)}</svg>\n'
    )

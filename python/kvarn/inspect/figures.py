# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""SVG drawings in the page's colours: the roofline, and lifetimes in shared memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from kvarn.dialect.chips import Gpu

from .shared import Block
from .source_map import Place

_WIDTH, _HEIGHT = 760, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 24, 16, 40
_LOWEST, _HIGHEST = -2.0, 4.0  # decades of operations per byte


@dataclass(frozen=True)
class Point:
    """A point of the roofline: a loop, or a run."""

    label: str
    intensity: float
    tensor: bool
    ran: bool = False


def roofline(roofs: Sequence[Gpu], points: Sequence[Point]) -> str:
    """The rooflines of GPUs, the first one labelled, with the points under them."""
    top = math.ceil(math.log10(max(r.tensor for r in roofs)))
    bottom = math.floor(math.log10(min(r.bandwidth for r in roofs)) + _LOWEST)

    def x(decades: float) -> float:
        return _LEFT + (decades - _LOWEST) / (_HIGHEST - _LOWEST) * (_WIDTH - _LEFT - _RIGHT)

    def y(decades: float) -> float:
        return _TOP + (top - decades) / (top - bottom) * (_HEIGHT - _TOP - _BOTTOM)

    out = [f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="roofline">']
    for d in range(int(_LOWEST), int(_HIGHEST) + 1):
        out.append(f'<path class="grid" d="M{x(d):.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
        out.append(f'<text class="tick" x="{x(d):.1f}" y="{_HEIGHT - 24}" text-anchor="middle">{10.0**d:g}</text>')
    for d in range(bottom, top + 1):
        out.append(f'<path class="grid" d="M{_LEFT} {y(d):.1f}H{_WIDTH - _RIGHT}"/>')
        out.append(f'<text class="tick" x="{_LEFT - 6}" y="{y(d) + 4:.1f}" text-anchor="end">{_rate(10.0**d)}</text>')
    out.append(
        f'<text class="tick" x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">'
        "floating-point operations per byte of device memory</text>"
    )
    for n, roof in reversed([*enumerate(roofs)]):
        for peak, kind in ((roof.tensor, "tensor"), (roof.vector, "vector")):
            ridge = math.log10(peak / roof.bandwidth)
            low = max(_LOWEST, bottom - math.log10(roof.bandwidth))
            start = f"M{x(low):.1f} {y(low + math.log10(roof.bandwidth)):.1f}L" if kind == "tensor" else "M"
            line = f"{start}{x(ridge):.1f} {y(math.log10(peak)):.1f}H{_WIDTH - _RIGHT}"
            out.append(f'<path class="roof {kind}{" other" if n else ""}" d="{line}"/>')
            if not n:
                what = "tensor cores, bf16" if kind == "tensor" else "float32"
                out.append(
                    f'<text class="name" x="{_WIDTH - _RIGHT}" y="{y(math.log10(peak)) - 5:.1f}" text-anchor="end">'
                    f"{what}: {_rate(peak)}</text>"
                )
    middle = (_LOWEST + 0.75, math.log10(roofs[0].bandwidth))
    out.append(
        f'<text class="name" x="{x(middle[0]):.1f}" y="{y(sum(middle)) - 8:.1f}" '
        f'transform="rotate({-_slope(x, y):.1f} {x(middle[0]):.1f} {y(sum(middle)) - 8:.1f})">'
        f"{escape(roofs[0].name)}: {roofs[0].bandwidth / 1e12:g} TB/s</text>"
    )
    for p in points:
        peak = roofs[0].tensor if p.tensor else roofs[0].vector
        at = min(max(math.log10(p.intensity), _LOWEST), _HIGHEST)
        high = min(math.log10(peak), at + math.log10(roofs[0].bandwidth))
        kind = "ran" if p.ran else "loop"
        out.append(
            f'<g class="{kind}"><title>{escape(p.label)}: {p.intensity:.3g} operations per byte</title>'
            f'<path d="M{x(at):.1f} {y(high):.1f}V{_HEIGHT - _BOTTOM}"/>'
            f'<circle cx="{x(at):.1f}" cy="{y(high):.1f}" r="{6 if p.ran else 4.5}"/></g>'
        )
    return "".join([*out, "</svg>"])


def _slope(x: Callable[[float], float], y: Callable[[float], float]) -> float:
    """The angle of a line of one decade by one."""
    return math.degrees(math.atan2(y(0) - y(1), x(1) - x(0)))


def _rate(rate: float) -> str:
    return f"{rate / 1e12:g}T" if rate >= 1e12 else f"{rate / 1e9:g}G"


_BAR, _ROW = 818, 26


def lifetimes(blocks: Sequence[Block], anchors: Sequence[str]) -> str:
    """One bar per block over the operations of its kernel, in program order, with a tick per use."""
    height = _ROW * len(blocks) + 18
    out = [f'<svg class="chart lives" viewBox="0 0 {_BAR + 2} {height}" role="img" aria-label="lifetimes">']
    out += [f'<path class="grid" d="M{1 + _BAR * q / 4:.1f} 0V{height - 18}"/>' for q in range(5)]
    for n, (block, anchor) in enumerate(zip(blocks, anchors, strict=True)):
        scale, top = _BAR / max(block.length, 1), n * _ROW
        begin, end = 1 + block.first * scale, 1 + (block.last + 1) * scale
        out.append(f'<g class="life"><title>{escape(anchor)}</title>')
        out.append(
            f'<rect x="{begin:.1f}" y="{top + 4}" width="{max(end - begin, 2):.1f}" height="{_ROW - 10}" rx="3"/>'
        )
        at = sorted({round(1 + use * scale, 1) for use, _ in block.uses})
        out += [f'<path d="M{u} {top + 4}v{_ROW - 10}"/>' for u in at]
        out.append("</g>")
    last = blocks[0].length if blocks else 0
    out.append(f'<text class="tick" x="1" y="{height - 3}">first operation</text>')
    out.append(f'<text class="tick" x="{_BAR}" y="{height - 3}" text-anchor="end">operation {last:,}</text></svg>')
    return "".join(out)


def places_of(block: Block) -> Iterator[Place]:
    """The source lines that use a block, each once, in program order."""
    yield from dict.fromkeys(place for _, place in block.uses if place is not None)


__all__ = ["Point", "lifetimes", "places_of", "roofline"]

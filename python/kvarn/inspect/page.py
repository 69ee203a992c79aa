# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The page of a kernel report: one HTML file with its style and script, which loads nothing else.

Tables and drawings are HTML. Code (sources, IR after each pass, PTX, machine code) is compressed data in the page, from
which the script builds the visible rows.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from kvarn._version import __version__
from kvarn.dialect.chips import Gpu

from . import figures, machine, work
from .describe import describe_abi, instruction_mix, sorted_mix
from .source_map import Chain, Line
from .stages import changed

if TYPE_CHECKING:
    from .facts import KernelReport

_AROUND = 4  # context lines of a source around the lines from which code was made
FRAME_HEIGHT = 900  # pixels of the page in a notebook


def page(report: KernelReport) -> str:
    """The page."""
    kernel = report.kernel
    title = f"{kernel.name} for {kernel.target}"
    data = base64.b64encode(gzip.compress(json.dumps(code_of(report)).encode(), mtime=0)).decode()
    sections = [s for s in _sections(report) if s[2]]
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in sections)
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title><style>{_file('page.css')}</style></head><body>",
        f"<header><h1>{escape(kernel.name)}</h1><p>{' · '.join(_facts(report))}</p><nav>{links}</nav></header><main>",
        *(f'<section id="{name}"><h2>{escape(title)}</h2>{body}</section>' for name, title, body in sections),
        "</main>",
        f"<footer>made by kvarn {__version__} from the compiled code; no GPU was asked</footer>",
        f'<script type="text/plain" id="data">{data}</script>',
        f"<script>{_file('page.js')}</script></body></html>\n",
    ]
    return "\n".join(parts)


def framed(report: KernelReport) -> str:
    """The page in an iframe, as notebooks display it, which isolates both style sheets."""
    return (
        f'<iframe srcdoc="{escape(page(report))}" title="{escape(report.kernel.name)}" '
        f'style="width:100%;height:{FRAME_HEIGHT}px;border:0" sandbox="allow-scripts"></iframe>'
    )


def _file(name: str) -> str:
    return resources.files("kvarn.inspect").joinpath(name).read_text(encoding="utf-8")


# --- code, as data ---------------------------------------------------------------------------------


class _Table:
    """Numbers distinct items."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, item: Any) -> int:
        if item not in self._numbers:
            self._numbers[item] = len(self.items)
            self.items.append(item)
        return self._numbers[item]


def code_of(report: KernelReport) -> dict[str, Any]:
    """The data of the script.

    Returns
    -------
    dict
        ``files`` (name, the end of the path, and ``lines``: number and text, None for omitted ones), ``chains``
        (lists of file number and line, innermost first), ``texts`` (distinct lines of IR), ``stages`` (name, reason,
        and ``rows`` of text and chain; None if nothing changed), ``ptx`` and ``sass`` (rows of text, chain, and the
        line number of the PTX), ``runs`` (executions by warps, by line number of the PTX), ``opens`` (the numbers of
        the file and the stage that are shown first).
    """
    chains, texts, files = _Table(), _Table(), list(report.sources)
    numbers = {file: n for n, file in enumerate(files)}

    def chain(of: Chain) -> int:
        known = tuple((numbers[file], line) for file, line in of if file in numbers)
        return chains.number(known) if known else -1

    stages, before = [], None
    for stage in report.stages:
        same = before is not None and stage.text == before.text
        rows = None if same else [[texts.number(line.text), chain(line.chain)] for line in stage.lines]
        stages.append({"name": stage.name, "reason": stage.reason, "rows": rows})
        before = stage

    def rows_of(lines: Iterable[Line]) -> list[list[Any]]:
        return [[line.text, chain(line.chain), line.number] for line in lines]

    ptx, sass = rows_of(report.ptx), rows_of(report.sass)
    used: dict[int, set[int]] = {}
    for known in chains.items:
        for file, line in known:
            used.setdefault(file, set()).add(line)
    shown = [
        {
            "name": _short(file),
            "path": "/".join(PurePath(file).parts[-3:]),
            "lines": list(_shown(text, used.get(n, set()))),
        }
        for n, (file, text) in enumerate(report.sources.items())
    ]
    return {
        "files": shown, "chains": chains.items, "texts": texts.items, "stages": stages, "ptx": ptx, "sass": sass,
        "runs": _runs(report), "opens": _opens(report, numbers), "noSass": report.no_sass, "noSource": report.no_source,
        "target": report.kernel.target,
    }  # fmt: skip


def _shown(text: Sequence[str], used: set[int]) -> Iterator[list[Any] | None]:
    """The lines of a source near the used ones; None for each omitted range."""
    kept = sorted({n for u in used for n in range(u - _AROUND, u + _AROUND + 1) if 1 <= n <= len(text)})
    before = kept[0] if kept else 0
    for n in kept:
        if n > before + 1:
            yield None
        yield [n, text[n - 1].expandtabs(4)]
        before = n


def _runs(report: KernelReport) -> dict[int, list[int]]:
    """By line of the PTX: executions by warps, sectors of device memory, bank conflicts."""
    found: dict[int, list[int]] = {}
    for name, counts in report.counts.items():
        conflicts = counts.wavefronts - counts.needed
        sectors = [0] * len(counts.warps)
        for (n, _), t in counts.traffic.items():
            sectors[n] += t.sectors
        for n, i in enumerate(report.parsed[name].code):
            if counts.warps[n] or sectors[n]:
                line = found.setdefault(i.line, [0, 0, 0])
                line[0] += int(counts.warps[n])
                line[1] += sectors[n]
                line[2] += int(conflicts[n])
    return found


def _opens(report: KernelReport, numbers: dict[str, int]) -> list[int]:
    """The file of the first kernel and the first stage that has it: the input of an operation has none."""
    for n, stage in enumerate(report.stages):
        for line in stage.lines:
            if line.text.lstrip().startswith("gpu.func"):
                known = [numbers[file] for file, _ in line.chain if file in numbers]
                return [known[-1] if known else 0, n]
    return [0, 0]


def _short(file: str) -> str:
    return PurePath(file).name if file != "-" else "input"


def _link(numbers: Mapping[str, int], file: str, line: int | str, text: str) -> str:
    """A link to a line of a source, if the page contains the source."""
    if file not in numbers:
        return escape(text)
    return f'<a href="#code" data-place="{numbers[file]}:{line}">{escape(text)}</a>'


# --- tables ------------------------------------------------------------------------------------------


def _sections(report: KernelReport) -> Iterator[tuple[str, str, str]]:
    yield "figures", "Figures", "".join(_figures(report))
    yield "code", "Code", _EXPLORER
    yield "passes", "Passes", "".join(_passes(report)) if report.stages else ""
    yield "remarks", "Remarks", "".join(_remarks(report))
    yield "shared", "Shared memory", "".join(_shared(report))
    yield "work", "Traffic and arithmetic", "".join(_work(report))
    yield "run", "A run in the emulator", "".join(_run(report))
    abi = "\n".join(describe_abi(report.kernel.artifact))
    yield "parameters", "Parameters", f"<pre>{escape(abi)}</pre>{_mix(report)}"


_EXPLORER = """<p class="hint">Click a line to highlight the lines that come from it or that it comes from.
<kbd>↑</kbd> <kbd>↓</kbd> move, <kbd>←</kbd> <kbd>→</kbd> change the column, <kbd>n</kbd> <kbd>p</kbd> go to the next
linked line, <kbd>[</kbd> <kbd>]</kbd> to another pass, <kbd>d</kbd> shows the changes of the pass, <kbd>1</kbd> to
<kbd>4</kbd> hide a column, <kbd>Esc</kbd> clears the selection.</p>
<div id="panes"></div><noscript><p class="problem">The code needs JavaScript.</p></noscript>"""


def _facts(report: KernelReport) -> Iterator[str]:
    kernel = report.kernel
    yield escape(kernel.target)
    if kernel.target == "host":
        return
    yield f"PTX ISA {escape(kernel.artifact.isa)}, {sum(instruction_mix(report.ptx_text).values()):,} instructions"
    if not report.no_figures:
        yield escape(report.assembled.tool)
    if report.stages:
        yield f"{report.run.seconds * 1e3:.0f} ms from kv IR to PTX"


def _figures(report: KernelReport) -> Iterator[str]:
    """Registers, shared memory and occupancy of each kernel."""
    if report.kernel.target == "host":
        yield "<p>The CPU's JIT compiles it on the first run.</p>"
        return
    if report.no_figures:
        yield f'<p class="problem">No registers, spills or occupancy: {escape(report.no_figures)}</p>'
    for entry in report.entries:
        cards = []
        of = report.figures_of(entry)
        if of is not None:
            cards.append(_card("registers", str(of.registers), "per thread, of 255", of.registers / 255))
            spilled = of.spill_stores + of.spill_loads
            cards.append(
                _card("spills", f"{spilled:,}", "bytes stored and loaded", 1.0 if spilled else 0.0, spilled > 0)
            )
        static = of.shared_bytes if of is not None else 0
        most = machine.by_name(report.kernel.target).shared_bytes
        total = entry.shared_bytes + static
        cards.append(_card("shared memory", f"{total:,}", f"bytes per block, of {most:,}", total / most))
        threads = report.threads_of(entry)
        cards.append(_card("threads", f"{threads:,}" if threads else "any", "per block"))
        found = report.occupancy(entry)
        if found is not None:
            text = f"{found.blocks} block{'s' * (found.blocks != 1)} on a multiprocessor, limit: {found.limit}"
            cards.append(_card("occupancy", f"{found.share:.0%}", text, found.share))
        elif of is not None:
            yield _by_threads(report, entry, of)
        title = f"<h3>{escape(entry.name)}</h3>" if len(report.entries) > 1 else ""
        yield f'{title}<div class="cards">{"".join(cards)}</div>'


def _by_threads(report: KernelReport, entry: Any, of: Any) -> str:
    """Occupancy for several block sizes, for a kernel that takes any."""
    bytes = of.shared_bytes + entry.shared_bytes
    each = [machine.occupancy(report.kernel.target, n, of.registers, bytes) for n in (32, 64, 128, 256, 512, 1024)]
    rows = [[f"{o.threads}", f"{o.blocks}", f"{o.share:.0%}", o.limit if o.blocks else "does not fit"] for o in each]
    return _table(("threads per block", "blocks per multiprocessor", "occupancy", "limit"), rows, numbers=3)


def _card(name: str, value: str, note: str, share: float | None = None, bad: bool = False) -> str:
    bar = "" if share is None else f'<i style="width:{min(share, 1):.1%}"></i>'
    return (
        f'<div class="card{" bad" if bad else ""}"><b>{escape(name)}</b><strong>{escape(value)}</strong>'
        f"<span>{escape(note)}</span><u>{bar}</u></div>"
    )


def _passes(report: KernelReport) -> Iterator[str]:
    """One row per pass; a click shows its changes."""
    stages = report.stages
    slowest = max(s.seconds for s in stages) or 1
    largest = max(s.counts.total() for s in stages)
    yield '<table class="passes"><thead><tr><th>pass<th class="n">ms<th class="n">operations<th>what changed</tr>'
    yield "</thead><tbody>"
    before = stages[0]
    for n, s in enumerate(stages):
        same = s is not before and s.text == before.text
        what = "" if s is before else changed(s, before)
        yield (
            f'<tr class="{"same" if same else ""}" data-stage="{n}" tabindex="0" title="{escape(s.reason)}">'
            f"<td>{escape(s.name)}<td class=n>{_bar(s.seconds / slowest)}{s.seconds * 1e3:.1f}"
            f"<td class=n>{_bar(s.counts.total() / largest)}{s.counts.total():,}<td>{escape(what)}</tr>"
        )
        before = s
    rest = report.run.seconds - sum(s.seconds for s in stages)
    if report.kernel.target != "host":
        yield f"<tr><td>to PTX, by LLVM<td class=n>{rest * 1e3:.1f}<td class=n><td></tr>"
    yield f"<tr><td>total<td class=n>{report.run.seconds * 1e3:.1f}<td class=n><td></tr></tbody></table>"


def _bar(share: float) -> str:
    return f'<i class="bar" style="width:{share * 44:.0f}px"></i>'


def _remarks(report: KernelReport) -> Iterator[str]:
    numbers = {file: n for n, file in enumerate(report.sources)}
    rows = []
    for r in sorted(report.remarks, key=lambda r: ("missed", "analysis", "passed").index(r.kind)):
        at = r.location
        link = "" if at is None else _link(numbers, at.file, at.line, f"{_short(at.file)}:{at.line}")
        times = f" ({r.count} times)" if r.count > 1 else ""
        rows.append([f'<em class="{r.kind}">{r.kind}</em>', escape(r.pass_name), link, escape(r.message + times)])
    if rows:
        yield _table(("kind", "pass", "line", "remark"), rows, raw=True)


def _shared(report: KernelReport) -> Iterator[str]:
    numbers = {file: n for n, file in enumerate(report.sources)}
    for entry in report.entries:
        blocks = [b for b in report.shared if b.kernel == entry.name]
        if not blocks:
            continue
        rows, anchors = [], []
        for b in blocks:
            places = list(figures.places_of(b))
            text = ""
            file, number = b.place or ("", 0)
            if file in numbers:
                line = "".join(report.sources[file][number - 1 : number]).strip()
                text = f"{_link(numbers, file, number, f'{_short(file)}:{number}')} <code>{escape(line)}</code>"
            rows.append([f"{b.offset:,}", f"{b.bytes:,}", f"{b.alignment}", f"{len(b.uses)}", text])
            names = ", ".join(f"{_short(f)}:{line}" for f, line in places[:6])
            anchors.append(f"{b.bytes:,} bytes at {b.offset:,}; used by {names}{', …' * (len(places) > 6)}")
        yield f"<h3>{escape(entry.name)}</h3>" if len(report.entries) > 1 else ""
        yield _table(("offset", "bytes", "aligned to", "uses", "allocated by"), rows, numbers=4, raw=True)
        yield "<p>From the first to the last use, in program order; a use in a loop lasts for the whole loop.</p>"
        yield figures.lifetimes(blocks, anchors)


def _work(report: KernelReport) -> Iterator[str]:
    """The roofline, the loops, and the memory per token of each cache."""
    if report.kernel.target == "host":
        return
    numbers = {PurePath(file).name: n for n, file in reversed([*enumerate(report.sources)])}
    roofs, points, rows = machine.roofs(report.kernel.target), [], []
    for name, (loops, outside) in report.loops.items():
        rows.append([f"{escape(name)}, outside of loops", *_worked(outside, roofs[0])])
        waits = [loop for loop in loops if loop.waits]
        for loop in (loop for loop in loops if not loop.waits):
            file, _, line = loop.source.rpartition(":")
            place = _link(numbers, file, line, loop.source or f"PTX line {loop.line}")
            rows.append(
                [f'<span style="margin-left:{loop.depth}em">loop at {place}</span>', *_worked(loop.work, roofs[0])]
            )
            if loop.work.intensity:
                points.append(
                    figures.Point(f"loop at {loop.source or loop.line}", loop.work.intensity, loop.work.tensor > 0)
                )
        if waits:
            rows.append([f"{len(waits)} loops that only wait at barriers", *[""] * 7])
    for name, counts in report.counts.items():
        done = work.ran(counts)
        rows.append([f"<b>{escape(name)}, as it ran</b>", *_worked(done, roofs[0])])
        if done.intensity:
            points.append(figures.Point(f"{name} as it ran", done.intensity, done.tensor > 0, True))
    yield figures.roofline(roofs, points)
    yield (
        "<p>Small points are loops: one iteration of the PTX, at the attainable rate of the roofline. A large point is "
        "the run in the emulator. Bytes are those that threads request: cache hits are unknown without a GPU. Peak "
        f"rates are data-sheet figures{_others(roofs)}.</p>"
    )
    head = ("per warp and iteration", "instructions", "bytes read", "written", "operations", "in tensor cores",
            "operations per byte", "bound by")  # fmt: skip
    yield _table(head, rows, numbers=-7, raw=True)
    unknown = sum(loop.work.unknown for loops, _ in report.loops.values() for loop in loops)
    unknown += sum(outside.unknown for _, outside in report.loops.values())
    if unknown:
        yield f"<p>{unknown} copies have a size that the PTX does not state; their bytes are not counted above.</p>"
    tokens = list(_tokens(report))
    if tokens:
        yield _table(("cache", "bytes per token", "sectors of 32 bytes", "page"), tokens, numbers=-3)


def _others(roofs: Sequence[Gpu]) -> str:
    return f"; dashed: {', '.join(escape(r.name) for r in roofs[1:])}" if len(roofs) > 1 else ""


def _worked(done: work.Work, roof: Gpu) -> list[str]:
    intensity = done.intensity
    if intensity is None:
        bound = "memory" if done.bytes else ""
    else:
        peak = roof.tensor if done.tensor else roof.vector
        bound = "memory" if intensity < peak / roof.bandwidth else "tensor cores" if done.tensor else "arithmetic"
    return [
        f"{done.instructions:,.0f}", f"{done.read:,.0f}", f"{done.written:,.0f}", f"{done.flops:,.0f}",
        f"{done.tensor / done.flops:.0%}" if done.flops else "", f"{intensity:.3g}" if intensity else "", bound,
    ]  # fmt: skip


def _tokens(report: KernelReport) -> Iterator[list[str]]:
    """The memory per token of each cache argument."""
    for arg in dict.fromkeys(a for entry in report.entries for a in entry.args if a.kind in ("cache", "collection")):
        spec: Any = arg.spec
        halves = 2 if arg.kind == "collection" and not spec.is_mla else 1
        row = spec.dtype.bytes_of(spec.row_size)
        if spec.scale_dtype is not None:
            row += spec.scales_token_stride * spec.scale_dtype.itemsize
        name = f"{arg.name} ({spec.kind}, {spec.dtype}, {spec.num_heads} x {spec.head_size})"
        paged = f"{spec.page_size} tokens, {halves * row * spec.page_size:,} bytes" if spec.page_size else ""
        yield [name, f"{halves * row:,}", f"{halves * -(-row // work.SECTOR):,}", paged]


def _run(report: KernelReport) -> Iterator[str]:
    """The emulator's counts."""
    run = report.report
    if run is None:
        return
    known = report.counts  # refuses a run of another kernel
    launched = ", ".join(f"{n} ({c.blocks:,} blocks)" for n, c in known.items())
    cards = [
        _card("instructions", f"{run.instructions:,}", f"of warps: {launched}"),
        _card("active lanes", f"{run.active_lanes:.1%}", "of a warp, on average", run.active_lanes),
        _card("divergent branches", f"{run.divergent_branches:,}", "taken both ways by a warp"),
        _card("bank conflicts", f"{run.bank_conflicts:,}", "wavefronts beyond those needed"),
        _card("hazards", f"{len(run.hazards)}", "races and unwritten reads", bad=bool(run.hazards)),
    ]
    yield f'<div class="cards">{"".join(cards)}</div>'
    traffic = [
        [name, *(f"{n:,}" for n in (t.read, t.read_sectors, t.written, t.written_sectors))]
        for name, t in run.traffic.items()
    ]
    yield _table(("device memory", "bytes read", "sectors", "written", "sectors"), traffic, numbers=-4)
    yield from (f'<p class="problem">{escape(str(h))}</p>' for h in run.hazards)


def _mix(report: KernelReport) -> str:
    if report.kernel.target == "host":
        return ""
    rows = [[name, f"{n:,}"] for name, n in sorted_mix(instruction_mix(report.ptx_text))]
    return f"<h3>Instructions of the PTX</h3>{_table(('instruction', 'times'), rows, numbers=-1)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0, raw: bool = False) -> str:
    """A table; the first columns are numbers, or, for a negative count, the last ones. ``raw`` cells are HTML."""

    def kind(n: int) -> str:
        return " class=n" if (n < numbers if numbers >= 0 else n >= len(head) + numbers) else ""

    out = ["<table><thead><tr>", *(f"<th{kind(n)}>{escape(h)}" for n, h in enumerate(head)), "</tr></thead><tbody>"]
    for row in rows:
        out += ["<tr>", *(f"<td{kind(n)}>{c if raw else escape(c)}" for n, c in enumerate(row)), "</tr>"]
    return "".join([*out, "</tbody></table>"])


__all__ = ["code_of", "framed", "page"]

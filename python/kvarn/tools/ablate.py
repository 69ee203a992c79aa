# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kvarn ablate``: the effect of each optional pass on a kernel.

The kernel is compiled with all passes, then with one pass omitted at a time, and run on random caches: in the emulator,
which counts instructions and sectors, or on a GPU, which measures time. Each variant must compute the same answer.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from kvarn.compilation.kernel import Kernel
from kvarn.emulator import EmulationError
from kvarn.emulator.report import Report
from kvarn.files import write_output

from . import random_inputs
from .bisect import source_of
from .cli import UsageError, add_kernel_options
from .input_options import add_input_options, values_of
from .pass_options import given_name, given_path, passes_of
from .random_inputs import Arguments, InputOptions
from .semantics import Launch, run_artifact

ALL = "nothing"  # omitted
COUNTS = ("instructions", "sectors", "bank conflicts", "registers", "µs")
Record = dict[str, Any]


def ablated(
    text: str, target: str, left_out: Sequence[str], inputs: InputOptions, launch: Launch,
    passes: Any = None, disable: Sequence[str] = (), on_gpu: bool = False,
) -> Iterator[Record]:  # fmt: skip
    """Measure IR with all passes, and with each of the given passes omitted.

    Yields
    ------
    dict
        ``"left out"``, the available metrics of ``COUNTS``, and ``"problem"``: "" if the answer is that of all passes.
    """
    compiler = importlib.import_module("kvarn.compilation.driver")
    shapes = random_inputs.buffer_shapes(compiler.parse(text))
    expected: dict[str, Any] | None = None
    for name in (ALL, *left_out):
        record: Record = {"left out": name, "problem": ""}
        try:
            without = [*disable, *([] if name == ALL else [name])]
            kernel = compiler.compile(text, target=target, passes=passes, disable=without)
            arguments = random_inputs.random_arguments(kernel.artifact.args, shapes, inputs)
            if on_gpu:
                arguments, record["µs"] = _timed(kernel, arguments, launch)
            else:
                report = Report(target, races=False)
                run_artifact(kernel.artifact, list(arguments.values()), launch, report)
                record |= {
                    "instructions": report.instructions,
                    "sectors": sum(report.sectors.values()),
                    "bank conflicts": report.bank_conflicts,
                }
                record |= _registers(kernel)
            memory = arguments if on_gpu else random_inputs.memory_of(arguments)
            answer = {n: a.copy() for n, a in memory.items()}
            if expected is None:
                expected = answer
            else:
                record["problem"] = next(
                    (f"{n}: {d}" for n, a in expected.items() if (d := random_inputs.difference(a, answer[n]))), ""
                )
        except (EmulationError, ValueError) as error:
            if expected is None:
                raise
            record["problem"] = str(error).splitlines()[0]
        yield record


def _registers(kernel: Kernel) -> Record:
    from kvarn.runtime import assemble

    try:
        return {"registers": kernel.stats["registers"]}
    except assemble.MissingToolError:
        return {}
    except assemble.AssemblyError as error:  # slow code, which the omitted pass may prevent
        said = [line.strip() for line in str(error).splitlines() if line.startswith("  ")]
        return {"note": (said or [str(error)])[0]}


def _timed(kernel: Kernel, arguments: Arguments, launch: Launch) -> tuple[dict[str, Any], float]:
    """The arguments after one run on the GPU, copied back to the host, and the time of a run in microseconds."""
    from kvarn.measure import arrays, timing

    library = arrays.TorchArrays("cuda")
    placed = random_inputs.placed(arguments, library.torch)
    given = list(placed.values())
    block = kernel.artifact.entries[0].block or launch.block
    if kernel.artifact.is_program:
        kernel(*given)
    else:
        kernel.launch(launch.grid, block, *given)
    library.torch.cuda.synchronize()
    found = random_inputs.fetched(placed)
    prepared = kernel.launcher.prepare(*(() if kernel.artifact.is_program else (launch.grid, block)), *given)
    return found, timing.timed(lambda layer: prepared(), 1, library)["us"]


def table(title: str, records: Sequence[Record]) -> Iterator[str]:
    """The metrics, each with its ratio to that of all passes."""
    names = [n for n in COUNTS if any(n in r for r in records)]
    width = max(len("left out"), *(len(r["left out"]) for r in records))
    yield title
    yield "  ".join([f"{'left out':{width}}", *(f"{n:>20}" for n in names)])
    whole = records[0]
    for r in records:
        cells = []
        for n in names:
            value = r.get(n)
            text = "" if value is None else f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
            base = whole.get(n)
            ratio = f" {value / base:7.3f}" if value is not None and base and r is not whole else " " * 8
            cells.append(f"{text:>12}{ratio}")
        problem = f"  WRONG: {r['problem']}" if r["problem"] else f"  {r['note']}" if "note" in r else ""
        yield ("  ".join([f"{r['left out']:{width}}", *cells]) + problem).rstrip()


_BAR, _LABEL, _SCALE = 14, 190, 220  # pixels: height of a bar, width of the labels, width of a ratio of 1
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756")


def plot(found: Mapping[str, Sequence[Record]], figure: str) -> str:
    """An SVG of bars: the ratio of a metric to that of all passes, by pass and kernel; the line is 1."""
    passes = list(dict.fromkeys(r["left out"] for records in found.values() for r in records[1:]))
    step = _BAR * len(found) + 6
    bars, most = [], 1.0
    for n, (place, records) in enumerate(found.items()):
        colour, base = _COLOURS[n % len(_COLOURS)], records[0].get(figure)
        bars.append(f'<text x="{_LABEL}" y="{14 + 14 * n}" fill="{colour}">{escape(place)}</text>')
        for r in records[1:]:
            if figure not in r or not base:
                continue
            ratio = r[figure] / base
            most = max(most, ratio)
            y = 24 + 14 * len(found) + passes.index(r["left out"]) * step + n * _BAR
            bars.append(
                f'<rect x="{_LABEL}" y="{y}" width="{ratio * _SCALE:.1f}" height="{_BAR - 2}" fill="{colour}"/>'
                f'<text x="{_LABEL + ratio * _SCALE + 4:.1f}" y="{y + 10}">{ratio:.3f}</text>'
            )
    top = 24 + 14 * len(found)
    height = top + step * len(passes) + 24
    names = [f'<text x="4" y="{top + i * step + 11}">{escape(p)}</text>' for i, p in enumerate(passes)]
    axis = f'<path d="M{_LABEL + _SCALE} {top - 4}V{height - 20}" stroke="#888" stroke-dasharray="3"/>'
    caption = f'<text x="{_LABEL}" y="{height - 6}">{escape(figure)} without the pass, relative to all passes</text>'
    width = _LABEL + most * _SCALE + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" font-family="sans-serif" '
        f'font-size="11" fill="#555">\n' + "\n".join([*names, *bars, axis, caption]) + "\n</svg>\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if a variant computed another answer."""
    parser = argparse.ArgumentParser(
        prog="kvarn ablate",
        description="Measure the effect of each optional pass on a kernel.",
        epilog="example: kvarn ablate kernels.py:scale --spec 'paged(bf16, num_heads=8, head_size=128, page_size=16)' "
        "--grid 3 --block 128. Several kernels share the options.",
    )
    add_kernel_options(parser)
    parser.add_argument("more", nargs="*", metavar="KERNEL", help="further kernels, or files of IR")
    add_input_options(parser.add_argument)
    parser.add_argument(
        "--passes", type=given_name, metavar="P,P", help="passes to omit, one at a time (default: all optional ones)"
    )
    parser.add_argument("--time", action="store_true", help="measure time on this machine's GPU instead of counting")
    parser.add_argument("--json", type=given_path, metavar="FILE", help="write the metrics to a file")
    parser.add_argument("--plot", type=given_path, metavar="FILE", help="draw the ratios as SVG")
    options = parser.parse_intermixed_args(argv)
    pipeline = importlib.import_module("kvarn.lowering.pipeline")
    target = options.target or "sm_90a"
    if options.time and options.target is None:
        target = importlib.import_module("kvarn.compilation.driver").default_target()
    if options.time and not (status := importlib.import_module("kvarn.runtime.driver").status()).usable:
        raise UsageError(f"--time needs a GPU: {status.reason}")
    if target == "host":
        raise UsageError("ablate counts or times GPU code: give a GPU target, such as --target sm_90a")
    inserted = passes_of(options)
    settings = importlib.import_module("kvarn.pipelines").extended(inserted, options.disable)
    optional = [s.name for s in pipeline.steps(target, settings) if s.optional]
    chosen = [p.strip() for p in options.passes.split(",")] if options.passes else optional
    unknown = [p for p in chosen if p not in optional]
    if unknown:
        raise UsageError(f"--passes must be optional passes ({', '.join(optional)}), got {', '.join(unknown)}")
    inputs, launch = InputOptions(**values_of(options)), Launch(options.grid, options.block)
    found: dict[str, list[Record]] = {}
    for place in (options.op or options.kernel, *options.more):
        options.kernel = None if options.op else place
        text = source_of(options)
        records = list(ablated(text, target, chosen, inputs, launch, inserted, options.disable, options.time))
        print("\n".join(table(f"{place} for {target}", records)), flush=True)
        found[place] = records
    if options.json is not None:
        write_output(options.json, json.dumps(found, indent=2) + "\n")
    if options.plot is not None:
        write_output(options.plot, plot(found, "µs" if options.time else "instructions"))
    return int(any(r["problem"] for records in found.values() for r in records))


__all__ = ["ablated", "main", "plot", "table"]

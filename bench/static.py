# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Static figures of compiled code, without a GPU: python -m bench.static [--rows TEXTS] [--target sm_90a] [--json FILE]

Registers, spills and shared memory are from the assembler. Instructions are counted by class in the PTX and, if
nvdisasm is installed, in the machine code. Bytes and 32-byte sectors per token follow from the layout.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import kvarn as kv
from kvarn import dispatch
from kvarn.dialect import dtypes, layout
from kvarn.dialect.schedules import row_class
from kvarn.dispatch import BufferType, HandleType, ScalarType, Specialisation
from kvarn.inspect.machine import occupancy
from kvarn.inspect.work import access_bytes
from kvarn.ops import reads
from kvarn.runtime import assemble

from .cases import TABLE, Append, Decode, Gather, Mla, Prefill, Row, select
from .report import table

SECTOR = 32


def spec_of(row: Row) -> layout.CacheSpec:
    """The cache spec of a row."""
    shape = row.shape
    if isinstance(shape, Mla):
        return layout.spec_of("paged", row.dtype, 1, shape.stored_size, is_mla=True, page_size=shape.page)
    return layout.spec_of("paged", row.dtype, shape.heads, shape.size, page_size=shape.page)


def specialisation(row: Row, target: str = "sm_90a", schedule: Mapping[str, Any] | None = None) -> Specialisation:
    """The specialisation of the row's operation, equal to that of a call on the row's data."""
    shape, spec = row.shape, spec_of(row)
    collection, whole = HandleType("collection", spec), ScalarType(dtypes.i32)
    table_, number = BufferType(dtypes.i32, (None,)), ScalarType(dtypes.f32)
    given = dict(schedule or {})

    def rows(heads: int, size: int, dtype: str = "bf16") -> BufferType:
        return BufferType(dtypes.by_name(dtype), (None, heads, size))

    attributes: tuple[tuple[str, Any], ...] = ()
    operands: dict[str, Any] = {"collection": collection, "layer": whole, "row_offsets": table_}
    if isinstance(shape, (Decode, Prefill)):
        window = shape.window if isinstance(shape, Decode) else 0
        name, query = "kv.attention", rows(shape.query_heads, shape.size)
        operands |= {"query": query, "scale": number, "out": query}
        attributes = (("mask", "sliding_window" if window else "causal"), ("span", window), ("softcap", 0.0))
        if isinstance(shape, Decode):
            given = {**reads._bounds(1, shape.batch), **given}
        else:
            new = max(n for n, _ in shape.lengths)
            most = row_class(new * (shape.query_heads // shape.heads), shape.size)
            given = {**reads._expected(most, len(shape.lengths)), **given}
    elif isinstance(shape, Mla):
        name, out = "kv.mla_attention", rows(shape.query_heads, shape.value_size)
        operands |= {"query": rows(shape.query_heads, shape.size, shape.query), "scale": number, "out": out}
        attributes = (("value_size", shape.value_size), ("mask", "causal"), ("span", 0))
        attributes += (("inline_scales", shape.inline),) if shape.inline else ()
    elif isinstance(shape, Append):
        new = rows(shape.heads, shape.size)
        name = "kv.append"
        operands |= {"key": new, "value": new}
        if shape.rope:
            name, query = "kv.rope_append", rows(shape.query_heads, shape.size)
            operands |= {"query": query, "freqs": BufferType(dtypes.f32, (None, shape.size)), "query_out": query}
            attributes = (("interleaved", False), ("eps", 1e-6))
    else:
        assert isinstance(shape, Gather)
        name, ids = "kv.gather", BufferType(dtypes.i32, (None, None))
        out = BufferType(dtypes.by_name(row.dtype), (None, None, shape.heads, shape.size))
        operands |= {"cache": HandleType("cache", spec), "token_ids": ids, "out": out}
    order = [f.name for f in dispatch.op_class_of(name).FIELDS if f.kind == "operand"]
    ordered = tuple((n, operands[n]) for n in order if n in operands)
    return Specialisation(name, ordered, attributes, tuple(sorted(given.items())), target)


def compiled(what: Specialisation, disable: Iterable[str] = ()) -> Any:
    """A specialisation compiled without some passes: a ``kv.Kernel``."""
    return kv.compile(dispatch.build(what), target=what.target, disable=tuple(disable))


def compiled_kernel(kernel: Any, specs: Sequence[Any], target: str, disable: Iterable[str] = ()) -> Any:
    """A kernel of the DSL, compiled without some passes."""
    return kv.compile(kernel, *specs, target=target, disable=tuple(disable))


# --- instructions --------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r"\s*\{?\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)")
_ENTRY = re.compile(r"\.visible \.entry (\w+)\(.*?\n\}", re.S)


def classify(name: str) -> str:
    """The class of a PTX instruction; an empty string if it is not counted."""
    head = name.split(".")
    if head[0] in ("ld", "st") and "global" in head:
        cached = " nc" if "nc" in head else ""
        return f"{'load' if head[0] == 'ld' else 'store'} global {access_bytes(name)} B{cached}"
    if head[0] in ("ld", "st") and ("shared" in head or "local" in head):
        return f"{'load' if head[0] == 'ld' else 'store'} {'shared' if 'shared' in head else 'local'}"
    for prefix, found in _CLASSES:
        if name.startswith(prefix):
            return found
    if head[0] == "cvt" and any(re.fullmatch(r"(?:b?f\d+|e\dm\d)(?:x\d)?", part) for part in head[1:]):
        return "convert"
    if head[0] in ("div", "rem") and head[-1][0] in "us":
        return "divide integers"
    return ""


_CLASSES = (
    ("cp.async.bulk", "bulk copy"),
    ("cp.async.cg", "cp.async"),
    ("cp.async.ca", "cp.async"),
    ("ldmatrix", "ldmatrix"),
    ("stmatrix", "stmatrix"),
    ("movmatrix", "movmatrix"),
    ("mma.sync", "mma"),
    ("wgmma.mma_async", "wgmma"),
    ("shfl", "shuffle"),
    ("bar.sync", "barrier"),
    ("barrier.sync", "barrier"),
    ("bar.warp.sync", "warp barrier"),
    ("mbarrier", "mbarrier"),
    ("atom", "atomic"),
    ("red.", "atomic"),
    ("ex2", "exp2"),
    ("bra", "branch"),
)


def instruction_mix(ptx: str) -> dict[str, dict[str, int]]:
    """Counts by class for each kernel of a PTX text, and for ``"all"``."""
    found = {}
    for entry in _ENTRY.finditer(ptx):
        # Split into statements: inline assembly has several per line.
        body = re.sub(r"//[^\n]*", "", entry[0]).partition("{")[2]
        names = [found_[1] for s in re.split(r"[;\n]", body) if (found_ := _INSTRUCTION.match(s))]
        counts = Counter(c for n in names if (c := classify(n)))
        found[entry[1]] = {**dict(sorted(counts.items())), "all": len(names)}
    return found


_SASS = "LDG STG LDGSTS LDSM HMMA HGMMA F2F F2FP SHFL BAR LDL STL LDS STS ATOM RED UTMALDG".split()


def machine_mix(sass: str) -> dict[str, dict[str, int]]:
    """Counts of selected instructions, with widths, in disassembled machine code, by kernel."""
    found: dict[str, dict[str, int]] = {}
    for part in re.split(r"^\s*\.section\s+\.text\.", sass, flags=re.M)[1:]:
        names = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", part, re.M)
        counts: Counter[str] = Counter()
        for name in names:
            head, *rest = name.split(".")
            if head in _SASS:
                width = next((w for w in ("128", "64") if w in rest), "")
                counts[head + ("." + width if width else "")] += 1
        found[re.match(r"[\w$]+", part)[0]] = {**dict(sorted(counts.items())), "all": len(names)}  # type: ignore[index]
    return found


# --- figures -------------------------------------------------------------------------------------


def traffic(row: Row) -> dict[str, float]:
    """Bytes and sectors of the cache per token, including the page table's share."""
    spec = spec_of(row)
    halves = 1 if isinstance(row.shape, (Mla, Gather)) else 2
    row_bytes = spec.head_size * spec.dtype.itemsize
    heads = spec.num_heads
    # Heads of a token are contiguous: count sectors of all its heads.
    sectors = -(-heads * row_bytes // SECTOR)
    entry = 4 / spec.page_size  # page table bytes
    return {"bytes": halves * heads * row_bytes + entry, "sectors": halves * sectors + entry / SECTOR}


def figures(
    row: Row, target: str = "sm_90a", disable: Iterable[str] = (), schedule: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All figures of a row's code.

    Returns
    -------
    dict
        ``row``, ``title``, ``target``, ``compile_s`` (of a lookup if the disk cache has the code), ``token`` (bytes and
        sectors), ``tool``, and ``kernels``: by name ``registers``, ``spills``, ``stack``, ``shared`` (bytes),
        ``threads``, ``blocks`` (per multiprocessor), ``ptx`` and ``sass`` (counts by class; none without nvdisasm).
    """
    begin = time.perf_counter()
    kernel = compiled(specialisation(row, target, schedule), disable)
    seconds = time.perf_counter() - begin
    kernels, tool = kernel_figures(kernel, target)
    about = {"row": row.name, "title": row.title, "target": target, "compile_s": seconds}
    return {**about, "token": traffic(row), "tool": tool, "kernels": kernels}


def kernel_figures(kernel: Any, target: str) -> tuple[dict[str, dict[str, Any]], str]:
    """The figures of each kernel of a compiled program, by name, and the assembler used."""
    made = assemble.assemble(kernel.artifact.code["ptx"], target)
    try:
        machine = machine_mix(assemble.disassemble(made.cubin))
    except assemble.MissingToolError:
        machine = {}
    mixes = instruction_mix(kernel.artifact.code["ptx"])
    kernels = {}
    for entry in kernel.artifact.entries:
        of = made.kernels[entry.name]
        threads = _threads_of(kernel.artifact, entry)
        shared = of.shared_bytes + entry.shared_bytes
        kernels[entry.name] = {
            "registers": of.registers,
            "spills": of.spill_stores + of.spill_loads,
            "stack": of.stack_bytes,
            "shared": shared,
            "threads": threads,
            "blocks": occupancy(target, threads, of.registers, shared).blocks,
            "ptx": mixes[entry.name],
            "sass": machine.get(entry.name, {}),
        }
    return kernels, made.tool


def _threads_of(artifact: Any, entry: Any) -> int:
    """Threads per block of the first step that launches the kernel, if known."""
    for step in artifact.steps:
        if step.entry == entry.name and all(isinstance(n, int) for n in step.block):
            x, y, z = step.block
            return x * y * z
    return entry.max_threads or 128


_WIDE = ("load global 16 B", "load global 16 B nc", "store global 16 B")
COLUMNS = (*_WIDE, "cp.async", "ldmatrix", "mma", "convert", "shuffle", "barrier")


def figures_table(found: Sequence[Mapping[str, Any]]) -> str:
    """One line per kernel."""
    last = ("narrow loads", "narrow stores", "local", "all", "B/token", "sectors")
    head = ("row", "kernel", "regs", "spills", "shared", "blocks/SM", *COLUMNS, *last)
    lines: list[Sequence[str]] = [head]
    for f in found:
        for name, k in f["kernels"].items():
            ptx, sass = k["ptx"], k["sass"]
            of = sass if sass else ptx
            local = sum(v for c, v in of.items() if c in ("LDL", "STL") or c.endswith(" local"))
            narrow = (
                sum(v for c, v in ptx.items() if c.startswith(what) and " 16 B" not in c)
                for what in ("load global", "store global")
            )
            also = f" (+ {len(f['also'])})" if f.get("also") else ""
            first = (k[n] for n in ("registers", "spills", "shared", "blocks"))
            counts = (str(n or "") for n in (*(ptx.get(c, 0) for c in COLUMNS), *narrow, local))
            token = (f"{f['token'][n]:.0f}" for n in ("bytes", "sectors"))
            lines.append((f["title"] + also, name, *map(str, first), *counts, str(ptx["all"]), *token))
    return table(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", default="decode,append,gather", help="kinds or parts of names (default: decode,append,gather)"
    )
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--disable", default="", metavar="PASSES", help="passes to disable")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    found: list[dict[str, Any]] = []
    try:
        rows = select(options.rows, TABLE)
    except ValueError as error:
        parser.error(f"--{error}")
    alike: dict[Specialisation, list[Row]] = {}  # rows with the same code
    for row in rows:
        alike.setdefault(specialisation(row, options.target), []).append(row)
    for row, *others in alike.values():
        try:
            made = figures(row, options.target, [p for p in options.disable.split(",") if p])
            found.append({**made, "also": [other.name for other in others]})
        except (ValueError, RuntimeError) as error:
            print(f"{row.name}: {error}", file=sys.stderr)
    if not found:
        return 1
    print(f"{options.target}, {found[0]['tool']}: instructions in the PTX, static counts\n")
    print(figures_table(found))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

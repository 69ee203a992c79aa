# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Roofline sweep: the supported attention cases below half of the hardware's bound: python -m bench.roofline

The grid covers head sizes, element types, scale granularities, GQA groups, page sizes and numbers of new tokens.
Every case is checked on random data, with permuted page tables and NaN in every slot without a token, then timed.
The bound is the longest of three times: reading the data at the measured rate, the matrix products at the measured
rate, and the exponentials of all visible scores at 16 per clock. Conversions of 8-bit elements do not count: the
rows of a tile share them. Cases of a few microseconds are bound by their launch and are not judged.

All kernels are compiled first, by several processes, into the disk cache.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvarn.dialect import dtypes
from kvarn.dialect.chips import HOPPER
from kvarn.dialect.layout import align_up, cdiv
from kvarn.dialect.schedules import row_class
from kvarn.measure.arrays import arrays
from kvarn.measure.attention_problem import DecodeProblem
from kvarn.measure.timing import first_line

from .standalone import device_of, measured, parser
from .timing import ceilings

LAUNCH_US = 10.0  # bound below which a case is limited by its launch
ENOUGH = 0.5  # acceptable share of the bound
READ, MATMUL = 4.5e12, 700e12  # default peak rates, bytes/s and FLOP/s, without measurements
F32_MATMUL = 60e12  # f32 operands use FMA units, not tensor cores
EXPONENTIALS = HOPPER.multiprocessors * 16 * 1.755e9  # per second: 16 per clock and multiprocessor of an H200
TOLERANCE = {"f32": 1e-4, "f16": 4e-3, "bf16": 2e-2, "f8e4m3": 8e-2}  # relative error, by the query's type
KINDS = {"attention_decode": "decode", "attention": "tile", "attention_simt": "simt"}


@dataclass(frozen=True)
class Case:
    """A batch of equal sequences whose last ``new`` tokens are queries.

    ``granule``: elements per scale; 0: no scales. ``products``: the operand type of the matrix products if it is the
    cache's 8-bit type.
    """

    new: int = 1
    size: int = 128
    dtype: str = "bf16"
    granule: int = 0
    group: int = 4
    page: int = 16
    batch: int = 48
    context: int = 4096
    heads: int = 8
    products: str = ""

    ragged, window = False, 0

    @property
    def shape(self) -> Case:
        """The attributes of a row that DecodeProblem reads."""
        return self

    @property
    def query_heads(self) -> int:
        return self.heads * self.group

    @property
    def query(self) -> str:
        return self.products or self.out

    @property
    def out(self) -> str:
        return self.dtype if dtypes.by_name(self.dtype).bits > 8 else "bf16"

    @property
    def what(self) -> str:
        return "prefill" if self.new == self.context else "decode" if self.new == 1 else f"{self.new} new"

    @property
    def bytes(self) -> int:
        """Bytes to move: keys, values and scales once, the query and the output."""
        row = self.size * dtypes.by_name(self.dtype).itemsize + (4 * (self.size // self.granule) if self.granule else 0)
        rows = self.batch * self.new * self.heads * self.group * self.size * dtypes.by_name(self.query).itemsize
        return 2 * self.batch * self.context * self.heads * row + 2 * rows

    @property
    def scores(self) -> int:
        """Visible (query row, key) pairs."""
        pairs = self.new * (self.context - self.new) + self.new * (self.new + 1) // 2
        return self.batch * pairs * self.heads * self.group

    @property
    def flops(self) -> int:
        return 4 * self.scores * self.size

    def given(self, read: float, matmul: float) -> float:
        """The hardware's bound in microseconds."""
        rate = F32_MATMUL if self.dtype == "f32" else 2 * matmul if self.products else matmul
        return max(self.bytes / read, self.flops / rate, self.scores / EXPONENTIALS) * 1e6

    def __str__(self) -> str:
        scales = f" granule {self.granule}" if self.granule else f" x {self.products}" if self.products else ""
        return (
            f"{self.what:8} {self.batch:3} x {self.context:<6} {self.dtype}{scales}, head {self.size}, "
            f"group {self.group}, page {self.page}"
        )


def _sized(case: Case) -> Case:
    """The case with enough sequences that its data exceeds the L2 cache."""
    narrow = max(1, 128 // (case.size * dtypes.by_name(case.dtype).itemsize))
    return dataclasses.replace(case, batch=case.batch * narrow)


def grid() -> Iterator[Case]:
    """All cases of the sweep."""
    fp8 = "f8e4m3"
    decode: dict[str, Sequence[int]] = {
        "bf16": (8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 120, 128, 136, 160, 192, 200, 256, 512),
        "f16": (72, 120, 128),
        "f32": (8, 32, 64, 72, 80, 128, 256, 512),
        fp8: (8, 16, 32, 48, 64, 72, 80, 96, 112, 120, 128, 192, 256, 512),
        "f8e5m2": (64, 72, 128),
    }
    for dtype, sizes in decode.items():
        for size in sizes:
            yield _sized(Case(size=size, dtype=dtype))
    for dtype, granules in ((fp8, (4, 8, 16, 32, 64, 128)), ("i8", (1, 4, 8, 16, 32, 128)), ("f8e5m2", (32,))):
        for granule in granules:
            yield Case(dtype=dtype, granule=granule)
    yield _sized(Case(dtype=fp8, size=64, granule=16))
    yield Case(dtype=fp8, size=120, granule=40)
    for group in (1, 2, 3, 5, 8, 12, 16, 24, 32, 64):
        yield Case(group=group)
    for group in (1, 16, 32):
        yield Case(group=group, dtype=fp8)
    for page in (1, 5, 7, 48, 64, 256):
        yield Case(page=page)
    for page in (1, 5, 48):
        yield Case(page=page, dtype=fp8)
    for new in (2, 4, 8, 9, 16, 32, 64):
        yield Case(new=new)
        yield Case(new=new, dtype=fp8)
    yield Case(new=4, dtype="f32")
    for size in (64, 72, 96):
        yield Case(new=16, dtype=fp8, size=size)
    yield Case(new=16, dtype=fp8, page=1)
    yield Case(new=64, dtype=fp8, size=64)
    yield Case(new=16, size=72)
    yield Case(new=16, page=5)
    yield Case(new=16, group=1)
    for granule in (8, 32):
        yield Case(new=16, dtype="i8", granule=granule)
    yield Case(new=16, dtype=fp8, granule=128)
    for new in (16, 64):
        yield Case(new=new, batch=1, context=102400)
        yield Case(new=new, batch=1, context=102400, dtype=fp8)
    full = Case(new=4096, batch=4)
    for size in (8, 32, 64, 72, 80, 96, 112, 120, 128, 136, 192, 256, 512):
        yield dataclasses.replace(full, size=size)
    for dtype, size in (("f16", 128), (fp8, 40), (fp8, 64), (fp8, 72), (fp8, 80), (fp8, 96), (fp8, 128),
                        (fp8, 192), (fp8, 256), (fp8, 512),
                        ("f8e5m2", 128), ("f32", 64), ("f32", 128)):  # fmt: skip
        yield dataclasses.replace(full, dtype=dtype, size=size)
    for dtype, granule in (("i8", 128), ("i8", 32), ("i8", 8), ("i8", 4), (fp8, 128)):
        yield dataclasses.replace(full, dtype=dtype, granule=granule)
    yield dataclasses.replace(full, dtype=fp8, size=64, granule=16)
    for dtype in ("bf16", fp8):
        yield dataclasses.replace(full, dtype=dtype, size=64, page=1)
    for size in (64, 128, 256):
        yield dataclasses.replace(full, dtype=fp8, size=size, products=fp8)
    yield Case(new=64, batch=1, context=102400, dtype=fp8, products=fp8)
    for page in (1, 4, 5, 7, 8, 48, 64):
        yield dataclasses.replace(full, page=page)
    yield dataclasses.replace(full, page=5, dtype=fp8)
    for group in (1, 3, 16, 64):
        yield dataclasses.replace(full, group=group, heads=8 if group < 16 else 2)


# Small cases for the CPU, which checks only results.
_FEW = Case(batch=3, context=37, size=32, heads=2, page=5)
SMALL = (
    _FEW,
    dataclasses.replace(_FEW, dtype="f32"),
    dataclasses.replace(_FEW, dtype="i8", granule=8),
    dataclasses.replace(_FEW, dtype="f8e4m3", granule=32),
    dataclasses.replace(_FEW, new=4),
    dataclasses.replace(_FEW, new=37, dtype="f8e4m3"),
)


# --- compiling -------------------------------------------------------------------------------------


def _lookup_columns(case: Case) -> int:
    return align_up(cdiv(case.context, case.page), 8) + 16


def _empty(shape: Sequence[int], dtype: dtypes.DType) -> np.ndarray:
    """An array whose memory is never accessed."""
    return np.empty(tuple(shape), dtype.numpy)


def compiled(case: Case, target: str, given: dict[str, Any] | None = None) -> tuple[str, float]:
    """Compile a case's program into the disk cache; returns the kind of its kernel and the seconds it took."""
    import kvarn as kv
    from kvarn import dispatch
    from kvarn.ops import reads

    begin, dtype, query = time.perf_counter(), dtypes.by_name(case.dtype), dtypes.by_name(case.query)
    blocks = _empty((64, 2, 1, case.page, case.heads, case.size), dtype)
    scales: tuple[Any, ...] = ()
    if case.granule:
        scales = (_empty((*blocks.shape[:-1], -(-case.size // case.granule)), dtypes.f32), case.granule)
    lengths, table = np.zeros(case.batch, np.int32), np.zeros((case.batch, _lookup_columns(case)), np.int32)
    pool = kv.PagedKVCacheCollection(blocks, lengths, table, case.new, case.context, *scales)
    rows = _empty((case.batch * case.new, case.heads * case.group, case.size), query)
    operands = (pool, 0, rows, np.zeros(case.batch + 1, np.int32), 1.0, _empty(rows.shape, dtypes.by_name(case.out)))
    attributes, _ = reads._modified(None, "causal", None, None, None, "kv.ops.attention")
    rows, bounds = row_class(case.new * case.group, case.size), {}  # values known for arrays on a GPU
    if case.new <= reads.FEW:
        bounds = reads._bounds(case.new, case.batch)
    elif rows is not None:
        bounds = reads.EXPECTED[rows]
    schedule = tuple(sorted({**bounds, **(given or {})}.items()))
    what, _ = reads._ATTENTION.specialisation(operands, attributes, schedule, target)
    made = dispatch.artifact(what)
    return KINDS.get(made.steps[0].entry.split("__")[0], made.steps[0].entry), time.perf_counter() - begin


def compile_all(
    cases: Sequence[Case], target: str, processes: int, schedule: dict[str, Any] | None = None
) -> dict[Case, str]:
    """Compile all cases; returns the kinds of their kernels."""
    found: dict[Case, str] = {}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures = {pool.submit(compiled, case, target, schedule): case for case in cases}
        for future in concurrent.futures.as_completed(futures):
            try:
                found[futures[future]] = future.result()[0]
            except Exception as error:
                found[futures[future]] = f"refused: {' '.join(str(error).split())[:200]}"
    return found


# --- measuring -------------------------------------------------------------------------------------


class CaseProblem(DecodeProblem):
    """A case's data: NaN in unused slots, in the null page, and after the last token of each sequence."""

    last = 256  # check the last tokens of long prompts, which see the most keys

    def __init__(self, arrays: Any, case: Case, schedule: dict[str, Any] | None = None) -> None:
        super().__init__(arrays, case, split=False)
        if case.products:
            self.query = arrays.normal(self.query.shape, case.products)
        cached, pages = self.cached, self.cached.pages
        end = (case.context - 1) % case.page + 1
        for array in (cached.blocks, cached.scales):
            if array is not None and array.dtype != arrays.dtype("i8"):
                arrays.poison(array[pages.total])
                for page in pages.table[:, -1] if end < case.page else ():
                    arrays.poison(array[int(page), :, :, end:])
        self.pool = cached.collection(self.lengths - case.new, case.new, self.longest)
        self.schedule = schedule

    def run(self, layer: int) -> None:
        import kvarn as kv

        kv.ops.attention(self.pool, layer, self.query, self.offsets, out=self.out, schedule=self.schedule)

    def error(self, query: Any = None) -> float:
        """The relative error; NaN if an unwritten part of the output is not NaN any more."""
        everything = float(self.arrays.f32(self.out).sum())
        return super().error(query) if everything == everything else everything


def timed(arrays: Any, case: Case, schedule: dict[str, Any] | None = None) -> dict[str, Any]:
    """Time and error of a case, with optional schedule entries."""
    made: dict[str, Any] = {"case": dataclasses.asdict(case), "ok": False}
    try:
        problem = CaseProblem(arrays, case, schedule)
    except Exception as error:
        return {**made, "note": f"{type(error).__name__}: {first_line(error)}"}
    made |= measured(problem, problem.run, problem.error, TOLERANCE[case.query])
    arrays.free()
    return made


def rates(arrays: Any) -> tuple[float, float]:
    """Measured peak rates: bytes/s of reads, FLOP/s of a bf16 matrix product."""
    found: dict[str, float] = {}
    for record in ceilings(arrays):
        if record["ok"] and record["case"] in ("read", "matmul"):
            found[record["case"]] = max(found.get(record["case"], 0.0), record["rate"] * 1e12)
    return found.get("read", READ), found.get("matmul", MATMUL)


def lines(records: Sequence[dict[str, Any]], below: float) -> Iterator[str]:
    """The table of cases below a share of the bound."""
    for r in sorted(records, key=lambda r: r.get("share") or 0.0):
        case = Case(**r["case"])
        if "us" not in r or not r["ok"]:
            note = r.get("note") or f"wrong by {r['error']:.1e}"
            yield f"  WRONG  {case}  {r['kind']}: {note}"
        elif r["share"] < below and not r["launch"]:
            yield f"  {100 * r['share']:4.0f}%  {r['us']:9.1f} µs of {r['given']:8.1f}  {case}  {r['kind']}"


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--only", default="", help="only cases with one of these texts in their line; separate with ;")
    made.add_argument("--below", type=float, default=ENOUGH, help="print cases below this share (default: 0.5)")
    made.add_argument("--processes", type=int, default=14)
    made.add_argument("--target", default="sm_90a")
    made.add_argument("--compile-only", action="store_true", help="only compile, and print the kernel of each case")
    made.add_argument("--seconds", type=float, default=120, help="time limit of measuring (default: 120)")
    made.add_argument("--schedule", type=json.loads, help="schedule entries for all cases, as JSON")
    options = made.parse_args(argv)
    texts = [t for t in options.only.split(";") if t]
    every = grid() if options.compile_only or device_of(options) == "cuda" else SMALL
    cases = [c for c in dict.fromkeys(every) if not texts or any(t in str(c) for t in texts)]
    begin = time.perf_counter()
    kinds = compile_all(cases, options.target, options.processes, options.schedule)
    print(f"{len(cases)} cases compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    if options.compile_only:
        for case in cases:
            print(f"  {case}  {kinds[case]}")
        return 0
    begin = time.perf_counter()
    found = arrays(device_of(options))
    read, matmul = rates(found)
    records = []
    for case in cases:
        if time.perf_counter() - begin > options.seconds:
            print(f"no time left for {len(cases) - len(records)} cases", file=sys.stderr)
            break
        record = timed(found, case, options.schedule) | {"kind": kinds[case], "given": case.given(read, matmul)}
        if "us" in record:
            record["share"] = record["given"] / record["us"]
            record["launch"] = record["given"] < LAUNCH_US
        records.append(record)
        if options.json:
            options.json.write_text(json.dumps(records))
    right = [r for r in records if r["ok"]]
    judged = [r for r in right if not r["launch"]]
    under = [r for r in judged if r["share"] < ENOUGH]
    print(
        f"read {read / 1e12:.2f} TB/s, matmul {matmul / 1e12:.0f} TFLOP/s; {len(records)} cases in "
        f"{time.perf_counter() - begin:.0f} s: {len(right)} right, {len(judged)} judged, "
        f"{len(under)} under {ENOUGH:.0%}"
    )
    for line in lines(records, options.below):
        print(line)
    return 0 if len(right) == len(records) and not under else 1


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv.project_append for few tokens by mma.sync, over an unconverted weight: kind ``stream_k`` without wgmma.

As in projection/few.py, the weight has the rows, stream-K divides the tiles' k-steps evenly among blocks, and a second
kernel adds partial results and writes heads. A thread loads 16 bytes of each of two rows, those of the next steps while
it multiplies, and converts 8-bit and 4-bit elements in registers to fragments of operand A. Any permutation of K is
correct if both operands share it, so a thread's elements are neighbours: its loads need no exchange, and its elements
are in few scale groups. cp.async copies the tokens to shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.dtypes import DType, bf16, f8e4m3, f8e8m0, f16, f32, i32
from kvarn.dialect.layout import cdiv
from kvarn.lowering.target import Target
from kvarn.lowering.tiles.dequantize import in_order_of_four_bits, pairs_of, pairs_of_four_bits, scaled_pairs
from kvarn.lowering.tiles.ir import WARP

from ..base import Expansion
from ..common import BYTES, begin, starts_early
from .common import Projection
from .few import TOKENS, Config as Few, finish_partials, part_of
from .groups import Stored, plain_case, plain_weight, with_floats, with_values
from .tiles import multiplied_by_mma

WARPS = 8
THREADS = WARPS * WARP
ROWS = 16  # per warp
LANES = 4  # lanes that share rows
COLUMNS = 8  # per product
MOST_TOKENS = 64  # per block
TOGETHER = 2  # steps whose loads are in flight at a time
BLOCKS = 2  # per multiprocessor
# The types of scales that a type represents exactly.
WITHIN = {bf16: (bf16, f8e4m3, f8e8m0), f16: (f16, f8e4m3)}


@dataclass(frozen=True)
class Config:
    """What the kernel is specialised for: the products of kind ``stream_k`` over a weight as it is ``stored``."""

    few: Few
    stored: Stored

    @property
    def dtype(self) -> DType:
        return self.few.case.x

    @property
    def elements(self) -> int:
        """Neighbouring elements of a row that a thread converts per step."""
        return elements_of(self.stored)

    @property
    def tokens(self) -> int:
        """Tokens per block."""
        return min(self.few.tokens, MOST_TOKENS)

    @property
    def exact(self) -> bool:
        return self.stored.scale in WITHIN[self.dtype]


def elements_of(stored: Stored) -> int:
    return 2 * BYTES if stored.packed else BYTES // stored.dtype.itemsize


def stored_weight(op: Any, at: Expansion, case: Projection) -> Stored:
    return Stored.of(op, at, "weight") if case.scaling == "group" else plain_weight(op, at)


def multiplied(case: Projection) -> Projection:
    """The case of the products: after dequantization of group scales, and in bf16 for f8e4m3."""
    return multiplied_by_mma(plain_case(case))


def problems(case: Projection, stored: Stored, target: Target, alignment: int) -> list[str]:
    """Why the kernel does not support a case, one sentence per reason; empty if it does."""
    case, each, found = multiplied(case), elements_of(stored), []
    if not target.has("mma_bf16"):
        return [f"needs a GPU, got {target.name}"]
    if case.scaling == "block":
        found.append("by mma.sync needs scales per row or group, got scales per block")
    if case.x not in WITHIN:
        found.append(f"needs products of bf16 or f16, got {case.x.name}")
    elif case.x is f16 and stored.dtype.name.startswith("f8") and not target.has("f8_convert"):
        found.append(f"needs instructions that convert {stored.dtype.name}, got {target.name}")
    if case.k % (LANES * each):
        found.append(f"needs a K of a multiple of {LANES * each}, got {case.k}")
    if stored.groups.size % each and each % stored.groups.size:
        found.append(f"needs groups of a multiple or a part of {each} elements, got {stored.groups.size}")
    if alignment < BYTES:
        found.append(f"needs rows aligned to {BYTES} bytes, got {alignment}")
    return found


def chosen(op: Any, case: Projection, at: Expansion) -> Config:
    """The configuration of a case.

    Raises
    ------
    ValueError
        If the schedule has entries of the kernel by wgmma.
    """
    other = [name for name in ("rows", "atoms") if name in at.schedule]
    if other:
        raise ValueError(f"the schedule's {' and '.join(other)} are of products by wgmma, which this case has not")
    stored, plain = stored_weight(op, at, case), multiplied(case)
    tokens = next(n for n in TOKENS if n >= at.schedule["max_tokens"])
    step = LANES * elements_of(stored)
    return Config(Few(plain, tokens, rows=WARPS * ROWS, step_of=step), stored)


@kv.func
def factors_of(config: Config, scales: Any, minima: Any, row: Any, d: Any) -> tuple[list[Any], list[Any]]:
    """The scales and minima of a thread's elements of a row from d up, without conversion."""
    groups, of_groups, lows = config.stored.groups, [], []
    for i in kv.static(range(max(config.elements // groups.size, 1) if scales is not None else 0)):
        place = groups.index(row, d // groups.size + i)
        of_groups.append(scales[place])
        if minima is not None:
            lows.append(minima[place])
    return of_groups, lows


@kv.func
def weight_pairs(config: Config, words: Any, scales: Any, lows: Any) -> list[Any]:
    """The values of a thread's elements of one row, as words of two."""
    stored, found = config.stored, []
    for w in kv.static(range(BYTES // 4)):
        if stored.packed:
            found += pairs_of_four_bits(words[w], stored.format, config.dtype)
        elif stored.dtype is config.dtype:
            found.append(words[w])
        else:
            found += pairs_of(words[w], stored.dtype, config.dtype)
    if not scales:
        return found
    many = len(found) // len(scales)
    return [
        pair
        for i, scale in enumerate(scales)
        for pair in scaled_pairs(
            found[i * many : (i + 1) * many], scale, lows[i] if lows else None, config.exact, config.dtype
        )
    ]


def product_kernel(config: Config, early: bool) -> Any:
    """Partial results as in kind ``stream_k``: block i's of tile p in the rows from (i + p) * ``rows`` up."""
    few, stored, E, N = config.few, config.stored, config.elements, config.tokens
    steps, columns, STEP = few.steps, few.case.columns, few.step
    CHUNKS = STEP * few.case.x.itemsize // BYTES  # per token and step
    OWN = CHUNKS // LANES  # chunks of a token that a thread's elements need
    HALF = N * TOGETHER * CHUNKS  # chunks in shared memory that are multiplied while others arrive

    @kv.func
    def chunk_at(half, step, token, chunk):
        """The address of a token's chunk of a step, without bank conflicts for eight lanes' loads and for stores."""
        swizzled = chunk ^ (chunk >> 3) ^ ((token & 1) * (2 if CHUNKS == 16 else 1))
        return ((half * TOGETHER + step) * N + token) * CHUNKS + swizzled

    @kv.func
    def start(x, array, half, token0, first, last):
        """Copy the tokens' elements of some steps; steps from ``last`` up are zeros."""
        for i in kv.static(range(cdiv(HALF, THREADS))):
            c = i * THREADS + kv.thread_id.x
            chunk, step, token = c % CHUNKS, c // CHUNKS % TOGETHER, c // (CHUNKS * TOGETHER)
            row, step_of_k = token0 + token, first + step
            there = (row < x.shape[0]) & (step_of_k < last)
            if c < HALF:
                column = kv.math.min(step_of_k, steps - 1) * STEP + chunk * (BYTES // few.case.x.itemsize)
                source = x.address(kv.math.min(row, x.shape[0] - 1), column)
                to = array.ptr() + chunk_at(half, step, token, chunk) * BYTES
                kv.cp_async(to, source, BYTES, zero_fill_size=kv.where(there, BYTES, 0))
        kv.cp_async_commit()

    @kv.func
    def arrive(array, half):
        """Wait for a thread's copies, and permute their elements like those of the weight."""
        kv.cp_async_wait(0)
        for i in kv.static(range(cdiv(HALF, THREADS) if stored.packed else 0)):
            c = i * THREADS + kv.thread_id.x
            if c < HALF:
                step, token = c // CHUNKS % TOGETHER, c // (CHUNKS * TOGETHER)
                place = array.ptr() + chunk_at(half, step, token, c % CHUNKS) * BYTES
                words = place.load(i32, 4)
                place.store(kv.vector(i32, in_order_of_four_bits([words[n] for n in range(4)])))

    @kv.func
    def loaded(weight, scales, minima, rows, first, last, t):
        """A thread's part of some steps: words, scales and minima per step and row."""
        found = []
        for step in kv.static(range(TOGETHER)):
            d = kv.math.min(first + step, last - 1) * STEP + t * E
            for row in rows:
                words = weight.address(row, d // 2 if stored.packed else d).load(i32, 4, invariant=True)
                found.append([[words[i] for i in range(4)], *factors_of(config, scales, minima, row, d)])
        return found

    @kv.kernel(block=(THREADS, 1, 1), min_blocks=BLOCKS)
    def project_few(x: kv.Buffer[few.case.x, 2], weight, partials: kv.Buffer[f32, 2], scales=None, minima=None):
        begin(early)
        array = kv.shared(2 * HALF * BYTES // few.case.x.itemsize, few.case.x, alignment=128)
        lane, warp = kv.thread_id.x % WARP, kv.thread_id.x // WARP
        g, t = lane // LANES, lane % LANES
        token0 = kv.block_id.y * N
        low = part_of(few, kv.block_id.x, kv.grid_dim.x)
        high = part_of(few, kv.block_id.x + 1, kv.grid_dim.x)
        for p in range(low // steps, (high + (steps - 1)) // steps):
            first, last = kv.math.max(low - p * steps, 0), kv.math.min(high - p * steps, steps)
            row0 = p * few.rows + warp * ROWS + g
            rows = [kv.math.min(row0 + 8 * r, columns - 1) for r in range(2)]
            accumulators = [kv.f32(0.0)] * (4 * (N // COLUMNS))
            own = [chunk_at(0, 0, g, t * OWN + c) * BYTES for c in range(OWN)]  # for eight tokens in the first step
            kv.barrier()  # the previous tile may still be read
            start(x, array, 0, token0, first, last)
            held = loaded(weight, scales, minima, rows, first, last, t)
            for j in range(first, last, TOGETHER):
                half = (j - first) // TOGETHER & 1
                prefetched = loaded(weight, scales, minima, rows, j + TOGETHER, last, t)
                arrive(array, half)
                kv.barrier()
                start(x, array, 1 - half, token0, j + TOGETHER, last)
                places = [array.ptr() + (place + half * (HALF * BYTES)) for place in own]
                for step in kv.static(range(TOGETHER)):
                    a = [
                        weight_pairs(config, words, [kv.f32(s) for s in of_groups], [kv.f32(m) for m in lows])
                        for words, of_groups, lows in held[2 * step : 2 * step + 2]
                    ]
                    for n in kv.static(range(N // COLUMNS)):
                        for c in kv.static(range(OWN)):
                            b = (places[c] + (step * N + n * COLUMNS) * CHUNKS * BYTES).load(i32, 4)
                            for u in kv.static(range(2)):
                                i = 4 * c + 2 * u
                                accumulators[4 * n : 4 * n + 4] = kv.mma_m16n8k16(
                                    [a[0][i], a[1][i], a[0][i + 1], a[1][i + 1]],
                                    [b[2 * u], b[2 * u + 1]],
                                    accumulators[4 * n : 4 * n + 4],
                                    few.case.x,
                                )
                held = prefetched
            kv.cp_async_wait(0)
            row = (kv.block_id.x + p) * few.rows + warp * ROWS + g
            for n in kv.static(range(N // COLUMNS)):
                for r in kv.static(range(2)):
                    pair = kv.vector(f32, accumulators[4 * n + 2 * r : 4 * n + 2 * r + 2])
                    partials.store(row + 8 * r, token0 + n * COLUMNS + 2 * t, value=pair)

    return project_few


def converted(op: Any, config: Config, at: Expansion) -> tuple[Any, Any, Any]:
    """The operation with tokens converted from 8 or 4 bits, and the weight's group scales and minima."""
    if op.scaling.value == "group":
        return with_values(op, at, "x"), op.weight_scale, op.weight_min
    return (op if at.dtype(op.x) is config.few.case.x else with_floats(op, at, "x")), None, None


def launch(op: Any, given: Any, config: Config, scales: Any, minima: Any, at: Expansion) -> None:
    """Launch the product and the finishing kernel; ``op`` has the converted tokens, ``given`` the stored weight."""
    few, early = config.few, starts_early(at)
    tokens = at.dim(op.x, 0)
    blocks = (at.device("multiprocessors") * BLOCKS).least(at.constant(few.tiles * few.steps))
    some = tokens.least(at.constant(1))
    partials = at.workspace((blocks + few.tiles) * few.rows, dtype=f32, columns=few.tokens)
    args = [op.x, given.weight, partials, scales, minima]
    at.launch(
        product_kernel(config, early), args, (blocks * some, few.tokens // config.tokens, 1), (THREADS, 1, 1),
        key=config, programmatic=early,
    )  # fmt: skip
    finish_partials(op, few, at, partials, blocks)

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Peak rates of the machine, timed like the rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from kvarn.measure.timing import Call, first_line, timed, warm_up

__all__ = ["ceilings", "copying_kernel", "reading_kernel", "timed", "warm_up"]

CEILING_BYTES = 1 << 31

# --- ceilings ------------------------------------------------------------------------------------

THREADS = 256
READS, COPIES = 8, 4  # 16-byte accesses per thread


def reading_kernel() -> Any:
    """A kernel that only reads, 16 bytes per access; each warp writes one sum per 4 KiB."""
    import kvarn as kv

    @kv.kernel(block=(THREADS, 1, 1))
    def read_only(x: kv.Buffer[kv.i32, 1], out: kv.Buffer[kv.i32, 1]):
        first = kv.block_id.x * (READS * THREADS) + kv.thread_id.x
        parts = [x.load((first + u * THREADS) * 4, width=4) for u in range(READS)]
        total = kv.i32(0)
        for part in parts:
            for lane in kv.static(range(4)):
                total = total + part[lane]
        total = kv.warp_reduce(total, "add")
        if kv.lane_id() == 0:
            out[kv.block_id.x * (THREADS // 32) + kv.warp_id()] = total

    return read_only


def copying_kernel() -> Any:
    """A kernel that only copies, 16 bytes per access."""
    import kvarn as kv

    @kv.kernel(block=(THREADS, 1, 1))
    def copy_only(x: kv.Buffer[kv.i32, 1], out: kv.Buffer[kv.i32, 1]):
        first = kv.block_id.x * (COPIES * THREADS) + kv.thread_id.x
        parts = [x.load((first + u * THREADS) * 4, width=4) for u in range(COPIES)]
        for u in kv.static(range(COPIES)):
            out.store((first + u * THREADS) * 4, value=parts[u])

    return copy_only


def ceilings(arrays: Any) -> Iterator[dict[str, Any]]:
    """Measure the peak rates: records of kind ``"ceiling"`` with ``rate`` in TB/s or TFLOP/s, or ``us`` of a launch."""

    def record(what: str, who: str, call: Call, work: float, check: Callable[[], bool] | None = None) -> dict[str, Any]:
        made: dict[str, Any] = {"kind": "ceiling", "case": what, "who": who, "ok": False}
        with contextlib.suppress(ImportError):
            try:
                call(0)
                arrays.synchronize()
                made["ok"] = check is None or check()
                made |= timed(call, 1, arrays)
                made["rate"] = work / made["us"] / 1e6
            except Exception as error:
                made["note"] = f"{type(error).__name__}: {first_line(error)}"
        return made

    if not arrays.on_gpu:
        a, b = arrays.normal((1 << 20,), "f32"), arrays.empty((1 << 20,), "f32")

        def plain(_: int) -> None:
            b[...] = a

        yield record("copy", "assignment", plain, 8 << 20, lambda: arrays.equal(a, b))
        yield record("read", "sum", lambda _: a.sum(), 4 << 20)
        m = arrays.normal((256, 256), "f32")
        yield record("matmul", "matmul", lambda _: m @ m, 2 * 256**3)
        return
    yield from _memory_ceilings(arrays, record)
    arrays.free()
    a, b = arrays.normal((8192, 8192), "bf16"), arrays.normal((8192, 8192), "bf16")
    yield record("matmul", "torch mm, bf16, 8192³", lambda _: arrays.torch.mm(a, b), 2 * 8192**3)
    small = arrays.empty((16,), "f32")
    yield record("launch", "torch fill of 16 elements", lambda _: small.fill_(1.0), 0)


def _memory_ceilings(arrays: Any, record: Callable[..., dict[str, Any]]) -> Iterator[dict[str, Any]]:
    torch, count = arrays.torch, CEILING_BYTES // 4
    x = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    sums = torch.empty(count // (READS * 4 * 32), dtype=torch.int32, device="cuda")
    read, copy = reading_kernel(), copying_kernel()
    read_grid, copy_grid = count // (READS * 4 * THREADS), count // (COPIES * 4 * THREADS)
    how, wanted = "kvarn, 16 bytes per thread", int(x.sum(dtype=torch.int64)) % 2**32

    def summed() -> bool:
        return int(sums.sum(dtype=torch.int64)) % 2**32 == wanted

    yield record("read", how, lambda _: read[read_grid, THREADS](x, sums), CEILING_BYTES, summed)
    yield record("read", "torch amax", lambda _: x.amax(), CEILING_BYTES)
    yield record("copy", how, lambda _: copy[copy_grid, THREADS](x, y), 2 * CEILING_BYTES, lambda: torch.equal(x, y))
    as_float, y_float = x.view(torch.float32), y.view(torch.float32)
    yield record("copy", "torch neg", lambda _: torch.neg(as_float, out=y_float), 2 * CEILING_BYTES)

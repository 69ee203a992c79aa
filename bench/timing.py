# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Times of calls, and the ceilings of the machine.

On a GPU: medians of replays of a CUDA graph that holds many calls, over layers in turn, so that the L2 holds none of
what a call reads and no launch is waited for. A call that cannot be captured is timed in a plain loop, and its record
says so. On the CPU: the clock.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from .arrays import Arrays

TARGET_MS = 8.0  # of one replay
REPLAYS = 9
MOST_CALLS = 512  # in one graph
CEILING_BYTES = 1 << 31

Call = Callable[[int], Any]  # takes the layer


def timed(call: Call, layers: int, arrays: Arrays) -> dict[str, Any]:
    """Time one call.

    Returns
    -------
    dict
        ``us``, ``us_min``, ``us_max`` (microseconds of one call: median, least, most), ``mode``, ``calls`` (in one
        replay), ``host_us`` (of issuing one call, on a GPU).
    """
    return _on_gpu(call, layers, arrays) if arrays.on_gpu else _on_cpu(call, layers)


def _on_cpu(call: Call, layers: int) -> dict[str, Any]:
    for layer in range(layers):
        call(layer)
    samples = []
    for _ in range(3):
        begin = time.perf_counter()
        for layer in range(layers):
            call(layer)
        samples.append((time.perf_counter() - begin) / layers * 1e6)
    return _summary(samples, "clock", layers)


def _on_gpu(call: Call, layers: int, arrays: Any) -> dict[str, Any]:
    torch = arrays.torch

    def span(run: Callable[[], Any]) -> float:
        """Microseconds between two events around a run."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3

    def once() -> None:
        for layer in range(layers):
            call(layer)

    call(0)
    torch.cuda.synchronize()
    estimate = max(span(once) / layers, 0.5)
    if estimate < 2e4:
        estimate = max(span(once) / layers, 0.5)  # the first pass may have compiled or allocated
    count = layers * max(1, min(math.ceil(TARGET_MS * 1e3 / (estimate * layers)), max(1, MOST_CALLS // layers)))
    replays = REPLAYS if estimate * count < 1e5 else 3
    begin = time.perf_counter()
    few = min(count, 20)
    for i in range(few):
        call(i % layers)
    host_us = (time.perf_counter() - begin) / few * 1e6
    torch.cuda.synchronize()

    def all_calls() -> None:
        for i in range(count):
            call(i % layers)

    mode, run = "graph", all_calls
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            all_calls()
        run = graph.replay
    except Exception as error:
        mode = f"no graph: {_first_line(error)}"
        torch.cuda.synchronize()
    run()
    torch.cuda.synchronize()
    samples = [span(run) / count for _ in range(replays)]
    del graph
    return {**_summary(samples, mode, count), "host_us": host_us}


def _summary(samples: list[float], mode: str, calls: int) -> dict[str, Any]:
    ordered = sorted(samples)
    return {"us": ordered[len(ordered) // 2], "us_min": ordered[0], "us_max": ordered[-1], "mode": mode, "calls": calls}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:80]


def warm_up(arrays: Any, seconds: float = 0.7) -> None:
    """Bring the clocks up."""
    if not arrays.on_gpu:
        return
    x = arrays.normal((4096, 4096), "bf16")
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        arrays.torch.mm(x, x)
        arrays.synchronize()


# --- ceilings ------------------------------------------------------------------------------------

THREADS = 256
READS, COPIES = 8, 4  # 16-byte accesses of a thread


def reading_kernel() -> Any:
    """A kernel that only reads, 16 bytes at a time: a warp leaves one sum a 4 KiB."""
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
    """A kernel that only copies, 16 bytes at a time."""
    import kvarn as kv

    @kv.kernel(block=(THREADS, 1, 1))
    def copy_only(x: kv.Buffer[kv.i32, 1], out: kv.Buffer[kv.i32, 1]):
        first = kv.block_id.x * (COPIES * THREADS) + kv.thread_id.x
        parts = [x.load((first + u * THREADS) * 4, width=4) for u in range(COPIES)]
        for u in kv.static(range(COPIES)):
            out.store((first + u * THREADS) * 4, value=parts[u])

    return copy_only


def ceilings(arrays: Any) -> Iterator[dict[str, Any]]:
    """Measure the ceilings: records of kind ``"ceiling"`` with ``rate`` in TB/s or TFLOP/s, ``us`` of a launch."""

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
                made["note"] = f"{type(error).__name__}: {_first_line(error)}"
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
    how, wanted = "kvarn, 16 bytes a thread", int(x.sum(dtype=torch.int64)) % 2**32

    def summed() -> bool:
        return int(sums.sum(dtype=torch.int64)) % 2**32 == wanted

    yield record("read", how, lambda _: read[read_grid, THREADS](x, sums), CEILING_BYTES, summed)
    yield record("read", "torch amax", lambda _: x.amax(), CEILING_BYTES)
    yield record("copy", how, lambda _: copy[copy_grid, THREADS](x, y), 2 * CEILING_BYTES, lambda: torch.equal(x, y))
    as_float, y_float = x.view(torch.float32), y.view(torch.float32)
    yield record("copy", "torch neg", lambda _: torch.neg(as_float, out=y_float), 2 * CEILING_BYTES)

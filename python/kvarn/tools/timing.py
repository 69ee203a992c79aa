# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Times of calls.

On a GPU: medians of replays of a CUDA graph that holds many calls, over layers in turn, so that the L2 holds none of
what a call reads and no launch is waited for. A call that cannot be captured is timed in a plain loop, and its record
says so. On the CPU: the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from .arrays import Arrays

TARGET_MS = 8.0  # of one replay
REPLAYS = 9
MOST_CALLS = 512  # in one graph

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


def span(run: Callable[[], Any], torch: Any = None) -> float:
    """Microseconds of a run: between two events of a GPU's, where torch is given, else by the clock."""
    if torch is None:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def _on_cpu(call: Call, layers: int) -> dict[str, Any]:
    for layer in range(layers):
        call(layer)

    def once() -> None:
        for layer in range(layers):
            call(layer)

    return _summary([span(once) / layers for _ in range(3)], "clock", layers)


def _on_gpu(call: Call, layers: int, arrays: Any) -> dict[str, Any]:
    torch = arrays.torch

    def once() -> None:
        for layer in range(layers):
            call(layer)

    call(0)
    torch.cuda.synchronize()
    estimate = max(span(once, torch) / layers, 0.5)
    if estimate < 2e4:
        estimate = max(span(once, torch) / layers, 0.5)  # the first pass may have compiled or allocated
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
        mode = f"no graph: {first_line(error)}"
        torch.cuda.synchronize()
    run()
    torch.cuda.synchronize()
    samples = [span(run, torch) / count for _ in range(replays)]
    del graph
    return {**_summary(samples, mode, count), "host_us": host_us}


def _summary(samples: list[float], mode: str, calls: int) -> dict[str, Any]:
    ordered = sorted(samples)
    return {"us": ordered[len(ordered) // 2], "us_min": ordered[0], "us_max": ordered[-1], "mode": mode, "calls": calls}


def first_line(error: BaseException) -> str:
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

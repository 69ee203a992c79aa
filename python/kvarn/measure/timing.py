# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Timing of calls.

On a GPU: medians of replays of a CUDA graph with many calls that rotate over layers, so that the L2 has none of a
call's inputs and launch latency is hidden. A call that cannot be captured is timed in a loop, and its record says so.
On the CPU: the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

TARGET_MS = 8.0  # duration of one replay
REPLAYS = 9
MOST_CALLS = 512  # in one graph

Call = Callable[[int], Any]  # takes the layer


def timed(call: Call, layers: int, arrays: Any) -> dict[str, Any]:
    """Time one call.

    Returns
    -------
    dict
        ``us``, ``us_min``, ``us_max`` (microseconds per call: median, least, most), ``mode``, ``calls`` (per replay),
        ``host_us`` (to issue one call, on a GPU).
    """
    run, count, mode = repeated(call, layers, arrays)
    torch = arrays.torch if arrays.on_gpu else None
    samples = [span(run, torch) / count]
    more = REPLAYS if torch is not None and samples[0] * count < 1e5 else 3
    samples += [span(run, torch) / count for _ in range(more - 1)]
    found = _summary(samples, mode, count)
    if torch is not None:
        few = min(count, 20)
        begin = time.perf_counter()
        for i in range(few):
            call(i % layers)
        found["host_us"] = (time.perf_counter() - begin) / few * 1e6
        arrays.synchronize()
    return found


def span(run: Callable[[], Any], torch: Any = None) -> float:
    """Microseconds of a run: between two GPU events if torch is given, else by the clock."""
    if torch is None:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    begin, end = between_events(run, torch)
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def between_events(run: Callable[[], Any], torch: Any) -> tuple[Any, Any]:
    """Start a run between two GPU events, and return the events; nothing waits for them."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    return begin, end


def captured(call: Callable[[], Any], torch: Any) -> tuple[Callable[[], Any], str]:
    """(the replay of a CUDA graph of a call, ``"graph"``), or (the call, why it cannot be captured)."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
        return graph.replay, "graph"
    except Exception as error:
        torch.cuda.synchronize()
        return call, f"no graph: {first_line(error)}"


def repeated(call: Call, layers: int, arrays: Any) -> tuple[Callable[[], Any], int, str]:
    """A function that repeats a call, rotating over layers: a CUDA graph, or a loop without one.

    Returns
    -------
    run : callable
    count : int
        Calls per run.
    mode : str
        ``"graph"``, ``"clock"`` on the CPU, or ``"no graph: "`` and the reason why a call cannot be captured.
    """

    def once() -> None:
        for layer in range(layers):
            call(layer)

    if not arrays.on_gpu:
        once()
        return once, layers, "clock"
    torch = arrays.torch
    call(0)
    torch.cuda.synchronize()
    estimate = max(span(once, torch) / layers, 0.5)
    if estimate < 2e4:
        estimate = max(span(once, torch) / layers, 0.5)  # the first pass may have compiled or allocated
    count = layers * max(1, min(math.ceil(TARGET_MS * 1e3 / (estimate * layers)), max(1, MOST_CALLS // layers)))

    def all_calls() -> None:
        for i in range(count):
            call(i % layers)

    run, mode = captured(all_calls, torch)
    run()
    torch.cuda.synchronize()
    return run, count, mode


def _summary(samples: list[float], mode: str, calls: int) -> dict[str, Any]:
    ordered = sorted(samples)
    return {"us": ordered[len(ordered) // 2], "us_min": ordered[0], "us_max": ordered[-1], "mode": mode, "calls": calls}


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:80]


def warm_up(arrays: Any, seconds: float = 0.7) -> None:
    """Let the clocks reach their steady state."""
    if not arrays.on_gpu:
        return
    x = arrays.normal((4096, 4096), "bf16")
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        arrays.torch.mm(x, x)
        arrays.synchronize()

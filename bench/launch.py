# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Host time per launch, by route: python bench/launch.py

The kernel is empty, so the time is Python's and the driver's. Every route needs a GPU; with torch, routes from torch
tensors are included. The figure is the median over repeats of the mean of many launches; the queue is drained between
repeats.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from kvarn import artifact as A
from kvarn.dialect import dtypes, layout
from kvarn.runtime import driver, quick
from kvarn.runtime.launch import Launcher

GOALS = {"prepared": 3.5, "torch": 8.0, "captured": 0.2}  # microseconds
_PTX_TYPES = {"ptr": "u64", "i64": "u64", "i32": "u32", "f32": "f32"}


def nothing(args: list[A.Arg]) -> A.Artifact:
    """A kernel with these arguments that returns immediately."""
    entry = A.Entry("nothing", args, A.flatten(args))
    params = ", ".join(f".param .{_PTX_TYPES[p.type]} p{i}" for i, p in enumerate(entry.params))
    ptx = f".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry nothing({params})\n{{\n  ret;\n}}\n"
    return A.Artifact("nothing", "sm_80", "8.0", {"ptx": ptx}, [entry])


def buffer(name: str, rank: int) -> A.Arg:
    return A.Arg(name, "buffer", dtypes.f32, rank)


def median_us(launch: Callable[[], Any], wait: Callable[[], Any], repeats: int = 15, count: int = 500) -> float:
    """Median microseconds per call. ``count`` is below the depth of the driver's queue, so no launch blocks."""
    launch()
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        for _ in range(count):
            launch()
        times.append((time.perf_counter() - start) / count * 1e6)
    wait()
    return statistics.median(times)


class _Cache:
    """A cache object without memory, for the loader; the kernel accesses none."""

    device = ("cuda", 0)
    readonly = False

    def __init__(self, spec: layout.CacheSpec) -> None:
        self.spec = spec
        self._fields = tuple(range(0, 16 * len(layout.cache_fields(spec)), 16))

    def fields(self) -> tuple[int, ...]:
        return self._fields


class _Array:
    """A minimal __cuda_array_interface__ that belongs to no library."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": "<f4",
            "strides": None,
            "data": (4096, False),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def routes(stream: int) -> dict[str, Callable[[], Any]]:
    """The routes to time, by name."""
    spec = layout.spec_of("paged", "bf16", 8, 128, page_size=16)
    scalars = Launcher(nothing([A.Arg("n", "scalar", dtypes.i32)]))
    cache_args = [
        A.Arg("keys", "cache", spec=spec),
        A.Arg("values", "cache", spec=spec),
        buffer("q", 3),
        buffer("out", 3),
        A.Arg("scale", "scalar", dtypes.f32),
    ]
    cached = Launcher(nothing(cache_args))
    keys, values, q, out = _Cache(spec), _Cache(spec), _Array((64, 32, 128)), _Array((64, 32, 128))
    grid, block = (64, 8), 128
    prepared = cached.prepare(grid, block, keys, values, q, out, 0.1)
    # The lower bound: the driver's function with packed arguments.
    prepared(stream)
    quick, launch = prepared._prepared.parts
    found: dict[str, Callable[[], Any]] = {
        "prepared: the driver's part": lambda: launch(*quick[stream]),
        "prepared, stream given": lambda: prepared(stream),
        "prepared, stream 0": lambda: prepared(0),
        "prepared, current stream": lambda: prepared(),
        "call, one scalar": lambda: scalars(grid, block, 1, stream=stream),
        "call, 2 caches + 2 arrays": lambda: cached(grid, block, keys, values, q, out, 0.1, stream=stream),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        tensors = [torch.empty(64, 32, 128, device="cuda") for _ in range(8)]
        three = Launcher(nothing([buffer(f"t{i}", 3) for i in range(3)]))
        eight = Launcher(nothing([buffer(f"t{i}", 3) for i in range(8)]))
        found["call, 3 torch tensors"] = lambda: three(grid, block, *tensors[:3])
        found["call, 8 torch tensors"] = lambda: eight(grid, block, *tensors)
        found["call, 2 caches + 2 torch tensors"] = lambda: cached(grid, block, keys, values, *tensors[:2], 0.1)
        found |= operations(torch)
        ready = eight.prepare(grid, block, *tensors)
        found["prepared, 8 torch tensors"] = lambda: ready()
    return found


def operations(torch: Any) -> dict[str, Callable[[], Any]]:
    """Decode operations on torch tensors; their kernels are short, so the queue does not fill."""
    import kvarn as kv

    kinds: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    blocks, query = torch.zeros(8, 2, 1, 16, 2, 128, **kinds), torch.zeros(2, 8, 128, **kinds)
    key, out = torch.zeros(2, 2, 128, **kinds), torch.zeros(2, 8, 128, **kinds)
    lengths, offsets = (torch.arange(n, dtype=torch.int32, device="cuda") for n in (2, 3))
    table = torch.arange(48, dtype=torch.int32, device="cuda").view(2, 24) % 8
    pool = kv.PagedKVCacheCollection(blocks, lengths, table, 1, 16)
    freqs = torch.zeros(64, 128, device="cuda")
    x, weight = torch.zeros(2, 64, **kinds), torch.zeros(12 * 128, 64, **kinds)
    return {
        "kv.ops.append": lambda: kv.ops.append(pool, 0, key, key, offsets),
        "kv.ops.rope_append": lambda: kv.ops.rope_append(pool, 0, query, key, key, offsets, freqs, query_out=out),
        "kv.ops.project_append": lambda: kv.ops.project_append(pool, 0, x, weight, offsets, query_out=out),
        "kv.ops.attention, 2 launches": lambda: kv.ops.attention(pool, 0, query, offsets, out=out),
        "... and torch.empty_like": lambda: kv.ops.attention(pool, 0, query, offsets),
        "kv.ops.increment_cache_lengths": lambda: kv.ops.increment_cache_lengths(lengths, offsets),
    }


FACTOR = 3.0


def scaled(x: Any) -> Any:
    return x * FACTOR


def captured() -> dict[str, Callable[[], Any]]:
    """What asks before a launch of a kernel whether all that it reads is as it was. No GPU is needed."""
    import kvarn as kv

    @kv.kernel
    def small(x: kv.Buffer[kv.f32, 1]):
        x[kv.thread_id.x] = 2.0

    @kv.kernel
    def larger(x: kv.Buffer[kv.f32, 1]):
        x[kv.thread_id.x] = scaled(x[kv.thread_id.x]) + FACTOR

    found: dict[str, Callable[[], Any]] = {}
    for name, kernel in (("nothing", small), ("a helper and a global", larger)):
        kernel.captured()
        found[f"captured: {name}"] = functools.partial(kernel._captured[0], kernel.function)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file")
    parser.add_argument("--python", action="store_true", help="without the native part")
    options = parser.parse_args(argv)
    if options.python:
        quick._native = None
    status = driver.status()
    if not status.usable:
        print(f"bench/launch.py needs a GPU: {status.reason}", file=sys.stderr)
        return 1
    try:
        import torch

        torch.cuda.init()
    except ImportError:
        print("torch is not installed: its routes are left out", file=sys.stderr)
    from kvarn.runtime import device

    on = device.device(0)
    figures = {name: median_us(check, lambda: None) for name, check in captured().items()}
    with on.active():
        stream = int(driver.call("cuStreamCreate", 1))
        figures |= {
            name: median_us(launch, lambda: driver.call("cuCtxSynchronize")) for name, launch in routes(stream).items()
        }
    part = "with" if quick.available() else "without"
    version = ".".join(map(str, status.version or ()))
    print(f"{on.name}, driver of CUDA {version}, host time per launch, {part} the native part")
    for name, us in figures.items():
        goal = GOALS.get(name.partition(":")[0].partition(",")[0], GOALS["torch"])
        print(f"  {name:36s} {us:7.2f} us   goal {goal:g}{'' if us <= goal else '  MISSED'}")
    if options.json:
        with open(options.json, "w") as f:
            json.dump({"device": on.name, "microseconds": figures}, f, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

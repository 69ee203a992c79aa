# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Page transfers between a GPU and pinned host memory, by run size: python -m bench.moves [--mib 64]

A run is a contiguous part of a page. The columns give GB/s of ``kv.ops.transfer_pages`` with its kernel and with the
driver's copies, of the driver's batched copy, and of one contiguous copy of as many bytes. Each transfer is checked.
Pages are random in both pools.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvarn.runtime import driver, transfers

from .report import table

LAYERS, HEADS, SIZE = 8, 8, 128
PAGES = (1, 4, 8, 16, 64)  # tokens per page: runs of 2 to 128 KiB
REPEATS = 5


def pool(torch: Any, pages: int, page_size: int, device: str) -> Any:
    """A one-sequence pool and its blocks: random on a GPU, zeros in pinned memory."""
    import kvarn as kv

    shape = (2, LAYERS, pages, page_size, HEADS, SIZE)  # each page of a layer's keys is contiguous, as in most engines
    if device == "cuda":
        blocks = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    else:
        blocks = torch.zeros(shape, dtype=torch.bfloat16).pin_memory()
    none = torch.zeros((0, 1), dtype=torch.int32, device=device)
    return kv.ForeignPages(blocks, none[:, 0].contiguous(), none, "2LNPHD")


def rate(torch: Any, call: Callable[[], None], count: int) -> float:
    """Median GB/s of several calls, including the time to start the copies."""
    call()
    found = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return count / sorted(found)[REPEATS // 2] / 1e9


def lines(torch: Any, page_size: int, mib: int) -> list[list[str]]:
    """Lines for both directions of a page size."""
    import kvarn as kv

    run = page_size * HEADS * SIZE * 2
    n = max((mib << 20) // (run * 2 * LAYERS), 1)
    count, rng = n * run * 2 * LAYERS, np.random.default_rng(page_size)
    gpu, host = pool(torch, n + 7, page_size, "cuda"), pool(torch, n + 3, page_size, "cpu")
    ids = [rng.permutation(p.num_blocks)[:n] for p in (gpu, host)]
    stream = torch.cuda.Stream()
    found = []
    for to_host in (True, False):
        source, target = (gpu, host) if to_host else (host, gpu)
        places = ids if to_host else ids[::-1]
        first, second = (p.astype(np.int64) for p in places)
        runs = transfers.page_runs(source, target, first, second, None)

        def checked(move: Callable[[], None], pair: Any = (source, target), at: Any = places) -> str:
            pair[1].blocks.zero_()
            torch.cuda.synchronize()  # transfers run on another stream
            try:
                move()
                torch.cuda.synchronize()
                moved, wanted = (
                    pair[i].blocks[:, :, torch.as_tensor(at[i], device=pair[i].blocks.device)].cpu() for i in (1, 0)
                )
                return f"{rate(torch, move, count):.1f}" if torch.equal(moved, wanted) else "wrong"
            except Exception as error:
                return f"{type(error).__name__}: {str(error)[:60]}"

        def ours(small: int, pair: Any = (source, target), at: Any = places) -> None:
            before, transfers.SMALL = transfers.SMALL, small
            try:
                kv.ops.transfer_pages(*pair, *at, stream=stream)
            finally:
                transfers.SMALL = before

        flat = [torch.empty(count, dtype=torch.uint8, device=d) for d in ("cuda", "cpu")]
        flat[1] = flat[1].pin_memory()
        a, b = flat if to_host else flat[::-1]
        found.append([
            "to the host" if to_host else "to the GPU", f"{run >> 10} KiB", str(len(runs.bytes)),
            checked(lambda: ours(1 << 40)),
            checked(lambda runs=runs, out=to_host: transfers.run(runs, 0, stream.cuda_stream, out)),
            checked(lambda runs=runs: transfers.run_batch(runs, 0, stream.cuda_stream)),
            f"{rate(torch, lambda a=a, b=b: b.copy_(a, non_blocking=True), count):.1f}",
        ])  # fmt: skip
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    options = parser.parse_args(argv)
    if not driver.status().usable:
        print(f"bench.moves needs a GPU: {driver.status().reason}", file=sys.stderr)
        return 2
    import torch  # type: ignore[import-not-found]

    head = ["", "run", "runs", "kernel", "driver copies", "cuMemcpyBatchAsync", "one copy"]
    print(table([head, *(line for size in PAGES for line in lines(torch, size, options.mib))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Processes that are ranks of torch.distributed, and run what tests give them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

SECONDS = 120  # for what a test gives: a rank that hangs is an error of the test


class Workers:
    """Ranks on the CPU (gloo), or each on a GPU of its own (NCCL). They start once, which takes longer than a test."""

    def __init__(self, world: int, store: str, device: str = "cpu") -> None:
        context = torch.multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(world)]
        self.world, self._ends = world, [mine for mine, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, world, store, device, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(rank, world, device, *args)`` gives on each rank; None of one that has died."""
        for end in self._ends:
            end.send((function, args))
        found, errors = [], []
        until = time.monotonic() + SECONDS
        for rank, end in enumerate(self._ends):
            error, result = f"does not answer in {SECONDS} s", None
            try:
                if end.poll(max(until - time.monotonic(), 0)):
                    error, result = end.recv()
            except (EOFError, ConnectionResetError):
                error = None
            errors += [f"rank {rank}:\n{error}"] if error else []
            found.append(result)
        assert not errors, "\n".join(errors)
        return found

    def stop(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(5)
            process.kill()
            process.join()


def _serve(rank: int, world: int, store: str, device: str, end: Any) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    while True:
        try:
            function, args = end.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = None, function(rank, world, device, *args)
        except BaseException:
            answer = traceback.format_exc(), None
        end.send(answer)

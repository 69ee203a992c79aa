# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tuning of one's own kernels: the fastest of some schedules, measured at the first launch of a shape, kept in a file.

``kernels.json`` beside the compile cache has the best schedule of every kernel, target and shape, and
``kernels.timings.jsonl`` every measurement, with device, versions and clocks. Both are read by all processes, and may
be copied to other machines.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn import testing
from kvarn.dialect import schedules
from kvarn.dsl.kernel import KernelFunction
from kvarn.env import env
from kvarn.errors import KernelError
from kvarn.files import read_regular, write_output

from .arrays import arrays
from .timing_log import Log

VERSION = 1
FILE, TIMINGS = "kernels.json", "kernels.timings.jsonl"
Measure = Callable[[Callable[[], None]], float]  # microseconds of a call


@dataclass(frozen=True)
class Candidate:
    """A block and the entries of a schedule."""

    block: int
    schedule: Mapping[str, Any]

    def __str__(self) -> str:
        entries = " ".join(f"{name}={value}" for name, value in sorted(self.schedule.items()))
        return f"block={self.block} {entries}".rstrip()


@dataclass(frozen=True)
class Found:
    """The fastest candidate of a shape.

    Attributes
    ----------
    us : float
        Microseconds of a launch.
    measured, refused : int
        Candidates that ran, and those that their target refused.
    """

    candidate: Candidate
    us: float
    measured: int
    refused: int


def autotune(
    space: Mapping[str, Sequence[Any]], key: Sequence[str] = (), restore: Sequence[str] = (),
) -> Callable[[KernelFunction], Autotuned]:  # fmt: skip
    """Choose the schedule of a kernel by measuring: a decorator above ``@kv.kernel(block=...)``.

    The kernel is then launched as ``kernel[grid](...)``. The first launch of a shape on a GPU measures all candidates,
    unless a file has the best one already. On the host there is nothing to choose.

    Parameters
    ----------
    space : mapping
        Values of ``block`` and of entries of the kernel's schedule; candidates are all combinations that are legal.
    key : sequence of str
        Parameters that make a shape: of buffers their extents, of numbers their values. Types always count.
    restore : sequence of str
        Tensors that a launch both reads and writes: each measured launch starts from copies of them.

    Raises
    ------
    ValueError
        For an entry that schedules do not have, a name that is no parameter, or a space without a legal candidate.
    """

    def decorated(kernel: KernelFunction) -> Autotuned:
        if not isinstance(kernel, KernelFunction):
            raise TypeError(f"@kv.autotune stands above @kv.kernel, got {type(kernel).__name__}")
        return Autotuned(kernel, space, key, restore)

    return decorated


class Autotuned:
    """A kernel whose schedule is measured. ``kernel[grid](...)`` or ``kernel[grid, stream](...)`` launches it."""

    def __init__(
        self, kernel: KernelFunction, space: Mapping[str, Sequence[Any]], key: Sequence[str], restore: Sequence[str]
    ) -> None:
        self.kernel, self.key, self.restore = kernel, tuple(key), tuple(restore)
        for name in (*self.key, *self.restore):
            if name not in kernel.signature.parameters:
                raise ValueError(
                    f"{kernel.name} has the parameters {', '.join(kernel.signature.parameters)}, got {name!r}"
                )
        self.candidates = tuple(candidates(kernel, space))
        self.measure: Measure = measured
        self._made: dict[str, KernelFunction] = {}
        self._best: dict[str, Candidate] = {}

    def __getitem__(self, configuration: Any) -> Callable[..., None]:
        grid, stream = (
            configuration if isinstance(configuration, tuple) and len(configuration) == 2 else (configuration, None)
        )

        def launch(*args: Any, **kwargs: Any) -> None:
            given = self.kernel.signature.bind(*args, **kwargs).args if kwargs else args
            chosen = self.candidate_for(grid, given)
            self.made(chosen)[grid, chosen.block, stream](*given)

        return launch

    def made(self, candidate: Candidate) -> KernelFunction:
        """The kernel with a candidate's block and schedule."""
        text = str(candidate)
        if text not in self._made:
            self._made[text] = self.kernel.with_options(block=candidate.block, schedule=dict(candidate.schedule))
        return self._made[text]

    def candidate_for(self, grid: Any, args: Sequence[Any]) -> Candidate:
        """The candidate of a launch: known, from the file, or measured now."""
        target = self.made(self.candidates[0]).compiled_for(args).target
        if target == "host" or len(self.candidates) == 1:
            return self.candidates[0]
        shape = self.shape_of(args)
        known = f"{target} {shape}"
        if known not in self._best:
            saved = entries(table_path()).get((*self.identity(), target, shape))
            if saved not in self.candidates and _is_capturing():
                return self.candidates[0]  # nothing can be measured while a graph is captured
            self._best[known] = saved if saved in self.candidates else self.tune(grid, *args).candidate
        return self._best[known]

    def tune(self, grid: Any, *args: Any) -> Found:
        """Measure all candidates for some arguments, and write the best to the file.

        Raises
        ------
        RuntimeError
            If the target refuses all candidates, with the first reason.
        """
        library = arrays("cuda") if testing._torch_with_gpu() is not None else None
        log, target, shape = Log(table_path().with_name(TIMINGS), library), "", self.shape_of(args)
        times, refused = list[tuple[float, int]](), list[str]()
        kept = {name: self._argument(name, args) for name in self.restore}
        copies = {name: _copy(tensor) for name, tensor in kept.items()}

        for number, candidate in enumerate(self.candidates):
            kernel = self.made(candidate)

            def launch(kernel: KernelFunction = kernel, block: int = candidate.block) -> None:
                for name, tensor in kept.items():
                    tensor[...] = copies[name]
                kernel[grid, block](*args)

            record = {"kernel": self.identity()[0], "shape": shape, "block": candidate.block}
            record["schedule"] = dict(candidate.schedule)
            try:
                target = kernel.compiled_for(args).target
                times.append((self.measure(launch), number))
            except (KernelError, ValueError, RuntimeError) as error:
                refused.append(str(error).splitlines()[0])
                log.put({**record, "refused": refused[-1]})
                continue
            log.put({**record, "us": times[-1][0]})
        for name, tensor in kept.items():
            tensor[...] = copies[name]
        if not times:
            raise RuntimeError(f"no schedule of {self.kernel.name} can be launched: {refused[0]}")
        us, number = min(times)
        best = self.candidates[number]
        save(table_path(), (*self.identity(), target, shape), best, us)
        self._best[f"{target} {shape}"] = best
        return Found(best, us, len(times), len(refused))

    def identity(self) -> tuple[str, str]:
        """(name, digest of the source text) of the kernel; functions that it calls are not covered."""
        function = self.kernel.function
        try:
            text = inspect.getsource(function)
        except OSError:
            text = repr(function.__code__.co_code)
        return f"{function.__module__}:{function.__qualname__}", hashlib.sha256(text.encode()).hexdigest()[:16]

    def shape_of(self, args: Sequence[Any]) -> str:
        """The arguments' types, and the extents or values of the key's parameters."""
        types = [str(getattr(spec, "spec", spec)) for spec in self.kernel.specs_of(args)]
        extents = [f"{name}={_extent(self._argument(name, args))}" for name in self.key]
        return "; ".join([", ".join(types), *extents])

    def _argument(self, name: str, args: Sequence[Any]) -> Any:
        return self.kernel.signature.bind(*args).arguments[name]

    def __repr__(self) -> str:
        return f"<tuned {self.kernel!r}: {len(self.candidates)} candidates>"


def candidates(kernel: KernelFunction, space: Mapping[str, Sequence[Any]]) -> list[Candidate]:
    """The legal combinations of a space, each once."""
    given = {name: tuple(values) for name, values in space.items()}
    own = {entry.name for entry in schedules.OWN.entries}
    for name in given.keys() - {"block", *own}:
        raise ValueError(f"a space has block and the entries {', '.join(sorted(own))}, got {name!r}")
    block = kernel.options.get("block")
    if "block" not in given:
        if block is None:
            raise ValueError(f"the space or {kernel.name} must have a block")
        given["block"] = (block if isinstance(block, int) else math.prod(block),)
    fixed = dict(kernel.options.get("schedule", {}))
    found, problem = list[Candidate](), ""
    for values in itertools.product(*given.values()):
        made = {**fixed, **dict(zip(given, values, strict=True))}
        threads = made.pop("block")
        try:
            schedules.of_own_kernel(made, threads)
        except ValueError as error:
            problem = str(error)
            continue
        candidate = Candidate(threads, made)
        if candidate not in found:
            found.append(candidate)
    if not found:
        raise ValueError(f"the space of {kernel.name} has no legal candidate: {problem or 'an entry has no values'}")
    return found


def measured(call: Callable[[], None]) -> float:
    """Microseconds of a launch: the least of some replays of a CUDA graph with a cold L2."""
    return testing.do_bench(call, samples=12).us_min


# --- the file --------------------------------------------------------------------------------------


def table_path() -> Path:
    return env.cache_dir / FILE


def entries(path: Path) -> dict[tuple[str, str, str, str], Candidate]:
    """The candidates of a file by (kernel, digest, target, shape); empty without a file, or of another version."""
    return {key: Candidate(r["block"], r["schedule"]) for key, r in _records(path).items()}


def _records(path: Path) -> dict[tuple[str, str, str, str], dict[str, Any]]:
    try:
        held = json.loads(read_regular(path)[0])
    except (OSError, ValueError):
        return {}
    if not isinstance(held, dict) or held.get("version") != VERSION:
        return {}
    return {(r["kernel"], r["code"], r["target"], r["shape"]): r for r in held["entries"]}


def save(path: Path, key: tuple[str, str, str, str], best: Candidate, us: float) -> None:
    """Add an entry to a file, or replace it; processes take turns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        names = dict(zip(("kernel", "code", "target", "shape"), key, strict=True))
        record = {**names, "block": best.block, "schedule": dict(best.schedule), "us": round(us, 2)}
        every = {**_records(path), key: record}
        write_output(path, json.dumps({"version": VERSION, "entries": list(every.values())}, indent=1))


# --- arguments -------------------------------------------------------------------------------------


def _extent(argument: Any) -> Any:
    shape = getattr(argument, "shape", None)
    return list(shape) if isinstance(shape, Sequence) else argument


def _copy(tensor: Any) -> Any:
    return tensor.clone() if hasattr(tensor, "clone") else tensor.copy()


def _is_capturing() -> bool:
    torch = testing._torch_with_gpu()
    return torch is not None and torch.cuda.is_current_stream_capturing()


# --- the command -----------------------------------------------------------------------------------


def tune_file(module: Any, name: str, cases: str) -> Iterator[str]:
    """Tune a kernel of a file for every case of its function ``cases``, which yields (grid, arguments)."""
    kernel: Any = getattr(module, name, None)
    of: Any = getattr(module, cases, None)
    if not isinstance(kernel, Autotuned):
        raise ValueError(f"{name} must be a kernel under @kv.autotune(space), got {type(kernel).__name__}")
    if not callable(of):
        raise ValueError(f"the file needs a function {cases}() that yields (grid, arguments) of launches to tune for")
    launches: Any = of()
    for grid, arguments in launches:
        found = kernel.tune(grid, *arguments)
        counts = f"{found.measured} measured, {found.refused} refused"
        yield f"{name}, {kernel.shape_of(arguments)}: {found.us:.2f} µs with {found.candidate} ({counts})"


__all__ = ["Autotuned", "Candidate", "Found", "autotune"]

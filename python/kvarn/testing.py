# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How long a call takes, and whether it is faster than another one.

On a GPU each sample is one replay of a CUDA graph of the call between two events, with a cold L2: memory of twice its
size is written before. On the host a sample is a loop of calls by the clock.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvarn.measure.timing import between_events, captured, span

LEAST_US = 1000.0  # of a sample on the host


@dataclass(frozen=True)
class Timing:
    """Times of a call.

    Attributes
    ----------
    samples : tuple of float
        Microseconds per call, in the order of measurement.
    mode : str
        ``"graph"``, ``"clock"`` on the host, or ``"no graph: "`` and why the call cannot be captured.
    against : Timing, optional
        The times of the call that this one was measured against, sample by sample.
    """

    samples: tuple[float, ...]
    mode: str
    against: Timing | None = None

    @property
    def us(self) -> float:
        """The median, in microseconds."""
        return statistics.median(self.samples)

    @property
    def us_min(self) -> float:
        """The least, in microseconds."""
        return min(self.samples)

    @property
    def spread(self) -> float:
        """The width of the middle half of the samples, as a part of the median."""
        if len(self.samples) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (third - first) / self.us

    @property
    def ratio(self) -> float:
        """The median of this call's time over the other's, of samples taken one after the other.

        Raises
        ------
        ValueError
            If it was measured against nothing.
        """
        if self.against is None:
            raise ValueError("a ratio needs another call: do_bench(fn, against=other)")
        return statistics.median(a / b for a, b in zip(self.samples, self.against.samples, strict=True))

    def __str__(self) -> str:
        text = f"{self.us:.2f} us (least {self.us_min:.2f}, spread {self.spread:.1%}, {self.mode})"
        return text if self.against is None else f"{text}, {self.ratio:.3f} of {self.against}"


def do_bench(
    fn: Callable[[], Any], against: Callable[[], Any] | None = None, *, samples: int = 30, device: str | None = None
) -> Timing:
    """Time a call; with ``against``, interleaved with another call.

    Parameters
    ----------
    fn, against : callable
        Called without arguments. On a GPU they launch on torch's current stream.
    samples : int
        Measurements of each.
    device : {"cuda", "cpu"}, optional
        Where the calls run; by default a GPU if torch sees one.

    Returns
    -------
    Timing

    Raises
    ------
    ValueError
        If ``samples`` or ``device`` is not legal, or torch sees no GPU.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples must be a positive int, got {samples!r}")
    if device not in (None, "cuda", "cpu"):
        raise ValueError(f"device must be 'cuda', 'cpu' or None, got {device!r}")
    torch = _torch_with_gpu() if device != "cpu" else None
    if device == "cuda" and torch is None:
        raise ValueError("device 'cuda' needs torch with a GPU that it sees")
    calls = [fn] if against is None else [fn, against]
    timings = _on_gpu(calls, samples, torch) if torch is not None else _on_host(calls, samples)
    return timings[0] if against is None else Timing(timings[0].samples, timings[0].mode, timings[1])


def _torch_with_gpu() -> Any:
    if importlib.util.find_spec("torch") is None:
        return None
    torch = importlib.import_module("torch")
    return torch if torch.cuda.is_available() else None


def _on_host(calls: Sequence[Callable[[], Any]], samples: int) -> list[Timing]:
    def microseconds(call: Callable[[], Any], count: int) -> float:
        def calls() -> None:
            for _ in range(count):
                call()

        return span(calls) / count

    counts = []
    for call in calls:
        call()  # compiles
        counts.append(max(1, math.ceil(LEAST_US / max(microseconds(call, 1), 0.1))))
    found = [[microseconds(call, n) for call, n in zip(calls, counts, strict=True)] for _ in range(samples)]
    return [Timing(tuple(of_call), "clock") for of_call in zip(*found, strict=True)]


def _on_gpu(calls: Sequence[Callable[[], Any]], samples: int, torch: Any) -> list[Timing]:
    for call in calls:
        for _ in range(2):  # the first compiles and allocates
            call()
    torch.cuda.synchronize()
    runs = [captured(call, torch) for call in calls]
    for run, _ in runs:
        run()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    flushed = torch.empty(2 * properties.L2_cache_size, dtype=torch.uint8, device="cuda")
    events = []
    for _ in range(samples):
        for run, _ in runs:
            flushed.zero_()  # takes longer than the host needs to start what follows
            events.append(between_events(run, torch))
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) * 1e3 for begin, end in events]
    return [Timing(tuple(times[i :: len(runs)]), mode) for i, (_, mode) in enumerate(runs)]


__all__ = ["Timing", "do_bench"]

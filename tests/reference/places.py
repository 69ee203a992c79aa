# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where the suites of the cache operations run: on the host, on a GPU's code in the PTX interpreter, on a GPU.

A test makes a problem over NumPy buffers, puts it in place, runs the operation there and compares every byte of the
pool with the model's. Without torch, GPU memory is held by arrays of our own, which only show
``__cuda_array_interface__``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvarn import dispatch
from kvarn.caches import KVCacheCollection
from kvarn.dialect import dtypes
from kvarn.dispatch import Operation
from kvarn.env import env
from kvarn.runtime import buffers
from kvarn.runtime.program import Program

from . import guarded


class Place:
    """The host: buffers stay as they are."""

    name = "host"

    def put(self, array: Any) -> Any:
        """An array as the operations are to get it."""
        return array

    def get(self, array: Any) -> np.ndarray:
        """What an operation left, as a NumPy array."""
        return np.asarray(array)

    def collection(self, c: KVCacheCollection) -> KVCacheCollection:
        """A copy of a collection, its buffers in place."""
        parts = [self.put(np.array(p)) for p in (c.blocks, c.cache_lengths, c.lookup_table)]
        rest: tuple[Any, ...] = ()
        if c.scales is not None:
            rest = (self.put(np.array(c.scales)), c.quantization_granularity)
        return type(c)(*parts, c.max_seq_length, c.max_cache_length, *rest)  # type: ignore[call-arg]

    def buffers(self, c: KVCacheCollection) -> list[np.ndarray]:
        """Blocks, and scales where there are."""
        return [self.get(b) for b in (c.blocks, c.scales) if b is not None]

    def launch(self, kernel: Any, grid: Any, block: Any, *args: Any) -> None:
        """Run a kernel of the kernel language."""
        kernel[grid, block](*args)

    def program(self, program: Any, *args: Any) -> None:
        """Run a program artifact."""
        Program(program)(*args)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Operations run here meanwhile."""
        yield

    def unchecked(self) -> contextlib.AbstractContextManager[None]:
        """Operations do not look at what their tables hold meanwhile: kernels are to do what is right by themselves."""
        return Unchecked().active()


class Guarded(Place):
    """The host, where what is put in place ends at a page without access: reading past it is a SIGSEGV.

    That ends the process. In a distributed run it is a failure of the one test, and another worker goes on; else
    faulthandler shows the test and its line, and the run ends there, which a read of other memory is reason enough for.
    """

    def put(self, array: Any) -> Any:
        return guarded.copied(np.asarray(array))


class Unchecked(Place):
    """The host, where operations do not look at what their tables hold before they run, as on a GPU."""

    name = "unchecked host"

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        def call(
            operation: Any, operands: Any, attributes: Any = (), schedule: Any = None, stream: Any = None, **_: Any
        ) -> None:
            what, given = operation.specialisation(operands, attributes, tuple(sorted((schedule or {}).items())))
            dispatch.program(what)(*given)

        with _called(call):
            yield


class Named(Place):
    """No place: operations do not run, and their names are kept."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with _called(lambda operation, *_, **__: self.names.add(operation.name)):
            yield

    def launch(self, kernel: Any, grid: Any, block: Any, *args: Any) -> None:
        """Nothing."""


class Optimized(Place):
    """The host, its code optimized by LLVM to a level of ``KVARN_HOST_OPT``."""

    def __init__(self, level: int) -> None:
        self.name, self.level = f"host at level {level}", level

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        def call(operation: Any, operands: Any, attributes: Any = (), schedule: Any = None, *_: Any, **__: Any) -> None:
            what, given = operation.specialisation(operands, attributes, tuple(sorted((schedule or {}).items())))
            with env.override(host_opt=self.level):
                Program(dispatch.artifact(what))(*given)

        with _called(call):
            yield


class Interpreted(Place):
    """The code for a GPU, in the PTX interpreter.

    Operations and kernels follow each other on one stream, where one may start before the one ahead has ended. Ahead of
    each operation another kernel writes all that it is given, but for what a schedule says that nobody writes.
    """

    def __init__(self, target: str = "sm_90a", order: Any = None, multiprocessors: int = 2) -> None:
        self.name = self.target = target
        self.order, self.multiprocessors = order, multiprocessors
        self.stream: Any = None

    def launch(self, kernel: Any, grid: Any, block: Any, *args: Any) -> None:
        """Run a kernel of the kernel language."""
        from kvarn.compilation.driver import compile
        from kvarn.emulator import run as emulated

        made = compile(kernel, *kernel.specs_of(args), target=self.target)
        emulated.launch(made, grid, block, kernel.passed(args), self.order, stream=self.stream)

    def program(self, program: Any, *args: Any) -> None:
        """Run a program artifact."""
        from kvarn.emulator import run as emulated

        views = [buffers.view(a) if isinstance(a, np.ndarray) else a for a in args]
        emulated.run_program(program, views, order=self.order, stream=self.stream)

    def unchecked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # a GPU does not look

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        from kvarn.emulator.stream import Stream

        from . import emulated

        def call(
            operation: Any, operands: Any, attributes: Any = (), schedule: Any = None, stream: Any = None, **_: Any
        ) -> None:
            emulated.run(
                operation, operands, attributes, schedule, self.target, self.multiprocessors, self.order,
                stream=self.stream,
            )  # fmt: skip

        self.stream = Stream()
        with _called(call):
            yield


@contextlib.contextmanager
def _called(call: Any) -> Iterator[None]:
    """Operations are called by another function meanwhile."""
    before = Operation.__call__
    Operation.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        Operation.__call__ = before  # type: ignore[method-assign]


_TORCH = {"bf16": "bfloat16", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "f8e8m0": "float8_e8m0fnu"}


class Torch(Place):
    """A GPU, over torch tensors."""

    name = "torch"

    def unchecked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def put(self, array: Any) -> Any:
        import torch

        array = np.asarray(array)
        special = _TORCH.get(dtypes.of(array.dtype).name)
        raw = array.view(f"i{array.itemsize}") if special or array.dtype.kind == "u" else array
        tensor = torch.from_numpy(np.array(raw, copy=True)).cuda()
        return tensor.view(getattr(torch, special)) if special else tensor

    def get(self, array: Any) -> np.ndarray:
        import torch

        torch.cuda.synchronize()
        dtype = dtypes.of(array.dtype)
        raw = array.contiguous().view(getattr(torch, f"int{8 * dtype.itemsize}")).cpu().numpy()
        return raw.view(dtype.numpy)


# --- comparing -----------------------------------------------------------------------------------------


def bits(array: np.ndarray) -> np.ndarray:
    """An array's bits, so that NaN equals itself."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def assert_same(place: Place, found: KVCacheCollection, expected: KVCacheCollection) -> None:
    """Every bit of two pools is the same, poison and all."""
    for a, b in zip(place.buffers(found), Place().buffers(expected), strict=True):
        wrong = np.argwhere(bits(a) != bits(b))
        assert not len(wrong), (
            f"{len(wrong)} of {a.size} elements differ, the first at {wrong[0]}: {a[tuple(wrong[0])]} is not "
            f"{b[tuple(wrong[0])]}"
        )


def assert_close(place: Place, found: KVCacheCollection, expected: KVCacheCollection, most: float = 0.02) -> None:
    """Pools are the same but for roundings: neighbours of the type, in at most a share of the elements (f32: a few
    ulps).
    """
    for a, b in zip(place.buffers(found), Place().buffers(expected), strict=True):
        near(a, b, most)


def near(a: np.ndarray, b: np.ndarray, most: float = 0.02) -> None:
    """Elements are the same, or neighbours of their type; of f32, within some ulps of what a head sums up to."""
    differ = bits(a) != bits(b)
    if not differ.any():
        return
    x, y = a[differ].astype(np.float64), b[differ].astype(np.float64)
    assert np.isfinite([x, y]).all(), "poison differs"
    dtype = dtypes.of(a.dtype)
    if dtype.name == "f32":
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=4e-6)
        return
    assert differ.mean() <= most, f"{differ.mean():.2%} of the elements differ"
    if dtype.is_integer:
        assert np.abs(x - y).max() <= 1
        return
    mantissa = {"f16": 10, "bf16": 7, "f8e4m3": 3, "f8e5m2": 2}[dtype.name]
    # A difference of large products leaves an error that is large for the result: two roundings' worth is allowed.
    np.testing.assert_allclose(x, y, rtol=2.0 ** (1 - mantissa), atol=1e-5)

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arrays for measurements: torch tensors or NumPy arrays, behind one small interface.

The same problems, checks and calls then also run on a machine without a GPU, with small shapes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvarn.dialect import dtypes

_CHUNK = 1 << 27  # elements generated at a time if they are converted, which limits the temporary memory


class _Arrays:
    """Methods for functions that torch and NumPy share by name.

    Subclasses set ``_module``, which has these functions, and ``_placed``, which converts a NumPy array.
    """

    _module: Any
    _placed: Callable[[np.ndarray], Any]
    cast: Callable[[Any, str], Any]
    on_gpu = False

    def integers(self, values: Any) -> Any:
        """int32 from a NumPy array or a list."""
        return self._placed(np.ascontiguousarray(values, np.int32))

    def index(self, values: Any) -> Any:
        """An index into a dimension."""
        return self._placed(np.ascontiguousarray(values, np.int64))

    def put_bytes(self, array: Any, begin: int, end: int, values: Any) -> None:
        """Write the bytes of ``values`` to elements [begin, end) of the rows of an 8-bit array."""
        array.view(self._module.uint8)[..., begin:end] = values.view(self._module.uint8)

    def f32(self, array: Any) -> Any:
        return self.cast(array, "f32")

    def einsum(self, what: str, a: Any, b: Any) -> Any:
        return self._module.einsum(what, a, b)

    def concatenate(self, parts: Sequence[Any]) -> Any:
        return self._module.concatenate(list(parts), -1)

    def stack(self, parts: Sequence[Any]) -> Any:
        return self._module.stack(list(parts), -1)

    def relative_error(self, got: Any, wanted: Any) -> float:
        got, wanted = self.f32(got), self.f32(wanted)
        return float(self._module.linalg.norm(got - wanted) / self._module.linalg.norm(wanted))

    def synchronize(self) -> None:
        """Wait for the device; nothing to do on the CPU."""

    def free(self) -> None:
        """Free memory that is cached for later arrays."""


class TorchArrays(_Arrays):
    """torch tensors on ``"cuda"`` or ``"cpu"``."""

    def __init__(self, device: str, seed: int = 1) -> None:
        import torch  # type: ignore[import-not-found]

        self.torch = self._module = torch
        self.device = device
        self.on_gpu = device == "cuda"
        torch.manual_seed(seed)

    @property
    def name(self) -> str:
        return self.torch.cuda.get_device_name() if self.on_gpu else "the CPU, torch arrays"

    def dtype(self, name: str) -> Any:
        return getattr(self.torch, dtypes.by_name(name).foreign)

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        return self.torch.empty(tuple(shape), dtype=self.dtype(dtype), device=self.device)

    def normal(self, shape: Sequence[int], dtype: str) -> Any:
        """Normal random numbers of a dtype (integers: times 32); 8-bit floats are rounded from bf16."""
        if dtypes.by_name(dtype).bits > 8:
            return self.torch.randn(tuple(shape), dtype=self.dtype(dtype), device=self.device)
        made = self.empty(shape, dtype)
        flat = made.view(-1)
        for begin in range(0, flat.numel(), _CHUNK):
            count = min(_CHUNK, flat.numel() - begin)
            drawn = self.torch.randn(count, dtype=self.torch.bfloat16, device=self.device)
            if not dtypes.by_name(dtype).is_float:
                drawn = (32 * drawn).clamp(-127, 127)
            flat[begin : begin + count] = drawn.to(made.dtype)
        return made

    def _placed(self, array: np.ndarray) -> Any:
        return self.torch.as_tensor(array).to(self.device)

    def view(self, array: Any, dtype: str) -> Any:
        """The same bytes, with a wider or narrower last dimension; 8-bit types are viewed as bytes."""
        return array.contiguous().view(self.torch.uint8).view(self.dtype(dtype))

    def cast(self, array: Any, dtype: str) -> Any:
        return array.to(self.dtype(dtype))

    def poison(self, array: Any) -> None:
        """Fill with NaN."""
        if array.element_size() == 1:
            array.view(self.torch.uint8).fill_(0x7F)
        else:
            array.fill_(float("nan"))

    def count_numbers(self, array: Any) -> int:
        """Number of elements that are not NaN."""
        bits = {1: self.torch.uint8, 2: self.torch.int16}[array.element_size()]
        poison = self.empty((1,), "bf16") if array.element_size() == 2 else array.new_empty(1)
        self.poison(poison)
        return int((array.view(bits) != poison.view(bits)).sum())

    def equal(self, a: Any, b: Any) -> bool:
        bits = {1: self.torch.uint8, 2: self.torch.int16, 4: self.torch.int32}[a.element_size()]
        return bool(self.torch.equal(a.view(bits), b.view(bits)))

    def softmax(self, scores: Any) -> Any:
        return scores.softmax(-1)

    def where(self, condition: Any, a: Any, b: float) -> Any:
        return self.torch.where(condition, a, self.torch.full_like(a, b))

    def synchronize(self) -> None:
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def free(self) -> None:
        if self.on_gpu:
            self.torch.cuda.empty_cache()


class NumPyArrays(_Arrays):
    """NumPy arrays, on which kvarn runs through its host target."""

    device = "cpu"
    name = "the CPU, NumPy arrays"
    _module = np

    def __init__(self, seed: int = 1) -> None:
        self._rng = np.random.default_rng(seed)

    def dtype(self, name: str) -> Any:
        return dtypes.by_name(name).numpy

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        return np.empty(tuple(shape), self.dtype(dtype))

    def normal(self, shape: Sequence[int], dtype: str) -> Any:
        drawn = self._rng.standard_normal(tuple(shape), np.float32)
        if not dtypes.by_name(dtype).is_float:
            drawn = np.clip(32 * drawn, -127, 127)
        return drawn.astype(self.dtype(dtype))

    def _placed(self, array: np.ndarray) -> Any:
        return array

    def view(self, array: Any, dtype: str) -> Any:
        return np.ascontiguousarray(array).view(self.dtype(dtype))

    def cast(self, array: Any, dtype: str) -> Any:
        return array.astype(self.dtype(dtype))

    def poison(self, array: Any) -> None:
        array[...] = np.nan

    def count_numbers(self, array: Any) -> int:
        return int((~np.isnan(array.astype(np.float32))).sum())

    def equal(self, a: Any, b: Any) -> bool:
        return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()

    def softmax(self, scores: Any) -> Any:
        raised = np.exp(scores - scores.max(-1, keepdims=True))
        return raised / raised.sum(-1, keepdims=True)

    def where(self, condition: Any, a: Any, b: float) -> Any:
        return np.where(condition, a, np.float32(b))


Arrays = TorchArrays | NumPyArrays


def arrays(device: str) -> Arrays:
    """The arrays of ``"cuda"``, of ``"host"`` (torch's if it is installed, else NumPy's) or of ``"numpy"``.

    Raises
    ------
    RuntimeError
        For ``"cuda"`` without torch, or with a torch without CUDA.
    """
    found = importlib.util.find_spec("torch") is not None
    if device == "cuda":
        if not found:
            raise RuntimeError("the measurements on a GPU work on torch tensors: pip install torch")
        import torch  # type: ignore[import-not-found]

        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} sees no GPU: install a build of torch with CUDA")
        return TorchArrays("cuda")
    if device == "host":
        return TorchArrays("cpu") if found else NumPyArrays()
    if device == "numpy":
        return NumPyArrays()
    raise ValueError(f"device must be cuda, host or numpy, got {device!r}")

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The demo's array backends: NumPy on the CPU, torch on a GPU.

The dense layers are f32 on both, so that `--check` measures the cache only; the cache is f32 or bf16. The rest of the
demo uses what NumPy arrays and torch tensors have in common, and these methods.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class NumpyArrays:
    """NumPy arrays, for kernels of the target `host`."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype({"f32": np.float32, "bf16": ml_dtypes.bfloat16}[dtype])
        self.name = f"CPU, {os.cpu_count()} cores"

    def upload(self, array: NDArray[Any]) -> Any:
        """Copy an array from the host to the device."""
        return array

    def download(self, x: Any) -> NDArray[Any]:
        """Copy a result to the host."""
        return x

    def zeros(self, *shape: int) -> Any:
        """A zeroed buffer in the cache's dtype."""
        return np.zeros(shape, self.dtype)

    def to_cache(self, x: Any) -> Any:
        """A result of the dense layers, contiguous and in the cache's dtype."""
        return np.ascontiguousarray(x, self.dtype)

    def to_dense(self, x: Any) -> Any:
        """A result of the cache's operations, in f32."""
        return x.astype(np.float32, copy=False)

    def tanh(self, x: Any) -> Any:
        return np.tanh(x)

    def wait(self) -> None:
        """Wait until the device is idle."""


class TorchArrays:
    """torch tensors on the GPU, with the methods of `NumpyArrays`."""

    def __init__(self, dtype: str) -> None:
        import torch  # type: ignore[import-not-found]  # optional; `choose_device` has found it

        self._torch = torch
        self.dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
        self.name = f"GPU, {torch.cuda.get_device_name()}"

    def upload(self, array: NDArray[Any]) -> Any:
        return self._torch.from_numpy(array).to("cuda")

    def download(self, x: Any) -> NDArray[Any]:
        return x.cpu().numpy()

    def zeros(self, *shape: int) -> Any:
        return self._torch.zeros(shape, dtype=self.dtype, device="cuda")

    def to_cache(self, x: Any) -> Any:
        return x.to(self.dtype).contiguous()

    def to_dense(self, x: Any) -> Any:
        return x.float()

    def tanh(self, x: Any) -> Any:
        return x.tanh()

    def wait(self) -> None:
        self._torch.cuda.synchronize()

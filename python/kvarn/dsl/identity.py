# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Keys that distinguish specialisations of a kernel: the types and bits of static values.

Python treats 3 and 3.0, 1 and True, 0.0 and -0.0 as equal, but a kernel specialised for one of them computes something
else for the other. Keys of :func:`identity` are equal only for values that no code can distinguish.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CacheSpec, CollectionSpec, OperandSpec
from kvarn.dialect.tma_layout import TmaSpec

from .memory import BufferSpec

SPECS = frozenset([DType, BufferSpec, CacheSpec, CollectionSpec, OperandSpec, TmaSpec, type(None)])
_ATOMS = frozenset([int, bool, str])


def identity(value: Any) -> Any:
    """A hashable key of a spec, a static value, or containers and dataclasses of them.

    Raises
    ------
    TypeError
        For a value that can neither be compared by its parts nor hashed.
    """
    cls = value.__class__
    if cls in SPECS:
        return value
    if cls in _ATOMS:
        return cls, value
    if isinstance(value, float):
        return cls, struct.pack("<d", value)
    if isinstance(value, (tuple, list)):
        return cls, tuple(identity(v) for v in value)
    if isinstance(value, dict):
        return cls, tuple((identity(k), identity(v)) for k, v in value.items())
    if isinstance(value, (set, frozenset)):
        return cls, frozenset(identity(v) for v in value)
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # a NumPy scalar or array
        return cls, str(value.dtype), getattr(value, "shape", ()), value.tobytes()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return cls, tuple(identity(getattr(value, f.name)) for f in dataclasses.fields(value))
    hash(value)
    return cls, value

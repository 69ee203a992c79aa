# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arrays that abut a page without access: reading past their end, or before their start, is a SIGSEGV at once.

A pattern around an array shows what was written there, and nothing of what was read. An array can abut a page at one of
its sides only, but where it fills whole pages; what is left of its other page holds a pattern.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

SIDES = ("end", "start")
PATTERN, ALIGNMENT = 0x5A, 16
_NO_ACCESS = 0  # PROT_NONE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def empty(shape: Sequence[int], dtype: Any, side: str) -> tuple[np.ndarray, np.ndarray]:
    """An array whose ``side`` abuts a page without access, and the pattern beside it, at its other side.

    The memory lives as long as one of the two does. An array at its page's end starts wherever its size says: a
    multiple of its element's size, and no more.
    """
    dtype = np.dtype(dtype)
    size, page = int(np.prod(shape)) * dtype.itemsize, mmap.PAGESIZE
    inner = max(-(-size // page), 1) * page
    memory = mmap.mmap(-1, inner + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(memory, np.uint8)
    for first in (0, page + inner):
        if _libc.mprotect(whole.ctypes.data + first, page, _NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    usable = whole[page : page + inner]
    usable[:] = PATTERN
    if side == "end":
        bytes_, beside = usable[inner - size :], usable[: inner - size]
    else:
        bytes_, beside = usable[:size], usable[size:]
    return bytes_.view(dtype).reshape(tuple(shape)), beside


def copied(array: np.ndarray) -> np.ndarray:
    """A packed copy of an array whose end abuts a page without access, but for what fills up 16 bytes.

    Its start is as aligned as that of other arrays, so that the code for it is too.
    """
    size = -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    made, _ = empty((size,), np.uint8, "end")
    found = made[: array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found

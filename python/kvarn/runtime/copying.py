# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies of objects that refer to memory: a copy gets its own memory, or is refused.

``copy.copy``, ``copy.deepcopy`` and ``pickle`` all use ``__reduce_ex__``, whose default copies addresses: the copy
would share the original's memory and, in another process, refer to unmapped memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .buffers import BufferView, copies_memory


class NoCopies:
    """An object that contains addresses and cannot be copied; ``copied_by`` names the alternative."""

    __slots__ = ()
    copied_by = "copy the buffers that it was made from, and make it again from the copies"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} has no copies and cannot be pickled, since it contains addresses: {self.copied_by}"
        )


class NoShallowCopies:
    """An object over memory that refuses ``copy.copy``."""

    __slots__ = ()

    def __copy__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} has no shallow copies, which would share memory: use the object itself, "
            "or copy.deepcopy for one with memory of its own"
        )


class CopiedWhole(NoShallowCopies):
    """An object that ``copy.deepcopy`` and ``pickle`` make again from copies of its buffers."""

    __slots__ = ()

    def _made_of(self) -> tuple[tuple[Any, ...], dict[str, Any], Sequence[BufferView]]:
        """The constructor's arguments and keywords, and the views of the buffers among them."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        args, options, views = self._made_of()
        for view in views:
            needs_copies(view.owner, type(self).__name__)
        return _made, (type(self), args, options)


def needs_copies(owner: Any, what: str) -> None:
    """Refuse to copy ``what`` if a copy of the memory's owner may share that memory."""
    if not copies_memory(owner):
        raise TypeError(
            f"{what} can be copied and pickled over NumPy arrays, torch and CuPy tensors, got memory of "
            f"{type(owner).__name__}, whose copies may be the same memory: {NoCopies.copied_by}"
        )


def _made(cls: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return cls(*args, **options)


__all__ = ["CopiedWhole", "NoCopies", "NoShallowCopies", "needs_copies"]

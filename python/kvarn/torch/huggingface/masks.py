# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""transformers' masks for kvarn: a description if attention can compute the mask itself, else a tensor.

transformers asks attention backends to build masks, from a function of positions, a padding mask of two dimensions, and
the positions of the first query and key. :func:`mask` stores these in a :class:`Mask`, from which attention decides
what it can compute without a tensor. If the model needs the values, or the function is unknown to kvarn, the result is
the tensor of eager attention, which the code of every model can read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers import masking_utils


class Mask:
    """The mask of one kind of layers in a step.

    As a tensor it is eager attention's mask, [B, 1, queries, keys]: 0 or a large negative number.

    Attributes
    ----------
    causal : bool
        Whether query q sees key k only for k <= q, in transformers' positions, which count padding.
    window, chunk : int or None
        As in ``kv.ops.attention``; chunks start at a sequence's first token that is not padding.
    queries, keys : int
    q_offset, kv_offset : int
        Positions of the first query and the first key.
    attention_mask : bool Tensor [B, S] or None
        Present tokens, from position 0 on; positions past its end are absent. None: all are present.
    """

    def __init__(self, causal: bool, window: int | None, chunk: int | None, arguments: dict[str, Any]) -> None:
        self.causal, self.window, self.chunk = causal, window, chunk
        self.queries, self.keys = arguments["q_length"], arguments["kv_length"]
        self.q_offset, self.kv_offset = arguments["q_offset"], arguments["kv_offset"]
        self.attention_mask = arguments["attention_mask"]
        self._arguments = arguments
        self._tensor: Any = None
        self._seen: Any = None
        self._complete: tuple[int, bool] | None = None

    def named(self) -> dict[str, Any]:
        """The keywords of ``kv.ops.attention`` if the queries are the last of the keys."""
        return {"mask": "causal" if self.causal else "null", "window": self.window, "chunk": self.chunk}

    def there(self, first: int, end: int) -> torch.Tensor | None:
        """Present tokens from position ``first`` up to ``end``: [B, end - first]."""
        if self.attention_mask is None:
            return None
        known = self.attention_mask[:, first:end]
        missing = end - first - known.shape[1]
        return torch.nn.functional.pad(known, (0, missing)) if missing > 0 else known

    def complete(self, end: int) -> bool:
        """Whether all tokens up to position ``end`` are present; cached, since the answer is on the device."""
        if self._complete is None or self._complete[0] != end:
            there = self.there(0, end)
            self._complete = end, there is None or bool(there.all())
        return self._complete[1]

    def tensor(self) -> torch.Tensor:
        """Eager attention's mask, which is added to scores, [B, 1, queries, keys]."""
        if self._tensor is None:
            self._tensor = masking_utils.eager_mask(**self._arguments)
        return self._tensor

    def seen(self) -> torch.Tensor:
        """All values as booleans, [B, 1, queries, keys]."""
        if self._seen is None:
            whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            self._seen = masking_utils.sdpa_mask(**self._arguments, **whole)
        return self._seen

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_tensor", "_seen", "_complete", "_arguments"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensor()[index]

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(lambda x: x.tensor() if isinstance(x, Mask) else x, (args, kwargs or {}))
        return function(*args, **kwargs)


def _operator(name: str) -> Any:
    def call(self: Mask, *others: Any) -> Any:
        return getattr(self.tensor(), name)(*(o.tensor() if isinstance(o, Mask) else o for o in others))

    return call


_OPERATORS = "add radd sub rsub mul rmul truediv and rand or ror xor invert neg eq ne lt le gt ge len iter bool"
for _name in (f"__{name}__" for name in _OPERATORS.split()):
    setattr(Mask, _name, _operator(_name))


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Mask | torch.Tensor:
    """transformers' mask interface.

    Returns
    -------
    Mask
        For a causal mask, possibly with a window or chunks, or a pure padding mask, where transformers lets its own
        backends omit the mask.
    Tensor [B, 1, q_length, kv_length]
        Eager attention's mask, for any other mask, and if positions are only known on the device, as for static caches.
    """
    arguments = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": mask_function, "attention_mask": attention_mask, **options,
    }  # fmt: skip
    shape = _shape_of(mask_function)
    if shape is None or isinstance(q_offset, torch.Tensor):
        return masking_utils.eager_mask(**arguments)
    if not (allow_is_causal_skip if shape[0] else allow_is_bidirectional_skip):
        return masking_utils.eager_mask(**arguments)
    return Mask(*shape, arguments)


def _shape_of(function: Any) -> tuple[bool, int | None, int | None] | None:
    """(causal, window, chunk) of a mask function of transformers; None for a function that kvarn does not know."""
    window = chunk = None
    causal = everything = False
    for part in _parts(function):
        code, closed = getattr(part, "__code__", None), _closed_over(part)
        if code is _CAUSAL:
            causal = True
        elif code is _EVERYTHING:
            everything = True
        elif code is _WINDOW and window is None and closed:
            window = int(closed["sliding_window"])
        elif code is _CHUNKS and chunk is None and closed:
            chunk = int(closed["chunk_size"])
        else:
            return None
    if causal == everything or (window and chunk) or (everything and (window or chunk)):
        return None
    return causal, window, chunk


# transformers' functions are recognised by their code.
_CAUSAL = masking_utils.causal_mask_function.__code__
_EVERYTHING = masking_utils.bidirectional_mask_function.__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_CHUNKS = masking_utils.chunked_overlay(1, torch.zeros(1, dtype=torch.int64)).__code__
_BOTH = masking_utils.and_masks().__code__


def _closed_over(function: Any) -> dict[str, Any]:
    """Captured variables of a function; none for one that dynamo made while tracing, which hides them."""
    try:
        cells = function.__closure__ or ()
    except AttributeError:
        return {}
    return dict(zip(function.__code__.co_freevars, [c.cell_contents for c in cells], strict=True))


def _parts(function: Any) -> list[Any]:
    """The mask functions of which a function is the intersection."""
    if getattr(function, "__code__", None) is _BOTH:
        found = _closed_over(function)
        return [part for f in found["mask_functions"] for part in _parts(f)] if found else [function]
    return [function]


def one_run(there: torch.Tensor) -> bool:
    """Whether the present tokens, [B, S], are contiguous in every sequence: then distances are those of positions."""
    begins = there[:, 0].int() + (there[:, 1:] & ~there[:, :-1]).sum(1)
    return bool((begins <= 1).all())


__all__ = ["Mask", "mask", "one_run"]

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random arguments for kernels and operations: caches with ragged lengths in permuted pages, with NaN in unused slots.

Other arguments are given as text, ``NAME=VALUE``: a number for a scalar, ``8x128`` for a buffer of random elements,
``0,1,5`` for a buffer with these elements.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mlir import ir

from kvarn import caches
from kvarn.artifact import Arg
from kvarn.dialect import dtypes, layout
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CONTINUOUS, FA3, PAGED, cdiv
from kvarn.dialect.tma_layout import TmaSpec
from kvarn.lowering.rewrite import functions
from kvarn.runtime import tensormap

LAYERS, LAYER = 3, 2  # layers of every collection, and the layer in use
_SPARE = 3  # unused pages
_SHAPE = re.compile(r"\d+(x\d+)*")


@dataclass(frozen=True)
class InputOptions:
    """The parameters of random arguments.

    Attributes
    ----------
    values : mapping of str to str
        Arguments by name, as text.
    lengths, new : tuple of int
        Cached and new tokens of each sequence.
    seed : int
    shapes : mapping of str to tuple of int or None
        Extents of buffers, in place of those in the IR; None for an extent that follows from the lengths.
    lenient : bool
        Whether values for missing arguments are ignored, for IR under reduction.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    lengths: tuple[int, ...] = (37, 0, 18)
    new: tuple[int, ...] = (3, 1, 2)
    seed: int = 0
    shapes: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    lenient: bool = False

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.new) or min(*self.lengths, *self.new) < 0:
            raise ValueError(
                f"lengths and new must be one count a sequence each, not negative: got {self.lengths}, {self.new}"
            )


def buffer_shapes(module: ir.Module) -> dict[str, tuple[int | None, ...]]:
    """Extents of the buffer arguments of a module's program or first function, by name; None for dynamic extents."""
    attributes = module.operation.attributes
    if "kv.program_args" in attributes:  # an operation that has become kernels
        program = json.loads(ir.StringAttr(attributes["kv.program"]).value)
        return _shapes(attributes["kv.program_args"], program["arg_types"])
    for function in functions(module):
        if "kv.args" in function.attributes:
            of = function.attributes
            flat = [ir.TypeAttr(t).value for t in ir.ArrayAttr(of["kv.arg_types"])] if "kv.arg_types" in of else None
            types = flat or [a.type for a in function.regions[0].blocks[0].arguments]
            return _shapes(of["kv.args"], [str(t) for t in types])
    return {}


def _shapes(described: ir.Attribute, types: Sequence[str]) -> dict[str, tuple[int | None, ...]]:
    found = {}
    names = [ir.StringAttr(ir.DictAttr(a)["name"]).value for a in ir.ArrayAttr(described)]
    for name, type_ in zip(names, types, strict=False):
        shape = re.match(r"memref<((?:[\d?]+x)+)", type_)
        if shape:
            found[name] = tuple(None if n == "?" else int(n) for n in shape[1].rstrip("x").split("x"))
    return found


def random_arguments(
    args: Sequence[Arg], shapes: Mapping[str, tuple[int | None, ...]], options: InputOptions
) -> Arguments:
    """One object per argument, by name: NumPy arrays, caches over them, numbers. Deterministic for given options.

    Raises
    ------
    ValueError
        For a missing argument, or a value that does not match.
    """
    unknown = options.values.keys() - {a.name for a in args}
    if unknown and not options.lenient:
        raise ValueError(f"there is no argument {sorted(unknown)[0]!r}: there are {', '.join(a.name for a in args)}")
    made = _Maker(options)
    found = Arguments(
        {arg.name: made.argument(arg, options.shapes.get(arg.name) or shapes.get(arg.name, ())) for arg in args}
    )
    found.origin = made.origin
    return found


def _aligned(a: np.ndarray) -> np.ndarray:
    """A copy aligned to 256 bytes, like allocations of a GPU: the number of sectors depends on it."""
    raw = np.zeros(a.nbytes + 256, np.uint8)
    begin = -raw.ctypes.data % 256
    found = raw[begin : begin + a.nbytes].view(a.dtype).reshape(a.shape)
    found[...] = a
    return found


class Arguments(dict[str, Any]):
    """Arguments by name.

    Attributes
    ----------
    origin : dict of str to (collection, str)
        For caches and collections: the collection, and ``"key"`` or ``"value"`` for a cache.
    """

    origin: dict[str, tuple[Any, str]]


class _Maker:
    def __init__(self, options: InputOptions) -> None:
        self.options, self.rng = options, np.random.default_rng(options.seed)
        self.cached, self.new = np.array(options.lengths), np.array(options.new)
        self.halves: dict[Any, list[Any]] = {}  # by spec: caches that are not used by an argument yet
        self.whole: dict[Any, Any] = {}  # by spec: the collection of these caches
        self.origin: dict[str, tuple[Any, str]] = {}
        self.last: Any = None  # the previous cache argument

    def argument(self, arg: Arg, shape: tuple[int | None, ...]) -> Any:
        text = self.options.values.get(arg.name)
        if arg.kind == "scalar":
            return self.scalar(arg, text)
        if arg.kind == "buffer":
            return self.buffer(arg, shape, text)
        if text is not None:
            raise ValueError(f"argument {arg.name!r} is a {arg.kind}, which is generated: give lengths instead")
        spec: Any = arg.spec
        if arg.kind == "collection":
            found = self.collection(spec)
            self.origin[arg.name] = (found, "")
            return found
        if arg.kind in ("cache", "operand") and spec.kind in (PAGED, CONTINUOUS, FA3):
            if not self.halves.get(spec):
                c = self.collection(spec)
                self.halves[spec] = [c.get_key_cache(LAYER)] + ([] if spec.is_mla else [c.get_value_cache(LAYER)])
                self.whole[spec] = c
            half = "key" if len(self.halves[spec]) == (1 if spec.is_mla else 2) else "value"
            self.origin[arg.name] = (self.whole[spec], half)
            cache = self.last = self.halves[spec].pop(0)
            return caches.KVCacheMHAOperand(cache) if arg.kind == "operand" else cache
        if arg.kind == "tensormap" and self.last is not None:
            return self.descriptor(spec, self.last)
        kind = getattr(spec, "kind", "")
        raise ValueError(f"argument {arg.name!r}: a random {arg.kind} of kind {kind!r} is not supported")

    def scalar(self, arg: Arg, text: str | None) -> Any:
        assert arg.dtype is not None
        if text is not None:
            try:
                return float(text) if arg.dtype.is_float else int(text)
            except ValueError:
                raise ValueError(f"argument {arg.name!r} must be a number, got {text!r}") from None
        if arg.dtype.is_float:
            return 0.125
        if arg.name == "layer":
            return LAYER
        raise ValueError(f"argument {arg.name!r} must be given: {arg.name}=NUMBER")

    def buffer(self, arg: Arg, shape: tuple[int | None, ...], text: str | None) -> np.ndarray:
        assert arg.dtype is not None
        if text is not None and _SHAPE.fullmatch(text):
            extents = tuple(int(n) for n in text.split("x"))
            if len(extents) != arg.rank:
                raise ValueError(f"argument {arg.name!r} has {arg.rank} dimensions, got {text}")
            return _aligned(self.values(extents, arg.dtype))
        if text is not None:
            try:
                found = np.array([float(x) for x in text.split(",")])
            except ValueError:
                raise ValueError(
                    f"argument {arg.name!r} must be a shape such as 8x128 or elements, got {text!r}"
                ) from None
            return _aligned(found.astype(arg.dtype.numpy))
        if arg.name in ("row_offsets", "buffer_row_offsets"):  # of a chunk, with as many rows as the step has tokens
            return _aligned(np.concatenate([[0], np.cumsum(self.new)]).astype(np.int32))
        if arg.name in ("valid_lengths", "cache_offsets"):
            return _aligned((self.new if arg.name == "valid_lengths" else 0 * self.new).astype(np.int32))
        extents = self.extents(shape)
        if extents is None or (arg.dtype.is_integer and None in shape):
            raise ValueError(
                f"argument {arg.name!r} must be given: {arg.name}=SHAPE, such as 8x128, or its elements; of an "
                f"operation, --spec '{arg.name}=buffer({arg.dtype.name}, (8, 128))' has a shape"
            )
        return _aligned(self.values(extents, arg.dtype))

    def extents(self, shape: tuple[int | None, ...]) -> tuple[int, ...] | None:
        """The extents of a buffer with dynamic extents: leading ones are the step's tokens, or its sequences and their
        tokens; others the largest number of tokens of a sequence. None if no extent is known.
        """
        unknown = [n for n, extent in enumerate(shape) if extent is None]
        if len(unknown) == len(shape):
            return None
        leading = {(0,): (int(self.new.sum()),), (0, 1): (len(self.new), int(self.new.max()))}.get(tuple(unknown))
        if leading is None:
            most = int(self.cached.max() + self.new.sum())
            return tuple(most if n is None else n for n in shape)
        return (*leading, *(n for n in shape[len(leading) :] if n is not None))

    @staticmethod
    def descriptor(spec: TmaSpec, cache: Any) -> Any:
        """The descriptor of a cache's tiles; ValueError if the cache does not support it."""
        return tensormap.of_owner(tensormap.describe(spec, cache.spec, cache.fields()), cache)

    def values(self, shape: Sequence[int], dtype: DType) -> np.ndarray:
        if dtype.is_integer or dtype.kind == "b":
            return self.rng.integers(0, 2 if dtype.kind == "b" else 8, shape).astype(dtype.numpy)
        if dtype.name == "f8e8m0":
            return np.exp2(self.rng.integers(-8, 3, shape)).astype(np.float32).astype(dtype.numpy)
        return self.rng.standard_normal(shape).astype(np.float32).astype(dtype.numpy)

    def collection(self, spec: Any) -> Any:
        """A collection of a spec: every sequence has pages in random order; unused slots are NaN."""
        totals = self.cached + self.new
        batch, most = len(totals), int(totals.max())
        lengths = _aligned(self.cached.astype(np.uint32))
        fill = np.nan if spec.dtype.is_float else 77
        rows = (spec.num_heads, spec.head_size)
        halves = 1 if spec.is_mla else 2
        scales = None
        if spec.kind == CONTINUOUS:
            regions = batch + _SPARE
            blocks = _aligned(np.full((regions, halves, LAYERS, most + 3, *rows), fill, spec.dtype.numpy))
            table = _aligned(self.rng.permutation(regions)[:batch].astype(np.uint32))
            found: Any = caches.ContinuousBatchingKVCacheCollection(blocks, lengths, table, int(self.new.max()), most)
        else:
            counts = np.atleast_2d(
                np.broadcast_to(cdiv(totals, spec.page_size), (LAYERS if spec.kind == FA3 else 1, batch))
            )
            null = int(counts.sum()) + _SPARE
            order = iter(self.rng.permutation(null).tolist())
            tables = np.full((*counts.shape, layout.lookup_columns(most, spec.page_size)), null, np.uint32)
            for place, count in np.ndenumerate(counts):
                tables[place][: int(count)] = [next(order) for _ in range(int(count))]
            tables = _aligned(tables)
            if spec.kind == FA3:
                blocks = _aligned(np.full((2, null + 1, spec.page_size, *rows), fill, spec.dtype.numpy))
                found = caches.PagedKVCacheFA3FallbackCollection(blocks, lengths, tables, int(self.new.max()), most)
            else:
                outer = (null + 1, halves, LAYERS, spec.page_size, spec.num_heads)
                blocks = _aligned(np.full((*outer, spec.head_size), fill, spec.dtype.numpy))
                if spec.quantized:
                    scales = _aligned(np.full((*outer, spec.num_scales), np.nan, spec.scale_dtype.numpy))
                found = caches.PagedKVCacheCollection(
                    blocks,
                    lengths,
                    tables[0],
                    int(self.new.max()),
                    most,
                    scales,
                    spec.granularity if spec.quantized else 1,
                )
        for layer in range(found.num_layers):
            self.fill(found.get_key_cache(layer), totals)
            if not spec.is_mla:
                self.fill(found.get_value_cache(layer), totals)
        return found

    def fill(self, cache: Any, totals: np.ndarray) -> None:
        for b, length in enumerate(totals.tolist()):
            t, h = np.arange(length)[:, None, None], np.arange(cache.num_heads)[:, None]
            shape = (length, cache.num_heads, cache.head_size)
            cache.store(b, h, t, np.arange(cache.head_size), self.values(shape, cache.dtype))
            if cache.scale_dtype is not None:
                starts = np.arange(cache.head_dim_granularity) * cache.quantization_granularity
                drawn = self.rng.standard_normal((*shape[:2], len(starts)))
                scale = np.abs(drawn) / 16 + 1 / 64 if cache.scale_dtype.bits > 8 else 2.0 ** np.rint(drawn)
                cache.store_scale(b, h, t, starts, scale.astype(np.float32).astype(cache.scale_dtype.numpy))


def memory_of(arguments: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The current arrays of arguments, by argument."""
    found: dict[str, np.ndarray] = {}
    for name, argument in arguments.items():
        if isinstance(argument, np.ndarray):
            found[name] = argument
        for n, buffer in enumerate(getattr(argument, "buffers", ())):
            found[f"{name} (buffer {n})" if n else f"{name}.blocks"] = np.asarray(buffer)
    return found


def _is_small_float(dtype: np.dtype) -> bool:
    """Whether a dtype comes from ml_dtypes, which torch does not accept from NumPy."""
    return dtype.isbuiltin != 1


def placed(arguments: Arguments, torch: Any) -> dict[str, Any]:
    """The same arguments in GPU memory, as torch tensors and caches over them."""
    moved: dict[int, Any] = {}  # collections, by the one on the host

    def tensor(a: Any) -> Any:
        a = np.ascontiguousarray(a)
        raw = a.view(f"i{a.itemsize}") if _is_small_float(a.dtype) or a.dtype.kind == "u" else a
        found = torch.from_numpy(np.array(raw)).cuda()
        return found.view(getattr(torch, dtypes.of(a.dtype).foreign)) if _is_small_float(a.dtype) else found

    def place(name: str, a: Any) -> Any:
        if isinstance(a, np.ndarray):
            return tensor(a)
        if name not in arguments.origin:
            return a
        whole, half = arguments.origin[name]
        if id(whole) not in moved:
            parts = [tensor(x) for x in (whole.blocks, whole.cache_lengths, whole.lookup_table)]
            rest = () if whole.scales is None else (tensor(whole.scales), whole.quantization_granularity)
            moved[id(whole)] = type(whole)(*parts, whole.max_seq_length, whole.max_cache_length, *rest)
        found = moved[id(whole)]
        if half:
            found = found.get_key_cache(LAYER) if half == "key" else found.get_value_cache(LAYER)
        return caches.KVCacheMHAOperand(found) if isinstance(a, caches.KVCacheMHAOperand) else found

    return {name: place(name, a) for name, a in arguments.items()}


def fetched(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of placed arguments as NumPy arrays, by the names of :func:`memory_of`."""

    def array(t: Any) -> np.ndarray:
        kind = dtypes.of(t.dtype).numpy
        if not _is_small_float(kind):
            return t.cpu().numpy()
        ints = t.contiguous().view(getattr(importlib.import_module("torch"), f"int{8 * t.element_size()}"))
        return ints.cpu().numpy().view(kind)

    found: dict[str, Any] = {}
    for name, argument in arguments.items():
        for n, buffer in enumerate(argument.buffers if hasattr(argument, "buffers") else [argument]):
            if hasattr(buffer, "element_size"):
                plain = not hasattr(argument, "buffers")
                found[name if plain else f"{name} (buffer {n})" if n else f"{name}.blocks"] = array(buffer)
    return found


def difference(expected: np.ndarray, found: np.ndarray, fine: bool = False) -> str:
    """The difference of two arrays beyond rounding, as text, or "". NaNs are equal.

    The tolerance is relative to a row's largest element, since an average over many values is as accurate as a copy.
    ``fine``: both come from the same computation in f32 or better, so f32 differs only by the order of sums.
    """
    kind = dtypes.of(expected.dtype)
    if expected.dtype.kind in "iub" and kind.is_integer:
        wrong = expected != found
        x, y = expected, found
    else:
        x, y = expected.astype(np.float64), found.astype(np.float64)
        tolerance = {"f64": 1e-9, "f32": 5e-5 if fine else 2e-3}.get(kind.name, 2e-2 if kind.bits == 16 else 0.13)
        sizes = np.where(np.isfinite(x), np.abs(x), 0.0)
        whole = max(float(sizes.max(initial=0.0)), 1e-3)
        size = np.maximum(sizes.max(axis=-1, keepdims=True, initial=0.0), whole / 32) if x.ndim > 1 else whole
        near = np.abs(y - x) <= tolerance * (np.abs(x) + size / 4)
        near |= x == y  # infinities
        wrong = ~(near | (np.isnan(x) & np.isnan(y)))
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{int(wrong.sum())} of {wrong.size} elements differ, the first at {list(at)}: {y[at]} is not {x[at]}"


__all__ = ["InputOptions", "buffer_shapes", "difference", "memory_of", "random_arguments"]

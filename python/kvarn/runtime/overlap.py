# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Overlap of operands in memory, decided from addresses and strides only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvarn.artifact import Arg
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import HANDLE_FIELDS, CacheSpec, joined

from .buffers import BufferView

_MOST = 100_000  # distances enumerated at once
_HANDLES = 16  # handles with known memory, per rule
_RULES = 64  # rules per kernel, by the shapes of its buffers


class Extent(NamedTuple):
    """The memory of an operand relative to its first element: extents of its dimensions, and their strides in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, int]:
        """The first byte, which precedes the first element for negative strides, and the end."""
        spans = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        return sum(s for s in spans if s < 0), sum(s for s in spans if s > 0) + 1


def of_buffer(view: BufferView) -> Extent:
    """The memory of a buffer."""
    item = view.dtype.itemsize
    return Extent((*view.shape, item), (*(s * item for s in view.strides), 1))


def of_cache(spec: CacheSpec, at: Mapping[str, int]) -> tuple[int, Extent]:
    """The address and memory of a cache's elements, or of one layer of a collection's keys, from its fields."""
    bytes_of = spec.dtype.bytes_of
    dims = ((at["capacity"], (spec.token_stride,)), (spec.num_heads, (spec.head_stride,)))
    run, rest = joined(spec.head_size, dims)
    return at.get("base", 0), Extent(
        (at["num_blocks"], *(n for n, _ in rest), bytes_of(run)),
        (bytes_of(at["stride0"]), *(bytes_of(s) for _, (s,) in rest), 1),
    )


def share(a: Extent, b: Extent, distance: int) -> bool:
    """Whether two operands have a byte in common; ``distance`` is from the first element of a to that of b."""
    if 0 in a.shape or 0 in b.shape:
        return False
    (a_first, a_end), (b_first, b_end) = a.ends, b.ends
    if distance + b_first >= a_end or a_first >= distance + b_end:
        return False
    # Counts x with sum(x * stride) = distance: forwards in a, and backwards in b from its last byte.
    steps: dict[int, int] = {}
    for extent, sign in ((a, 1), (b, -1)):
        for n, stride in zip(extent.shape, extent.strides, strict=True):
            if stride * sign < 0:
                distance -= stride * sign * (n - 1)
            if stride and n > 1:
                steps[abs(stride)] = steps.get(abs(stride), 0) + n - 1
    return _reaches(sorted(steps.items(), reverse=True), distance)


def _reaches(steps: Sequence[tuple[int, int]], distance: int) -> bool:
    """Whether a distance is a sum of strides with bounded counts; the strides are sorted, largest first.

    In arrays each stride exceeds the span of the smaller ones, or nearly so, which leaves few candidate counts per
    stride. If more than ``_MOST`` distances would have to be tried, the answer is True.
    """
    left = {distance}
    for i, (stride, most) in enumerate(steps):
        within = sum(s * n for s, n in steps[i + 1 :])
        left = {
            d - n * stride
            for d in left
            for n in range(max(0, -((within - d) // stride)), min(most, d // stride) + 1)
        }  # fmt: skip
        if len(left) > _MOST:
            return True
    return 0 in left


def overlaps_itself(view: BufferView) -> bool:
    """Whether elements of a buffer may share memory: a stride is smaller than the span of the smaller ones."""
    span = 1
    for stride, extent in sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True)):
        if extent > 1 and view.size:
            if stride < span:
                return True
            span += stride * (extent - 1)
    return False


_TABLES = ("lengths", "offsets", "lookup_table")  # read-only parts of a handle
Region = tuple[str, int, Extent]  # a name, an address, and the memory from there


def regions(kind: str, spec: CacheSpec, fields: Sequence[int]) -> list[Region]:
    """The memory of a handle: first elements and scales, then its lengths and its table, which are read-only."""
    at = dict(zip((f.name for f in HANDLE_FIELDS[kind](spec)), fields, strict=True))
    of_layers = ()
    if kind == "collection":
        of_layers = ((1 if spec.is_mla else 2, "kv_stride"), (at["num_layers"], "layer_stride"))
    base = "blocks" if kind == "collection" else "base"
    _, pages = of_cache(spec, at)
    found = [(base, at[base], _with_layers(pages, of_layers, at, "", spec.dtype))]
    if at.get("scales"):
        assert spec.scale_dtype is not None
        item = spec.scale_dtype.itemsize
        run = at["capacity"] * spec.scales_token_stride * item
        page = Extent((at["num_blocks"], run), (at["scales_stride0"] * item, 1))
        found.append(("scales", at["scales"], _with_layers(page, of_layers, at, "scales_", spec.scale_dtype)))
    batch = at["batch"]
    for name, count in (("lengths", batch), ("offsets", batch + 1)):
        if at.get(name):
            found.append((name, at[name], Extent((count, 4), (4, 1))))
    if at.get("lookup"):
        columns, stride = (at["lookup_columns"], at["lookup_stride"]) if spec.paged else (1, 1)
        found.append(("lookup_table", at["lookup"], Extent((batch, columns, 4), (4 * stride, 4, 1))))
    return found


def _with_layers(
    pages: Extent, of_layers: Sequence[tuple[int, str]], at: Mapping[str, int], prefix: str, dtype: DType
) -> Extent:
    """A pool of all layers from the pages of one layer; layers with interleaved memory count once."""
    known = [(n, dtype.bytes_of(at[prefix + stride])) for n, stride in of_layers if at[prefix + stride]]
    return Extent((*(n for n, _ in known), *pages.shape), (*(s for _, s in known), *pages.strides))


Value = Any  # of a call: the address of a buffer, or the fields of a handle


# Two operands, or one and None, and the bounds of (address of the first - address of the second) between which
# their bytes may overlap.
Meeting = tuple[int, int | None, int, int]


def meet(meetings: Sequence[Meeting], values: Sequence[Any]) -> bool:
    """Whether operands of a call may overlap, by their addresses: the rule that made the meetings says whether."""
    for i, j, low, high in meetings:
        if low < values[i] - (0 if j is None else values[j]) < high:
            return True
    return False


class Apart:
    """The aliasing rule of every operation: outputs share no memory with inputs or with other outputs.

    Parameters
    ----------
    title : str
    operands : sequence of (str, BufferView or (str, CacheSpec))
        The name of each, and a view, whose address is ignored, or the kind and spec of a handle.
    places : sequence of int
        Indices of the operands among the values of a call.
    written : collection of str
    in_place : collection of (str, str)
        Pairs of an output and an input that may be the same buffer with the same strides.
    unread : collection of str
        Operands of which only the shape is used.
    tables : collection of str
        Handles of which only the lengths, offsets and tables are read.
    """

    why, instead = "which is read while it is written", "give it memory of its own"

    def __init__(
        self,
        title: str,
        operands: Sequence[tuple[str, Any]],
        places: Sequence[int],
        written: Collection[str],
        in_place: Collection[tuple[str, str]] = (),
        unread: Collection[str] = (),
        tables: Collection[str] = (),
    ) -> None:
        self.title, self._places, self._in_place, self._tables = title, places, in_place, tables
        # Store no views of buffers, which would keep them alive.
        self._operands = [(name, None if isinstance(o, BufferView) else o) for name, o in operands]
        # For two buffers: their places, the distances from second to first between which they may overlap, their
        # operand numbers, and whether they may be the same buffer.
        self.pairs: list[tuple[int, int, int, int, int, int, bool]] = []
        self._shared: dict[tuple[int, int, int], bool] = {}  # by operand numbers and distance
        self._handles: list[tuple[int, int]] = []  # pairs with at least one handle
        self._found: dict[tuple[int, Any], list[Any]] = {}
        of_buffers = ((i, of_buffer(o)) for i, (_, o) in enumerate(operands) if isinstance(o, BufferView))
        self._extents = {i: (extent, extent.ends) for i, extent in of_buffers}
        for i, (name, operand) in enumerate(operands):
            if name not in written:
                continue
            for j, (other, read) in enumerate(operands):
                if i == j or other in unread or (other in written and j < i):
                    continue
                if isinstance(operand, BufferView) and isinstance(read, BufferView):
                    self.pairs.append(self._pair(i, j, (name, other) in in_place))
                elif isinstance(operand, BufferView) or isinstance(read, BufferView) or other not in written:
                    self._handles.append((i, j))

    def __bool__(self) -> bool:
        return bool(self.pairs or self._handles)

    def _pair(self, i: int, j: int, same: bool) -> tuple[int, int, int, int, int, int, bool]:
        (_, (a_first, a_end)), (_, (b_first, b_end)) = self._extents[i], self._extents[j]
        return self._places[i], self._places[j], b_first - a_end, b_end - a_first, i, j, same

    def _check(self, i: int, j: int, same: bool, distance: int) -> None:
        """Raise if two buffers overlap at this distance."""
        found = self._shared.get((i, j, distance))
        if found is None:
            if len(self._shared) >= 1024:
                self._shared.clear()
            a, b = self._extents[i][0], self._extents[j][0]
            found = share(a, b, -distance) and not (same and distance == 0 and a == b)
            self._shared[i, j, distance] = found
        if found:
            self._refuse(i, self._operands[j][0], same)

    def _refuse(self, i: int, read: str, same: bool) -> None:
        raise ValueError(
            f"{self.title}: {self._operands[i][0]} must not share memory with {read}, {self.why}"
            f"{f', unless it is {read} itself' if same else ''}: {self.instead}"
        )

    def __call__(self, values: Sequence[Value]) -> None:
        """Check a call: the addresses of buffers, the fields of handles."""
        for at, of, low, high, i, j, same in self.pairs:
            if low < values[at] - values[of] < high:
                self._check(i, j, same, values[at] - values[of])
        for i, j in self._handles:
            for name, at, low, high, extent in self._memory(i, values):
                if name != self._operands[i][0]:  # a table, which is read-only
                    continue
                for read, where, first, end, other in self._memory(j, values):
                    if read in self._tables:  # the elements of a handle, whose tables have names of their own
                        continue
                    if low < end and first < high and share(extent, other, where - at):
                        same = (name, self._operands[j][0]) in self._in_place
                        if not (same and where == at and extent == other):
                            self._refuse(i, read, same)

    def meetings(self, values: Sequence[Value]) -> Iterator[Meeting]:
        """The address ranges in which buffers of other calls with this call's handles would overlap a handle."""
        yield from (pair[:4] for pair in self.pairs)
        for i, j in self._handles:
            buffer, handle = (i, j) if i in self._extents else (j, i)
            if buffer in self._extents:
                _, (first, end) = self._extents[buffer]
                for name, _, low, high, _ in self._memory(handle, values):
                    if name not in self._tables if handle == j else name == self._operands[handle][0]:
                        yield self._places[buffer], None, low - end, high - first

    def _memory(self, i: int, values: Sequence[Value]) -> Sequence[tuple[str, int, int, int, Extent]]:
        """The memory of an operand of a call: names, addresses, first bytes and ends, extents."""
        (name, operand), value = self._operands[i], values[self._places[i]]
        if operand is None:
            extent, (low, high) = self._extents[i]
            return ((name, value, value + low, value + high, extent),)
        found = self._found.get((i, value))
        if found is None:
            if len(self._found) >= _HANDLES:
                self._found.clear()
            found = self._found[i, value] = [
                (f"{part} of {name}" if part in _TABLES else name, at, *(at + end for end in extent.ends), extent)
                for part, at, extent in regions(operand[0], operand[1], value)
            ]
        return found


class ReadOnly:
    """The rule of every kernel: what its code takes for read-only is not written through another argument.

    Loads of such memory go by the read-only path of a GPU, and before or after any store: those of
    ``kv.ReadOnlyBuffer``, of elements of a type that the kernel writes nowhere, and of lengths and tables of caches. Of
    other arguments the code takes nothing for granted: they may share memory, as in CUDA.
    """

    def __init__(self, name: str, args: Sequence[Arg]) -> None:
        self._title, self._args = f"kernel {name!r}", tuple(args)
        self._written = {a.name for a in args if a.written}
        self._read = [a.name for a in args if a.read_only and not a.written]
        self._tables = [a.name for a in args if a.kind in HANDLE_FIELDS and a.name not in self._read]
        self._places = [i for i, a in enumerate(args) if a.kind == "buffer" or a.kind in HANDLE_FIELDS]
        self._known: dict[Any, Apart | None] = {}
        self._last: Any = None  # a call that was good

    def __bool__(self) -> bool:
        buffers = {a.name for a in self._args if a.kind == "buffer"}
        return bool(self._written and self._read) or bool(self._written & buffers and self._tables)

    def of(self, values: Sequence[tuple[Any, ...]]) -> Apart | None:
        """The rule of calls that differ in addresses only, by the field values of each argument."""
        key = tuple([v[1:] if a.kind == "buffer" else () for a, v in zip(self._args, values)])  # noqa: B905
        if key not in self._known:
            if len(self._known) >= _RULES:
                self._known.clear()
            operands = [(self._args[i].name, self._operand(self._args[i], values[i])) for i in self._places]
            shown = {*self._read, *self._tables}
            unread = [name for name, _ in operands if name not in shown]
            made = _OfKernel(self._title, operands, self._places, self._written, (), unread, self._tables)
            self._known[key] = made if made else None
        return self._known[key]

    @staticmethod
    def _operand(arg: Arg, values: tuple[Any, ...]) -> Any:
        if arg.kind != "buffer":
            return arg.kind, arg.spec
        assert arg.dtype is not None
        shape, strides = values[1 : 1 + arg.rank], (*values[1 + arg.rank :], 1)
        return BufferView(values[0], shape, strides, arg.dtype, ("cpu", 0), False, None)

    def flat(self, values: Sequence[tuple[Any, ...]]) -> list[Value]:
        """The values of a call as :class:`Apart` takes them."""
        return [v if a.kind in HANDLE_FIELDS else v[0] for a, v in zip(self._args, values)]  # noqa: B905

    def __call__(self, values: Sequence[tuple[Any, ...]]) -> None:
        """Check a call."""
        if values == self._last:
            return
        rule = self.of(values)
        if rule is not None:
            rule(self.flat(values))
        self._last = values


class _OfKernel(Apart):
    why = "which the code takes for memory that nothing writes"
    instead = "give it memory of its own, or annotate both as kv.Buffer of one type"

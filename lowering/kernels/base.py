# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The context of an expansion: the operation's operands, its schedule, and launches of traced kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlir import ir
from mlir.dialects import arith, gpu, memref

from kvarn.dialect import dtypes, layout, ops, schedules, tma_layout, types
from kvarn.dialect.verify import attribute_of, python_values
from kvarn.dsl.identity import identity
from kvarn.lowering.index import Ix, const
from kvarn.lowering.target import Target

_THREADS_WITH_ALL_REGISTERS = 256  # threads per block with up to 255 registers each: no default block is larger


class Expansion:
    """The context in which one fused operation is expanded.

    Attributes
    ----------
    op : ir.OpView
        The operation; its operands are values of the enclosing function.
    target : Target
    schedule : dict
        The operation's ``schedule`` attribute as Python values.
    """

    def __init__(self, op: Any, kernels: ir.Operation, target: Target, traced: dict[Any, str]):
        self.op, self.target = op, target
        self.kernels = kernels
        self._traced = traced
        attributes = op.operation.attributes
        self.schedule = python_values(attributes["schedule"]) if "schedule" in attributes else {}
        self.schedule = schedules.current(op.operation.name, self.schedule)

    @property
    def tuned(self) -> bool:
        """Whether the user's tuning table applies, by the operation's declaration."""
        return self.op.operation.name in schedules.TUNED

    @property
    def kind(self) -> str:
        """The kind of kernel that ``select-kv-schedule`` has chosen."""
        if "kind" not in self.schedule:
            raise ValueError("the schedule must have a kind, which select-kv-schedule chooses: run it before")
        return self.schedule["kind"]

    # --- host-side values --------------------------------------------------------------------------

    def dim(self, buffer: ir.Value, index: int) -> Ix:
        """Extent of a buffer's dimension, i32."""
        type_ = ir.MemRefType(buffer.type)
        if not type_.is_dynamic_dim(index):
            return Ix(const(type_.shape[index]))
        made = buffer.owner if isinstance(buffer, ir.OpResult) else None
        if made is not None and made.name == "memref.alloc":  # a workspace
            return Ix(arith.index_cast(ir.IntegerType.get_signless(32), made.operands[0]))
        extent = memref.dim(buffer, arith.constant(ir.IndexType.get(), index))
        return Ix(arith.index_cast(ir.IntegerType.get_signless(32), extent))

    def static_dim(self, buffer: ir.Value, index: int) -> int:
        """Extent of a static dimension; ValueError for a dynamic one."""
        type_ = ir.MemRefType(buffer.type)
        if type_.is_dynamic_dim(index):
            raise ValueError(f"dimension {index} must be static, got {type_}")
        return type_.shape[index]

    def dtype(self, buffer: ir.Value) -> dtypes.DType:
        return dtypes.by_mlir(str(ir.MemRefType(buffer.type).element_type))

    def spec(self, handle: ir.Value) -> layout.CacheSpec:
        return types.spec_of(handle.type)

    def constant(self, value: int) -> Ix:
        return Ix(const(value))

    def field(self, handle: ir.Value, name: str) -> Ix:
        """An integer field of a cache or collection, such as ``batch`` or ``max_seq_length``."""
        return Ix(ops.field(handle, name))

    def device(self, name: str) -> Ix:
        """A property of the device: ``multiprocessors``, ``shared_bytes``, ``l2_bytes``."""
        return Ix(ops.device_attribute(name))

    def workspace(
        self, count: Ix | int, zeroed: bool = False, *, dtype: dtypes.DType = dtypes.i8, columns: int | None = None
    ) -> ir.Value:
        """Scratch memory of the program: ``count`` elements, bytes by default, or rows of ``columns`` elements.

        ``zeroed``: filled with zeros once, before the first use.
        """
        size = count if isinstance(count, Ix) else self.constant(count)
        extent = arith.index_cast(ir.IndexType.get(), size.value)
        shape, strides = ("?", "[1]") if columns is None else (f"?x{columns}", f"[{columns}, 1]")
        made = memref.alloc(ir.Type.parse(f"memref<{shape}x{dtype.mlir}, strided<{strides}>, 1>"), [extent], [])
        if zeroed:
            made.owner.attributes["kv.zeroed"] = ir.UnitAttr.get()
        return made

    # --- TMA descriptors ---------------------------------------------------------------------------

    def why_no_tensor_map(
        self, handle: ir.Value, *, rows: int, columns: int | None = None, swizzle: str = "128B"
    ) -> str | None:
        """Why ``tensor_map`` is impossible with these arguments; None when every launch can make the descriptor."""
        if not self.target.has("tma"):
            return f"the tensor memory accelerator is of sm_90 and later, got target {self.target.name}"
        try:
            tma_layout.launch_tile(self.spec(handle), rows, columns, swizzle)
        except ValueError as error:
            return str(error)
        return None

    def tensor_map(
        self,
        handle: ir.Value,
        *,
        rows: int,
        columns: int | None = None,
        swizzle: str = "128B",
        layer: Any = None,
        half: str = "key",
    ) -> ir.Value:
        """A TMA descriptor of a handle's tiles, made by the runtime, for a ``kv.TensorMap`` parameter.

        Parameters
        ----------
        handle : value
            A cache, collection or attention operand of the program.
        rows : int
            Tokens per box, at most 256; a divisor of the page size.
        columns : int, optional
            Elements of a head that ``kv.tma.load`` copies, a multiple of the swizzle's bytes; by default the head size,
            rounded up. Columns past the head are zeros.
        swizzle : {"none", "32B", "64B", "128B"}
        layer : i32 value of the program
            The layer of a collection.
        half : {"key", "value"}
            The half of a collection.

        Returns
        -------
        ir.Value
            The descriptor. Coordinates are page, slot, head, column; for a ragged operand row, head, column.

        Raises
        ------
        ValueError
            If there is no such descriptor (``why_no_tensor_map``).
        """
        spec = tma_layout.launch_tile(self.spec(handle), rows, columns, swizzle)
        return ops.tensor_map(handle, spec, layer.value if isinstance(layer, Ix) else layer, half)

    # --- launches ----------------------------------------------------------------------------------

    def launch(
        self,
        kernel: Any,
        args: Sequence[Any],
        grid: Sequence[Ix | int],
        block: Sequence[int],
        *,
        key: Any = None,
        programmatic: bool = False,
        attributes: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Trace a kernel for the types of its arguments and launch it.

        Parameters
        ----------
        kernel : kv.kernel function
        args : values
            Handles, buffers, descriptors and scalars, one per parameter; None for an absent one, a Python value for a
            static one, and for a struct parameter an instance of its class.
        grid : 3 extents
        block : 3 int
        key : hashable, optional
            Distinguishes this specialisation of the kernel from others of the same operation.
        programmatic : bool
            The kernel itself waits for the one before it (``griddepcontrol``), so that it may start early.
        attributes : mapping, optional
            Dictionaries of entries for the kernel's function, such as ``kv.schedule``.
        """
        values = [a.value if isinstance(a, Ix) else a for a in kernel.flat(args)]
        specs = [_spec(v.type) if isinstance(v, ir.Value) else v for v in values]
        name = self._trace(kernel, kernel.built(specs), key)
        function = self._function(name)
        for attribute, entries in (attributes or {}).items():
            found = {entry: attribute_of(value) for entry, value in entries.items()}
            function.attributes[attribute] = ir.DictAttr.get(found)
        threads = self.schedule.get("threads", 0)
        if threads > _THREADS_WITH_ALL_REGISTERS:
            i32 = ir.IntegerType.get_signless(32)
            function.attributes["kv.max_threads"] = ir.IntegerAttr.get(i32, threads)
        wanted = [a.type for a in function.regions[0].blocks[0].arguments]
        given = [v for v in values if isinstance(v, ir.Value)]
        operands = [v if v.type == t else memref.cast(t, v) for v, t in zip(given, wanted, strict=True)]
        sizes = [
            arith.index_cast(ir.IndexType.get(), (g if isinstance(g, Ix) else self.constant(g)).value)
            for g in (*grid, *block)
        ]
        launched = gpu.LaunchFuncOp(["kernels", name], sizes[:3], sizes[3:], operands)
        if programmatic:
            launched.operation.attributes["kv.programmatic"] = ir.UnitAttr.get()

    def _trace(self, kernel: Any, specs: list[Any], key: Any) -> str:
        """The symbol of a kernel for these specs, traced at most once."""
        wanted = (_kernel_identity(kernel), identity((*specs, key)))
        if wanted not in self._traced:
            taken = set(self._traced.values())
            name, n = kernel.name, 1
            while name in taken:
                n += 1
                name = f"{kernel.name}_{n}"
            kernel.trace_into(self.kernels, specs, name=name)
            self._traced[wanted] = name
        return self._traced[wanted]

    def _function(self, name: str) -> ir.Operation:
        for op in self.kernels.regions[0].blocks[0].operations:
            attributes = op.operation.attributes
            if "sym_name" in attributes and ir.StringAttr(attributes["sym_name"]).value == name:
                return op.operation
        raise AssertionError(f"kernel {name} was not traced")


def _kernel_identity(kernel: Any) -> Any:
    """A key for a kernel: its code and captured values, or the kernel itself when those cannot be compared."""
    cells = [c.cell_contents for c in kernel.function.__closure__ or ()]
    try:
        return kernel.function.__code__, identity(cells)
    except TypeError:
        return kernel


def _spec(type_: ir.Type) -> Any:
    """The DSL spec for an argument of this type."""
    from kvarn.dsl import Buffer

    if isinstance(type_, ir.MemRefType):
        memref_type = ir.MemRefType(type_)
        return Buffer[dtypes.by_mlir(str(memref_type.element_type)), memref_type.rank]
    kind = types.type_name(type_)
    if kind == "collection":
        return layout.CollectionSpec(types.spec_of(type_))
    if kind == "operand":
        return layout.OperandSpec(types.spec_of(type_))
    if kind == "cache":
        return types.spec_of(type_)
    if kind == "tma":
        return types.tma_spec_of(type_)
    return dtypes.by_mlir(str(type_))

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The artifact: the result of a compilation and the input of the runtime.

It consists of JSON and code. This package imports neither MLIR nor a GPU library, so a kernel compiled on one machine
runs on another that only has the loader. ``kvarn.artifact.bundle`` writes artifacts to disk and reads them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvarn
from kvarn.dialect import layout, tma_layout
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CacheSpec
from kvarn.dialect.tma_layout import TmaSpec

KINDS = ("cache", "collection", "operand", "buffer", "scalar", "tensormap")
# Bytes of the C types of kernel parameters, also their alignment (a tensor map is an opaque block).
PARAM_BYTES = {
    "ptr": 8, "i64": 8, "f64": 8, "i32": 4, "f32": 4, "i16": 2, "f16": 2, "bf16": 2,
    "i8": 1, "i1": 1, "f8e4m3": 1, "f8e5m2": 1, "f8e8m0": 1, "tensormap": 128,
}  # fmt: skip
MANIFEST = "manifest.json"  # file name in a bundle
MOST_DIMENSIONS = 64  # dimensions of a buffer, as many as NumPy supports
# Names of code objects are file names in a bundle: without folders, dot files or characters to escape.
CODE_NAME = re.compile(rf"(?!{re.escape(MANIFEST)}$)[A-Za-z0-9][A-Za-z0-9._-]{{0,99}}")


def param_type(dtype: DType) -> str:
    """The parameter type of a scalar: ``"i32"`` for i32 and u32, ``"i1"`` for bool, else the dtype's name."""
    if dtype.kind == "b":
        return "i1"
    return f"i{dtype.bits}" if dtype.is_integer else dtype.name


@dataclass(frozen=True)
class Arg:
    """One argument of a kernel or program, as the Python caller passes it.

    Parameters
    ----------
    name : str
        The argument's name, for messages.
    kind : {"cache", "collection", "operand", "buffer", "scalar", "tensormap"}
    dtype : DType or None
        Element type of a buffer, type of a scalar; None for other kinds.
    rank : int
        Dimensions of a buffer; 0 for other kinds.
    spec : CacheSpec, TmaSpec or None
        Static parameters of a cache, collection or operand (a CollectionSpec or OperandSpec is reduced to its cache's),
        or of a TMA descriptor; without a spec any descriptor is accepted.
    alignment : int
        Alignment of the first element's address, in bytes; 0 means the element's size.
    written : bool
        Whether the kernel may write through it.
    read_only : bool
        Whether the code takes what it shows for memory that nothing writes while the kernel runs.
    table_alignment : int
        Alignment of every row of a cache's lookup table, in bytes; 0 means none.
    """

    name: str
    kind: str
    dtype: DType | None = None
    rank: int = 0
    spec: CacheSpec | TmaSpec | None = None
    alignment: int = 0
    written: bool = False
    table_alignment: int = 0
    read_only: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind of argument {self.name!r} must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if isinstance(self.spec, (layout.CollectionSpec, layout.OperandSpec)):
            object.__setattr__(self, "spec", self.spec.cache)
        if self.kind in ("cache", "collection", "operand") and self.spec is None:
            raise ValueError(f"argument {self.name!r} is a {self.kind} and must have a spec")
        if self.kind in ("buffer", "scalar") and self.dtype is None:
            raise ValueError(f"argument {self.name!r} is a {self.kind} and must have a dtype")
        if self.kind == "buffer" and self.rank < 1:
            raise ValueError(f"argument {self.name!r} is a buffer and must have a rank of at least 1, got {self.rank}")
        if self.rank > MOST_DIMENSIONS:
            raise ValueError(f"rank of argument {self.name!r} must be at most {MOST_DIMENSIONS}, got {self.rank}")
        for what, bytes_ in (("alignment", self.alignment), ("table alignment", self.table_alignment)):
            if bytes_ < 0 or bytes_ & (bytes_ - 1):
                raise ValueError(f"{what} of argument {self.name!r} must be a power of two, got {bytes_}")

    @property
    def fields(self) -> tuple[layout.Field, ...]:
        """The run-time fields of the argument, in parameter order."""
        if self.kind in layout.HANDLE_FIELDS:
            return layout.HANDLE_FIELDS[self.kind](self._spec)
        if self.kind == "buffer":
            return layout.buffer_fields(self.rank)
        if self.kind == "tensormap":
            return tma_layout.FIELDS
        assert self.dtype is not None
        return (layout.Field("value", param_type(self.dtype), "the scalar"),)

    @property
    def _spec(self) -> CacheSpec:
        assert isinstance(self.spec, CacheSpec)  # checked by __post_init__
        return self.spec


@dataclass(frozen=True)
class Param:
    """One parameter of the compiled function.

    Parameters
    ----------
    arg : int
        Index of its argument in the entry.
    field : str
        Name of the field, as in ``layout.cache_fields`` and related functions, or ``"value"``.
    type : str
        One of ``PARAM_BYTES``: ``"ptr"``, ``"i32"``, ``"i64"``, ``"f32"``, …
    """

    arg: int
    field: str
    type: str

    def __post_init__(self) -> None:
        if self.type not in PARAM_BYTES:
            raise ValueError(f"parameter type must be one of {', '.join(PARAM_BYTES)}, got {self.type!r}")


def flatten(args: Sequence[Arg]) -> tuple[Param, ...]:
    """The parameters of a kernel that takes every field of every argument, in order."""
    return tuple(Param(i, f.name, f.type) for i, arg in enumerate(args) for f in arg.fields)


@dataclass(frozen=True)
class Entry:
    """One kernel of an artifact.

    Parameters
    ----------
    name : str
        Symbol of the compiled function.
    args : tuple of Arg
    params : tuple of Param
        Parameters in the order of the compiled function.
    block : tuple of int or None
        The block size that it was compiled for (x, y, z); None for any.
    max_threads : int
        Largest number of threads per block; 0 if the kernel does not declare one.
    shared_bytes : int
        Dynamic shared memory per block, in bytes.
    cluster : tuple of int or None
        Blocks per cluster (x, y, z).
    attributes : dict
        Launch attributes: ``"programmatic": True`` (may start before the previous kernel in the stream ends),
        ``"cooperative": True``; other entries are informational.
    """

    name: str
    args: tuple[Arg, ...] = ()
    params: tuple[Param, ...] = ()
    block: tuple[int, int, int] | None = None
    max_threads: int = 0
    shared_bytes: int = 0
    cluster: tuple[int, int, int] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _freeze(self, "args", "params", "block", "cluster")
        for p in self.params:
            if not 0 <= p.arg < len(self.args):
                raise ValueError(
                    f"parameter {p.field!r} of kernel {self.name!r} belongs to argument {p.arg}, "
                    f"but the kernel has {len(self.args)} arguments"
                )
            known = {f.name for f in self.args[p.arg].fields}
            if p.field not in known:
                raise ValueError(
                    f"argument {self.args[p.arg].name!r} of kernel {self.name!r} has no field "
                    f"{p.field!r}: it has {', '.join(sorted(known))}"
                )


@dataclass(frozen=True)
class Step:
    """One launch of a program. ``grid``, ``block`` and ``shared_bytes`` are expressions of the program's arguments.

    ``args`` has one item per argument of the entry: ``("arg", i)`` for the program's i-th argument, an expression for a
    scalar, ``("workspace", name)`` for a buffer of one dimension, ``("workspace", name, columns)`` for a buffer of
    rows, or a TMA descriptor made at launch, with the tile of the entry's argument. ``("tensor_map", i, half, layer)``
    describes the program's i-th argument: ``half`` is ``"key"`` or ``"value"``, and ``layer`` is an expression (for
    collections only). ``("tensor_map", i, "rows", heads, size)`` describes the rows of a buffer, or of the workspace
    named ``i``.
    """

    entry: str
    grid: tuple[Any, Any, Any]
    block: tuple[Any, Any, Any]
    shared_bytes: Any = 0
    args: tuple[Any, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _freeze(self, "grid", "block", "shared_bytes", "args")


@dataclass(frozen=True)
class Workspace:
    """Scratch memory of a program: ``bytes`` is an expression; ``zeroed``: it must be zero before the first run."""

    name: str
    bytes: Any
    zeroed: bool = False

    def __post_init__(self) -> None:
        _freeze(self, "bytes")


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel (one entry, no steps) or program (entries and steps).

    Parameters
    ----------
    name : str
    target : str
        ``"sm_80"``, ``"sm_90a"``, ``"sm_100a"`` or ``"host"``.
    isa : str
        PTX ISA of the PTX, such as ``"8.0"``; empty on ``host``.
    code : dict of str to str or bytes
        ``"ptx"``, ``"llvm"`` and other stages as text; ``"cubin"`` as bytes for the target, ``"cubin.<chip>"`` for
        another chip.
    entries : tuple of Entry
    args : tuple of Arg
        The program's arguments; for a kernel those of its entry.
    steps : tuple of Step
    workspaces : tuple of Workspace
    meta : dict
        JSON values for people: versions, statistics, the source's digest.
    """

    name: str
    target: str
    isa: str = ""
    code: Mapping[str, str | bytes] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()
    args: tuple[Arg, ...] = ()
    steps: tuple[Step, ...] = ()
    workspaces: tuple[Workspace, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _freeze(self, "entries", "args", "steps", "workspaces")
        for name in self.code:
            if not CODE_NAME.fullmatch(name):
                raise ValueError(
                    f"names of code must be letters, digits and ._- such as 'ptx' or 'cubin.sm_90a', got {name!r}"
                )
        if not self.entries:
            raise ValueError(f"artifact {self.name!r} must have at least one entry")
        names = [e.name for e in self.entries]
        if len(set(names)) != len(names):
            raise ValueError(f"entries of artifact {self.name!r} must have different names, got {', '.join(names)}")
        if not self.steps and len(self.entries) != 1:
            raise ValueError(
                f"artifact {self.name!r} has {len(names)} entries and no steps: a kernel has one entry, "
                "a program has steps that launch its entries"
            )
        for i, step in enumerate(self.steps):
            if step.entry not in names:
                raise ValueError(
                    f"step {i} of artifact {self.name!r} launches {step.entry!r}, "
                    f"but its entries are {', '.join(names)}"
                )
            if len(step.args) != len(self.entry(step.entry).args):
                raise ValueError(
                    f"step {i} of artifact {self.name!r} gives {len(step.args)} arguments to "
                    f"{step.entry!r}, which takes {len(self.entry(step.entry).args)}"
                )
        if not self.args and not self.steps:
            object.__setattr__(self, "args", self.entries[0].args)

    @property
    def is_program(self) -> bool:
        return bool(self.steps)

    def entry(self, name: str | None = None) -> Entry:
        """The entry of the given name; without a name, the only entry of a kernel."""
        if name is None:
            if len(self.entries) != 1:
                raise ValueError(
                    f"artifact {self.name!r} has {len(self.entries)} entries: "
                    f"name one of {', '.join(e.name for e in self.entries)}"
                )
            return self.entries[0]
        for e in self.entries:
            if e.name == name:
                return e
        raise ValueError(
            f"artifact {self.name!r} has no entry {name!r}: it has {', '.join(e.name for e in self.entries)}"
        )

    def cubin(self, chip: str) -> bytes | None:
        """The cubin for a chip such as ``"sm_90a"``, or None."""
        found = self.code.get(f"cubin.{chip}")
        if found is None and chip == self.target:
            found = self.code.get("cubin")
        return found if isinstance(found, bytes) else None

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over everything that the runtime reads: the ABI and the code."""
        return kvarn.bundle.digest(self)

    def replace(self, **changes: Any) -> Artifact:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def save(self, path: str | os.PathLike[str], *, directory: bool = False) -> Path:
        """Write a bundle with only this artifact; see `kvarn.artifact.bundle.save`."""
        return kvarn.bundle.save(path, [self], directory=directory)

    @staticmethod
    def load(path: str | os.PathLike[str], target: str | None = None) -> Artifact:
        """Read one artifact of a bundle.

        Parameters
        ----------
        path : path
            A bundle: a zip file or a folder.
        target : str, optional
            The variant of a bundle with several.

        Raises
        ------
        ValueError
            If the file is not a bundle or is damaged (a `kvarn.artifact.bundle.BundleError`), or ``target`` does not
            select exactly one variant.
        """
        variants = kvarn.bundle.load(path)
        found = [a for a in variants if target in (None, a.target)]
        if len(found) != 1:
            raise ValueError(
                f"{os.fspath(path)} must have exactly one artifact for {target or 'an unnamed target'}: "
                f"it has {', '.join(a.target for a in variants)}; give target="
            )
        return found[0]


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, (list, tuple)) else value


def _freeze(instance: Any, *names: str) -> None:
    """Convert lists, also nested ones, to tuples, so that an instance is immutable and equal after a round trip."""
    for name in names:
        object.__setattr__(instance, name, _tuples(getattr(instance, name)))

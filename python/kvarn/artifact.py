# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The artifact: what compiling makes and what the runtime needs.

JSON and code only. Neither MLIR nor a GPU library is imported here, so that a kernel compiled on one
machine runs on another that has the loader alone. On disk an artifact is a *bundle*: a zip file or a
folder with ``manifest.json`` and one file a piece of code, each under a SHA-256 checksum. A bundle may
hold several variants of the same kernel (one a target), and a variant may hold cubins for several chips
next to its PTX.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvarn.dialect import dtypes, layout, tma_layout
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CacheSpec
from kvarn.dialect.tma_layout import TmaSpec

FORMAT = "kvarn-bundle"
VERSION = 1
MANIFEST = "manifest.json"
KINDS = ("cache", "collection", "operand", "buffer", "scalar", "tensormap")
# C types of kernel parameters: bytes each takes, which is also its alignment (a tensor map is an opaque block).
PARAM_BYTES = {
    "ptr": 8, "i64": 8, "f64": 8, "i32": 4, "f32": 4, "i16": 2, "f16": 2, "bf16": 2,
    "i8": 1, "i1": 1, "f8e4m3": 1, "f8e5m2": 1, "f8e8m0": 1, "tensormap": 128,
}  # fmt: skip
TEXT_CODE = ("ptx", "llvm", "kv", "gpu", "nvvm", "sass")


def param_type(dtype: DType) -> str:
    """The parameter type of a scalar: ``"i32"`` for i32 and u32, ``"i1"`` for bool, else the dtype's name."""
    if dtype.kind == "b":
        return "i1"
    return f"i{dtype.bits}" if dtype.is_integer else dtype.name


@dataclass(frozen=True)
class Arg:
    """One argument of a kernel or program, as the Python caller sees it.

    Parameters
    ----------
    name : str
        The argument's name, for messages.
    kind : {"cache", "collection", "operand", "buffer", "scalar", "tensormap"}
    dtype : DType or None
        Element type of a buffer, type of a scalar; None for the others.
    rank : int
        Dimensions of a buffer; 0 for the others.
    spec : CacheSpec, TmaSpec or None
        Static parameters of a cache, collection or operand. A CollectionSpec or OperandSpec gives its cache's. Those of
        a TMA descriptor; without, any descriptor is taken.
    alignment : int
        Bytes that the first element's address must be a multiple of; 0 asks for the element's own size.
    written : bool
        Whether the kernel may write through it.
    table_alignment : int
        Bytes that every row of a cache's lookup table must start at a multiple of; 0 asks for nothing.
    """

    name: str
    kind: str
    dtype: DType | None = None
    rank: int = 0
    spec: CacheSpec | TmaSpec | None = None
    alignment: int = 0
    written: bool = False
    table_alignment: int = 0

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
        for what, bytes_ in (("alignment", self.alignment), ("table alignment", self.table_alignment)):
            if bytes_ < 0 or bytes_ & (bytes_ - 1):
                raise ValueError(f"{what} of argument {self.name!r} must be a power of two, got {bytes_}")

    @property
    def fields(self) -> tuple[layout.Field, ...]:
        """The run-time parts that the argument is flattened into, in parameter order."""
        if self.kind == "cache":
            return layout.cache_fields(self._spec)
        if self.kind == "operand":
            return layout.operand_fields(self._spec)
        if self.kind == "collection":
            return layout.collection_fields(self._spec)
        if self.kind == "buffer":
            return layout.buffer_fields(self.rank)
        if self.kind == "tensormap":
            return tma_layout.FIELDS
        assert self.dtype is not None
        return (layout.Field("value", param_type(self.dtype), "the scalar"),)

    @property
    def _spec(self) -> CacheSpec:
        assert isinstance(self.spec, CacheSpec)  # held by __post_init__
        return self.spec


@dataclass(frozen=True)
class Param:
    """One parameter of the compiled function.

    Parameters
    ----------
    arg : int
        Index of the entry's argument that it is a part of.
    field : str
        Name of the part, as in ``layout.cache_fields`` and its siblings, or ``"value"``.
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
        The block it was compiled for (x, y, z); None when any will do.
    max_threads : int
        Most threads a block may have; 0 when the kernel does not say.
    shared_bytes : int
        Dynamic shared memory that a launch must ask for.
    cluster : tuple of int or None
        Blocks of a cluster (x, y, z).
    attributes : dict
        Launch attributes: ``"programmatic": True`` (may start before the kernel ahead of it in the stream ends),
        ``"cooperative": True``; anything else is information.
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

    ``args`` holds one item an argument of the entry: ``("arg", i)`` for the program's i-th argument whole, an
    expression for a scalar, ``("workspace", name)`` for a buffer of bytes, or ``("tensor_map", i, half, layer)`` for a
    TMA descriptor, made at launch, of the program's i-th argument: ``half`` is ``"key"`` or ``"value"``, and ``layer``
    an expression that a collection alone has. The tile is that of the entry's argument.
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
    """Scratch memory of a program: ``bytes`` is an expression; ``zeroed`` asks for zeros before the first run."""

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
        The program's arguments; a kernel's are its entry's.
    steps : tuple of Step
    workspaces : tuple of Workspace
    meta : dict
        Anything JSON that a person may want to know: versions, statistics, the source's digest.
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
        if not self.entries:
            raise ValueError(f"artifact {self.name!r} must have at least one entry")
        names = [e.name for e in self.entries]
        if len(set(names)) != len(names):
            raise ValueError(f"entries of artifact {self.name!r} must have different names, got {', '.join(names)}")
        if not self.steps and len(self.entries) != 1:
            raise ValueError(
                f"artifact {self.name!r} has {len(names)} entries and no steps: a kernel has one entry, "
                "a program says in its steps how to run them"
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
        """The entry of a name; without one, the only entry of a kernel."""
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
        """The cubin made for a chip such as ``"sm_90a"``, or None."""
        found = self.code.get(f"cubin.{chip}")
        if found is None and chip == self.target:
            found = self.code.get("cubin")
        return found if isinstance(found, bytes) else None

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over everything that the runtime reads: the ABI and the code."""
        files: dict[str, bytes] = {}
        document = _to_json(self, files, "")
        document.pop("meta")
        h = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
        for name in sorted(files):
            h.update(name.encode() + b"\0" + hashlib.sha256(files[name]).digest())
        return h.hexdigest()

    def replace(self, **changes: Any) -> Artifact:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def save(self, path: str | os.PathLike[str], *, directory: bool = False) -> Path:
        """Write a bundle with this artifact alone; see `save_bundle`."""
        return save_bundle(path, [self], directory=directory)

    @staticmethod
    def load(path: str | os.PathLike[str], target: str | None = None) -> Artifact:
        """Read one artifact of a bundle.

        Parameters
        ----------
        path : path
            A bundle: a zip file or a folder.
        target : str, optional
            Which variant to take when the bundle has several.

        Raises
        ------
        ValueError
            If the bundle is damaged or foreign, or ``target`` does not pick exactly one variant.
        """
        found = load_bundle(path)
        if target is not None:
            found = tuple(a for a in found if a.target == target)
        if len(found) != 1:
            have = ", ".join(a.target for a in load_bundle(path))
            raise ValueError(
                f"{os.fspath(path)} must hold exactly one artifact for "
                f"{target or 'an unnamed target'}: it holds {have}; give target="
            )
        return found[0]


# --- JSON ----------------------------------------------------------------------------------------


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, (list, tuple)) else value


def _freeze(instance: Any, *names: str) -> None:
    """Turn lists, also nested ones, into tuples: frozen then means frozen, and a round trip compares equal."""
    for name in names:
        object.__setattr__(instance, name, _tuples(getattr(instance, name)))


def spec_to_json(spec: CacheSpec) -> dict[str, Any]:
    """A cache's static parameters as JSON."""
    return {
        "kind": spec.kind, "dtype": spec.dtype.name, "num_heads": spec.num_heads, "head_size": spec.head_size,
        "page_size": spec.page_size, "is_mla": spec.is_mla,
        "scale_dtype": spec.scale_dtype.name if spec.scale_dtype else None, "granularity": spec.granularity,
    }  # fmt: skip


def spec_from_json(document: Mapping[str, Any]) -> CacheSpec | TmaSpec:
    """A cache's or a TMA descriptor's static parameters out of JSON."""
    rest = dict(document)
    if "form" in rest:
        return TmaSpec(**{**rest, "dtype": dtypes.by_name(rest["dtype"])})
    for name in ("dtype", "scale_dtype"):
        rest[name] = dtypes.by_name(rest[name]) if rest.get(name) is not None else None
    return layout.spec_class(str(rest.get("kind")))(**rest)


def _to_json(value: Any, files: dict[str, bytes], prefix: str) -> Any:
    """A dataclass of this module as JSON; its code goes to ``files`` under names that start with ``prefix``."""
    if isinstance(value, CacheSpec):
        return spec_to_json(value)
    if isinstance(value, DType):
        return value.name
    if isinstance(value, Artifact):
        document = {
            f.name: _to_json(getattr(value, f.name), files, prefix)
            for f in dataclasses.fields(value)
            if f.name != "code"
        }
        document["code"] = {}
        for key, code in value.code.items():
            name = f"{prefix}{key}"
            files[name] = code.encode() if isinstance(code, str) else bytes(code)
            document["code"][key] = {"file": name, "text": isinstance(code, str)}
        return document
    if dataclasses.is_dataclass(value):
        return {f.name: _to_json(getattr(value, f.name), files, prefix) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _to_json(v, files, prefix) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(v, files, prefix) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"an artifact holds JSON values only, got {type(value).__name__}: {value!r}")


_MEMBERS: dict[type, dict[str, type]] = {
    Artifact: {"entries": Entry, "args": Arg, "steps": Step, "workspaces": Workspace},
    Entry: {"args": Arg, "params": Param},
}


def _from_json(cls: type, document: Any, files: Mapping[str, bytes]) -> Any:
    if not isinstance(document, Mapping):
        raise ValueError(f"{cls.__name__.lower()} must be an object, got {type(document).__name__}")
    known = {f.name for f in dataclasses.fields(cls)}
    if not known >= set(document):
        raise ValueError(f"{cls.__name__.lower()} has no field {', '.join(sorted(set(document) - known))}")
    values = dict(document)
    for name, member in _MEMBERS.get(cls, {}).items():
        values[name] = tuple(_from_json(member, item, files) for item in values.get(name, ()))
    if cls is Arg:
        values["dtype"] = dtypes.by_name(values["dtype"]) if values.get("dtype") is not None else None
        values["spec"] = spec_from_json(values["spec"]) if values.get("spec") is not None else None
    if cls is Artifact:
        values["code"] = {
            key: files[item["file"]].decode() if item["text"] else files[item["file"]]
            for key, item in values.get("code", {}).items()
        }
    return cls(**values)


# --- bundles -------------------------------------------------------------------------------------


def _manifest(artifacts: Sequence[Artifact]) -> tuple[bytes, dict[str, bytes]]:
    files: dict[str, bytes] = {}
    several = len(artifacts) > 1
    variants = [_to_json(a, files, f"{i}." if several else "") for i, a in enumerate(artifacts)]
    sums = {name: {"sha256": hashlib.sha256(code).hexdigest(), "bytes": len(code)} for name, code in files.items()}
    body = {"format": FORMAT, "version": VERSION, "variants": variants, "files": sums}
    # The manifest's own checksum is over its canonical text without that line.
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps(body, indent=1).encode(), files


def dumps(artifacts: Iterable[Artifact]) -> bytes:
    """A bundle as the bytes of its zip file. The same artifacts give the same bytes."""
    manifest, files = _manifest(list(artifacts))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in ((MANIFEST, manifest), *sorted(files.items())):
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            z.writestr(info, data)
    return out.getvalue()


def save_bundle(path: str | os.PathLike[str], artifacts: Iterable[Artifact], *, directory: bool = False) -> Path:
    """Write a bundle, whole or not at all.

    Parameters
    ----------
    path : path
        The zip file or, with ``directory``, the folder to write. A folder must not exist yet or be empty.
    artifacts : iterable of Artifact
        The variants, one a target.
    directory : bool
        Write a folder of plain files, for people to look into.

    Returns
    -------
    pathlib.Path
        ``path``.
    """
    path, artifacts = Path(path), list(artifacts)
    if not artifacts:
        raise ValueError("a bundle must hold at least one artifact, got none")
    if len({a.target for a in artifacts}) != len(artifacts):
        raise ValueError(
            f"artifacts of a bundle must have different targets, got {', '.join(a.target for a in artifacts)}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if directory:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ValueError(f"{path} must be a new or empty folder; remove it first")
        manifest, files = _manifest(artifacts)
        staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        staging.chmod(0o755)
        for name, data in {**files, MANIFEST: manifest}.items():
            (staging / name).write_bytes(data)
        os.replace(staging, path)
        return path
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file name, or directory=True for a new folder")
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(dumps(artifacts))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def loads(data: bytes, where: str = "the bundle") -> tuple[Artifact, ...]:
    """The artifacts of a bundle given as bytes; ``where`` names it in messages. Raises ValueError if damaged."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as z:
            files = {name: z.read(name) for name in z.namelist()}
    except Exception as e:  # zipfile raises a dozen types on damaged data
        raise ValueError(f"{where} is not a kvarn bundle (a zip file), or is damaged: {e}") from None
    return _read(files, where)


def load_bundle(path: str | os.PathLike[str]) -> tuple[Artifact, ...]:
    """Read every artifact of a bundle and check its checksums.

    Raises
    ------
    ValueError
        If the file is foreign, damaged, or written by a newer version; the message says which.
    FileNotFoundError
        If there is nothing at ``path``.
    """
    path = Path(path)
    if not path.is_dir():
        return loads(path.read_bytes(), str(path))
    return _read({p.name: p.read_bytes() for p in path.iterdir() if p.is_file()}, str(path))


def _read(files: Mapping[str, bytes], where: str) -> tuple[Artifact, ...]:
    if MANIFEST not in files:
        raise ValueError(f"{where} is not a kvarn bundle: it has no {MANIFEST}")
    try:
        body = json.loads(files[MANIFEST])
    except ValueError as e:
        raise ValueError(f"{MANIFEST} of {where} is damaged: {e}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ValueError(f"{where} is not a kvarn bundle: its {MANIFEST} does not say format {FORMAT!r}")
    if body.get("version") != VERSION:
        raise ValueError(
            f"{where} has bundle version {body.get('version')}, this kvarn reads {VERSION}: "
            "compile it again, or install the kvarn that wrote it"
        )
    claimed = body.pop("sha256", None)
    if claimed != hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest():
        raise ValueError(f"{MANIFEST} of {where} is damaged: its checksum does not match")
    for name, facts in body.get("files", {}).items():
        if name not in files:
            raise ValueError(f"{where} is damaged: {name} is missing")
        if hashlib.sha256(files[name]).hexdigest() != facts["sha256"]:
            raise ValueError(f"{where} is damaged: the checksum of {name} does not match")
    try:
        return tuple(_from_json(Artifact, variant, files) for variant in body["variants"])
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"{where} is not a valid kvarn bundle: {e}") from e

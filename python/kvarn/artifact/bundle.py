# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Bundles: artifacts on disk.

A bundle is a zip file or a folder with ``manifest.json`` and one file per code object, each with a SHA-256 checksum. It
may have several variants of a kernel (one per target), and a variant may have cubins for several chips next to its PTX.
For any input, reading terminates, opens no file outside of the bundle, executes nothing, and returns artifacts whose
fields have their declared types, or raises `BundleError`. Checksums detect damage, not malice: a launch runs the code
of a bundle.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import os
import shutil
import tempfile
import types
import typing
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvarn.artifact import CODE_NAME, MANIFEST, Artifact
from kvarn.dialect import dtypes, layout
from kvarn.dialect.dtypes import DType
from kvarn.dialect.layout import CacheSpec
from kvarn.dialect.tma_layout import TmaSpec
from kvarn.files import MOST_BYTES, read_regular, write_output

FORMAT = "kvarn-bundle"
VERSION = 1
# Limits far above real bundles (like MOST_BYTES), so that a forged one cannot exhaust time or stack.
_MOST_MANIFEST = 16 << 20
_MOST_DEPTH = 64
_MOST_ITEMS = 4096  # number of variants, entries, steps, or arguments


class BundleError(ValueError):
    """A file that is not a bundle, is damaged, or has invalid contents."""


# --- writing -------------------------------------------------------------------------------------


def _to_json(value: Any, files: dict[str, bytes], prefix: str) -> Any:
    """A dataclass of an artifact as JSON; code goes to ``files`` under names that start with ``prefix``."""
    if isinstance(value, DType):
        return value.name
    if isinstance(value, Artifact):
        fields = [f for f in dataclasses.fields(value) if f.name != "code"]
        document = {f.name: _to_json(getattr(value, f.name), files, prefix) for f in fields}
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
    raise TypeError(f"an artifact must have JSON values only, got {type(value).__name__}: {value!r}")


def digest(artifact: Artifact) -> str:
    """SHA-256 over everything that the runtime reads of an artifact: the ABI and the code."""
    files: dict[str, bytes] = {}
    document = _to_json(artifact, files, "")
    document.pop("meta")
    h = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    for name in sorted(files):
        h.update(name.encode() + b"\0" + hashlib.sha256(files[name]).digest())
    return h.hexdigest()


def _manifest(artifacts: Sequence[Artifact], indent: int | None = 1) -> tuple[bytes, dict[str, bytes]]:
    files: dict[str, bytes] = {}
    several = len(artifacts) > 1
    variants = [_to_json(a, files, f"{i}." if several else "") for i, a in enumerate(artifacts)]
    sums = {name: {"sha256": hashlib.sha256(code).hexdigest(), "bytes": len(code)} for name, code in files.items()}
    body = {"format": FORMAT, "version": VERSION, "variants": variants, "files": sums}
    # The manifest's own checksum is over its canonical text without that line.
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps(body, indent=indent).encode(), files


def dumps(artifacts: Iterable[Artifact], *, brief: bool = False) -> bytes:
    """A bundle as the bytes of its zip file. Equal artifacts give equal bytes.

    ``brief``: in half of the time, with a manifest on one line and files that are compressed less, for a cache.
    """
    manifest, files = _manifest(list(artifacts), None if brief else 1)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in ((MANIFEST, manifest), *sorted(files.items())):
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            z.writestr(info, data, compresslevel=1 if brief else None)
    return out.getvalue()


def save(path: str | os.PathLike[str], artifacts: Iterable[Artifact], *, directory: bool = False) -> Path:
    """Write a bundle atomically.

    Parameters
    ----------
    path : path
        The zip file or, with ``directory``, the folder to write. An existing folder must be empty.
    artifacts : iterable of Artifact
        The variants, one per target.
    directory : bool
        Write a folder of plain files, for inspection.

    Returns
    -------
    pathlib.Path
        ``path``.
    """
    path, artifacts = Path(path), list(artifacts)
    if not artifacts:
        raise ValueError("a bundle must have at least one artifact, got none")
    if len({a.target for a in artifacts}) != len(artifacts):
        raise ValueError(
            f"artifacts of a bundle must have different targets, got {', '.join(a.target for a in artifacts)}"
        )
    if directory:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ValueError(f"{path} must be a new or empty folder; remove it first")
        manifest, files = _manifest(artifacts)
        staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            staging.chmod(0o755)
            for name, data in {**files, MANIFEST: manifest}.items():
                (staging / name).write_bytes(data)
            os.replace(staging, path)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return path
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file name, or directory=True for a new folder")
    write_output(path, dumps(artifacts))
    return path


# --- reading -------------------------------------------------------------------------------------


def loads(data: bytes, where: str = "the bundle") -> tuple[Artifact, ...]:
    """The artifacts of a bundle in memory; ``where`` names it in messages. Raises `BundleError`."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as z:
            sizes = {info.filename: info.file_size for info in z.infolist()}
            if sum(sizes.values()) > MOST_BYTES:
                raise ValueError(f"it must have at most {MOST_BYTES} bytes, got {sum(sizes.values())}")
            files = {name: z.read(name) for name in sizes}
    except Exception as e:  # zipfile raises a dozen types on damaged data
        raise BundleError(f"{where} is not a kvarn bundle (a zip file), or is damaged: {e}") from None
    return _read(files.get, where)


def load(path: str | os.PathLike[str]) -> tuple[Artifact, ...]:
    """Read every artifact of a bundle and check its checksums.

    Raises
    ------
    BundleError
        If the file is not a bundle, is damaged, or was written by a newer version; the message says which.
    FileNotFoundError
        If ``path`` does not exist.
    """
    path = Path(path)
    if not path.is_dir():
        if path.stat().st_size > MOST_BYTES:
            raise BundleError(f"{path} must have at most {MOST_BYTES} bytes, got {path.stat().st_size}")
        return loads(path.read_bytes(), str(path))

    def file(name: str) -> bytes | None:
        try:
            return read_regular(path / name)[0]
        except FileNotFoundError:
            return None
        except OSError as e:
            what = f"{name} must be a file, not a link or a folder, of at most {MOST_BYTES} bytes"
            raise BundleError(f"{path} is damaged: {what}: {e}") from None

    return _read(file, str(path))


def _read(file: Callable[[str], bytes | None], where: str) -> tuple[Artifact, ...]:
    """The artifacts of a bundle whose files ``file(name)`` returns, or None for a missing file."""
    manifest = file(MANIFEST)
    if manifest is None:
        raise BundleError(f"{where} is not a kvarn bundle: it has no {MANIFEST}")
    try:
        body = _parse(manifest)
    except (ValueError, RecursionError) as e:
        raise BundleError(f"{MANIFEST} of {where} is damaged: {e}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise BundleError(f"{where} is not a kvarn bundle: its {MANIFEST} does not declare format {FORMAT!r}")
    if body.get("version") != VERSION:
        raise BundleError(
            f"{where} has bundle version {body.get('version')}, this kvarn reads {VERSION}: "
            "compile it again, or install the kvarn that wrote it"
        )
    claimed = body.pop("sha256", None)
    if claimed != hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest():
        raise BundleError(f"{MANIFEST} of {where} is damaged: its checksum does not match")
    files = {}
    try:
        for name, facts in body["files"].items():
            if not CODE_NAME.fullmatch(name):
                raise ValueError(f"its files must be called like ptx or cubin.sm_90a, got {name!r}")
            code = file(name)
            if code is None:
                raise ValueError(f"it is damaged: {name} is missing")
            if hashlib.sha256(code).hexdigest() != facts["sha256"]:
                raise ValueError(f"it is damaged: the checksum of {name} does not match")
            files[name] = code
        variants = tuple(_artifact(document, files) for document in _several(body["variants"], "variants"))
        if not variants:
            raise ValueError("it has no artifact")
        return variants
    except BundleError:
        raise
    except Exception as e:  # errors of the checks above and of the dataclasses
        what = str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"
        raise BundleError(f"{where} is not a valid kvarn bundle: {what}") from e


def _parse(manifest: bytes) -> Any:
    """A manifest's JSON: numbers of at most 64 bits, nested no deeper than a program's expressions need."""
    if len(manifest) > _MOST_MANIFEST:
        raise ValueError(f"it must have at most {_MOST_MANIFEST} bytes, got {len(manifest)}")
    body = json.loads(manifest)
    level = [body]
    for _ in range(_MOST_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, (int, float)) and not -(2**63) <= value < 2**64:  # also refuses nan
                raise ValueError("its numbers must have at most 64 bits")
            if isinstance(value, (list, dict)):
                below.extend(value.values() if isinstance(value, dict) else value)
        level = below
    if level:
        raise ValueError(f"it must not nest deeper than {_MOST_DEPTH} levels")
    return body


def _several(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MOST_ITEMS:
        raise ValueError(f"{what} must be a list of at most {_MOST_ITEMS} items, got {_shown(value)}")
    return value


def _artifact(document: Any, files: Mapping[str, bytes]) -> Artifact:
    if not isinstance(document, dict) or not isinstance(document.get("code"), dict):
        raise ValueError(f"artifact must be an object with an object code, got {_shown(document)}")
    code = {}
    for key, item in document["code"].items():
        if not isinstance(item, dict) or item.get("file") not in files:
            raise ValueError(f"code {key!r} must name a file of the bundle")
        data = files[item["file"]]
        code[key] = data.decode() if item.get("text") else data
    return _instance(Artifact, {**document, "code": code})


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _instance(cls: type, document: Any) -> Any:
    """An instance of a dataclass from JSON, with each field of its declared type."""
    what = cls.__name__.lower()
    if not isinstance(document, Mapping):
        raise ValueError(f"{what} must be an object, got {_shown(document)}")
    hints = _hints(cls)
    if not hints.keys() >= document.keys():
        raise ValueError(f"{what} has no field {', '.join(sorted(document.keys() - hints.keys()))}")
    return cls(**{name: _value(hints[name], item, f"{name} of {what}") for name, item in document.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """JSON as a value of a declared type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or origin is Mapping or (origin is types.UnionType and bytes in arguments):
        if origin is Mapping and not isinstance(value, Mapping):
            raise ValueError(f"{where} must be an object, got {_shown(value)}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        chosen = [a for a in arguments if a is not type(None)]
        return _spec(value) if TmaSpec in chosen else _value(chosen[0], value, where)
    if origin is tuple:
        items = _several(value, where)
        if arguments[-1] is ...:
            return tuple(_value(arguments[0], item, where) for item in items)
        if len(items) != len(arguments):
            raise ValueError(f"{where} must have {len(arguments)} items, got {len(items)}")
        return tuple(_value(a, item, where) for a, item in zip(arguments, items, strict=True))
    if hint is DType:
        return dtypes.element_by_name(_value(str, value, where))
    if dataclasses.is_dataclass(hint):
        return _instance(typing.cast(type, hint), value)
    if type(value) is not hint:
        raise ValueError(f"{where} must be of type {hint.__name__}, got {_shown(value)}")
    return value


def _spec(document: Any) -> CacheSpec | TmaSpec:
    """The static parameters of a cache or TMA descriptor."""
    if isinstance(document, Mapping) and "form" in document:
        return _instance(TmaSpec, document)
    kind = document.get("kind") if isinstance(document, Mapping) else None
    return _instance(layout.spec_class(str(kind)), document)


def _shown(value: Any) -> str:
    """A value for messages: its type, or itself if it is short."""
    return repr(value) if value is None or isinstance(value, (bool, int, float)) else f"a {type(value).__name__}"

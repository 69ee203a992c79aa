# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The user's tuning table: the schedules that ``kvarn tune`` has measured on this machine.

A JSON file, ``KVARN_TUNE`` or ``tune.json`` in the cache folder, with a list of entries for each kind of kernel. An
entry counts for one case exactly (:class:`Key`, :class:`TileKey`); what the file does not have is left to the built-in
choice. Its content is part of the keys of the compile cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.dialect import schedules
from kvarn.env import env
from kvarn.files import read_regular
from kvarn.lowering.kernels.attention.case import Case
from kvarn.lowering.target import Target

from .decode import DecodeConfig

VERSION = 1


@dataclass(frozen=True)
class Key:
    """The key of a case of decode attention.

    Attributes
    ----------
    target : str
    dtype : str
        Type of the cache.
    heads, size, page : int
        KV heads, head size, tokens per page (0: not paged).
    rows : int
        Query rows per sequence and KV head: the group times the most new tokens.
    batch : int
        The schedule's bound on the number of sequences.
    """

    target: str
    dtype: str
    heads: int
    size: int
    page: int
    rows: int
    batch: int

    @staticmethod
    def of(target: str, config: DecodeConfig) -> Key:
        """The key of a configuration; only its case is read."""
        spec = config.spec
        page = spec.page_size if spec.paged else 0
        rows = config.case.group * config.max_queries
        return Key(target, spec.dtype.name, spec.num_heads, spec.head_size, page, rows, config.max_batch)


@dataclass(frozen=True)
class TileKey:
    """The key of a case of attention over tiles.

    Attributes
    ----------
    target : str
    dtype, query : str
        Types of the cache and of the query.
    heads, size, page, group : int
        KV heads, head size, tokens per page (0: not paged), query heads per KV head.
    queries : int
        The schedule's bound on a sequence's new tokens; 0: none.
    """

    target: str
    dtype: str
    query: str
    heads: int
    size: int
    page: int
    group: int
    queries: int

    @staticmethod
    def of(target: str, case: Case, queries: int | None) -> TileKey:
        """The key of a case."""
        spec = case.spec
        page = spec.page_size if spec.paged else 0
        return TileKey(
            target, spec.dtype.name, case.query.name, spec.num_heads, spec.head_size, page, case.group, queries or 0
        )


AnyKey = Key | TileKey
KEYS: dict[str, type[AnyKey]] = {"decode": Key, "tile": TileKey}
# The entries that a table may have, by kind; only callers may set the fixed splits of a decode.
ENTRIES = {
    "decode": {entry.name: entry for entry in schedules.DECODE.entries if entry is not schedules.SPLIT},
    "tile": {entry.name: entry for entry in schedules.TILED.entries},
}


def tile_entries(target: Target, case: Case, queries: int | None, invariant: bool = False) -> dict[str, Any]:
    """The table's entries for a case of attention over tiles; empty without any.

    A batch-invariant schedule does not take splits from the table, since only callers may set them.
    """
    found = load(env.tune).get(TileKey.of(target.name, case, queries), {})
    return {name: value for name, value in found.items() if not (invariant and name == "splits")}


def entries(target: Target, config: DecodeConfig, invariant: bool = False) -> dict[str, Any]:
    """The table's entries for a case of decode; empty without any.

    The table depends on the batch, so a batch-invariant schedule takes only the entries that do not change result bits.

    Raises
    ------
    ValueError
        If the file is not a table, or its entries are illegal.
    """
    found = load(env.tune).get(Key.of(target.name, config), {})
    problem = schedules.why_unsupported("kv.attention", found, target, schedules.DECODE.name, config)
    if problem is not None:
        raise _refuse(env.tune, f"has an entry for this case whose {problem}")
    return {name: value for name, value in found.items() if not invariant or name != "tile"}


def digest() -> str:
    """SHA-256 of the user's table; empty without one."""
    try:
        return hashlib.sha256(read_regular(env.tune)[0]).hexdigest()
    except OSError:
        return ""


_read: dict[str, tuple[tuple[int, int], dict[AnyKey, dict[str, Any]]]] = {}  # by path: (time and size, content)


def load(path: Path) -> Mapping[AnyKey, dict[str, Any]]:
    """The schedules of a file by case; empty without a file or entries."""
    try:
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_size)
        known = _read.get(str(path))
        if known is not None and known[0] == stamp:
            return known[1]
        text = _decoded(path)
    except OSError:
        return {}
    found = {}
    for kind, records in _records(path, text).items():
        for number, record in enumerate(records):
            key, schedule = _entry(path, kind, number, record)
            found[key] = schedule
    _read[str(path)] = (stamp, found)
    return found


def _decoded(path: Path) -> str:
    try:
        return read_regular(path)[0].decode()
    except UnicodeDecodeError as error:
        raise _refuse(path, f"must be text in UTF-8: {error}") from None


def _refuse(path: Path, what: str) -> ValueError:
    return ValueError(f"the table of schedules {path} {what}; remove it, or make it again with kvarn tune")


def _records(path: Path, text: str) -> dict[str, list[Any]]:
    """The entries of a file by kind."""
    if not text.strip():
        return {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refuse(path, f"must be JSON: {error}") from None
    whole = isinstance(document, dict) and document.get("version") == VERSION
    found = {kind: document.get(kind, []) for kind in KEYS} if whole else {}
    if not whole or not any(kind in document for kind in KEYS) or not all(isinstance(x, list) for x in found.values()):
        raise _refuse(path, f'must be an object with "version": {VERSION} and a list {_named(KEYS)}')
    return found


def _named(names: Iterable[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)


def _entry(path: Path, kind: str, number: int, record: Any) -> tuple[AnyKey, dict[str, Any]]:
    where = f"entry {number}" if kind == "decode" else f"{kind} entry {number}"
    parts = [record.get(name) for name in ("case", "schedule")] if isinstance(record, dict) else [None]
    if not all(isinstance(part, dict) for part in parts):
        raise _refuse(path, f'{where} must have objects "case" and "schedule"')
    case, schedule, legal = parts[0], schedules.current("kv.attention", parts[1]), ENTRIES[kind]
    fields = {f.name: str if f.type == "str" else int for f in dataclasses.fields(KEYS[kind])}
    if set(case) != set(fields) or any(type(case[name]) is not type_ for name, type_ in fields.items()):
        raise _refuse(path, f"{where}: case must have {', '.join(fields)}, got {json.dumps(case)}")
    for name, value in schedule.items():
        if name not in legal:
            what = "integers " if kind == "decode" else ""
            raise _refuse(path, f"{where}: schedule must have {what}{', '.join(legal)}, got {name} = {value!r}")
        if legal[name].why_not(value) is not None:
            raise _refuse(path, f"{where}: {name} must be {legal[name].legal}, got {name} = {value!r}")
    return KEYS[kind](**case), schedule


def save(path: Path, found: Iterable[tuple[AnyKey, Mapping[str, int], float | None]]) -> None:
    """Add entries (case, schedule, microseconds) to a file, replacing those of the same cases.

    A time of None removes the case's entry.
    """
    try:
        text = _decoded(path)
    except OSError:
        text = ""
    kept: dict[str, dict[AnyKey, Any]] = {}
    for kind, records in _records(path, text).items():
        entries_of_kind = [_entry(path, kind, number, record) for number, record in enumerate(records)]
        kept[kind] = {k: {**r, "schedule": s} for (k, s), r in zip(entries_of_kind, records, strict=True)}
    for key, schedule, us in found:
        kind = next(kind for kind, type_ in KEYS.items() if isinstance(key, type_))
        of_kind = kept.setdefault(kind, {})
        of_kind.pop(key, None)
        if us is not None:
            ordered = dict(sorted(schedule.items()))
            of_kind[key] = {"case": dataclasses.asdict(key), "schedule": ordered, "us": round(us, 2)}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place, so that a concurrent compilation sees either the old table or the new one.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tune-")
    with os.fdopen(handle, "w") as file:
        json.dump({"version": VERSION, **{kind: list(x.values()) for kind, x in kept.items()}}, file, indent=1)
    os.replace(name, path)

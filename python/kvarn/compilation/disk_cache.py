# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The on-disk compile cache: one file per entry, safe for concurrent processes and ranks.

An entry is written to a temporary file and renamed, so a reader sees a whole entry or none; if two processes write the
same key, the last one wins, with the same bytes. Each file has a checksum over its key and content: a truncated,
damaged or renamed file is a miss and is removed. Reading an entry updates its time of use, and a write evicts the least
recently used entries of a cache above its limit. Nothing is unpickled, but an entry contains executable code: the
folder is private (mode 0700); a folder that others may write to, and an entry of another owner, are not used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.env import env
from kvarn.files import read_regular

VERSION = 2  # of the file format and the keys; each version has its own folder
_MAGIC = b"kvarn-cache-2\n"
_SUFFIX = ".entry"
_STALE_SECONDS = 3600.0  # age in seconds after which a temporary file is taken for one of a dead writer
_KEEP = 0.8  # share of the limit that an eviction leaves, so that not every write evicts
_SHARE = 8  # the part of the free space that a process fills before it counts again


def cache_key(parts: Mapping[str, Any]) -> str:
    """SHA-256 over everything that a compiled result depends on.

    Parameters
    ----------
    parts : mapping
        Names to numbers, strings, bytes, None, dtypes, specs, and lists, tuples and mappings of them. The order of a
        mapping is ignored. Other types are refused, since their text could change from run to run.
    """
    document = json.dumps({"version": VERSION, "parts": _canonical(parts, "key")}, sort_keys=True, allow_nan=True)
    return hashlib.sha256(document.encode()).hexdigest()


def _canonical(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return {"\0bytes": hashlib.sha256(value).hexdigest()}
    if isinstance(value, os.PathLike):
        return {"\0path": os.fspath(value)}
    if isinstance(value, Mapping):
        for k in value:
            if not isinstance(k, str):
                raise TypeError(f"a mapping in a cache key must have string keys, got {k!r} in {where}")
        return {k: _canonical(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return {"\0set": sorted(json.dumps(_canonical(v, where), sort_keys=True) for v in value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _canonical(getattr(value, f.name), f"{where}.{f.name}") for f in dataclasses.fields(value)}
        return {f"\0{type(value).__qualname__}": fields}
    raise TypeError(
        f"a cache key takes numbers, strings, bytes and containers of them, got {type(value).__name__} at {where}"
    )


@dataclass(frozen=True)
class CacheInfo:
    """The state of a cache: its folder, its contents, and the hits and misses of this process."""

    directory: Path
    entries: int
    bytes: int
    limit: int
    hits: int
    misses: int


class CompileCache:
    """A folder of compiled results.

    Parameters
    ----------
    directory : path, optional
        The folder; by default ``KVARN_CACHE_DIR``, read at each use.
    limit : int, optional
        Largest total size in bytes; by default ``KVARN_CACHE_SIZE``. 0 disables the cache.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, limit: int | None = None) -> None:
        self._directory, self._limit = directory, limit
        self._hits = self._misses = 0
        self._warned = False
        # Bytes that may be written to a folder under a limit before its entries are counted again.
        self._room: tuple[Path, int, int] | None = None

    @property
    def directory(self) -> Path:
        base = Path(self._directory) if self._directory is not None else env.cache_dir
        return base / f"compile-v{VERSION}"

    @property
    def limit(self) -> int:
        return env.cache_size if self._limit is None else self._limit

    def get(self, key: str) -> bytes | None:
        """The stored bytes of a key, or None."""
        if self.limit <= 0:
            return None
        path = self._path(key)
        try:
            if not self._ours():
                return None
            data, facts = read_regular(path)
            if not _only_ours(facts):
                raise PermissionError(f"{path} may be another user's")
        except OSError:
            self._misses += 1
            return None
        payload = data[len(_MAGIC) + 32 :]
        if data != _entry(key, payload):
            _remove(path)
            self._misses += 1
            return None
        self._hits += 1
        # Eviction sorts by this time stamp. A folder that is not writable has no eviction.
        try:
            os.utime(path)
        except OSError:
            pass
        return payload

    def put(self, key: str, payload: bytes) -> bool:
        """Store bytes under a key; False if the cache is off or its folder is not writable (with one warning)."""
        if self.limit <= 0:
            return False
        path = self._path(key)
        data = _entry(key, payload)
        try:
            for folder in (path.parent.parent, path.parent):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._ours():
                return False
            handle, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as f:
                    f.write(data)
                os.replace(temporary, path)
            except BaseException:
                _remove(Path(temporary))
                raise
            self._make_room(path, len(data))
        except OSError as e:
            self._warn(
                f"the compile cache cannot be written: {e}. Set KVARN_CACHE_DIR to a folder that can, "
                "or KVARN_CACHE_SIZE=0 to work without it"
            )
            return False
        return True

    def discard(self, key: str, why: object) -> None:
        """Remove an intact entry that could not be used; warns, since it may be a bug."""
        path = self._path(key)
        _remove(path)
        self._hits, self._misses = self._hits - 1, self._misses + 1
        warnings.warn(f"entry {path} of the compile cache is compiled again: {why}", RuntimeWarning, stacklevel=3)

    def fetch(self, parts: Mapping[str, Any], make: Callable[[], bytes]) -> bytes:
        """The stored result for ``parts``; if there is none, the result of ``make``, which is then stored."""
        key = cache_key(parts)
        found = None if env.always_compile else self.get(key)
        if found is None:
            found = make()
            self.put(key, found)
        return found

    def info(self) -> CacheInfo:
        """The current contents of the cache."""
        files = self._files()
        return CacheInfo(self.directory, len(files), sum(f[1] for f in files), self.limit, self._hits, self._misses)

    def clear(self) -> int:
        """Remove every entry and return their number. Other files in the folder are kept."""
        removed = sum(_remove(path) for _, _, path in self._files())
        self._remove_stale(age=60.0)  # a younger file may belong to an active writer
        return removed

    def _path(self, key: str) -> Path:
        if len(key) != 64 or not set(key) <= set("0123456789abcdef"):
            raise ValueError(f"a cache key must be 64 hexadecimal digits (see cache_key), got {key!r}")
        return self.directory / (key + _SUFFIX)

    def _ours(self) -> bool:
        """Whether only this user can add entries to the folder; warns once otherwise."""
        found = os.stat(self.directory)
        if stat.S_ISDIR(found.st_mode) and _only_ours(found):
            return True
        self._warn(
            f"the compile cache {self.directory} is not used: its entries are code that runs, so it must be a "
            f"folder that belongs to you and that others may not write to, got owner {found.st_uid} and mode "
            f"{stat.S_IMODE(found.st_mode):04o}. Remove it or chmod 700 it, or set KVARN_CACHE_DIR"
        )
        return False

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def _files(self) -> list[tuple[float, int, Path]]:
        """(last use, bytes, path) of every entry, except files that another process removes meanwhile."""
        found = []
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    if entry.name.endswith(_SUFFIX):
                        try:
                            facts = entry.stat(follow_symlinks=False)
                        except OSError:
                            continue
                        found.append((facts.st_mtime, facts.st_size, Path(entry.path)))
        except OSError:
            pass
        return found

    def _make_room(self, written: Path, size: int) -> None:
        """Remove old entries where they may exceed the limit, after an entry has been written."""
        directory, limit = self.directory, self.limit
        if self._room is not None and self._room[:2] == (directory, limit) and self._room[2] >= size:
            self._room = (directory, limit, self._room[2] - size)
            return
        # A count reads the whole folder. An eighth of what it leaves free may be written without another, since other
        # processes write, too.
        self._room = (directory, limit, (limit - self._clean_up(written)) // _SHARE)

    def _clean_up(self, keep: Path) -> int:
        """Remove old entries down to a part of the limit, if they exceed it; returns the bytes of the entries."""
        files = self._files()
        total = sum(f[1] for f in files)
        if total <= self.limit:
            return total
        self._remove_stale(_STALE_SECONDS)
        for _, size, path in sorted(files):
            if total <= self.limit * _KEEP:
                break
            # The entry just written is kept even above the limit: its writer is about to use it.
            if path != keep and _remove(path):
                total -= size
        return total

    def _remove_stale(self, age: float) -> None:
        try:
            for path in self.directory.glob(".new-*"):
                if time.time() - path.stat().st_mtime >= age:
                    _remove(path)
        except OSError:
            pass


def _entry(key: str, payload: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode() + payload).digest() + payload


def _only_ours(found: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user or root, and others may not write to it."""
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


compile_cache = CompileCache()

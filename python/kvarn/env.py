# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""All environment variables of kvarn, with their defaults.

Values are read on access, not at import, so that a test or a notebook can set them late: ``env.cache_dir`` is the
current value, ``with env.override(check=True):`` sets one temporarily in this process, and ``env.table()`` lists all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")
# The encoded dictionary of os.environ: ten times as fast to read, and operations read it at every call.
given: Any = getattr(os.environ, "_data", os.environ)
encoded: Callable[[str], Any] = getattr(os.environ, "encodekey", str)
_FALSE = ("", "0", "false", "no", "off")
_TRUE = ("1", "true", "yes", "on")


def _bool(text: str) -> bool:
    if text.lower() not in _FALSE + _TRUE:
        raise ValueError("must be 1 or 0")
    return text.lower() in _TRUE


OWNERSHIP = "ownership"


def _check(text: str) -> bool | str:
    if text.lower() == OWNERSHIP:
        return OWNERSHIP
    try:
        return _bool(text)
    except ValueError:
        raise ValueError("must be 1, 0 or ownership") from None


def _level(text: str) -> int:
    if text not in ("0", "1", "2", "3"):
        raise ValueError("must be 0, 1, 2 or 3")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not text.isascii() or int(text) < 1:
        raise ValueError("must be a positive number")
    return int(text)


_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def _bytes(text: str) -> int:
    number, unit = (text[:-1], _UNITS[text[-1].lower()]) if text[-1:].lower() in _UNITS else (text, 1)
    if not number.isdigit():
        raise ValueError("must be a number of bytes such as 1073741824 or 1G")
    return int(number) * unit


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvarn"


class Variable(Generic[T]):
    """One environment variable: a descriptor that reads it on access."""

    def __init__(self, name: str, default: T | Callable[[], T], parse: Callable[[str], T], doc: str) -> None:
        self.name, self._default, self._parse, self.__doc__ = name, default, parse, doc
        self._key = encoded(name)

    def __set_name__(self, owner: type, attribute: str) -> None:
        self.attribute = attribute

    @property
    def default(self) -> T:
        found: Any = self._default() if callable(self._default) else self._default
        return found

    @overload
    def __get__(self, instance: None, owner: type) -> Variable[T]: ...
    @overload
    def __get__(self, instance: Environment, owner: type) -> T: ...
    def __get__(self, instance: Environment | None, owner: type) -> Any:
        if instance is None:
            return self
        if self.attribute in instance.overrides:
            return instance.overrides[self.attribute]
        if self._key not in given:
            return self.default
        text = os.environ.get(self.name)
        # An empty variable counts as unset, as in shell scripts that clear one with NAME=.
        if not text:
            return self.default
        try:
            return self._parse(text)
        except ValueError as e:
            raise ValueError(f"environment variable {self.name} {e}, got {text!r}") from None

    def __set__(self, instance: Environment, value: T) -> None:
        raise AttributeError(f"set the environment variable {self.name}, or use env.override({self.attribute}=…)")


class Environment:
    """The variables. Use the instance ``kvarn.env.env``."""

    dump_to = Variable[str](
        "KVARN_DUMP_TO", "", str, "folder for every stage of every compilation, numbered; - prints them to stderr"
    )
    cache_dir = Variable[Path](
        "KVARN_CACHE_DIR", _default_cache_dir, lambda t: Path(t).expanduser(), "folder of the on-disk compile cache"
    )
    tune = Variable[Path](
        "KVARN_TUNE",
        lambda: env.cache_dir / "tune.json",
        lambda t: Path(t).expanduser(),
        "table of measured schedules: kvarn tune writes it, compilations read it",
    )
    cache_size = Variable[int](
        "KVARN_CACHE_SIZE", 1 << 30, _bytes, "byte limit of the compile cache (suffixes K, M, G); 0 turns it off"
    )
    always_compile = Variable[bool](
        "KVARN_ALWAYS_COMPILE", False, _bool, "1 compiles even if the cache has the kernel, and stores it again"
    )
    override_dir = Variable[str](
        "KVARN_OVERRIDE_DIR", "", str, "folder of edited stages, named as by KVARN_DUMP_TO, to use instead"
    )
    check = Variable["bool | str"](
        "KVARN_CHECK",
        False,
        _check,
        "1 adds device-side checks of accesses and table contents, which name the op; ownership also checks the owners "
        "of pages (kv.sanitize); may be set at any time",
    )
    emulator_steps = Variable[int](
        "KVARN_EMULATOR_STEPS",
        5_000_000,
        _count,
        "step limit of a launch in the emulator (blocks and scheduling steps of threads); more is an error",
    )
    reproducer = Variable[str](
        "KVARN_REPRODUCER", "", str, "file for the module and the pipeline if a pass fails, for kv-opt"
    )
    target = Variable[str]("KVARN_TARGET", "", str, "default target of compilations: sm_80, sm_90a, sm_100a or host")
    extensions = Variable[bool](
        "KVARN_EXTENSIONS", True, _bool, "0 ignores the extensions that installed packages declare by entry point"
    )
    host_opt = Variable[int](
        "KVARN_HOST_OPT",
        3,
        _level,
        "LLVM optimization level of host code, 0 to 3; 0 halves the time of compilation, for kernels that run once",
    )
    debug = Variable[bool]("KVARN_DEBUG", False, _bool, "1 makes the commands print the traceback of an error")
    ptxas = Variable[str](
        "KVARN_PTXAS", "", str, "path of the ptxas to use, also for kernels that nvJitLink could assemble"
    )
    allow_serialized = Variable[bool](
        "KVARN_ALLOW_SERIALIZED",
        False,
        _bool,
        "1 warns, instead of failing, if an assembler serializes wgmma or ignores setmaxnreg",
    )
    nvdisasm = Variable[str]("KVARN_NVDISASM", "", str, "path of the nvdisasm to use")

    def __init__(self) -> None:
        self.overrides: dict[str, Any] = {}

    @classmethod
    def variables(cls) -> list[Variable[Any]]:
        """All variables, in the order of declaration."""
        return [v for v in vars(cls).values() if isinstance(v, Variable)]

    @contextlib.contextmanager
    def override(self, **values: Any) -> Iterator[None]:
        """Set variables by attribute name within a ``with`` block, in this process only."""
        known = {v.attribute for v in self.variables()}
        for name in values:
            if name not in known:
                raise ValueError(f"variable must be one of {', '.join(sorted(known))}, got {name!r}")
        before = dict(self.overrides)
        self.overrides.update(values)
        try:
            yield
        finally:
            self.overrides = before

    def table(self) -> list[tuple[str, str, str, bool]]:
        """Rows of (name, current value, description, whether it is set)."""
        return [(v.name, str(v.__get__(self, type(self))), v.__doc__ or "", bool(os.environ.get(v.name))
                 or v.attribute in self.overrides) for v in self.variables()]  # fmt: skip


env = Environment()

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A compiled kernel: its code at every stage, its statistics, and its launcher.

Parts that need the compiler (the IR after each pass, and code that is not in the artifact) import it on demand, so a
saved kernel loads and launches without MLIR.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import kvarn
from kvarn.artifact import Artifact
from kvarn.dialect.deprecated import warn_renamed
from kvarn.errors import meant
from kvarn.settings import emulation

if TYPE_CHECKING:
    from kvarn.emulator import Report
    from kvarn.inspect import KernelReport
    from kvarn.lowering.pipeline import Settings

# The stages of host code, each made from the previous one; names of Kernel.asm.
_HOST_STAGES = ("kv", "gpu", "nvvm", "llvm")
_GPU_STAGES = (*_HOST_STAGES, "ptx", "cubin", "sass")


class Kernel:
    """A compiled kernel, or a compiled cache operation (a program of several launches).

    Attributes
    ----------
    artifact : Artifact
        Code and ABI, which is all that the loader needs.
    asm : mapping of str to str or bytes
        The code at a stage: ``"kv"`` (kv IR), ``"gpu"`` (after the passes of kvarn), ``"nvvm"`` (the LLVM dialect),
        ``"llvm"`` (LLVM IR), and on a GPU ``"ptx"``, ``"cubin"``, ``"sass"``. Stages are made on demand.
    stages : mapping of str to str
        The IR after each pass, by pass name, in order.
    stats : mapping of str to int
        ``"registers"``, ``"spills"`` (bytes), ``"shared bytes"`` (static and dynamic); for a program the maximum over
        its kernels. Needs nvJitLink or ptxas.
    settings : Settings or None
        Changes of the pipeline for this compilation; None for a loaded kernel.
    located : str
        The kv IR with source locations; empty for a loaded kernel.
    texts : mapping of str to str
        Sources without a file, by the file name of their locations.
    stats_by_kernel : mapping of str to mapping
        ``stats`` of each kernel of a program, by name.
    """

    def __init__(
        self, artifact: Artifact, source: str = "", settings: Settings | None = None, located: str = "",
        texts: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.artifact = artifact
        self._source, self.settings = source, settings
        self.located, self.texts = located, texts or {}

    @property
    def placed(self) -> str:
        """The old name of ``located``, for one release."""
        warn_renamed("the attribute of a kernel", "placed", "located")
        return self.located

    @property
    def name(self) -> str:
        return self.artifact.name

    @property
    def target(self) -> str:
        return self.artifact.target

    @functools.cached_property
    def stages(self) -> Mapping[str, str]:
        self._need_source("stages")
        found = kvarn.compiler.stages_of(self._source, self.target, self.settings)
        return _Stages(f"stages of {self.name} for {self.target}", found)

    @functools.cached_property
    def asm(self) -> Mapping[str, Any]:
        return _Asm(self)

    @functools.cached_property
    def assembled(self) -> Any:
        """The cubin for the kernel's own target with its statistics: ``kvarn.runtime.assemble.Assembled``."""
        from kvarn.runtime import assemble

        if self.target == "host":
            raise ValueError("statistics and machine code need GPU code: compile for a GPU target, got host")
        text = str(self.artifact.code["ptx"])
        return assemble.assemble(text, self.target, ("-lineinfo",) if "\n\t.loc\t" in text else ())

    @property
    def stats(self) -> Mapping[str, int]:
        each = self.stats_by_kernel.values()
        return {name: max(figures[name] for figures in each) for name in ("registers", "spills", "shared bytes")}

    @property
    def stats_by_kernel(self) -> Mapping[str, Mapping[str, int]]:
        from kvarn.runtime.assembler_log import AssemblyError

        figures = self.assembled.kernels
        missing = [entry.name for entry in self.artifact.entries if entry.name not in figures]
        if missing:
            raise AssemblyError(
                f"{self.assembled.tool} does not report the registers of {', '.join(missing)}: install ptxas, or name "
                "one with KVARN_PTXAS"
            )
        return {
            entry.name: {
                "registers": figures[entry.name].registers,
                "spills": figures[entry.name].spill_stores + figures[entry.name].spill_loads,
                "shared bytes": figures[entry.name].shared_bytes + entry.shared_bytes,
            }
            for entry in self.artifact.entries
        }

    @property
    def n_regs(self) -> int:
        return self.stats["registers"]

    @property
    def n_spills(self) -> int:
        return self.stats["spills"]

    def _need_source(self, what: str) -> None:
        if not self._source:
            raise ValueError(f"{what} need the kernel's IR, which a loaded kernel lacks: compile it again")

    @functools.cached_property
    def launcher(self) -> Any:
        """The launcher, ``kvarn.runtime.launch.Launcher``, or a ``Program`` for an operation."""
        from kvarn.runtime import program

        return program.runner(self.artifact)

    def launch(self, grid: Any, block: Any, *args: Any, stream: Any = None) -> None:
        """Launch over a grid of blocks.

        Parameters
        ----------
        grid, block : int or tuple of up to 3 int
        args
            One object per argument: caches, buffers (``__dlpack__``, ``__cuda_array_interface__`` or NumPy), numbers.
        stream : int, or an object with ``__cuda_stream__``, optional
            Default: the current stream of the arguments' library. Ignored on ``host``, where the call returns after the
            kernel has finished.
        """
        self._check_kind(program=False)
        emulated = emulation()
        if emulated is not None:
            emulated.launch(self, grid, block, args)
            return
        self.launcher(grid, block, *args, stream=stream)

    def emulate(self, grid: Any, block: Any, *args: Any, **options: Any) -> Report:
        """Run the PTX on NumPy arrays without a GPU; see ``docs/emulator.md``.

        Parameters
        ----------
        grid, block : int or tuple of up to 3 int
        args
            As in :meth:`launch`, over NumPy arrays, which the kernel writes.
        options
            Options of ``kv.emulated``: ``order``, ``seed``, ``copies``, ``multiprocessors``, ``races``.

        Returns
        -------
        kvarn.emulator.Report
            Instructions, bytes and sectors per argument, bank conflicts, divergence, hazards.

        Raises
        ------
        kvarn.emulator.EmulationError
            If the kernel fails: an access outside the arguments' memory, a deadlock, a read before its copy is
            complete, ...
        """
        from kvarn.emulator import run

        self._check_kind(program=False)
        return run.emulate(self, grid, block, args, options)

    def prepare(self, grid: Any, block: Any, *args: Any) -> Any:
        """Bind the arguments once; the result launches them again with minimal overhead."""
        self._check_kind(program=False)
        return self.launcher.prepare(grid, block, *args)

    def __getitem__(self, key: Any) -> Callable[..., None]:
        if not isinstance(key, tuple) or len(key) not in (2, 3):
            raise TypeError(f"launch with {self.name}[grid, block](...) or {self.name}[grid, block, stream](...)")
        grid, block, *rest = key
        return lambda *args: self.launch(grid, block, *args, stream=rest[0] if rest else None)

    def __call__(self, *args: Any, stream: Any = None) -> None:
        """Run a compiled operation, which computes its own grids; arguments as in :meth:`launch`."""
        self._check_kind(program=True)
        self.launcher(*args, stream=stream)

    def _check_kind(self, program: bool) -> None:
        if self.artifact.is_program != program:
            raise TypeError(
                f"{self.name} is a kernel: launch it over a grid, {self.name}[grid, block](...)"
                if program
                else f"{self.name} is an operation that chooses its own grids: call it, {self.name}(...)"
            )

    def save(self, path: Any, chips: Sequence[str] = ()) -> Any:
        """Write a bundle that ``kv.load`` runs without MLIR.

        It contains the PTX and, if an assembler is installed, machine code for the target.

        Parameters
        ----------
        path : path
            The file to write.
        chips : sequence of str
            Assemble for these chips instead, such as ``("sm_80", "sm_86", "sm_89")``; they must run the target's PTX.

        Returns
        -------
        pathlib.Path
            ``path``.

        Raises
        ------
        ValueError
            If a chip cannot run the target's PTX, or the kernel is for ``host``, which has no PTX.
        kvarn.runtime.assemble.MissingToolError
            If chips are given and no assembler is installed.
        """
        from kvarn.runtime import assemble

        artifact = self.artifact
        if self.target == "host":
            if chips:
                raise ValueError(f"machine code for {', '.join(chips)} needs a kernel for a GPU target, got host")
        elif chips:
            artifact = assemble.with_cubins(artifact, chips)
        elif artifact.cubin(self.target) is None:
            try:
                artifact = artifact.replace(code={**artifact.code, "cubin": self.assembled.cubin})
            except assemble.MissingToolError:
                pass  # the driver assembles the PTX in the bundle
        return artifact.save(path)

    def explain(self, report: Report | None = None, threads: int | None = None) -> KernelReport:
        """The kernel report; see ``docs/kernel-report.md``.

        Parameters
        ----------
        report : kvarn.emulator.Report, optional
            Of :meth:`emulate`: its counts are shown next to the code.
        threads : int, optional
            Threads per block, for the occupancy of a kernel without a declared block size.

        Returns
        -------
        kvarn.inspect.KernelReport
            ``str()`` gives text, ``html()`` a page, ``save(path)`` writes the page; notebooks display it.
        """
        return kvarn.KernelReport(self, report, threads)

    @functools.cached_property
    def _explained(self) -> KernelReport:
        return self.explain()

    def _repr_html_(self) -> str:
        return self._explained._repr_html_()

    def __repr__(self) -> str:
        return f"<kvarn kernel {self.name} for {self.target}>"


class Code(str):
    """The text of a stage, which notebooks display verbatim."""

    __slots__ = ()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


class _Texts(Mapping[str, Any]):
    """Code by name: prints as an overview, completes names in a notebook, and lists them in errors."""

    def __init__(self, title: str, names: Iterable[str]) -> None:
        self._title, self._names = title, tuple(names)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            hint = meant(str(name), self._names)
            raise KeyError(f"{self._title} are {', '.join(self._names)}; got {name!r}{hint}")
        found = self._text(name)
        return Code(found) if isinstance(found, str) else found

    def _text(self, name: str) -> Any:
        raise NotImplementedError

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._names)

    def __repr__(self) -> str:
        return f"<{self._title}: {', '.join(self._names)}>"


class _Stages(_Texts):
    """The IR after each pass."""

    def __init__(self, title: str, texts: Mapping[str, str]) -> None:
        super().__init__(title, texts)
        self._texts = texts

    def _text(self, name: str) -> str:
        return self._texts[name]

    def __repr__(self) -> str:
        width, before, rows = max(map(len, self._names)), "", [f"<{self._title}, with the lines of each:"]
        for name, text in self._texts.items():
            rows.append(f"  {name:{width}} {text.count(chr(10)) + 1:6}{'' if text != before else '  (unchanged)'}")
            before = text
        return "\n".join(rows) + ">"


class _Asm(_Texts):
    """The code of a kernel by stage; see :class:`Kernel`."""

    def __init__(self, kernel: Kernel) -> None:
        names = _HOST_STAGES if kernel.target == "host" else _GPU_STAGES
        super().__init__(f"stages of a kernel for {kernel.target}", names)
        self._kernel = kernel
        self._found: dict[str, Any] = dict(kernel.artifact.code)
        if kernel.target == "host":
            self._found.pop("llvm", None)  # a host artifact's "llvm" is the LLVM dialect, the stage named nvvm here

    def _text(self, name: str) -> Any:
        if name not in self._found:
            self._found[name] = self._make(name)
        return self._found[name]

    def _make(self, stage: str) -> Any:
        kernel = self._kernel
        if stage == "cubin":
            return kernel.assembled.cubin
        if stage == "sass":
            from kvarn.runtime import assemble

            return assemble.disassemble(self["cubin"])
        kernel._need_source(f"asm[{stage!r}] and the other stages before PTX")
        if stage == "kv":
            return kernel._source
        if stage == "gpu":
            return kernel.stages["record-kv-abi"]
        last = list(kernel.stages.values())[-1]
        return last if stage == "nvvm" else kvarn.compiler.llvm_ir_of(last)


def load(path: Any, target: str | None = None) -> Kernel:
    """Load a kernel that :meth:`Kernel.save` wrote. Only kernels for ``host`` need MLIR.

    Parameters
    ----------
    path : path
    target : str, optional
        The variant of a bundle with several; default: the one for the current device.

    Raises
    ------
    ValueError
        If the file is not a bundle, is damaged, or has no matching variant.
    """
    from kvarn.runtime import program

    launcher = program.load(path, target)
    found = Kernel(launcher.artifact)
    found.launcher = launcher
    return found

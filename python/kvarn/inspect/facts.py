# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernel report as an object; its parts are computed on demand."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarn.artifact import Entry
from kvarn.emulator import ptx_parser as ptx_text
from kvarn.files import write_output
from kvarn.runtime import assemble

from . import machine, source_map, work
from .stages import Run, Stage, run_stages

if TYPE_CHECKING:
    from kvarn.compilation.kernel import Kernel
    from kvarn.emulator import Report
    from kvarn.emulator.report import Counts


class KernelReport:
    """The report of a compiled kernel.

    ``str()`` gives text, :meth:`html` a page, which notebooks display.

    Parameters
    ----------
    kernel : Kernel
    report : kvarn.emulator.Report, optional
        Of runs of this kernel in the emulator; its counts are shown next to the code.
    threads : int, optional
        Threads per block, for the occupancy of a kernel without a declared block size.
    texts : mapping of str to str
        Sources without a file, by the file name of their locations.

    Attributes
    ----------
    stages : list of Stage
        The IR after each pass with its time; empty for a loaded kernel, with the reason in ``no_source``.
    shared : list of shared.Block
        The layout and lifetimes of dynamic shared memory.
    remarks : list of Remark
        Of passes and of the assembler.
    ptx, sass : list of source_map.Line
        Code lines with their source lines. Without an assembler or a disassembler ``sass`` is empty, with the reason in
        ``no_sass``.
    """

    def __init__(
        self,
        kernel: Kernel,
        report: Report | None = None,
        threads: int | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        self.kernel, self.report, self._threads = kernel, report, threads
        self._texts = {**kernel.texts, **(texts or {})}
        self.no_source = "" if kernel.located else "its IR is not in the file: compile it again to see it"

    # --- the pipeline

    @functools.cached_property
    def run(self) -> Run:
        kernel = self.kernel
        return run_stages(kernel.located, kernel.target, kernel.settings) if kernel.located else Run()

    @property
    def stages(self) -> list[Stage]:
        return self.run.stages

    @property
    def shared(self) -> list[Any]:
        return self.run.shared

    @functools.cached_property
    def remarks(self) -> list[Any]:
        from kvarn.lowering.remarks import Remark

        made = [] if self.run.remarks is None else self.run.remarks.matching()
        if self.kernel.target == "host":
            return made
        return [*made, *(Remark("ptxas", kind, "ptx", message) for kind, message in assembler_remarks(self))]

    # --- the code

    @functools.cached_property
    def ptx_text(self) -> str:
        """The PTX, with source lines if the IR is known."""
        artifact = self.run.artifact or self.kernel.artifact
        return str(artifact.code.get("ptx", ""))

    @functools.cached_property
    def ptx(self) -> list[source_map.Line]:
        return source_map.ptx_lines(self.ptx_text)

    @functools.cached_property
    def _tried(self) -> assemble.Assembled | Exception:
        try:
            if self.kernel.target == "host":
                raise assemble.MissingToolError("the CPU's JIT makes the machine code of kernels for host")
            return assemble.assemble(self.ptx_text, self.kernel.target, ("-lineinfo",))
        except (assemble.MissingToolError, assemble.AssemblyError) as error:
            return error

    @property
    def assembled(self) -> assemble.Assembled:
        """The machine code with its statistics.

        Raises
        ------
        kvarn.runtime.assemble.MissingToolError, AssemblyError
            If there is no assembler, or it refuses the code.
        """
        if isinstance(self._tried, Exception):
            raise self._tried
        return self._tried

    @property
    def no_figures(self) -> str:
        """The reason why there are no assembler statistics; "" if there are."""
        return str(self._tried) if isinstance(self._tried, Exception) else ""

    @functools.cached_property
    def _disassembled(self) -> tuple[list[source_map.Line], str]:
        try:
            text = assemble.disassemble(self.assembled.cubin, ("-c", "-gp"))
            return source_map.sass_lines(text, self.ptx, [entry.name for entry in self.entries]), ""
        except (assemble.MissingToolError, assemble.AssemblyError, ValueError) as error:
            return [], str(error)

    @property
    def sass(self) -> list[source_map.Line]:
        return self._disassembled[0]

    @property
    def no_sass(self) -> str:
        """The reason why there is no machine code; "" if there is."""
        return self._disassembled[1]

    @functools.cached_property
    def sources(self) -> dict[str, list[str]]:
        """The lines of the source files named by the code, by file; the kernel's own file first."""
        lines = [line for stage in self.stages[:1] for line in stage.lines]
        lines += [line for stage in self.stages[1:] for line in stage.lines] + self.ptx
        found = {}
        for file in source_map.files_of(lines):
            text = self._texts[file].split("\n") if file in self._texts else _lines_of(file)
            if text:
                found[file] = text
        return found

    # --- statistics

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.kernel.artifact.entries

    def threads_of(self, entry: Entry) -> int | None:
        """Threads per block: from the kernel, its launch or the caller, in this order; None if unknown."""
        block = entry.block or next((s.block for s in self.kernel.artifact.steps if s.entry == entry.name), None)
        if block is not None and all(isinstance(n, int) for n in block):
            x, y, z = block
            return int(x * y * z)
        return self._threads or entry.max_threads or None

    def figures_of(self, entry: Entry) -> assemble.Figures | None:
        """The assembler's statistics of a kernel; None without an assembler."""
        return None if isinstance(self._tried, Exception) else self._tried.kernels.get(entry.name)

    def occupancy(self, entry: Entry) -> machine.Occupancy | None:
        """The occupancy of a kernel; None if its registers or its threads are unknown."""
        figures, threads = self.figures_of(entry), self.threads_of(entry)
        if figures is None or threads is None:
            return None
        bytes = figures.shared_bytes + entry.shared_bytes
        return machine.occupancy(self.kernel.target, threads, figures.registers, bytes)

    @functools.cached_property
    def parsed(self) -> dict[str, ptx_text.Kernel]:
        """The PTX of each kernel as parsed by the emulator."""
        if self.kernel.target == "host":
            return {}
        return {entry.name: ptx_text.parse(self.ptx_text, entry.name) for entry in self.entries}

    @functools.cached_property
    def loops(self) -> dict[str, tuple[list[work.Loop], work.Work]]:
        """The loops of each kernel with the work per iteration, and the work outside of loops."""
        return {name: work.loops_of(parsed) for name, parsed in self.parsed.items()}

    # --- a run

    @functools.cached_property
    def counts(self) -> dict[str, Counts]:
        """The emulator's counts of each kernel.

        Raises
        ------
        ValueError
            If the emulator's report is of another kernel.
        """
        if self.report is None:
            return {}
        found = {}
        for name, counts in self.report.kernels.items():
            mine = self.parsed.get(name.rstrip("'"))
            if mine is None or [i.text for i in mine.code] != [i.text for i in counts.kernel.code]:
                raise ValueError(f"the report must be of runs of this {self.kernel.name}, got one of another {name}")
            found[name.rstrip("'")] = counts
        return found

    # --- output

    def __str__(self) -> str:
        from .describe import described

        return "\n".join(described(self))

    def __repr__(self) -> str:
        return f"<report of {self.kernel.name} for {self.kernel.target}>"

    def html(self) -> str:
        """The page as one self-contained file."""
        from .page import page

        return page(self)

    def save(self, path: Any) -> Path:
        """Write the page; returns the path."""
        path = Path(path)
        write_output(path, self.html())
        return path

    def _repr_html_(self) -> str:
        from .page import framed

        return framed(self)


def _lines_of(file: str) -> list[str]:
    return [line.rstrip("\n") for line in linecache.getlines(file)]


def assembler_remarks(of: Any) -> Iterator[tuple[str, str]]:
    """The assembler's statistics of a kernel as remarks (kind and message); ``of`` has ``assembled``."""
    try:
        made = of.assembled
    except assemble.MissingToolError:
        return
    except assemble.AssemblyError as error:
        yield "missed", str(error)
        return
    for name, figures in made.kernels.items():
        spilled = figures.spill_stores + figures.spill_loads
        if spilled:
            yield "missed", f"{name} spills {spilled} bytes: {figures.registers} registers are not enough"
        else:
            yield "analysis", f"{name} has {figures.registers} registers, no spills"
    yield from (("analysis", line.strip()) for line in made.log.splitlines() if "warning" in line.lower())


__all__ = ["KernelReport", "assembler_remarks"]

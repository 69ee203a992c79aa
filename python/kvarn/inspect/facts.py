# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The report of a kernel as an object; its parts are made when they are asked for."""

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

from . import machine, places, work
from .stages import Run, Stage, run_stages

if TYPE_CHECKING:
    from kvarn.compilation.kernel import Kernel
    from kvarn.emulator import Report
    from kvarn.emulator.report import Counts


class KernelReport:
    """Everything that is known of a compiled kernel.

    ``str()`` is a report, :meth:`html` a page; a notebook shows the page.

    Parameters
    ----------
    kernel : Kernel
    report : kvarn.emulator.Report, optional
        Of runs of this kernel in the emulator: its counts stand beside the code.
    threads : int, optional
        Of a block, where the kernel does not say: occupancy depends on them.
    texts : mapping of str to str
        Sources that no file holds, by the file name of their locations.

    Attributes
    ----------
    stages : list of Stage
        The IR after each pass with its time; empty, with the reason in ``no_source``, for a kernel that was loaded.
    shared : list of shared.Block
        Dynamic shared memory: what lies where and how long it is used.
    remarks : list of Remark
        Of passes and of the assembler.
    ptx, sass : list of places.Line
        With their places in the source. ``sass`` is empty, with the reason in ``no_sass``, without an assembler or a
        disassembler.
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
        self.no_source = "" if kernel.placed else "its IR is not in the file: compile it again to see it"

    # --- the pipeline

    @functools.cached_property
    def run(self) -> Run:
        kernel = self.kernel
        return run_stages(kernel.placed, kernel.target, kernel.settings) if kernel.placed else Run()

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
        """The PTX, with source lines where the IR is known."""
        artifact = self.run.artifact or self.kernel.artifact
        return str(artifact.code.get("ptx", ""))

    @functools.cached_property
    def ptx(self) -> list[places.Line]:
        return places.ptx_lines(self.ptx_text)

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
        """The machine code with its figures.

        Raises
        ------
        kvarn.runtime.assemble.MissingToolError, AssemblyError
            Where there is no assembler, or it refuses the code.
        """
        if isinstance(self._tried, Exception):
            raise self._tried
        return self._tried

    @property
    def no_figures(self) -> str:
        """Why there are no figures of the assembler; "" where there are."""
        return str(self._tried) if isinstance(self._tried, Exception) else ""

    @functools.cached_property
    def _disassembled(self) -> tuple[list[places.Line], str]:
        try:
            text = assemble.disassemble(self.assembled.cubin, ("-c", "-gp"))
            return places.sass_lines(text, self.ptx, [entry.name for entry in self.entries]), ""
        except (assemble.MissingToolError, assemble.AssemblyError, ValueError) as error:
            return [], str(error)

    @property
    def sass(self) -> list[places.Line]:
        return self._disassembled[0]

    @property
    def no_sass(self) -> str:
        """Why there is no machine code to show; "" where there is."""
        return self._disassembled[1]

    @functools.cached_property
    def sources(self) -> dict[str, list[str]]:
        """The lines of the source files that the code names, by file; the kernel's own first."""
        lines = [line for stage in self.stages[:1] for line in stage.lines]
        lines += [line for stage in self.stages[1:] for line in stage.lines] + self.ptx
        found = {}
        for file in places.files_of(lines):
            text = self._texts[file].split("\n") if file in self._texts else _lines_of(file)
            if text:
                found[file] = text
        return found

    # --- figures

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.kernel.artifact.entries

    def threads_of(self, entry: Entry) -> int | None:
        """Threads of a block: as the kernel or its launch says, else as given; None if nobody says."""
        block = entry.block or next((s.block for s in self.kernel.artifact.steps if s.entry == entry.name), None)
        if block is not None and all(isinstance(n, int) for n in block):
            x, y, z = block
            return int(x * y * z)
        return self._threads or entry.max_threads or None

    def figures_of(self, entry: Entry) -> assemble.Figures | None:
        """What the assembler says of a kernel; None without an assembler."""
        return None if isinstance(self._tried, Exception) else self._tried.kernels.get(entry.name)

    def occupancy(self, entry: Entry) -> machine.Occupancy | None:
        """What a multiprocessor holds of a kernel; None if its registers or its threads are not known."""
        figures, threads = self.figures_of(entry), self.threads_of(entry)
        if figures is None or threads is None:
            return None
        bytes = figures.shared_bytes + entry.shared_bytes
        return machine.occupancy(self.kernel.target, threads, figures.registers, bytes)

    @functools.cached_property
    def parsed(self) -> dict[str, ptx_text.Kernel]:
        """The PTX of each kernel as the emulator reads it."""
        if self.kernel.target == "host":
            return {}
        return {entry.name: ptx_text.parse(self.ptx_text, entry.name) for entry in self.entries}

    @functools.cached_property
    def loops(self) -> dict[str, tuple[list[work.Loop], work.Work]]:
        """The loops of each kernel with the work of an iteration, and the work outside of loops."""
        return {name: work.loops_of(parsed) for name, parsed in self.parsed.items()}

    # --- a run

    @functools.cached_property
    def counts(self) -> dict[str, Counts]:
        """What the report counted of each kernel.

        Raises
        ------
        ValueError
            If the report is of another kernel.
        """
        if self.report is None:
            return {}
        found = {}
        for name, counts in self.report.kernels.items():
            mine = self.parsed.get(name.rstrip("'"))
            if mine is None or [i.text for i in mine.code] != [i.text for i in counts.kernel.code]:
                raise ValueError(
                    f"the report must be of runs of {self.kernel.name} as it was compiled, got one of another {name}"
                )
            found[name.rstrip("'")] = counts
        return found

    # --- shown

    def __str__(self) -> str:
        from .describe import described

        return "\n".join(described(self))

    def __repr__(self) -> str:
        return f"<report of {self.kernel.name} for {self.kernel.target}>"

    def html(self) -> str:
        """The page: one file that needs nothing else."""
        from .page import page

        return page(self)

    def save(self, path: Any) -> Path:
        """Write the page; the path."""
        path = Path(path)
        write_output(path, self.html())
        return path

    def _repr_html_(self) -> str:
        from .page import framed

        return framed(self)


def _lines_of(file: str) -> list[str]:
    return [line.rstrip("\n") for line in linecache.getlines(file)]


def assembler_remarks(of: Any) -> Iterator[tuple[str, str]]:
    """What the assembler has to say of a kernel, as kind and message; ``of`` has ``assembled``."""
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

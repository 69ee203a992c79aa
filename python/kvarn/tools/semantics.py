# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Semantics checks: whether IR still computes the same, after lowering by trusted passes and a run on random caches.

The pipeline can be entered at every stage. The IR after a pass is lowered by the *reference lowering*: the default
pipeline without kvarn's optional passes, in a process (or another kvarn) in which no pass has been loaded or changed.
The result runs in the emulator, or for ``host`` through the JIT. If a stage gives another answer than the previous one,
the pass between them is wrong.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mlir import ir

from kvarn.artifact import Artifact, bundle
from kvarn.compilation import extensions
from kvarn.compilation.kernel import Kernel
from kvarn.emulator import EmulationError, Order, run
from kvarn.emulator.report import Report
from kvarn.files import run_file
from kvarn.lowering import rewrite

from . import random_inputs, reference_lowering
from .random_inputs import InputOptions

# Dialects whose results have the type of the computation; and types of fewer than 32 bits.
_SPEAKING = ("arith.", "math.", "scf.", "vector.", "gpu.", "memref.", "kv.")
_NARROW = re.compile(r"^(?!!kv\.).*\b(?:f16|bf16|f8E\w+)\b")


class LoweringError(RuntimeError):
    """The reference lowering failed on a stage."""


class ReferenceLowering:
    """The reference lowering, in another process; a context manager.

    Parameters
    ----------
    trusted : path, optional
        A folder with the package ``kvarn`` whose passes are trusted; default: this one's.
    forked : bool
        Whether to fork this process now instead of starting a new one, for a caller that has loaded no pass yet.
    """

    def __init__(self, trusted: str | Path | None = None, forked: bool = False) -> None:
        self._trusted = trusted
        self._process: Any = _Fork(reference_lowering.main) if forked and hasattr(os, "fork") else None

    def __enter__(self) -> ReferenceLowering:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def lower(self, text: str, target: str, after: str | None = None) -> Artifact:
        """Lower a stage to code; LoweringError with the message of the passes.

        ``after`` is the last pass of the pipeline that has run. By default the whole lowering runs, which kernels
        without tiles allow at every stage.
        """
        process = self._process = self._process or self._start()
        question = {"text": text, "target": target, "after": after, "needed": extensions.needed(), "path": sys.path}
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.__exit__()
            raise LoweringError("MLIR ended the process that lowers it")
        answer = json.loads(line)
        if "error" in answer:
            raise LoweringError(answer["error"])
        return bundle.loads(base64.b64decode(answer["bundle"]), "it")[0]

    def _start(self) -> Any:
        package = Path(self._trusted).resolve() if self._trusted is not None else Path(__file__).resolve().parents[2]
        if not (package / "kvarn" / "__init__.py").is_file():
            raise ValueError(f"trusted must be a folder with the package kvarn in it, got {self._trusted}")
        # An editable installation would put itself first; this puts the trusted folder first.
        code = (
            f"import sys; sys.path.insert(0, {str(package)!r}); sys.meta_path[:] = [f for f in sys.meta_path if "
            "'Redirecting' not in type(f).__name__]; import kvarn.tools.reference_lowering as r; "
            f"r.main({extensions.needed()!r}, {sys.path!r})"
        )
        return subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env={**os.environ},
        )  # fmt: skip


class _Fork:
    """A child that runs a function between two pipes, with the members of ``subprocess.Popen`` that are used here."""

    def __init__(self, work: Callable[[], None]) -> None:
        (asked, ask), (answered, answer) = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            status = 1
            try:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                for file, number in ((asked, 0), (answer, 1), (nowhere, 2)):
                    os.dup2(file, number)
                os.close(ask)  # otherwise the child would wait for itself to close the pipe
                sys.stdin = os.fdopen(0)
                work()
                status = 0
            finally:
                os._exit(status)
        os.close(asked)
        os.close(answer)
        self.stdin, self.stdout = os.fdopen(ask, "w"), os.fdopen(answered)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def communicate(self) -> None:
        os.waitpid(self._pid, 0)
        for file in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                file.close()


@dataclass(frozen=True)
class Launch:
    """The launch of a kernel: its grid and block; an operation has its own."""

    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None


Answer = dict[str, np.ndarray]
Model = Callable[[dict[str, Any]], None]


class Checker:
    """Compares answers of IR on random arguments.

    Parameters
    ----------
    text : str
        The initial IR, whose kernel or operation defines the arguments.
    target : str
    lowering : ReferenceLowering
    inputs : InputOptions, or a sequence of them
        The parameters of the arguments of each run.
    launch : Launch
    model : callable, optional
        ``model(arguments)``, by name, changes the arrays as the kernel should. Default: the initial IR, on the host if
        possible, else in the emulator.
    after : str, optional
        The last pass of the pipeline that has run on the initial IR.
    needed : int, optional
        Number of runs that must be possible; further runs are skipped if they are not. Default: all.

    Attributes
    ----------
    inputs : list of InputOptions
        The runs.
    failing : InputOptions or None
        The run in which the last problem was found.
    left_out : list of (InputOptions, str)
        Skipped runs, and the reasons.
    """

    def __init__(
        self, text: str, target: str, lowering: ReferenceLowering, inputs: InputOptions | Sequence[InputOptions],
        launch: Launch = Launch(), model: Model | None = None, after: str | None = None, needed: int | None = None,
    ) -> None:  # fmt: skip
        self.target, self._lowering, self.launch = target, lowering, launch
        self._text, self._after = text, after
        self.inputs = [inputs] if isinstance(inputs, InputOptions) else list(inputs)
        self.failing: InputOptions | None = None
        self.problem_text = ""  # of that run
        self.left_out: list[tuple[InputOptions, str]] = []
        self._needed = len(self.inputs) if needed is None else needed
        self._right: set[str] = set()  # digests of code with the right answer
        compiler = importlib.import_module("kvarn.compilation.driver")
        parsed = compiler.parse(text)
        self._shapes = random_inputs.buffer_shapes(parsed)
        self._fine = model is None and not computes_narrowly(parsed)
        self.expected, self.source = self._expected(text, parsed, model, after)

    def _expected(
        self, text: str, parsed: ir.Module, model: Model | None, after: str | None
    ) -> tuple[list[Answer], str]:
        # Kernels may need barriers, which the host does not have; operations have host kernels.
        if model is None and after is None and self.target != "host" and not any(True for _ in rewrite.kernels(parsed)):
            for op in rewrite.walk(parsed, lambda name: name.startswith("kv.")):
                if "schedule" in op.attributes:  # it may select kernels for GPUs only
                    del op.attributes["schedule"]
            try:
                host = self._lowering.lower(str(parsed), "host")
                return self._answers(lambda inputs: self._run(host, inputs)), "the host"
            except LoweringError:
                pass
        try:
            first = self._lowering.lower(text, self.target, after)
        except LoweringError as error:
            raise LoweringError(f"{self._before(after)} cannot be lowered by the required passes: {error}") from None
        if model is not None:
            return self._answers(lambda inputs: self._modelled(first, model, inputs)), "the model"
        try:
            return self._answers(lambda inputs: self._run(first, inputs)), f"{self.target} before any pass"
        except EmulationError as error:
            raise EmulationError(
                f"{self._before(after)}, lowered by the required passes, cannot be run: {_told(error)}"
            ) from None

    def _answers(self, run: Callable[[InputOptions], Answer]) -> list[Answer]:
        """The answers of the runs; optional runs that are not possible are skipped."""
        kept: list[InputOptions] = []
        found: list[Answer] = []
        for n, inputs in enumerate(self.inputs):
            try:
                found.append(run(inputs))
                kept.append(inputs)
            except (ValueError, RuntimeError) as error:
                if n < self._needed:
                    raise
                self.left_out.append((inputs, str(error)))
        self.inputs = kept
        return found

    def leave_out_wrong(self, text: str) -> None:
        """Skip optional runs in which the given IR gives another answer."""
        while self.problem(text) and self.failing in self.inputs[self._needed :]:
            n = self.inputs.index(self.failing)
            self.left_out.append((self.inputs.pop(n), self.problem_text))
            self.expected.pop(n)

    @staticmethod
    def _before(after: str | None) -> str:
        return "the IR before any pass" if after is None else f"the IR after {after}"

    def of(self, text: str, inputs: InputOptions, after: str | None) -> Checker:
        """A checker of other IR, after the pass ``after``, whose own answer is the expected one."""
        return Checker(text, self.target, self._lowering, inputs, self.launch, None, after)

    @property
    def is_own(self) -> bool:
        """Whether the expected answer is that of the initial IR."""
        return self.source not in ("the model", "the host")

    def shapes_of(self, inputs: InputOptions) -> dict[str, tuple[int, ...]]:
        """The extents of a run's buffers, by argument."""
        artifact = self._lowering.lower(self._text, self.target, self._after)
        made = self.arguments(artifact, inputs)
        return {name: a.shape for name, a in made.items() if isinstance(a, np.ndarray)}

    def arguments(self, artifact: Artifact, inputs: InputOptions | None = None) -> dict[str, Any]:
        return random_inputs.random_arguments(artifact.args, self._shapes, inputs or self.inputs[0])

    def problem(self, text: str, after: str | None = None) -> str:
        """The problem of a stage, or "" for the expected answer; ``after`` as in :meth:`ReferenceLowering.lower`."""
        try:
            artifact = self._lowering.lower(text, self.target, after)
        except LoweringError as error:
            return f"its IR cannot be lowered: {error}"
        digest = _digest(artifact)
        if digest in self._right:  # most passes lead to the same code
            return ""
        for inputs, expected in zip(self.inputs, self.expected, strict=True):
            problem = self._problem(artifact, inputs, expected)
            if problem:
                self.failing, self.problem_text = inputs, problem
                return f"{problem}{self._named(inputs)}"
        self._right.add(digest)
        return ""

    def _problem(self, artifact: Artifact, inputs: InputOptions, expected: Answer) -> str:
        try:
            found = self._run(artifact, inputs)
        except EmulationError as error:
            return f"its IR cannot be run: {_told(error)}"
        for name, right in expected.items():
            if name not in found:
                return f"argument {name} is gone"
            differs = random_inputs.difference(right, found[name], self._fine)
            if differs:
                return f"{name}: {differs}"
        return ""

    def _named(self, inputs: InputOptions) -> str:
        """The name of a run if there are several."""
        counts = ",".join(map(str, inputs.lengths)), ",".join(map(str, inputs.new))
        return f" (--lengths={counts[0]} --new={counts[1]})" if len(self.inputs) > 1 else ""

    def _modelled(self, artifact: Artifact, model: Model, inputs: InputOptions) -> Answer:
        _block(artifact, self.launch)
        arguments = self.arguments(artifact, inputs)
        try:
            model(arguments)
        except Exception as error:
            raise ValueError(f"the model raised {type(error).__name__}: {error}") from error
        return _copied(arguments)

    def _run(self, artifact: Artifact, inputs: InputOptions, report: Report | None = None) -> Answer:
        arguments = self.arguments(artifact, inputs)
        run_artifact(artifact, list(arguments.values()), self.launch, report)
        return _copied(arguments)


def _told(error: EmulationError) -> str:
    return f"kernel {error.kernel}: {error}" if error.kernel else str(error)


_PLACES = re.compile(r"^\s*(?:\.loc|\.file|//).*$|\s*//.*$|![\w.]+ = .*$|, !dbg !\d+", re.MULTILINE)


def _digest(artifact: Artifact) -> str:
    """A digest of code without locations, and of its launch parameters."""
    code = [_PLACES.sub("", x) if isinstance(x, str) else x.hex() for x in artifact.code.values()]
    identity = repr((artifact.target, artifact.entries, artifact.args, artifact.steps, artifact.workspaces, code))
    return hashlib.sha256(identity.encode()).hexdigest()


def is_operation(text: str) -> bool:
    """Whether IR is a whole operation, which takes any number of sequences."""
    module = importlib.import_module("kvarn.compilation.driver").parse(text)
    made = "kv.program_args" in module.operation.attributes
    return made or not any(True for _ in rewrite.kernels(module))


def model_of(place: str | None) -> Model | None:
    """The function of ``FILE.py:NAME``; ValueError if there is none."""
    if place is None:
        return None
    file, _, name = place.rpartition(":")
    if not file or not Path(file).is_file():
        raise ValueError(f"--model takes FILE.py:FUNCTION, got {place!r}")
    module = run_file(file, "kvarn_model", import_folder=True)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{file} has no function {name!r}")
    return getattr(module, name)


def computes_narrowly(module: Any) -> bool:
    """Whether a computation uses fewer than 32 bits, or an op of unknown precision: rounding errors then accumulate."""

    def rounds(op: Any) -> bool:
        if op.name.endswith((".load", ".constant")):
            return False
        return not op.name.startswith(_SPEAKING) or any(_NARROW.search(str(r.type)) for r in op.results)

    return any(rounds(op) for kernel in rewrite.kernels(module) for op in rewrite.walk(kernel)) or not any(
        True for _ in rewrite.kernels(module)
    )


def run_artifact(artifact: Artifact, arguments: list[Any], launch: Launch, report: Report | None = None) -> None:
    """Run compiled code, in the emulator, or for ``host`` through the JIT."""
    kernel, block = Kernel(artifact), _block(artifact, launch)
    if artifact.target == "host":
        if artifact.is_program:
            kernel(*arguments)
        else:
            kernel.launch(launch.grid, block, *arguments)
    elif artifact.is_program:
        given = [
            importlib.import_module("kvarn.runtime.buffers").view(a) if isinstance(a, np.ndarray) else a
            for a in arguments
        ]
        run.run_program(artifact, given, 2, Order(), report)
    else:
        run.launch(kernel, launch.grid, block, arguments, Order(), report)


def _block(artifact: Artifact, launch: Launch) -> tuple[int, ...] | None:
    """The block of a kernel's launch; ValueError if the kernel does not declare it and it is not given."""
    block = artifact.entries[0].block or launch.block
    if not artifact.is_program and (launch.grid is None or block is None):
        missing = "--grid" if launch.grid is None else "--block"
        raise ValueError(f"{artifact.name} is a kernel: {missing} must be given to run it")
    return block


def _copied(arguments: Mapping[str, Any]) -> Answer:
    return {name: np.array(a) for name, a in random_inputs.memory_of(arguments).items()}


__all__ = [
    "Checker",
    "Launch",
    "LoweringError",
    "ReferenceLowering",
    "computes_narrowly",
    "is_operation",
    "model_of",
    "run_artifact",
]  # fmt: skip

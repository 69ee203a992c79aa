# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kvarn bisect``: find the pass that changes a kernel's answer, and the rewrite in it.

The pipeline runs pass by pass. The IR after each pass is lowered by trusted passes, run on random caches and compared
(``kvarn.tools.semantics``). The first pass whose IR gives another answer is at fault; if the pass counts its rewrites
(``kvarn.lowering.rewrite_counts``), binary search finds the first faulty one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from kvarn.env import env
from kvarn.errors import KernelError
from kvarn.files import write_output
from kvarn.lowering import rewrite_counts as rewrites, runner
from kvarn.lowering.pass_base import PassFailure
from kvarn.lowering.pipeline_parser import Step

from . import edges
from .apart import Died, apart
from .cli import add_kernel_options, named
from .input_options import RECORD, add_input_options, add_model_option, inputs_of, launch_of, recorded
from .pass_options import given_name, passes_of
from .random_inputs import InputOptions
from .reduce import Reducer
from .semantics import Checker, Launch, ReferenceLowering, is_operation, model_of

_STEPS = 500_000  # emulator steps for a candidate of a reduction


@dataclass(frozen=True)
class Fault:
    """A pass that changed the answer.

    Attributes
    ----------
    name : str
        The pass; "" if the answer is wrong before any pass.
    problem : str
    rewrite : str
        The first faulty rewrite, if the pass counts them.
    number, rewrites : int
        Its number, from 1, and the number of rewrites of the pass.
    before, after : str
        The IR.
    stage, left : str or None
        The last pass of the pipeline applied to ``before`` and to ``after``.
    """

    name: str
    problem: str
    rewrite: str = ""
    number: int = 0
    rewrites: int = 0
    before: str = ""
    after: str = ""
    stage: str | None = None
    left: str | None = None


@dataclass(frozen=True)
class _Left:
    """The result of a step on IR: the text, or why there is none; ``asked`` and ``last`` as in ``Rewrites``."""

    text: str = ""
    problem: str = ""
    asked: int = 0
    last: str = ""


def _run(text: str, step: Step, limit: int | None = None) -> _Left:
    """The IR after a step, run in a process of its own: a pass may end its process."""

    def work() -> Mapping[str, Any]:
        compiler = importlib.import_module("kvarn.compilation.driver")
        module = compiler.parse(text)
        with rewrites.collect(limit) as found:
            try:
                with compiler.diagnosed(module.context):
                    runner.run(module, [step])
            except (PassFailure, KernelError) as error:
                return {"problem": f"fails: {error}"}
        return {"text": compiler.with_locations(module), "asked": found.asked, "last": found.last}

    try:
        return _Left(**apart(work))
    except Died as error:
        return _Left(problem=f"fails: {error}")


def first_fault(
    text: str, steps: Sequence[Step], checker: Checker, tell: Callable[[str, str], None] = lambda name, state: None
) -> Fault | None:
    """Run steps on IR and find the first that changes the answer; ``tell(pass, state)`` is called after each."""
    problem = checker.problem(text)
    tell("input", problem or "ok")
    if problem:
        return Fault("", problem, after=text)
    names = {s.name for s in importlib.import_module("kvarn.lowering.pipeline").default_steps(checker.target)}
    after = None
    for step in steps:
        stage, after = after, step.name if step.name in names else after
        found = _run(text, step)
        if found.problem:
            tell(step.name, found.problem)
            return Fault(step.name, found.problem, before=text, stage=stage)
        if found.text == text:
            tell(step.name, "unchanged")
            continue
        problem = checker.problem(found.text, after)
        tell(step.name, problem or "ok")
        if problem:
            return _narrowed(Fault(step.name, problem, "", 0, 0, text, found.text, stage, after), step, checker)
        text = found.text
    return None


def _narrowed(fault: Fault, step: Step, checker: Checker) -> Fault:
    """The fault with its first faulty rewrite, if the pass counts rewrites."""
    most = _run(fault.before, step).asked
    if not most or checker.problem(_run(fault.before, step, 0).text, fault.left):
        return fault
    low, high = 0, most  # right with low rewrites, wrong with high
    while high - low > 1:
        middle = (low + high) // 2
        wrong = checker.problem(_run(fault.before, step, middle).text, fault.left)
        low, high = (low, middle) if wrong else (middle, high)
    return replace(fault, rewrite=_run(fault.before, step, high).last, number=high, rewrites=most)


# --- reduction -------------------------------------------------------------------------------------


def shown_by(fault: Fault, checker: Checker) -> InputOptions:
    """The inputs that show a fault; for an operation a single sequence, if one suffices."""
    of_all = checker.failing or checker.inputs[0]
    if len(of_all.lengths) == 1 or not fault.after or not is_operation(fault.before):
        return of_all
    for length, new in zip(of_all.lengths, of_all.new, strict=True):
        if new:
            one = replace(of_all, lengths=(length,), new=(new,))
            with contextlib.suppress(ValueError, RuntimeError):
                if checker.of(fault.before, one, fault.stage).problem(fault.after, fault.left):
                    return one
    return of_all


def reduced(
    fault: Fault, step: Step, checker: Checker, inputs: InputOptions, tell: Callable[[str, int, str], None]
) -> str:
    """A smaller version of the IR before a pass, for which the pass has the same kind of fault.

    ``tell(what, operations, text)`` is called after each success.
    """

    def interesting(text: str) -> bool:
        found = _run(text, step)
        if not fault.after:  # the pass fails
            return bool(found.problem) and _kind(found.problem) == _kind(fault.problem)
        if found.problem:
            return False
        try:
            problem = checker.of(text, replace(inputs, lenient=True), fault.stage).problem(found.text, fault.left)
        except Exception:  # not runnable: the reduction may have removed launch parameters
            return False
        return bool(problem) and _kind(problem) == _kind(fault.problem)

    reducer = Reducer(fault.before, interesting, lambda what, count: tell(what, count, reducer.text))
    with env.override(emulator_steps=min(env.emulator_steps, _STEPS)):  # reduction can make a loop endless
        return reducer.run()


def _kind(problem: str) -> str:
    """The part of a problem that does not depend on the kernel: it differs, cannot be run, or how a pass fails."""
    if problem.startswith("what it left"):
        return problem.partition(":")[0]
    if not problem.startswith("fails: "):
        return "differs"
    return re.sub(r"(/\S+|<[^>]*>|-):\d+:\d+|\b\d+\b", "", problem.splitlines()[0])


# --- command ---------------------------------------------------------------------------------------


def source_of(options: argparse.Namespace) -> str:
    """The IR of a kernel of a Python file, of an operation, or of a file of IR."""
    compiler = importlib.import_module("kvarn.compilation.driver")
    kernel, specs = named(options)
    context = compiler.context()
    with compiler.diagnosed(context):
        return compiler.with_locations(compiler.as_module(kernel, specs, context))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if a pass changed the answer."""
    parser = argparse.ArgumentParser(
        prog="kvarn bisect",
        description="Find the pass that changes what a kernel computes. Without --lengths, lengths near multiples of "
        "pages and tiles are tested.",
        epilog="example: kvarn bisect kernels.py:scale --spec 'paged(bf16, num_heads=8, head_size=128, page_size=16)' "
        "--grid 3 --block 128 --load-pass my_pass.py --insert-after hoist-kv-lookups=my-pass",
    )
    add_kernel_options(parser)
    add_input_options(parser.add_argument)
    add_model_option(parser.add_argument)
    parser.add_argument(
        "--trusted", type=given_name, metavar="DIR", help="a folder with another kvarn, whose passes are the reference"
    )
    parser.add_argument(
        "--save", type=given_name, metavar="PREFIX", help="write the IR before and after the pass to PREFIX.*.mlir"
    )
    parser.add_argument(
        "--reduce",
        type=given_name,
        metavar="FILE.mlir",
        help="reduce the IR before the pass while the fault remains; the file always has the smallest IR so far",
    )
    options = parser.parse_args(argv)
    compiler, pipeline = map(importlib.import_module, ("kvarn.compilation.driver", "kvarn.lowering.pipeline"))
    target = options.target = options.target or "sm_90a"
    passes, text = passes_of(options), source_of(options)  # in this order: IR may have operations of extensions
    settings = importlib.import_module("kvarn.pipelines").extended(passes, options.disable)
    steps = pipeline.steps(target, settings)
    width = max(len(s.name) for s in steps)
    with ReferenceLowering(options.trusted) as lowering:
        module = compiler.parse(text)
        inputs, launch = inputs_of(options, module), Launch(*launch_of(options, module))
        found = _chosen(options, module, text, target) if options.lengths is None else None
        batches = inputs if found is None else [*inputs, *found[1]]
        checker = Checker(text, target, lowering, batches, launch, model_of(options.model), None, len(inputs))
        checker.leave_out_wrong(text)
        print(f"compared with {checker.source}")
        print("\n".join(_covered(checker, "" if found is None else found[0])), flush=True)
        fault = first_fault(text, steps, checker, lambda name, state: print(f"{name:{width}}  {state}", flush=True))
        print("\n".join(_told(fault)), flush=True)
        if fault is not None and (options.save or options.reduce):
            _write(options, fault, next((s for s in steps if s.name == fault.name), None), checker)
    return int(fault is not None)


def _chosen(options: argparse.Namespace, module: Any, text: str, target: str) -> tuple[str, list[InputOptions]] | None:
    """The rule of the tested lengths, and the batches; None for IR that records its own inputs."""
    if RECORD in module.operation.attributes:
        return None
    shape = edges.shape_of(text, target)
    (first,) = inputs_of(options, module)
    counts = edges.chosen(shape, len(first.lengths))
    if options.new is not None:  # of all sequences, or of those of the first batch
        counts = [(lengths, tuple(x for _, x in zip(lengths, cycle(options.new)))) for lengths, _ in counts]
    return shape.describe(), [replace(first, lengths=lengths, new=new) for lengths, new in counts]


def _covered(checker: Checker, choice: str) -> Iterator[str]:
    """The runs, and the automatically chosen runs that are not possible."""
    if choice:
        yield f"lengths are chosen {choice}:"
    for inputs in checker.inputs:
        yield f"  {_counts(inputs)}"
    for inputs, why in checker.left_out:
        yield f"  left out, {' '.join(why.split())[:200]}: {_counts(inputs)}"


def _counts(inputs: InputOptions) -> str:
    lengths, new = (",".join(map(str, counts)) for counts in (inputs.lengths, inputs.new))
    return f"--lengths={lengths} --new={new}"


def _write(options: argparse.Namespace, fault: Fault, step: Step | None, checker: Checker) -> None:
    """Save the IR around a fault, with its inputs, and reduce it, as the options say."""
    inputs = shown_by(fault, checker)

    def written(text: str, stage: str | None) -> str:
        return recorded(text, inputs, checker.shapes_of(inputs), checker.launch, stage) + "\n"

    if options.save:
        for what, text, stage in (("before", fault.before, fault.stage), ("after", fault.after, fault.left)):
            write_output(f"{options.save}.{what}.mlir", written(text, stage) if text else "")
        if step is not None:
            print(f"shown by {_counts(inputs)}")
    if options.reduce and step is not None:
        fault = replace(fault, before=written(fault.before, fault.stage))
        write_output(options.reduce, fault.before)
        print(f"reducing it, in {options.reduce}", flush=True)

        def keep(what: str, count: int, text: str) -> None:
            write_output(options.reduce, text)
            print(f"{what}: {count} operations are left", file=sys.stderr, flush=True)

        reduced(fault, step, checker, inputs, keep)


def _told(fault: Fault | None) -> Iterator[str]:
    if fault is None:
        yield "no pass changed the answer"
    elif not fault.name:
        yield "the answer is wrong before any pass: a required pass is at fault, or the model is of another kernel"
    elif not fault.after:
        yield f"{fault.name} {fault.problem}"
    else:
        yield f"{fault.name} is the first pass that changed the answer"
        if fault.rewrite:
            yield f"  by rewrite {fault.number} of {fault.rewrites}: {fault.rewrite}"


__all__ = ["Fault", "first_fault", "main", "source_of"]

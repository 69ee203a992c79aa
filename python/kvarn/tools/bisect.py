# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kvarn bisect``: which pass changes what a kernel computes, and which of its rewrites.

The pipeline runs pass by pass. What each left is lowered by passes that are trusted, run on random caches and compared
(``kvarn.tools.semantics``). The first pass whose result gives another answer is at fault; where it counts its rewrites
(``kvarn.lowering.rewrite_counts``), the first one that does is found by halving.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvarn.lowering import rewrite_counts as rewrites, runner
from kvarn.lowering.pass_base import PassFailure
from kvarn.lowering.pipeline_parser import Step

from .cli import add_kernel_options, named
from .input_options import add_input_options, add_model_option, inputs_of
from .pass_options import passes_of
from .semantics import Checker, Launch, Rest, model_of


@dataclass(frozen=True)
class Fault:
    """A pass that changed the answer.

    Attributes
    ----------
    name : str
        The pass; "" when the answer is wrong before any.
    problem : str
    rewrite : str
        The first of its rewrites that does it, where the pass counts them.
    number, rewrites : int
        Which one that is, from 1, and how many the pass does.
    before, after : str
        The IR.
    """

    name: str
    problem: str
    rewrite: str = ""
    number: int = 0
    rewrites: int = 0
    before: str = ""
    after: str = ""


def first_fault(
    text: str, steps: Sequence[Step], checker: Checker, tell: Callable[[str, str], None] = lambda name, state: None
) -> Fault | None:
    """Run steps on IR and find the first that changes the answer; ``tell(pass, state)`` after each."""
    compiler = importlib.import_module("kvarn.compilation.driver")
    problem = checker.problem(text)
    tell("input", problem or "ok")
    if problem:
        return Fault("", problem, after=text)
    module = compiler.parse(text)
    names = {s.name for s in importlib.import_module("kvarn.lowering.pipeline").default_steps(checker.target)}
    after = None
    with compiler.diagnosed(module.context):
        for step in steps:
            after = step.name if step.name in names else after
            before = compiler.with_places(module)
            try:
                runner.run(module, [step])
            except PassFailure as error:
                tell(step.name, f"fails: {error}")
                return Fault(step.name, f"fails: {error}", before=before)
            left = compiler.with_places(module)
            if left == before:
                tell(step.name, "unchanged")
                continue
            problem = checker.problem(left, after)
            tell(step.name, problem or "ok")
            if problem:
                return _narrowed(Fault(step.name, problem, before=before, after=left), step, checker, after)
    return None


def _narrowed(fault: Fault, step: Step, checker: Checker, after: str | None) -> Fault:
    """The fault with the first rewrite that does it, if the pass counts any."""
    compiler = importlib.import_module("kvarn.compilation.driver")

    def limited(limit: int | None) -> tuple[str, rewrites.Rewrites]:
        module = compiler.parse(fault.before)
        with rewrites.collect(limit) as found:
            runner.run(module, [step])
        return compiler.with_places(module), found

    most = limited(None)[1].asked
    if not most or checker.problem(limited(0)[0], after):
        return fault
    low, high = 0, most  # right with low rewrites, wrong with high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if checker.problem(limited(middle)[0], after) else (middle, high)
    last = limited(high)[1].last
    return Fault(fault.name, fault.problem, last, high, most, fault.before, fault.after)


# --- the command -----------------------------------------------------------------------------------


def source_of(options: argparse.Namespace) -> str:
    """The IR of a kernel of a Python file, of an operation, or of a file of IR."""
    compiler = importlib.import_module("kvarn.compilation.driver")
    kernel, specs = named(options)
    context = compiler.context()
    with compiler.diagnosed(context):
        return compiler.with_places(compiler.as_module(kernel, specs, context))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 when a pass changed the answer."""
    parser = argparse.ArgumentParser(
        prog="kvarn bisect",
        description="Find the pass that changes what a kernel computes.",
        epilog="example: kvarn bisect kernels.py:scale --spec 'paged(bf16, num_heads=8, head_size=128, page_size=16)' "
        "--grid 3 --block 128 --load-pass my_pass.py --insert-after hoist-kv-lookups=my-pass",
    )
    add_kernel_options(parser)
    add_input_options(parser.add_argument)
    add_model_option(parser.add_argument)
    parser.add_argument("--trusted", metavar="DIR", help="a folder with another kvarn, whose passes are trusted")
    parser.add_argument("--save", metavar="PREFIX", help="write the IR before and after the pass to PREFIX.*.mlir")
    options = parser.parse_args(argv)
    compiler, pipeline = map(importlib.import_module, ("kvarn.compilation.driver", "kvarn.lowering.pipeline"))
    target = options.target or "sm_90a"
    passes, text = passes_of(options), source_of(options)  # in this order: IR may have operations of extensions
    settings = importlib.import_module("kvarn.pipelines").extended(passes, options.disable)
    steps = pipeline.steps(target, settings)
    width = max(len(s.name) for s in steps)
    with Rest(options.trusted) as rest:
        inputs, launch = inputs_of(options, compiler.parse(text)), Launch(options.grid, options.block)
        checker = Checker(text, target, rest, inputs, launch, model_of(options.model))
        print(f"compared with {checker.source}")
        fault = first_fault(text, steps, checker, lambda name, state: print(f"{name:{width}}  {state}", flush=True))
    print("\n".join(_told(fault)))
    if fault is not None and options.save:
        for what in ("before", "after"):
            Path(f"{options.save}.{what}.mlir").write_text(getattr(fault, what) + "\n")
    return int(fault is not None)


def _told(fault: Fault | None) -> Iterator[str]:
    if fault is None:
        yield "no pass changed the answer"
    elif not fault.name:
        yield "the answer is wrong before any pass: what must run is at fault, or the model is another kernel's"
    else:
        yield f"{fault.name} is the first pass that changed the answer"
        if fault.rewrite:
            yield f"  by rewrite {fault.number} of {fault.rewrites}: {fault.rewrite}"


__all__ = ["Fault", "first_fault", "main", "source_of"]

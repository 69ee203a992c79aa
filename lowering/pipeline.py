# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The pipelines: which passes run in which order, and why each stands where it does.

A step is one of our passes with its options, or upstream passes that run together under a name of their own. Every
option of an upstream pass is spelled out, since defaults move between LLVM releases. A step that is not optional is
part of the program's meaning, or of what a later step relies on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlir import ir

from kvarn.dialect import schedules
from kvarn.env import OWNERSHIP, env
from kvarn.lowering import registry

from . import pipeline_parser
from .pass_base import as_pass
from .pipeline_parser import CHECK, INSTRUMENTATION, TRANSFORM, Step
from .target import Target, by_name

# Upstream passes that stand in several places.
_CANONICALIZE = (
    "canonicalize{max-iterations=10 max-num-rewrites=-1 region-simplify=normal test-convergence=false top-down=true}"
)
_VECTORS = (
    "convert-vector-to-llvm{enable-amx=false enable-arm-bf16=false enable-arm-i8mm=false enable-arm-neon=false "
    "enable-arm-sve=false enable-x86vector=false force-32bit-vector-indices=true reassociate-fp-reductions=false "
    "use-vector-alignment=false vector-contract-lowering=dot vector-transpose-lowering=eltwise}"
)
# cse first: what lowering leaves is mostly repeated constants and addresses, on which canonicalize takes seconds.
_SIMPLIFY = f"cse,{_CANONICALIZE},cse,loop-invariant-code-motion"


def _kv(text: str, reason: str, optional: bool = False, purpose: str = TRANSFORM) -> Step:
    """A pass of ours, ``name{options}``."""
    return Step(text.partition("{")[0], text, reason, optional, purpose)


def _upstream(name: str, text: str, reason: str, optional: bool = False) -> Step:
    return Step(name, text, reason, optional, upstream=True)


@dataclass(frozen=True)
class Insertion:
    """Steps to run beside a step of a target's pipeline: ``after`` it, else before it."""

    beside: str
    after: bool
    steps: tuple[Step, ...]

    def into(self, pipeline: Sequence[Step]) -> list[Step]:
        """A pipeline with the steps in their place; ValueError when it does not have that place."""
        place = next((i for i, s in enumerate(pipeline) if s.name == self.beside), None)
        if place is None:
            where = "after" if self.after else "before"
            names = ", ".join(s.name for s in pipeline)
            raise ValueError(f"a pass can run {where} one of {names}, got {self.beside!r}")
        reason = f"inserted {'after' if self.after else 'before'} {self.beside}"
        place += self.after
        while self.after and place < len(pipeline) and pipeline[place].reason == reason:
            place += 1  # one after another, in the order in which they were asked for
        made = [dataclasses.replace(s, reason=reason, optional=True) for s in self.steps]
        return [*pipeline[:place], *made, *pipeline[place:]]


def insertions(passes: Mapping[str, Any], outer: Sequence[Insertion] = ()) -> tuple[Insertion, ...]:
    """The insertions that a mapping of places to passes asks for, besides outer ones; see ``kv.pipeline``."""
    found: list[Insertion] = []
    for place, what in passes.items():
        where, _, beside = place.partition(":")
        if where not in ("after", "before") or not beside:
            raise ValueError(f'a place for passes must be "after:PASS" or "before:PASS", got {place!r}')
        every = [step for one in (what if isinstance(what, (list, tuple)) else [what]) for step in _steps_of(one)]
        found.append(Insertion(beside, where == "after", tuple(every)))
    names = list(dict.fromkeys(s.name for target in ("sm_90a", "host") for s in default_steps(target, OWNERSHIP, 1)))
    names += [s.name for i in (*outer, *found) for s in i.steps]
    for insertion in found:
        if insertion.beside not in names:
            raise ValueError(f"a pass can run beside one of {', '.join(names)}, got {insertion.beside!r}")
    return tuple(found)


def _steps_of(what: Any) -> list[Step]:
    """The steps of a pass given by name, with or without options, or as a function."""
    if isinstance(what, str):
        with ir.Context():
            return pipeline_parser.parse(what)
    found = as_pass(what)
    registry.check_name(found.name)
    return [pipeline_parser.of_pass(found)]


@dataclass(frozen=True)
class Settings:
    """What a compilation may change of a pipeline.

    Steps to leave out, options by pass name, checks of every cache access (``"ownership"``: of who owns its page too),
    passes that run beside others, the last pass that the IR has seen already (what is left of the pipeline runs), and
    the marks that a warp keeps of its phases, where launches are traced.
    """

    disable: frozenset[str] = frozenset()
    options: Mapping[str, str] = field(default_factory=dict)
    check: bool | str = field(default_factory=lambda: env.check)
    inserted: tuple[Insertion, ...] = ()
    start_after: str | None = None
    trace: int = 0

    def __post_init__(self) -> None:
        gone = {name for name in {*self.disable, *self.options} if registry.deleted(name)}
        if gone:
            object.__setattr__(self, "disable", self.disable - gone)
            object.__setattr__(self, "options", {k: v for k, v in self.options.items() if k not in gone})


def kv_steps(target: Target, check: bool | str = False, trace: int = 0) -> list[Step]:
    """From kv IR to upstream dialects; ``trace`` marks of phases are kept of a warp."""
    hardware = "true" if target.has("f8_convert") else "false"
    expand = f"target={target.name}" + (" check=true" if check else "")
    expand += " ownership=true" if check == OWNERSHIP else ""
    steps = [
        _kv("verify-kv", "before anything else: the passes trust what the verifiers promise", purpose=CHECK),
        _kv(f"select-kv-schedule{{target={target.name}}}", "before the expansions, which read the schedules"),
        _kv(f"expand-kv-operations{{{expand}}}", "tier 1 becomes kernels; what follows sees tier 2 only"),
        _kv("extract-kv-program", "the launches become data; what is left are kernels"),
    ]
    reason = "on request, while accesses are as they were written and none has been moved"
    if check == OWNERSHIP:
        steps.append(_kv(f"check-kv-ownership{{target={target.name}}}", reason, True, CHECK))
        reason = "likewise, after what notes an access before it ends the kernel"
    if check:
        steps.append(_kv("check-kv-access", reason, True, CHECK))
    steps += [
        _upstream(
            "simplify-kernels",
            _SIMPLIFY,
            "operands of look-ups move out of loops first, so that the look-ups can follow",
            True,
        ),
        _kv("split-kv-loops", "while masks are comparisons of positions", True),
        _kv("narrow-kv-tiles", "after the split, which moves what masks read to where they are needed", True),
        *(_host_tiles() if target.is_host else _gpu_tiles(target, trace)),
        _kv("lower-kv-tiles", "tiles become accesses and look-ups that the next passes hoist and vectorise"),
        _kv(f"expand-kv-tma{{target={target.name}}}", "as the tiles; and what the target does not have ends here"),
        _kv("hoist-kv-lookups", "after simplification, while look-ups are still ops that can be recognised", True),
        _kv("vectorize-kv-lookups", "before lowering, which has only the scalar form of a populate", True),
        _kv("plan-kv-access", "last of the kv level: it sees every access and every write of the kernel", True),
        *_marks(target, trace),
        _kv(f"lower-kv-access{{target={target.name}}}", "accesses become pointers; handles are asked for fields"),
        _kv("lower-kv-tma", "after the plan and the record of what is written, which look at the copies"),
        *(
            [_kv("check-kv-waits", "on request, when every wait is there", True, CHECK)]
            if check and not target.is_host
            else []
        ),
        _kv(f"lower-kv-casts{{hardware={hardware}}}", "after the accesses, whose conversions it lowers too"),
        _kv("lower-kv-buffers", "after the plan, which says which buffers are read-only"),
    ]
    if target.is_host:
        steps += [
            _kv("flatten-kv-types", "when nothing but kv.field asks for handles"),
            _kv("map-gpu-to-host", "after flattening: it copies the flat signature; before anything lowers gpu ops"),
            _upstream(
                "bufferize-tiles", _TENSORS_TO_MEMORY, "the only memrefs are tiles' when all others are pointers"
            ),
            _kv("vectorize-kv-tiles", "when tiles lie in memory, and before upstream lowers vectors"),
        ]
    else:
        steps += [
            _kv("allocate-kv-shared", "before flattening, in the order that the kernel allocates"),
            _kv("flatten-kv-types", "when nothing but kv.field asks for handles"),
        ]
    return [
        *steps,
        _kv("check-kv-lowered", "no kv op may reach the upstream tail", purpose=CHECK),
        _kv(f"record-kv-abi{{target={target.name}}}", "the tail drops the attributes that the record is made from"),
    ]


def _marks(target: Target, trace: int) -> list[Step]:
    """What makes marks of phases, on request."""
    reason = "when nothing moves any more what stands between marks, and what they write is no write of the kernel's"
    step = _kv(f"lower-kv-trace{{target={target.name} marks={trace}}}", reason, purpose=INSTRUMENTATION)
    return [step] if trace else []


def _phases(trace: int) -> list[Step]:
    """What says where phases begin and end, on request."""
    reason = "on request, when waits and copies stand where they stay"
    return [_kv("trace-kv-phases", reason, True, INSTRUMENTATION)] if trace else []


def _gpu_tiles(target: Target, trace: int) -> list[Step]:
    """From tiles to what threads hold of them."""
    return [
        _kv("tabulate-kv-scores", "after what is far has left, and before layouts, which tables have too", True),
        _kv("reverse-kv-loops", "after what looks at the order of tiles, and before copies have one", True),
        _kv(f"assign-kv-layouts{{target={target.name}}}", "before the copies, which products in shared memory decide"),
        _kv(f"select-kv-copies{{target={target.name}}}", "once it is known which tiles lie in shared memory"),
        _kv("specialize-kv-warps", "copies are ops now, and no loop carries what they wait for yet", True),
        _kv("promote-kv-sums", "before the rotation, which starts what is added elsewhere in another order", True),
        _kv("sum-kv-weights", "after it: of products that are added elsewhere; before sums are left to threads", True),
        _kv("defer-kv-reductions", "before the rotation, which splits the loop's body", True),
        _kv("pipeline-kv-loops", "after the copies left: what is rotated are products and their waits", True),
        _kv("queue-kv-rounds", "after the roles have loops of their own, and nothing looks at those any more", True),
        _kv("skip-kv-maxima", "after the rotation, whose first iteration has no maximum yet", True),
        _kv("fold-kv-scores", "after scores are no more needed for every maximum", True),
        _kv("skip-kv-rescales", "after the rotation, which moves the rescale", True),
        _kv("simplify-kv-tiles", "what the passes over tiles left over, before every op becomes many", True),
        _kv("start-kv-rounds", "after the clean-up, which would merge what rounds compute again", True),
        *_phases(trace),
        _kv("distribute-kv-tiles", "the last that sees tiles: threads, vectors and instructions from here on"),
    ]


def _host_tiles() -> list[Step]:
    """From tiles to tensors of upstream's."""
    return [_kv("lower-kv-tiles-to-linalg", "while tiles are values, which upstream fuses and finds memory for")]


# Fused first, so that positions, masks and what is computed once need no memory. Nothing yields what it allocates:
# what loops carry is written in place.
_TENSORS_TO_MEMORY = (
    "convert-elementwise-to-linalg,linalg-fuse-elementwise-ops,"
    f"{_CANONICALIZE},cse,eliminate-empty-tensors,"
    "one-shot-bufferize{allow-return-allocs-from-loops=false allow-unknown-ops=false analysis-heuristic=bottom-up "
    "buffer-alignment=64 bufferize-function-boundaries=false check-parallel-regions=true copy-before-write=false "
    "function-boundary-type-conversion=infer-layout-map must-infer-memory-space=false "
    "unknown-type-conversion=fully-dynamic-layout-map use-encoding-for-memory-space=false},"
    f"{_CANONICALIZE},cse"
)
_ADDRESSES = _upstream(
    "simplify-addresses", _SIMPLIFY, "addresses are plain arithmetic now: merge and hoist them", True
)


def gpu_tail() -> list[Step]:
    """From gpu, arith, scf, vector and llvm to the LLVM dialect of a GPU module."""
    return [
        _ADDRESSES,
        _upstream(
            "convert-to-nvvm",
            "gpu.module("
            "convert-scf-to-cf{allow-pattern-rollback=true},"
            f"{_VECTORS},"
            "convert-gpu-to-nvvm{allow-pattern-rollback=true has-redux=true index-bitwidth=64 "
            "use-bare-ptr-memref-call-conv=false},"
            "convert-math-to-llvm{approximate-log1p=true},"
            "convert-nvvm-to-llvm,"
            "reconcile-unrealized-casts,"
            f"{_CANONICALIZE},cse)",
            "vectors before convert-gpu-to-nvvm, which takes the scalars and the function",
        ),
        _kv("mark-kv-grid-constants", "last: functions of the gpu dialect refuse the marks or lose them"),
    ]


def host_tail() -> list[Step]:
    """From arith, scf, vector and llvm to the LLVM dialect of the host."""
    return [
        _ADDRESSES,
        _upstream(
            "convert-to-llvm",
            "convert-scf-to-cf{allow-pattern-rollback=true},"
            f"{_VECTORS},"
            "expand-strided-metadata,lower-affine,"
            "finalize-memref-to-llvm{index-bitwidth=64 use-aligned-alloc=false use-generic-functions=false},"
            "convert-math-to-llvm{approximate-log1p=true},convert-math-to-libm,"
            # Calls of libm are made lane by lane, with vector ops.
            f"{_VECTORS},"
            "arith-expand{include-bf16=false include-f8e8m0=false include-f4e2m1=false},"
            "convert-arith-to-llvm{index-bitwidth=64},convert-index-to-llvm{index-bitwidth=64},"
            "convert-cf-to-llvm{index-bitwidth=64},convert-ub-to-llvm{index-bitwidth=64},"
            "convert-func-to-llvm{index-bitwidth=64 use-bare-ptr-memref-call-conv=false},"
            "reconcile-unrealized-casts,"
            f"{_CANONICALIZE},cse",
            "control flow, then data, then functions",
        ),
    ]


def default_steps(target: str | Target, check: bool | str = False, trace: int = 0) -> list[Step]:
    """The whole pipeline of a target up to the LLVM dialect, as it is; ValueError for an unknown target."""
    chosen = by_name(target)
    return [*kv_steps(chosen, check, trace), *(host_tail() if chosen.is_host else gpu_tail())]


def optional() -> tuple[str, ...]:
    """The names of the steps, of any target, that may be left out."""
    steps = [s for target in ("sm_90a", "host") for s in default_steps(target, OWNERSHIP, 1)]
    return tuple(dict.fromkeys(s.name for s in steps if s.optional))


def steps(target: str | Target, settings: Settings | None = None) -> list[Step]:
    """The whole pipeline of a target up to the LLVM dialect, with a compilation's settings applied.

    Raises
    ------
    ValueError
        For an unknown target; for a step to configure, to stand beside or to start after that the pipeline does not
        have, and one to leave out that must run.
    """
    chosen, settings = by_name(target), settings or Settings()
    found = default_steps(chosen, settings.check, settings.trace)
    for insertion in settings.inserted:
        found = insertion.into(found)
    have = f"passes of the {chosen.name} pipeline are {', '.join(s.name for s in found)}"
    unknown = sorted((set(settings.disable) | set(settings.options)) - {s.name for s in found})
    if unknown:
        raise ValueError(f"{have}; got {', '.join(unknown)}")
    needed = [s.name for s in found if s.name in settings.disable and not s.optional]
    if needed:
        may = ", ".join(s.name for s in found if s.optional)
        raise ValueError(f"only optional passes may be disabled ({may}), got {', '.join(needed)}, which must run")
    if settings.start_after is not None:
        names = [s.name for s in found]
        if settings.start_after not in names:
            raise ValueError(f"{have}: it starts after one of these, got {settings.start_after!r}")
        found = found[names.index(settings.start_after) + 1 :]
    if without := schedules.CARRYING & settings.disable:
        left_out = {"without": ",".join(sorted(without))}
        found = [
            dataclasses.replace(s, text=pipeline_parser.with_options(s, left_out))
            if s.name == "select-kv-schedule"
            else s
            for s in found
        ]
    return [_configured(s, settings.options) for s in found if s.name not in settings.disable]


def _configured(step: Step, options: Mapping[str, str]) -> Step:
    """A step with the options that a compilation gives it over its own; ValueError for those that it does not have."""
    if step.name not in options:
        return step
    if step.upstream:
        raise ValueError(f"{step.name} is a group of MLIR's passes, whose options are fixed: insert a pass instead")
    given = pipeline_parser.split_options(options[step.name])
    return dataclasses.replace(step, text=pipeline_parser.with_options(step, given))


__all__ = [
    "Insertion", "Settings", "default_steps", "gpu_tail", "host_tail", "insertions", "kv_steps", "optional", "steps",
]  # fmt: skip

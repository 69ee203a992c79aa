# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The pipelines: which passes run in which order, and why.

A step is a kv pass with its options, or a named group of upstream passes. All options of upstream passes are written
out, since their defaults change between LLVM releases. A step that is not optional is needed for a correct program, or
by a later step.
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

# Upstream passes that occur in several places.
_CANONICALIZE = (
    "canonicalize{max-iterations=10 max-num-rewrites=-1 region-simplify=normal test-convergence=false top-down=true}"
)
_VECTORS = (
    "convert-vector-to-llvm{enable-amx=false enable-arm-bf16=false enable-arm-i8mm=false enable-arm-neon=false "
    "enable-arm-sve=false enable-x86vector=false force-32bit-vector-indices=true reassociate-fp-reductions=false "
    "use-vector-alignment=false vector-contract-lowering=dot vector-transpose-lowering=eltwise}"
)
# cse first: lowering leaves mostly repeated constants and addresses, on which canonicalize would take seconds.
_SIMPLIFY = f"cse,{_CANONICALIZE},cse,loop-invariant-code-motion"


def _kv(text: str, reason: str, optional: bool = False, purpose: str = TRANSFORM) -> Step:
    """A kv pass, ``name{options}``."""
    return Step(text.partition("{")[0], text, reason, optional, purpose)


def _upstream(name: str, text: str, reason: str, optional: bool = False) -> Step:
    return Step(name, text, reason, optional, upstream=True)


@dataclass(frozen=True)
class Insertion:
    """Steps to run next to a step of a target's pipeline: after it if ``after``, otherwise before it."""

    beside: str
    after: bool
    steps: tuple[Step, ...]

    def into(self, pipeline: Sequence[Step]) -> list[Step]:
        """A pipeline with the steps inserted; ValueError if it lacks the step to insert at."""
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
    """The insertions for a mapping of positions to passes, after outer ones; see ``kv.pipeline``."""
    found: list[Insertion] = []
    for place, what in passes.items():
        where, _, beside = place.partition(":")
        beside = registry.current(beside)
        if where not in ("after", "before") or not beside:
            raise ValueError(f'a place for passes must be "after:PASS" or "before:PASS", got {place!r}')
        every = [step for one in (what if isinstance(what, (list, tuple)) else [what]) for step in _steps_of(one)]
        found.append(Insertion(beside, where == "after", tuple(every)))
    names = list(dict.fromkeys(s.name for target in ("sm_90a", "host") for s in default_steps(target, OWNERSHIP, 1)))
    names += [s.name for i in (*outer, *found) for s in i.steps]
    for insertion in found:
        if insertion.beside not in names:
            raise ValueError(f"a pass can run before or after one of {', '.join(names)}, got {insertion.beside!r}")
    return tuple(found)


def _steps_of(what: Any) -> list[Step]:
    """The steps of a pass that is given by name, with or without options, or as a function."""
    if isinstance(what, str):
        with ir.Context():
            return pipeline_parser.parse(what)
    found = as_pass(what)
    registry.check_name(found.name)
    return [pipeline_parser.of_pass(found)]


@dataclass(frozen=True)
class Settings:
    """What a compilation may change in a pipeline.

    Disabled steps, options by pass name, checks of every cache access (``"ownership"``: also of page ownership), passes
    inserted next to others, the last pass that the IR has already been through (the rest of the pipeline runs), and the
    trace marks per warp, where launches are traced.
    """

    disable: frozenset[str] = frozenset()
    options: Mapping[str, str] = field(default_factory=dict)
    check: bool | str = field(default_factory=lambda: env.check)
    inserted: tuple[Insertion, ...] = ()
    start_after: str | None = None
    trace: int = 0

    def __post_init__(self) -> None:
        given = {*self.disable, *self.options}
        gone = {name for name in given if registry.deleted(name)}
        known = {name: registry.current(name) for name in given - gone}
        if gone or any(old != new for old, new in known.items()):
            object.__setattr__(self, "disable", frozenset(known[name] for name in self.disable - gone))
            object.__setattr__(self, "options", {known[k]: v for k, v in self.options.items() if k not in gone})
        if self.start_after is not None:
            object.__setattr__(self, "start_after", registry.current(self.start_after))


def kv_steps(target: Target, check: bool | str = False, trace: int = 0) -> list[Step]:
    """From kv IR to upstream dialects; ``trace`` is the number of trace marks per warp."""
    hardware = "true" if target.has("f8_convert") else "false"
    expand = f"target={target.name}" + (" check=true" if check else "")
    expand += " ownership=true" if check == OWNERSHIP else ""
    steps = [
        _kv("verify-kv", "first: all other passes rely on the verifiers", purpose=CHECK),
        _kv(f"select-kv-schedule{{target={target.name}}}", "before the expansions, which read the schedules"),
        _kv(f"expand-kv-operations{{{expand}}}", "fused operations become kernels and launches"),
        _kv("extract-kv-program", "launches become data, so that only kernels are left"),
    ]
    reason = "on request, before any pass moves an access"
    if check == OWNERSHIP:
        steps.append(_kv(f"check-kv-ownership{{target={target.name}}}", reason, True, CHECK))
        reason = "on request, after check-kv-ownership: an assertion ends the kernel"
    if check:
        steps.append(_kv("check-kv-access", reason, True, CHECK))
    steps += [
        _upstream("simplify-kernels", _SIMPLIFY, "operands of lookups must leave loops first", True),
        _kv("split-kv-loops", "while masks are still comparisons of positions", True),
        _kv("narrow-kv-tiles", "after the split, which moves masks' reads to the parts that need them", True),
        *(_host_tiles() if target.is_host else _gpu_tiles(target, trace)),
        _kv("lower-kv-tiles", "tiles become accesses and lookups, which the next passes hoist and vectorize"),
        _kv(f"expand-kv-tma{{target={target.name}}}", "tiles become loads; other targets are refused"),
        _kv("hoist-kv-lookups", "after simplification, while lookups are still ops", True),
        _kv("vectorize-kv-lookups", "before lowering, which has only the scalar form of a populate", True),
        _kv("plan-kv-access", "last of the kv level: it sees every access of the kernel", True),
        *_marks(target, trace),
        _kv(f"lower-kv-access{{target={target.name}}}", "accesses become loads and stores"),
        _kv("lower-kv-tma", "after the plan and the record of writes, which read the copies"),
        *(
            [_kv("check-kv-waits", "on request, when all waits exist", True, CHECK)]
            if check and not target.is_host
            else []
        ),
        _kv(f"lower-kv-casts{{hardware={hardware}}}", "after the accesses, since it also lowers their conversions"),
        _kv("lower-kv-buffers", "after the plan, which marks read-only buffers"),
    ]
    if target.is_host:
        steps += [
            _kv("flatten-kv-types", "when only kv.field uses handles"),
            _kv("map-gpu-to-host", "after flattening, whose signature it copies; before gpu ops are lowered"),
            _upstream(
                "bufferize-tiles", _TENSORS_TO_MEMORY, "when buffers are pointers, so that all memrefs are tiles"
            ),
            _kv("vectorize-kv-tiles", "when tiles are in memory, and before upstream lowers vectors"),
        ]
    else:
        steps += [
            _kv("allocate-kv-shared", "before flattening, in the kernel's order of allocations"),
            _kv("flatten-kv-types", "when only kv.field uses handles"),
        ]
    return [
        *steps,
        _kv("check-kv-lowered", "no kv op may reach the upstream passes", purpose=CHECK),
        _kv(f"record-kv-abi{{target={target.name}}}", "upstream passes drop the attributes that it records"),
    ]


def _marks(target: Target, trace: int) -> list[Step]:
    """The lowering of trace marks, on request."""
    reason = "when no pass moves ops across marks; after the plan, which ignores their stores"
    step = _kv(f"lower-kv-trace{{target={target.name} marks={trace}}}", reason, purpose=INSTRUMENTATION)
    return [step] if trace else []


def _phases(trace: int) -> list[Step]:
    """The insertion of trace marks, on request."""
    reason = "on request, when waits and copies no longer move"
    return [_kv("trace-kv-phases", reason, True, INSTRUMENTATION)] if trace else []


def _gpu_tiles(target: Target, trace: int) -> list[Step]:
    """From tiles to the vectors of each thread."""
    return [
        _kv("tabulate-kv-scores", "after far tiles are constants, and before layouts", True),
        _kv("reverse-kv-loops", "after the passes that depend on the order of tiles", True),
        _kv(f"assign-kv-layouts{{target={target.name}}}", "before the copies, which depend on products' operands"),
        _kv(f"select-kv-copies{{target={target.name}}}", "when layouts say which tiles are in shared memory"),
        _kv("specialize-kv-warps", "when copies are ops, and before loops carry their waits", True),
        _kv("promote-kv-sums", "before the pipelining, which changes the order of products", True),
        _kv("sum-kv-weights", "after the promotion, whose sums it extends", True),
        _kv("defer-kv-reductions", "before the pipelining, which splits the loop's body", True),
        _kv("pipeline-kv-loops", "after copies have moved to the producer", True),
        _kv("queue-kv-work", "when roles have their own loops", True),
        _kv("skip-kv-maxima", "after the pipelining, whose peeled first iteration has no maximum", True),
        _kv("fold-kv-scores", "when not every maximum needs the scores", True),
        _kv("skip-kv-rescales", "after the pipelining, which moves the rescale", True),
        _kv("simplify-kv-tiles", "cleans up after the tile passes, before every op becomes many", True),
        _kv("start-kv-work", "after the clean-up, which would merge recomputed values", True),
        *_phases(trace),
        _kv("distribute-kv-tiles", "last of the tile passes: tiles become vectors per thread"),
    ]


def _host_tiles() -> list[Step]:
    """From tiles to upstream's tensors."""
    return [_kv("lower-kv-tiles-to-linalg", "while tiles are values, which upstream fuses and bufferizes")]


# Elementwise ops are fused first, so that positions, masks and intermediate values need no memory. No block yields a
# tile that it allocates, since loop-carried tiles are updated in place.
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
    "simplify-addresses", _SIMPLIFY, "when addresses are plain arithmetic: merge and hoist them", True
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
            "vectors first, since convert-gpu-to-nvvm converts the rest",
        ),
        _kv("mark-kv-grid-constants", "last, since functions of the gpu dialect refuse or lose the marks"),
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
            # libm functions are called lane by lane, through vector ops.
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
    """A target's whole default pipeline up to the LLVM dialect; ValueError for an unknown target."""
    chosen = by_name(target)
    return [*kv_steps(chosen, check, trace), *(host_tail() if chosen.is_host else gpu_tail())]


def optional() -> tuple[str, ...]:
    """The names of the optional steps of all targets."""
    steps = [s for target in ("sm_90a", "host") for s in default_steps(target, OWNERSHIP, 1)]
    return tuple(dict.fromkeys(s.name for s in steps if s.optional))


def steps(target: str | Target, settings: Settings | None = None) -> list[Step]:
    """A target's whole pipeline up to the LLVM dialect, with a compilation's settings applied.

    Raises
    ------
    ValueError
        For an unknown target; for a step to configure, insert at or start after that the pipeline does not have; and
        for a step to disable that is not optional.
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
    """A step with a compilation's options over its own; ValueError for options that it does not have."""
    if step.name not in options:
        return step
    if step.upstream:
        raise ValueError(f"{step.name} is a group of MLIR's passes, whose options are fixed: insert a pass instead")
    given = pipeline_parser.split_options(options[step.name])
    return dataclasses.replace(step, text=pipeline_parser.with_options(step, given))


__all__ = [
    "Insertion", "Settings", "default_steps", "gpu_tail", "host_tail", "insertions", "kv_steps", "optional", "steps",
]  # fmt: skip

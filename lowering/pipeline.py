# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The pipelines: which passes run in which order, and why each stands where it does.

A step is a line of text: the name of one of our passes with its options, or upstream passes anchored on
``builtin.module``. Every option of an upstream pass is spelled out, since defaults move between LLVM releases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mlir import ir
from mlir.passmanager import PassManager

from kvarn.env import env

from . import find
from .pass_base import PassFailure
from .target import Target, by_name

Observer = Callable[[str, ir.Module], None]

# Upstream passes that stand in several places.
_CANONICALIZE = (
    "canonicalize{max-iterations=10 max-num-rewrites=-1 region-simplify=normal test-convergence=false top-down=true}"
)
_VECTORS = (
    "convert-vector-to-llvm{enable-amx=false enable-arm-bf16=false enable-arm-i8mm=false enable-arm-neon=false "
    "enable-arm-sve=false enable-x86vector=false force-32bit-vector-indices=true reassociate-fp-reductions=false "
    "use-vector-alignment=false vector-contract-lowering=dot vector-transpose-lowering=eltwise}"
)


@dataclass(frozen=True)
class Step:
    """One step: ``text`` is a pass of ours (``name{options}``) or an upstream pipeline."""

    text: str
    reason: str

    @property
    def name(self) -> str:
        """The pass's name; for an upstream step, the name that stop points and dumps use."""
        return (
            self.text.partition("{")[0]
            if not self.text.startswith("builtin.module(")
            else self.reason.partition(":")[0]
        )


@dataclass(frozen=True)
class Settings:
    """What a compilation may change: passes to leave out, options by pass name, and checks of every cache access."""

    disable: frozenset[str] = frozenset()
    options: dict[str, str] = field(default_factory=dict)
    check: bool = field(default_factory=lambda: env.check)


def kv_steps(target: Target, check: bool = False) -> list[Step]:
    """From kv IR to upstream dialects."""
    hardware = "true" if target.has("f8_convert") else "false"
    steps = [
        Step("verify-kv", "before anything else: the passes trust what the verifiers promise"),
        Step(f"select-kv-schedule{{target={target.name}}}", "before the expansions, which read the schedules"),
        Step(f"expand-kv-operations{{target={target.name}}}", "tier 1 becomes kernels; what follows sees tier 2 only"),
        Step("extract-kv-program", "the launches become data; what is left are kernels"),
        *(
            [Step("check-kv-access", "on request, while accesses are as they were written and none has been moved")]
            if check
            else []
        ),
        Step(
            _licm(), "simplify-kernels: operands of look-ups move out of loops first, so that the look-ups can follow"
        ),
        Step("split-kv-loops", "while masks are comparisons of positions"),
        *(_host_tiles() if target.is_host else _gpu_tiles()),
        Step("lower-kv-tiles", "tiles become accesses and look-ups that the next passes hoist and vectorise"),
        Step(f"expand-kv-tma{{target={target.name}}}", "as the tiles; and what the target does not have ends here"),
        Step("hoist-kv-lookups", "after simplification, while look-ups are still ops that can be recognised"),
        Step("vectorize-kv-lookups", "before lowering, which has only the scalar form of a populate"),
        Step("plan-kv-access", "last of the kv level: it sees every access and every write of the kernel"),
        Step("lower-kv-access", "accesses become pointers; handles remain, asked for their fields"),
        Step("lower-kv-tma", "after the plan and the record of what is written, which look at the copies"),
        Step(f"lower-kv-casts{{hardware={hardware}}}", "after the accesses, whose conversions it lowers too"),
        Step("lower-kv-buffers", "after the plan, which says which buffers are read-only"),
    ]
    if target.is_host:
        steps += [
            Step("flatten-kv-types", "when nothing but kv.field asks for handles"),
            Step("map-gpu-to-host", "after flattening: it copies the flat signature; before anything lowers gpu ops"),
            Step(_tensors_to_memory(), "bufferize-tiles: the only memrefs are tiles' when all others are pointers"),
            Step("vectorize-kv-tiles", "when tiles lie in memory, and before upstream lowers vectors"),
        ]
    else:
        steps += [
            Step("allocate-kv-shared", "before flattening, in the order that the kernel allocates"),
            Step("flatten-kv-types", "when nothing but kv.field asks for handles"),
        ]
    return [*steps, Step("check-kv-lowered", "the last of ours: no kv op may reach the upstream tail")]


def _gpu_tiles() -> list[Step]:
    """From tiles to what threads hold of them."""
    return [
        Step("assign-kv-layouts", "before the copies, which products in shared memory decide"),
        Step("select-kv-copies", "once it is known which tiles lie in shared memory"),
        Step("specialize-kv-warps", "when copies are ops of their own, and before loops carry what they wait for"),
        Step("defer-kv-reductions", "before the rotation, which takes the loop apart"),
        Step("pipeline-kv-loops", "after the copies left: what is rotated are products and their waits"),
        Step("skip-kv-rescales", "after the rotation, which moves the rescale"),
        Step("simplify-kv-tiles", "what the passes over tiles left over, before every op becomes many"),
        Step("distribute-kv-tiles", "the last that sees tiles: threads, vectors and instructions from here on"),
    ]


def _host_tiles() -> list[Step]:
    """From tiles to tensors of upstream's."""
    return [Step("lower-kv-tiles-to-linalg", "while tiles are values, which upstream fuses and finds memory for")]


def _tensors_to_memory() -> str:
    # Fused first, so that positions, masks and what is computed once need no memory. Nothing yields what it allocates:
    # what loops carry is written in place.
    return (
        "builtin.module(convert-elementwise-to-linalg,linalg-fuse-elementwise-ops,"
        f"{_CANONICALIZE},cse,eliminate-empty-tensors,"
        "one-shot-bufferize{allow-return-allocs-from-loops=false allow-unknown-ops=false analysis-heuristic=bottom-up "
        "buffer-alignment=64 bufferize-function-boundaries=false check-parallel-regions=true copy-before-write=false "
        "function-boundary-type-conversion=infer-layout-map must-infer-memory-space=false "
        "unknown-type-conversion=fully-dynamic-layout-map use-encoding-for-memory-space=false},"
        f"{_CANONICALIZE},cse)"
    )


def _licm() -> str:
    # cse first: what lowering leaves is mostly repeated constants and addresses, on which canonicalize takes seconds.
    return f"builtin.module(cse,{_CANONICALIZE},cse,loop-invariant-code-motion)"


def gpu_tail(target: Target) -> list[Step]:
    """From gpu, arith, scf, vector and llvm to the LLVM dialect of a GPU module."""
    return [
        Step(_licm(), "simplify-addresses: addresses are plain arithmetic now: merge and hoist them"),
        Step(
            "builtin.module(gpu.module("
            "convert-scf-to-cf{allow-pattern-rollback=true},"
            f"{_VECTORS},"
            "convert-gpu-to-nvvm{allow-pattern-rollback=true has-redux=true index-bitwidth=64 "
            "use-bare-ptr-memref-call-conv=false},"
            "convert-math-to-llvm{approximate-log1p=true},"
            "convert-nvvm-to-llvm,"
            "reconcile-unrealized-casts,"
            f"{_CANONICALIZE},cse))",
            "convert-to-nvvm: vectors before convert-gpu-to-nvvm, which takes the scalars and the function",
        ),
        Step("mark-kv-descriptors", "last: functions of the gpu dialect refuse the marks or lose them"),
    ]


def host_tail() -> list[Step]:
    """From arith, scf, vector and llvm to the LLVM dialect of the host."""
    return [
        Step(_licm(), "simplify-addresses: addresses are plain arithmetic now: merge and hoist them"),
        Step(
            "builtin.module(convert-scf-to-cf{allow-pattern-rollback=true},"
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
            f"{_CANONICALIZE},cse)",
            "convert-to-llvm: control flow, then data, then functions",
        ),
    ]


def steps(target: str | Target, settings: Settings | None = None) -> list[Step]:
    """The whole pipeline of a target up to the LLVM dialect, with a compilation's settings applied.

    Raises
    ------
    ValueError
        For an unknown target, or a pass to disable or configure that the pipeline does not have.
    """
    chosen, settings = by_name(target), settings or Settings()
    full = [*kv_steps(chosen, settings.check), *(host_tail() if chosen.is_host else gpu_tail(chosen))]
    known = {s.name for s in full}
    unknown = sorted((set(settings.disable) | set(settings.options)) - known)
    if unknown:
        raise ValueError(
            f"passes of the {chosen.name} pipeline are {', '.join(s.name for s in full)}; got {', '.join(unknown)}"
        )
    kept = [s for s in full if s.name not in settings.disable]
    return [
        Step(f"{s.name}{{{settings.options[s.name]}}}", s.reason) if s.name in settings.options else s for s in kept
    ]


def run(
    module: ir.Module,
    pipeline: Iterable[Step],
    stop_after: str | None = None,
    observer: Observer | None = None,
) -> None:
    """Run steps on a module, in order; ``observer(name, module)`` after each.

    Raises
    ------
    PassFailure
        When a pass of ours fails; the diagnostic has been emitted.
    mlir.ir.MLIRError
        When an upstream pass fails.
    """
    with module.context:
        for step in pipeline:
            run_step(module, step.text)
            if observer is not None:
                observer(step.name, module)
            if stop_after == step.name:
                return


def run_step(module: ir.Module, text: str) -> None:
    """Run one step given as text."""
    name, _, rest = text.partition("{")
    # The steps of the pipelines are ours by name or upstream's in their anchor: entry points need not be read for them.
    found = None if text.startswith("builtin.module(") else find(name)
    if found is not None:
        given = rest.removesuffix("}").split() if rest else []
        found.run(module, found.options(dict(part.partition("=")[::2] for part in given)))
        return
    # What our passes made is verified, once; what upstream passes make of it is trusted. Verifying after each of them
    # takes as long as the passes.
    module.operation.verify()
    manager = PassManager.parse(text)
    manager.enable_verifier(False)
    manager.run(module.operation)


__all__ = [
    "Observer",
    "PassFailure",
    "Settings",
    "Step",
    "gpu_tail",
    "host_tail",
    "kv_steps",
    "run",
    "run_step",
    "steps",
]

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Memory effects and other traits of the kv operations: all that a pass needs to know of an op without its name.

Each model is named in an op's ``traits``. On MLIR 22.1 Python cannot attach interfaces: the native
library does it from :func:`table`; without it upstream passes leave the kv ops alone, which is safe.

Resources: ``cache`` is the contents of pages and scales, with the parts ``elements`` and ``scales``; ``table`` is the
lookup table and the lengths, which nothing in a kernel writes; ``memory`` is everything else that an operand points
to. Since no kv op writes ``table``, ops that only read it are declared without effects: passes may merge, move and drop
them like arithmetic. An op that declares no model reads and writes everything.
"""

from typing import Any, NamedTuple

from .base import Kv

READ, WRITE, ALLOCATE, FREE = "read", "write", "allocate", "free"
CACHE, ELEMENTS, SCALES, MEMORY = "cache", "elements", "scales", "memory"


class Effect(NamedTuple):
    """One effect: kind, resource, and the operand field that it acts on (None: the whole resource)."""

    kind: str
    resource: str
    operand: str | None = None


class EffectModel:
    """Base of the models: class attributes, read by :func:`table`."""

    effects: tuple[Effect, ...] = ()
    speculatable = False


class Pure(EffectModel):
    """No effect, and safe to run where the program would not run it: passes may merge, hoist and drop it."""

    speculatable = True


class TierOne:
    """A fused operation on whole caches: it is outside of kernels, and its expansion launches kernels."""


class LooksUpPage:
    """Looks up the page of a token. Its first fields are cache, batch and token; the last one, optional, is the page.

    Passes fill in the page once it has been looked up. An op that also has effects on contents and the fields head and
    dim is an access, with a result or the field value: passes give it an alignment, the read-only path and checks.
    """


class GivesAddress:
    """The result points into what the first operand shows, and may be written through."""


class ViewsHandle:
    """The result shows the same memory as the first operand: a layer of a collection, a cache as an operand."""


class ReadsCache(EffectModel):
    """Reads cache contents: dropped when unused, merged when no write is between, never speculated."""

    effects = (Effect(READ, CACHE),)


class WritesCache(EffectModel):
    """Writes cache contents."""

    effects = (Effect(WRITE, CACHE),)


class WritesElements(EffectModel):
    """Writes elements of a cache, but no scales."""

    effects = (Effect(WRITE, ELEMENTS),)


class ReadsScales(EffectModel):
    """Reads scales, but no elements."""

    effects = (Effect(READ, SCALES),)


class WritesScales(EffectModel):
    """Writes scales, but no elements."""

    effects = (Effect(WRITE, SCALES),)


class UpdatesCache(EffectModel):
    """Reads and writes cache contents."""

    effects = (Effect(READ, CACHE), Effect(WRITE, CACHE))


class ReadsMemory(EffectModel):
    """Reads buffers outside the caches."""

    effects = (Effect(READ, MEMORY),)


class WritesMemory(EffectModel):
    """Writes buffers outside the caches."""

    effects = (Effect(WRITE, MEMORY),)


class UpdatesMemory(EffectModel):
    """Reads and writes buffers outside the caches."""

    effects = (Effect(READ, MEMORY), Effect(WRITE, MEMORY))


class AllocatesShared(EffectModel):
    """Allocates shared memory. Each execution is a separate allocation, so equal ops are not merged."""

    effects = (Effect(ALLOCATE, MEMORY),)


class OpEffects(NamedTuple):
    """The effects of one op: (kind, resource) pairs and whether it may be speculated."""

    effects: tuple[Effect, ...]
    speculatable: bool


def of_class(op_class: type) -> OpEffects | None:
    """The declared effects of an op class, or None when it declares none (then nothing is assumed)."""
    models = [t for t in op_class.TRAITS if isinstance(t, type) and issubclass(t, EffectModel)]
    if not models:
        return None
    effects = tuple(dict.fromkeys(e for m in models for e in m.effects))
    return OpEffects(effects, all(m.speculatable for m in models))


def table(dialect: type) -> dict[str, OpEffects]:
    """Declared effects by op name, for every op of the dialect that declares them."""
    found = {c.OPERATION_NAME: of_class(c) for c in dialect.operations}
    return {name: effects for name, effects in found.items() if effects is not None}


def writes_cache(op_class: type) -> bool:
    """Whether an op may write contents of a cache; true for an op that declares no effects."""
    declared = of_class(op_class)
    return declared is None or any(e.kind == WRITE and e.resource != MEMORY for e in declared.effects)


_classes: tuple[int, dict[str, Any]] = (0, {})


def class_of(op_name: str) -> Any:
    """The class of a kv op by its name; None for a name outside of the dialect."""
    global _classes
    generation, found = _classes
    if generation != Kv.generation:
        found = {c.OPERATION_NAME: c for c in Kv.operations}
        _classes = (Kv.generation, found)
    return found.get(op_name)


def has(op_name: str, trait: type) -> bool:
    """Whether the op with this name declares a trait; false for a name outside of the dialect."""
    return trait in getattr(class_of(op_name), "TRAITS", ())


def acts_on_scales_only(op_name: str) -> bool:
    """Whether an op reads or writes scales of a cache and nothing else of it."""
    declared = of_class(class_of(op_name))
    touched = {e.resource for e in declared.effects} - {MEMORY} if declared is not None else set()
    return touched == {SCALES}


def tier_one() -> tuple[str, ...]:
    """The names of the fused operations, which are outside of kernels."""
    return tuple(c.OPERATION_NAME for c in Kv.operations if TierOne in c.TRAITS)

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Memory effects of the kv operations.

Each model is named in an op's ``traits``. On MLIR 22.1 Python cannot attach interfaces: the native
library does it from :func:`table`; without it upstream passes leave the kv ops alone, which is safe.

Resources: ``cache`` is the contents of pages and scales; ``table`` the lookup table and the lengths,
which nothing in a kernel writes; ``memory`` everything else. Since no kv op writes ``table``, its
readers are declared without effects: they may be merged, moved and dropped like arithmetic.
"""

from typing import NamedTuple

READ, WRITE, ALLOCATE, FREE = "read", "write", "allocate", "free"
CACHE, MEMORY = "cache", "memory"


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
    """No effect, and safe to run where the program would not have: may be merged, hoisted, dropped."""

    speculatable = True


class ReadsCache(EffectModel):
    """Reads cache contents: dropped when unused, merged when no write lies between, never speculated."""

    effects = (Effect(READ, CACHE),)


class WritesCache(EffectModel):
    """Writes cache contents."""

    effects = (Effect(WRITE, CACHE),)


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
    """Allocates shared memory: each execution is its own block, so equal ones are not merged."""

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
    declared = of_class(op_class)
    return declared is not None and Effect(WRITE, CACHE) in declared.effects

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes heads of new tokens: queries to their output, keys and values to a cache.

Heads are normalised, rotated, converted or quantized on the way, by threads that share a token's heads. The kernel
provides the heads: from buffers (kv.rope_append), or from products (kv.project_append).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarn import dsl as kv
from kvarn.dialect.layout import CacheSpec, align_up

from ..common import CachedHead, Group, NormalHead, Rows, converted, inverse_rms, single
from ..rope.rotation import Angles, RotatedHead, Rotation
from .quantize import Quantizer


@dataclass(frozen=True)
class TokenItems:
    """The items of a token (see ``common.Work``): of its query heads, then its key heads, then its value heads.

    ``query``, ``key`` and ``value`` are items per head; the items of each kind start at a multiple of ``multiple``.
    """

    query: int
    key: int
    value: int
    query_heads: int
    heads: int
    multiple: int

    @property
    def first_key(self) -> int:
        return align_up(self.query_heads * self.query, self.multiple)

    @property
    def first_value(self) -> int:
        return self.first_key + align_up(self.heads * self.key, self.multiple)

    @property
    def all(self) -> int:
        return self.first_value + align_up(self.heads * self.value, self.multiple)


@dataclass(frozen=True)
class Norm:
    """RMS norm of a head before its rotation, by a group of threads; ``eps`` None means no norm."""

    eps: float | None
    size: int
    rows: Rows
    group: Group
    weight_offset: float = 0.0

    @kv.func
    def of(self, head: Any, gamma: Any, lane: Any) -> Any:
        """A head, normalised if there is an eps. Every thread of a warp must call it."""
        if self.eps is None:
            return head
        scale = inverse_rms(head, self.size, self.rows.width, self.eps, self.group, lane)
        return NormalHead(head, scale, gamma, self.rows, self.weight_offset)

    @kv.func
    def of_vectors(self, vectors: list[Any], dims: list[Any], counts: Any, gamma: Any) -> list[Any]:
        """A thread's vectors of a head, from ``dims`` up, normalised; ``counts``: whether it has any."""
        if self.eps is None:
            return vectors
        return self.by(vectors, self.weights(dims, gamma, len(vectors[0])), counts)

    @kv.func
    def weights(self, dims: list[Any], gamma: Any, width: int) -> list[Any]:
        """The factors of vectors of ``width`` elements from ``dims`` up."""
        weights = [kv.f32(self.rows.load(gamma, d, width=width)) for d in dims]
        return [w + self.weight_offset for w in weights] if self.weight_offset else weights

    @kv.func
    def by(self, vectors: list[Any], weights: list[Any], counts: Any) -> list[Any]:
        """A thread's vectors of a head, normalised, times weights; ``counts``: whether it has any."""
        total = kv.f32(0.0)
        for x in kv.static(vectors):
            total = total + (x * x).reduce("add")
        mean = self.group.sum(kv.where(counts, total, 0.0)) * (1.0 / self.size)
        scale = kv.math.rsqrt(mean + self.eps)
        return [x * scale * w for x, w in zip(vectors, weights, strict=True)]


@kv.func
def rotate(rotation: Rotation, first: Any, step: int, angles: Angles, source: Any, target: Any) -> None:
    """Rotate every ``step``-th unit of a head from the first up."""
    if step == rotation.units:
        rotation.unit(first, angles, source.read, target.write)
    else:
        for unit in range(first, rotation.units, step):
            rotation.unit(unit, angles, source.read, target.write)


@dataclass(frozen=True)
class LoadedAngles:
    """The (cosines, sines) of one unit, loaded ahead of their use."""

    found: tuple[Any, Any]

    @kv.func
    def of(self, pair: Any, n: int) -> tuple[Any, Any]:
        """The loaded (cosines, sines)."""
        return self.found


@dataclass(frozen=True)
class HeadWriter:
    """Writes heads by items; every thread of a warp must call it, and threads that are not ``active`` write nothing.

    Attributes
    ----------
    spec : CacheSpec
        The spec of the cache.
    rotations : (Rotation, Rotation)
        The rotations of queries and of keys.
    norms : (Norm, Norm)
    quantizer : Quantizer or None
        None for a cache without scales.
    """

    spec: CacheSpec
    items: TokenItems
    rows: Rows
    rotations: tuple[Rotation, Rotation]
    norms: tuple[Norm, Norm]
    quantizer: Quantizer | None

    @kv.func
    def angles_of(self, kind: str, angles: Angles, part: Any) -> Any:
        """Angles for an item of a head, loaded now if it has at most one unit."""
        rotation, per_head = self.rotations[kind != "query"], self.items.query if kind == "query" else self.items.key
        ahead = rotation.paired and rotation.rotated_units and rotation.units <= per_head
        if kind == "key" and self.quantizer is not None and self.quantizer.chunks == 1 and self.quantizer.in_registers:
            return LoadedAngles(rotation.angles_of_chunk(self.quantizer.first(part), self.quantizer.width, angles))
        if kind == "value" or not ahead or (kind == "key" and self.quantizer is not None):
            return angles
        return LoadedAngles(rotation.angles_of(kv.math.min(part, rotation.units - 1), angles))

    def plain(self, kind: str) -> bool:
        """Whether heads of a kind are neither normalised nor quantized."""
        return (kind == "query" or self.quantizer is None) and (kind == "value" or self.norms[0].eps is None)

    def by_vectors(self, kind: str) -> bool:
        """Whether an item is a unit of a normalised head, whose two vectors a thread loads once."""
        rotation, per_head = self.rotations[kind != "query"], getattr(self.items, kind)
        whole = rotation.paired and rotation.units <= per_head
        return (
            kind != "value" and self.norms[0].eps is not None and whole and (kind == "query" or self.quantizer is None)
        )

    @kv.func
    def weights(self, kind: str, gamma: Any, part: Any) -> Any:
        """The norm's factors of an item's elements, loaded now; None if they are loaded later."""
        if not self.by_vectors(kind):
            return None
        which = kind != "query"
        rotation = self.rotations[which]
        return self.norms[which].weights(rotation.starts(kv.math.min(part, rotation.units - 1)), gamma, rotation.width)

    @kv.func
    def normal_unit(
        self, which: int, head: Any, target: Any, angles: Any, part: Any, active: Any, weights: Any
    ) -> None:
        """Normalise, rotate and write a unit of a head, whose weights are loaded."""
        rotation = self.rotations[which]
        number = kv.math.min(part, rotation.units - 1)
        has = part < rotation.units
        vectors = [head.read(d, rotation.width) for d in rotation.starts(number)]
        vectors = self.norms[which].by(vectors, weights, has)
        rotated = rotation.rotate(number, rotation.angles_of(number, angles), vectors)
        if active & has:
            rotation.put(number, rotated, target.write)

    @kv.func
    def query(
        self, head: Any, target: Any, angles: Angles, gamma: Any, part: Any, active: Any, weights: Any = None
    ) -> None:
        """Write an item of a query's head to ``target``; ``weights`` is the result of :meth:`weights`."""
        if weights is not None:
            self.normal_unit(0, head, target, angles, part, active, weights)
            return
        head = self.norms[0].of(head, gamma, part)
        if active:
            rotate(self.rotations[0], part, self.items.query, angles, head, target)

    @kv.func
    def key(
        self, head: Any, target: CachedHead, angles: Angles, gamma: Any, part: Any, active: Any, weights: Any = None
    ) -> None:
        """Write an item of a key's head to the cache; ``weights`` is the result of :meth:`weights`."""
        if weights is not None:
            self.normal_unit(1, head, target, angles, part, active, weights)
            return
        head = self.norms[1].of(head, gamma, part % self.norms[1].group.lanes)
        if self.quantizer is None:
            if active:
                rotate(self.rotations[1], part, self.items.key, angles, head, target)
        else:
            rotated = RotatedHead(self.rotations[1], angles, head)
            self.quantize(rotated.read, target, part, active)

    @kv.func
    def value(self, head: Any, target: CachedHead, part: Any, active: Any) -> None:
        """Write an item of a value's head to the cache."""
        if self.quantizer is None:
            if active:
                d = part * self.rows.width
                x = converted(head.load(d, self.rows.width), self.spec.dtype)
                target.cache.store(target.b, target.head, target.position, d, single(x), page=target.page)
        else:
            self.quantize(head.read, target, part, active)

    @kv.func
    def quantize(self, read: Any, target: CachedHead, part: Any, active: Any) -> None:
        """Write an item of a head, whose elements ``read`` gives, to a cache with scales."""
        held = self.quantizer.read(read, part)
        self.quantizer.write(target.cache, target.b, target.head, target.position, part, active, held, read)

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What each target can do, for passes and the compiler; facts about its chip are in ``dialect/chips.py``.

``isa`` is the lowest PTX version of the target itself; instructions that need a later one are in ``ISA_MARKS``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvarn.dialect.chips import CHIPS, RESERVED_BYTES, Chip


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes
    ----------
    name : str
        ``"sm_90a"`` or ``"host"``.
    sm : int
        Compute capability times ten; 0 for the host.
    isa : tuple of int
        Lowest PTX ISA version for the chip.
    features : frozenset of str
        ``cp_async``, ``mma_bf16``, ``f8_convert``, ``tma``, ``wgmma``, ``mbarrier``, ``cluster``, ``pdl``, ``gather4``,
        ``pair_cta``.
    """

    name: str
    sm: int
    isa: tuple[int, int] = (0, 0)
    features: frozenset[str] = field(default_factory=frozenset)

    @property
    def is_host(self) -> bool:
        return self.sm == 0

    @property
    def chip(self) -> Chip:
        """A GPU's chip: what its multiprocessors can hold, and how many there are."""
        return CHIPS[self.sm]

    @property
    def shared_bytes(self) -> int:
        """Largest dynamic shared memory of a block; 0 for the host."""
        return 0 if self.is_host else self.chip.shared_bytes

    def has(self, feature: str) -> bool:
        return feature in self.features

    def blocks_of(self, shared_bytes: int) -> int:
        """Blocks with this much shared memory that fit a multiprocessor."""
        return (self.shared_bytes + RESERVED_BYTES) // (shared_bytes + RESERVED_BYTES)

    def shared_bytes_of(self, blocks: int) -> int:
        """Shared memory for each of ``blocks`` blocks that share a multiprocessor."""
        return (self.shared_bytes + RESERVED_BYTES) // blocks - RESERVED_BYTES


_AMPERE = frozenset({"cp_async", "mma_bf16"})
_HOPPER = _AMPERE | {"f8_convert", "tma", "mbarrier", "cluster", "pdl"}

TARGETS = {
    t.name: t
    for t in (
        Target("host", 0),
        Target("sm_80", 80, (7, 0), _AMPERE),
        Target("sm_86", 86, (7, 1), _AMPERE),
        Target("sm_89", 89, (7, 8), _AMPERE | {"f8_convert"}),
        Target("sm_90", 90, (7, 8), _HOPPER),
        Target("sm_90a", 90, (8, 0), _HOPPER | {"wgmma"}),
        Target("sm_100a", 100, (8, 6), _HOPPER | {"gather4", "pair_cta"}),
    )
}


def by_name(name: str | Target) -> Target:
    """The target with a name; ValueError with the known names otherwise."""
    if isinstance(name, Target):
        return name
    if name not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]


def of_capability(major: int, minor: int) -> Target:
    """The best target for a device's compute capability; ValueError below 8.0."""
    sm = 10 * major + minor
    exact = [t for t in TARGETS.values() if t.sm == sm]
    if exact:
        return exact[-1]  # the architecture-specific form, if there is one
    older = [t for t in TARGETS.values() if not t.is_host and t.sm < sm and not t.name.endswith("a")]
    if not older:
        raise ValueError(f"the device must have compute capability 8.0 or later, got {major}.{minor}")
    return max(older, key=lambda t: t.sm)


# Instructions that need a later PTX ISA than the chip itself, by a text that identifies them in the PTX.
ISA_MARKS = (
    ("cvt.rn.f16x2.e4m3x2", (7, 8)),
    ("cvt.rn.satfinite.e4m3x2", (7, 8)),
    ("ld.global.L2::evict", (7, 4)),
    (".L2::cache_hint", (7, 4)),
    ("tensormap.", (8, 3)),
    (".tile::gather4", (8, 6)),
    (".cta_group::", (8, 6)),
    ("prefetch.tensormap", (8, 0)),
    ("mbarrier.expect_tx", (8, 0)),
    ("griddepcontrol", (7, 8)),
    ("movmatrix.", (7, 8)),
    ("stmatrix.", (7, 8)),
    ("mbarrier.try_wait", (7, 8)),
    ("elect.sync", (8, 0)),
    ("cp.async.bulk", (8, 0)),
    ("fence.mbarrier_init", (8, 0)),
    ("fence.proxy.async", (8, 0)),
    ("setmaxnreg.", (8, 0)),
    ("wgmma.", (8, 0)),
)

# The same for features that an older chip got in a later ISA: (chip, mark, PTX ISA).
LATER_ISA_MARKS = (("sm_89", "e4m3x2", (8, 1)), ("sm_89", "e5m2x2", (8, 1)))

# Ops on which LLVM ends the process if it has no instruction for them: (lowest chip, PTX ISA).
OP_NEEDS = {
    "nvvm.cluster.arrive": ("sm_90", (7, 8)),
    "nvvm.cluster.arrive.relaxed": ("sm_90", (8, 0)),
    "nvvm.cluster.wait": ("sm_90", (7, 8)),
    "nvvm.elect.sync": ("sm_90", (8, 0)),
    "nvvm.fence.mbarrier.init": ("sm_90", (8, 0)),
    "nvvm.fence.proxy": ("sm_90", (8, 0)),
    "nvvm.griddepcontrol": ("sm_90", (7, 8)),
    "nvvm.setmaxregister": ("sm_90a", (8, 0)),
}


def runs(target: Target, chip: str) -> bool:
    """Whether a target has a chip's instructions; those of an "a" chip only if the target has them."""
    return target.sm >= int(chip[3:].rstrip("a")) and (not chip.endswith("a") or target.name.endswith("a"))

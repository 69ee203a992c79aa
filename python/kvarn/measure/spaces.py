# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The search spaces of ``kvarn tune``: the schedules of a case, by the kind of its kernel.

A space has the built-in schedule, the variations of one group of entries at a time, and a predicate for legal
schedules, which is the compiler's.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvarn.dialect import schedules
from kvarn.dialect.chips import REGISTERS
from kvarn.lowering.kernels.attention.case import Case
from kvarn.lowering.schedules import attention as tile_schedule, decode as decode_schedule, decode_table, tuned
from kvarn.lowering.schedules.limits import TRIED_REGISTERS
from kvarn.lowering.schedules.tables import measured
from kvarn.lowering.target import Target

Schedule = dict[str, int]


class Space(Protocol):
    """The schedules of one case."""

    kind: str
    groups: int

    def start(self, target: Target) -> Schedule:
        """The built-in schedule."""
        ...

    def fits(self, schedule: Mapping[str, int], target: Target) -> bool:
        """Whether a schedule is legal and promising."""
        ...

    def variations(self, best: Mapping[str, int], group: int) -> Iterator[Schedule]:
        """The variations of one step of the search, from the best schedule so far."""
        ...

    def problems(self, target: Target) -> list[str]:
        """The reasons why the kernel does not take the case, one sentence each."""
        ...

    def key(self, target: Target) -> tuned.Key | tuned.TileKey:
        """The key of the case in the table."""
        ...


def _product(best: Mapping[str, int], axes: Mapping[str, Sequence[int]]) -> Iterator[Schedule]:
    for values in itertools.product(*axes.values()):
        yield {**best, **dict(zip(axes, values, strict=True))}


@dataclass(frozen=True)
class DecodeSpace:
    """Decode: the pipeline, the tile and the warps, the combine."""

    config: decode_schedule.DecodeConfig
    kind = "decode"
    groups = 3

    def start(self, target: Target) -> Schedule:
        return {"min_tiles": self.config.min_tiles, **decode_table.entries(target, self.config)}

    def fits(self, schedule: Mapping[str, int], target: Target) -> bool:
        """Legal, and its blocks fit in a multiprocessor's memory and registers."""
        c = self.config
        full = {**schedule, "kind": "decode", "max_queries": c.max_queries, "max_batch": c.max_batch}
        if schedules.why_unsupported("kv.attention", full, target, "decode", c) is not None:
            return False
        warps, blocks = schedule["warps"], schedule["blocks"]
        block = decode_schedule.block_bytes(dataclasses.replace(c, **schedule))
        return block * blocks <= target.shared_bytes and REGISTERS // (blocks * warps * 32) >= TRIED_REGISTERS

    def variations(self, best: Mapping[str, int], group: int) -> Iterator[Schedule]:
        few = self.config.max_batch <= 16
        axes: dict[str, Sequence[int]]
        if group == 0:
            axes = {"stages": (2, 3, 4), "blocks": (1, 2, 3, 4)}
        elif group == 1:
            axes = {"tile": (16, 32, 64), "warps": (2, 4, 8), "blocks": sorted({1, 2, best["blocks"]})}
        elif few:
            axes = {"combine": (0, 8, 16), "min_tiles": (2, 4, 8)}
        else:
            axes = {"combine": (0, 8)}
        return _product(best, axes)

    def problems(self, target: Target) -> list[str]:
        c = self.config
        return decode_schedule.problems(c.case, c.max_queries, target, c.max_batch)

    def key(self, target: Target) -> tuned.Key:
        return tuned.Key.of(target.name, self.config)


@dataclass(frozen=True)
class TileSpace:
    """Prefill over tiles: extents and stages, producers and overlap, splits of the keys.

    ``queries`` is the bound of new tokens in a call of the case; 0: none.
    """

    case: Case
    queries: int = 0
    kind = "tile"
    groups = 3

    def _given(self) -> dict[str, int]:
        return {"max_queries": self.queries} if self.queries else {}

    @property
    def _has_few_rows(self) -> bool:
        """Whether no sequence's rows fill half a tile of a warpgroup."""
        return 0 < 2 * self.queries * self.case.group <= tile_schedule.WARPGROUP_ROWS

    def start(self, target: Target) -> Schedule:
        return tile_schedule.chosen(self.case, target, self._given()).entries()

    def fits(self, schedule: Mapping[str, Any], target: Target) -> bool:
        full = {**schedule, **self._given(), "kind": "tile"}
        if schedules.why_unsupported("kv.attention", full, target, "tile", self.case) is not None:
            return False
        return tile_schedule.why_not(tile_schedule.TileConfig(self.case, **schedule), target) is None

    def variations(self, best: Mapping[str, int], group: int) -> Iterator[Schedule]:
        if group == 0:
            keys = sorted({32, 48, 64, 80, 96, 112, 128, 144, 160, 176, best["keys"]})
            rows = [n for n in schedules.ROWS.choices if n >= tile_schedule.WARPGROUP_ROWS or self._has_few_rows]
            return self._of_extents(best, {"rows": rows, "keys": keys, "stages": (1, 2, 3, 4)})
        if group == 1:
            flags = [e.name for e in schedules.TILED.entries if e.type is bool and e is not schedules.SPLIT_COLUMNS]
            axes: dict[str, Sequence[Any]] = {**dict.fromkeys(flags, (False, True)), "query_stages": (1, 2)}
            if tile_schedule.TileConfig(self.case).converts:
                axes |= {"producers": (1, 2, 3), "staging_stages": (2, 4)}
            by_mma = {**best, **tile_schedule.BY_MMA, "keys": min(best["keys"], measured("keys_by_mma"))}
            others = ({**best, "parts": n} for n in (2, 3)), ({**best, "split_columns": True, "rows": 64},)
            return itertools.chain(_product(best, axes), [by_mma | {"producers": 1, "staging_stages": 2}], *others)
        return _product(best, {"splits": (0, 1, 2, 3, 4, 8, 16, 32)})

    def _of_extents(self, best: Mapping[str, int], axes: Mapping[str, Sequence[int]]) -> Iterator[Schedule]:
        """Ping-pong needs several warpgroups, several blocks per multiprocessor a single one; a second tile of query
        rows takes memory from keys, and more producers take registers.
        """
        fewer = {name: sorted({best[name], 1}, reverse=True) for name in ("query_stages", "producers")}
        for found in _product(best, axes):
            found["ping_pong"] = bool(found["ping_pong"]) and found["rows"] > tile_schedule.WARPGROUP_ROWS
            found["overlap"] = bool(found["overlap"]) and found["rows"] >= tile_schedule.WARPGROUP_ROWS
            found["occupancy"] = best["occupancy"] if found["rows"] == 64 else 1
            yield from _product(found, fewer | ({"occupancy": (1, 2)} if found["rows"] == 64 else {}))

    def problems(self, target: Target) -> list[str]:
        found = tile_schedule.problems(self.case, target, 16)
        if not found:
            try:
                self.start(target)
            except ValueError as error:
                found = [f"is none: {error}"]
        return found

    def key(self, target: Target) -> tuned.TileKey:
        return tuned.TileKey.of(target.name, self.case, self.queries)


def known(schedule: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """A hashable identity of a schedule."""
    return tuple(sorted(schedule.items()))

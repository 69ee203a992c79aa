# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Checks of the contents of host tables before a launch: offsets, counts, lengths.

The rules are the ops' (``kvarn.dialect.contents``). The checks of a signature are built once, as functions of a call's
field values, so a call costs a few reductions of short arrays. A failed check names the entry and the operand.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvarn.dialect import layout
from kvarn.dialect.contents import Counts, Lengths, Offsets, Rule, new_tokens
from kvarn.dialect.layout import DENSE, RAGGED, CacheSpec

Values = Sequence[Sequence[Any]]  # the field values of each present operand
Check = Callable[[Values], None]


def checks_of(
    title: str, rules: Sequence[Rule], handles: dict[str, tuple[str, CacheSpec]], names: Sequence[str]
) -> tuple[Check, ...]:
    """The checks of an operation's operands.

    Parameters
    ----------
    title : str
        The operation's name in messages.
    rules : sequence of Rule
    handles : dict
        (kind, spec) of the operands that are caches, collections or attention operands.
    names : sequence of str
        Names of the present operands, in order.
    """
    at = {name: i for i, name in enumerate(names)}
    found: list[Check] = []
    for rule in rules:
        if isinstance(rule, Lengths):
            if rule.handle in handles:
                found.append(_lengths_check(title, rule, at, *handles[rule.handle]))
        elif rule.name in at:
            found.append(
                _offsets_check(title, rule, at) if isinstance(rule, Offsets) else _counts_check(title, rule, at)
            )
    return tuple(found)


def _table(address: int, count: int) -> np.ndarray:
    """Integers in host memory, as int32 [count]."""
    if not count:
        return np.empty(0, np.int32)
    memory: Any = (ctypes.c_int32 * count).from_address(address)
    return np.frombuffer(memory, np.int32)


# --- offsets ---------------------------------------------------------------------------------------


def _offsets_check(title: str, rule: Offsets, at: dict[str, int]) -> Check:
    i, where = at[rule.name], f"{title}: {rule.name}"
    j = at[rule.rows] if rule.rows is not None else None

    def check(values: Values) -> None:
        offsets = _table(values[i][0], values[i][1])
        _ascend(offsets, None if j is None else values[j][1], rule.from_first, where, f"rows of {rule.rows}")

    return check


def _ascend(offsets: np.ndarray, rows: int | None, from_first: bool, where: str, rows_are: str) -> None:
    """Check that offsets are non-negative, do not descend, and end within the rows."""
    first, last = offsets[0], offsets[-1]
    if first < 0 or (offsets[1:] < offsets[:-1]).any():
        if first < 0:
            raise ValueError(f"{where} must not be negative, got {first} (as int32) at index 0")
        b = int(np.flatnonzero(offsets[1:] < offsets[:-1])[0])
        raise ValueError(
            f"{where} must not descend, got {offsets[b + 1]} (as int32) after {offsets[b]} at index {b + 1}"
        )
    if rows is not None and (last - first if from_first else last) > rows:
        if from_first:
            raise ValueError(f"{where} must span at most the {rows} {rows_are}, got {last - first} from {first} on")
        raise ValueError(f"{where} must end within the {rows} {rows_are}, got {last}")


# --- counts ----------------------------------------------------------------------------------------


def _counts_check(title: str, rule: Counts, at: dict[str, int]) -> Check:
    i, where = at[rule.name], f"{title}: {rule.name}"
    extents = [(at[name], 1 + dim) for name, dim in rule.most]

    def check(values: Values) -> None:
        counts = _table(values[i][0], values[i][1])
        most = math.prod(values[j][k] for j, k in extents) if extents else layout.MAX_TOKENS
        _fit(counts, min(most, layout.MAX_TOKENS), where)

    return check


def _fit(counts: np.ndarray, most: int, where: str) -> None:
    """Check that counts are in [0, most]."""
    unsigned = counts.view(np.uint32)
    if counts.size and unsigned.max() > most:
        b = int(np.flatnonzero(unsigned > most)[0])
        raise ValueError(f"{where} must be in [0, {most}], got {counts[b]} (as int32) at index {b}")


# --- lengths ---------------------------------------------------------------------------------------


def _lengths_check(title: str, rule: Lengths, at: dict[str, int], kind: str, spec: CacheSpec) -> Check:
    handle = at[rule.handle]
    field = {f.name: i for i, f in enumerate(layout.HANDLE_FIELDS[kind](spec))}
    if spec.kind in (DENSE, RAGGED):
        return _operand_check(f"{title}: {rule.handle}", spec, handle, field)
    lengths_at, batch_at, columns_at, slots_at = (field[n] for n in ("lengths", "batch", "lookup_columns", "capacity"))
    given = new_tokens(rule, at)
    new_at = None if given is None else at[given]
    first_at = None if rule.first is None else at[rule.first]
    are_offsets = given is not None and given.endswith("offsets")

    def check(values: Values) -> None:
        fields = values[handle]
        total = lengths = _table(fields[lengths_at], fields[batch_at]).view(np.uint32)
        first = 0 if first_at is None else values[first_at][0]
        new = None
        if new_at is not None:
            new = _table(values[new_at][0], values[new_at][1])
            if are_offsets:
                new = new[1:] - new[:-1]
            lengths = lengths[first : first + new.size]
            new = new[: lengths.size]
            total = np.add(lengths, new, dtype=np.int64)
        room = layout.token_capacity(spec, fields[columns_at], fields[slots_at])
        if total.size and total.max() > room:
            _refuse(title, rule.handle, lengths, new, first, room)

    return check


def _refuse(title: str, handle: str, lengths: np.ndarray, new: np.ndarray | None, first: int, room: int) -> None:
    """Raise for the first sequence that is too long. Sequences without new tokens are ignored."""
    counted = np.zeros(lengths.size, np.int64) if new is None else new.astype(np.int64)
    wrong = (lengths.astype(np.int64) + counted > room) & (True if new is None else counted > 0)
    for b in np.flatnonzero(wrong)[:1]:
        more = "" if new is None else f" and {counted[b]} new ones"
        raise ValueError(
            f"{title}: {handle} has room for {room} tokens of a sequence, got {lengths[b]} cached{more} of sequence "
            f"{first + b}: correct cache_lengths, or give a lookup_table with more columns (regions with more slots)"
        )


def _operand_check(where: str, spec: CacheSpec, handle: int, field: dict[str, int]) -> Check:
    """The check of the lengths or offsets of a dense or ragged operand."""

    def check_dense(values: Values) -> None:
        fields = values[handle]
        if fields[field["lengths"]]:
            _fit(
                _table(fields[field["lengths"]], fields[field["batch"]]), fields[field["capacity"]], f"{where}.lengths"
            )

    def check_ragged(values: Values) -> None:
        fields = values[handle]
        offsets = _table(fields[field["offsets"]], fields[field["batch"]] + 1)
        _ascend(offsets, fields[field["num_blocks"]], False, f"{where}.offsets", "rows of the buffer")

    return check_dense if spec.kind == DENSE else check_ragged

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels that check the contents of an operation's tables, launched before it on request (``KVARN_CHECK=1``).

The rules are those of ``dialect.contents``, which ``runtime/contents.py`` checks on the host: one kernel per rule, one
thread per entry. A violation ends the kernel with a message that names the operation and the operand.
"""

from __future__ import annotations

from typing import Any

from mlir import ir

from kvarn import dsl as kv
from kvarn.dialect.contents import Counts, Lengths, Offsets, new_tokens
from kvarn.dialect.layout import DENSE, MAX_TOKENS, RAGGED

from ..base import Expansion
from .indices import threads_of


@kv.func
def entry() -> Any:
    """This thread's entry."""
    return kv.block_id.x * kv.block_dim.x + kv.thread_id.x


@kv.func
def at_most(x: Any, bound: Any) -> Any:
    """Whether an entry is in [0, bound]."""
    return kv.u32(x) <= kv.u32(bound)


def offsets_kernel(where: str, from_first: bool) -> Any:
    @kv.kernel
    def check_offsets(offsets, rows: kv.i32):
        i = entry()
        if i < offsets.shape[0]:
            first = offsets[0] if from_first else kv.i32(0)
            kv.device_assert(offsets[i] >= 0, f"{where} must not be negative")
            kv.device_assert(at_most(offsets[i] - first, rows), f"{where} must not exceed the number of rows")
            if i > 0:
                kv.device_assert(offsets[i - 1] <= offsets[i], f"{where} must not descend")

    return check_offsets


def counts_kernel(where: str) -> Any:
    @kv.kernel
    def check_counts(counts, most: kv.i32):
        i = entry()
        if i < counts.shape[0]:
            kv.device_assert(at_most(counts[i], most), f"{where} must not be negative, nor exceed the buffer")

    return check_counts


def lengths_kernel(where: str, are_offsets: bool) -> Any:
    """For a cache or collection; without ``new`` there are no new tokens, and every sequence is checked."""

    @kv.kernel
    def check_lengths(handle, new: kv.Optional[kv.Buffer[kv.i32, 1]], first: kv.i32):
        i = entry()
        sequences = handle.batch_size() - first
        count = kv.i32(0)
        if new is not None:
            sequences = kv.math.min(sequences, new.shape[0] - (1 if are_offsets else 0))
        if i < sequences:
            looked_at = kv.bool(True)
            if new is not None:
                count = new[i + 1] - new[i] if are_offsets else new[i]
                looked_at = count > 0
            length, room = (handle.field("lengths") + (first + i) * 4).load(kv.i32), handle.token_capacity()
            fits = at_most(length, room) & at_most(count, room - length)
            kv.device_assert(fits | ~looked_at, f"{where} must have room for the cached and new tokens of a sequence")

    return check_lengths


def operand_kernel(where: str, kind: str) -> Any:
    """For a dense operand, which may have lengths, or a ragged operand, which has offsets."""

    @kv.kernel
    def check_operand(x):
        i = entry()
        if i < x.batch_size():
            if kind == DENSE:
                lengths = x.field("lengths")
                if lengths.address() != 0:
                    fits = at_most((lengths + i * 4).load(kv.i32), x.field("capacity"))
                    kv.device_assert(fits, f"{where} must have lengths within its sequences")
            else:
                first = (x.field("offsets") + i * 4).load(kv.i32)
                end = (x.field("offsets") + (i + 1) * 4).load(kv.i32)
                fits = at_most(first, end) & at_most(end, x.field("num_blocks"))
                kv.device_assert(fits, f"{where} must have offsets that do not descend and end within its rows")

    return check_operand


def launch_checks(op: Any, at: Expansion) -> None:
    """Launch one kernel per rule of an operation."""
    name = op.operation.name
    for rule in getattr(type(op), "contents", ()):
        checked = getattr(op, rule.handle if isinstance(rule, Lengths) else rule.name)
        if checked is None:
            continue
        if isinstance(rule, Lengths):
            _launch_lengths(op, at, rule, f"{name}: {rule.handle}")
        elif isinstance(rule, Offsets):
            rows = at.constant(2**31 - 1) if rule.rows is None else at.dim(getattr(op, rule.rows), 0)
            _launch(at, offsets_kernel(f"{name}: {rule.name}", rule.from_first), at.dim(checked, 0), [checked, rows])
        else:
            _launch(at, counts_kernel(f"{name}: {rule.name}"), at.dim(checked, 0), [checked, _most(op, at, rule)])


def _most(op: Any, at: Expansion, rule: Counts) -> Any:
    most = at.constant(1)
    for name, dim in rule.most:
        most = most * at.dim(getattr(op, name), dim)
    return most.least(MAX_TOKENS) if rule.most else at.constant(MAX_TOKENS)


def _launch_lengths(op: Any, at: Expansion, rule: Lengths, where: str) -> None:
    handle = getattr(op, rule.handle)
    if isinstance(handle.type, ir.MemRefType):
        return  # pages of another library, whose lengths are a separate operand
    kind, sequences = at.spec(handle).kind, at.field(handle, "batch")
    if kind in (DENSE, RAGGED):
        _launch(at, operand_kernel(where, kind), sequences, [handle])
        return
    there = {n: 0 for n in rule.new if getattr(op, n) is not None}
    given = new_tokens(rule, there)
    new = None if given is None else getattr(op, given)
    first = at.constant(0) if rule.first is None else getattr(op, rule.first)
    are_offsets = given is not None and given.endswith("offsets")
    _launch(at, lengths_kernel(where, are_offsets), sequences, [handle, new, first])


def _launch(at: Expansion, kernel: Any, entries: Any, args: list[Any]) -> None:
    threads = threads_of(at)
    at.launch(kernel, args, ((entries + (threads - 1)) // threads, 1, 1), (threads, 1, 1), key=kernel.name)

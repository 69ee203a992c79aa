# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rules for the contents of an operation's tables: offsets ascend, counts and lengths fit their buffers.

A fused operation lists these rules in its class attribute ``contents``. The host checks them before a launch
(``kvarn.contents``); a GPU checks them on request, in kernels that run before the op's own
(``lowering/kernels/tables/contents.py``). Memory safety does not depend on them: kernels stay inside their memory
whatever their tables contain.

    class AppendOp(Kv.Operation, name="append", ...):
        contents = (Offsets("row_offsets", "key"), Lengths("collection", "row_offsets"))
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Offsets:
    """The operand ``name`` [n + 1] contains row offsets: not negative, not descending, at most the rows of ``rows``.

    With ``rows`` None the number of rows is not checked. With ``from_first``, row 0 of the buffer is the row that the
    first offset names.
    """

    name: str
    rows: str | None = None
    from_first: bool = False


@dataclass(frozen=True)
class Counts:
    """The operand ``name`` [n] contains counts: not negative, at most the product of extents (buffer, dimension)."""

    name: str
    most: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Lengths:
    """Cached and new tokens of a sequence fit its row of the lookup table, or its region, in the operand ``handle``.

    ``new`` names the offsets or counts of new tokens; of several names, the first operand that is present counts.
    Sequences without new tokens are not checked. An empty ``new`` means that the op adds no tokens. ``first`` names the
    operand with the number of the first sequence that ``new`` covers. A dense or ragged operand is checked by its own
    lengths or offsets, which count all tokens.
    """

    handle: str
    new: tuple[str, ...] = ()
    first: str | None = None


Rule = Offsets | Counts | Lengths


def new_tokens(rule: Lengths, there: dict[str, int]) -> str | None:
    """The operand with the number of new tokens, among those that are present; None without one."""
    return next((n for n in rule.new if n in there), None)

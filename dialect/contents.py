# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What must hold of the contents of an operation's tables: offsets that ascend, counts and lengths that fit.

A tier-1 op lists these rules in its class attribute ``contents``. On the host they are checked before a launch
(``kvarn.contents``), on a GPU on request by kernels that run before the op's own
(``lowering/kernels/tables/contents.py``). Nothing depends on them for safety: kernels stay inside their memory whatever
their tables hold.

    class AppendOp(Kv.Operation, name="append", ...):
        contents = (Offsets("row_offsets", "key"), Lengths("collection", "row_offsets"))
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Offsets:
    """The operand ``name`` [n + 1] holds row offsets: not negative, not descending, at most the rows of ``rows``.

    ``rows`` None: how many rows there are is not known. ``from_first``: row 0 is the one of the first offset.
    """

    name: str
    rows: str | None = None
    from_first: bool = False


@dataclass(frozen=True)
class Counts:
    """The operand ``name`` [n] holds counts: not negative, at most the product of some extents, (buffer, dimension)."""

    name: str
    most: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Lengths:
    """Cached and new tokens of a sequence fit its row of the lookup table, or its region, of the operand ``handle``.

    ``new`` names offsets or counts of new tokens, or several of which the first that is there counts; empty: there are
    none. Sequences without new tokens are then not looked at. ``first`` names the number of the first sequence that
    ``new`` speaks of. Of dense and ragged operands their own lengths or offsets are meant, which count all tokens.
    """

    handle: str
    new: tuple[str, ...] = ()
    first: str | None = None


Rule = Offsets | Counts | Lengths


def new_tokens(rule: Lengths, there: dict[str, int]) -> str | None:
    """Which operand says how many new tokens there are, of those that are there."""
    return next((n for n in rule.new if n in there), None)

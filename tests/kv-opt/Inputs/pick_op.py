# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An extension with an operation that has a list of operands and an optional one."""

from collections.abc import Sequence

from kvarn.dialect.base import Kv
from kvarn.dialect.effects import Pure
from kvarn.dialect.ext import F32, I32, Operand, Result


class PickOp(Kv.Operation, name="pick", traits=[Pure]):
    """One of some numbers, or ``otherwise``."""

    number: Operand[I32]
    choices: Sequence[Operand[I32]]
    otherwise: Operand[F32] | None = None
    out: Result[I32]

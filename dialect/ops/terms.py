# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles as sums of two 8-bit terms, for products with 8-bit tiles that are not converted."""

from typing import Any

from mlir import ir

from .. import verify
from ..base import Kv
from ..effects import Pure
from ..ext import I32, Operand, Result
from ..layout import align_up
from .common import as_i32
from .tile import BYTE_STEP, tile_of, tile_type


class TileTermsOp(Kv.Operation, name="tile_terms", traits=[Pure]):
    """A bf16 tile as the sum of two f8e4m3 terms, stored side by side, times one power of two per row.

    ``source[i, j] = powers[i] * (terms[i, j] + terms[i, K + j])``. This is exact except for elements below 2^-9 of the
    row's largest, whose error is 2^-17 of it. Columns past the source's are zeros; an optional ``shift`` of 0 or 8
    moves the source's columns up and puts zeros before them. A product of ``terms`` with K columns is the sum of both
    products (``kv.dot``). The source is a loaded tile in shared memory with no other use, and the terms overwrite it.
    GPUs only. Results: tensor<M x 2K x f8E4M3FN>, K the columns rounded up to 32; tensor<Mxf32>.
    """

    source: Operand[Any]
    shift: Operand[I32] | None = None
    terms: Result[Any]
    powers: Result[Any]

    def verify_invariants(self) -> bool:
        source = tile_of(self.source)
        if source is None or source.rank != 2 or str(source.element_type) != "bf16":
            return verify.fail(self, f"the operand must be a tile of rank 2 of bf16, got {self.source.type}")
        terms, powers = (tile_of(x) for x in self.operation.results)
        (m, n), eight = source.shape, "f8E4M3FN"
        wanted = [m, 2 * columns_of_term(n)]
        if terms is None or list(terms.shape) != wanted or str(terms.element_type) != eight:
            got = self.operation.results[0].type
            return verify.fail(self, f"the terms must be {wanted[0]} x {wanted[1]} x {eight}, got {got}")
        if powers is None or list(powers.shape) != [m] or str(powers.element_type) != "f32":
            return verify.fail(self, f"the powers must be {m} x f32, got {self.operation.results[1].type}")
        return True


def columns_of_term(columns: int) -> int:
    """Columns of each of the two terms of a tile with ``columns`` columns."""
    return align_up(columns, BYTE_STEP)


def tile_terms(source: ir.Value, shift: Any = None) -> tuple[ir.Value, ir.Value]:
    """(both terms side by side, one power of two per row) of a bf16 tile."""
    rows, columns = ir.RankedTensorType(source.type).shape
    terms = tile_type([rows, 2 * columns_of_term(columns)], ir.Float8E4M3FNType.get())
    powers = tile_type([rows], ir.F32Type.get())
    shift = None if shift is None else as_i32(shift)
    terms, powers = TileTermsOp(source, terms, powers, shift=shift).operation.results
    return terms, powers

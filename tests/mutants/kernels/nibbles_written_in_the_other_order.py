# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Append writes the odd element of a byte to its low half, as some libraries do: every reader swaps neighbours."""

SYMBOL = "kvarn.lowering.kernels.append.quantize:Quantizer.packed"
OLD = "codes[n + i] << 4 * i"
NEW = "codes[n + i] << 4 * (i ^ 1)"
CAUGHT_BY = ("tests/caches/test_record_formats.py::test_append_and_loads_are_those_of_numpy",)

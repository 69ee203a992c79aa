# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Of a divided batch over latent rows, both kernels have the sequences of many new tokens: nobody those of few."""

SYMBOL = "kvarn.lowering.kernels.mla.common:queries_of"
OLD = 'Division(few, c.division == "many")'
NEW = "Division(few, True)"
CAUGHT_BY = ("tests/ops/test_divided_batches.py::test_latent_rows_of_both_classes[fp8, splits]",)

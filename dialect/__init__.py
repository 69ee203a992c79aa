# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kv dialect: types, operations, verifiers, effects and index formulas. Nothing about GPUs.

``kvarn.dialect.dtypes`` and ``kvarn.dialect.layout`` are pure Python; everything else imports MLIR, so this
package imports nothing by itself.
"""

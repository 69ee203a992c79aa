# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of new tokens with a weight, whose columns are queries, keys and values."""

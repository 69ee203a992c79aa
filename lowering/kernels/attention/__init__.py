# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over a cache or operands."""

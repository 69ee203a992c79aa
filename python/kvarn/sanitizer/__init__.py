# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Checks of page ownership at run time."""

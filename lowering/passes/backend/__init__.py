# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Passes from the remaining kv ops to the LLVM dialect, and the records of a kernel's ABI."""

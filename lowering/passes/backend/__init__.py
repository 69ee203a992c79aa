# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Passes from what is left of kv to the LLVM dialect, and what is recorded of a kernel on the way."""

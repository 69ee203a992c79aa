# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compilation of kernels and operations to artifacts: the driver, its disk cache, and extensions."""

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From kernels and operations to artifacts: the driver, its cache on disk, and code from outside."""

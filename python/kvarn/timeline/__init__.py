# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What warps of a launch did when."""

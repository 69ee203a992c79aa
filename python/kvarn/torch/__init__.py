# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kvarn in PyTorch."""

from . import library

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The version, in one place: packaging reads it from this line."""

__version__ = "0.2.0"

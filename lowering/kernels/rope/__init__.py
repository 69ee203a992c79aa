# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rotary embedding and norms."""

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies of tokens out of caches and between caches, and operations on ragged tensors."""

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies of tokens out of caches, between them and beside them."""

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Append of new tokens to a cache, and additions to cached tokens."""

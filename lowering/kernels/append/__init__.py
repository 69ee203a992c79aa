# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""New tokens into a cache, and additions to tokens that it has."""

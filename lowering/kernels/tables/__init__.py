# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tables of a step: offsets, indices, prefixes, and checks of tables' contents."""

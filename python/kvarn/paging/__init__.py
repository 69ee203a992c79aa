# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Management of the pages of a pool: managers, prefixes, drafts, and the inputs of a step."""

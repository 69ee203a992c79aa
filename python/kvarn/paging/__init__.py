# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pages of a pool and who has them: managers, prefixes, drafts and the inputs of a step."""

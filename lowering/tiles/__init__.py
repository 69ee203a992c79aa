# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What passes over tiles share: their IR, layouts, copies, memory and products."""

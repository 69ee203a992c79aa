# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the tile passes share: IR helpers, layouts, copies, memory and products."""

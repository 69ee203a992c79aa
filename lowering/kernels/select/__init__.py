# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Selection of pages and tokens by their scores."""

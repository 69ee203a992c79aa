# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The passes: one per file, whose stem is the pass's name, and nothing else. pipeline.py has their order."""

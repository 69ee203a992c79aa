# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Benchmarks: ``python -m bench`` compares kvarn with other libraries; see ``python -m bench --help``."""

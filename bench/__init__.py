# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Measurements. ``python -m bench`` measures kvarn beside its peers; ``python -m bench --help`` says more."""

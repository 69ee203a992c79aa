# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention of few query rows per sequence, limited by memory bandwidth."""

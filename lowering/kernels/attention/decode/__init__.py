# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention of few query rows a sequence, read at the rate of the memory."""

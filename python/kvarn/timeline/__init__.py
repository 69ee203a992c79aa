# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Timelines of launches: the phases of each warp."""

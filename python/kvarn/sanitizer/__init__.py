# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Accesses checked against who owns the pages."""

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Passes over operations on caches: checks, schedules, expansions, lookups, accesses."""

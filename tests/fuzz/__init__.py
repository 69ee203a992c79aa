# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Fuzzers: mutated kernels for the front end, mutated IR for kv-opt. ``make fuzz`` runs them; no test does.

``python -m fuzz frontend --seconds 600`` in ``tests``. A seed makes the same text each time: what dies becomes a test.
"""

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Planted faults: what the tests must notice, each planted in a copy of the tree by ``make mutants``.

A fault is a file of a folder, which is its area. Its docstring says what the fault changes, ``SYMBOL`` names the
function, class or constant (``module:qualified.name``; of C++ ``path:function``), ``OLD`` stands once in the source of
the symbol, ``NEW`` takes its place, and ``CAUGHT_BY`` names tests of that place, one of which must fail.
"""

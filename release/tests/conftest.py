# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What these tests share with those of tests/: a compile cache of their own."""

from conftest import _private_cache  # noqa: F401

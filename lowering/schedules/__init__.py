# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which kernel does an operation and how its work is divided: what is legal, and what is chosen."""

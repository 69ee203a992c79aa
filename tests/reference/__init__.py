# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the cache operations mean, in NumPy, and random problems to try them on."""

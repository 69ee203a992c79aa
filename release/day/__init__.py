# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a compiler researcher writes on the first day: passes and an operation, as a package with entry points."""

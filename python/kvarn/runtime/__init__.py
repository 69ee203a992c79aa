# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From an artifact to the device: buffer views, loaders, launches. Imports no MLIR but for the CPU JIT."""

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention over latent rows (MLA), and over the decompressed keys of a prefill's chunk."""

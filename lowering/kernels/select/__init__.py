# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Choices: pages and tokens by their scores."""

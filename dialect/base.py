# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kv dialect's class: the base that types and operations are declared on."""

from .ext import Dialect


class Kv(Dialect, name="kv"):
    """KV caches of language models: their types, their accesses and the operations on them."""

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kvarn's attention in vLLM: a plug-in that registers the attention backend CUSTOM.

vLLM calls :func:`register` when an engine starts. ``LLM(..., attention_config={"backend": "CUSTOM"})`` selects the
backend; an engine that does not select it is not changed.
"""

BACKEND = "kvarn_vllm.backend.KvarnBackend"


def register() -> None:
    """Register the backend; it is imported only where it is selected."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rows of the table of architectures: one of each kind of attention; ``python -m pytorch.architectures`` runs all."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed (make check-torch)")
pytest.importorskip("transformers", reason="transformers is not installed (make check-torch)")

from pytorch import architectures

REFUSES_PAGES = {"DiffLlamaForCausalLM", "DeepseekV3ForCausalLM", "DogeForCausalLM"}


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM", "Gemma3ForCausalLM", "Llama4ForCausalLM", "Gemma3nForCausalLM", "GptOssForCausalLM",
        *sorted(REFUSES_PAGES),
    ],
)  # fmt: skip
def test_logits_are_those_of_eager_attention_with_every_cache_and_padding(name):
    row = architectures.in_process(name)
    assert "not built" not in row, row
    for case, (outcome, message) in row.items():
        refused = name in REFUSES_PAGES and case.startswith("paged")
        assert outcome == (architectures.REFUSED if refused else architectures.EQUAL), f"{case}: {message}"


def test_an_outcome_is_what_happened():
    """Logits that differ and errors that are not kvarn's own are told apart from refusals."""
    assert architectures.refuses(NotImplementedError("PagedCache: layers differ: use the model's own cache"))
    assert not architectures.refuses(AttributeError("'Mask' object has no attribute 'contiguous'"))
    assert not architectures.refuses(ValueError("PagedCache: something"))
    died = {f"{c}/{p}": (architectures.DIED, "") for c in architectures.CACHES for p in architectures.PADDINGS}
    assert architectures.counts({"a": died, "b": {"not built": ""}})[architectures.DIED] == 12

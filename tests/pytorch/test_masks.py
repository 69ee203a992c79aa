# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Masks of transformers over keys that a model gives: every mask that transformers makes is what attention computes."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (make check-torch)")

import torch.nn.functional as F  # noqa: E402
from transformers import masking_utils  # noqa: E402

import kvarn.torch.huggingface as kvhf  # noqa: E402
from kvarn.torch.huggingface import masks  # noqa: E402

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
NEAR = {"rtol": 1e-4, "atol": 1e-4}


class Module:
    is_causal = True


def attend(*args: Any, module: Any = Module, **options: Any) -> Any:
    with torch.no_grad():
        return kvhf.attention(module(), *args, **options)[0]


def exact(query: Any, key: Any, value: Any, mask: Any) -> Any:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)


# --- what a mask says --------------------------------------------------------------------------------


TOTAL = 9  # tokens so far, those of the step included
PADDINGS = {
    "none": [], "left": [(0, 0, 3), (1, 0, 1)], "right": [(0, 5, 8), (2, 7, 8)], "middle": [(0, 2, 4), (1, 5, 6)],
    "both": [(0, 0, 3), (0, 5, 6), (2, 1, 2)],
}  # fmt: skip
# Queries, the position of the first key, and slots of a static cache after the last token.
STEPS = {"prompt": (9, 0, 0), "token": (1, 0, 0), "part": (4, 0, 0), "sliding": (2, 4, 0), "one key": (1, 8, 0)}
STATIC = {"static prompt": (9, 0, 3), "static token": (1, 0, 3)}


def function_of(kind: str, there: Any) -> Any:
    """One of transformers' mask functions."""
    left = (there.cumsum(1) == 0).sum(1)
    causal = masking_utils.causal_mask_function
    return {
        "causal": causal,
        "window": masking_utils.sliding_window_causal_mask_function(3),
        "chunk": masking_utils.chunked_causal_mask_function(4, left),
        "all": masking_utils.bidirectional_mask_function,
        "near": masking_utils.sliding_window_bidirectional_mask_function(2),
        "packed": masking_utils.and_masks(causal, masking_utils.packed_sequence_mask_function(there.cumsum(1) // 3)),
        "or": masking_utils.or_masks(causal, masking_utils.blockwise_overlay(there.long() * 2 - 1)),
    }[kind]


@pytest.mark.parametrize("step", [*STEPS, *STATIC])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", ["causal", "window", "chunk", "all", "near", "packed", "or"])
def test_every_mask_that_transformers_makes_is_computed(kind, padding, step):
    torch.manual_seed(0)
    queries, kv_offset, free = {**STEPS, **STATIC}[step]
    keys = TOTAL - kv_offset + free
    there = torch.ones(3, TOTAL + free, dtype=torch.bool)
    there[:, TOTAL:] = False
    for row, first, end in PADDINGS[padding]:
        there[row, first:end] = False
    given: dict[str, Any] = {
        "batch_size": 3, "q_length": queries, "kv_length": keys, "q_offset": TOTAL - queries, "kv_offset": kv_offset,
        "mask_function": function_of(kind, there),
        "attention_mask": None if padding == "none" and not free else there[:, :TOTAL],
    }  # fmt: skip
    mask = masks.mask(**given, allow_is_bidirectional_skip=True)
    whole = masking_utils.sdpa_mask(**given, allow_is_causal_skip=False)
    query, key, value = torch.randn(3, 4, queries, 16), torch.randn(3, 2, keys, 16), torch.randn(3, 2, keys, 16)
    found, expected = attend(query, key, value, mask), exact(query, key, value, whole)
    rows = there[:, TOTAL - queries : TOTAL] & whole[:, 0].any(-1)
    torch.testing.assert_close(found[rows], expected[rows], **NEAR)
    if isinstance(mask, masks.Mask):  # other code gets the tensor
        added = masking_utils.eager_mask(**given)
        assert mask.seen().equal(whole)
        assert mask.tensor().equal(added)
        assert mask[..., :1].equal(added[..., :1])
        assert torch.where(mask == 0, 1, 0).equal(whole.int())
        assert torch.exp(mask).equal(whole.float())
        assert mask.contiguous().shape == whole.shape


def test_a_mask_is_described_where_attention_computes_it_and_a_tensor_elsewhere():
    sizes = {"batch_size": 1, "q_length": 2, "kv_length": 4, "q_offset": 2}
    causal, bidirectional = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
    chunks = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    described: list[tuple[Any, Any]] = [
        (causal, (True, None, None)),
        (masking_utils.sliding_window_causal_mask_function(3), (True, 3, None)),
        (chunks, (True, None, 4)),
    ]
    for function, said in described:
        mask = masks.mask(**sizes, mask_function=function)
        assert isinstance(mask, masks.Mask)
        assert (mask.causal, mask.window, mask.chunk) == said
        assert isinstance(masks.mask(**sizes, mask_function=function, allow_is_causal_skip=False), torch.Tensor)
        assert isinstance(masks.mask(**{**sizes, "q_offset": torch.tensor(2)}, mask_function=function), torch.Tensor)
    assert isinstance(masks.mask(**sizes, mask_function=bidirectional), torch.Tensor)
    skip = masks.mask(**sizes, mask_function=bidirectional, allow_is_bidirectional_skip=True)
    assert isinstance(skip, masks.Mask)
    assert not skip.causal


# --- without a mask, and with sizes of all kinds -----------------------------------------------------


@pytest.mark.parametrize("queries", [1, 3, 5])
@pytest.mark.parametrize("keys", [3, 5, 8])
def test_without_a_mask_the_option_or_the_module_says_whether_it_is_causal_as_for_sdpa(queries, keys):
    torch.manual_seed(0)
    given = torch.randn(2, 4, queries, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 16)
    sdpa = transformers.AttentionInterface()["sdpa"]
    other = type("Other", (), {"is_causal": False})
    for module in (Module, other):
        for option in (None, True, False):
            held = type("Held", (), {"is_causal": module.is_causal, "num_key_value_groups": 2})()
            expected = sdpa(held, *given, None, is_causal=option)[0]
            torch.testing.assert_close(attend(*given, None, module=module, is_causal=option), expected, **NEAR)


def test_values_of_another_size_and_a_bias_of_positions_are_computed():
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 5, 24), torch.randn(2, 4, 5, 24), torch.randn(2, 4, 5, 16)
    bias = torch.randn(1, 4, 5, 5)
    torch.testing.assert_close(attend(query, key, value, None, is_causal=False), exact(query, key, value, None), **NEAR)
    torch.testing.assert_close(
        attend(query, key, value, None, is_causal=False, position_bias=bias), exact(query, key, value, bias), **NEAR
    )
    hidden = bias.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(
        attend(query, key, value, None, position_bias=bias), exact(query, key, value, hidden), **NEAR
    )


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        (torch.ones(2, 5, dtype=torch.bool), {}, "must have the shape"),
        (torch.ones(2, 1, 5, 4, dtype=torch.bool), {}, "must have the shape"),
        (torch.ones(2, 1, 5, 5, dtype=torch.int64), {}, "Tensor of booleans or floats, got torch.int64"),
        ([[1]], {}, "Tensor of booleans or floats, got list"),
        (None, {"block_indices": torch.zeros(1)}, "takes no block_indices"),
        (None, {"sinks": torch.zeros(1)}, "takes no sinks"),
        (None, {"indices": torch.zeros(2, 5, 1)}, "indices need a mask of four dimensions"),
    ],
)
def test_what_is_not_computed_is_refused_with_what_to_use(mask, options, message):
    given = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16)
    with pytest.raises(NotImplementedError, match=f"kvarn: .*{message}.*use attn_implementation"):
        attend(*given, mask, **options)


# --- models ------------------------------------------------------------------------------------------


def both(model: Any, **inputs: Any) -> tuple[Any, Any]:
    """The output of eager attention, and kvarn's."""
    found = []
    for name in ("eager", kvhf.NAME):
        model.eval().set_attn_implementation(name)
        with torch.no_grad():
            out = model(**inputs)
        found.append(out.logits if hasattr(out, "logits") else out.last_hidden_state)
    return found[0], found[1]


def test_towers_and_cross_attention_are_not_causal():
    t = transformers
    torch.manual_seed(0)
    pixels, ids = torch.randn(2, 3, 32, 32), torch.randint(3, 90, (2, 9))
    sizes = {name: value for name, value in SIZES.items() if not name.endswith("_id")}
    image = {**sizes, "image_size": 32, "patch_size": 8}
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    whisper = {
        "vocab_size": 96, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_source_positions": 15,
        "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    }  # fmt: skip
    models: list[tuple[Any, dict[str, Any]]] = [
        (t.CLIPVisionModel(t.CLIPVisionConfig(**image)), {"pixel_values": pixels}),
        (t.SiglipVisionModel(t.SiglipVisionConfig(**image)), {"pixel_values": pixels}),
        (t.DINOv3ViTModel(t.DINOv3ViTConfig(**image)), {"pixel_values": pixels}),
        (t.BertModel(t.BertConfig(**sizes)), {"input_ids": ids, "attention_mask": mask}),
        (t.WhisperForConditionalGeneration(t.WhisperConfig(**whisper)), {
            "input_features": torch.randn(2, 8, 30), "decoder_input_ids": ids}),
    ]  # fmt: skip
    for model, inputs in models:
        expected, found = both(model, **inputs)
        if "attention_mask" in inputs:
            expected, found = expected[mask.bool()], found[mask.bool()]
        torch.testing.assert_close(found, expected, **NEAR, msg=type(model).__name__)


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)).eval()


def prompt() -> tuple[Any, Any]:
    ids = torch.randint(3, 96, (2, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return ids, mask


def test_autocast_of_a_float32_model_computes_as_sdpa_does(llama):
    ids, mask = prompt()
    found = []
    for name in ("sdpa", kvhf.NAME):
        llama.set_attn_implementation(name)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found.append(llama(ids, attention_mask=mask, use_cache=False).logits)
    assert found[0].dtype == found[1].dtype
    torch.testing.assert_close(found[1][mask.bool()], found[0][mask.bool()], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_without_a_cache_is_compiled_and_exported(llama, padded):
    ids, mask = prompt()
    inputs = {"attention_mask": mask} if padded else {}
    expected, _ = both(llama, input_ids=ids, use_cache=False, **inputs)

    class WithoutCache(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama

        def forward(self, ids: Any, attention_mask: Any = None) -> Any:
            return self.model(ids, attention_mask=attention_mask, use_cache=False).logits

    with torch.no_grad():
        graph = torch.compile(WithoutCache(), fullgraph=True, backend="aot_eager")(ids, **inputs)
        exported = torch.export.export(WithoutCache(), (ids,), inputs).module()(ids, **inputs)
    rows = mask.bool() if padded else torch.ones_like(mask).bool()
    for found in (graph, exported):
        torch.testing.assert_close(found[rows], expected[rows], **NEAR)

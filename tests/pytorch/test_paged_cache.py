# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""PagedCache as transformers uses caches: copies, crops, refused steps, padding, and what it is made of."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (make check-torch)")

import kvarn.torch.huggingface as kvhf  # noqa: E402

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
NEAR = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


@pytest.fixture(scope="module")
def gemma() -> Any:
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**SIZES, sliding_window=4, layer_types=kinds)
    return transformers.Gemma3ForCausalLM(config).eval()


def paged(model: Any, batch: int = 2, **options: Any) -> Any:
    model.set_attn_implementation(kvhf.NAME)
    cache = kvhf.PagedCache(model.config, batch, **{"max_length": 48, "page_size": 4, **options})
    cache.blocks.fill_(float("nan"))
    return cache


def tokens(batch: int, count: int, seed: int = 1) -> Any:
    return torch.randint(3, 96, (batch, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def whole(model: Any, ids: Any, mask: Any = None) -> Any:
    """Logits of eager attention over all tokens at once."""
    model.set_attn_implementation("eager")
    return model(ids, attention_mask=mask, use_cache=False).logits


@torch.no_grad()
def step(model: Any, cache: Any, ids: Any, mask: Any = None) -> Any:
    model.set_attn_implementation(kvhf.NAME)
    return model(ids, attention_mask=mask, past_key_values=cache).logits


# --- padding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5, 12])
@pytest.mark.parametrize(
    ("name", "where"), [("llama", "left"), ("gemma", "right"), ("llama", "middle"), ("gemma", "middle")]
)
def test_steps_of_any_size_leave_padding_out_wherever_it_is(name, where, size, request):
    model = request.getfixturevalue(name)
    ids, mask = tokens(3, 12), torch.ones(3, 12, dtype=torch.int64)
    mask[0, {"left": slice(0, 5), "right": slice(9, 12), "middle": slice(4, 7)}[where]] = 0
    mask[1, {"left": slice(0, 1), "right": slice(11, 12), "middle": slice(2, 9)}[where]] = 0
    expected = whole(model, ids, mask)
    cache = paged(model, 3)
    found = [step(model, cache, ids[:, i : i + size], mask[:, : i + size]) for i in range(0, 12, size)]
    torch.testing.assert_close(torch.cat(found, 1)[mask.bool()], expected[mask.bool()], **NEAR)
    assert cache.get_seq_length() == 12
    cache.crop(0)
    assert cache.lengths.tolist() == mask.sum(1).tolist()


def test_a_mask_that_hides_what_is_stored_is_heeded_and_one_that_shows_what_is_not_is_refused(llama):
    ids, mask = tokens(2, 8), torch.ones(2, 8, dtype=torch.int64)
    hides = mask.clone()
    hides[0, 2:4] = 0
    cache = paged(llama)
    step(llama, cache, ids[:, :6], mask[:, :6])
    llama.set_attn_implementation("eager")
    with torch.no_grad():
        own = llama(ids[:, :6], attention_mask=mask[:, :6]).past_key_values
        expected = llama(ids[:, 6:], attention_mask=hides, past_key_values=own).logits
    torch.testing.assert_close(step(llama, cache, ids[:, 6:], hides), expected, **NEAR)
    cache = paged(llama)
    step(llama, cache, ids[:, :6], hides[:, :6])
    for shows in (mask, None):
        with pytest.raises(ValueError, match="which are not stored: pass attention_mask"):
            step(llama, cache, ids[:, 6:], shows)
    assert cache.get_seq_length() == 6
    torch.testing.assert_close(step(llama, cache, ids[:, 6:], hides), whole(llama, ids, hides)[:, 6:], **NEAR)


def test_a_mask_of_four_dimensions_is_read_as_it_is(llama):
    ids = tokens(2, 9)
    for kind in (torch.bool, torch.float32):
        mask = torch.ones(9, 9, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
        mask[0, :, 5:, 2:4] = False
        given = mask if kind == torch.bool else torch.zeros(mask.shape).masked_fill(~mask, -1e9)
        as_floats = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        expected = whole(llama, ids, as_floats)
        cache = paged(llama)
        found = [step(llama, cache, ids[:, :6], given[:, :, :6, :6]), step(llama, cache, ids[:, 6:], given[:, :, 6:])]
        torch.testing.assert_close(torch.cat(found, 1), expected, **NEAR)
        llama.set_attn_implementation(kvhf.NAME)
        with torch.no_grad():
            torch.testing.assert_close(llama(ids, attention_mask=given, use_cache=False).logits, expected, **NEAR)


# --- copies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "before", "name"),
    [(copy.deepcopy, 1, "llama"), (copy.deepcopy, 3, "gemma"), (lambda x: pickle.loads(pickle.dumps(x)), 3, "llama")],
    ids=["deep copy", "deep copy of windows", "pickle"],
)
def test_a_copy_has_pages_of_its_own(name, how, before, request):
    model = request.getfixturevalue(name)
    ids, others = tokens(2, 14), tokens(2, 14, seed=2)
    others[:, : 6 + before] = ids[:, : 6 + before]
    cache = paged(model)
    step(model, cache, ids[:, :6])
    for i in range(6, 6 + before):
        step(model, cache, ids[:, i : i + 1])
    twin = how(cache)
    expected = [whole(model, x) for x in (ids, others)]
    for i in range(6 + before, 14):  # in turns, so that either would spoil the other
        for kept, x, logits in ((cache, ids, expected[0]), (twin, others, expected[1])):
            torch.testing.assert_close(step(model, kept, x[:, i : i + 1])[:, 0], logits[:, i], **NEAR)
    assert twin.blocks.data_ptr() != cache.blocks.data_ptr()


# --- crop ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_what_was_cropped_has_not_been(name, request):
    model = request.getfixturevalue(name)
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :3] = 0
    expected = whole(model, ids, mask)
    cache = paged(model)
    step(model, cache, ids[:, :7], mask[:, :7])
    step(model, cache, tokens(2, 5, seed=3), torch.cat([mask[:, :7], torch.ones(2, 5, dtype=torch.int64)], 1))
    cache.crop(-6)
    assert cache.get_seq_length() == 6
    assert cache.lengths.tolist() == [3, 6]
    found = step(model, cache, ids[:, 6:], mask)
    torch.testing.assert_close(found, expected[:, 6:], **NEAR)
    cache.crop(-12)  # all, padding too
    torch.testing.assert_close(step(model, cache, ids), whole(model, ids), **NEAR)
    for wrong in (1, -13):
        with pytest.raises(ValueError, match="crop takes minus the number of tokens"):
            cache.crop(wrong)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_assisted_search_and_prompt_lookup_give_the_tokens_of_greedy_search(name, request):
    model = request.getfixturevalue(name)
    torch.manual_seed(5)
    assistant = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})).eval()
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    model.set_attn_implementation("eager")
    expected = model.generate(ids, **options)
    for more in (
        {"assistant_model": assistant},
        {"assistant_model": model},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 1},
    ):
        found = model.generate(ids, past_key_values=paged(model, 1), **options, **more)
        assert found.equal(expected), more


# --- refused steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_length": 8}, ValueError, "max_length is 8, got 9"),
        ({"pages": 4}, RuntimeError, "pool of 4 pages is full at 2 pages per sequence"),
    ],
)
def test_after_a_step_that_does_not_fit_one_that_fits_goes_on(llama, options, error, message):
    ids = tokens(2, 9)
    expected = whole(llama, ids)
    cache = paged(llama, **options)
    step(llama, cache, ids[:, :5])
    before = cache.lengths.tolist()
    for _ in range(3):
        with pytest.raises(error, match=message):
            step(llama, cache, ids[:, 5:])
        assert (cache.lengths.tolist(), cache.get_seq_length()) == (before, 5)
    torch.testing.assert_close(step(llama, cache, ids[:, 5:8]), expected[:, 5:8], **NEAR)


def test_a_step_that_fails_in_a_layer_has_not_been(llama, monkeypatch):
    ids = tokens(2, 8)
    expected = whole(llama, ids)
    cache = paged(llama)
    step(llama, cache, ids[:, :5])
    attend = kvhf.PagedLayer.attend
    for layer in (0, 1):

        def fails(self: Any, *args: Any, layer: int = layer) -> Any:
            if self._number == layer:
                raise KeyboardInterrupt
            return attend(self, *args)

        monkeypatch.setattr(kvhf.PagedLayer, "attend", fails)
        with pytest.raises(KeyboardInterrupt):
            step(llama, cache, ids[:, 5:6])
        assert cache.get_seq_length() == 5
    monkeypatch.undo()
    torch.testing.assert_close(step(llama, cache, ids[:, 5:]), expected[:, 5:], **NEAR)


def test_a_padded_step_that_fails_leaves_no_padding(gemma, monkeypatch):
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[0, 1:3] = 0  # within a window's reach, so that positions are looked up
    expected = whole(gemma, ids, mask)
    cache = paged(gemma)
    step(gemma, cache, ids[:, :4], mask[:, :4])
    padded = mask[:, :8].clone()
    padded[1, 4:6] = 0
    monkeypatch.setattr(cache, "_collection", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(gemma, cache, ids[:, 4:8], padded)
    monkeypatch.undo()
    found = [step(gemma, cache, ids[:, a:b], mask[:, :b]) for a, b in ((4, 8), (8, 12))]
    torch.testing.assert_close(torch.cat(found, 1), expected[:, 4:], **NEAR)


def test_gradients_are_refused_and_the_cache_goes_on(llama):
    ids = tokens(2, 6)
    cache = paged(llama)
    with pytest.raises(RuntimeError, match="no derivative"):
        llama(ids, past_key_values=cache)
    torch.testing.assert_close(step(llama, cache, ids), whole(llama, ids), **NEAR)


@pytest.mark.parametrize("name", ["batch_repeat_interleave", "batch_select_indices", "reorder_cache"])
def test_sequences_are_neither_copied_nor_moved(llama, name):
    with pytest.raises(NotImplementedError, match="PagedCache: "):
        getattr(paged(llama), name)(2)


def test_keys_and_values_are_no_tensors_of_a_layer(llama):
    cache = paged(llama)
    for look in (lambda: cache.layers[0].keys, lambda: cache.layers[0].values, lambda: list(cache)):
        with pytest.raises(NotImplementedError, match="are in pages"):
            look()


# --- what a cache is made of -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"granularity": g}, "granularity must be a positive integer") for g in (0, True, 1.5)),
        *(({"pages": p}, "pages must be a positive integer") for p in (-2, "x", True)),
        ({"pages": 1}, "pages must be at least one for each of 2 sequences, got 1"),
        *(({"batch_size": b}, "batch_size must be a positive integer") for b in (True, 0, 2.0, None)),
        *(({"max_length": m}, "max_length must be a positive integer") for m in (0, "8", False)),
        *(({"page_size": p}, "page_size must be a positive integer") for p in (0, 1.0)),
        *(({"dtype": d}, "dtype must be one of torch.float32") for d in ("float16", torch.float64, torch.int8)),
        ({"granularity": 16, "dtype": torch.float16}, "granularity is for the scales of an 8-bit dtype"),
    ],
)
def test_arguments_that_no_cache_has_are_refused_when_it_is_made(options, message):
    given = {"batch_size": 2, "max_length": 16, "dtype": torch.float8_e4m3fn if "granularity" in options else None}
    with pytest.raises((ValueError, TypeError), match=message):
        kvhf.PagedCache(transformers.LlamaConfig(**SIZES), **{**given, **options})


def test_configurations_of_other_layers_are_refused_when_it_is_made():
    t = transformers
    configs = [
        t.MambaConfig(hidden_size=64, num_hidden_layers=2),
        t.JambaConfig(hidden_size=64, num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1),
        t.Gemma4TextConfig(
            hidden_size=64, num_hidden_layers=2, num_kv_shared_layers=0, head_dim=16, global_head_dim=32
        ),
        t.LlamaConfig(**{**SIZES, "dtype": torch.float64}),
    ]
    for config in configs:
        with pytest.raises((ValueError, TypeError), match=r"PagedCache: .* must"):
            kvhf.PagedCache(config, 2, 16)


# --- compiled ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
def test_a_compiled_model_appends_and_attends_to_pages(llama, padded):
    ids, mask = tokens(2, 8), torch.ones(2, 8, dtype=torch.int64)
    mask[0, :3] = 0
    expected, cache = whole(llama, ids, mask if padded else None), paged(llama)
    compiled = torch.compile(llama, backend="aot_eager", fullgraph=not padded)
    with torch.no_grad():
        found = [
            compiled(ids[:, a:b], attention_mask=mask[:, :b] if padded else None, past_key_values=cache).logits
            for a, b in ((0, 5), (5, 6), (6, 7), (7, 8))
        ]
    rows = mask.bool() if padded else torch.ones_like(mask).bool()
    torch.testing.assert_close(torch.cat(found, 1)[rows], expected[rows], **NEAR)


# --- layers that share keys ----------------------------------------------------------------------------


def test_layers_that_share_keys_store_them_once():
    kinds = ["sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 4}, layer_types=kinds, num_kv_shared_layers=2, sliding_window=4,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=96, laurel_rank=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3nForCausalLM(config).eval()
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :4] = 0
    expected, cache = whole(model, ids, mask), paged(model)
    found = [step(model, cache, ids[:, a:b], mask[:, :b]) for a, b in ((0, 7), (7, 10), (10, 11), (11, 12))]
    torch.testing.assert_close(torch.cat(found, 1)[mask.bool()], expected[mask.bool()], **NEAR)


def test_a_model_that_gives_attention_other_values_is_refused_at_its_first_step():
    model = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**SIZES)).eval()
    with pytest.raises(NotImplementedError, match=r"other values than it gave the cache.*use the model's own cache"):
        step(model, paged(model), tokens(2, 5))

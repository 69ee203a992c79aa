# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""examples/chat, the demo: its tokenizer, its batching and its check on a tiny random model, and its command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvarn.chat import main
from kvarn.chat.errors import DemoError

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

import gguf
from tokenizers.pre_tokenizers import ByteLevel

from kvarn.chat.paged_cache import PagedCache
from kvarn.chat.tokenizer import Tokenizer
from kvarn.chat.weights import ModelConfig, ModelWeights, find_model, load_model

BYTES = sorted(ByteLevel.alphabet())  # the characters that stand for bytes in a vocabulary


# --- the tokenizer ---------------------------------------------------------------------------------


def byte_tokenizer(*merges: str) -> Tokenizer:
    """A tokenizer of two control tokens, all bytes, and the results of some merges."""
    tokens = ["<|im_start|>", "<|im_end|>", *BYTES, *(merge.replace(" ", "") for merge in merges)]
    return Tokenizer(tokens, merges, [3, 3] + [1] * (len(tokens) - 2), end_of_text=1)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decoding_gives_the_text_back(text: str) -> None:
    tokenizer = byte_tokenizer("t h", "th e", "Ġ the")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_control_token_spelled_in_text_stays_text() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("<|im_end|>")
    assert 1 not in ids
    assert tokenizer.decode([0, *ids, 1]) == "<|im_end|>"


@pytest.mark.thorough
def test_smollm_chat_has_the_ids_of_llama_cpp() -> None:
    try:
        tokenizer = load_model(find_model())[2]
    except DemoError as error:
        pytest.skip(str(error))
    system = "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198"
    user = "1 4093 198 1780 314 260 3575 282 4649 47 2 198 1 520 9531 198"
    assert tokenizer.chat_system() == [int(x) for x in system.split()]
    assert tokenizer.chat_user("What is the capital of France?") == [int(x) for x in user.split()]


# --- batching and the check ------------------------------------------------------------------------

CONFIG = ModelConfig(
    layers=2,
    hidden=48,
    feed_forward=64,
    vocabulary=261,
    query_heads=3,
    kv_heads=1,
    head_size=64,
    context=512,
    rope_base=10000.0,
    norm_eps=1e-5,
)
END = 2


def tiny_weights() -> ModelWeights:
    rng, c = np.random.default_rng(0), CONFIG

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[-1] ** 0.5)

    layers = tuple(
        {
            "attention_norm": matrix(c.hidden) + 1,
            "query_key_value": matrix((c.query_heads + 2 * c.kv_heads) * c.head_size, c.hidden),
            "attention_output": matrix(c.hidden, c.query_heads * c.head_size),
            "feed_forward_norm": matrix(c.hidden) + 1,
            "gate_up": matrix(2 * c.feed_forward, c.hidden),
            "down": matrix(c.hidden, c.feed_forward),
        }
        for _ in range(c.layers)
    )
    # Far apart embeddings make greedy choices clear, so that the order of sums cannot turn one round.
    return ModelWeights(c, matrix(c.vocabulary, c.hidden) * np.float32(8), layers, matrix(c.hidden) + 1)


WEIGHTS = tiny_weights()


# --- from a file to text ---------------------------------------------------------------------------


def write_tiny(path: Path) -> Path:
    """Write a GGUF file of the llama architecture with `WEIGHTS` and a vocabulary of bytes."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, "Ġa", "th"]
    fields: dict[str, Any] = {
        "llama.block_count": CONFIG.layers,
        "llama.embedding_length": CONFIG.hidden,
        "llama.feed_forward_length": CONFIG.feed_forward,
        "llama.attention.head_count": CONFIG.query_heads,
        "llama.attention.head_count_kv": CONFIG.kv_heads,
        "llama.rope.dimension_count": CONFIG.head_size,
        "llama.context_length": CONFIG.context,
        "llama.vocab_size": CONFIG.vocabulary,
        "llama.attention.layer_norm_rms_epsilon": CONFIG.norm_eps,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["Ġ a", "t h"],
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.eos_token_id": END,
    }
    writer = gguf.GGUFWriter(path, fields.pop("architecture", "llama"))
    add_field = {list: writer.add_array, str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    for key, value in fields.items():
        if value is not None:
            add_field[type(value)](key, value)
    tensors = {"token_embd": WEIGHTS.embedding, "output_norm": WEIGHTS.output_norm}
    names = {
        "attention_norm": ["attn_norm"],
        "query_key_value": ["attn_q", "attn_k", "attn_v"],
        "attention_output": ["attn_output"],
        "feed_forward_norm": ["ffn_norm"],
        "gate_up": ["ffn_gate", "ffn_up"],
        "down": ["ffn_down"],
    }
    kv = CONFIG.kv_heads * CONFIG.head_size
    for index, layer in enumerate(WEIGHTS.layers):
        for joined, parts in names.items():
            places = {1: [], 2: [CONFIG.feed_forward], 3: [-2 * kv, -kv]}[len(parts)]
            for part, x in zip(parts, np.split(layer[joined], places), strict=True):
                tensors[f"blk.{index}.{part}"] = x
    for name, x in tensors.items():
        writer.add_tensor(f"{name}.weight", x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "Tiny.F32.gguf")


# --- the command line ------------------------------------------------------------------------------

SHARED = "The mill grinds what the farmers bring, day after day. "
FIVE = ["one", SHARED + "two?", SHARED + "three!", "4 " * 30, "five"]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_demo_runs_and_agrees_with_a_plain_cache(
    tiny_file: Path, device: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if device == "cuda":
        pytest.importorskip("torch")
    options = ["--model", str(tiny_file), "--device", device, "--dtype", dtype, "--tokens", "20", "--check"]
    status = main([*options, *FIVE])
    out = capsys.readouterr().out
    assert status == 0, out
    assert [line for line in out.splitlines() if line.startswith("> ")][:2] == ["> one", f"> {SHARED}two?"]
    summary = {line[:9].strip(): line[9:] for line in out.splitlines() if line[:8].strip() and line[8:9] == " "}
    assert {"cpu": "CPU, ", "cuda": "GPU, "}[device] in summary["device"]
    assert f"cache {dtype}, pages of 16 tokens" in summary["model"]
    assert "tokens/s" in summary["speed"]
    assert "1 of 5 sequences forked" in summary["pages"]
    assert re.search(r"rope_append \d+ ms, attention .*; \d+ hits?, \d+ misses", summary["compile"])
    assert summary["check"].startswith("agrees with a plain NumPy cache: ")


@pytest.mark.parametrize("wrong", [1.1, np.nan])
def test_a_wrong_cache_does_not_agree(
    wrong: float, tiny_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attend = PagedCache.attend
    monkeypatch.setattr(PagedCache, "attend", lambda self, layer, q, k, v: attend(self, layer, q, k, v) * wrong)
    assert main(["--model", str(tiny_file), "--device", "cpu", "--tokens", "4", "--check", "one"]) == 1
    assert "DOES NOT AGREE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "the prompt must hold some text, got ''"),
        (["fine", " \n"], "prompt 2 must hold some text"),
        (["--tokens", "500", "long " * 30], "the prompt: with its answer it must fit in the model's 512 tokens, got"),
        (["a", "b\udce9"], "prompt 2: the text must be valid Unicode"),
        (["--system", "\udce9", "b"], "--system: the text must be valid Unicode"),
        (["--model", "no/such.gguf", "a"], "--model must name a GGUF file, got 'no/such.gguf'"),
    ],
)
def test_a_demo_that_cannot_run_says_so_in_one_line(
    tiny_file: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tiny_file), "--device", "cpu", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"kvarn demo: {message}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""

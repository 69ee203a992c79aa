# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""vLLM's server, started by the command of the page, answers with kvarn's attention."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from models import Answer, prompts, rounded, saved, wrong

README = Path(__file__).resolve().parents[1] / "README.md"
# What the CPU needs beside the command: no compilation, and memory of the tests' size.
ON_THE_CPU = (
    "--enforce-eager --dtype float32 --max-model-len 256 --max-num-seqs 8 --kv-cache-memory-bytes 67108864 "
    """--skip-tokenizer-init --compilation-config '{"mode": 0, "custom_ops": ["none"]}'"""
)


def asked(url: str, body: object = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_the_command_of_the_page_serves_a_model(tmp_path):
    pytest.importorskip("uvicorn", reason="vLLM's server is not installed")
    command = shlex.split(re.search(r"^    vllm (serve .*)$", README.read_text(), re.M)[1] + " " + ON_THE_CPU)
    command[1] = saved("llama")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", *command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        end = time.monotonic() + 300
        while True:
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            try:
                (model,) = asked(f"http://127.0.0.1:{port}/v1/models")["data"]
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(1)
        assert model["id"] == command[1]
        found = []
        for prompt in prompts(5, 40):
            body = {"model": model["id"], "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            (choice,) = asked(f"http://127.0.0.1:{port}/v1/completions", {**body, "return_token_ids": True})["choices"]
            assert len(choice["token_ids"]) == 12
            found.append(Answer(prompt, choice["token_ids"], [], 0))
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
    assert wrong("llama", found, 0.05, attention=rounded((1.0, 1.0)), logprobs=False) == []

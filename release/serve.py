# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Serve a model with vLLM by the page's commands, from the built wheels alone: python release/serve.py --wheels dist

In a fresh environment, pip installs ``kvarn-vllm`` and what it requires from folders of wheels, without an index. The
environment sees vLLM, and torch with it, in the folders that ``--site`` names. Then the command of
``docs/other-engines.md`` serves a tiny random model, and its answers are compared with those of the page's Python.
What follows ``--`` is given to the server too; ``--python-options`` are keywords of the page's ``LLM``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "other-engines.md"
TEXTS = ("Hello", "The quick brown fox jumps over the lazy dog")
TOKENS = 24
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}

# A tokenizer of bytes, and three layers of Llama's shape.
MODEL = """
import sys, torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
names = {"<pad>": 0, "<s>": 1, "</s>": 2, **{c: i + 3 for i, c in enumerate(alphabet)}}
tokenizer = Tokenizer(models.BPE(vocab=names, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **special).save_pretrained(sys.argv[1])
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=512, initializer_range=0.2, bos_token_id=1,
    eos_token_id=2,
))
with torch.no_grad():
    model.lm_head.weight[len(names):] = 0
model.to(torch.bfloat16).save_pretrained(sys.argv[1])
"""
# The page's line, with its answers printed. A guard, since vLLM starts processes that import this file.
PYTHON = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, more = sys.argv[1], json.loads(sys.argv[2])
    make, LLM = LLM, lambda model, **options: make(model, **options, **more)
    llm = {line}
    params = SamplingParams(temperature=0, max_tokens={tokens}, ignore_eos=True)
    outputs = llm.generate(json.loads(sys.argv[3]), params, use_tqdm=False)
    print("TOKENS", json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def page_commands(text: str) -> tuple[list[str], str]:
    """The words of the page's ``vllm serve``, and its Python."""
    (command,) = re.findall(r"^    (vllm serve .*)$", text, re.M)
    return shlex.split(command), re.search(r"`(LLM\(model, .*?\))`", text)[1]


def environment(folder: Path, python: str, wheels: Sequence[Path], sites: Sequence[Path]) -> Path:
    """A fresh environment with the wheels, from files alone; returns its Python."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    inside = folder / "bin" / "python"
    where = [inside, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    purelib = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    Path(purelib, "engine.pth").write_text("".join(f"{site.resolve()}\n" for site in sites))
    found = [word for folder in wheels for word in ("--find-links", str(folder.resolve()))]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHONPATH"))}
    pip = [inside, "-m", "pip", "install", "--disable-pip-version-check", "--no-index", *found, "kvarn-vllm"]
    subprocess.run(pip, check=True, env=clean)
    return inside


def served(inside: Path, words: Sequence[str], work: Path, seconds: float) -> list[list[int]]:
    """The tokens that a server answers with; it is started by the words of a command, and stopped."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = work / "server.log"
    # The entry point of vLLM's own script, which the wheel of vLLM makes where it is installed.
    start = [inside, "-m", "vllm.entrypoints.cli.main", *words[1:], "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as out:
        server = subprocess.Popen(start, cwd=work, stdout=out, stderr=subprocess.STDOUT)
    try:
        end, url = time.monotonic() + seconds, f"http://127.0.0.1:{port}/v1"
        while True:
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start; its log ends:\n{log.read_text()[-3000:]}")
            try:
                urllib.request.urlopen(f"{url}/models", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        return [answer(url, words[2], text) for text in TEXTS]
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def answer(url: str, model: str, text: str) -> list[int]:
    body = {
        "model": model, "prompt": text, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    header = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), header)
    with urllib.request.urlopen(request, timeout=120) as found:
        (choice,) = json.load(found)["choices"]
    return choice["token_ids"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--wheels", type=Path, action="append", required=True, metavar="FOLDER", help="folders of wheels"
    )
    parser.add_argument(
        "--site", type=Path, action="append", default=[], metavar="FOLDER", help="where vLLM and torch are"
    )
    parser.add_argument("--python", default=sys.executable, help="of the environment (default: this one)")
    parser.add_argument("--seconds", type=float, default=300, help="until the server answers (default: 300)")
    parser.add_argument("--python-options", default="{}", metavar="JSON", help="keywords of the page's LLM")
    parser.add_argument("server", nargs="*", metavar="OPTION", help="after --: of the server")
    options = parser.parse_args(argv)
    words, line = page_commands(PAGE.read_text())
    with tempfile.TemporaryDirectory(prefix="kvarn-serve-") as name:
        folder = Path(name)
        inside = environment(folder / "env", options.python, options.wheels, options.site)
        os.environ.update(QUIET)
        model, program = folder / "model", folder / "page.py"
        subprocess.run([inside, "-c", MODEL, model], check=True, cwd=folder)
        words[2] = str(model)
        print(f"+ {shlex.join([*words, *options.server])}", flush=True)
        tokens = served(inside, [*words, *options.server], folder, options.seconds)
        program.write_text(PYTHON.replace("{line}", line).replace("{tokens}", str(TOKENS)))
        command = [inside, program, model, options.python_options, json.dumps(TEXTS)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        found = re.search(r"^TOKENS (.*)$", done.stdout, re.M)
        if found is None:
            print(f"{line} did not answer:\n{done.stdout[-2000:]}{done.stderr[-3000:]}", file=sys.stderr)
            return 1
    print(f"served {tokens}\nPython {found[1]}")
    return int(json.loads(found[1]) != tokens)


if __name__ == "__main__":
    sys.exit(main())

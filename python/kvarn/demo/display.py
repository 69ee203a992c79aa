# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Print answers as they come.

Several answers grow at once, but text can only be read in one place: the first answer that is not complete is written
word by word, the others are kept, and each is written as far as it has come when its turn arrives. On a terminal one
line below the text shows progress; it never appears in a file or a pipe.
"""

from __future__ import annotations

import os
import shutil
import time
import unicodedata
from collections.abc import Callable, Sequence
from typing import TextIO

from .scheduler import Answer, Observer, Step
from .tokenizer import StreamDecoder, Tokenizer

MAX_WIDTH = 100  # wider lines are hard to read
INDENT = "  "
CLEAR_LINE = "\r\x1b[K"


def text_width(text: str) -> int:
    """Return how many columns a terminal gives a text."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal that understands cursor movements."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def abbreviate(text: str, limit: int = 76) -> str:
    """Put a text on one line, and leave out words in its middle if it is long: a question often stands at the end."""
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    half = (limit - 3) // 2
    head, tail = text[:half], text[-half:]
    # A language without blanks, or one very long word, is cut anywhere.
    return f"{head.rpartition(' ')[0] or head} … {tail.partition(' ')[2] or tail}"


class LiveText:
    """Text that grows, wrapped between words, over a progress line.

    Words are written when they are complete: a terminal's line can then be written again at any time, and the progress
    line below it needs no knowledge of how the terminal wraps.

    Parameters
    ----------
    stream : text file
    live : bool
        Whether to show the progress line.
    width : int, optional
        Columns; the terminal's, at most 100, when left out.
    """

    def __init__(self, stream: TextIO, live: bool, width: int | None = None) -> None:
        self._stream = stream
        self._live = live
        self.width = width or max(20, min(shutil.get_terminal_size().columns - 1, MAX_WIDTH))
        self._line = ""  # complete words of the line that is being written
        self._shown = 0  # how much of it is on the stream
        self._word = ""
        self._indent = ""
        self._progress = ""

    def write(self, text: str, indent: str = "") -> None:
        """Add text; lines that start from here on are indented."""
        self._indent = indent
        for character in text.expandtabs(4):
            if character == "\n":
                self._end_word()
                self._end_line()
            elif character.isspace():
                self._end_word()
                self._line = (self._line or self._indent) + " "
            elif character.isprintable() or not unicodedata.category(character).startswith("C"):
                self._word += character
        self._show()

    def line(self, text: str = "") -> None:
        """Add a line that is written as it is."""
        self.end()
        self._line = text
        self._end_line()
        self._show()

    def end(self) -> None:
        """End the line that is being written, if there is one."""
        self._end_word()
        if self._line.strip():
            self._end_line()
        self._line = ""
        self._shown = 0

    def progress(self, text: str) -> None:
        """Show a progress line; "" takes it away."""
        if self._live:
            had, self._progress = self._progress, text[: self.width]
            self._show(erase=bool(had) and not text)

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if not word:
            return
        if not self._line:
            self._line = self._indent
        if text_width(self._line + word) > self.width and self._line.strip():
            self._end_line()
            self._line = self._indent
        self._line += word

    def _end_line(self) -> None:
        line = self._line.rstrip()
        if self._live:
            self._stream.write(f"{CLEAR_LINE}{line}\n\x1b[K")
        else:
            self._stream.write(line[self._shown :] + "\n")
        self._line, self._shown = "", 0

    def _show(self, erase: bool = False) -> None:
        """Bring the unfinished line, and the progress line, up to date."""
        if not self._live:
            line = self._line.rstrip()  # a blank at the end may become a line's end
            self._stream.write(line[self._shown :])
            self._shown = max(self._shown, len(line))
        elif self._progress or erase:
            forward = f"\x1b[{text_width(self._line)}C" if self._line else ""
            self._stream.write(f"{CLEAR_LINE}{self._line}\n\x1b[K\x1b[2m{self._progress}\x1b[0m\x1b[1A\r{forward}")
        else:
            self._stream.write(f"{CLEAR_LINE}{self._line}")
        self._stream.flush()


class Display(Observer):
    """Print prompts and answers, in the order of the requests.

    Parameters
    ----------
    text : LiveText
    tokenizer : Tokenizer
    prompts : sequence of str
    pages : callable
        Returns what to say about pages in the progress line, "" for nothing.
    """

    def __init__(
        self, text: LiveText, tokenizer: Tokenizer, prompts: Sequence[str], pages: Callable[[], str] = str
    ) -> None:
        self._text = text
        self._prompts = prompts
        self._decoders = [StreamDecoder(tokenizer) for _ in prompts]
        self._kept = [""] * len(prompts)
        self._complete: dict[int, Answer] = {}
        self._front = -1
        self._pages = pages
        self._tokens = 0
        self._started = time.perf_counter()
        self._advance()

    def token(self, request: int, token: int) -> None:
        self._add(request, self._decoders[request].push(token))

    def finished(self, request: int, answer: Answer) -> None:
        self._add(request, self._decoders[request].finish())
        self._complete[request] = answer
        while self._front in self._complete:
            self._text.write(" …" if self._complete[self._front].reason == "length" else "", INDENT)
            self._text.end()
            self._text.line()
            self._advance()

    def step(self, step: Step) -> None:
        self._tokens += step.sampled
        speed = self._tokens / max(time.perf_counter() - self._started, 1e-9)
        parts = [f"step {step.index + 1}", f"{step.running} running, {step.waiting} waiting"]
        parts += [f"{self._tokens} tokens, {speed:.0f}/s", self._pages()]
        self._text.progress(" · ".join(part for part in parts if part))

    def close(self) -> None:
        """Take the progress line away and end the line that is being written."""
        self._text.progress("")
        self._text.end()

    def _add(self, request: int, text: str) -> None:
        if request == self._front:
            self._text.write(text, INDENT)
        else:
            self._kept[request] += text

    def _advance(self) -> None:
        """Turn to the next answer: print its prompt and what has been kept of it."""
        self._front += 1
        if self._front < len(self._prompts):
            self._text.write(f"> {abbreviate(self._prompts[self._front])}")
            self._text.end()
            self._text.write(self._kept[self._front], INDENT)

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How the demo prints: wrapping, the order of answers, and the progress line."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, strategies as st

from kvarn.demo.display import Display, LiveText, abbreviate, text_width
from kvarn.demo.scheduler import Answer, Step
from kvarn.demo.tokenizer import Tokenizer, byte_characters

BYTES = Tokenizer(byte_characters(), [], [1] * 256, end_of_text=-1)


def screen(output: str) -> list[str]:
    """What a terminal of unlimited size shows after `output`."""
    lines: list[list[str]] = [[]]
    row = column = index = 0
    control = re.compile(r"\x1b\[(\d*)([A-Za-z])")
    while index < len(output):
        match = control.match(output, index)
        if match:
            count, command = int(match[1] or 1), match[2]
            assert command in "KACm", match[0]
            if command == "K":
                del lines[row][column:]
            elif command == "A":
                row -= count
                assert row >= 0
            elif command == "C":
                column += count
            index = match.end()
            continue
        character = output[index]
        index += 1
        if character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0
            if row == len(lines):
                lines.append([])
        else:
            line = lines[row]
            line += [" "] * (column + 1 - len(line))
            line[column] = character
            column += 1
    return ["".join(line).rstrip() for line in lines]


def show(parts: list[str], live: bool, width: int = 20, indent: str = "") -> str:
    stream = io.StringIO()
    text = LiveText(stream, live, width)
    for index, part in enumerate(parts):
        text.progress(f"progress {index}")
        text.write(part, indent)
    text.progress("")
    text.end()
    return stream.getvalue()


def test_long_lines_are_wrapped_between_words() -> None:
    assert show(["one two three four five six"], live=False) == "one two three four\nfive six\n"


def test_indentation_goes_before_wrapped_lines_and_keeps_code_in_shape() -> None:
    shown = show(["def f():\n    return 1\n\nand so on it goes"], live=False, indent="  ")
    assert shown == "  def f():\n      return 1\n\n  and so on it goes\n"


def test_nothing_but_text_goes_to_a_pipe() -> None:
    assert "\x1b" not in show(["a b", "c\nd"], live=False)
    assert "progress" not in show(["a b", "c\nd"], live=False)


def test_control_characters_of_an_answer_do_not_reach_the_terminal() -> None:
    assert show(["a\x1b[2Jb\x07 c\x9bd"], live=False) == "a[2Jb cd\n"


@given(st.lists(st.text("ab \n日é"), max_size=8))
def test_a_terminal_shows_in_the_end_what_a_pipe_gets(parts: list[str]) -> None:
    plain = show(parts, live=False).splitlines()
    shown = screen(show(parts, live=True))
    assert [line.rstrip() for line in shown if line.strip()] == [line.rstrip() for line in plain if line.strip()]


@given(st.text("abcdefgh \n日"))
def test_lines_fit_unless_one_word_is_longer(text: str) -> None:
    for line in show([text], live=False, width=8).splitlines():
        assert text_width(line) <= 8 or " " not in line.strip()


def test_the_progress_line_is_below_the_text_and_goes_away() -> None:
    stream = io.StringIO()
    text = LiveText(stream, True, 30)
    text.write("one two ")
    text.progress("step 1")
    assert screen(stream.getvalue()) == ["one two", "step 1"]
    text.write("three\nfour ")
    assert screen(stream.getvalue()) == ["one two three", "four", "step 1"]
    text.progress("")
    assert screen(stream.getvalue()) == ["one two three", "four", ""]


def test_answers_are_printed_in_the_order_of_the_prompts() -> None:
    stream = io.StringIO()
    display = Display(LiveText(stream, False, 40), BYTES, ["first?", "second?", "third?"], lambda: "pages 1/2")

    def say(request: int, text: str) -> None:
        for token in BYTES.encode(text):
            display.token(request, token)

    say(1, "later, ")
    say(0, "now ")
    assert stream.getvalue() == "> first?\n  now"
    say(1, "and whole")
    display.finished(1, Answer(reason="length"))
    say(2, "last")
    say(0, "this")
    assert "later" not in stream.getvalue()
    display.finished(0, Answer(reason="stop"))
    display.step(Step(0, 1, 2, 3, 4, 5, 0.1))
    display.finished(2, Answer(reason="stop"))
    display.close()
    expected = "> first?\n  now this\n\n> second?\n  later, and whole …\n\n> third?\n  last\n\n"
    assert stream.getvalue() == expected


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("short  text\nhere", "short text here"),
        ("a " * 40 + "what is it?", "a a a a … is it?"),
        ("x" * 30, "xxxxxxxx … xxxxxxxx"),
    ],
)
def test_long_prompts_are_abbreviated_in_the_middle(text: str, short: str) -> None:
    assert abbreviate(text, 20) == short

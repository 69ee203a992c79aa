# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Byte-level BPE from the tables of a GGUF file, and SmolLM2's chat form.

Text is cut into words (every number character alone, then GPT-2's rule), each word becomes bytes, and the bytes are
joined by the merge table. Python's `re` knows no Unicode categories, so the cutting is a small scanner over them
instead of a pattern.
"""

from __future__ import annotations

import codecs
import itertools
import unicodedata
from collections.abc import Iterable, Sequence

from .errors import DemoError

CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
# Unicode's White_Space property; str.isspace() also takes four separators (U+001C…1F) that the tokenizer does not.
WHITE_SPACE = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000").union(
    map(chr, range(0x2000, 0x200B))
)
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PLAIN_TOKEN = 1  # GGUF's token type of ordinary tokens; all others (control, unknown, …) never match in text


def byte_characters() -> list[str]:
    """Return the character that stands for each of the 256 bytes in the token table.

    Printable Latin-1 bytes stand for themselves; the others take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _kind(character: str) -> str:
    """Return the scanner's class of a character: S white space, L letter, N number, P anything else."""
    if character in WHITE_SPACE:
        return "S"
    category = unicodedata.category(character)[0]
    return category if category in "LN" else "P"


def split_gpt2(text: str) -> list[str]:
    """Cut text into GPT-2's words: contractions, and runs of letters, numbers or others with one space before."""
    kinds = [_kind(character) for character in text]
    words = []
    start, end = 0, len(text)
    while start < end:
        contraction = next((c for c in CONTRACTIONS if text.startswith(c, start)), None)
        if contraction:
            stop = start + len(contraction)
        else:
            # One blank may lead a word; any other white space stands by itself.
            first = start + 1 if text[start] == " " and start + 1 < end and kinds[start + 1] != "S" else start
            stop = first + 1
            while stop < end and kinds[stop] == kinds[first]:
                stop += 1
            if kinds[first] == "S" and stop < end and stop - first > 1:
                stop -= 1  # the last white space of a run belongs to (or stands before) what follows
        words.append(text[start:stop])
        start = stop
    return words


def split_words(text: str) -> list[str]:
    """Cut text as SmolLM's pre-tokenizer does: each number character alone, the rest by `split_gpt2`."""
    words: list[str] = []
    run = 0
    for index, character in enumerate(text):
        if unicodedata.category(character)[0] == "N":
            words += split_gpt2(text[run:index])
            words.append(character)
            run = index + 1
    return words + split_gpt2(text[run:])


class Tokenizer:
    """Encode and decode text.

    Parameters
    ----------
    tokens : sequence of str
        The token of each id, in byte characters (see `byte_characters`).
    merges : sequence of str
        "left right", best first.
    token_types : sequence of int
        GGUF's type of each token; only plain ones (1) take part in text.
    pre_tokenizer : str
        The name of the rule that cuts text into words; only "smollm" is known.
    end_of_text : int
        The id that ends an answer.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Iterable[str],
        token_types: Sequence[int],
        pre_tokenizer: str = "smollm",
        end_of_text: int = 2,
    ) -> None:
        if pre_tokenizer != "smollm":
            raise DemoError(f"the model's pre-tokenizer must be 'smollm', got {pre_tokenizer!r}")
        self.tokens = list(tokens)
        self.end_of_text = end_of_text
        characters = byte_characters()
        self._characters = characters
        self._bytes = {character: byte for byte, character in enumerate(characters)}
        self._ids: dict[str, int] = {}
        self._special: dict[str, int] = {}
        for index, (token, kind) in enumerate(zip(tokens, token_types, strict=True)):
            (self._ids if kind == PLAIN_TOKEN else self._special)[token] = index
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._words: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of plain text. Text that spells a control token stays text.

        Raises
        ------
        DemoError
            The text holds a lone surrogate (it is no valid Unicode), or the vocabulary lacks a byte.
        """
        ids: list[int] = []
        for word in split_words(text):
            known = self._words.get(word)
            if known is None:
                known = self._words[word] = self._encode_word(word)
            ids += known
        return ids

    def _encode_word(self, word: str) -> list[int]:
        try:
            data = word.encode("utf-8")
        except UnicodeEncodeError:
            raise DemoError(f"the text must be valid Unicode, got a lone surrogate in {word!r}") from None
        symbols = [self._characters[byte] for byte in data]
        while len(symbols) > 1:
            pairs = {pair: self._ranks[pair] for pair in itertools.pairwise(symbols) if pair in self._ranks}
            if not pairs:
                break
            symbols = _merge(symbols, min(pairs, key=pairs.__getitem__))
        # A merge may name a token that the table lacks; such a symbol goes in byte by byte.
        ids = []
        for symbol in symbols:
            for part in [symbol] if symbol in self._ids else symbol:
                if part not in self._ids:
                    byte = self._bytes[part]
                    raise DemoError(
                        f"the model's vocabulary has no token for the byte {byte:#04x} of the text {word!r}"
                    )
                ids.append(self._ids[part])
        return ids

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for; none for a control token."""
        text = self.tokens[token]
        return b"" if text in self._special else bytes(self._bytes[character] for character in text)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD, control tokens nothing."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def special(self, token: str) -> int:
        """Return the id of a control token such as ``<|im_start|>``."""
        if token not in self._special:
            raise DemoError(f"the model's vocabulary must hold {token!r}; the demo needs a file of SmolLM2-Instruct")
        return self._special[token]

    def chat_system(self, system: str = DEFAULT_SYSTEM) -> list[int]:
        """Return the tokens of the system turn, the prefix that all chats with the same `system` share."""
        return self._turn("system", system)

    def chat_user(self, prompt: str) -> list[int]:
        """Return the tokens of a user turn and of the opening of the assistant's answer."""
        return [*self._turn("user", prompt), self.special("<|im_start|>"), *self.encode("assistant\n")]

    def _turn(self, role: str, content: str) -> list[int]:
        return [
            self.special("<|im_start|>"),
            *self.encode(f"{role}\n{content}"),
            self.special("<|im_end|>"),
            *self.encode("\n"),
        ]


def _merge(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    """Join every occurrence of a pair, from the left."""
    merged: list[str] = []
    index = 0
    while index < len(symbols):
        if index + 1 < len(symbols) and (symbols[index], symbols[index + 1]) == pair:
            merged.append(symbols[index] + symbols[index + 1])
            index += 2
        else:
            merged.append(symbols[index])
            index += 1
    return merged


class StreamDecoder:
    """Turn tokens into text one by one, holding back the bytes of a character that is not complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Return the text that became complete with this token (may be empty)."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """Return what is left: a U+FFFD when the last character never became complete."""
        return self._decoder.decode(b"", final=True)

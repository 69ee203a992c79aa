# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""SmolLM2's byte-level BPE, built from the tables of its GGUF file, and its chat template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from .errors import DemoError

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PLAIN_TOKEN = 1  # GGUF's token type of ordinary tokens; all others (control, unknown, …) never match in text


class Tokenizer:
    """Encode and decode text.

    Parameters
    ----------
    tokens : sequence of str
        The token of each id; each byte is one character, as in GPT-2's vocabulary.
    merges : sequence of str
        "left right", best first.
    token_types : sequence of int
        GGUF's type of each token; only plain ones take part in text.
    end_of_text : int
        The id that ends an answer.
    """

    def __init__(
        self, tokens: Sequence[str], merges: Iterable[str], token_types: Sequence[int], end_of_text: int
    ) -> None:
        self.end_of_text = end_of_text
        plain: dict[str, int] = {}
        self._control: dict[str, int] = {}
        for index, (token, kind) in enumerate(zip(tokens, token_types, strict=True)):
            (plain if kind == PLAIN_TOKEN else self._control)[token] = index
        self._control_ids = set(self._control.values())
        pairs = []
        for merge in merges:
            left, _, right = merge.partition(" ")
            pairs.append((left, right))
        self._bpe = tokenizers.Tokenizer(models.BPE(plain, pairs))
        # Every digit is a word of its own; the rest is split into words by GPT-2's rule.
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._bpe.decoder = decoders.ByteLevel()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of plain text; control tokens spelled in the text are encoded as text."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DemoError(f"the text must be valid Unicode, got a lone surrogate in {text!r}") from None
        ids = self._bpe.encode(text).ids
        if self.decode(ids) != text:  # BPE drops bytes without a token
            raise DemoError(f"the model's vocabulary has no token for a byte of {text!r}")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids; invalid UTF-8 becomes U+FFFD, and control tokens are dropped."""
        return self._bpe.decode([token for token in ids if token not in self._control_ids])

    def chat_system(self, system: str = DEFAULT_SYSTEM) -> list[int]:
        """Return the tokens of the system turn, a common prefix of all chats with the same `system`."""
        return self._turn("system", system)

    def chat_user(self, prompt: str) -> list[int]:
        """Return the tokens of a user turn and of the start of the assistant's answer."""
        return [*self._turn("user", prompt), self._special("<|im_start|>"), *self.encode("assistant\n")]

    def _turn(self, role: str, content: str) -> list[int]:
        start, end = self._special("<|im_start|>"), self._special("<|im_end|>")
        return [start, *self.encode(f"{role}\n{content}"), end, *self.encode("\n")]

    def _special(self, token: str) -> int:
        if token not in self._control:
            raise DemoError(f"the model's vocabulary must hold {token!r}; the demo needs a file of SmolLM2-Instruct")
        return self._control[token]

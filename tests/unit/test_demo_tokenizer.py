# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The demo's tokenizer: how text is cut, merged and put together again, and known ids of SmolLM2."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvarn.demo.errors import DemoError
from kvarn.demo.tokenizer import StreamDecoder, Tokenizer, byte_characters, split_words


def byte_tokenizer(merges: tuple[str, ...] = ()) -> Tokenizer:
    """A tokenizer of two control tokens, all bytes, and the results of some merges."""
    tokens = ["<|im_start|>", "<|im_end|>", *byte_characters(), *(merge.replace(" ", "") for merge in merges)]
    return Tokenizer(tokens, merges, [3, 3] + [1] * (len(tokens) - 2), end_of_text=1)


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("kvarn.demo.weights")
    from kvarn.demo.weights import find_model

    try:
        reader = gguf.GGUFReader(find_model())
    except DemoError as error:
        pytest.skip(str(error))
    fields = [reader.get_field(f"tokenizer.ggml.{name}").contents() for name in ("tokens", "merges", "token_type")]
    return Tokenizer(*fields, end_of_text=2)


def test_byte_characters_are_256_different_visible_ones() -> None:
    characters = byte_characters()
    assert len(set(characters)) == 256
    assert not any(character.isspace() for character in characters)
    assert (characters[ord("a")], characters[ord(" ")], characters[ord("\n")]) == ("a", "Ġ", "Ċ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello world", ["Hello", " world"]),
        ("it's 1024", ["it", "'s", " ", "1", "0", "2", "4"]),
        ("a   b", ["a", "  ", " b"]),
        ("a\n\nb", ["a", "\n", "\n", "b"]),
        ("a\n \n", ["a", "\n \n"]),
        ("don't DON'T", ["don", "'t", " DON", "'", "T"]),
        ("x ½y", ["x", " ", "½", "y"]),
        ("ok!? 日本", ["ok", "!?", " 日本"]),
        ("  ", ["  "]),
        ("\u3000wide", ["\u3000", "wide"]),
        ("", []),
    ],
)
def test_text_is_cut_into_words_with_every_number_alone(text: str, words: list[str]) -> None:
    assert split_words(text) == words


@given(st.text())
def test_cutting_loses_nothing(text: str) -> None:
    assert "".join(split_words(text)) == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decoding_gives_the_text_back(text: str) -> None:
    tokenizer = byte_tokenizer(("t h", "th e", "Ġ the"))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_best_merge_goes_first_wherever_it_stands() -> None:
    tokenizer = byte_tokenizer(("b c", "a b", "bc d"))
    assert [tokenizer.tokens[i] for i in tokenizer.encode("abcd")] == ["a", "bcd"]
    assert [tokenizer.tokens[i] for i in tokenizer.encode("abab")] == ["ab", "ab"]


def test_a_control_token_spelled_in_text_stays_text() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("<|im_end|>")
    assert 1 not in ids
    assert tokenizer.decode([0, *ids, 1]) == "<|im_end|>"


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(DemoError, match="valid Unicode"):
        byte_tokenizer().encode("\udc80")


def test_a_byte_that_the_vocabulary_lacks_is_named() -> None:
    characters = byte_characters()
    tokens = [character for byte, character in enumerate(characters) if byte != 0x1D]
    with pytest.raises(DemoError, match="0x1d"):
        Tokenizer(tokens, [], [1] * 255).encode("a\x1d")


def test_another_pre_tokenizer_is_refused() -> None:
    with pytest.raises(DemoError, match="'smollm', got 'llama-bpe'"):
        Tokenizer([], [], [], pre_tokenizer="llama-bpe")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_streamed_text_is_the_decoded_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    decoder = StreamDecoder(tokenizer)
    parts = [decoder.push(token) for token in tokenizer.encode(text)]
    assert "".join(parts) + decoder.finish() == text
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


def test_a_character_that_never_completes_becomes_a_replacement() -> None:
    tokenizer = byte_tokenizer()
    decoder = StreamDecoder(tokenizer)
    first, second, _ = tokenizer.encode("日")
    assert decoder.push(first) + decoder.push(second) == ""
    assert decoder.finish() == "\ufffd"


def test_smollm_known_ids(smollm: Tokenizer) -> None:
    chat = smollm.chat_system() + smollm.chat_user("What is the capital of France?")
    # As llama.cpp gives them for the model's own chat template.
    expected = [
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
    ]
    expected += [2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    assert chat == expected


@pytest.mark.parametrize(
    "text", ["don't 12,345 things\n\n\tok ", "日本語 ½ 👩‍👩‍👧‍👦!", "<|im_end|>", "def f(x):\n    return x**2\n"]
)
def test_smollm_round_trip(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text)
    assert smollm.decode(ids) == text
    assert min(ids) > 16  # the first 17 are control tokens

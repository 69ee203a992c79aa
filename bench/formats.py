# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What formats of a cache cost in quality: python -m bench.formats [--tokens N] [--windows N] [--json FILE]

Three questions per record, on the CPU, with the demo's model and the NumPy model of records, which kernels match to the
bit. The error of attention against float64: over normal keys and values, over heavy-tailed ones with channels of
outliers, and over the model's own. The perplexity of a text that ships with Python. The share of positions of that text
at which the model over the format would choose the token that it chooses over bf16.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvarn as kv
from kvarn.caches.numerics import decode, encode, saturating_cast
from kvarn.chat.arrays import NumpyArrays
from kvarn.chat.model import Model
from kvarn.chat.plain_cache import PlainCache, attention, rotate
from kvarn.chat.weights import load_model

JSON = Path(__file__).with_suffix(".json")
# The quantiles of a normal distribution, as NF4 has them: eight below zero, seven above.
NORMAL = (
    -1.0,
    -0.696,
    -0.525,
    -0.395,
    -0.284,
    -0.185,
    -0.091,
    0.0,
    0.08,
    0.161,
    0.246,
    0.338,
    0.441,
    0.563,
    0.723,
    1.0,
)
STEP = 128  # tokens per step of the model
LAYERS = (0, 7, 15, 22, 29)  # whose keys and values the errors are of
Formats = dict[str, tuple[kv.Record, int]]  # by name: the record, and its bits per element with all scales


def formats(size: int) -> Formats:
    """The records for heads of a size."""
    found = {"bf16": kv.Record("bf16"), "fp8, no scales": kv.Record("f8e4m3"), "fp8": kv.Record("f8e4m3", "f32", size)}
    found["int8"] = kv.Record("i8", "f32", size)
    for group in sorted({size, 32}, reverse=True):
        for rotation in (0, group):
            turned = ", rotated" if rotation else ""
            found[f"int4, groups of {group}{turned}"] = kv.Record("u4", "f16", group, True, rotation)
    for rotation in (0, 32):
        found["MXFP4" + ", rotated" * bool(rotation)] = kv.Record("e2m1", "f8e8m0", 32, rotation=rotation)
    for rotation in (0, 16):
        found["NVFP4" + ", rotated" * bool(rotation)] = kv.Record("e2m1", "f8e4m3", 16, rotation=rotation)
    for rotation in (0, size):
        found[f"codebook of quantiles, groups of {size}" + ", rotated" * bool(rotation)] = kv.Record(
            NORMAL, "f16", size, rotation=rotation
        )
    return found


def bits_of(record: kv.Record, size: int) -> float:
    """Bits per element, with its share of scales and zeros."""
    scales = record.scales_shape(size)
    return record.elements.bits + (0 if scales is None else scales[0].itemsize * 8 * scales[1] / size)


def stored(record: kv.Record, x: np.ndarray) -> np.ndarray:
    """What a cache of a record gives back, f32."""
    if record.quantized:
        return decode(record, *encode(record, x))
    return saturating_cast(x, record.elements).astype(np.float32)


class Stored(PlainCache):
    """The demo's plain cache, with keys and values as a record stores them."""

    def __init__(self, config: Any, capacity: int, record: kv.Record) -> None:
        super().__init__(config, capacity)
        self._record = record
        self.seen: dict[int, tuple[np.ndarray, ...]] = {}  # the queries, keys and values of a layer, before storing

    def attend(self, layer: int, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        ((sequence, count),) = self._step
        start = self._lengths[sequence]
        end, angles = start + count, self._frequencies[start : start + count]
        query, key = rotate(query, angles), rotate(key, angles)
        if layer in LAYERS:
            before = self.seen.get(layer, (query[:0], key[:0], value[:0]))
            self.seen[layer] = tuple(np.concatenate(x) for x in zip(before, (query, key, value), strict=True))
        keys, values = self._data[sequence][layer]
        keys[start:end], values[start:end] = stored(self._record, key), stored(self._record, value)
        return attention(query, keys[:end], values[:end], start)


def logits_of(model: Model, tokens: Sequence[int], record: kv.Record) -> tuple[np.ndarray, Stored]:
    """The logits after each token, and the cache."""
    cache, found = Stored(model.config, len(tokens), record), []
    cache.open(0, tokens)
    for first in range(0, len(tokens), STEP):
        part = tokens[first : first + STEP]
        cache.begin_step([(0, len(part))])
        found.append(model.forward(part, cache, range(len(part))))
        cache.end_step()
    return np.concatenate(found), cache


def text_of() -> str:
    """A text that ships with Python: its reference of statements and data."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def windows_of(encoded: Sequence[int], tokens: int, count: int) -> list[list[int]]:
    """Windows of the text, evenly apart."""
    apart = (len(encoded) - tokens) // max(count, 1)
    return [list(encoded[i * apart : i * apart + tokens]) for i in range(count)]


# --- errors of attention -----------------------------------------------------------------------------


def distributions(size: int) -> Iterator[tuple[str, list[tuple[np.ndarray, ...]]]]:
    """Queries [T, 9, D], and keys and values [T, 3, D], by name."""
    rng, shape = np.random.default_rng(0), (256, 3, size)
    query, key, value = rng.standard_normal((256, 9, size)), rng.standard_normal(shape), rng.standard_normal(shape)
    yield "normal", [(query, key, value)]
    key, value = (rng.standard_t(3, shape) for _ in range(2))
    key[..., :: size // 4] *= 10  # channels of outliers, as keys have them
    yield "heavy-tailed", [(query / 4, key, value)]


def error_of(record: kv.Record, cases: Sequence[tuple[np.ndarray, ...]]) -> float:
    """The root mean square of attention's error over that of attention in float64."""
    wrong = right = 0.0
    for query, key, value in cases:
        query, exact = query.astype(np.float32), [x.astype(np.float32) for x in (key, value)]
        want = in_float64(query, *exact)
        wrong += float(np.square(in_float64(query, *(stored(record, x) for x in exact)) - want).sum())
        right += float(np.square(want).sum())
    return (wrong / right) ** 0.5


def in_float64(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Causal attention."""
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    group = query.shape[1] // key.shape[1]
    scores = np.einsum("qhgd,khd->hgqk", query.reshape(len(query), -1, group, query.shape[2]), key)
    scores = np.where(np.tri(len(query), len(key), dtype=bool), scores * query.shape[2] ** -0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hgqk,khd->qhgd", weights / weights.sum(-1, keepdims=True), value)


# --- the run -----------------------------------------------------------------------------------------


def measured(tokens: int, windows: int) -> dict[str, Any]:
    """All rows, and what they were measured over."""
    name, weights, tokenizer = load_model()
    model, size = Model(weights, NumpyArrays("f32")), weights.config.head_size
    text = text_of()
    parts = windows_of(tokenizer.encode(text[: 64 * tokens * windows]), tokens, windows)
    cases, rows, greedy, real = dict(distributions(size)), [], [], []
    for of, record in formats(size).items():
        losses, same = [], []
        for i, part in enumerate(parts):
            logits, cache = logits_of(model, part, record)
            top = logits.max(-1, keepdims=True)
            norm = np.log(np.exp((logits - top).astype(np.float64)).sum(-1)) + top[:, 0]
            losses.append(norm[:-1] - logits[np.arange(len(part) - 1), part[1:]])
            if of == "bf16":
                greedy.append(logits.argmax(-1))
                real = real or list(cache.seen.values())  # the keys and values of the first window
            same.append(logits.argmax(-1) == greedy[i])
        cases["the model's"] = real
        rows.append({
            "format": of, "bits": bits_of(record, size), "perplexity": float(np.exp(np.concatenate(losses).mean())),
            "greedy": float(np.concatenate(same).mean()), "errors": {n: error_of(record, c) for n, c in cases.items()},
        })  # fmt: skip
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    digest = hashlib.sha256(np.concatenate([np.array(p, np.int32) for p in parts]).tobytes()).hexdigest()[:16]
    return {
        "model": name, "text": "pydoc_data.topics", "python": platform.python_version(), "tokens": tokens,
        "windows": windows, "digest": digest, "head_size": size, "rows": rows,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.formats", description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=512, help="tokens per window of the text (default: 512)")
    parser.add_argument("--windows", type=int, default=4, help="windows of the text (default: 4)")
    parser.add_argument("--json", type=Path, default=JSON, metavar="FILE", help="output file")
    given = parser.parse_args(argv)
    given.json.write_text(json.dumps(measured(given.tokens, given.windows), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

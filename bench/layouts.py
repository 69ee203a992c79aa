# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Cost of foreign page layouts: python -m bench.layouts [--rows TEXTS] [--layouts TEXTS] [--json FILE]

Every row runs on a native pool, then directly on the same content in each foreign layout (``kv.ForeignPages``). Rows
that only read the cache are also run with a conversion to a native pool first. Every result is checked. LMCache's
chunks of several layers ([N, 2, L, T, H * D]) have the native layout, and therefore no line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvarn.measure.timing import first_line

from .cases import RANGE, SMALL, TABLE, Row, select
from .kvarn_rows import call_of
from .problems import problem
from .standalone import device_of, measured, over, parser, run_all, shown

OURS = "N2LPHD"
LAYOUTS = {
    "vLLM NHD": "L2NPHD", "vLLM HND": "L2NHPD", "vLLM packed": "LNHPC", "vLLM packed, tokens first": "LNPHC",
    "FlashInfer NHD": "LN2PHD", "FlashInfer HND": "LN2HPD", "SGLang, page 1": "L2SHD", "TensorRT-LLM": "NL2HPD",
}  # fmt: skip
ROWS = "=b64_c4k,=b64_c4k_fp8,=b64_c4k_p64,=app_n256_decode,=app_n8192_prefill,=gather_b64_c2k,=pf_b8_s4k"
_SMALL = "small_decode,small_append,small_gather,small_prefill"
_PARTS = {"C": "2D", "S": "NP", "W": "HD"}


def laid_out(blocks: Any, word: str) -> Any:
    """A copy of a pool [N, 2, L, P, H, D] in another layout."""
    whole = "".join(_PARTS.get(x, x) for x in word)
    axes = [OURS.index(x) for x in whole]
    raw = bits(blocks)  # integer bits permute for every element type
    if hasattr(raw, "permute"):
        moved = raw.permute(axes).clone(memory_format=sys.modules["torch"].contiguous_format)
    else:
        moved = raw.transpose(axes).copy()
    extent = {x: int(np.prod([blocks.shape[OURS.index(y)] for y in _PARTS.get(x, x)])) for x in word}
    return moved.view(blocks.dtype).reshape([extent[x] for x in word])


def ours_again(data: Any, word: str, shape: Sequence[int]) -> Any:
    """The inverse of :func:`laid_out`, as a view."""
    whole = "".join(_PARTS.get(x, x) for x in word)
    data = data.reshape([shape[OURS.index(x)] for x in whole])
    axes = [whole.index(x) for x in OURS]
    return data.permute(axes) if hasattr(data, "permute") else data.transpose(axes)


class InPlace:
    """A problem's pool in a foreign layout; replaces ``problem.cached``."""

    def __init__(self, problem: Any, word: str) -> None:
        self.ours, self.word = problem.cached, word
        self.data = laid_out(self.ours.blocks, word)
        self.pages = self.ours.pages

    def collection(self, before: Any, newest: int, longest: int) -> Any:
        import kvarn as kv

        lookup, options = self.pages.lookup, {}
        if "S" in self.word:  # slots: one token per page
            page = self.pages.page
            wide = lookup[:, :, None] * page + self.ours.arrays.integers(np.arange(page))
            lookup, options = wide.reshape(lookup.shape[0], -1), {"page_size": 1}
        return kv.ForeignPages(
            self.data, self.ours.arrays.integers(before), lookup, self.word, max_seq_length=newest,
            max_cache_length=longest, **options,
        )  # fmt: skip


def bits(array: Any) -> Any:
    """A buffer's bits, in which equal NaNs compare equal."""
    if hasattr(array, "permute"):
        torch = sys.modules["torch"]
        return array.view(getattr(torch, f"int{8 * array.element_size()}"))
    return array.view(f"u{array.itemsize}")


def lines(arrays: Any, row: Row, names: Sequence[str]) -> list[dict[str, Any]]:
    """Lines of a row: the native layout, then each foreign one."""
    import kvarn as kv

    p = problem(arrays, row, False)
    tolerance, ours = 0.5 if row.kind == "gather" else 0.05, p.cached
    writes = row.kind == "append"
    native = call_of(p)
    found = [{"row": row.title, "layout": "ours", "how": "native", **measured(p, native, p.error, tolerance, p.bytes)}]
    if writes:  # the layer just checked is the reference of the foreign layouts
        p.poison()
        native(0)
    for name in names:
        word = LAYOUTS[name]
        try:
            p.cached = here = InPlace(p, word)
            call = call_of(p)
        except Exception as error:
            found.append({"row": row.title, "layout": name, "how": "in place", "ok": False,
                          "note": f"{type(error).__name__}: {first_line(error)}"})  # fmt: skip
            continue
        finally:
            p.cached = ours

        def written(here: InPlace = here, word: str = word) -> float:
            """0 if every bit of layer 0 equals a native append's result, else 1."""
            again = ours_again(here.data, word, ours.blocks.shape)
            return 0.0 if p.arrays.equal(bits(again[:, :, 0]), bits(ours.blocks[:, :, 0])) else 1.0

        if writes:
            arrays.poison(here.data)
        line = measured(p if not writes else _Kept(p), call, written if writes else p.error, tolerance, p.bytes)
        found.append({"row": row.title, "layout": name, "how": "in place", **line})
        if not writes:
            before = p.lengths - getattr(p, "queries", 1)
            source = here.collection(p.lengths, 1, p.longest + 1)
            target = ours.collection(before, getattr(p, "newest", 1), p.longest + 1)

            def converted(layer: int, source: Any = source, target: Any = target) -> None:
                kv.ops.convert(source.get_key_cache(layer), target.get_key_cache(layer))
                if row.kind != "gather":
                    kv.ops.convert(source.get_value_cache(layer), target.get_value_cache(layer))
                native(layer)

            line = measured(p, converted, p.error, tolerance, p.bytes)
            found.append({"row": row.title, "layout": name, "how": "convert, run", **line})
        del here, call
        arrays.free()
    return found


class _Kept:
    """A problem whose native pool is not poisoned again, since the foreign pool was."""

    def __init__(self, p: Any) -> None:
        self.arrays, self.layers, self.bytes = p.arrays, p.layers, p.bytes

    def poison(self) -> None:
        pass


def as_table(found: Sequence[dict[str, Any]]) -> str:
    """The lines of a row, with times relative to the first, which is the native layout."""
    ours = found[0].get("us", float("nan"))
    times = ("µs", "us", ".1f"), ("of ours", lambda line: over(line, ours), ".3f")
    return shown(found, "row", "layout", "how", *times)


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--rows", metavar="TEXTS", help=f"as in python -m bench (default: {ROWS})")
    made.add_argument("--layouts", default=",".join(LAYOUTS), metavar="NAMES", help="parts of names (default: all)")
    options = made.parse_args(argv)
    rows = select(options.rows or (ROWS if device_of(options) == "cuda" else _SMALL), (*TABLE, *RANGE, *SMALL))
    names = [n for n in LAYOUTS if any(part.strip() in n for part in options.layouts.split(","))]
    return run_all(options, rows, lambda arrays, row: lines(arrays, row, names), as_table)


if __name__ == "__main__":
    sys.exit(main())

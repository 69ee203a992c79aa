# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The worker of random programs: attention of a random kind, cache, mask, score and batch, against the float64 model.

Each batch has at least 20 sequences, of lengths at the edges of tiles and pages and at random ones; tables are random,
and every slot that holds no token is NaN. ``python -m fuzz.answers PLACE [extreme]``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .functions import Function, draw
from .loop import serve

COUNTED = 2.2e38
PLACES = ("host", "sm_80", "sm_90a", "gpu")
SEQUENCES = 20  # of a batch, at least
QUERIES = {
    "bf16": ["bf16"],
    "f16": ["f16"],
    "f32": ["f32"],
}  # types of a query by the cache's; of 8 bits, the first two
PAGES = (1, 2, 3, 5, 8, 16, 16, 32, 48, 64, 128)
SIZES = (8, 16, 32, 40, 64, 64, 72, 80, 96, 128, 128, 192, 256)
TILES = ({"kind": "tile"}, {"kind": "tile", "instruction": "mma.sync"}, {"kind": "tile", "rows": 64, "keys": 16})


def place_of(name: str) -> Any:
    """One of ``PLACES``."""
    from reference import places

    if name == "gpu":
        return places.Torch()
    return places.Place() if name == "host" else places.Interpreted(name)


@dataclass
class Program:
    """Attention of a random form: the kernel, its batch, what it is asked, and a line that says so."""

    kernel: Any
    problem: Any
    numbers: np.random.Generator
    given: dict[str, Any]
    seen: Any
    score: Any
    text: str


def lengths(rng: random.Random, page: int, small: bool, most: int) -> tuple[list[int], list[int]]:
    """Cached and new tokens of the sequences, at edges of pages and tiles and between; ``most`` new ones."""
    from reference.edges import edges

    longest = 150 if small else 700
    at = sorted({n for extent in (page, 16, 64, 128) for n in edges(extent, 2, 3) if n <= longest})
    cached, new = [], []
    for _ in range(SEQUENCES + rng.randrange(4)):
        total = rng.choice(at) if rng.random() < 0.6 else rng.randint(0, longest)
        fresh = min(total, most, rng.choice([0, 1, 1, 2, most, rng.randint(0, most)]))
        cached.append(total - fresh)
        new.append(fresh)
    return cached, new


def schedule_of(rng: random.Random, where: str, latent: bool, most: int) -> dict[str, Any]:
    """No schedule, often; else a kind of kernel that the place has."""
    if where == "host" or rng.random() < 0.4:
        return {}
    if latent:
        return {"kind": rng.choice(["simt", "latent"])}
    tiles = TILES[1:2] if where == "sm_80" else TILES
    return dict(rng.choice([{"kind": "simt"}, {"kind": "decode", "max_queries": most}, *tiles]))


def program(seed: int, where: str, extreme: bool) -> Program:
    """The program of a seed."""
    from reference import edges
    from reference.operands import dense_parts, ragged_parts
    from reference.random_caches import stored_problem

    from kvarn.dialect import dtypes

    rng = random.Random(seed)
    small = where in ("sm_80", "sm_90a")
    stored = rng.choice(["bf16", "bf16", "f16", "f32", "f8e4m3", "f8e5m2", "i8"])
    latent = stored != "i8" and rng.random() < 0.15
    kind = "paged" if latent or stored == "i8" or rng.random() < 0.75 else rng.choice(["continuous", "fa3"])
    size = rng.choice([64, 96, 576] if latent else SIZES)
    page, group = rng.choice(PAGES), rng.choice([1, 2, 3, 4] if small else [1, 2, 3, 4, 5, 8, 16])
    shape: dict[str, Any] = {"num_heads": 1 if latent or small else rng.choice([1, 1, 2, 3])}
    if kind == "paged" and not latent and dtypes.by_name(stored).bits == 8 and (stored == "i8" or rng.random() < 0.5):
        shape |= {"scale_dtype": rng.choice(["f32", "f16", "bf16"]), "granularity": rng.choice([size, 32, 16, 4])}
    whole_granules = size % shape.get("granularity", 1) == 0  # which scales beside a buffer have
    operands = [edges.of_operands(dense_parts), edges.of_operands(ragged_parts)] if whole_granules else []
    forms = [
        edges.padded, edges.of_others, *operands, edges.with_prior, edges.of_two_sources,
    ]  # fmt: skip
    form = edges.latent if latent else rng.choice([*[edges.ragged] * 4, *forms])
    most = rng.choice([1, 3]) if rng.random() < 0.4 else 9 if small else 200
    kernel = edges.Kernel(
        place_of(where), schedule_of(rng, where, latent, most), 16, 64, dtype=stored,
        query=rng.choice(QUERIES.get(stored, ["bf16", "f16"])), group=group, head_size=size, page_size=page, kind=kind,
        shape=shape, form=form, value_size=size - 64 if size == 576 else size - 32 if latent else 0,
    )  # fmt: skip
    cached, new = lengths(rng, page, small, most)
    whole = {"head_size": size, "page_size": page, "is_mla": latent, **shape}
    numbers, problem = stored_problem(seed, kind, stored, cached=cached, new=new, **whole)
    made = Program(
        kernel, problem, numbers, {}, None, None,
        f"{kind} {stored} query {kernel.query} size {size} page {page} heads {shape} x {group} up to {most} new "
        f"{form.__qualname__} {kernel.schedule}",
    )  # fmt: skip
    _ask(made, rng, seed, extreme)
    return made


def _ask(made: Program, rng: random.Random, seed: int, extreme: bool) -> None:
    """Draw a mask, and a score where the form takes one."""
    from reference import edges

    batch, form = len(made.problem.new), made.kernel.form
    heads = made.kernel.group * made.problem.collection.num_heads
    if rng.random() < (0.85 if extreme else 0.5):
        mask = draw(seed, "mask", batch, heads, extreme)
        made.given["mask"], made.seen = mask, mask.evaluated
        made.text += f" mask({mask.text})"
    else:
        span = rng.choice([1, 15, 16, 17, 33, 64, 100, edges.MOST if extreme else 128])
        name = rng.choice(["causal", "null", "sliding_window", "chunked", "chunked_causal"])
        of_name = edges.named(name, None if name in ("causal", "null") else span)
        made.given |= of_name.options
        made.seen = of_name.seen
        made.text += f" {of_name.name}"
    if form in (edges.ragged, edges.padded, edges.latent) and rng.random() < 0.6:
        score = draw(seed + 1, "score", batch, heads, extreme)
        made.given["score"], made.score = score, score.evaluated
        made.text += f" score({score.text})"
    elif form in (edges.ragged, edges.padded) and rng.random() < 0.4:
        cap = rng.choice([1.0, 20.0, 1e5 if extreme else 50.0])
        made.given["softcap"], made.score = cap, lambda s, b, h, q, k: cap * np.tanh(s / cap)
        made.text += f" softcap {cap}"


def tolerances(made: Program) -> tuple[float, float]:
    """Of an output and a log-sum-exp: those of values and keys of a normal distribution, by how large these are.

    Scaled keys are large too, and rounded to 16 bits: their scores are, and weights differ by as much again.
    """
    from reference.edges import LAYER
    from reference.model import read

    largest = []
    for cache in made.problem.caches(LAYER):
        totals = made.problem.cached + made.problem.new
        found = [np.abs(read(cache, b, np.arange(n))).max() for b, n in enumerate(totals) if n]
        largest.append(max([4.0, *found]) / 4)
    out, lse = made.kernel.tolerances
    scaled = 1 + (made.problem.collection.scales is not None)
    return scaled * out * largest[-1], scaled * lse * largest[0]


def counted(lse: np.ndarray) -> np.ndarray:
    """Numbers, those further from 0 than 2.2e38 as that: a score beyond counts as one of 2.2e38 to 2.4e38."""
    return np.where(np.isfinite(lse), np.clip(lse, -COUNTED, COUNTED), lse)


def outcome(seed: int, where: str, extreme: bool) -> str:
    """What came of a program: ``ok``, ``refused ...``, ``wrong ...`` or ``raised ...``."""
    from reference import edges
    from reference.random_caches import random_query

    import kvarn as kv

    made = program(seed, where, extreme)
    kernel, problem = made.kernel, made.problem

    class Call(edges.Call):
        def poisoned(self, query: np.ndarray | None = None) -> dict[str, Any]:
            found = super().poisoned(query)
            return found if kernel.schedule else {**found, "schedule": None}

        def want(self, layer: int = edges.LAYER, **more: Any) -> edges.Rows:
            return super().want(layer, **more, **({"score": made.score} if made.score else {}))

    query = random_query(made.numbers, problem, kernel.group * problem.collection.num_heads, kernel.query)
    options = {
        name: (x.traced, *map(kernel.place.put, x.arrays)) if isinstance(x, Function) else x
        for name, x in made.given.items()
    }
    no_mask: Any = None
    call = Call(kernel, no_mask, made.numbers, problem, query, options, made.seen)
    try:
        with kernel.place.active(), np.errstate(all="ignore"):
            found, want = kernel.form(call)
    except (ValueError, TypeError, NotImplementedError, kv.KernelError) as error:
        return f"refused {type(error).__name__}: {error} | {made.text}"
    except Exception as error:
        return f"raised {type(error).__name__}: {error} | {made.text}"
    found, want = ((out, counted(lse)) for out, lse in (found, want))
    said = edges.failures(problem, found, want, tolerances(made))
    return f"wrong {len(said)}: {said[0]} | {made.text}" if said else "ok"


def outcomes(where: str, extreme: bool) -> Generator[str, str, None]:
    """Send a seed, get what came of its program."""
    said = "ready"
    while True:
        seed = int((yield said).split()[0])
        said = outcome(seed, where, extreme)


if __name__ == "__main__":
    serve(outcomes(sys.argv[1], "extreme" in sys.argv[2:]))

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Schedules: what is legal compiles and is right, what is not is refused, whoever is asked."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from mlir import ir
from reference import attention as reference, emulated
from reference.kinds import schedule_for
from reference.random_caches import Problem, random_query, stored_problem

import kvarn as kv
from kvarn import dispatch
from kvarn.compilation import driver as compiler
from kvarn.dialect import schedules
from kvarn.dialect.dtypes import bf16
from kvarn.dialect.layout import CacheSpec, spec_of
from kvarn.lowering import kernels, pipeline, runner
from kvarn.lowering.kernels.attention import expansion as attention_expansion
from kvarn.lowering.kernels.attention.case import Case
from kvarn.lowering.schedules import attention as tile_schedule, decode as decode_schedule, decode_table, tuned
from kvarn.lowering.target import by_name
from kvarn.ops import mla, reads, writes

CAUSAL = (("mask", "causal"), ("span", 0), ("softcap", 0.0))
DECODE = {"kind": "decode", "max_queries": 1, "max_batch": 2}
SENTINEL = 72.0


def problem_of(seed: int = 1, **options: Any) -> tuple[Problem, np.ndarray]:
    shape = {"dtype": "f16", "cached": [50, 20], "new": [1, 1], "head_size": 32, "num_heads": 4, "page_size": 16}
    rng, problem = stored_problem(seed, **{**shape, **options})
    return problem, random_query(rng, problem, 4, over_8_bits="f16")


def operands_of(problem: Problem, query: np.ndarray, out: np.ndarray) -> tuple[Any, ...]:
    return problem.collection, 1, query, problem.row_offsets, 32**-0.5, out


def on_gpu(problem: Problem, query: np.ndarray, schedule: dict[str, Any], target: str = "sm_90a") -> np.ndarray:
    out = np.full_like(query, SENTINEL)
    emulated.run(reads._ATTENTION, operands_of(problem, query, out), CAUSAL, schedule, target)
    return out


@pytest.mark.parametrize("schedule", [{"kind": "tile"}, {"kind": "simt"}, DECODE], ids=lambda s: s["kind"])
def test_a_schedule_of_gpu_kernels_says_nothing_of_the_host(schedule):
    """One script runs on both; what is legal nowhere is refused on both."""
    problem, query = problem_of()
    given = problem.collection, 1, query, problem.row_offsets
    np.testing.assert_array_equal(kv.ops.attention(*given, schedule=schedule), kv.ops.attention(*given))
    with pytest.raises(ValueError, match="the schedule's kind must be host on host"):
        kv.ops.attention(*given, schedule={**schedule, "zork": 1})


# --- what is refused -------------------------------------------------------------------------------


OF_DECODE = [
    *(({"tile": n}, f"tile must be 16, 32, 64 or 128, got {n}") for n in (24, 7, True)),
    ({"warps": 3}, "warps must be 1, 2 or 4, a divisor of the 4 warps that a token's query rows need, got 3"),
    ({"warps": 2.0}, r"warps must be in \[1, 32\], got 2.0"),
    ({"min_tiles": 0}, "min_tiles must be an integer of 1 or more, got 0"),
    *(({"blocks": n}, rf"blocks must be in \[1, 32\], got {n}") for n in (-1, 0)),
    ({"stages": "x"}, r"stages must be in \[2, 16\], got 'x'"),
    ({"stages": 1 << 70}, r"stages must be in \[2, 16\], got 1180591620717411303424"),
    ({"combine": 33}, r"combine must be in \[0, 32\], got 33"),
    ({"split_size": -1}, "split_size must be an integer of 0 or more, got -1"),
    ({"batch_invariant": True, "split_size": 0}, "batch_invariant needs fixed splits of at least one token"),
    ({"stages": 16, "tile": 128}, r"block of the decode kernel must fit 232448 bytes of shared memory, got \d+"),
    ({"max_batch": 0}, "max_batch must be an integer of 1 or more, got 0"),
    ({"typo": 1}, "entry 'typo' is unknown: a decode kernel of this operation has kind, max_queries, max_batch, "),
    ({"batch_invarient": True}, "did you mean 'batch_invariant'"),
    ({"threads": 128}, "entry 'threads' is unknown"),
]
OF_SIMT = "a simt kernel of this operation has kind, max_queries, max_batch, batch_invariant, early"
ILLEGAL = [
    *(({}, {**DECODE, **entries}, message) for entries, message in OF_DECODE),
    ({"page_size": 1}, {**DECODE, "tile": 64}, "tile must be 16 or 32, at most 32 pages of 1 tokens, got 64"),
    *(({}, {"kind": "simt", name: 2}, f"entry '{name}' is .*: {OF_SIMT}") for name in ("tile", "stages", "typo")),
    ({"new": [40, 3]}, {"blocks": 3}, "entry 'blocks' is only for kernels of kind decode: a tile kernel"),
]


@pytest.mark.whole
@pytest.mark.parametrize(("given", "schedule", "message"), ILLEGAL, ids=[message[:40] for *_, message in ILLEGAL])
def test_what_a_kernel_cannot_be_is_refused_in_words(given, schedule, message):
    problem, query = problem_of(**given)
    with pytest.raises(ValueError, match=f"the schedule's .*{message}"):
        on_gpu(problem, query, schedule)


def host_calls() -> dict[str, Any]:
    """Calls on the host, by operation; each takes a schedule."""
    problem, query = problem_of()
    pool, cache, offsets = problem.collection, problem.collection.get_key_cache(1), problem.row_offsets
    rows = np.zeros((2, 4, 32), np.float16)
    ids = np.zeros((1,), np.int32)
    rng, latent = stored_problem(3, dtype="f32", cached=[9], new=[1], head_size=96, num_heads=1, is_mla=True)
    latent_query = random_query(rng, latent, 2)
    rows_of_latent = (latent.collection, 1, latent_query, latent.row_offsets)
    ragged = kv.KVCacheMHAOperand(cache), kv.KVCacheMHAOperand(pool.get_value_cache(1))
    return {
        "attention": lambda s: kv.ops.attention(pool, 1, query, offsets, schedule=s),
        "attention of operands": lambda s: kv.ops.attention(*ragged, query, offsets, schedule=s),
        "attention_padded": lambda s: kv.ops.attention_padded(
            pool, 1, query[:, None], np.ones(2, np.int32), schedule=s
        ),
        "mla_attention": lambda s: kv.ops.mla_attention(*rows_of_latent, value_size=64, schedule=s),
        "append": lambda s: kv.ops.append(pool, 1, rows, rows, offsets, schedule=s),
        "copy_pages": lambda s: kv.ops.copy_pages(pool, ids, ids + 1, schedule=s),
    }


HOST = list(host_calls())


@pytest.mark.parametrize("name", HOST)
@pytest.mark.parametrize("entry", [{"typo": 1}, {"tile": 16}, {"threads": 64}, {"batch_invarient": True}], ids=str)
def test_the_host_refuses_entries_that_it_does_not_have(name, entry):
    with pytest.raises(
        ValueError, match=rf"kv.ops.\w+: the schedule's entry '{next(iter(entry))}' is .*: a host kernel"
    ):
        host_calls()[name](entry)


@pytest.mark.parametrize("name", HOST)
@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([("stages", 3)], r"given as a mapping, got \[\('stages', 3\)\]"),
        ([], r"given as a mapping, got \[\]"),
        ("decode", "given as a mapping, got 'decode'"),
        (0, "given as a mapping, got 0"),
        ({1: 2}, "named by strings, got 1"),
        ({1: 2, "stages": 3}, "named by strings, got 1"),
    ],
    ids=str,
)
def test_a_schedule_is_a_mapping_of_names(name, schedule, message):
    with pytest.raises((TypeError, ValueError), match=rf"kv.ops.\w+: the schedule's entries must be {message}"):
        host_calls()[name](schedule)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"max_queries": [1]}, r"max_queries must be an integer of 1 or more, got \[1\]"),
        ({"max_queries": True}, "max_queries must be an integer of 1 or more, got True"),
        ({"batch_invariant": "yes"}, "batch_invariant must be true or false, got 'yes'"),
        ({"early": "yes"}, "early must be true or false, got 'yes'"),
    ],
)
def test_a_value_is_refused_by_name_whatever_was_called_before(schedule, message):
    call = host_calls()["attention"]
    for taken in ({"max_queries": 1}, *EARLY):
        call(taken)
    with pytest.raises(ValueError, match=message):
        call(schedule)


@pytest.mark.parametrize("name", ["attention", "attention of operands", "attention_padded"])
def test_a_bound_of_the_batch_that_the_batch_exceeds_is_refused(name):
    call = host_calls()[name]
    call({"max_batch": 2})
    with pytest.raises(ValueError, match="max_batch must be at least the 2 sequences, got 1"):
        call({"max_batch": 1})


def test_every_operation_that_is_expanded_declares_its_schedules():
    assert sorted(schedules.OPERATIONS) == sorted(kernels.operations())


@pytest.mark.parametrize("threads", [96, 1024])
def test_every_legal_number_of_threads_appends(threads):
    problem, _ = problem_of(page_size=4)
    rng, expected = np.random.default_rng(5), problem.collection.blocks.copy()
    rows = [rng.standard_normal((2, 4, 32)).astype(np.float16) for _ in range(2)]
    operands = (problem.collection, 1, rows[0], problem.row_offsets, rows[1])
    emulated.run(writes._APPEND, operands, (), {"threads": threads})
    for b, t in enumerate(problem.cached):
        for cache, row in zip(problem.caches(1), rows, strict=True):
            found = cache.load(b, np.arange(4)[:, None], int(t), np.arange(32))
            np.testing.assert_array_equal(found, row[b])
    assert (problem.collection.blocks != expected).any()


# --- promises --------------------------------------------------------------------------------------


def alone_and_together(problem: Problem, query: np.ndarray, run: Any) -> None:
    """A sequence has the same bits in its batch and by itself."""
    together = run(problem, query)
    for b in range(len(problem.cached)):
        rows = slice(int(problem.row_offsets[b]), int(problem.row_offsets[b + 1]))
        np.testing.assert_array_equal(run(problem.only(b), query[rows]), together[rows])


def on_host(problem: Problem, query: np.ndarray) -> np.ndarray:
    return kv.ops.attention(problem.collection, 1, query, problem.row_offsets, schedule={"batch_invariant": True})


@pytest.mark.parametrize(("kind", "head_size"), [("host", 32), ("simt", 32), ("mma", 32), ("mma", 64)], ids=str)
def test_batch_invariance_is_kept_by_every_kernel(kind, head_size):
    """Decode's is tested where its parts are: their rows lie in tiles of their own, whose keys begin at multiples."""
    problem, query = problem_of(7, cached=[40, 0, 33], new=[18, 5, 2], head_size=head_size, num_heads=1)
    query = np.ascontiguousarray(query[:, :2])
    schedule = {**schedule_for(kind), "batch_invariant": True}
    run = on_host if kind == "host" else lambda p, q: on_gpu(p, q, schedule)
    alone_and_together(problem, query, run)


@pytest.mark.parametrize("schedule", [{}, {"splits": 2}], ids=str)
def test_a_decode_among_decodes_has_the_bits_that_it_has_beside_a_prompt(schedule):
    """The line between few and many new tokens is the batch's: without ``max_queries`` nothing knows where it is."""
    problem, query = problem_of(9, cached=[40, 33, 0], new=[1, 1, 70], head_size=64, num_heads=1)
    schedule = {"batch_invariant": True, **schedule}
    collection = problem.collection
    assert reads.scheduled(collection, query, schedule) == schedule
    alone_and_together(problem, query, lambda p, q: on_gpu(p, q, {**schedule, "keys": 32}))


def test_weights_over_8_bit_floats_have_the_digits_of_f16():
    """Of bf16 they have three bits less, and the error is 1e-3. Keys are converted, which adds none of their own."""
    problem, query = problem_of(12, cached=[70, 40], new=[2, 1], dtype="f8e4m3", num_heads=1)
    query = random_query(np.random.default_rng(1), problem, 4, over_8_bits="bf16")
    out = np.full(query.shape, SENTINEL, np.float32)
    schedule = {"kind": "tile", "stored_keys": False}
    emulated.run(reads._ATTENTION, operands_of(problem, query, out), CAUSAL, schedule, "sm_90a")
    want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets)
    assert np.linalg.norm(out - want) < 3e-4 * np.linalg.norm(want)


def latent_run(schedule: dict[str, Any]) -> Any:
    def run(problem: Problem, query: np.ndarray) -> np.ndarray:
        out = np.full((*query.shape[:2], 128), SENTINEL, query.dtype)
        operands = (problem.collection, 1, query, problem.row_offsets, 0.1, out)
        attributes = (("value_size", 128), ("mask", "causal"), ("span", 0))
        emulated.run(mla._MLA_ATTENTION, operands, attributes, schedule)
        return out

    return run


def latent_problem() -> tuple[Problem, np.ndarray]:
    return problem_of(8, cached=[90, 3], new=[1, 2], head_size=160, num_heads=1, is_mla=True)


@pytest.mark.parametrize("schedule", [{"kind": "simt"}, {"kind": "latent", "splits": 3}, {"splits": 1}], ids=str)
def test_batch_invariance_is_kept_over_latent_rows(schedule):
    alone_and_together(*latent_problem(), latent_run({**schedule, "batch_invariant": True}))


def test_batch_invariance_is_refused_where_splits_follow_the_batch():
    with pytest.raises(ValueError, match="batch_invariant needs splits that do not depend on the batch, got none"):
        latent_run({"batch_invariant": True})(*latent_problem())


def chosen(
    schedule: dict[str, Any], heads: int, group: int, size: int = 128, page: int = 16, dtype: str = "bf16"
) -> dict[str, Any]:
    """The schedule of an attention of bf16 queries over pages after the pass."""
    what = specialisation(schedule, heads, group, size, page, dtype)
    module = dispatch.build(what, compiler.context())
    with compiler.diagnosed(module.context):
        runner.run(module, pipeline.steps(by_name("sm_90a")), stop_after="select-kv-schedule")
    with module.context:
        (block,) = module.body.operations[0].regions[0].blocks
        found = ir.DictAttr(block.operations[0].attributes["schedule"])
        return {n.name: n.attr.value for n in found}


def specialisation(
    schedule: dict[str, Any], heads: int, group: int, size: int = 128, page: int = 16, dtype: str = "bf16"
) -> dispatch.Specialisation:
    spec = spec_of("paged", dtype, heads, size, page_size=page)
    rows = dispatch.BufferType(bf16, (None, heads * group, size))
    operands = {
        "collection": dispatch.HandleType("collection", spec), "layer": dispatch.ScalarType(kv.i32), "query": rows,
        "row_offsets": dispatch.BufferType(kv.i32, (None,)), "scale": dispatch.ScalarType(kv.f32), "out": rows,
    }  # fmt: skip
    entries = tuple(sorted(schedule.items()))
    return dispatch.Specialisation("kv.attention", tuple(operands.items()), CAUSAL, entries, "sm_90a")


@pytest.mark.parametrize(
    ("size", "group", "new", "batch", "dtype", "kind"),
    [
        (128, 4, 4, 128, "bf16", "decode"),  # 16 rows: a warp has them
        (128, 4, 8, 128, "bf16", "tile"),
        (128, 4, 8, 4, "bf16", "decode"),
        (128, 8, 8, 1, "bf16", "tile"),
        (128, 4, 16, 1, "bf16", "tile"),
        # Of 8 bits, where heads are narrow and sequences many.
        (64, 4, 4, 64, "f8e4m3", "decode"),
        (64, 4, 8, 64, "f8e4m3", "tile"),
        (72, 4, 8, 64, "f8e4m3", "decode"),
    ],
)
def test_more_rows_than_a_warp_has_are_tiles(size, group, new, batch, dtype, kind):
    assert chosen({"max_queries": new, "max_batch": batch}, 8, group, size, dtype=dtype)["kind"] == kind


def test_an_invariant_sequence_has_the_same_kernel_in_any_batch():
    bounds = [{"max_queries": 8, "max_batch": batch} for batch in (1, 16, 128, 1024)]
    free = {chosen(b, 8, 4)["kind"] for b in bounds}
    kept = {chosen({**b, "batch_invariant": True}, 8, 4)["kind"] for b in bounds}
    assert free == {"decode", "tile"}
    assert kept == {"tile"}
    with pytest.raises(
        ValueError, match="batch_invariant cannot be kept: fewer sequences have a kernel of kind decode"
    ):
        chosen({"max_queries": 1, "max_batch": 1 << 20, "batch_invariant": True}, 8, 8)


def test_heads_whose_tiles_fit_no_shared_memory_are_not_for_tiles():
    case = Case.plain(CacheSpec("paged", kv.i8, 2, 256, 16, False, kv.f32, 256), kv.f32, 8)
    assert tile_schedule.problems(case, by_name("sm_80"), 16) == []
    (problem,) = tile_schedule.problems(case, by_name("sm_89"), 16)
    assert problem.startswith("has none for sm_89: tiles must fit 101376 bytes of shared memory")


def code_of(schedule: dict[str, Any]) -> str:
    """The PTX of a small attention."""
    made = dispatch.artifact(specialisation({"max_queries": 1, "max_batch": 2, **schedule}, 2, 2, 32))
    return made.code["ptx"]


@pytest.mark.parametrize("kind", ["simt", "mma", "decode"])
def test_what_the_caller_promises_is_taken_by_every_kernel(kind):
    """Only a decode starts early: the others wait for the kernel before them, whatever it writes."""
    with_it, also, without, silent = (code_of({**schedule_for(kind), **e}) for e in EARLY)
    assert with_it == also
    assert without == silent
    assert (with_it == without) == (kind != "decode")


EARLY = ({"early": True}, {"early": 1}, {"early": False}, {})


# --- what is legal ---------------------------------------------------------------------------------

VALUES = {
    "warps": (1, 2, 3, 4, 6, 8, 16, 33), "stages": (1, 2, 3, 5, 16), "tile": (8, 16, 32, 48, 64, 128),
    "blocks": (0, 1, 2, 7, 32), "min_tiles": (0, 1, 3, 9), "combine": (0, 1, 3, 16, 32),
    "split_size": (-1, 0, 1, 40, 512), "early": (False, True), "batch_invariant": (False, True),
}  # fmt: skip


def drawn(seed: int, count: int, config: decode_schedule.DecodeConfig, target: Any) -> list[dict[str, Any]]:
    """Random decode schedules that are called legal."""
    rng, found = np.random.default_rng(seed), []
    bounds = {"kind": "decode", "max_queries": config.max_queries, "max_batch": config.max_batch}
    while len(found) < count:
        names = [name for name in VALUES if rng.random() < 0.6]
        schedule = {**bounds, **{n: VALUES[n][rng.integers(len(VALUES[n]))] for n in names}}
        if schedules.why_unsupported("kv.attention", schedule, target, "decode", config) is None:
            found.append(schedule)
    return found


CASES = [
    {"num_heads": 4, "head_size": 32, "cached": [90, 3], "new": [1, 1]},
    {"num_heads": 1, "head_size": 64, "cached": [30, 70], "new": [2, 1], "page_size": 4},
    {"num_heads": 2, "head_size": 32, "cached": [50, 0], "new": [8, 3], "dtype": "f8e4m3", "page_size": 8},
    {"num_heads": 2, "head_size": 64, "cached": [40], "new": [1], "dtype": "i8", "scale_dtype": "f32",
     "granularity": 32, "page_size": 2},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_schedule_that_is_legal_computes_the_right_numbers(number):
    options = CASES[number]
    problem, query = problem_of(20 + number, **options)
    spec, most = problem.collection.cache_spec, int(problem.new.max())
    case, batch = Case.plain(spec, kv.f16, 4), len(problem.cached)
    config = decode_schedule.DecodeConfig(case, 1 << (most - 1).bit_length(), max_batch=batch)
    scale = 32**-0.5 if spec.dtype.bits > 8 else 0.0005 if spec.quantized else 0.1
    want, _ = reference.attention(problem.collection, 1, query, problem.row_offsets, scale=scale)
    for schedule in drawn(number, 2, config, by_name("sm_90a")):
        out = np.full_like(query, SENTINEL)
        operands = (problem.collection, 1, query, problem.row_offsets, scale, out)
        emulated.run(reads._ATTENTION, operands, CAUSAL, schedule)
        top = max(1.0, np.abs(want).max())
        np.testing.assert_allclose(out / top, want / top, rtol=4e-3, atol=4e-3, err_msg=str(schedule))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a"])
def test_every_schedule_that_is_legal_is_completed_and_fits(target):
    chip, seen = by_name(target), 0
    shapes = itertools.product((1, 3, 8), (1, 4), (16, 80, 256), (1, 16), (1, 8), (1, 64, 16384))
    for seed, (heads, group, size, page, queries, batch) in enumerate(shapes):
        spec = spec_of("paged", "bf16", heads, size, page_size=page)
        case = Case.plain(spec, bf16, group * heads)
        if not decode_schedule.supports(case, queries, chip, batch):
            continue
        config = decode_schedule.DecodeConfig(case, queries, max_batch=batch)
        for schedule in drawn(seed, 3, config, chip):
            whole = {**decode_table.choose(chip, config, schedule), **schedule}
            assert schedules.why_unsupported("kv.attention", whole, chip, "decode", config) is None
            made = decode_schedule.configured(chip, config, whole)
            assert decode_schedule.block_bytes(made) + made.padding <= chip.shared_bytes
            assert decode_schedule.combine_bytes(made) <= chip.shared_bytes
            seen += 1
    assert seen > 200


# --- one owner -------------------------------------------------------------------------------------


def test_the_kind_is_chosen_once(monkeypatch):
    calls = []
    kind_of = attention_expansion.kind_of

    def counted(*args: Any) -> str:
        calls.append(args)
        return kind_of(*args)

    monkeypatch.setattr(attention_expansion, "kind_of", counted)
    dispatch.compile_operation(specialisation({"max_queries": 1, "max_batch": 1}, 2, 4, 32))
    assert len(calls) == 1


def test_a_schedule_may_be_filled_in_part_and_then_stays_what_it_is():
    whole = chosen({"max_queries": 1, "max_batch": 4, "stages": 3}, 4, 4, 64)
    assert whole["stages"] == 3
    assert {"kind", *schedules.DECODE.names} <= set(whole)
    assert chosen(whole, 4, 4, 64) == whole
    texts = set()
    for entries in ({"max_queries": 1, "max_batch": 4, "stages": 3}, whole):
        module = dispatch.build(specialisation(entries, 4, 4, 64))
        texts.add(kv.compile(str(module), target="sm_90a").asm["ptx"])
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("typo = 1 : i64", "has a schedule whose entry 'typo' is unknown"),
        ("max_batch = 99999999999999999999999 : i128", "has a schedule whose max_batch must be an integer of 1 or mor"),
        ("kind = [1]", "has a schedule whose kind must be one of host, simt, tile, decode, got"),
        ("tile = 24 : i64", "has a schedule whose tile must be 16, 32, 64 or 128, got 24"),
        ("warps = 2 : i64, threads = 64 : i64", "has a schedule whose entry 'threads' is unknown"),
        ("", r"'kv\.attention' op schedule must be a dictionary, got 3 : i64"),
    ],
)
def test_the_verifier_knows_names_types_and_ranges(entry, message):
    text = str(dispatch.build(specialisation({"max_queries": 1}, 4, 4, 64)))
    with pytest.raises(ValueError, match=message):
        kv.compile(text.replace("{max_queries = 1 : i64}", f"{{{entry}}}" if entry else "3 : i64"), target="sm_90a")


def test_an_illegal_entry_of_the_users_table_is_refused_with_its_file(tmp_path):
    case = Case.plain(spec_of("paged", "bf16", 8, 128, page_size=16), bf16, 32)
    config = decode_schedule.DecodeConfig(case, 1)
    path = tmp_path / "tune.json"
    with compiler.env.override(tune=path):
        tuned.save(path, [(tuned.Key.of("sm_90a", config), {"warps": 3}, 1.0)])
        with pytest.raises(ValueError, match=r"tune.json has an entry for this case whose warps must be 1, 2, 4 or 8"):
            decode_table.choose(by_name("sm_90a"), config, {}, by_user=True)


# --- old names -------------------------------------------------------------------------------------

OLD_NAMES = {
    "split": ("kv.attention", {"kind": "decode", "split": 64}, {"kind": "decode", "split_size": 64}),
    "slots": ("kv.operand_attention", {"kind": "tile", "slots": 4}, {"kind": "tile", "staging_stages": 4}),
    "few": ("kv.attention", {"kind": "tile", "few": 4}, {"kind": "tile", "decode_threshold": 4}),
    "kind few": ("kv.project_append", {"kind": "few", "rows": 64}, {"kind": "stream_k", "rows": 64}),
    "kind whole": ("kv.project_append", {"units": 3, "kind": "whole"}, {"kind": "full_k", "tile_columns": 48}),
}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_old_name_is_accepted_for_one_release_with_a_warning(name):
    operation, old, new = OLD_NAMES[name]
    renamed = len(old.items() - new.items())
    with pytest.warns(DeprecationWarning, match="the old name goes with the next release") as warned:
        assert schedules.current(operation, old) == new
    assert [w.filename for w in warned] == [__file__] * renamed
    assert schedules.why_unsupported(operation, old) is schedules.why_unsupported(operation, new) is None
    assert schedules.current(operation, new) is new


def test_every_old_name_has_a_case():
    entries = {e.old_name for o in schedules.OPERATIONS.values() for k in o.kinds for e in (*o.entries, *k.entries)}
    kinds = {f"kind {k.old_name}" for o in schedules.OPERATIONS.values() for k in o.kinds if k.old_name}
    given = {name for _, old, new in OLD_NAMES.values() for name in old.keys() - new.keys()}
    assert given == entries - {""}
    assert kinds == {name for name in OLD_NAMES if name.startswith("kind")}


def test_an_old_name_beside_the_new_one_is_refused():
    why = str(schedules.why_unsupported("kv.attention", {"split": 64, "split_size": 64}))
    assert why.startswith("entry 'split' is unknown"), why


def test_old_names_in_the_ir_are_completed_as_new_ones():
    """Also those that select-kv-schedule of the release before wrote."""
    given = {"max_queries": 1, "max_batch": 4, "stages": 3}
    with pytest.warns(DeprecationWarning, match="the schedule entry 'split' is 'split_size' now"):
        assert chosen({**given, "split": 64}, 4, 4, 64) == chosen({**given, "split_size": 64}, 4, 4, 64)
    mixed = chosen({"max_batch": 64, "decode_threshold": 4}, 4, 4, 64, dtype="f8e4m3")
    new = {"decode_share"}
    old = {name: value for name, value in mixed.items() if name in new or not name.startswith("decode_")}
    old |= {f"few_{name.removeprefix('decode_')}": mixed[name] for name in mixed.keys() - old.keys()}
    old |= {"few": old.pop("few_threshold"), "few_split": old.pop("few_split_size")}
    old["slots"] = old.pop("staging_stages")
    with pytest.warns(DeprecationWarning, match="the old name goes with the next release"):
        assert chosen(old, 4, 4, 64, dtype="f8e4m3") == mixed


def test_old_names_in_a_call_run_the_same_kernel():
    problem, query = problem_of()
    with pytest.warns(DeprecationWarning, match="the schedule entry 'split' is 'split_size' now"):
        out = on_gpu(problem, query, {**DECODE, "split": 32})
    np.testing.assert_array_equal(out, on_gpu(problem, query, {**DECODE, "split_size": 32}))

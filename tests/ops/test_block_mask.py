# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Block masks: what they list, and attention by them; on the host, and as a GPU's code in the interpreter.

Calls by block masks are rows of ``reference.function_rows``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import attention as reference, block_masks
from reference.attention_functions import BIAS_BY_DISTANCE, DOCUMENTS, document, problem_of, query_of
from reference.block_masks import CASES, poison_unlisted
from reference.case import LAYER, ByBlocks, Case, Mask, Row, assert_same_bits, mostly_on_host, rows
from reference.function_rows import BATCH, BLIND, BY_HEAD, OF_F16, ONE, TABLES, TILES, kept
from reference.operands import cache_parts, dense_parts, ragged_parts
from reference.places import Place
from reference.shared_prefixes import close, permuted

import kvarn as kv

pytestmark = pytest.mark.whole

TILE = {"rows": 64, "keys": 32}


@rows(TABLES["block masks"])
def test_attention_by_a_block_mask_is_that_by_its_mask(row: Row, kernel: str):
    row.check(kernel)


def case_of(cached: Any, new: Any, mask: Any = DOCUMENTS, **given: Any) -> Case:
    """A case of one KV head of two query heads, unless something else is given."""
    return Case(cached=cached, new=new, mask=mask, **{**OF_F16, **ONE, **given})


def made(place: Place, case: Case, form: ByBlocks = TILES, **options: Any) -> Any:
    """The block mask of a case."""
    query, offsets = place.put(case.query_rows), place.put(case.offsets)
    return form.made(case, place, case.source(place)[0], query, [offsets], **options)


def attended(place: Place, case: Case, problem: Any = None, **options: Any) -> Any:
    """Output and log-sum-exp, over a case's pool or that of another problem; of its mask without a block mask."""
    by_mask = {"schedule": {"kind": "tile", **TILE} if place.name != "host" else {}}
    options = {"mask": None} | options if "block_mask" in options else by_mask | options
    source = place.collection((problem or case.problem).collection), LAYER
    return case.launch(place, case.operation, source, case.query_rows, case.offsets, **options)


def entries(place: Place, found: Any) -> Any:
    return block_masks.entries(place.get(found.blocks))


LISTED = [
    *((case, group, None, None) for case, group in zip(CASES, (1, 3, 1, 3), strict=True)),
    *((case, group, 64, 16) for case, group in zip(CASES, (3, 1, 3, 1), strict=True)),
]


@pytest.mark.parametrize(("case", "group", "rows", "keys"), LISTED)
def test_a_tile_of_keys_is_listed_where_a_row_sees_any_of_it(place, case, group, rows, keys):
    rng, problem = problem_of(1, cached=BATCH[0], new=BATCH[1])
    query, ids = query_of(rng, problem, group), np.sort(rng.integers(0, 3, (4, 200)), axis=1).astype(np.int32)
    mask, model = CASES[case]
    c, q, offsets = place.collection(problem.collection), place.put(query), place.put(problem.row_offsets)
    found = kv.ops.block_mask(c, q, offsets, (mask, place.put(ids)), rows=rows, keys=keys)
    heads, outer = query.shape[1], block_masks.OUTER.get(case)
    want = block_masks.lists(problem, heads, model(ids), found.rows, found.keys, case == "by head", outer)
    blocks = place.get(found.blocks)
    assert blocks.shape[:2] == (len(want), len(want[0]))
    assert block_masks.entries(blocks) == want
    whole = any(e & 1 for of_tile in want for of_head in of_tile for e in of_head)
    told = [e >= block_masks.BY_POSITIONS for of_tile in want for of_head in of_tile for e in of_head]
    assert outer is None or (any(told) and not all(told)), "positions tell of all tiles, or of none"
    assert whole or keys is None or "documents" not in case or "window" in case, "no tile is seen whole"


def test_attention_by_a_block_mask_has_the_bits_of_that_by_its_mask(place):
    case = case_of(*BATCH, BY_HEAD, heads=2, score=BIAS_BY_DISTANCE)
    assert_same_bits(attended(place, case, block_mask=made(place, case)), attended(place, case))


def test_tiles_that_no_row_sees_are_not_visited(place):
    """Values that are NaN reach every row of a tile that visits them, on a GPU."""
    ids = (np.arange(100, dtype=np.int32)[None] >= 32).astype(np.int32)
    case = case_of([0], [100], kept(document, None, ids))
    found = made(place, case)
    _, values = case.problem.caches(LAYER)
    poison = np.full((32, 1, 32), np.nan, np.float16)
    values.store(0, np.zeros((1, 1), int), np.arange(32)[:, None, None], np.arange(32), poison)
    out, _ = attended(place, case, block_mask=found)
    assert np.isnan(out[:32].astype(np.float32)).all()
    assert np.isfinite(out[32:].astype(np.float32)).all(), "32 tokens are a tile of 64 rows, of the second document"


@pytest.mark.parametrize("place", ["sm_90a"], indirect=True)
def test_the_mask_is_not_asked_about_tiles_that_are_seen_whole(place):
    ids = np.zeros((1, 100), np.int32)
    case = case_of([96], [2], kept(document, None, ids))
    found, want = made(place, case), attended(place, case, mask="null")
    ids[:, :96] = 1  # what the lists do not know
    assert_same_bits(attended(place, case, block_mask=found), want)
    assert np.abs(attended(place, case, schedule={"kind": "simt"})[0] - want[0]).max() > 0.1


def test_a_block_mask_does_not_depend_on_where_pages_lie(place):
    case, other = (case_of(*BATCH) for _ in range(2))
    moved = permuted(other.problem)
    other.problem.collection = moved.collection
    found = [made(place, x) for x in (case, other)]
    assert entries(place, found[0]) == entries(place, found[1])
    assert_same_bits(*(attended(place, x, block_mask=f) for x, f in zip((case, other), found, strict=True)))


def test_keys_are_split_by_the_tiles_that_are_listed(place):
    """Each of several splits has 1024 listed keys or more, wherever they lie."""
    ids = (np.arange(4300, dtype=np.int32)[None] // 256 % 2).astype(np.int32)
    schedule = {} if place.name == "host" else {"splits": 2, "max_queries": 1}
    case = case_of([4200], [1], kept(document, lambda b, h, q, k: ids[b, q] == ids[b, k], ids), group=1,
                   form=TILES, schedule=schedule)  # fmt: skip
    case.check(place)


@mostly_on_host
def test_a_padded_batch_and_rows_that_see_nothing(place):
    case = case_of([30, 0, 9], [5, 0, 20], BLIND)
    want, lse = attended(place, case, block_mask=made(place, case))
    blind = np.concatenate([30 + np.arange(5), 9 + np.arange(20)]) % 3 == 1
    assert not want[blind].astype(np.float32).any()
    np.testing.assert_array_equal(np.isneginf(lse), np.broadcast_to(blind[:, None], lse.shape))
    padded, lengths = reference.padded(case.query_rows, case.offsets, 21, 0.0), case.problem.new.astype(np.int32)
    source = case.source(place)
    found = TILES.made(case, place, source[0], place.put(padded), [], valid_lengths=place.put(lengths))
    out, _ = case.launch(place, kv.ops.attention_padded, source, padded, lengths, block_mask=found, mask=None)
    assert_same_bits(np.concatenate([out[0, :5], out[2, :20]]), want)


@mostly_on_host
@pytest.mark.parametrize("parts", [cache_parts, dense_parts, ragged_parts], ids=["caches", "dense", "ragged"])
def test_operands_of_keys_have_block_masks(place, parts):
    case = case_of([90, 0, 30], [6, 40, 1])
    keys, values = case.operands(place, parts)
    query, offsets = place.put(case.query_rows), place.put(case.offsets)
    found = TILES.made(case, place, keys, query, [offsets])
    assert entries(place, found) == entries(place, made(place, case))
    schedule = {} if place.name == "host" else {"kind": "tile", **TILE}
    given = (place, kv.ops.attention, (keys, values), case.query_rows, case.offsets)
    assert_same_bits(case.launch(*given, block_mask=found, mask=None), case.launch(*given, schedule=schedule))


def near(found: Any, want: Any) -> None:
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), rtol=4e-3, atol=4e-3)


@mostly_on_host
def test_sources_of_a_list_have_block_masks_of_their_own(place):
    """One source by a block mask, one by another, one by a mask."""
    forty = kept(kv.masks.sliding_window(40), None)
    case, other = case_of([30, 0], [6, 40]), case_of([70, 9], [6, 40], forty, seed=14)
    first, second = made(place, case), made(place, other)
    own, memory = (place.collection(x.problem.collection) for x in (case, other))
    given = (place, kv.ops.attention, ([own, memory, own], [1, 1, 0]), case.query_rows, case.offsets)
    found = case.launch(*given, block_mask=[first, second, None], mask=["causal", "causal", "null"])
    near(found, case.launch(*given, mask=[DOCUMENTS.options["mask"], forty.options["mask"], "null"]))


@mostly_on_host
def test_trees_of_drafts_have_block_masks(place):
    """Cached keys, of which a document hides some, and a step's own tokens, of which each sees its ancestors."""
    rng, ids = np.random.default_rng(15), (np.arange(200, dtype=np.int32)[None].repeat(2, 0) >= 64).astype(np.int32)
    case = case_of([100, 0], [40, 6], kept(document, None, ids))
    parents = [rng.integers(0, i) if i else -1 for i in range(46)]
    seen = np.eye(64, dtype=bool)[:46]
    for of_sequence in (range(1, 40), range(41, 46)):
        for i in of_sequence:
            seen[i, : i % 40] = seen[i // 40 * 40 + parents[i % 40] % (i % 40), : i % 40]
            seen[i, i // 40 * 0 + i % 40] = True
    seen[40:, 40:] = False
    bits = place.put(np.packbits(seen, axis=1, bitorder="little").view(np.int32))
    found = made(place, case, tree=bits)
    assert_same_bits(attended(place, case, block_mask=found), attended(place, case, tree=bits))
    lists = entries(place, found)
    assert lists[0][0][0] == 2 * 2 + 1, "the first document's tiles are not listed, the second's cached ones whole"
    c, q, offsets = case.source(place)[0], place.put(case.query_rows), place.put(case.offsets)
    alone = kv.ops.block_mask(c, q, offsets, tree=bits, **TILE)
    assert_same_bits(attended(place, case, block_mask=alone), attended(place, case, tree=bits, mask=None))


@mostly_on_host
@pytest.mark.parametrize("counted", [True, False])
def test_of_lists_of_pages_tiles_are_listed_as_pages_are(place, counted):
    """In their order, one that is listed twice twice, and none of what names no page."""
    case, tile = case_of([90, 0], [6, 40], heads=2, page_size=32), {"rows": 64, "keys": 16}
    lists = np.array(
        [[[2, 0, -1, 1, 1, 7], [1, 2, 0, 0, 2, 2]], [[0, 1, -5, 1, 0, 0], [1, 0, 2, 2**30, 0, 1]]], np.int32
    )
    given = {"pages": lists} | ({"page_counts": np.array([[5, 3], [2, 9]], np.int32)} if counted else {})
    found = made(place, case, ByBlocks(**tile), **{n: place.put(x) for n, x in given.items()})
    schedule = {} if place.name == "host" else {"kind": "tile", **tile}
    near(attended(place, case, block_mask=found), attended(place, case, schedule=schedule, **given))
    pages = [block_masks.number(entry) // 2 for entry in entries(place, found)[0][0]]
    assert pages == sorted(pages, key=[2, 0, 1].index)


def test_tiles_of_listed_pages_divide_them():
    with kv.emulated("sm_90a"):
        case, pages = case_of([90], [1], kept(kv.masks.causal, None), page_size=48), np.array([[[1, 0]]], np.int32)
        found = made(Place(), case, ByBlocks(), pages=pages)
        by_blocks = attended(Place(), case, block_mask=found)
        near(by_blocks, attended(Place(), case, pages=pages, mask=None, schedule={"kind": "tile"}))
    assert found.keys == 48


def test_a_block_mask_is_made_anew_in_the_same_memory(place):
    case = case_of(*BATCH, group=1)
    first, shorter = made(place, case), case_of(*BATCH, group=1)
    shorter.problem.collection.cache_lengths[0] = 40
    again, fresh = made(place, shorter, blocks=first.blocks), made(place, shorter)
    assert again.blocks is first.blocks
    assert entries(place, again) == entries(place, fresh)


STRANGE = np.array([0, 1, 7, 2**30, -1, -(2**31), 2**31 - 1])


def test_the_lists_of_another_step_touch_nothing_that_there_is_not(place):
    case = case_of([20, 3], [4, 1], kept(kv.masks.causal, None), heads=2, group=1)
    found = made(place, case)
    blocks = place.get(found.blocks)
    found.blocks = place.put(np.random.default_rng(9).choice(STRANGE, blocks.shape).astype(blocks.dtype))
    assert np.isfinite(attended(place, case, block_mask=found)[0].astype(np.float32)).all()


# --- decodes -----------------------------------------------------------------------------------------

DECODE = {"kind": "decode", "max_queries": 2}
EIGHT: dict[str, Any] = {"dtype": "f8e4m3", "query": "f16", "form": ByBlocks(), "seed": 3}


def by_decode(mask: Mask, schedule: Any) -> tuple[Case, Any]:
    """A batch over pages of 8 bits, whose block mask the schedule of a call leaves to kind decode."""
    case = case_of([150, 40], [2, 1], mask, **EIGHT, schedule=schedule)
    return case, made(Place(), case, ByBlocks())


def test_a_decode_does_not_visit_what_is_not_listed_nor_ask_about_what_is_seen_whole():
    ids = (np.arange(200, dtype=np.int32)[None].repeat(2, 0) >= 64).astype(np.int32)
    seen = lambda b, h, q, k: (k <= q) & (ids[b, q] == ids[b, k])  # noqa: E731
    with kv.emulated("sm_90a", multiprocessors=2):
        case, found = by_decode(kept(kv.masks.causal & document, seen, ids), {"max_queries": 2})
        assert found.rows == 4, "of 8 bits a block mask is for a decode by itself"
        want = case.model()
        _, values = case.problem.caches(LAYER)
        values.store(0, 0, np.arange(64)[:, None], np.arange(32), np.full((64, 32), np.nan, values.dtype.numpy))
        ids[0, 64:128] = 7  # of a tile that the lists call whole
        close(attended(Place(), case, block_mask=found), want, 4e-3)  # sequence 1 has 41 tokens, which it sees all


def test_a_decode_by_lists_of_pages_and_of_a_padded_batch():
    lists = np.array([[[9, 0, 3, -1, 1]], [[2, 0, 1, 2, 5]]], np.int32)
    with kv.emulated("sm_90a", multiprocessors=2):
        case = case_of([150, 40], [2, 1], BLIND, **EIGHT, schedule={"max_queries": 2})  # query 151 sees nothing
        found = made(Place(), case, ByBlocks(), pages=lists)
        assert (found.rows, found.keys) == (4, 16)
        out, lse = attended(Place(), case, block_mask=found)
        near((out[[0, 2]],), (attended(Place(), case, pages=lists, schedule=DECODE)[0][[0, 2]],))
        padded, lengths = reference.padded(case.query_rows, case.offsets, 3, 0.0), case.problem.new.astype(np.int32)
        source = case.source(Place())
        found = ByBlocks().made(case, Place(), source[0], padded, [], valid_lengths=lengths, pages=lists)
        of_padded, _ = case.launch(
            Place(), kv.ops.attention_padded, source, padded, lengths, block_mask=found, mask=None
        )
    assert np.isneginf(lse[1]).all()
    assert not out[1].any()
    assert_same_bits(np.concatenate([of_padded[0, :2], of_padded[1, :1]]), out)


def test_the_lists_of_another_step_lead_a_decode_nowhere():
    with kv.emulated("sm_90a", multiprocessors=2):
        case, found = by_decode(kept(kv.masks.causal, None), {"max_queries": 2})
        found.blocks[:] = np.random.default_rng(1).choice(STRANGE, found.blocks.shape)
        assert np.isfinite(attended(Place(), case, block_mask=found)[0].astype(np.float32)).all()


# --- latent rows -------------------------------------------------------------------------------------


def test_latent_rows_that_no_list_has_may_be_anything(place):
    """What poisons them is known after the lists are, which are those of the model."""
    case = Case(cached=[90, 0, 9], new=[3, 7, 0], dtype="f8e4m3", query="f16", head_size=24, value_size=16, group=3,
                mask=DOCUMENTS, score=BIAS_BY_DISTANCE)  # fmt: skip
    want, found = case.want(), made(place, case, ByBlocks())
    lists = entries(place, found)
    outer = block_masks.OUTER["causal documents"]
    assert lists == block_masks.lists(case.problem, 3, DOCUMENTS.seen, found.rows, found.keys, False, outer)
    tiles = [int(case.offsets[b]) * 3 // found.rows + b for b in range(3)]
    poison_unlisted(case.problem, lists, tiles, found.keys)
    close(attended(place, case, block_mask=found), want, 4e-3)


def test_tensor_cores_do_not_ask_about_latent_rows_that_the_lists_call_whole():
    ids = np.array([[0] * 140 + [1] * 50 + [0] * 20, [2] * 210, [3] * 64 + [4] * 146], np.int32)
    ids[0, 70] = 5  # so that a tile in which most is seen is asked about
    mask = kept(kv.masks.causal & document, lambda b, h, q, k: (k <= q) & (ids[b, q] == ids[b, k]), ids)
    with kv.emulated("sm_90a", multiprocessors=2):
        case = Case(cached=[200, 0, 70], new=[2, 3, 1], dtype="f16", head_size=144, value_size=128, group=8, mask=mask,
                    schedule={"kind": "latent", "max_queries": 4})  # fmt: skip
        want, found = case.model(), made(Place(), case, ByBlocks())
        lists = entries(Place(), found)
        assert found.keys in (32, 64)
        assert lists[0][0][0] == 1  # the first tile whole
        assert 2 * (70 // found.keys) in lists[0][0]
        tiles = [int(case.offsets[b]) * 8 // found.rows + b for b in range(3)]
        poison_unlisted(case.problem, lists, tiles, found.keys)
        ids[:] = np.where(np.arange(210) < 64, 9, ids)  # of what the lists call whole nobody asks
        got = attended(Place(), case, block_mask=found)
    close(tuple(x[:2] for x in got), tuple(x[:2] for x in want), 2e-2)


# --- what is refused -------------------------------------------------------------------------------


def refusal(call: Any, **options: Any) -> str:
    # The table's 24 columns of 16 tokens have room for 12 tiles of 32 keys; their count stands before them.
    case = case_of([20, 3], [4, 1], kept(kv.masks.causal, None))
    found = made(Place(), case)
    with pytest.raises((TypeError, ValueError)) as caught:
        call(found, (*case.source(Place()), case.query_rows, case.offsets), **options)
    return str(caught.value)


def of_mask(block_mask: Any, given: Any, mask: Any = kv.masks.causal, **options: Any) -> None:
    kv.ops.block_mask(given[0], given[2], given[3], mask, **options)


def of_attention(found: Any, given: Any, **options: Any) -> None:
    kv.ops.attention(*given, **{"block_mask": found, **options})


def of_shorter(block_mask: Any, given: Any) -> None:
    block_mask.blocks = block_mask.blocks[:-1]
    kv.ops.attention(*given, block_mask=block_mask)


def of_dense(block_mask: Any, given: Any) -> None:
    keys = kv.LayoutTensorMHAOperand(np.zeros((2, 24, 1, 32), np.float16))
    kv.ops.block_mask(keys, *given[2:], kv.masks.causal, kv_offsets=np.zeros(3, np.uint32))


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (of_mask, {"mask": "causal"}, "mask must be a function, such as kv.masks.causal, got 'causal'"),
        (of_mask, {"mask": None}, "mask must be a function, such as kv.masks.causal, got None"),
        (of_mask, {"mask": document}, "mask takes 1 arrays, got 0"),
        (of_mask, {"rows": 1}, r"rows must be in [2, 2147483647], got 1"),
        (of_mask, {"valid_lengths": np.zeros(2, np.int32)}, "row_offsets or valid_lengths must be given, and not both"),
        (of_mask, {"blocks": np.zeros((2, 1, 9), np.int32)}, "blocks must have shape [2, 1, 13], got [2, 1, 9]"),
        (of_attention, {"block_mask": 3}, "block_mask must be a kv.BlockMask, got a int"),
        (of_attention, {"mask": kv.masks.causal}, "mask, window, chunk, tree and pages must be left out"),
        (of_attention, {"window": 3}, "mask, window, chunk, tree and pages must be left out"),
        (of_shorter, {}, "block_mask must have shape [2, 1, 13], got [1, 1, 13]"),
        (of_dense, {}, "kv_offsets must be None for dense operands"),
        (of_mask, {"pages": np.zeros((2, 1, 1), np.int32), "keys": 12}, "keys must divide the 16 tokens of"),
        (of_mask, {"page_counts": np.zeros((2, 1), np.int32)}, "page_counts must be None without pages"),
        (of_mask, {"tree": np.zeros((5, 1), np.int32), "kv_offsets": np.zeros(3, np.uint32)}, "tree must be None"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(call, options, message):
    assert message in refusal(call, **options)


@pytest.mark.parametrize(
    ("form", "schedule", "message"),
    [
        (ByBlocks(32, 64), {}, "rows of fewer than 64 need values of a multiple of 64 columns, got 32"),
        (ByBlocks(64, 24), {}, "the block mask's keys must be a multiple of 16 from 16 to"),
        (TILES, {"rows": 128}, "rows must be the block mask's 64, got 128"),
        (ByBlocks(2, 64), DECODE, "needs a block mask of tiles of 4 query rows or more, got 2"),
        (ByBlocks(4, 40), DECODE, "needs a block mask of tiles of a multiple of 16 keys, got 40"),
        (ByBlocks(4, 16), {**DECODE, "tile": 32}, "tile must divide the block mask's 16 keys, got 32"),
    ],
)
def test_tiles_that_attention_does_not_have_are_refused(form, schedule, message):
    with kv.emulated("sm_90a", multiprocessors=2):
        case = case_of([150, 40], [2, 1], kept(kv.masks.causal, None))
        found = made(Place(), case, form)
        with pytest.raises(ValueError, match=message):
            attended(Place(), case, block_mask=found, schedule=schedule)


def test_what_does_not_fit_latent_rows_is_refused_by_name():
    case = Case(cached=[90, 0], new=[3, 7], dtype="f16", head_size=24, value_size=16, group=2, mask=DOCUMENTS)
    found = made(Place(), case, ByBlocks())
    for options, message in (
        ({"window": 4}, "mask, window, chunk, tree and pages must be left out with block_mask"),
        ({"indices": np.zeros((10, 4), np.int32)}, "block_mask must be None with indices"),
        ({"block_mask": 3}, "block_mask must be a kv.BlockMask, got a int"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            attended(Place(), case, **{"block_mask": found, **options})

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which tests hold the robustness rules of caches: a group that loses one of its tests fails here.

A name is ``folder/file::test``, or the file alone for lit tests. Suites of tests/unit that are imported by one of
tests/gpu run there too: those of ``test_robustness_*``, ``test_members.py`` and ``test_ops_*``.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent


def named(file: str, *tests: str) -> tuple[str, ...]:
    return tuple(f"{file}::test_{test}" for test in tests)


def attention(*tests: str) -> tuple[str, ...]:
    """Cases of attention, on the host and on a GPU."""
    return named("unit/test_robustness_attention.py", *tests) + named("gpu/test_robustness_attention.py", *tests)


LOOKUPS, ELEMENTS, STORES = (f"unit/test_robustness_{n}.py" for n in ("lookups", "elements", "stores"))
OWNERSHIP = "unit/test_robustness_ownership.py"
POPULATE, MEMBERS, MANAGER = "unit/test_populate.py", "unit/test_members.py", "unit/test_manager.py"
COPIES, TMA, ATTENTION = "unit/test_ops_copies.py", "unit/test_tma_copies.py", "unit/test_attention.py"

HUGE = tuple(
    name for file in ("unit/test_robustness_huge.py", "gpu/test_robustness_caches.py")
    for name in named(
        file, "writes_reach_the_end_of_a_huge_pool", "attention_reads_the_end_of_a_huge_pool",
        "attention_over_latent_rows_reads_the_end_of_a_huge_pool", "listed_rows_reach_the_end_of_a_huge_pool",
    )
)  # fmt: skip

GROUPS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: ("poisoned tables", (
        *named(LOOKUPS, "populate_never_takes_an_entry_past_the_used_ones"),
        *named(OWNERSHIP, "entries_past_the_used_ones_may_hold_anything"),
    )),
    2: ("the null page", (
        *named(LOOKUPS, "populate_of_an_unassigned_table_stays_in_the_null_page"),
        *named(OWNERSHIP, "entries_that_became_the_null_page_are_found"),
    )),
    3: ("coordinates of pages", (
        *named(LOOKUPS, "page_and_slot_make_the_row", "rows_and_elements_beyond_31_bits_are_reached"),
        *named("gpu/test_robustness_caches.py", "rows_and_elements_beyond_31_bits_are_reached_on_a_gpu"),
        *named("unit/test_launch_tensormap.py", "rows_that_no_coordinate_can_name_need_pages"), *HUGE,
    )),
    4: ("populate is row_idx", (
        *named(POPULATE, "rows_are_those_of_the_definition_on_the_host"),
        *named(POPULATE, "rows_are_those_of_the_definition_in_gpu_code"),
        "lowering/vectorize_kv_lookups.mlir", "pipeline/populate.mlir",
    )),
    5: ("CTA pairs", named(
        POPULATE, "leader_and_peer_copy_the_whole_key_tile_together",
        "both_blocks_of_a_pair_have_the_rows_of_the_whole_tile",
    )),
    6: ("strides at run time", (
        *named(MEMBERS, "a_write_of_keys_leaves_values_layers_and_scales_alone"),
        *named("unit/test_caches.py", "scale_index_is_a_floor_and_views_do_not_alias"),
        *named("unit/test_ops_append.py", "append_quantizes_by_granules"),
    )),
    7: ("granules", (
        *named(ELEMENTS, "a_dim_has_the_scale_of_its_granule"),
        *named("unit/test_ops_append.py", "append_quantizes_odd_granules"),
    )),
    8: ("stored and dequantized; refusals", (
        *named(ELEMENTS, "a_dim_has_the_scale_of_its_granule", "what_a_cache_cannot_do_is_refused_by_name"),
        "dialect/invalid_access.mlir", "dialect/invalid_tma.mlir",
    )),
    9: ("TMA descriptors", named(
        TMA, "every_swizzle_and_width_of_element", "what_lies_out_of_bounds_is_zeros",
        "a_ragged_tile_brings_the_first_rows_only", "a_ragged_tile_ends_with_the_pool", "the_rope_part_of_rows",
        "rows_are_gathered_in_any_order", "rope_parts_are_gathered_up_to_their_end", "gathers_out_of_bounds_give_zeros",
    )),
    10: ("ragged stores", (
        *named(STORES, "ragged_stores_follow_the_cached_tokens_and_leave_them"),
        *named(OWNERSHIP, "tokens_that_were_stored_at_the_wrong_place_are_missed_at_their_own"),
    )),
    11: ("padded stores", (
        *named(STORES, "padded_stores_leave_slots_past_the_valid_ones_zero"),
        *named(OWNERSHIP, "tokens_of_a_padded_batch_past_the_valid_ones_are_missed"),
    )),
    12: ("stores without a page", (
        *named(ELEMENTS, "stores_through_entries_without_a_page_write_nowhere"),
        *named("unit/test_ops_append.py", "a_table_entry_without_a_page_drops_the_token"),
        *named("unit/test_ops_edges.py", "a_token_without_a_page_is_dropped", "a_token_past_its_region_is_dropped"),
    )),
    13: ("gathered rows", (
        *named(STORES, "rows_are_gathered_from_pages_of_32_slots"), *named(COPIES, "gather_copies_bit_for_bit"),
    )),
    14: ("radd and iadd_2m", (
        *named("unit/test_ops_updates.py", "radd_adds_to_a_slice_of_the_batch", "iadd_2m_adds_to_the_first_tokens"),
        *named("unit/test_ops_edges.py", "iadd_2m_takes_the_offsets_of_the_first_sequences"),
    )),
    15: ("sparse indices", (
        *named(STORES, "remapping_gives_minus_one_where_there_is_no_token", "remapping_reads_rows_that_lie_apart"),
        *named("unit/test_ops_updates.py", "remap_of_nothing_gives_nothing"),
    )),
    16: ("infinities without a token", attention(
        "infinities_without_a_token_do_not_show", "latent_rows_hide_what_holds_no_token",
    )),
    17: ("a prefix hit", attention("a_prefix_hit_is_a_cold_start")),
    18: ("the order of pages", attention(
        "the_order_of_the_pages_does_not_change_a_bit", "latent_rows_do_not_depend_on_pages_and_other_queries",
    )),
    19: ("partial pages", (
        *attention("slots_past_the_last_token_may_hold_anything", "latent_rows_hide_what_holds_no_token"),
        *named(OWNERSHIP, "the_tail_of_a_partly_filled_page_is_found"),
    )),
    20: ("garbage rows", (
        *attention(
            "garbage_in_speculative_rows_does_not_reach_the_first",
            "keys_and_finite_values_that_a_row_does_not_see_do_not_show",
            "a_value_that_is_not_finite_reaches_rows_of_its_tile_at_most",
            "a_row_that_is_nan_is_not_taken_for_one_without_keys",
            "latent_rows_do_not_depend_on_pages_and_other_queries",
        ),
        *named("gpu/test_robustness_attention.py",
               "garbage_in_speculative_rows_does_not_reach_the_first_of_a_decode"),
    )),
    21: ("prompts in parts", attention("prompts_in_parts_are_prompts_at_once")),
    22: ("a large mixed batch", attention("a_large_mixed_batch_ends")),
    23: ("no rows", (
        *attention("rows_of_no_sequence_keep_what_was_there"), *named(ATTENTION, "empty_sequences_and_batches"),
    )),
    24: ("layers that differ", (
        *attention("layers_of_other_heads_pages_and_windows_take_turns"), *named(ATTENTION, "sinks_and_softcap"),
        *named(ATTENTION, "alibi_slopes_bend_scores_by_distance"),
    )),
    25: ("rotation and norm", named(STORES, "only_the_new_tokens_dims_of_the_keys_of_the_layer_change")),
    26: ("the manager", named(
        MANAGER, "table_is_padded_with_the_null_page", "failed_alloc_changes_nothing",
        "released_pages_stay_cached_until_evicted_least_recent_first", "prefix_is_reused_and_leaves_a_token",
        "one_active_token_looks_nothing_up", "unknown_tokens_are_never_hashed", "dummy_requests_own_the_null_page",
        "evicted_content_is_forgotten",
    )),
}  # fmt: skip

# What every case of attention and most suites of the operations share.
HYGIENE = (
    *named("unit/test_caches_reference.py", "problems_have_distinct_pages_and_poison"),
    *named("unit/test_robustness_index.py", "outputs_begin_as_a_pattern_and_the_first_bad_element_is_named"),
)

# Decisions where the formats leave a choice, or where other implementations have had faults.
DECISIONS: dict[str, tuple[str, ...]] = {
    "the row stride is that of the buffers, not of the page size": (
        *named("unit/test_caches_checks.py", "outer_strides_are_honoured"),
        *named(LOOKUPS, "page_and_slot_make_the_row"),
    ),
    "a tile without swizzle is cut into chunks of 16 bytes": (
        *named("unit/test_launch_tensormap.py", "a_tile_has_dimensions_for_pages_slots_heads_and_depth"),
        *named(TMA, "every_swizzle_and_width_of_element"),
    ),
    "tables are 32-bit of either sign, padded by the null page, their rows aligned for vector loads": (
        *named(MANAGER, "table_is_padded_with_the_null_page"),
        *named("unit/test_caches.py", "int32_tables_read_as_unsigned"),
        *named(POPULATE, "a_table_that_starts_between_is_refused", "a_table_whose_rows_start_between_is_refused"),
    ),
    "stores past the pool are dropped": GROUPS[12][1],
    "what is masked is left out, not added to": GROUPS[16][1] + GROUPS[19][1],
    "scales of operands are indexed (token, head)": (
        *named("unit/test_dsl_ptx.py", "operand_scales_take_the_token_before_the_head"),
    ),
    "an empty cache has no new tokens either": named(MEMBERS, "an_empty_cache_has_neither_old_nor_new_tokens"),
    "elements and rows are 64-bit, coordinates split": GROUPS[3][1],
    "base_alignment is optional, and every member is there": (
        *GROUPS[1][1], *named(MEMBERS, "static_facts_are_the_same_in_a_kernel_and_on_the_host"),
    ),
    "a barrier expects the bytes that are copied, of partial tiles too": (
        *named(TMA, "boxes_without_tokens_are_zeros_or_left_alone", "a_sequence_through_one_barrier"), *GROUPS[22][1],
    ),
    "sequences may be empty, and offsets begin above 0": (
        *named("unit/test_ops_edges.py", "offsets_of_a_slice_count_from_its_first_row"),
        *named(ATTENTION, "rows_of_no_sequence_are_not_written"), *GROUPS[14][1], *GROUPS[23][1],
    ),
}  # fmt: skip


@functools.cache
def functions_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def missing(names: tuple[str, ...]) -> list[str]:
    """Those that do not exist."""
    files = [name.partition("::")[::2] for name in names]
    return [
        f"{file}::{test}" for file, test in files
        if not (TESTS / file).is_file() or (test and test not in functions_in(file))
    ]  # fmt: skip


@pytest.mark.parametrize("group", range(1, 27))
def test_every_group_has_its_tests(group):
    title, names = GROUPS[group]
    assert names, title
    assert not missing(names), title
    if 16 <= group <= 24:
        assert any(name.startswith("gpu/") for name in names), f"{title}: no test on a GPU"


@pytest.mark.parametrize("decision", DECISIONS)
def test_every_decision_has_its_tests(decision):
    assert DECISIONS[decision]
    assert not missing(DECISIONS[decision])


def test_the_common_rules_have_their_tests():
    assert not missing(HYGIENE)


def test_every_test_of_robustness_belongs_to_a_group():
    listed = {name for _, names in GROUPS.values() for name in names} | set(HYGIENE)
    elsewhere = ("unit/test_robustness_index.py", "unit/test_robustness_checks.py")
    for folder in ("unit", "gpu"):
        for path in sorted((TESTS / folder).glob("test_robustness_*.py")):
            file = f"{folder}/{path.name}"
            found = {f"{file}::{test}" for test in functions_in(file) if test.startswith("test_")}
            # Cases that run in the PTX interpreter, or in wide heads, are parts of the test of their name.
            known = {name for name in found if any(name.startswith(group) for group in listed)}
            assert file in elsewhere or found == known, found - known


def test_outputs_begin_as_a_pattern_and_the_first_bad_element_is_named():
    import numpy as np
    from reference import attention_cases as cases

    begun = cases.sentinel(np.zeros((2, 3), np.uint32))
    assert set(begun.ravel().tolist()) == {0xEFBEADDE}
    bad = np.zeros((2, 3), np.float32)
    bad[1, 2] = np.inf
    with pytest.raises(AssertionError, match=r"inf at \[1 2\] of \(2, 3\)"):
        cases.assert_finite(bad)

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The rows of docs/parity.md that are kernels over the caches: one row a kernel, or a variant of one."""

from __future__ import annotations

from parity_rows import (
    BAD_COPIES,
    BAD_OPS,
    BAD_ROTARY,
    OPERANDS,
    OPS,
    REFUSED_EARLY,
    Cell,
    No,
    Refused,
    Row,
    op_test,
)

PROJECTION = "tests/dialect/projection.mlir"
WHOLE = No("an operation on whole caches")
NO_FOUR_BITS = "kv.ops.project_append takes bf16, f16, f32 and f8e4m3 weights: dequantize others before"


def kernel(member: str, name: str, tests: tuple[Cell, Cell], note: str = "", lit: str = OPS) -> Row:
    """An operation and the function of ``kv.ops`` that runs it."""
    return Row("kernels", member, f"kv.{name}", WHOLE, f"kvarn.ops:{name}", lit, *tests, note)


def projection(member: str, name: str, test: str, note: str = "") -> Row:
    return kernel(member, name, op_test("projection", test), note, PROJECTION)


def missing(member: str, note: str) -> Row:
    return Row("kernels", member, None, None, None, None, None, None, note)


def refused(member: str, error: str, name: str, lit: str, test: str) -> Row:
    return Row("kernels", member, Refused(error), WHOLE, f"kvarn.ops:{name}", lit, test, REFUSED_EARLY)


def attention(test: str, gpu: str) -> tuple[str, str]:
    return f"tests/unit/test_attention{test}", f"tests/gpu/test_attention.py::{gpu}"


_CALLS = "tests/unit/test_ops_calls.py::test_other_operations_check_their_arguments"
_ROTARY = "tests/unit/test_ops_rotary.py::test_what_does_not_fit_is_refused_by_name"

KERNELS = [
    projection("fused QKV matmul, padded", "project_append_padded",
               "test_a_padded_batch_has_queries_everywhere_and_keys_of_valid_tokens"),
    projection("fused QKV matmul, ragged", "project_append",
               "test_columns_go_to_queries_and_cache"),
    projection("fused QKV matmul, with bias", "project_append",
               "test_bias_norms_and_rotation_come_before_the_cache",
               "and RMS norm and RoPE of queries and keys"),
    projection("fused QKV matmul, with scales (FP8)", "project_append",
               "test_products_of_8_bits_have_scales", "of tensors, of rows, of blocks of 128"),
    *(missing(f"fused QKV matmul, {what}", NO_FOUR_BITS) for what in ("FP4 and MXFP8", "GPTQ and GGUF int4")),
    projection("fused QKV matmul, with an indexer's bands", "project_append",
               "test_an_indexer_has_bands_and_a_cache_of_its_own"),
    projection("kv_matmul, ragged", "project_append", "test_a_weight_may_have_no_queries_and_no_values"),
    projection("k_matmul, ragged", "project_append", "test_a_weight_may_have_no_queries_and_no_values"),
    kernel("routing of a projection's columns to K and V", "append",
           ("tests/unit/test_ops_append.py::test_slices_of_a_fused_projection_are_taken_as_they_are",
            "tests/gpu/test_ops.py::test_torch_slices_keep_their_strides")),
    kernel("append with quantization by granules", "append", op_test("append", "test_append_quantizes_by_granules")),
    kernel("fused QK RoPE, ragged", "rope", op_test("rope", "test_rope_turns_cached_keys_and_queries"),
           "interleaved and split pairs, partial, position_ids, mrope sections"),
    kernel("fused QK RoPE, ragged, of 8-bit keys", "rope", op_test("rotary", "test_rope_of_8_bits_saturates")),
    kernel("fused QK RoPE, padded", "rope_padded", op_test("rotary", "test_rope_padded_skips_the_padding")),
    kernel("fused QK RoPE, padded, position_ids and mrope", "rope_padded",
           op_test("rotary", "test_rope_padded_takes_position_ids")),
    kernel("RoPE with the append of K and V", "rope_append", op_test("rope", "test_rope_append_rotates_and_writes")),
    refused("RoPE in place of quantized keys", "'kv.rope_padded' op needs a cache without scales", "rope_padded",
            BAD_ROTARY, _ROTARY),
    kernel("RMSNorm of the K or V cache, ragged", "rms_norm",
           op_test("updates", "test_rms_norm_changes_new_tokens_only"),
           "per head, a prefix of it, or whole rows"),
    kernel("RMSNorm: multiply_before_cast", "rms_norm",
           op_test("updates", "test_rms_norm_rounds_before_the_weight_when_asked")),
    kernel("fused QK RMSNorm", "qk_norm", op_test("rotary", "test_qk_norm_normalises_queries_and_new_keys")),
    kernel("fused QK RMSNorm and RoPE", "qk_norm", op_test("rotary", "test_qk_norm_rotates_after_it")),
    kernel("fused QK RMSNorm and RoPE, main and index", "qk_norm",
           op_test("rotary", "test_qk_norm_does_index_heads_in_the_same_launch")),
    refused("main and index of different head sizes",
            "'kv.qk_norm' op index_collection must have the collection's head size 128, got 64", "qk_norm", BAD_ROTARY,
            _ROTARY),
    kernel("flash attention, padded", "attention_padded",
           attention("_padded.py::test_each_mask_in_a_padded_batch", "test_each_mask_in_a_padded_batch")),
    kernel("flash attention, padded, sinks", "attention_padded",
           attention("_padded.py::test_sinks_softcap_and_scale_of_a_padded_batch", "test_sinks_in_a_padded_batch")),
    kernel("flash attention, padded: lengths past the padding", "attention_padded",
           attention("_padded.py::test_valid_lengths_past_the_padding_are_those_of_the_padding",
                     "test_valid_lengths_past_the_padding")),
    kernel("flash attention, ragged", "attention",
           attention(".py::test_each_mask_hides_what_it_says", "test_each_mask_in_a_ragged_batch")),
    kernel("flash attention, ragged, sinks", "attention", attention(".py::test_sinks_and_softcap",
           "test_sinks_and_softcap")),
    kernel("cross attention, ragged", "attention", attention(".py::test_cross_attention_has_keys_of_its_own_count",
           "test_cross_attention_and_rows_without_keys")),
    Row("kernels", "attention over operands: dense, ragged, caches", "kv.operand_attention", WHOLE,
        "kvarn.ops:attention", OPERANDS,
        "tests/unit/test_attention_operands.py::test_equal_keys_give_equal_bits_whatever_holds_them",
        "tests/gpu/test_operands.py::test_each_mask_in_a_ragged_batch"),
    kernel("MLA decode, ragged", "mla_attention",
           attention("_mla.py::test_values_are_the_first_columns_of_the_keys", "test_latent_rows")),
    kernel("MLA decode, per-token scales", "mla_attention",
           ("tests/unit/test_attention_mla.py::test_latent_rows_with_one_scale_a_token",
            "tests/gpu/test_mla.py::test_latent_rows_with_one_scale_a_token")),
    kernel("MLA decode, 8-bit content and bf16 rope", "mla_attention",
           ("tests/unit/test_attention_mla.py::test_rows_that_end_in_bf16_keys",
            "tests/gpu/test_mla.py::test_rows_that_end_in_bf16_keys")),
    kernel("MLA decode, 8-bit content with scales in the row, bf16 rope", "mla_attention",
           ("tests/unit/test_attention_mla.py::test_rows_with_their_scales_in_them",
            "tests/gpu/test_mla.py::test_rows_with_their_scales_in_them"), lit="tests/dialect/mla.mlir"),
    kernel("MLA decode, sparse (d_indices, topk_lengths)", "mla_attention",
           ("tests/unit/test_mla_sparse.py::test_a_query_sees_the_rows_that_it_lists",
            "tests/gpu/test_mla.py::test_a_query_sees_the_rows_that_it_lists"), lit="tests/dialect/mla.mlir"),
    kernel("MLA prefill, ragged, over decompressed buffers", "mla_prefill_chunk",
           ("tests/unit/test_mla_prefill.py::test_chunks_together_are_dense_attention",
            "tests/gpu/test_mla.py::test_chunks_together_are_dense_attention"),
           "kv.ops.mla_prefill does all chunks of a plan; a row at a time, no tensor cores", "tests/dialect/mla.mlir"),
    kernel("MLA prefill: chunks merged by online softmax", "merge_attention",
           op_test("ragged", "test_merged_attention_is_that_over_all_keys")),
    kernel("MLA prefill plan", "mla_prefill_plan", op_test("updates", "test_mla_prefill_plan_by_the_book")),
    kernel("MLA decompress: latent rows of a chunk", "mla_decompress",
           attention("_mla.py::test_decompressing_a_plan_gives_every_row_once", "test_latent_rows_are_copied_out")),
    kernel("cache row offsets", "cache_row_offsets", op_test("updates", "test_cache_row_offsets_are_running_sums")),
    kernel("store_ragged", "store_ragged", op_test("append", "test_store_ragged_writes_one_cache")),
    kernel("store_padded", "store_padded", op_test("append", "test_store_padded_skips_what_is_not_valid")),
    kernel("store_padded: lengths past the padding", "store_padded",
           op_test("edges", "test_valid_lengths_past_the_padding_write_the_padding_only")),
    kernel("every write: tokens without a page", "store_ragged",
           op_test("edges", "test_a_token_without_a_page_is_dropped")),
    kernel("radd", "radd", op_test("updates", "test_radd_adds_to_a_slice_of_the_batch")),
    kernel("radd, 2m_iadd: rows past the offsets", "radd",
           op_test("edges", "test_rows_to_add_past_the_offsets_are_left_out")),
    kernel("2m_iadd", "iadd_2m", op_test("updates", "test_iadd_2m_adds_to_the_first_tokens")),
    refused("radd of one half only", "'kv.radd' op a must have 2048 in dimension 1, got 1024", "radd", BAD_OPS, _CALLS),
    kernel("sliced_add", "sliced_add", op_test("ragged", "test_sliced_add_adds_in_the_rows_below_the_end")),
    kernel("gather_rows, ragged", "gather", op_test("copies", "test_gather_copies_bit_for_bit"), "any number of heads"),
    kernel("gather_rows: no rows", "gather", op_test("copies", "test_gather_of_nothing_gives_nothing")),
    kernel("sparse index remap", "remap_sparse_indices", op_test("updates", "test_remap_sparse_indices_by_the_book")),
    kernel("sparse index remap: sequences past the table", "remap_sparse_indices",
           op_test("edges", "test_remapping_rows_of_sequences_without_a_table_gives_minus_one"),
           "rows of no sequence give -1"),
    kernel("sparse index remap: no indices", "remap_sparse_indices",
           op_test("updates", "test_remap_of_nothing_gives_nothing")),
    kernel("page copy within a pool", "copy_pages", op_test("copies", "test_copy_pages_copies_all_of_a_page")),
    kernel("accepted drafts of a tree moved together", "commit",
           op_test("drafts", "test_commit_moves_accepted_tokens_together_and_nothing_else")),
    kernel("page copy between pools", "transfer_pages", op_test("transfer", "test_pages_go_from_pool_to_pool"),
           "all layers or one"),
    kernel("page copy to the host and back", "transfer_pages",
           ("tests/unit/test_ops_transfer.py::test_pages_go_to_the_host_and_back",
            "tests/gpu/test_ops.py::test_pages_are_swapped_out_to_the_host_and_in_again")),
    refused("page copy between pools of different types", "'kv.transfer_pages' op pools must be of the same type",
            "transfer_pages", BAD_COPIES, "tests/unit/test_ops_transfer.py::test_what_does_not_fit_is_refused_by_name"),
    kernel("copy between kinds, page sizes and dtypes", "convert",
           op_test("copies", "test_convert_copies_every_cached_token")),
    kernel("copy from FlashInfer's and vLLM's layouts", "convert",
           op_test("convert", "test_pages_of_another_library_become_a_cache")),
    kernel("copy to FlashInfer's and vLLM's layouts", "convert",
           op_test("convert", "test_a_cache_becomes_pages_of_another_library")),
    Row("kernels", "print cache", No("printed on the host"), WHOLE, "kvarn.ops:print_cache", No("printed on the host"),
        *op_test("edges", "test_print_cache_shows_cached_and_new_tokens")),
    kernel("increment cache lengths", "increment_cache_lengths",
           op_test("updates", "test_increment_cache_lengths_adds_the_new_tokens")),
    kernel("merge ragged", "merge_ragged", op_test("ragged", "test_merge_ragged_joins_each_sequence")),
    kernel("shift tokens", "shift_tokens", op_test("ragged", "test_shift_tokens_appends_the_bonus_token")),
    kernel("attention over lists of pages", "attention",
           ("tests/unit/test_attention_pages.py::test_a_head_sees_the_pages_that_it_lists",
            "tests/gpu/test_ops.py::test_a_head_sees_the_pages_that_it_lists"),
           lit="tests/dialect/pages.mlir"),
    kernel("block masks: tiles of keys that a mask shows", "block_mask",
           ("tests/unit/test_block_mask.py::test_a_tile_of_keys_is_listed_where_a_row_sees_any_of_it",
            "tests/gpu/test_ops.py::test_a_tile_of_keys_is_listed_where_a_row_sees_any_of_it"),
           lit="tests/dialect/block_masks.mlir"),
    kernel("summaries of pages", "summarize_pages",
           ("tests/unit/test_page_choice.py::test_summaries_are_of_the_pages_that_the_step_touched",
            "tests/gpu/test_ops.py::test_summaries_are_of_the_pages_that_the_step_touched"),
           lit="tests/dialect/pages.mlir"),
    kernel("choice of pages (Quest)", "select_pages",
           ("tests/unit/test_page_choice.py::test_the_pages_with_the_largest_bounds_are_chosen",
            "tests/gpu/test_ops.py::test_the_pages_with_the_largest_bounds_are_chosen"),
           lit="tests/dialect/pages.mlir"),
    kernel("indexer: scores of tokens", "index_scores",
           ("tests/unit/test_indexer.py::test_scores_are_weighted_sums_of_what_is_positive",
            "tests/gpu/test_ops.py::test_scores_are_weighted_sums_of_what_is_positive"),
           lit="tests/dialect/pages.mlir"),
    kernel("indexer: top-k tokens", "select_tokens",
           ("tests/unit/test_indexer.py::test_the_tokens_with_the_largest_scores_are_chosen",
            "tests/gpu/test_ops.py::test_the_tokens_with_the_largest_scores_are_chosen"),
           lit="tests/dialect/pages.mlir"),
]  # fmt: skip

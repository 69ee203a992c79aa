# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The rows of docs/parity.md: where each member of the cache structs, and each kernel over them, is in the code.

One row a member. Paths of things in the code are ``module:Class.attribute`` or ``module:function``; tests are
``file::function``. ``docs/parity.py`` checks that each of them exists; ``None`` says that it is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Refused:
    """A member that a kind does not have: what says so, word for word, in a lit file of errors."""

    error: str


@dataclass(frozen=True)
class No:
    """A cell that stays empty for a reason."""

    why: str


Cell = str | No | None


@dataclass(frozen=True)
class Row:
    """One member.

    Attributes
    ----------
    section : str
        A key of ``SECTIONS``.
    member : str
    op : str, Refused, No or None
        An operation of the dialect (``kv.load``), a type (``!kv.cache``), or the error that refuses it.
    dsl, host : str, No or None
        In the kernel language; in Python.
    lit : str or None
        The file with the op, the type or the expected error.
    test, gpu : str, No or None
        A numeric test on the host, and one that runs on a GPU.
    note : str
    """

    section: str
    member: str
    op: str | Refused | No | None
    dsl: Cell
    host: Cell
    lit: str | No | None
    test: Cell
    gpu: Cell
    note: str = ""


SECTIONS = {
    "paged": "PagedKVCache",
    "continuous": "ContinuousBatchingKVCache: the differences",
    "fa3": "PagedKVCacheFA3Fallback",
    "collection": "PagedKVCacheCollection",
    "rows": "PagedRowIndices",
    "operand": "KVCacheMHAOperand",
    "scales": "KVCacheScalesMHAOperand",
    "dense": "LayoutTensorMHAOperand",
    "ragged": "RaggedMHAOperand",
    "kernels": "Kernels over the caches",
}

HANDLE, READS, CACHE, OPERAND, ROWS = (
    f"kvarn.dsl.handles:{name}" for name in ("Handle", "CacheReads", "Cache", "Operand", "Rows")
)
OPS, TYPES, TMA, OPERANDS = (f"tests/dialect/{name}.mlir" for name in ("ops", "types", "tma", "operands"))
BAD = "tests/dialect/invalid.mlir"
BAD_ACCESS, BAD_OPS, BAD_ROTARY, BAD_COPIES, BAD_TMA, BAD_OPERANDS, BAD_TYPES, BAD_KINDS = (
    f"tests/dialect/invalid_{name}.mlir"
    for name in ("access", "operations", "rotary", "copies", "tma", "operands", "types", "kinds")
)
NO_ROPE = "'kv.tma_load_tile' op a rope TMA tile needs a paged cache, got "
NO_TILES = "'kv.tma_load_tile' op a TMA tile needs a paged or continuous cache, or a dense or ragged operand, got "
HANDED = No("handles are arguments of a kernel")
NAME = No("a name of the Python class")
ON_HOST = No("views, made on the host")
COLLECTION_ = "kvarn.dsl.handles:Collection"
STATIC = No("static: known when a kernel is compiled")
LIFETIME = No("lifetimes: the runtime keeps the buffers alive")
REFUSED_EARLY = No("refused before a kernel is made")
NEEDS_BLACKWELL = No("needs sm_100a")


def members(name: str) -> tuple[str, str]:
    """A test of tests/unit/test_members.py, and the same on a GPU."""
    return f"tests/unit/test_members.py::{name}", f"tests/gpu/test_members.py::{name}"


def copies(name: str) -> tuple[str, str]:
    """A test of tests/unit/test_tma_copies.py, and the same on a GPU."""
    return f"tests/unit/test_tma_copies.py::{name}", f"tests/gpu/test_tma.py::{name}"


def op_test(suite: str, name: str) -> tuple[str, str]:
    """A test of a suite of the cache operations, and the same on a GPU."""
    return f"tests/unit/test_ops_{suite}.py::{name}", f"tests/gpu/test_ops.py::{name}"


# --- the caches ------------------------------------------------------------------------------------

# member, op, in the kernel language, on the host, test
_STATIC = [
    ("dtype_, dtype", "dtype", "dtype"), ("kv_params_, kv_params", "num_heads", "kv_params"),
    ("page_size, page_size_", "page_size_", "page_size_"), ("scale_dtype_, scale_dtype", "scale_dtype", "scale_dtype"),
    ("quantization_granularity_, quantization_granularity", "quantization_granularity", "quantization_granularity"),
    ("quantization_enabled", "quantization_enabled", "quantization_enabled"),
    ("head_dim_granularity", "head_dim_granularity", "head_dim_granularity"),
    ("max_tile_size", "max_tile_size", "max_tile_size"),
]  # fmt: skip
_FIELDS = [
    ("blocks", "blocks"), ("blocks_shape, blocks_strides, blocks_layout, blocks_tt_*", "blocks_strides"),
    ("cache_lengths, cache_lengths_tt_*", "cache_lengths"), ("lookup_table, lookup_table_tt_*", "lookup_table"),
    ("max_seq_length", "max_seq_length"), ("max_cache_length", "max_cache_length"), ("scales", "scales"),
    ("scales_tt_*", "scales_strides"),
]  # fmt: skip
_METHODS = [
    ("cache_lengths_nd", "kv.cache_lengths", HANDLE, "test_lengths_are_those_of_the_step"),
    ("cache_length", "kv.cache_length", HANDLE, "test_lengths_are_those_of_the_step"),
    ("max_prompt_length", "kv.max_prompt_length", HANDLE, "test_lengths_are_those_of_the_step"),
    ("max_context_length", "kv.max_context_length", HANDLE, "test_lengths_are_those_of_the_step"),
    ("empty_cache", "kv.is_empty", HANDLE, "test_an_empty_cache_has_neither_old_nor_new_tokens"),
    ("get_tma_row", "kv.tma_row", READS, "test_get_tma_row_does_not_ask_the_table"),
    ("num_kv_rows", "kv.num_rows", READS, "test_num_kv_rows_spans_the_view"),
    ("row_idx", "kv.row_index", READS, "test_row_idx_is_the_row_of_a_token"),
    ("populate", "kv.populate", READS, "test_populate_gives_the_rows_of_a_tile"),
    ("load", "kv.load", CACHE, "test_load_reads_elements"),
    ("load of a quantized cache", "kv.load", CACHE, "test_load_multiplies_by_the_scale"),
    ("store", "kv.store", CACHE, "test_store_writes_stored_values_and_drops_what_has_no_page"),
    ("load_scale", "kv.load_scale", CACHE, "test_load_scale_reads_the_scale_of_a_dim"),
    ("store_scale", "kv.store_scale", CACHE, "test_store_scale_writes_scales"),
    ("load_quantized", "kv.load_raw", CACHE, "test_load_quantized_reads_stored_values"),
    ("block_paged_ptr", "kv.block_ptr", READS, "test_block_paged_ptr_points_at_consecutive_tokens"),
    ("scales_block_paged_ptr", "kv.scale_block_ptr", READS, "test_scales_block_paged_ptr_points_at_the_scale"),
    ("scales_raw_ptr", "kv.scales_base", READS, "test_scales_raw_ptr_is_the_first_scale_or_null"),
]


def _method(section: str, cls: str, member: str, op: str, where: str, test: str) -> Row:
    name = member.split()[0]
    return Row(section, member, op, f"{where}.{name}", f"kvarn.caches:{cls}.{name}", OPS, *members(test))


_TILES = [
    ("create_tma_tile", "kv.tma_load_tile", "test_pages_of_every_size"),
    ("create_ragged_tma_tile", "kv.tma_load", "test_a_ragged_tile_brings_the_first_rows_only"),
    ("create_rope_tma_tile", "kv.tma_load_tile", "test_the_rope_part_of_rows"),
    ("create_gather4_tma_tile", "kv.tma_load", "test_rows_are_gathered_in_any_order"),
    ("create_rope_gather4_tma_tile", "kv.tma_load", "test_rope_parts_are_gathered_up_to_their_end"),
]


def _tile(section: str, cls: str, member: str, op: str, test: str) -> Row:
    dsl = "gather4" if "gather4" in member else "load_tile" if op == "kv.tma_load_tile" else "load"
    host_test, gpu_test = copies(test)
    gpu: Cell = NEEDS_BLACKWELL if "gather4" in member else gpu_test
    return Row(section, member, op, f"kvarn.dsl.tma:{dsl}", f"kvarn.caches:{cls}.{member}", TMA, host_test, gpu)


def _cache(section: str, cls: str, leave: tuple[str, ...] = ()) -> list[Row]:
    """The rows of a cache class, but for some members."""
    facts = members("test_static_facts_are_the_same_in_a_kernel_and_on_the_host")
    fields = members("test_fields_are_the_buffers_of_a_layer")
    found = [Row(section, m, "!kv.cache", f"{HANDLE}.{d}", f"kvarn.caches:{cls}.{h}", TYPES, *facts)
             for m, d, h in _STATIC]  # fmt: skip
    found += [Row(section, m, "kv.field", f"{HANDLE}.field", f"kvarn.caches:{cls}.{h}", OPS, *fields)
              for m, h in _FIELDS]  # fmt: skip
    found += [
        Row(section, "__init__", "kv.make_cache", HANDED, f"kvarn.caches:{cls}.__init__", OPS,
            "tests/unit/test_caches.py::test_direct_constructor_sees_what_the_collection_sees", members(
                "test_fields_are_the_buffers_of_a_layer")[1]),
        Row(section, "device_type", "!kv.cache", f"{HANDLE}.spec", f"kvarn.caches:{cls}.fields", TYPES, *fields),
        Row(section, "get_type_name", NAME, NAME,
            f"kvarn.caches:{cls}.get_type_name", NAME, *facts),
    ]  # fmt: skip
    found += [_method(section, cls, *m) for m in _METHODS]
    found += [_tile(section, cls, *t) for t in _TILES]
    return [r for r in found if r.member not in leave]


def _refused(section: str, member: str, error: str, host: Cell, lit: str, test: Cell, dsl: Cell = REFUSED_EARLY) -> Row:
    return Row(section, member, Refused(error), dsl, host, lit, test, REFUSED_EARLY)


PAGED = [
    *_cache("paged", "PagedKVCache"),
    Row("paged", "stores of keys touch no values, scales or layers", "kv.store_scale", f"{CACHE}.store_scale",
        "kvarn.caches:PagedKVCache.store_scale", OPS,
        *members("test_a_write_of_keys_leaves_values_layers_and_scales_alone")),
    _refused("paged", "load_quantized without scales", "'kv.load_raw' op needs a quantized cache",
             "kvarn.caches:PagedKVCache.load_quantized", BAD_ACCESS,
             "tests/unit/test_caches.py::test_methods_of_scales_need_scales", f"{CACHE}.load_quantized"),
    _refused("paged", "load to the storage type when quantized",
             "'kv.load' op dequantizes, so the result must not have the storage type", "kvarn.caches:PagedKVCache.load",
             BAD_ACCESS, "tests/unit/test_caches.py::test_methods_of_scales_need_scales", f"{CACHE}.load"),
    _refused("paged", "block_paged_ptr with a tile that does not divide the page",
             "'kv.block_ptr' op tile must divide the page size 16", "kvarn.caches:PagedKVCache.block_paged_ptr", BAD,
             "tests/unit/test_caches.py::test_block_ptr_is_a_tile_of_a_page", f"{READS}.block_paged_ptr"),
]  # fmt: skip

_SCALES = ("load of a quantized cache", "load_scale", "store_scale", "load_quantized", "scales_block_paged_ptr")
_NEED_SCALES = "needs a quantized cache (one with a scale type), got one without scales"
_RAISES = "tests/unit/test_members_tiles.py::test_members_that_a_kind_does_not_have_raise"
_CONTINUOUS = "ContinuousBatchingKVCache"
_REGIONS = "tests/unit/test_members_tiles.py::test_tiles_of_a_continuous_cache_describe_its_rows"
CONTINUOUS = [
    *_cache("continuous", _CONTINUOUS, (*_SCALES, *(t[0] for t in _TILES))),
    Row("continuous", "create_tma_tile", "kv.tma_load_tile", "kvarn.dsl.tma:load_tile",
        f"kvarn.caches:{_CONTINUOUS}.create_tma_tile", TMA, *copies("test_regions_of_a_continuous_cache")),
    Row("continuous", "create_ragged_tma_tile", "kv.tma_load", "kvarn.dsl.tma:load",
        f"kvarn.caches:{_CONTINUOUS}.create_ragged_tma_tile", TMA,
        *copies("test_a_ragged_tile_of_a_region_brings_the_first_rows_only")),
    Row("continuous", "create_gather4_tma_tile", "kv.tma_load", "kvarn.dsl.tma:gather4",
        f"kvarn.caches:{_CONTINUOUS}.create_gather4_tma_tile", TMA, _REGIONS, NEEDS_BLACKWELL),
    Row("continuous", "origins", LIFETIME, LIFETIME, f"kvarn.caches:{_CONTINUOUS}.buffers", LIFETIME,
        "tests/unit/test_caches.py::test_continuous", No("nothing to run")),
    _refused("continuous", "scales of any kind", "scales need a paged cache, got a continuous one",
             f"kvarn.caches:{_CONTINUOUS}.scales", BAD_TYPES, _RAISES, f"{HANDLE}.quantization_enabled"),
    *(_refused("continuous", member, f"'{op}' op {_NEED_SCALES}", f"kvarn.caches:{_CONTINUOUS}.{member}", lit, _RAISES,
               f"{where}.{member}")
      for member, op, where, lit in (
          ("load_scale", "kv.load_scale", CACHE, BAD_KINDS),
          ("store_scale", "kv.store_scale", CACHE, BAD_KINDS),
          ("load_quantized", "kv.load_raw", CACHE, BAD_KINDS),
          ("scales_block_paged_ptr", "kv.scale_block_ptr", READS, BAD_KINDS))),
    *(_refused("continuous", member, f"{NO_ROPE}continuous",
               f"kvarn.caches:{_CONTINUOUS}.{member}", BAD_TMA, _RAISES)
      for member in ("create_rope_tma_tile", "create_rope_gather4_tma_tile")),
]  # fmt: skip

_FA3 = "PagedKVCacheFA3Fallback"
_NO_ROWS = ("get_tma_row", "num_kv_rows", "row_idx", "populate")
_FA3_LEAVE = (*_SCALES, *_NO_ROWS, "scales_raw_ptr", *(t[0] for t in _TILES))
FA3 = [
    *_cache("fa3", _FA3, _FA3_LEAVE),
    Row("fa3", "KeyIdx, ValueIdx, kv_idx", "kv.value_cache", f"{COLLECTION_}.get_value_cache",
        f"kvarn.caches:{_FA3}.kv_idx", OPS, *members("test_views_are_the_halves_of_a_layer")),
    Row("fa3", "layer_idx", "kv.key_cache", f"{COLLECTION_}.get_key_cache",
        f"kvarn.caches:{_FA3}.layer_idx", OPS, *members("test_fields_are_the_buffers_of_a_layer")),
    Row("fa3", "to_fa3: the buffers as a FlashAttention-3 kernel takes them", ON_HOST,
        ON_HOST, "kvarn.caches:PagedKVCacheFA3FallbackCollection.to_fa3",
        ON_HOST, "tests/unit/test_caches.py::test_fa3", ON_HOST),
    *(_refused("fa3", member, f"'{op}' op needs a paged or continuous cache: an fa3 cache has no rows",
               f"kvarn.caches:{_FA3}.{member}", BAD_KINDS, _RAISES, f"{READS}.{member}")
      for member, op in (("get_tma_row", "kv.tma_row"), ("num_kv_rows", "kv.num_rows"), ("row_idx", "kv.row_index"),
                         ("populate", "kv.populate"))),
    _refused("fa3", "scales of any kind", "scales need a paged cache, got a fa3 one", f"kvarn.caches:{_FA3}.scales",
             BAD_KINDS, _RAISES, f"{HANDLE}.quantization_enabled"),
    Row("fa3", "create_tma_tile", "kv.tma_load_tile", "kvarn.dsl.tma:load_tile",
        f"kvarn.caches:{_FA3}.create_tma_tile", TMA, *copies("test_pages_of_an_fa3_cache")),
    *(_refused("fa3", member, f"{NO_TILES}fa3",
               f"kvarn.caches:{_FA3}.{member}", BAD_KINDS, _RAISES) for member, *_ in _TILES[1:]),
]  # fmt: skip

_POOL = "PagedKVCacheCollection"
_C = f"kvarn.caches:{_POOL}"
_VIEWS, _LENGTHS = members("test_views_are_the_halves_of_a_layer"), members("test_lengths_are_those_of_the_step")
_FACTS = members("test_static_facts_are_the_same_in_a_kernel_and_on_the_host")
_HOST_VIEWS = "tests/unit/test_caches.py::test_worked_numbers_of_a_paged_collection"
COLLECTION = [
    *(Row("collection", m, "kv.field", f"{HANDLE}.field", f"{_C}.{h}", OPS, _HOST_VIEWS, _LENGTHS[1])
      for m, h in (
          ("max_seq_length", "max_seq_length"), ("max_cache_length", "max_cache_length"),
          ("kv_cache_dynamic_shape", "kv_cache_dynamic_shape"),
          ("kv_cache_dynamic_strides", "kv_cache_dynamic_strides"),
          ("kv_cache_scales_dynamic_shape", "kv_cache_scales_dynamic_shape"),
          ("kv_cache_scales_dynamic_strides", "kv_cache_scales_dynamic_strides"))),
    Row("collection", "blocks, scales, cache_lengths, lookup_table and their layouts", "kv.make_collection",
        HANDED, f"{_C}.__init__", OPS, _HOST_VIEWS, _VIEWS[1]),
    Row("collection", "CacheType", "kv.key_cache", f"{COLLECTION_}.get_key_cache", f"{_C}.cache_type", OPS,
        *_VIEWS),
    *(Row("collection", m, "!kv.collection", f"{HANDLE}.{d}", f"{_C}.{h}", TYPES, *_FACTS)
      for m, d, h in (("dtype", "dtype", "dtype"), ("kv_params", "num_heads", "kv_params"),
                      ("scale_dtype", "scale_dtype", "scale_dtype"),
                      ("head_dim_granularity", "head_dim_granularity", "head_dim_granularity"))),
    Row("collection", "name_str", NAME, f"{HANDLE}.kind", f"{_C}.name_str",
        NAME, "tests/unit/test_caches.py::test_continuous", STATIC),
    Row("collection", "__init__ from arrays of any library", "kv.make_collection", HANDED,
        f"{_C}.__init__", OPS, "tests/unit/test_caches_checks.py::test_paged_collection_refuses", _VIEWS[1]),
    Row("collection", "get_key_cache", "kv.key_cache", f"{COLLECTION_}.get_key_cache",
        f"{_C}.get_key_cache", OPS, *_VIEWS),
    Row("collection", "get_value_cache", "kv.value_cache", f"{COLLECTION_}.get_value_cache",
        f"{_C}.get_value_cache", OPS, *_VIEWS),
    _refused("collection", "get_value_cache of an MLA collection", "'kv.value_cache' op", f"{_C}.get_value_cache", BAD,
             "tests/unit/test_caches.py::test_value_cache_of_mla_is_refused",
             f"{COLLECTION_}.get_value_cache"),
    Row("collection", "cache_length", "kv.cache_length", f"{HANDLE}.cache_length", f"{_C}.cache_length", OPS,
        *_LENGTHS),
]  # fmt: skip

_P = "tests/unit/test_populate.py"
_G = "tests/gpu/test_members.py::test_rows_are_those_of_the_definition"
_R = "kvarn.caches:PagedRowIndices"
ROWS_ = [
    Row("rows", "rows, num_pages", "kv.populate", f"{ROWS}.num_pages", f"{_R}.num_pages", OPS,
        f"{_P}::test_rows_are_those_of_the_definition_on_the_host", _G),
    Row("rows", "eff_page", "!kv.rows", f"{ROWS}.eff_page", f"{_R}.eff_page", TYPES,
        f"{_P}::test_leader_and_peer_copy_the_whole_key_tile_together", _G),
    Row("rows", "get_row", "kv.get_row", f"{ROWS}.get_row", f"{_R}.get_row", OPS,
        f"{_P}::test_rows_are_those_of_the_definition_in_gpu_code", _G),
    Row("rows", "base_alignment", "kv.populate", f"{READS}.populate", "kvarn.caches:PagedKVCache.populate", OPS,
        f"{_P}::test_rows_are_those_of_the_definition_in_gpu_code", _G),
    Row("rows", "vector look-ups of 1, 2, 4 and 8 entries", "kv.load_pages", f"{READS}.load_pages",
        "kvarn.dialect.layout:populate_chunk", OPS, f"{_P}::test_rows_are_those_of_the_definition_in_gpu_code", _G,
        "their widths in PTX: tests/pipeline/populate.mlir"),
    Row("rows", "alignment of the table, at every launch", "kv.load_pages", f"{READS}.populate",
        "kvarn.artifact:Arg.table_alignment", OPS, f"{_P}::test_a_table_whose_rows_start_between_is_refused",
        "tests/gpu/test_members.py::test_a_table_that_starts_between_is_refused"),
    Row("rows", "run-time invariants, with KVARN_CHECK=1", "kv.populate", f"{READS}.populate",
        "kvarn.caches:PagedKVCache.populate", "tests/lowering/check_kv_access.mlir",
        f"{_P}::test_a_broken_promise_is_named_when_checks_are_on", No("an assertion ends the process")),
    Row("rows", "pair_cta, is_leader: what each block copies of the keys", "kv.populate", f"{ROWS}.key_copies",
        f"{_R}.key_copies", OPS, f"{_P}::test_leader_and_peer_copy_the_whole_key_tile_together",
        NEEDS_BLACKWELL),
    Row("rows", "parts of a value tile", "kv.get_row", f"{ROWS}.value_copies", f"{_R}.value_copies", OPS,
        f"{_P}::test_parts_of_a_value_tile_are_the_whole_tile", _G),
    Row("rows", "cta_group", "kv.populate", f"{ROWS}.cta_group", f"{_R}.cta_group", OPS,
        f"{_P}::test_leader_and_peer_copy_the_whole_key_tile_together", STATIC),
    *(_refused("rows", member, error, "kvarn.caches:PagedKVCache.populate", BAD,
               "tests/unit/test_caches.py::test_populate_refuses_what_a_kernel_could_not_do", f"{READS}.populate")
      for member, error in (
          ("tiles of more than 16 pages", "'kv.populate' op a tile must span at most 16 pages"),
          ("tiles that straddle pages", "'kv.populate' op tile rows and page size must divide one another"),
          ("a base that may lie inside a page",
           "'kv.populate' op base alignment must be a multiple of the page size"))),
    *(_refused("rows", member, error, "kvarn.caches:PagedKVCache.populate", BAD,
               f"{_P}::test_a_tile_of_an_odd_number_of_rows_has_no_halves", f"{READS}.populate")
      for member, error in (
          ("a pair over an odd number of pages", "'kv.populate' op pair_cta needs one page a tile or an even number"),
          ("a pair over an odd number of rows", "'kv.populate' op pair_cta needs an even number of tile rows"))),
]  # fmt: skip

# --- operands --------------------------------------------------------------------------------------

_EVERY = ("tests/unit/test_operands.py::test_one_kernel_reads_every_kind",
          "tests/gpu/test_operands.py::test_one_kernel_reads_every_kind")  # fmt: skip
_INTERFACE = "tests/unit/test_operands.py::test_operands_have_the_attributes_of_the_interface"
_LACKS = "tests/unit/test_operands.py::test_what_an_operand_does_not_have_is_refused_at_the_users_line"
_OPERAND_METHODS = [
    ("block_paged_ptr", "kv.block_ptr", READS), ("load_scale", "kv.load_scale", OPERAND),
    ("cache_length", "kv.cache_length", HANDLE), ("max_context_length", "kv.max_context_length", HANDLE),
    ("num_kv_rows", "kv.num_rows", READS), ("row_idx", "kv.row_index", READS), ("get_tma_row", "kv.tma_row", READS),
    ("populate", "kv.populate", READS),
]  # fmt: skip


def _operand(section: str, cls: str) -> list[Row]:
    """The rows of an operand class that all have."""
    found = [
        Row(section, "__init__", "!kv.operand", "kvarn.dsl.handles:operand" if "KVCache" in cls else HANDED,
            f"kvarn.caches:{cls}.__init__", TYPES, *_EVERY),
        Row(section, "get_type_name", NAME, NAME,
            f"kvarn.caches:{cls}.get_type_name", NAME, _INTERFACE, STATIC),
        Row(section, "device_type", "!kv.operand", f"{HANDLE}.spec", f"kvarn.caches:{cls}.fields", TYPES, *_EVERY),
    ]  # fmt: skip
    for name in ("dtype", "page_size", "quantization_enabled", "scale_dtype"):
        found.append(Row(section, name, "!kv.operand", f"{HANDLE}.{name}", f"kvarn.caches:{cls}.{name}", OPERANDS,
                         _INTERFACE, STATIC))  # fmt: skip
    name = "quantization_granularity"
    found.append(Row(section, name, "!kv.operand", f"{OPERAND}.{name}", f"kvarn.caches:{cls}.{name}", OPERANDS,
                     _INTERFACE, STATIC))  # fmt: skip
    found += [
        Row(section, name, op, f"{where}.{name}", f"kvarn.caches:{cls}.{name}", OPERANDS, *_EVERY)
        for name, op, where in _OPERAND_METHODS
    ]
    found += [
        Row(
            section,
            name,
            op,
            f"{READS}.{name}",
            f"kvarn.caches:{cls}.{name}",
            OPERANDS,
            *members("test_scale_pointers_of_operands_point_or_dangle"),
        )
        for name, op in (("scales_block_paged_ptr", "kv.scale_block_ptr"), ("scales_raw_ptr", "kv.scales_base"))
    ]
    return found


def _change(rows: list[Row], member: str, **changes: object) -> list[Row]:
    return [replace(r, **changes) if r.member == member else r for r in rows]  # type: ignore[arg-type]


def _no_tiles(section: str, cls: str, error: str, *names: str) -> list[Row]:
    return [_refused(section, name, error, f"kvarn.caches:{cls}.{name}", BAD_KINDS, _RAISES_OPERANDS) for name in names]


_SAME_TILES = "tests/unit/test_members_tiles.py::test_tiles_of_an_operand_are_those_of_its_cache"
_RAISES_OPERANDS = "tests/unit/test_members_tiles.py::test_tiles_that_an_operand_does_not_have_raise"
_TILE_NAMES = tuple(t[0] for t in _TILES)
_BUFFERS = copies("test_tiles_of_operands_over_buffers")
_SCALE_TILES = copies("test_scales_of_operands")
_SCALE_TILE = "create_scale_tma_tile"


def _no_scale_tile(section: str, cls: str) -> Row:
    why = No("descriptors are made on the host")
    return Row(section, f"{_SCALE_TILE} is refused", why, why, f"kvarn.caches:{cls}.{_SCALE_TILE}", why,
               _RAISES_OPERANDS, why)  # fmt: skip


OPERAND_ROWS = [
    *_operand("operand", "KVCacheMHAOperand"),
    *(replace(_tile("operand", "KVCacheMHAOperand", *t), test=_SAME_TILES) for t in _TILES),
    _no_scale_tile("operand", "KVCacheMHAOperand"),
    *_operand("scales", "KVCacheScalesMHAOperand"),
    *_no_tiles("scales", "KVCacheScalesMHAOperand",
               f"{NO_TILES}scales",
               *_TILE_NAMES),
    _no_scale_tile("scales", "KVCacheScalesMHAOperand"),
    *_operand("dense", "LayoutTensorMHAOperand"),
    Row("dense", "create_tma_tile", "kv.tma_load_tile", "kvarn.dsl.tma:load_tile",
        "kvarn.caches:LayoutTensorMHAOperand.create_tma_tile", TMA, *_BUFFERS),
    Row("dense", "create_gather4_tma_tile", "kv.tma_load", "kvarn.dsl.tma:gather4",
        "kvarn.caches:LayoutTensorMHAOperand.create_gather4_tma_tile", TMA,
        "tests/unit/test_members_tiles.py::test_gathers_of_operands_over_buffers_describe_their_rows", NEEDS_BLACKWELL),
    Row("dense", _SCALE_TILE, "kv.tma_load", "kvarn.dsl.tma:load",
        f"kvarn.caches:LayoutTensorMHAOperand.{_SCALE_TILE}", TMA, *_SCALE_TILES),
    *_no_tiles("dense", "LayoutTensorMHAOperand", f"{NO_ROPE}dense",
               "create_rope_tma_tile", "create_rope_gather4_tma_tile"),
    *_change(_operand("ragged", "RaggedMHAOperand"), "max_context_length",
             op=Refused("'kv.max_context_length' op cannot take a ragged operand"),
             lit=BAD_OPERANDS, test=_LACKS, gpu=REFUSED_EARLY),
    Row("ragged", "create_tma_tile", "kv.tma_load_tile", "kvarn.dsl.tma:load_tile",
        "kvarn.caches:RaggedMHAOperand.create_tma_tile", TMA, *_BUFFERS),
    Row("ragged", "create_gather4_tma_tile", "kv.tma_load", "kvarn.dsl.tma:gather4",
        "kvarn.caches:RaggedMHAOperand.create_gather4_tma_tile", TMA,
        "tests/unit/test_members_tiles.py::test_gathers_of_operands_over_buffers_describe_their_rows", NEEDS_BLACKWELL),
    Row("ragged", _SCALE_TILE, "kv.tma_load", "kvarn.dsl.tma:load",
        f"kvarn.caches:RaggedMHAOperand.{_SCALE_TILE}", TMA, *_SCALE_TILES),
    *_no_tiles("ragged", "RaggedMHAOperand", f"{NO_ROPE}ragged",
               "create_rope_tma_tile", "create_rope_gather4_tma_tile"),
]  # fmt: skip

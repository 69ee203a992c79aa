// RUN: kv-opt %s --verify-diagnostics

// What an attention operand of a kind does not have, or may not be.

!ragged = !kv.operand<"ragged", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!dense = !kv.operand<"dense", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!scales = !kv.operand<"scales", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!quantized = !kv.operand<"ragged", i8, 8 : i64, 128 : i64, false, 0 : i64, f32, 32 : i64>
!c = !kv.cache<"paged", f16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!m = !kv.operand<"paged", f16, 1 : i64, 128 : i64, true, 16 : i64, none, 1 : i64>
!i = !kv.operand<"dense", i8, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!three_heads = !kv.operand<"dense", f16, 3 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!one_head = !kv.operand<"dense", f16, 1 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!one_head_cache = !kv.cache<"paged", f16, 1 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>

func.func @max_context_length(%x: !ragged) {
  // expected-error @below {{'kv.max_context_length' op cannot take a ragged operand: its longest sequence is not known without reading all offsets}}
  "kv.max_context_length"(%x) : (!ragged) -> i32
  return
}

func.func @max_prompt_length(%x: !dense, %x2: !ragged) {
  // expected-error @below {{'kv.max_prompt_length' op cannot take a dense operand: it knows nothing of the step's new tokens}}
  "kv.max_prompt_length"(%x) : (!dense) -> i32
  // expected-error @below {{'kv.max_prompt_length' op cannot take a ragged operand: it knows nothing of the step's new tokens}}
  "kv.max_prompt_length"(%x2) : (!ragged) -> i32
  return
}

func.func @is_empty(%x: !dense, %x2: !ragged) {
  // expected-error @below {{'kv.is_empty' op cannot take a dense operand: it knows nothing of the step's new tokens}}
  "kv.is_empty"(%x) : (!dense) -> i1
  // expected-error @below {{'kv.is_empty' op cannot take a ragged operand: it knows nothing of the step's new tokens}}
  "kv.is_empty"(%x2) : (!ragged) -> i1
  return
}

func.func @load_pages(%x: !dense, %b: i32, %x2: !ragged) {
  // expected-error @below {{'kv.load_pages' op cannot take a dense operand: it has no lookup table}}
  "kv.load_pages"(%x, %b, %b) {count = 1 : i64} : (!dense, i32, i32) -> vector<1xi32>
  // expected-error @below {{'kv.load_pages' op cannot take a ragged operand: it has no lookup table}}
  "kv.load_pages"(%x2, %b, %b) {count = 1 : i64} : (!ragged, i32, i32) -> vector<1xi32>
  return
}

func.func @cache_lengths(%x: !dense, %x2: !ragged) {
  // expected-error @below {{'kv.cache_lengths' op cannot take a dense operand: its lengths need not be in memory: use kv.cache_length}}
  "kv.cache_lengths"(%x) : (!dense) -> !llvm.ptr<1>
  // expected-error @below {{'kv.cache_lengths' op cannot take a ragged operand: its lengths are not in memory: use kv.cache_length}}
  "kv.cache_lengths"(%x2) : (!ragged) -> !llvm.ptr<1>
  return
}

func.func @operands(%x: !scales, %b: i32, %p: !llvm.ptr<3>) {
  // expected-error @below {{'kv.load_raw' op cannot take a scales operand: the scales are the data: use kv.load}}
  "kv.load_raw"(%x, %b, %b, %b, %b) {width = 1 : i64} : (!scales, i32, i32, i32, i32) -> f8E4M3FN
  // expected-error @below {{'kv.load_tile' op cannot take a scales operand: a row of scales is no whole number of 16-byte chunks: use kv.load}}
  "kv.load_tile"(%x, %b, %b, %b, %b, %p, %b) {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 128 : i64, mode = "async"}
    : (!scales, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  // expected-error @below {{'kv.load' op width must be at most 4, the extent of the dimension, got 8}}
  "kv.load"(%x, %b, %b, %b, %b) {width = 8 : i64} : (!scales, i32, i32, i32, i32) -> vector<8xf32>
  // expected-error @below {{'kv.load' op result element must be a float type, got i8}}
  "kv.load"(%x, %b, %b, %b, %b) {width = 1 : i64} : (!scales, i32, i32, i32, i32) -> i8
  return
}

func.func @scale_block_ptr(%x: !dense, %b: i32) {
  // expected-error @below {{'kv.scale_block_ptr' op needs a quantized cache (one with a scale type), got one without scales}}
  "kv.scale_block_ptr"(%x, %b, %b, %b, %b) : (!dense, i32, i32, i32, i32) -> !llvm.ptr<1>
  return
}

func.func @load_scale(%x: !quantized, %b: i32) {
  // expected-error @below {{'kv.load_scale' op result must have element type f32, got i8}}
  "kv.load_scale"(%x, %b, %b, %b, %b) {width = 1 : i64} : (!quantized, i32, i32, i32, i32) -> i8
  return
}

func.func @operands_2(%x: !dense, %b: i32, %v: f16, %c: !c) {
  // expected-error @below {{'kv.store' op operand must be of type !kv.cache, got !kv.operand<"dense", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>}}
  "kv.store"(%x, %b, %b, %b, %b, %v) {oob = "drop"} : (!dense, i32, i32, i32, i32, f16) -> ()
  // expected-error @below {{'kv.populate' op result must be !kv.rows<64 : i64, 0 : i64>, got !kv.rows<64 : i64, 16 : i64>}}
  "kv.populate"(%x, %b, %b) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!dense, i32, i32) -> !kv.rows<64 : i64, 16 : i64>
  // expected-error @below {{'kv.make_operand' op result must have the cache's parameters !kv.operand<"paged", f16,}}
  "kv.make_operand"(%c) : (!c) -> !scales
  return
}

func.func @operand_attention(%k: !dense, %v: !ragged, %q: memref<?x16x128xf16>, %o: memref<?xi32>, %s: f32,
    %k2: !scales, %v2: !scales, %k3: !m, %v3: !m, %k4: !i, %v4: !i, %k5: !c, %v5: !c) {
  // expected-error @below {{'kv.operand_attention' op keys and values must be operands of one type, got !kv.operand<"dense",}}
  "kv.operand_attention"(keys = %k, values = %v, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!dense, !ragged, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  // expected-error @below {{'kv.operand_attention' op needs operands of keys and values, got one that shows a cache's scales}}
  "kv.operand_attention"(keys = %k2, values = %v2, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!scales, !scales, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  // expected-error @below {{'kv.operand_attention' op needs a collection with values (is_mla = false)}}
  "kv.operand_attention"(keys = %k3, values = %v3, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!m, !m, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  // expected-error @below {{'kv.operand_attention' op needs a float cache or one with scales, got element type i8}}
  "kv.operand_attention"(keys = %k4, values = %v4, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!i, !i, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  // expected-error @below {{'kv.operand_attention' op operand must be of type !kv.operand, got !kv.cache<}}
  "kv.operand_attention"(keys = %k5, values = %v5, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!c, !c, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  return
}

func.func @operand_attention_2(%k: !three_heads, %v: !three_heads, %q: memref<?x16x128xf16>, %o: memref<?xi32>, %s: f32,
    %k2: !dense, %v2: !dense) {
  // expected-error @below {{'kv.operand_attention' op query heads must be a multiple of the 3 KV heads, got 16}}
  "kv.operand_attention"(keys = %k, values = %v, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!three_heads, !three_heads, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  // expected-error @below {{'kv.operand_attention' op kv_offsets needs operands of caches, got dense ones, which have all keys}}
  "kv.operand_attention"(keys = %k2, values = %v2, query = %q, row_offsets = %o, scale = %s, out = %q, kv_offsets = %o)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!dense, !dense, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>, memref<?xi32>) -> ()
  return
}

func.func @gather(%x: !one_head, %i: memref<?x?xi32>, %o: memref<?xi32>, %out: memref<?x?x1x128xf16>) {
  // expected-error @below {{'kv.gather' op operand must be of type !kv.cache, got !kv.operand<}}
  "kv.gather"(%x, %i, %o, %out) : (!one_head, memref<?x?xi32>, memref<?xi32>, memref<?x?x1x128xf16>) -> ()
  return
}

func.func @mla_decompress_and_convert(%x: !one_head, %o: memref<?xi32>, %out: memref<?x128xf16>, %c: !one_head_cache) {
  // expected-error @below {{'kv.mla_decompress' op operand must be of type !kv.cache, got !kv.operand<}}
  "kv.mla_decompress"(%x, %o, %o, %out) : (!one_head, memref<?xi32>, memref<?xi32>, memref<?x128xf16>) -> ()
  // expected-error @below {{'kv.convert' op operand must be of type !kv.cache, got !kv.operand<}}
  "kv.convert"(%x, %c) : (!one_head, !one_head_cache) -> ()
  return
}

// expected-error @below {{'func.func' op argument #0 has a malformed type: a scales operand must have a scale type, got none}}
func.func private @scales_operand(!kv.operand<"scales", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: page_size of a dense operand must be 0, got 16}}
func.func private @page_size_dense_operand(!kv.operand<"dense", f16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: kind must be one of paged, continuous, fa3, got 'dense'}}
func.func private @kind(!kv.cache<"dense", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: kind must be one of paged, continuous, fa3, got 'ragged'}}
func.func private @kind_2(!kv.collection<"ragged", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>)

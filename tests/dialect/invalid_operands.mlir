// RUN: kv-opt %s --split-input-file --verify-diagnostics

// What an attention operand of a kind does not have, or may not be. One chunk a rule.

!x = !kv.operand<"ragged", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: a ragged operand does not know its longest sequence.
func.func @rule(%x: !x, %b: i32) {
  // expected-error @below {{'kv.max_context_length' op cannot take a ragged operand: its longest sequence is not known without reading all offsets}}
  %n = "kv.max_context_length"(%x) : (!x) -> i32
  return
}

// -----

!x = !kv.operand<"dense", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: buffers know nothing of the new tokens.
func.func @rule(%x: !x, %b: i32) {
  // expected-error @below {{'kv.max_prompt_length' op cannot take a dense operand: it knows nothing of the step's new tokens}}
  %n = "kv.max_prompt_length"(%x) : (!x) -> i32
  return
}

// -----

!x = !kv.operand<"dense", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: buffers know nothing of the new tokens.
func.func @rule(%x: !x, %b: i32) {
  // expected-error @below {{'kv.is_empty' op cannot take a dense operand: it knows nothing of the step's new tokens}}
  %n = "kv.is_empty"(%x) : (!x) -> i1
  return
}

// -----

!x = !kv.operand<"dense", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: buffers have no table.
func.func @rule(%x: !x, %b: i32) {
  // expected-error @below {{'kv.load_pages' op cannot take a dense operand: it has no lookup table}}
  %n = "kv.load_pages"(%x, %b, %b) {count = 1 : i64} : (!x, i32, i32) -> vector<1xi32>
  return
}

// -----

!x = !kv.operand<"ragged", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: buffers know nothing of the new tokens.
func.func @rule(%x: !x, %b: i32) {
  // expected-error @below {{'kv.max_prompt_length' op cannot take a ragged operand: it knows nothing of the step's new tokens}}
  %n = "kv.max_prompt_length"(%x) : (!x) -> i32
  return
}

// -----

!x = !kv.operand<"ragged", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: buffers know nothing of the new tokens.
func.func @rule(%x: !x, %b: i32) {
  // expected-error @below {{'kv.is_empty' op cannot take a ragged operand: it knows nothing of the step's new tokens}}
  %n = "kv.is_empty"(%x) : (!x) -> i1
  return
}

// -----

!x = !kv.operand<"ragged", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: buffers have no table.
func.func @rule(%x: !x, %b: i32) {
  // expected-error @below {{'kv.load_pages' op cannot take a ragged operand: it has no lookup table}}
  %n = "kv.load_pages"(%x, %b, %b) {count = 1 : i64} : (!x, i32, i32) -> vector<1xi32>
  return
}

// -----

!x = !kv.operand<"dense", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: a dense operand may have no lengths in memory.
func.func @rule(%x: !x, %b: i32) {
  // expected-error @below {{'kv.cache_lengths' op cannot take a dense operand: its lengths need not be in memory: use kv.cache_length}}
  %n = "kv.cache_lengths"(%x) : (!x) -> !llvm.ptr<1>
  return
}

// -----

!x = !kv.operand<"ragged", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: a ragged operand has no lengths in memory.
func.func @rule(%x: !x, %b: i32) {
  // expected-error @below {{'kv.cache_lengths' op cannot take a ragged operand: its lengths are not in memory: use kv.cache_length}}
  %n = "kv.cache_lengths"(%x) : (!x) -> !llvm.ptr<1>
  return
}

// -----

!x = !kv.operand<"scales", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
// Rule: scales have no stored values of their own.
func.func @rule(%x: !x, %b: i32) {
  // expected-error @below {{'kv.load_raw' op cannot take a scales operand: the scales are the data: use kv.load}}
  %n = "kv.load_raw"(%x, %b, %b, %b, %b) {width = 1 : i64} : (!x, i32, i32, i32, i32) -> f8E4M3FN
  return
}

// -----

!x = !kv.operand<"scales", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
// Rule: scales make no tiles.
func.func @rule(%x: !x, %b: i32, %p: !llvm.ptr<3>) {
  // expected-error @below {{'kv.load_tile' op cannot take a scales operand: a row of scales is no whole number of 16-byte chunks: use kv.load}}
  "kv.load_tile"(%x, %b, %b, %b, %b, %p, %b) {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 128 : i64, mode = "async"}
    : (!x, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  return
}

// -----

!x = !kv.operand<"scales", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
// Rule: loads of scales stay in the granules.
func.func @rule(%x: !x, %b: i32) {
  // expected-error @below {{'kv.load' op width must be at most 4, the extent of the dimension, got 8}}
  %n = "kv.load"(%x, %b, %b, %b, %b) {width = 8 : i64} : (!x, i32, i32, i32, i32) -> vector<8xf32>
  return
}

// -----

!x = !kv.operand<"scales", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
// Rule: the elements of scales have the type of the scales, or a float.
func.func @rule(%x: !x, %b: i32) {
  // expected-error @below {{'kv.load' op result element must be a float type, got i8}}
  %n = "kv.load"(%x, %b, %b, %b, %b) {width = 1 : i64} : (!x, i32, i32, i32, i32) -> i8
  return
}

// -----

!x = !kv.operand<"dense", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: a dense operand without scales has no address of one.
func.func @rule(%x: !x, %b: i32) {
  // expected-error @below {{'kv.scale_block_ptr' op needs a quantized cache (one with a scale type), got one without scales}}
  %n = "kv.scale_block_ptr"(%x, %b, %b, %b, %b) : (!x, i32, i32, i32, i32) -> !llvm.ptr<1>
  return
}

// -----

!x = !kv.operand<"ragged", i8, 8 : i64, 128 : i64, false, 0 : i64, f32, 32 : i64>
// Rule: zeros have the type of the scales.
func.func @rule(%x: !x, %b: i32) {
  // expected-error @below {{'kv.load_scale' op result must have element type f32, got i8}}
  %n = "kv.load_scale"(%x, %b, %b, %b, %b) {width = 1 : i64} : (!x, i32, i32, i32, i32) -> i8
  return
}

// -----

!x = !kv.operand<"dense", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: an operand is read-only.
func.func @rule(%x: !x, %b: i32, %v: f16) {
  // expected-error @below {{'kv.store' op operand must be of type !kv.cache, got !kv.operand<"dense", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>}}
  "kv.store"(%x, %b, %b, %b, %b, %v) {oob = "drop"} : (!x, i32, i32, i32, i32, f16) -> ()
  return
}

// -----

!x = !kv.operand<"dense", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: a buffer has no pages.
func.func @rule(%x: !x, %b: i32) {
  // expected-error @below {{'kv.populate' op result must be !kv.rows<64 : i64, 0 : i64>, got !kv.rows<64 : i64, 16 : i64>}}
  %n = "kv.populate"(%x, %b, %b) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!x, i32, i32) -> !kv.rows<64 : i64, 16 : i64>
  return
}

// -----

!c = !kv.cache<"paged", f16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!x = !kv.operand<"scales", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
// Rule: an operand of scales is made of a cache that has them.
func.func @rule(%c: !c) {
  // expected-error @below {{'kv.make_operand' op result must have the cache's parameters !kv.operand<"paged", f16,}}
  %x = "kv.make_operand"(%c) : (!c) -> !x
  return
}

// -----

// Rule: a scales operand has a scale type.
// expected-error @below {{'func.func' op argument #0 has a malformed type: a scales operand must have a scale type, got none}}
func.func private @rule(!kv.operand<"scales", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>)

// -----

// Rule: a dense operand has no pages.
// expected-error @below {{'func.func' op argument #0 has a malformed type: page_size of a dense operand must be 0, got 16}}
func.func private @rule(!kv.operand<"dense", f16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>)

// -----

// Rule: no cache is dense.
// expected-error @below {{'func.func' op argument #0 has a malformed type: kind must be one of paged, continuous, fa3, got 'dense'}}
func.func private @rule(!kv.cache<"dense", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>)

// -----

// Rule: no collection is ragged.
// expected-error @below {{'func.func' op argument #0 has a malformed type: kind must be one of paged, continuous, fa3, got 'ragged'}}
func.func private @rule(!kv.collection<"ragged", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>)

// -----

!d = !kv.operand<"dense", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!r = !kv.operand<"ragged", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: keys and values are of one type.
func.func @rule(%k: !d, %v: !r, %q: memref<?x16x128xf16>, %o: memref<?xi32>, %s: f32) {
  // expected-error @below {{'kv.operand_attention' op keys and values must be operands of one type, got !kv.operand<"dense",}}
  "kv.operand_attention"(keys = %k, values = %v, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!d, !r, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  return
}

// -----

!s = !kv.operand<"scales", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
// Rule: scales are no keys.
func.func @rule(%k: !s, %v: !s, %q: memref<?x16x128xf16>, %o: memref<?xi32>, %s: f32) {
  // expected-error @below {{'kv.operand_attention' op needs operands of keys and values, got one that shows a cache's scales}}
  "kv.operand_attention"(keys = %k, values = %v, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!s, !s, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  return
}

// -----

!m = !kv.operand<"paged", f16, 1 : i64, 128 : i64, true, 16 : i64, none, 1 : i64>
// Rule: latent keys have no values.
func.func @rule(%k: !m, %v: !m, %q: memref<?x16x128xf16>, %o: memref<?xi32>, %s: f32) {
  // expected-error @below {{'kv.operand_attention' op needs a collection with values (is_mla = false)}}
  "kv.operand_attention"(keys = %k, values = %v, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!m, !m, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  return
}

// -----

!i = !kv.operand<"dense", i8, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: integers need scales.
func.func @rule(%k: !i, %v: !i, %q: memref<?x16x128xf16>, %o: memref<?xi32>, %s: f32) {
  // expected-error @below {{'kv.operand_attention' op needs a float cache or one with scales, got element type i8}}
  "kv.operand_attention"(keys = %k, values = %v, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!i, !i, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  return
}

// -----

!c = !kv.cache<"paged", f16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a cache is not an operand.
func.func @rule(%k: !c, %v: !c, %q: memref<?x16x128xf16>, %o: memref<?xi32>, %s: f32) {
  // expected-error @below {{'kv.operand_attention' op operand must be of type !kv.operand, got !kv.cache<}}
  "kv.operand_attention"(keys = %k, values = %v, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!c, !c, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  return
}

// -----

!x = !kv.operand<"dense", f16, 3 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: query heads come in groups.
func.func @rule(%k: !x, %v: !x, %q: memref<?x16x128xf16>, %o: memref<?xi32>, %s: f32) {
  // expected-error @below {{'kv.operand_attention' op query heads must be a multiple of the 3 KV heads, got 16}}
  "kv.operand_attention"(keys = %k, values = %v, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!x, !x, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  return
}

// -----

!d = !kv.operand<"dense", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: a buffer says how many keys there are.
func.func @rule(%k: !d, %v: !d, %q: memref<?x16x128xf16>, %o: memref<?xi32>, %s: f32) {
  // expected-error @below {{'kv.operand_attention' op kv_offsets needs operands of caches, got dense ones, which have all keys}}
  "kv.operand_attention"(keys = %k, values = %v, query = %q, row_offsets = %o, scale = %s, out = %q, kv_offsets = %o)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!d, !d, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>, memref<?xi32>) -> ()
  return
}

// -----

!x = !kv.operand<"dense", f16, 1 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: what copies tokens out of caches takes caches, whose indices are in another order.
func.func @rule(%x: !x, %i: memref<?x?xi32>, %o: memref<?xi32>, %out: memref<?x?x1x128xf16>) {
  // expected-error @below {{'kv.gather' op operand must be of type !kv.cache, got !kv.operand<}}
  "kv.gather"(%x, %i, %o, %out) : (!x, memref<?x?xi32>, memref<?xi32>, memref<?x?x1x128xf16>) -> ()
  return
}

// -----

!x = !kv.operand<"dense", f16, 1 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: likewise.
func.func @rule(%x: !x, %o: memref<?xi32>, %out: memref<?x128xf16>) {
  // expected-error @below {{'kv.mla_decompress' op operand must be of type !kv.cache, got !kv.operand<}}
  "kv.mla_decompress"(%x, %o, %o, %out) : (!x, memref<?xi32>, memref<?xi32>, memref<?x128xf16>) -> ()
  return
}

// -----

!x = !kv.operand<"dense", f16, 1 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!c = !kv.cache<"paged", f16, 1 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: likewise.
func.func @rule(%x: !x, %c: !c) {
  // expected-error @below {{'kv.convert' op operand must be of type !kv.cache, got !kv.operand<}}
  "kv.convert"(%x, %c) : (!x, !c) -> ()
  return
}

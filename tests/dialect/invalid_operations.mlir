// RUN: kv-opt %s --split-input-file --verify-diagnostics

// What the verifiers of the tier-1 ops refuse. One chunk a rule.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: an append writes values too.
func.func @rule(%c: !pool, %i: i32, %k: memref<?x8x128xbf16>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.append' op takes a value operand for this collection (is_mla = false)}}
  "kv.append"(collection = %c, layer = %i, key = %k, row_offsets = %o)
    : (!pool, i32, memref<?x8x128xbf16>, memref<?xi32>) -> ()
  return
}

// -----

!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
// Rule: a latent append has no values.
func.func @rule(%c: !latent, %i: i32, %k: memref<?x1x576xbf16>, %o: memref<?xi32>, %v: memref<?x1x576xbf16>) {
  // expected-error @below {{'kv.append' op takes no value operand for this collection (is_mla = true)}}
  "kv.append"(collection = %c, layer = %i, key = %k, row_offsets = %o, value = %v)
    : (!latent, i32, memref<?x1x576xbf16>, memref<?xi32>, memref<?x1x576xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: new keys have the cache's heads.
func.func @rule(%c: !pool, %i: i32, %k: memref<?x4x128xbf16>, %o: memref<?xi32>, %v: memref<?x8x128xbf16>) {
  // expected-error @below {{'kv.append' op key must have 8 in dimension 1, got 4}}
  "kv.append"(collection = %c, layer = %i, key = %k, row_offsets = %o, value = %v)
    : (!pool, i32, memref<?x4x128xbf16>, memref<?xi32>, memref<?x8x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: new values have the head size.
func.func @rule(%c: !pool, %i: i32, %k: memref<?x8x128xbf16>, %o: memref<?xi32>, %v: memref<?x8x64xbf16>) {
  // expected-error @below {{'kv.append' op value must have 128 in dimension 2, got 64}}
  "kv.append"(collection = %c, layer = %i, key = %k, row_offsets = %o, value = %v)
    : (!pool, i32, memref<?x8x128xbf16>, memref<?xi32>, memref<?x8x64xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: new keys have the storage type.
func.func @rule(%c: !pool, %i: i32, %k: memref<?x8x128xf32>, %o: memref<?xi32>, %v: memref<?x8x128xbf16>) {
  // expected-error @below {{'kv.append' op key must have element type bf16, got f32}}
  "kv.append"(collection = %c, layer = %i, key = %k, row_offsets = %o, value = %v)
    : (!pool, i32, memref<?x8x128xf32>, memref<?xi32>, memref<?x8x128xbf16>) -> ()
  return
}

// -----

!fp8_pool = !kv.collection<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
// Rule: an append that quantizes takes floats.
func.func @rule(%c: !fp8_pool, %i: i32, %k: memref<?x8x128xf8E4M3FN>, %o: memref<?xi32>, %v: memref<?x8x128xbf16>) {
  // expected-error @below {{'kv.append' op key must have element type f32 or f16 or bf16, got f8E4M3FN}}
  "kv.append"(collection = %c, layer = %i, key = %k, row_offsets = %o, value = %v)
    : (!fp8_pool, i32, memref<?x8x128xf8E4M3FN>, memref<?xi32>, memref<?x8x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: new keys have three dimensions.
func.func @rule(%c: !pool, %i: i32, %k: memref<?x1024xbf16>, %o: memref<?xi32>, %v: memref<?x8x128xbf16>) {
  // expected-error @below {{'kv.append' op key must be a memref of rank 3, got memref<?x1024xbf16>}}
  "kv.append"(collection = %c, layer = %i, key = %k, row_offsets = %o, value = %v)
    : (!pool, i32, memref<?x1024xbf16>, memref<?xi32>, memref<?x8x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: new keys have a known rank.
func.func @rule(%c: !pool, %i: i32, %k: memref<*xbf16>, %o: memref<?xi32>, %v: memref<?x8x128xbf16>) {
  // expected-error @below {{'kv.append' op key must be a memref of rank 3, got memref<*xbf16>}}
  "kv.append"(collection = %c, layer = %i, key = %k, row_offsets = %o, value = %v)
    : (!pool, i32, memref<*xbf16>, memref<?xi32>, memref<?x8x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: offsets are 32-bit.
func.func @rule(%c: !pool, %i: i32, %k: memref<?x8x128xbf16>, %o: memref<?xi64>, %v: memref<?x8x128xbf16>) {
  // expected-error @below {{'kv.append' op row_offsets must have element type i32, got i64}}
  "kv.append"(collection = %c, layer = %i, key = %k, row_offsets = %o, value = %v)
    : (!pool, i32, memref<?x8x128xbf16>, memref<?xi64>, memref<?x8x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: offsets have one dimension.
func.func @rule(%c: !pool, %i: i32, %k: memref<?x8x128xbf16>, %o: memref<?x?xi32>, %v: memref<?x8x128xbf16>) {
  // expected-error @below {{'kv.append' op row_offsets must be a memref of rank 1, got memref<?x?xi32>}}
  "kv.append"(collection = %c, layer = %i, key = %k, row_offsets = %o, value = %v)
    : (!pool, i32, memref<?x8x128xbf16>, memref<?x?xi32>, memref<?x8x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: given scales need a quantized cache.
func.func @rule(%c: !pool, %i: i32, %k: memref<?x8x128xbf16>, %o: memref<?xi32>, %v: memref<?x8x128xbf16>, %s: memref<?x8x4xf32>) {
  // expected-error @below {{'kv.append' op needs a quantized cache (one with a scale type), got one without scales}}
  "kv.append"(collection = %c, layer = %i, key = %k, row_offsets = %o, value = %v, key_scale = %s)
    : (!pool, i32, memref<?x8x128xbf16>, memref<?xi32>, memref<?x8x128xbf16>, memref<?x8x4xf32>) -> ()
  return
}

// -----

!fp8_pool = !kv.collection<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
// Rule: given scales are one a granule.
func.func @rule(%c: !fp8_pool, %i: i32, %k: memref<?x8x128xbf16>, %o: memref<?xi32>, %v: memref<?x8x128xbf16>, %s: memref<?x8x8xf32>) {
  // expected-error @below {{'kv.append' op key_scale must have 4 in dimension 2, got 8}}
  "kv.append"(collection = %c, layer = %i, key = %k, row_offsets = %o, value = %v, key_scale = %s)
    : (!fp8_pool, i32, memref<?x8x128xbf16>, memref<?xi32>, memref<?x8x128xbf16>, memref<?x8x8xf32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: rotations turn pairs.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %k: memref<?x8x128xbf16>, %o: memref<?xi32>, %f: memref<?x63xf32>) {
  // expected-error @below {{'kv.rope_append' op freqs must have an even R of at most 128 in dimension 1, got 63}}
  "kv.rope_append"(collection = %c, layer = %i, query = %q, key = %k, value = %k, row_offsets = %o, freqs = %f,
      query_out = %q)
    {interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x63xf32>, memref<?x32x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: rotations stay in the head.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %k: memref<?x8x128xbf16>, %o: memref<?xi32>, %f: memref<?x256xf32>) {
  // expected-error @below {{'kv.rope_append' op freqs must have an even R of at most 128 in dimension 1, got 256}}
  "kv.rope_append"(collection = %c, layer = %i, query = %q, key = %k, value = %k, row_offsets = %o, freqs = %f,
      query_out = %q)
    {interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x256xf32>, memref<?x32x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: the rotated extent is static.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %k: memref<?x8x128xbf16>, %o: memref<?xi32>, %f: memref<?x?xf32>) {
  // expected-error @below {{'kv.rope_append' op freqs must have a static extent R in dimension 1, got a dynamic one}}
  "kv.rope_append"(collection = %c, layer = %i, query = %q, key = %k, value = %k, row_offsets = %o, freqs = %f,
      query_out = %q)
    {interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x?xf32>, memref<?x32x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: frequencies are f32.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %k: memref<?x8x128xbf16>, %o: memref<?xi32>, %f: memref<?x128xbf16>) {
  // expected-error @below {{'kv.rope_append' op freqs must have element type f32, got bf16}}
  "kv.rope_append"(collection = %c, layer = %i, query = %q, key = %k, value = %k, row_offsets = %o, freqs = %f,
      query_out = %q)
    {interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x128xbf16>, memref<?x32x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: queries are normed with keys or not at all.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %k: memref<?x8x128xbf16>, %o: memref<?xi32>, %f: memref<?x128xf32>, %g: memref<128xf32>) {
  // expected-error @below {{'kv.rope_append' op takes both q_gamma and k_gamma, or neither}}
  "kv.rope_append"(collection = %c, layer = %i, query = %q, key = %k, value = %k, row_offsets = %o, freqs = %f,
      query_out = %q, q_gamma = %g)
    {interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>, memref<128xf32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: queries have the head size.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x64xbf16>, %k: memref<?x8x128xbf16>, %o: memref<?xi32>, %f: memref<?x128xf32>) {
  // expected-error @below {{'kv.rope_append' op query must have 128 in dimension 2, got 64}}
  "kv.rope_append"(collection = %c, layer = %i, query = %q, key = %k, value = %k, row_offsets = %o, freqs = %f,
      query_out = %q)
    {interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x32x64xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x64xbf16>) -> ()
  return
}

// -----

!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
// Rule: an MLA collection is not roped by rope_append.
func.func @rule(%c: !latent, %i: i32, %q: memref<?x32x128xbf16>, %k: memref<?x8x128xbf16>, %o: memref<?xi32>, %f: memref<?x128xf32>) {
  // expected-error @below {{'kv.rope_append' op needs a collection with values (is_mla = false)}}
  "kv.rope_append"(collection = %c, layer = %i, query = %q, key = %k, value = %k, row_offsets = %o, freqs = %f,
      query_out = %q)
    {interleaved = true, eps = 1.0e-6 : f32}
    : (!latent, i32, memref<?x32x128xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>) -> ()
  return
}

// -----

!fp8_pool = !kv.collection<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
// Rule: a quantized cache cannot be rotated in place.
func.func @rule(%c: !fp8_pool, %i: i32, %q: memref<?x32x128xbf16>, %o: memref<?xi32>, %f: memref<?x128xf32>) {
  // expected-error @below {{'kv.rope' op needs a cache without scales: rotate before quantizing with kv.rope_append}}
  "kv.rope"(%c, %i, %q, %o, %f, %q) {interleaved = true, mrope_section = array<i64>}
    : (!fp8_pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: position ids have a row a section.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %o: memref<?xi32>, %f: memref<?x128xf32>) {
  // expected-error @below {{'kv.rope' op position_ids must be a memref of rank 2, got memref<?xi32>}}
  "kv.rope"(%c, %i, %q, %o, %f, %q, %o) {interleaved = true, mrope_section = array<i64: 32, 32>}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>, memref<?xi32>) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: store_ragged does not convert.
func.func @rule(%c: !cache, %x: memref<?x8x128xf32>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.store_ragged' op x must have element type bf16, got f32}}
  "kv.store_ragged"(%c, %x, %o) : (!cache, memref<?x8x128xf32>, memref<?xi32>) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: store_padded takes a batch of padded sequences.
func.func @rule(%c: !cache, %x: memref<?x8x128xbf16>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.store_padded' op x must be a memref of rank 4, got memref<?x8x128xbf16>}}
  "kv.store_padded"(%c, %x, %o) : (!cache, memref<?x8x128xbf16>, memref<?xi32>) -> ()
  return
}

// -----

!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
// Rule: a quantized cache is not normed in place.
func.func @rule(%c: !fp8, %g: memref<128xf32>, %o: memref<?xi32>, %n: i32) {
  // expected-error @below {{'kv.rms_norm' op needs a float cache without scales}}
  "kv.rms_norm"(%c, %g, %o, %n) {eps = 1.0e-6 : f32, weight_offset = 0.0 : f32, multiply_before_cast = true}
    : (!fp8, memref<128xf32>, memref<?xi32>, i32) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: gamma covers part of a head or a whole row.
func.func @rule(%c: !cache, %g: memref<256xf32>, %o: memref<?xi32>, %n: i32) {
  // expected-error @below {{'kv.rms_norm' op gamma must have at most 128 or exactly 1024 elements, got 256}}
  "kv.rms_norm"(%c, %g, %o, %n) {eps = 1.0e-6 : f32, weight_offset = 0.0 : f32, multiply_before_cast = true}
    : (!cache, memref<256xf32>, memref<?xi32>, i32) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: radd takes both halves.
func.func @rule(%c: !pool, %i: i32, %a: memref<?x1024xbf16>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.radd' op a must have 2048 in dimension 1, got 1024}}
  "kv.radd"(%c, %i, %a, %o, %i) : (!pool, i32, memref<?x1024xbf16>, memref<?xi32>, i32) -> ()
  return
}

// -----

!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
// Rule: radd needs values.
func.func @rule(%c: !latent, %i: i32, %a: memref<?x1152xbf16>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.radd' op needs a collection with values (is_mla = false)}}
  "kv.radd"(%c, %i, %a, %o, %i) : (!latent, i32, memref<?x1152xbf16>, memref<?xi32>, i32) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: iadd_2m takes whole rows.
func.func @rule(%c: !pool, %i: i32, %a: memref<?x2048xbf16>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.iadd_2m' op kv must have 1024 in dimension 1, got 2048}}
  "kv.iadd_2m"(%c, %i, %a, %o) : (!pool, i32, memref<?x2048xbf16>, memref<?xi32>) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: gather copies bits.
func.func @rule(%c: !cache, %t: memref<?x?xi32>, %o: memref<?xi32>, %x: memref<?x?x8x128xf32>) {
  // expected-error @below {{'kv.gather' op out must have element type bf16, got f32}}
  "kv.gather"(%c, %t, %o, %x) : (!cache, memref<?x?xi32>, memref<?xi32>, memref<?x?x8x128xf32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: copy_pages takes lists of pages.
func.func @rule(%c: !pool, %t: memref<?x?xi32>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.copy_pages' op source must be a memref of rank 1, got memref<?x?xi32>}}
  "kv.copy_pages"(%c, %t, %o) : (!pool, memref<?x?xi32>, memref<?xi32>) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!h96 = !kv.cache<"paged", bf16, 8 : i64, 96 : i64, false, 16 : i64, none, 1 : i64>
// Rule: convert keeps heads and head size.
func.func @rule(%c: !cache, %d: !h96) {
  // expected-error @below {{'kv.convert' op source and destination must have the same heads and head size, got 8 x 128 and 8 x 96}}
  "kv.convert"(%c, %d) : (!cache, !h96) -> ()
  return
}

// -----

// Rule: pages have tokens.
func.func @rule(%t: memref<?x?xi32>, %o: memref<?xi32>, %i: i32) {
  // expected-error @below {{'kv.remap_sparse_indices' op page_size must be a positive integer, got 0 : i64}}
  "kv.remap_sparse_indices"(%t, %o, %t, %i, %t) {page_size = 0 : i64}
    : (memref<?x?xi32>, memref<?xi32>, memref<?x?xi32>, i32, memref<?x?xi32>) -> ()
  return
}

// -----

// Rule: indices are tables.
func.func @rule(%t: memref<?x?xi32>, %o: memref<?xi32>, %i: i32) {
  // expected-error @below {{'kv.remap_sparse_indices' op lookup_table must be a memref of rank 2, got memref<?xi32>}}
  "kv.remap_sparse_indices"(%t, %o, %o, %i, %t) {page_size = 16 : i64}
    : (memref<?x?xi32>, memref<?xi32>, memref<?xi32>, i32, memref<?x?xi32>) -> ()
  return
}

// -----

// Rule: row offsets are 32-bit.
func.func @rule(%o: memref<?xi32>, %x: memref<?xi64>) {
  // expected-error @below {{'kv.cache_row_offsets' op out must have element type i32, got i64}}
  "kv.cache_row_offsets"(%o, %o, %x) : (memref<?xi32>, memref<?xi32>, memref<?xi64>) -> ()
  return
}

// -----

// Rule: lengths are 32-bit.
func.func @rule(%o: memref<?xi32>, %x: memref<?xi64>) {
  // expected-error @below {{'kv.increment_cache_lengths' op cache_lengths must have element type i32, got i64}}
  "kv.increment_cache_lengths"(%x, %o) : (memref<?xi64>, memref<?xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a batch-invariant schedule cuts sequences by their own length.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x16x128xbf16>, %out: memref<?x16x128xbf16>, %o: memref<?xi32>, %s: f32) {
  // expected-error @below {{'kv.attention' op has a schedule whose batch_invariant needs fixed splits of at least one token, got split = 0}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {batch_invariant = true, split = 0 : i64}}
    : (!pool, i32, memref<?x16x128xbf16>, memref<?xi32>, f32, memref<?x16x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: whether a schedule is batch-invariant is a bool.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x16x128xbf16>, %out: memref<?x16x128xbf16>, %o: memref<?xi32>, %s: f32) {
  // expected-error @below {{'kv.attention' op has a schedule whose batch_invariant must be true or false, got 2}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {batch_invariant = 2 : i64}}
    : (!pool, i32, memref<?x16x128xbf16>, memref<?xi32>, f32, memref<?x16x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: query heads share KV heads evenly.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x12x128xbf16>, %out: memref<?x12x128xbf16>, %o: memref<?xi32>, %s: f32) {
  // expected-error @below {{'kv.attention' op query heads must be a multiple of the 8 KV heads, got 12}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x12x128xbf16>, memref<?xi32>, f32, memref<?x12x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: query heads are static.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x?x128xbf16>, %out: memref<?x?x128xbf16>, %o: memref<?xi32>, %s: f32) {
  // expected-error @below {{'kv.attention' op query must have a static number of heads in dimension 1, got a dynamic one}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x?x128xbf16>, memref<?xi32>, f32, memref<?x?x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: the query has the cache's type.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x128xf32>, %out: memref<?x32x128xf32>, %o: memref<?xi32>, %s: f32) {
  // expected-error @below {{'kv.attention' op query must have element type bf16, got f32}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xf32>, memref<?xi32>, f32, memref<?x32x128xf32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: the output has the query's heads.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %out: memref<?x16x128xbf16>, %o: memref<?xi32>, %s: f32) {
  // expected-error @below {{'kv.attention' op out must have 32 in dimension 1, got 16}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x16x128xbf16>) -> ()
  return
}

// -----

!int = !kv.collection<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: integers attend through scales.
func.func @rule(%c: !int, %i: i32, %q: memref<?x32x128xbf16>, %out: memref<?x32x128xbf16>, %o: memref<?xi32>, %s: f32) {
  // expected-error @below {{'kv.attention' op needs a float cache or one with scales, got element type i8}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!int, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x32x128xbf16>) -> ()
  return
}

// -----

!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
// Rule: attention over latent rows is another op.
func.func @rule(%c: !latent, %i: i32, %q: memref<?x32x128xbf16>, %out: memref<?x32x128xbf16>, %o: memref<?xi32>, %s: f32) {
  // expected-error @below {{'kv.attention' op needs a collection with values (is_mla = false)}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!latent, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x32x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: masks have names.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %out: memref<?x32x128xbf16>, %o: memref<?xi32>, %s: f32) {
  // expected-error @below {{'kv.attention' op mask must be one of causal, null, sliding_window, chunked, chunked_causal, got "prefix"}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {mask = "prefix", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x32x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a window has a width.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %out: memref<?x32x128xbf16>, %o: memref<?xi32>, %s: f32) {
  // expected-error @below {{'kv.attention' op span (the window or chunk) must be positive for mask sliding_window, got 0 : i64}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {mask = "sliding_window", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x32x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: ALiBi slopes are one a query head.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %out: memref<?x32x128xbf16>, %o: memref<?xi32>, %s: f32, %n: memref<8xf32>) {
  // expected-error @below {{'kv.attention' op alibi_slopes must have 32 in dimension 0, got 8}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out, alibi_slopes = %n)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x32x128xbf16>, memref<8xf32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: sinks are one a query head.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %out: memref<?x32x128xbf16>, %o: memref<?xi32>, %s: f32, %n: memref<8xf32>) {
  // expected-error @below {{'kv.attention' op sinks must have 32 in dimension 0, got 8}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out, sinks = %n)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x32x128xbf16>, memref<8xf32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: mla_attention needs latent rows.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x16x576xbf16>, %o: memref<?xi32>, %s: f32, %out: memref<?x16x512xbf16>) {
  // expected-error @below {{'kv.mla_attention' op needs an MLA collection (is_mla = true)}}
  "kv.mla_attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {value_size = 512 : i64, mask = "causal", span = 0 : i64}
    : (!pool, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>) -> ()
  return
}

// -----

!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
// Rule: latent values are part of the row.
func.func @rule(%c: !latent, %i: i32, %q: memref<?x16x576xbf16>, %o: memref<?xi32>, %s: f32, %out: memref<?x16x512xbf16>) {
  // expected-error @below {{'kv.mla_attention' op value_size must be in [1, 576], got 640 : i64}}
  "kv.mla_attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {value_size = 640 : i64, mask = "causal", span = 0 : i64}
    : (!latent, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>) -> ()
  return
}

// -----

!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
// Rule: the output has the value size.
func.func @rule(%c: !latent, %i: i32, %q: memref<?x16x576xbf16>, %o: memref<?xi32>, %s: f32, %out: memref<?x16x576xbf16>) {
  // expected-error @below {{'kv.mla_attention' op out must have 512 in dimension 2, got 576}}
  "kv.mla_attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {value_size = 512 : i64, mask = "causal", span = 0 : i64}
    : (!latent, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x576xbf16>) -> ()
  return
}

// -----

// Rule: a prefill buffer holds tokens.
func.func @rule(%o: memref<?xi32>, %t: memref<?x?xi32>) {
  // expected-error @below {{'kv.mla_prefill_plan' op buffer_tokens must be a positive integer, got 0 : i64}}
  "kv.mla_prefill_plan"(%o, %o, %t, %t, %o) {buffer_tokens = 0 : i64}
    : (memref<?xi32>, memref<?xi32>, memref<?x?xi32>, memref<?x?xi32>, memref<?xi32>) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: latent rows have one head.
func.func @rule(%c: !cache, %o: memref<?xi32>, %x: memref<?x128xbf16>) {
  // expected-error @below {{'kv.mla_decompress' op needs a cache of one head, got 8}}
  "kv.mla_decompress"(%c, %o, %o, %x) : (!cache, memref<?xi32>, memref<?xi32>, memref<?x128xbf16>) -> ()
  return
}

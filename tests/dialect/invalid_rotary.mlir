// RUN: kv-opt %s --split-input-file --verify-diagnostics

// What the verifiers of rotations and norms in place refuse. One chunk a rule.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a padded query has four dimensions.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %o: memref<?xi32>, %f: memref<?x128xf32>) {
  // expected-error @below {{'kv.rope_padded' op query must be a memref of rank 4, got memref<?x32x128xbf16>}}
  "kv.rope_padded"(%c, %i, %q, %o, %f, %q) {interleaved = true, mrope_section = array<i64>}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: valid lengths have one dimension.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x?x32x128xbf16>, %o: memref<?x?xi32>, %f: memref<?x128xf32>) {
  // expected-error @below {{'kv.rope_padded' op valid_lengths must be a memref of rank 1, got memref<?x?xi32>}}
  "kv.rope_padded"(%c, %i, %q, %o, %f, %q) {interleaved = true, mrope_section = array<i64>}
    : (!pool, i32, memref<?x?x32x128xbf16>, memref<?x?xi32>, memref<?x128xf32>, memref<?x?x32x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: padded rotations turn pairs.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x?x32x128xbf16>, %o: memref<?xi32>, %f: memref<?x63xf32>) {
  // expected-error @below {{'kv.rope_padded' op freqs must have an even R of at most 128 in dimension 1, got 63}}
  "kv.rope_padded"(%c, %i, %q, %o, %f, %q) {interleaved = true, mrope_section = array<i64>}
    : (!pool, i32, memref<?x?x32x128xbf16>, memref<?xi32>, memref<?x63xf32>, memref<?x?x32x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: position ids of a padded batch are padded.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x?x32x128xbf16>, %o: memref<?xi32>, %f: memref<?x128xf32>, %ids: memref<3x?xi32>) {
  // expected-error @below {{'kv.rope_padded' op position_ids must be a memref of rank 3, got memref<3x?xi32>}}
  "kv.rope_padded"(%c, %i, %q, %o, %f, %q, %ids) {interleaved = true, mrope_section = array<i64>}
    : (!pool, i32, memref<?x?x32x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x?x32x128xbf16>, memref<3x?xi32>) -> ()
  return
}

// -----

!fp8_pool = !kv.collection<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
// Rule: a quantized cache cannot be rotated in place.
func.func @rule(%c: !fp8_pool, %i: i32, %q: memref<?x?x32x128xbf16>, %o: memref<?xi32>, %f: memref<?x128xf32>) {
  // expected-error @below {{'kv.rope_padded' op needs a cache without scales: rotate before quantizing with kv.rope_append}}
  "kv.rope_padded"(%c, %i, %q, %o, %f, %q) {interleaved = true, mrope_section = array<i64>}
    : (!fp8_pool, i32, memref<?x?x32x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x?x32x128xbf16>) -> ()
  return
}

// -----

!int_pool = !kv.collection<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: integers cannot be rotated.
func.func @rule(%c: !int_pool, %i: i32, %q: memref<?x?x32x128xbf16>, %o: memref<?xi32>, %f: memref<?x128xf32>) {
  // expected-error @below {{'kv.rope_padded' op needs a cache of floats, got element type i8}}
  "kv.rope_padded"(%c, %i, %q, %o, %f, %q) {interleaved = true, mrope_section = array<i64>}
    : (!int_pool, i32, memref<?x?x32x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x?x32x128xbf16>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: normed queries have the head size.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x64xbf16>, %o: memref<?xi32>, %g: memref<128xf32>) {
  // expected-error @below {{'kv.qk_norm' op query must have 128 in dimension 2, got 64}}
  "kv.qk_norm"(collection = %c, layer = %i, query = %q, row_offsets = %o, query_out = %q, q_gamma = %g, k_gamma = %g)
    {interleaved = true, eps = 1.0e-6 : f32, weight_offset = 0.0 : f32}
    : (!pool, i32, memref<?x32x64xbf16>, memref<?xi32>, memref<?x32x64xbf16>, memref<128xf32>, memref<128xf32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: gammas have the head size.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %o: memref<?xi32>, %g: memref<64xf32>) {
  // expected-error @below {{'kv.qk_norm' op q_gamma must have 128 in dimension 0, got 64}}
  "kv.qk_norm"(collection = %c, layer = %i, query = %q, row_offsets = %o, query_out = %q, q_gamma = %g, k_gamma = %g)
    {interleaved = true, eps = 1.0e-6 : f32, weight_offset = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x32x128xbf16>, memref<64xf32>, memref<64xf32>) -> ()
  return
}

// -----

!fp8_pool = !kv.collection<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
// Rule: a quantized cache is not normed in place.
func.func @rule(%c: !fp8_pool, %i: i32, %q: memref<?x32x128xbf16>, %o: memref<?xi32>, %g: memref<128xf32>) {
  // expected-error @below {{'kv.qk_norm' op needs a cache without scales: rotate before quantizing with kv.rope_append}}
  "kv.qk_norm"(collection = %c, layer = %i, query = %q, row_offsets = %o, query_out = %q, q_gamma = %g, k_gamma = %g)
    {interleaved = true, eps = 1.0e-6 : f32, weight_offset = 0.0 : f32}
    : (!fp8_pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x32x128xbf16>, memref<128xf32>, memref<128xf32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: index heads are whole or not there.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %o: memref<?xi32>, %g: memref<128xf32>) {
  // expected-error @below {{'kv.qk_norm' op takes index_collection, index_query, index_query_out, index_q_gamma, index_k_gamma together, or none of them}}
  "kv.qk_norm"(collection = %c, layer = %i, query = %q, row_offsets = %o, query_out = %q, q_gamma = %g, k_gamma = %g,
      index_collection = %c)
    {interleaved = true, eps = 1.0e-6 : f32, weight_offset = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x32x128xbf16>, memref<128xf32>, memref<128xf32>, !pool) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!index = !kv.collection<"paged", f16, 1 : i64, 64 : i64, true, 64 : i64, none, 1 : i64>
// Rule: index heads have the size of the heads.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %o: memref<?xi32>, %g: memref<128xf32>, %x: !index, %iq: memref<?x4x64xf16>, %ig: memref<64xf32>) {
  // expected-error @below {{'kv.qk_norm' op index_collection must have the collection's head size 128, got 64}}
  "kv.qk_norm"(collection = %c, layer = %i, query = %q, row_offsets = %o, query_out = %q, q_gamma = %g, k_gamma = %g,
      index_collection = %x, index_query = %iq, index_query_out = %iq, index_q_gamma = %ig, index_k_gamma = %ig)
    {interleaved = true, eps = 1.0e-6 : f32, weight_offset = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x32x128xbf16>, memref<128xf32>, memref<128xf32>, !index, memref<?x4x64xf16>, memref<?x4x64xf16>, memref<64xf32>, memref<64xf32>) -> ()
  return
}

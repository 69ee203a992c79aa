// RUN: kv-opt %s --verify-diagnostics

// What the verifiers of rotations and norms in place refuse.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!fp8_pool = !kv.collection<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!int_pool = !kv.collection<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!index = !kv.collection<"paged", f16, 1 : i64, 64 : i64, true, 64 : i64, none, 1 : i64>

func.func @rope_padded(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %o: memref<?xi32>, %f: memref<?x128xf32>,
    %q2: memref<?x?x32x128xbf16>, %o2: memref<?x?xi32>, %f2: memref<?x63xf32>, %ids: memref<3x?xi32>, %c2: !fp8_pool,
    %c3: !int_pool) {
  // expected-error @below {{'kv.rope_padded' op query must be a memref of rank 4, got memref<?x32x128xbf16>}}
  "kv.rope_padded"(%c, %i, %q, %o, %f, %q) {interleaved = true, mrope_section = array<i64>}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.rope_padded' op valid_lengths must be a memref of rank 1, got memref<?x?xi32>}}
  "kv.rope_padded"(%c, %i, %q2, %o2, %f, %q2) {interleaved = true, mrope_section = array<i64>}
    : (!pool, i32, memref<?x?x32x128xbf16>, memref<?x?xi32>, memref<?x128xf32>, memref<?x?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.rope_padded' op freqs must have an even R of at most 128 in dimension 1, got 63}}
  "kv.rope_padded"(%c, %i, %q2, %o, %f2, %q2) {interleaved = true, mrope_section = array<i64>}
    : (!pool, i32, memref<?x?x32x128xbf16>, memref<?xi32>, memref<?x63xf32>, memref<?x?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.rope_padded' op position_ids must be a memref of rank 3, got memref<3x?xi32>}}
  "kv.rope_padded"(%c, %i, %q2, %o, %f, %q2, %ids) {interleaved = true, mrope_section = array<i64>}
    : (!pool, i32, memref<?x?x32x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x?x32x128xbf16>, memref<3x?xi32>) -> ()
  // expected-error @below {{'kv.rope_padded' op needs a cache without scales: rotate before quantizing with kv.rope_append}}
  "kv.rope_padded"(%c2, %i, %q2, %o, %f, %q2) {interleaved = true, mrope_section = array<i64>}
    : (!fp8_pool, i32, memref<?x?x32x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.rope_padded' op needs a cache of floats, got element type i8}}
  "kv.rope_padded"(%c3, %i, %q2, %o, %f, %q2) {interleaved = true, mrope_section = array<i64>}
    : (!int_pool, i32, memref<?x?x32x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x?x32x128xbf16>) -> ()
  return
}

func.func @qk_norm(%c: !pool, %i: i32, %q: memref<?x32x64xbf16>, %o: memref<?xi32>, %g: memref<128xf32>,
    %q2: memref<?x32x128xbf16>, %g2: memref<64xf32>, %c2: !fp8_pool, %x: !index, %iq: memref<?x4x64xf16>,
    %ig: memref<64xf32>) {
  // expected-error @below {{'kv.qk_norm' op query must have 128 in dimension 2, got 64}}
  "kv.qk_norm"(collection = %c, layer = %i, query = %q, row_offsets = %o, query_out = %q, q_gamma = %g, k_gamma = %g)
    {interleaved = true, eps = 1.0e-6 : f32, weight_offset = 0.0 : f32}
    : (!pool, i32, memref<?x32x64xbf16>, memref<?xi32>, memref<?x32x64xbf16>, memref<128xf32>, memref<128xf32>) -> ()
  // expected-error @below {{'kv.qk_norm' op q_gamma must have 128 in dimension 0, got 64}}
  "kv.qk_norm"(collection = %c, layer = %i, query = %q2, row_offsets = %o, query_out = %q2, q_gamma = %g2, k_gamma = %g2)
    {interleaved = true, eps = 1.0e-6 : f32, weight_offset = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x32x128xbf16>, memref<64xf32>, memref<64xf32>) -> ()
  // expected-error @below {{'kv.qk_norm' op needs a cache without scales: rotate before quantizing with kv.rope_append}}
  "kv.qk_norm"(collection = %c2, layer = %i, query = %q2, row_offsets = %o, query_out = %q2, q_gamma = %g, k_gamma = %g)
    {interleaved = true, eps = 1.0e-6 : f32, weight_offset = 0.0 : f32}
    : (!fp8_pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x32x128xbf16>, memref<128xf32>, memref<128xf32>) -> ()
  // expected-error @below {{'kv.qk_norm' op takes index_collection, index_query, index_query_out, index_q_gamma, index_k_gamma together, or none of them}}
  "kv.qk_norm"(collection = %c, layer = %i, query = %q2, row_offsets = %o, query_out = %q2, q_gamma = %g, k_gamma = %g,
      index_collection = %c)
    {interleaved = true, eps = 1.0e-6 : f32, weight_offset = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x32x128xbf16>, memref<128xf32>, memref<128xf32>, !pool) -> ()
  // expected-error @below {{'kv.qk_norm' op index_collection must have the collection's head size 128, got 64}}
  "kv.qk_norm"(collection = %c, layer = %i, query = %q2, row_offsets = %o, query_out = %q2, q_gamma = %g, k_gamma = %g,
      index_collection = %x, index_query = %iq, index_query_out = %iq, index_q_gamma = %ig, index_k_gamma = %ig)
    {interleaved = true, eps = 1.0e-6 : f32, weight_offset = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x32x128xbf16>, memref<128xf32>, memref<128xf32>, !index, memref<?x4x64xf16>, memref<?x4x64xf16>, memref<64xf32>, memref<64xf32>) -> ()
  return
}

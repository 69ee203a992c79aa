// RUN: kv-opt %s --verify-diagnostics

// What the verifier refuses of results over other keys.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>

func.func @attention(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: f32, %a0: memref<?x32x128xf32>, %a02: !rows,
    %a1: memref<?x32xf32>, %a03: memref<?x16x128xf32>, %a12: memref<?x16xf32>, %a04: memref<?x32x128xf16>) {
  // expected-error @below {{'kv.attention' op prior and prior_lse must both be given or neither, got one}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, prior = %a0)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x32x128xf32>) -> ()
  // expected-error @below {{'kv.attention' op prior must have element type f32, got bf16}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, prior = %a02,
      prior_lse = %a1)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, !rows, memref<?x32xf32>) -> ()
  // expected-error @below {{'kv.attention' op prior must have 32 in dimension 1}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, prior = %a03,
      prior_lse = %a1)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x16x128xf32>, memref<?x32xf32>) -> ()
  // expected-error @below {{'kv.attention' op prior_lse must have 32 in dimension 1}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, prior = %a0,
      prior_lse = %a12)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x32x128xf32>, memref<?x16xf32>) -> ()
  // expected-error @below {{'kv.attention' op out must have element type bf16 or f32, got f16}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %a04)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, memref<?x32x128xf16>) -> ()
  return
}

// RUN: kv-opt %s --verify-diagnostics

// What the verifier refuses of scores and masks that are functions.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x16x128xbf16>

func.func @attention(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: f32, %a: memref<?xf32>, %a2: memref<?xi64>) {
  // expected-error @below {{'kv.attention' op score must be the name of a function, NAME@DIGEST, got "softcap"}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", score = "softcap", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows) -> ()
  // expected-error @below {{'kv.attention' op mask must be one of causal, null, sliding_window, chunked, chunked_causal, got "document@"}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "document@", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows) -> ()
  // expected-error @below {{'kv.attention' op arrays need a score or mask that is a function, got neither}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, array0 = %a)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?xf32>) -> ()
  // expected-error @below {{'kv.attention' op arrays must be given from array0 on, got one after array1}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, array0 = %a,
      array2 = %a)
    {mask = "document@0123", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?xf32>, memref<?xf32>) -> ()
  // expected-error @below {{'kv.attention' op array0 must have element type f32 or f16 or bf16 or i32 or i8, got i64}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, array0 = %a2)
    {mask = "document@0123", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?xi64>) -> ()
  // expected-error @below {{'kv.attention' op array0 must be a memref, got i32}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, array0 = %i)
    {mask = "document@0123", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, i32) -> ()
  return
}

// RUN: kv-opt %s --verify-diagnostics

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x?x32x128xbf16>

func.func @attention_padded(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %v: memref<?xi32>, %s: f32, %out: !rows,
    %q2: !rows, %out2: memref<?x32x128xbf16>, %q3: memref<?x?x32x64xbf16>, %q4: memref<?x?x?x128xbf16>,
    %q5: memref<?x?x12x128xbf16>, %out3: memref<?x?x16x128xbf16>, %v2: memref<?x?xi32>, %l: memref<?x32xf32>) {
  // expected-error @below {{'kv.attention_padded' op query must be a memref of rank 4, got memref<?x32x128xbf16>}}
  "kv.attention_padded"(collection = %c, layer = %i, query = %q, valid_lengths = %v, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, !rows) -> ()
  // expected-error @below {{'kv.attention_padded' op out must be a memref of rank 4, got memref<?x32x128xbf16>}}
  "kv.attention_padded"(collection = %c, layer = %i, query = %q2, valid_lengths = %v, scale = %s, out = %out2)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, memref<?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.attention_padded' op query must have 128 in dimension 3, got 64}}
  "kv.attention_padded"(collection = %c, layer = %i, query = %q3, valid_lengths = %v, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x?x32x64xbf16>, memref<?xi32>, f32, !rows) -> ()
  // expected-error @below {{'kv.attention_padded' op query must have a static number of heads in dimension 2, got a dynamic one}}
  "kv.attention_padded"(collection = %c, layer = %i, query = %q4, valid_lengths = %v, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x?x?x128xbf16>, memref<?xi32>, f32, !rows) -> ()
  // expected-error @below {{'kv.attention_padded' op query heads must be a multiple of the 8 KV heads, got 12}}
  "kv.attention_padded"(collection = %c, layer = %i, query = %q5, valid_lengths = %v, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x?x12x128xbf16>, memref<?xi32>, f32, !rows) -> ()
  // expected-error @below {{'kv.attention_padded' op out must have 32 in dimension 2, got 16}}
  "kv.attention_padded"(collection = %c, layer = %i, query = %q2, valid_lengths = %v, scale = %s, out = %out3)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, memref<?x?x16x128xbf16>) -> ()
  // expected-error @below {{'kv.attention_padded' op valid_lengths must be a memref of rank 1, got memref<?x?xi32>}}
  "kv.attention_padded"(collection = %c, layer = %i, query = %q2, valid_lengths = %v2, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?x?xi32>, f32, !rows) -> ()
  // expected-error @below {{'kv.attention_padded' op lse must be a memref of rank 3, got memref<?x32xf32>}}
  "kv.attention_padded"(collection = %c, layer = %i, query = %q2, valid_lengths = %v, scale = %s, out = %out, lse = %l)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x32xf32>) -> ()
  return
}

func.func @attention_padded_2(%c: !kv.collection<"paged", bf16, 1 : i64, 128 : i64, true, 16 : i64, none, 1 : i64>,
    %i: i32, %q: !rows, %v: memref<?xi32>, %s: f32, %out: !rows, %c2: !pool) {
  // expected-error @below {{'kv.attention_padded' op needs a collection with values (is_mla = false)}}
  "kv.attention_padded"(collection = %c, layer = %i, query = %q, valid_lengths = %v, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!kv.collection<"paged", bf16, 1 : i64, 128 : i64, true, 16 : i64, none, 1 : i64>, i32, !rows, memref<?xi32>, f32, !rows) -> ()
  // expected-error @below {{'kv.attention_padded' op has a schedule whose batch_invariant needs fixed splits of at least one token, got split_size = 0}}
  "kv.attention_padded"(collection = %c2, layer = %i, query = %q, valid_lengths = %v, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {batch_invariant = true, split_size = 0 : i64}}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows) -> ()
  return
}

// RUN: kv-opt %s --verify-diagnostics

// What the verifiers of the ops on latent rows refuse, beside invalid_operations.mlir.

!latent = !kv.collection<"continuous", bf16, 1 : i64, 576 : i64, true, 0 : i64, none, 1 : i64>
!pool = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!no_latents = !kv.collection<"paged", bf16, 8 : i64, 576 : i64, false, 64 : i64, none, 1 : i64>
!bytes_pool = !kv.collection<"paged", i8, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!packed = !kv.collection<"paged", f8E4M3FN, 1 : i64, 656 : i64, true, 64 : i64, none, 1 : i64>
!bytes = !kv.collection<"paged", f8E4M3FN, 1 : i64, 640 : i64, true, 64 : i64, none, 1 : i64>

func.func @mla_attention(%c: !latent, %i: i32, %q: memref<?x16x576xbf16>, %o: memref<?xi32>, %s: f32,
    %out: memref<?x16x512xbf16>, %x: memref<?x?xi32>, %c2: !pool, %x2: memref<?x?xi64>, %c3: !packed, %c4: !bytes,
    %q2: memref<?x16x576xf8E4M3FN>) {
  // expected-error @below {{'kv.mla_attention' op indices needs a collection of pages, got a continuous one}}
  "kv.mla_attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out, indices = %x)
    {value_size = 512 : i64, mask = "null", span = 0 : i64}
    : (!latent, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?xi32>) -> ()
  // expected-error @below {{'kv.mla_attention' op indices says what a row sees: mask must be null, got "causal"}}
  "kv.mla_attention"(collection = %c2, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out, indices = %x)
    {value_size = 512 : i64, mask = "causal", span = 0 : i64}
    : (!pool, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?xi32>) -> ()
  // expected-error @below {{'kv.mla_attention' op indices must have element type i32, got i64}}
  "kv.mla_attention"(collection = %c2, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out, indices = %x2)
    {value_size = 512 : i64, mask = "null", span = 0 : i64}
    : (!pool, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?xi64>) -> ()
  // expected-error @below {{'kv.mla_attention' op topk_lengths needs indices}}
  "kv.mla_attention"(collection = %c2, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out,
      topk_lengths = %o)
    {value_size = 512 : i64, mask = "null", span = 0 : i64}
    : (!pool, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.mla_attention' op topk_lengths must be a memref of rank 1, got memref<?x?xi32>}}
  "kv.mla_attention"(collection = %c2, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out, indices = %x,
      topk_lengths = %x)
    {value_size = 512 : i64, mask = "null", span = 0 : i64}
    : (!pool, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?xi32>, memref<?x?xi32>) -> ()
  // expected-error @below {{'kv.mla_attention' op inline_scales needs rows of C 8-bit floats, at least 512, a scale for every 64 of them}}
  "kv.mla_attention"(collection = %c3, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {value_size = 512 : i64, mask = "causal", span = 0 : i64, inline_scales = 64 : i64}
    : (!packed, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>) -> ()
  // expected-error @below {{'kv.mla_attention' op indices names rows without positions: there must be no score, which asks for them}}
  "kv.mla_attention"(collection = %c2, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out, indices = %x)
    {value_size = 512 : i64, mask = "null", score = "t5@0123", span = 0 : i64}
    : (!pool, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?xi32>) -> ()
  // expected-error @below {{'kv.mla_attention' op indices says what a row sees: kv_offsets must not be given}}
  "kv.mla_attention"(collection = %c2, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out, indices = %x, kv_offsets = %o)
    {value_size = 512 : i64, mask = "null", span = 0 : i64}
    : (!pool, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?xi32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.mla_attention' op arrays need a score or mask that is a function, got neither}}
  "kv.mla_attention"(collection = %c2, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out, array0 = %x)
    {value_size = 512 : i64, mask = "causal", span = 0 : i64}
    : (!pool, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?xi32>) -> ()
  // expected-error @below {{'kv.mla_attention' op kv_offsets must be a memref of rank 1, got memref<?x?xi32>}}
  "kv.mla_attention"(collection = %c2, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out, kv_offsets = %x)
    {value_size = 512 : i64, mask = "causal", span = 0 : i64}
    : (!pool, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?xi32>) -> ()
  // expected-error @below {{'kv.mla_attention' op query must have element type f32 or f16 or bf16, got f8E4M3FN}}
  "kv.mla_attention"(collection = %c4, layer = %i, query = %q2, row_offsets = %o, scale = %s, out = %out)
    {value_size = 512 : i64, mask = "causal", span = 0 : i64}
    : (!bytes, i32, memref<?x16x576xf8E4M3FN>, memref<?xi32>, f32, memref<?x16x512xbf16>) -> ()
  return
}

func.func @mla_prefill_chunk(%c: !no_latents, %i: i32, %q: memref<?x16x192xbf16>, %k: memref<?x16x128xbf16>,
    %v: memref<?x16x96xbf16>, %o: memref<?xi32>, %s: f32, %out: memref<?x16x96xbf16>, %l: memref<?x16xf32>,
    %c2: !bytes_pool, %c3: !pool, %k2: memref<?x16x128xf16>, %q2: memref<?x16x128xbf16>, %k3: memref<?x8x128xbf16>) {
  // expected-error @below {{'kv.mla_prefill_chunk' op needs an MLA collection (is_mla = true)}}
  "kv.mla_prefill_chunk"(%c, %i, %q, %o, %k, %v, %o, %o, %s, %out, %l) {accumulate = false, bf16_rope = false}
    : (!no_latents, i32, memref<?x16x192xbf16>, memref<?xi32>, memref<?x16x128xbf16>, memref<?x16x96xbf16>, memref<?xi32>, memref<?xi32>, f32, memref<?x16x96xbf16>, memref<?x16xf32>) -> ()
  // expected-error @below {{'kv.mla_prefill_chunk' op needs a float cache or one with scales, got element type i8}}
  "kv.mla_prefill_chunk"(%c2, %i, %q, %o, %k, %v, %o, %o, %s, %out, %l) {accumulate = false, bf16_rope = false}
    : (!bytes_pool, i32, memref<?x16x192xbf16>, memref<?xi32>, memref<?x16x128xbf16>, memref<?x16x96xbf16>, memref<?xi32>, memref<?xi32>, f32, memref<?x16x96xbf16>, memref<?x16xf32>) -> ()
  // expected-error @below {{'kv.mla_prefill_chunk' op key must have element type bf16, got f16}}
  "kv.mla_prefill_chunk"(%c3, %i, %q, %o, %k2, %v, %o, %o, %s, %out, %l) {accumulate = false, bf16_rope = false}
    : (!pool, i32, memref<?x16x192xbf16>, memref<?xi32>, memref<?x16x128xf16>, memref<?x16x96xbf16>, memref<?xi32>, memref<?xi32>, f32, memref<?x16x96xbf16>, memref<?x16xf32>) -> ()
  // expected-error @below {{'kv.mla_prefill_chunk' op query must have more columns than key, which has some, at most the row's 576 more: got 128 and 128}}
  "kv.mla_prefill_chunk"(%c3, %i, %q2, %o, %k, %v, %o, %o, %s, %out, %l) {accumulate = false, bf16_rope = false}
    : (!pool, i32, memref<?x16x128xbf16>, memref<?xi32>, memref<?x16x128xbf16>, memref<?x16x96xbf16>, memref<?xi32>, memref<?xi32>, f32, memref<?x16x96xbf16>, memref<?x16xf32>) -> ()
  // expected-error @below {{'kv.mla_prefill_chunk' op key must have 16 in dimension 1, got 8}}
  "kv.mla_prefill_chunk"(%c3, %i, %q, %o, %k3, %v, %o, %o, %s, %out, %l) {accumulate = false, bf16_rope = false}
    : (!pool, i32, memref<?x16x192xbf16>, memref<?xi32>, memref<?x8x128xbf16>, memref<?x16x96xbf16>, memref<?xi32>, memref<?xi32>, f32, memref<?x16x96xbf16>, memref<?x16xf32>) -> ()
  return
}

func.func @mla_prefill_chunk_2(%c: !pool, %i: i32, %q: memref<?x16x192xbf16>, %k: memref<?x16x128xbf16>,
    %v: memref<?x16x96xbf16>, %o: memref<?xi32>, %s: f32, %out: memref<?x16x128xbf16>, %l: memref<?x16xf32>,
    %v2: memref<?x16x?xbf16>, %out2: memref<?x16x96xbf16>, %l2: memref<?x16xbf16>) {
  // expected-error @below {{'kv.mla_prefill_chunk' op out must have 96 in dimension 2, got 128}}
  "kv.mla_prefill_chunk"(%c, %i, %q, %o, %k, %v, %o, %o, %s, %out, %l) {accumulate = false, bf16_rope = false}
    : (!pool, i32, memref<?x16x192xbf16>, memref<?xi32>, memref<?x16x128xbf16>, memref<?x16x96xbf16>, memref<?xi32>, memref<?xi32>, f32, memref<?x16x128xbf16>, memref<?x16xf32>) -> ()
  // expected-error @below {{'kv.mla_prefill_chunk' op value must have a static dimension 2, got a dynamic one}}
  "kv.mla_prefill_chunk"(%c, %i, %q, %o, %k, %v2, %o, %o, %s, %out2, %l) {accumulate = false, bf16_rope = false}
    : (!pool, i32, memref<?x16x192xbf16>, memref<?xi32>, memref<?x16x128xbf16>, memref<?x16x?xbf16>, memref<?xi32>, memref<?xi32>, f32, memref<?x16x96xbf16>, memref<?x16xf32>) -> ()
  // expected-error @below {{'kv.mla_prefill_chunk' op bf16_rope needs 8-bit rows of at most one scale, whose last 128 bytes follow an even number of other bytes, got rows of 576 bf16 with 0 scales}}
  "kv.mla_prefill_chunk"(%c, %i, %q, %o, %k, %v, %o, %o, %s, %out2, %l) {accumulate = false, bf16_rope = true}
    : (!pool, i32, memref<?x16x192xbf16>, memref<?xi32>, memref<?x16x128xbf16>, memref<?x16x96xbf16>, memref<?xi32>, memref<?xi32>, f32, memref<?x16x96xbf16>, memref<?x16xf32>) -> ()
  // expected-error @below {{'kv.mla_prefill_chunk' op bf16_rope must be true or false, got 1 : i64}}
  "kv.mla_prefill_chunk"(%c, %i, %q, %o, %k, %v, %o, %o, %s, %out2, %l) {accumulate = false, bf16_rope = 1 : i64}
    : (!pool, i32, memref<?x16x192xbf16>, memref<?xi32>, memref<?x16x128xbf16>, memref<?x16x96xbf16>, memref<?xi32>, memref<?xi32>, f32, memref<?x16x96xbf16>, memref<?x16xf32>) -> ()
  // expected-error @below {{'kv.mla_prefill_chunk' op accumulate must be true or false, got "yes"}}
  "kv.mla_prefill_chunk"(%c, %i, %q, %o, %k, %v, %o, %o, %s, %out2, %l) {accumulate = "yes", bf16_rope = false}
    : (!pool, i32, memref<?x16x192xbf16>, memref<?xi32>, memref<?x16x128xbf16>, memref<?x16x96xbf16>, memref<?xi32>, memref<?xi32>, f32, memref<?x16x96xbf16>, memref<?x16xf32>) -> ()
  // expected-error @below {{'kv.mla_prefill_chunk' op lse must have element type f32, got bf16}}
  "kv.mla_prefill_chunk"(%c, %i, %q, %o, %k, %v, %o, %o, %s, %out2, %l2) {accumulate = false, bf16_rope = false}
    : (!pool, i32, memref<?x16x192xbf16>, memref<?xi32>, memref<?x16x128xbf16>, memref<?x16x96xbf16>, memref<?xi32>, memref<?xi32>, f32, memref<?x16x96xbf16>, memref<?x16xbf16>) -> ()
  return
}

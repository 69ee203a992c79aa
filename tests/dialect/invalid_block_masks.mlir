// RUN: kv-opt %s --verify-diagnostics

// What the verifier refuses of block masks.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x16x128xbf16>
!keys = !kv.operand<"ragged", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!latents = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!wide = memref<?x16x576xbf16>

func.func @block_mask(%c: !pool, %q: !rows, %b: memref<?x?x?xi32>, %o: memref<?xi32>, %q2: memref<?x12x128xbf16>,
    %b2: memref<?x?xi32>, %c2: !keys, %k: memref<?xi32>, %p: memref<?x8x?xi32>, %n: memref<?x8xi32>) {
  // expected-error @below {{'kv.block_mask' op mask must be the name of a function, NAME@DIGEST, got "causal"}}
  "kv.block_mask"(collection = %c, query = %q, blocks = %b, row_offsets = %o)
    {mask = "causal", rows = 64 : i64, keys = 32 : i64}
    : (!pool, !rows, memref<?x?x?xi32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.block_mask' op row_offsets or valid_lengths must be given, and not both}}
  "kv.block_mask"(collection = %c, query = %q, blocks = %b)
    {mask = "f@01", rows = 64 : i64, keys = 32 : i64}
    : (!pool, !rows, memref<?x?x?xi32>) -> ()
  // expected-error @below {{'kv.block_mask' op row_offsets or valid_lengths must be given, and not both}}
  "kv.block_mask"(collection = %c, query = %q, blocks = %b, row_offsets = %o, valid_lengths = %o)
    {mask = "f@01", rows = 64 : i64, keys = 32 : i64}
    : (!pool, !rows, memref<?x?x?xi32>, memref<?xi32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.block_mask' op query must be a memref of rank 4, got memref<?x16x128xbf16>}}
  "kv.block_mask"(collection = %c, query = %q, blocks = %b, valid_lengths = %o)
    {mask = "f@01", rows = 64 : i64, keys = 32 : i64}
    : (!pool, !rows, memref<?x?x?xi32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.block_mask' op query must have a static multiple of the 8 KV heads, got memref<?x12x128xbf16>}}
  "kv.block_mask"(collection = %c, query = %q2, blocks = %b, row_offsets = %o)
    {mask = "f@01", rows = 64 : i64, keys = 32 : i64}
    : (!pool, memref<?x12x128xbf16>, memref<?x?x?xi32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.block_mask' op rows must be in [2, 32767], got 1 : i64}}
  "kv.block_mask"(collection = %c, query = %q, blocks = %b, row_offsets = %o)
    {mask = "f@01", rows = 1 : i64, keys = 32 : i64}
    : (!pool, !rows, memref<?x?x?xi32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.block_mask' op keys must be in [2, 32767], got 70000 : i64}}
  "kv.block_mask"(collection = %c, query = %q, blocks = %b, row_offsets = %o)
    {mask = "f@01", rows = 64 : i64, keys = 70000 : i64}
    : (!pool, !rows, memref<?x?x?xi32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.block_mask' op blocks must be a memref of rank 3, got memref<?x?xi32>}}
  "kv.block_mask"(collection = %c, query = %q, blocks = %b2, row_offsets = %o)
    {mask = "f@01", rows = 64 : i64, keys = 32 : i64}
    : (!pool, !rows, memref<?x?xi32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.block_mask' op kv_offsets needs a cache, got a ragged operand, which has all keys}}
  "kv.block_mask"(collection = %c2, query = %q, blocks = %b, row_offsets = %o, kv_offsets = %k)
    {mask = "f@01", rows = 64 : i64, keys = 32 : i64}
    : (!keys, !rows, memref<?x?x?xi32>, memref<?xi32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.block_mask' op keys must divide a listed page's 16 tokens, got 32}}
  "kv.block_mask"(collection = %c, query = %q, blocks = %b, row_offsets = %o, pages = %p, page_counts = %n)
    {mask = "f@01", rows = 64 : i64, keys = 32 : i64}
    : (!pool, !rows, memref<?x?x?xi32>, memref<?xi32>, memref<?x8x?xi32>, memref<?x8xi32>) -> ()
  return
}

func.func @attention(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: f32, %b: memref<?x?x?xi32>,
    %p: memref<?x8x?xi32>, %b2: memref<?x?x?xi64>) {
  // expected-error @below {{'kv.attention' op block_rows needs block_mask}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "f@01", block_rows = 64 : i64, block_keys = 32 : i64, span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows) -> ()
  // expected-error @below {{'kv.attention' op block_mask needs a mask that is a function, got "causal"}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, block_mask = %b)
    {mask = "causal", block_rows = 64 : i64, block_keys = 32 : i64, span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x?x?xi32>) -> ()
  // expected-error @below {{'kv.attention' op block_rows must be in [2, 32767], got none}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, block_mask = %b)
    {mask = "f@01", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x?x?xi32>) -> ()
  // expected-error @below {{'kv.attention' op block_mask and pages must not both be given: each says which keys are visited}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, pages = %p, block_mask = %b)
    {mask = "f@01", block_rows = 64 : i64, block_keys = 32 : i64, span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x8x?xi32>, memref<?x?x?xi32>) -> ()
  // expected-error @below {{'kv.attention' op block_mask must have element type i32, got i64}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, block_mask = %b2)
    {mask = "f@01", block_rows = 64 : i64, block_keys = 32 : i64, span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x?x?xi64>) -> ()
  return
}

func.func @mla_attention(%c: !latents, %l: i32, %q: !wide, %o: memref<?xi32>, %s: f32, %out: memref<?x16x512xbf16>,
    %b: memref<?x?x?xi32>) {
  // expected-error @below {{'kv.mla_attention' op block_mask needs a mask that is a function, got "causal"}}
  "kv.mla_attention"(collection = %c, layer = %l, query = %q, row_offsets = %o, scale = %s, out = %out, block_mask = %b)
    {mask = "causal", span = 0 : i64, value_size = 512 : i64, block_rows = 16 : i64, block_keys = 64 : i64}
    : (!latents, i32, !wide, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?x?xi32>) -> ()
  return
}

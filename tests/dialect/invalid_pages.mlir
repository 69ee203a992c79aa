// RUN: kv-opt %s --verify-diagnostics

// What the verifier refuses of lists of pages.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
!continuous = !kv.collection<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!mla = !kv.collection<"paged", bf16, 1 : i64, 128 : i64, true, 16 : i64, none, 1 : i64>
!int_pool = !kv.collection<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!index_heads = !kv.collection<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 64 : i64, none, 1 : i64>
!index_i8 = !kv.collection<"paged", i8, 1 : i64, 128 : i64, true, 64 : i64, none, 1 : i64>
!index = !kv.collection<"paged", f8E4M3FN, 1 : i64, 128 : i64, true, 64 : i64, none, 1 : i64>

func.func @attention(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: f32, %n: memref<?x8xi32>, %c2: !continuous,
    %p: memref<?x8x?xi32>, %p2: memref<?x?xi32>, %p3: memref<?x8x?xi64>, %p4: memref<?x32x?xi32>, %n2: memref<?xi32>) {
  // expected-error @below {{'kv.attention' op page_counts needs pages}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, page_counts = %n)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x8xi32>) -> ()
  // expected-error @below {{'kv.attention' op pages needs a collection with pages, got a continuous one}}
  "kv.attention"(collection = %c2, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, pages = %p)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!continuous, i32, !rows, memref<?xi32>, f32, !rows, memref<?x8x?xi32>) -> ()
  // expected-error @below {{'kv.attention' op pages must be a memref of rank 3, got memref<?x?xi32>}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, pages = %p2)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x?xi32>) -> ()
  // expected-error @below {{'kv.attention' op pages must have element type i32, got i64}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, pages = %p3)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x8x?xi64>) -> ()
  // expected-error @below {{'kv.attention' op pages must have 8 in dimension 1, got 32}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, pages = %p4)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x32x?xi32>) -> ()
  // expected-error @below {{'kv.attention' op page_counts must be a memref of rank 2, got memref<?xi32>}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, pages = %p,
      page_counts = %n2)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x8x?xi32>, memref<?xi32>) -> ()
  return
}

func.func @summarize_pages(%c: !continuous, %i: i32, %s: memref<?x?x8x2x128xbf16>, %o: memref<?xi32>, %c2: !mla,
    %c3: !int_pool, %c4: !pool, %s2: memref<?x?x8x2x128xi32>, %s3: memref<?x?x8x3x128xf32>,
    %s4: memref<?x?x4x2x128xf32>, %s5: memref<?x?x8x1x64xf32>) {
  // expected-error @below {{'kv.summarize_pages' op needs a collection with pages, got a continuous one}}
  "kv.summarize_pages"(%c, %i, %s, %o) : (!continuous, i32, memref<?x?x8x2x128xbf16>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.summarize_pages' op needs a collection with values (is_mla = false)}}
  "kv.summarize_pages"(%c2, %i, %s, %o) : (!mla, i32, memref<?x?x8x2x128xbf16>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.summarize_pages' op needs a float cache or one with scales, got element type i8}}
  "kv.summarize_pages"(%c3, %i, %s, %o) : (!int_pool, i32, memref<?x?x8x2x128xbf16>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.summarize_pages' op summaries must have element type f32 or f16 or bf16, got i32}}
  "kv.summarize_pages"(%c4, %i, %s2, %o) : (!pool, i32, memref<?x?x8x2x128xi32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.summarize_pages' op summaries must have 2 rows (minimum, maximum) or 1 (mean) a head, got memref<?x?x8x3x128xf32>}}
  "kv.summarize_pages"(%c4, %i, %s3, %o) : (!pool, i32, memref<?x?x8x3x128xf32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.summarize_pages' op summaries must have 8 in dimension 2, got 4}}
  "kv.summarize_pages"(%c4, %i, %s4, %o) : (!pool, i32, memref<?x?x4x2x128xf32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.summarize_pages' op summaries must have 128 in dimension 4, got 64}}
  "kv.summarize_pages"(%c4, %i, %s5, %o) : (!pool, i32, memref<?x?x8x1x64xf32>, memref<?xi32>) -> ()
  return
}

func.func @select_pages(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: memref<?x?x8x2x128xf32>,
    %p: memref<?x8x?xi32>, %n: memref<?x8xi32>, %q2: memref<?x12x128xbf16>, %p2: memref<?x32x?xi32>,
    %n2: memref<?x8xi64>) {
  // expected-error @below {{'kv.select_pages' op first must be 0 or more, got -1 : i64}}
  "kv.select_pages"(%c, %i, %q, %o, %s, %p, %n) {first = -1 : i64, last = 1 : i64}
    : (!pool, i32, !rows, memref<?xi32>, memref<?x?x8x2x128xf32>, memref<?x8x?xi32>, memref<?x8xi32>) -> ()
  // expected-error @below {{'kv.select_pages' op query must have a static multiple of the 8 KV heads, got memref<?x12x128xbf16>}}
  "kv.select_pages"(%c, %i, %q2, %o, %s, %p, %n) {first = 0 : i64, last = 1 : i64}
    : (!pool, i32, memref<?x12x128xbf16>, memref<?xi32>, memref<?x?x8x2x128xf32>, memref<?x8x?xi32>, memref<?x8xi32>) -> ()
  // expected-error @below {{'kv.select_pages' op pages must have 8 in dimension 1, got 32}}
  "kv.select_pages"(%c, %i, %q, %o, %s, %p2, %n) {first = 0 : i64, last = 1 : i64}
    : (!pool, i32, !rows, memref<?xi32>, memref<?x?x8x2x128xf32>, memref<?x32x?xi32>, memref<?x8xi32>) -> ()
  // expected-error @below {{'kv.select_pages' op page_counts must have element type i32, got i64}}
  "kv.select_pages"(%c, %i, %q, %o, %s, %p, %n2) {first = 0 : i64, last = 1 : i64}
    : (!pool, i32, !rows, memref<?xi32>, memref<?x?x8x2x128xf32>, memref<?x8x?xi32>, memref<?x8xi64>) -> ()
  return
}

func.func @index_scores(%c: !index_heads, %i: i32, %q: memref<?x64x128xf8E4M3FN>, %w: memref<?x64xf32>,
    %o: memref<?xi32>, %s: memref<?x?xf32>, %c2: !index_i8, %c3: !index, %q2: memref<?x64x128xi32>,
    %q3: memref<?x?x128xf32>, %w2: memref<?x32xf32>, %s2: memref<?x?xbf16>) {
  // expected-error @below {{'kv.index_scores' op needs a collection with one KV head, got 8}}
  "kv.index_scores"(%c, %i, %q, %w, %o, %s) : (!index_heads, i32, memref<?x64x128xf8E4M3FN>, memref<?x64xf32>, memref<?xi32>, memref<?x?xf32>) -> ()
  // expected-error @below {{'kv.index_scores' op needs a float cache or one with scales, got element type i8}}
  "kv.index_scores"(%c2, %i, %q, %w, %o, %s) : (!index_i8, i32, memref<?x64x128xf8E4M3FN>, memref<?x64xf32>, memref<?xi32>, memref<?x?xf32>) -> ()
  // expected-error @below {{'kv.index_scores' op query must have element type f32 or f16 or bf16 or f8E4M3FN, got i32}}
  "kv.index_scores"(%c3, %i, %q2, %w, %o, %s) : (!index, i32, memref<?x64x128xi32>, memref<?x64xf32>, memref<?xi32>, memref<?x?xf32>) -> ()
  // expected-error @below {{'kv.index_scores' op query must have a static number of heads in dimension 1, got memref<?x?x128xf32>}}
  "kv.index_scores"(%c3, %i, %q3, %w, %o, %s) : (!index, i32, memref<?x?x128xf32>, memref<?x64xf32>, memref<?xi32>, memref<?x?xf32>) -> ()
  // expected-error @below {{'kv.index_scores' op weights must have 64 in dimension 1, got 32}}
  "kv.index_scores"(%c3, %i, %q, %w2, %o, %s) : (!index, i32, memref<?x64x128xf8E4M3FN>, memref<?x32xf32>, memref<?xi32>, memref<?x?xf32>) -> ()
  // expected-error @below {{'kv.index_scores' op out must have element type f32, got bf16}}
  "kv.index_scores"(%c3, %i, %q, %w, %o, %s2) : (!index, i32, memref<?x64x128xf8E4M3FN>, memref<?x64xf32>, memref<?xi32>, memref<?x?xbf16>) -> ()
  return
}

func.func @select_tokens(%s: memref<?x?xf16>, %t: memref<?x?xi32>, %n: memref<?xi32>, %s2: memref<?x?xf32>,
    %t2: memref<?x?xi64>, %n2: memref<?x?xi32>) {
  // expected-error @below {{'kv.select_tokens' op scores must have element type f32, got f16}}
  "kv.select_tokens"(%s, %t, %n) : (memref<?x?xf16>, memref<?x?xi32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.select_tokens' op tokens must have element type i32, got i64}}
  "kv.select_tokens"(%s2, %t2, %n) : (memref<?x?xf32>, memref<?x?xi64>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.select_tokens' op counts must be a memref of rank 1, got memref<?x?xi32>}}
  "kv.select_tokens"(%s2, %t, %n2) : (memref<?x?xf32>, memref<?x?xi32>, memref<?x?xi32>) -> ()
  return
}

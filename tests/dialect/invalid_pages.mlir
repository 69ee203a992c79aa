// RUN: kv-opt %s --split-input-file --verify-diagnostics

// What the verifier refuses of lists of pages. One chunk a rule.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: counts belong to lists.
func.func @rule(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: f32, %n: memref<?x8xi32>) {
  // expected-error @below {{'kv.attention' op page_counts needs pages}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, page_counts = %n)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x8xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: only collections with pages have lists of them.
func.func @rule(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: f32, %p: memref<?x8x?xi32>) {
  // expected-error @below {{'kv.attention' op pages needs a collection with pages, got a continuous one}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, pages = %p)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x8x?xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: a list a sequence and KV head.
func.func @rule(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: f32, %p: memref<?x?xi32>) {
  // expected-error @below {{'kv.attention' op pages must be a memref of rank 3, got memref<?x?xi32>}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, pages = %p)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x?xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: page numbers are i32.
func.func @rule(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: f32, %p: memref<?x8x?xi64>) {
  // expected-error @below {{'kv.attention' op pages must have element type i32, got i64}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, pages = %p)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x8x?xi64>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: lists are of the KV heads.
func.func @rule(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: f32, %p: memref<?x32x?xi32>) {
  // expected-error @below {{'kv.attention' op pages must have 8 in dimension 1, got 32}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, pages = %p)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x32x?xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: counts are of the lists.
func.func @rule(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: f32, %p: memref<?x8x?xi32>, %n: memref<?xi32>) {
  // expected-error @below {{'kv.attention' op page_counts must be a memref of rank 2, got memref<?xi32>}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %q, pages = %p,
      page_counts = %n)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x8x?xi32>, memref<?xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: what has no pages has no summaries of them.
func.func @rule(%c: !pool, %i: i32, %s: memref<?x?x8x2x128xbf16>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.summarize_pages' op needs a collection with pages, got a continuous one}}
  "kv.summarize_pages"(%c, %i, %s, %o) : (!pool, i32, memref<?x?x8x2x128xbf16>, memref<?xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 1 : i64, 128 : i64, true, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: latent rows have no summaries.
func.func @rule(%c: !pool, %i: i32, %s: memref<?x?x8x2x128xbf16>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.summarize_pages' op needs a collection with values (is_mla = false)}}
  "kv.summarize_pages"(%c, %i, %s, %o) : (!pool, i32, memref<?x?x8x2x128xbf16>, memref<?xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: integers without scales are no keys.
func.func @rule(%c: !pool, %i: i32, %s: memref<?x?x8x2x128xbf16>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.summarize_pages' op needs a float cache or one with scales, got element type i8}}
  "kv.summarize_pages"(%c, %i, %s, %o) : (!pool, i32, memref<?x?x8x2x128xbf16>, memref<?xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: summaries are floats.
func.func @rule(%c: !pool, %i: i32, %s: memref<?x?x8x2x128xi32>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.summarize_pages' op summaries must have element type f32 or f16 or bf16, got i32}}
  "kv.summarize_pages"(%c, %i, %s, %o) : (!pool, i32, memref<?x?x8x2x128xi32>, memref<?xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: a summary has two rows or one.
func.func @rule(%c: !pool, %i: i32, %s: memref<?x?x8x3x128xf32>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.summarize_pages' op summaries must have 2 rows (minimum, maximum) or 1 (mean) a head, got memref<?x?x8x3x128xf32>}}
  "kv.summarize_pages"(%c, %i, %s, %o) : (!pool, i32, memref<?x?x8x3x128xf32>, memref<?xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: summaries are of the KV heads.
func.func @rule(%c: !pool, %i: i32, %s: memref<?x?x4x2x128xf32>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.summarize_pages' op summaries must have 8 in dimension 2, got 4}}
  "kv.summarize_pages"(%c, %i, %s, %o) : (!pool, i32, memref<?x?x4x2x128xf32>, memref<?xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: summaries have the heads' columns.
func.func @rule(%c: !pool, %i: i32, %s: memref<?x?x8x1x64xf32>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.summarize_pages' op summaries must have 128 in dimension 4, got 64}}
  "kv.summarize_pages"(%c, %i, %s, %o) : (!pool, i32, memref<?x?x8x1x64xf32>, memref<?xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: pages at the start are counted from 0.
func.func @rule(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: memref<?x?x8x2x128xf32>, %p: memref<?x8x?xi32>, %n: memref<?x8xi32>) {
  // expected-error @below {{'kv.select_pages' op first must be 0 or more, got -1 : i64}}
  "kv.select_pages"(%c, %i, %q, %o, %s, %p, %n) {first = -1 : i64, last = 1 : i64}
    : (!pool, i32, !rows, memref<?xi32>, memref<?x?x8x2x128xf32>, memref<?x8x?xi32>, memref<?x8xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: query heads are whole groups.
func.func @rule(%c: !pool, %i: i32, %q: memref<?x12x128xbf16>, %o: memref<?xi32>, %s: memref<?x?x8x2x128xf32>, %p: memref<?x8x?xi32>, %n: memref<?x8xi32>) {
  // expected-error @below {{'kv.select_pages' op query must have a static multiple of the 8 KV heads, got memref<?x12x128xbf16>}}
  "kv.select_pages"(%c, %i, %q, %o, %s, %p, %n) {first = 0 : i64, last = 1 : i64}
    : (!pool, i32, memref<?x12x128xbf16>, memref<?xi32>, memref<?x?x8x2x128xf32>, memref<?x8x?xi32>, memref<?x8xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: lists are of the KV heads.
func.func @rule(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: memref<?x?x8x2x128xf32>, %p: memref<?x32x?xi32>, %n: memref<?x8xi32>) {
  // expected-error @below {{'kv.select_pages' op pages must have 8 in dimension 1, got 32}}
  "kv.select_pages"(%c, %i, %q, %o, %s, %p, %n) {first = 0 : i64, last = 1 : i64}
    : (!pool, i32, !rows, memref<?xi32>, memref<?x?x8x2x128xf32>, memref<?x32x?xi32>, memref<?x8xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: counts are i32.
func.func @rule(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: memref<?x?x8x2x128xf32>, %p: memref<?x8x?xi32>, %n: memref<?x8xi64>) {
  // expected-error @below {{'kv.select_pages' op page_counts must have element type i32, got i64}}
  "kv.select_pages"(%c, %i, %q, %o, %s, %p, %n) {first = 0 : i64, last = 1 : i64}
    : (!pool, i32, !rows, memref<?xi32>, memref<?x?x8x2x128xf32>, memref<?x8x?xi32>, memref<?x8xi64>) -> ()
  return
}

// -----

!index = !kv.collection<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 64 : i64, none, 1 : i64>
// Rule: an index cache has one head.
func.func @rule(%c: !index, %i: i32, %q: memref<?x64x128xf8E4M3FN>, %w: memref<?x64xf32>, %o: memref<?xi32>, %s: memref<?x?xf32>) {
  // expected-error @below {{'kv.index_scores' op needs a collection with one KV head, got 8}}
  "kv.index_scores"(%c, %i, %q, %w, %o, %s) : (!index, i32, memref<?x64x128xf8E4M3FN>, memref<?x64xf32>, memref<?xi32>, memref<?x?xf32>) -> ()
  return
}

// -----

!index = !kv.collection<"paged", i8, 1 : i64, 128 : i64, true, 64 : i64, none, 1 : i64>
// Rule: integers without scales are no keys.
func.func @rule(%c: !index, %i: i32, %q: memref<?x64x128xf8E4M3FN>, %w: memref<?x64xf32>, %o: memref<?xi32>, %s: memref<?x?xf32>) {
  // expected-error @below {{'kv.index_scores' op needs a float cache or one with scales, got element type i8}}
  "kv.index_scores"(%c, %i, %q, %w, %o, %s) : (!index, i32, memref<?x64x128xf8E4M3FN>, memref<?x64xf32>, memref<?xi32>, memref<?x?xf32>) -> ()
  return
}

// -----

!index = !kv.collection<"paged", f8E4M3FN, 1 : i64, 128 : i64, true, 64 : i64, none, 1 : i64>
// Rule: queries are floats.
func.func @rule(%c: !index, %i: i32, %q: memref<?x64x128xi32>, %w: memref<?x64xf32>, %o: memref<?xi32>, %s: memref<?x?xf32>) {
  // expected-error @below {{'kv.index_scores' op query must have element type f32 or f16 or bf16 or f8E4M3FN, got i32}}
  "kv.index_scores"(%c, %i, %q, %w, %o, %s) : (!index, i32, memref<?x64x128xi32>, memref<?x64xf32>, memref<?xi32>, memref<?x?xf32>) -> ()
  return
}

// -----

!index = !kv.collection<"paged", f8E4M3FN, 1 : i64, 128 : i64, true, 64 : i64, none, 1 : i64>
// Rule: the heads are known.
func.func @rule(%c: !index, %i: i32, %q: memref<?x?x128xf32>, %w: memref<?x64xf32>, %o: memref<?xi32>, %s: memref<?x?xf32>) {
  // expected-error @below {{'kv.index_scores' op query must have a static number of heads in dimension 1, got memref<?x?x128xf32>}}
  "kv.index_scores"(%c, %i, %q, %w, %o, %s) : (!index, i32, memref<?x?x128xf32>, memref<?x64xf32>, memref<?xi32>, memref<?x?xf32>) -> ()
  return
}

// -----

!index = !kv.collection<"paged", f8E4M3FN, 1 : i64, 128 : i64, true, 64 : i64, none, 1 : i64>
// Rule: each head has a weight.
func.func @rule(%c: !index, %i: i32, %q: memref<?x64x128xf8E4M3FN>, %w: memref<?x32xf32>, %o: memref<?xi32>, %s: memref<?x?xf32>) {
  // expected-error @below {{'kv.index_scores' op weights must have 64 in dimension 1, got 32}}
  "kv.index_scores"(%c, %i, %q, %w, %o, %s) : (!index, i32, memref<?x64x128xf8E4M3FN>, memref<?x32xf32>, memref<?xi32>, memref<?x?xf32>) -> ()
  return
}

// -----

!index = !kv.collection<"paged", f8E4M3FN, 1 : i64, 128 : i64, true, 64 : i64, none, 1 : i64>
// Rule: scores are f32.
func.func @rule(%c: !index, %i: i32, %q: memref<?x64x128xf8E4M3FN>, %w: memref<?x64xf32>, %o: memref<?xi32>, %s: memref<?x?xbf16>) {
  // expected-error @below {{'kv.index_scores' op out must have element type f32, got bf16}}
  "kv.index_scores"(%c, %i, %q, %w, %o, %s) : (!index, i32, memref<?x64x128xf8E4M3FN>, memref<?x64xf32>, memref<?xi32>, memref<?x?xbf16>) -> ()
  return
}

// -----

// Rule: scores are f32.
func.func @rule(%s: memref<?x?xf16>, %t: memref<?x?xi32>, %n: memref<?xi32>) {
  // expected-error @below {{'kv.select_tokens' op scores must have element type f32, got f16}}
  "kv.select_tokens"(%s, %t, %n) : (memref<?x?xf16>, memref<?x?xi32>, memref<?xi32>) -> ()
  return
}

// -----

// Rule: tokens are i32.
func.func @rule(%s: memref<?x?xf32>, %t: memref<?x?xi64>, %n: memref<?xi32>) {
  // expected-error @below {{'kv.select_tokens' op tokens must have element type i32, got i64}}
  "kv.select_tokens"(%s, %t, %n) : (memref<?x?xf32>, memref<?x?xi64>, memref<?xi32>) -> ()
  return
}

// -----

// Rule: counts are of rows.
func.func @rule(%s: memref<?x?xf32>, %t: memref<?x?xi32>, %n: memref<?x?xi32>) {
  // expected-error @below {{'kv.select_tokens' op counts must be a memref of rank 1, got memref<?x?xi32>}}
  "kv.select_tokens"(%s, %t, %n) : (memref<?x?xf32>, memref<?x?xi32>, memref<?x?xi32>) -> ()
  return
}

// RUN: kv-opt %s | kv-opt | FileCheck %s
// RUN: kv-opt %s --mlir-print-op-generic | kv-opt | FileCheck %s
// RUN: kv-opt %s --verify-kv | FileCheck %s

// Lists of pages: what attends to them, and what makes them.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
!padded = memref<?x?x32x128xbf16>

// CHECK-LABEL: func.func @attention
func.func @attention(%pool: !pool, %layer: i32, %q: !rows, %p: !padded, %o: memref<?xi32>, %s: f32, %pages: memref<?x8x?xi32>, %n: memref<?x8xi32>) {
  // CHECK: "kv.attention"({{.*}}memref<?x8x?xi32>) -> ()
  "kv.attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %o, scale = %s, out = %q,
      pages = %pages)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x8x?xi32>) -> ()
  // CHECK: "kv.attention"({{.*}}memref<?x8x?xi32>, memref<?x8xi32>) -> ()
  "kv.attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %o, scale = %s, out = %q,
      pages = %pages, page_counts = %n)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x8x?xi32>, memref<?x8xi32>) -> ()
  // CHECK: "kv.attention_padded"({{.*}}memref<?x8x?xi32>, memref<?x8xi32>) -> ()
  "kv.attention_padded"(collection = %pool, layer = %layer, query = %p, valid_lengths = %o, scale = %s, out = %p,
      pages = %pages, page_counts = %n)
    {mask = "null", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !padded, memref<?xi32>, f32, !padded, memref<?x8x?xi32>, memref<?x8xi32>) -> ()
  return
}

// CHECK-LABEL: func.func @choice
func.func @choice(%pool: !pool, %layer: i32, %q: !rows, %o: memref<?xi32>, %s: memref<?x?x8x2x128xbf16>, %m: memref<?x?x8x1x128xf32>, %pages: memref<?x8x?xi32>, %n: memref<?x8xi32>) {
  // CHECK: "kv.summarize_pages"(%{{.+}}) : ({{.*}}memref<?x?x8x2x128xbf16>, memref<?xi32>) -> ()
  "kv.summarize_pages"(%pool, %layer, %s, %o) : (!pool, i32, memref<?x?x8x2x128xbf16>, memref<?xi32>) -> ()
  // CHECK: "kv.select_pages"({{.*}}first = 1 : i64, last = 2 : i64
  "kv.select_pages"(%pool, %layer, %q, %o, %m, %pages, %n) {first = 1 : i64, last = 2 : i64}
    : (!pool, i32, !rows, memref<?xi32>, memref<?x?x8x1x128xf32>, memref<?x8x?xi32>, memref<?x8xi32>) -> ()
  return
}

!index = !kv.collection<"paged", f8E4M3FN, 1 : i64, 128 : i64, true, 64 : i64, f32, 128 : i64>

// CHECK-LABEL: func.func @indexer
func.func @indexer(%pool: !index, %layer: i32, %q: memref<?x64x128xf8E4M3FN>, %w: memref<?x64xf32>, %o: memref<?xi32>, %s: memref<?x?xf32>, %t: memref<?x?xi32>, %n: memref<?xi32>) {
  // CHECK: "kv.index_scores"({{.*}}memref<?x64x128xf8E4M3FN>, memref<?x64xf32>, memref<?xi32>, memref<?x?xf32>) -> ()
  "kv.index_scores"(%pool, %layer, %q, %w, %o, %s)
    : (!index, i32, memref<?x64x128xf8E4M3FN>, memref<?x64xf32>, memref<?xi32>, memref<?x?xf32>) -> ()
  // CHECK: "kv.select_tokens"(%{{.+}}) : (memref<?x?xf32>, memref<?x?xi32>, memref<?xi32>) -> ()
  "kv.select_tokens"(%s, %t, %n) : (memref<?x?xf32>, memref<?x?xi32>, memref<?xi32>) -> ()
  return
}

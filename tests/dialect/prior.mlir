// RUN: kv-opt %s | kv-opt | FileCheck %s
// RUN: kv-opt %s --mlir-print-op-generic | kv-opt | FileCheck %s
// RUN: kv-opt %s --verify-kv | FileCheck %s

// Attention that is combined with a result over other keys, and one that is not rounded to the query's type.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
!padded = memref<?x?x32x128xbf16>

// CHECK-LABEL: func.func @attention
func.func @attention(%pool: !pool, %layer: i32, %q: !rows, %p: !padded, %o: memref<?xi32>, %s: f32, %x: memref<?x32x128xf32>, %l: memref<?x32xf32>, %px: memref<?x?x32x128xf32>, %pl: memref<?x?x32xf32>) {
  // CHECK: "kv.attention"({{.*}}memref<?x32x128xf32>, memref<?x32xf32>) -> ()
  "kv.attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %o, scale = %s, out = %x, lse = %l)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, memref<?x32x128xf32>, memref<?x32xf32>) -> ()
  // CHECK: "kv.attention"({{.*}}memref<?x32x128xf32>, memref<?x32xf32>) -> ()
  "kv.attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %o, scale = %s, out = %q, prior = %x,
      prior_lse = %l)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x32x128xf32>, memref<?x32xf32>) -> ()
  // CHECK: "kv.attention_padded"({{.*}}memref<?x?x32x128xf32>, memref<?x?x32xf32>) -> ()
  "kv.attention_padded"(collection = %pool, layer = %layer, query = %p, valid_lengths = %o, scale = %s, out = %p,
      prior = %px, prior_lse = %pl)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !padded, memref<?xi32>, f32, !padded, memref<?x?x32x128xf32>, memref<?x?x32xf32>) -> ()
  return
}

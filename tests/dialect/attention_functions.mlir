// RUN: kv-opt %s | kv-opt | FileCheck %s
// RUN: kv-opt %s --mlir-print-op-generic | kv-opt | FileCheck %s
// RUN: kv-opt %s --verify-kv | FileCheck %s

// Scores and masks that are functions: the IR has their names, and the arrays that they read.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>

// CHECK-LABEL: func.func @functions
func.func @functions(%pool: !pool, %layer: i32, %q: !rows, %offsets: memref<?xi32>, %scale: f32, %bias: memref<?x?xf32>, %ids: memref<?x?xi32>) {
  // CHECK: "kv.attention"(
  // CHECK-SAME: mask = "document@01234567"
  // CHECK-SAME: score = "t5@89abcdef"
  "kv.attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %q,
      array0 = %bias, array1 = %ids)
    {mask = "document@01234567", score = "t5@89abcdef", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x?xf32>, memref<?x?xi32>) -> ()
  return
}

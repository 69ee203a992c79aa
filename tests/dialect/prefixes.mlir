// RUN: kv-opt %s | kv-opt | FileCheck %s
// RUN: kv-opt %s --mlir-print-op-generic | kv-opt | FileCheck %s
// RUN: kv-opt %s --verify-kv | FileCheck %s

// The tables of prefixes that sequences share, and of what follows them.

// CHECK-LABEL: func.func @split
func.func @split(%a: memref<?x?xi32>, %b: memref<?xi32>, %c: memref<?xi32>, %d: memref<?xi32>, %e: memref<?xi32>, %f: memref<?x?xi32>, %g: memref<?xi32>, %h: memref<?xi32>, %i: memref<?xi32>, %j: memref<?x?xi32>, %k: memref<?xi32>) {
  // CHECK: "kv.split_prefixes"(%{{.*}}) {page_size = 16 : i64}
  "kv.split_prefixes"(%a, %b, %c, %d, %e, %f, %g, %h, %i, %j, %k) {page_size = 16 : i64}
    : (memref<?x?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?x?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?x?xi32>, memref<?xi32>) -> ()
  return
}

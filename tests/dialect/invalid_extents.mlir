// RUN: kv-opt %s --verify-diagnostics

// The index of memref.dim, which MLIR's folder trusts.

func.func @index(%b: memref<?x?xf32>, %b2: memref<?xf32>, %c: i1) {
  %i = arith.constant -1 : index
  // expected-error @below {{'memref.dim' op index must be in [0, 2), the dimensions of memref<?x?xf32>, got -1}}
  memref.dim %b, %i : memref<?x?xf32>
  %one = arith.constant 1 : index
  // expected-error @below {{'memref.dim' op index must be in [0, 1), the dimensions of memref<?xf32>, got 1}}
  memref.dim %b2, %one : memref<?xf32>
  // What constants are folded to is a constant.
  %0 = arith.constant 0 : i32
  %1 = arith.constant 1 : i32
  %2 = arith.subi %0, %1 : i32
  %3 = arith.index_cast %2 : i32 to index
  %4 = arith.select %c, %3, %3 : index
  // expected-error @below {{'memref.dim' op index must be in [0, 2), the dimensions of memref<?x?xf32>, got -1}}
  memref.dim %b, %4 : memref<?x?xf32>
  return
}

// RUN: kv-opt %s --split-input-file --verify-diagnostics

// The index of memref.dim, which MLIR's folder trusts.

// An index is not negative.
func.func @rule(%b: memref<?x?xf32>) -> index {
  %i = arith.constant -1 : index
  // expected-error @below {{'memref.dim' op index must be in [0, 2), the dimensions of memref<?x?xf32>, got -1}}
  %0 = memref.dim %b, %i : memref<?x?xf32>
  return %0 : index
}

// -----

// An index is that of a dimension.
func.func @rule(%b: memref<?xf32>) -> index {
  %i = arith.constant 1 : index
  // expected-error @below {{'memref.dim' op index must be in [0, 1), the dimensions of memref<?xf32>, got 1}}
  %0 = memref.dim %b, %i : memref<?xf32>
  return %0 : index
}

// -----

// What constants are folded to is a constant.
func.func @rule(%b: memref<?x?xf32>, %c: i1) -> index {
  %0 = arith.constant 0 : i32
  %1 = arith.constant 1 : i32
  %2 = arith.subi %0, %1 : i32
  %3 = arith.index_cast %2 : i32 to index
  %4 = arith.select %c, %3, %3 : index
  // expected-error @below {{'memref.dim' op index must be in [0, 2), the dimensions of memref<?x?xf32>, got -1}}
  %5 = memref.dim %b, %4 : memref<?x?xf32>
  return %5 : index
}

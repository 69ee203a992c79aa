// RUN: kv-opt %s --split-input-file --simplify-kv-tiles | FileCheck %s

gpu.module @kernels {
  // Equal ops become one, dead ones go, and what does not change in a loop leaves it.
  // CHECK-LABEL: gpu.func @tiles
  // CHECK:         %[[A:.*]] = arith.muli %{{.*}}, %c128_i32
  // CHECK-NOT:     arith.muli
  // CHECK:         scf.for
  // CHECK-NEXT:      memref.store %[[A]]
  // CHECK-NEXT:      memref.store %[[A]]
  gpu.func @tiles(%n: i32, %b: memref<?xi32>, %i: index) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c128 = arith.constant 128 : i32
    scf.for %j = %c0 to %n step %c1 : i32 {
      %x = arith.muli %n, %c128 : i32
      %y = arith.muli %n, %c128 : i32
      %dead = arith.muli %j, %c128 : i32
      memref.store %x, %b[%i] : memref<?xi32>
      memref.store %y, %b[%i] : memref<?xi32>
    }
    gpu.return
  }
}

// -----

gpu.module @kernels {
  // Left alone: a module without a kernel over tiles.
  // CHECK-LABEL: gpu.func @plain
  // CHECK-COUNT-2: arith.muli
  gpu.func @plain(%n: i32, %b: memref<?xi32>, %i: index) kernel {
    %x = arith.muli %n, %n : i32
    %y = arith.muli %n, %n : i32
    memref.store %x, %b[%i] : memref<?xi32>
    memref.store %y, %b[%i] : memref<?xi32>
    gpu.return
  }
}

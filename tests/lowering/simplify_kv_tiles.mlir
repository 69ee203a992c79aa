// RUN: kv-opt %s --split-input-file --simplify-kv-tiles | FileCheck %s
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=simplify-kv-tiles --check-semantics-of=simplify-kv-tiles --lengths=edges -o /dev/null %}

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

// -----

gpu.module @kernels {
  // One comparison an element where a row's bound and the number of columns hold both; the third condition stays.
  // CHECK-LABEL: gpu.func @bounds
  // CHECK-DAG:     %[[LAST:.*]] = arith.subi %{{.*}}, %c1_i32
  // CHECK-DAG:     %[[SPLAT:.*]] = tensor.splat %[[LAST]] : tensor<16xi32>
  // CHECK:         %[[LEAST:.*]] = arith.minsi %{{.*}}, %[[SPLAT]] : tensor<16xi32>
  // CHECK:         %[[EVERY:.*]] = "kv.tile_broadcast"(%[[LEAST]]) {dimension = 0 : i64}
  // CHECK:         %[[HOLDS:.*]] = arith.cmpi sle, %{{.*}}, %[[EVERY]] : tensor<16x8xi32>
  // CHECK-NOT:     arith.cmpi
  // CHECK:         %[[MASK:.*]] = arith.andi %[[HOLDS]], %{{.*}} : tensor<16x8xi1>
  // CHECK:         "kv.tile_mask"(%{{.*}}, %[[MASK]])
  gpu.func @bounds(%n: i32, %x: tensor<16x8xf32>, %bound: tensor<16xi32>, %other: tensor<16x8xi1>, %stored: tensor<16xi1>,
      %out: memref<?x?xf32, strided<[?, 1]>, 1>) kernel attributes {kv.tiled} {
    %index = "kv.tile_index"() : () -> tensor<8xi32>
    %splat = tensor.splat %n : tensor<8xi32>
    %below = arith.cmpi slt, %index, %splat : tensor<8xi32>
    %below2 = "kv.tile_broadcast"(%below) {dimension = 1 : i64} : (tensor<8xi1>) -> tensor<16x8xi1>
    %columns = "kv.tile_broadcast"(%index) {dimension = 1 : i64} : (tensor<8xi32>) -> tensor<16x8xi32>
    %rows = "kv.tile_broadcast"(%bound) {dimension = 0 : i64} : (tensor<16xi32>) -> tensor<16x8xi32>
    %seen = arith.cmpi sle, %columns, %rows : tensor<16x8xi32>
    %both = arith.andi %seen, %other : tensor<16x8xi1>
    %mask = arith.andi %both, %below2 : tensor<16x8xi1>
    %y = "kv.tile_mask"(%x, %mask) : (tensor<16x8xf32>, tensor<16x8xi1>) -> tensor<16x8xf32>
    "kv.tile_store_rows"(%y, %out, %stored, %bound) : (tensor<16x8xf32>, memref<?x?xf32, strided<[?, 1]>, 1>, tensor<16xi1>, tensor<16xi32>) -> ()
    gpu.return
  }

  // Positions that one branch alone asks for are computed in it, and in the innermost one that has all who ask.
  // CHECK-LABEL: gpu.func @branches
  // CHECK-SAME:    (%{{.*}}, %[[N:[a-z0-9]+]]: i32, %{{.*}}: tensor<16xi32>, %{{.*}}: tensor<16x8xf32>, %[[NEAR:[a-z0-9]+]]: i1
  // CHECK-NOT:     kv.tile_index
  // CHECK:         scf.if %[[NEAR]]
  // CHECK:           } else {
  // CHECK:             %[[AT:.*]] = "kv.tile_index"
  // CHECK:             %[[COLUMNS:.*]] = "kv.tile_broadcast"(%[[AT]])
  // CHECK:             scf.if
  // CHECK:               arith.cmpi sle, %[[COLUMNS]]
  // CHECK:             } else {
  // CHECK:               %[[FIRST:.*]] = tensor.splat %[[N]]
  // CHECK:               arith.cmpi sgt, %[[COLUMNS]], %[[FIRST]]
  gpu.func @branches(%out: memref<?x?xf32, strided<[?, 1]>, 1>, %n: i32, %bound: tensor<16xi32>, %x: tensor<16x8xf32>, %near: i1, %other: i1,
      %stored: tensor<16xi1>) kernel attributes {kv.tiled} {
    %index = "kv.tile_index"() : () -> tensor<8xi32>
    %columns = "kv.tile_broadcast"(%index) {dimension = 1 : i64} : (tensor<8xi32>) -> tensor<16x8xi32>
    %first = tensor.splat %n : tensor<16x8xi32>
    %y = scf.if %near -> (tensor<16x8xf32>) {
      scf.yield %x : tensor<16x8xf32>
    } else {
      %z = scf.if %other -> (tensor<16x8xf32>) {
        %rows = "kv.tile_broadcast"(%bound) {dimension = 0 : i64} : (tensor<16xi32>) -> tensor<16x8xi32>
        %seen = arith.cmpi sle, %columns, %rows : tensor<16x8xi32>
        %a = "kv.tile_mask"(%x, %seen) : (tensor<16x8xf32>, tensor<16x8xi1>) -> tensor<16x8xf32>
        scf.yield %a : tensor<16x8xf32>
      } else {
        %seen = arith.cmpi sgt, %columns, %first : tensor<16x8xi32>
        %a = "kv.tile_mask"(%x, %seen) : (tensor<16x8xf32>, tensor<16x8xi1>) -> tensor<16x8xf32>
        scf.yield %a : tensor<16x8xf32>
      }
      scf.yield %z : tensor<16x8xf32>
    }
    "kv.tile_store_rows"(%y, %out, %stored, %bound) : (tensor<16x8xf32>, memref<?x?xf32, strided<[?, 1]>, 1>, tensor<16xi1>, tensor<16xi32>) -> ()
    gpu.return
  }

  // Left alone: bounds that hold other numbers of columns.
  // CHECK-LABEL: gpu.func @others
  // CHECK:         arith.cmpi slt
  // CHECK:         arith.cmpi sle
  gpu.func @others(%n: i32, %x: tensor<16x8xf32>, %bound: tensor<16xi32>, %places: tensor<8xi32>, %stored: tensor<16xi1>,
      %out: memref<?x?xf32, strided<[?, 1]>, 1>) kernel attributes {kv.tiled} {
    %index = "kv.tile_index"() : () -> tensor<8xi32>
    %splat = tensor.splat %n : tensor<8xi32>
    %below = arith.cmpi slt, %index, %splat : tensor<8xi32>
    %below2 = "kv.tile_broadcast"(%below) {dimension = 1 : i64} : (tensor<8xi1>) -> tensor<16x8xi1>
    %columns = "kv.tile_broadcast"(%places) {dimension = 1 : i64} : (tensor<8xi32>) -> tensor<16x8xi32>
    %rows = "kv.tile_broadcast"(%bound) {dimension = 0 : i64} : (tensor<16xi32>) -> tensor<16x8xi32>
    %seen = arith.cmpi sle, %columns, %rows : tensor<16x8xi32>
    %mask = arith.andi %seen, %below2 : tensor<16x8xi1>
    %y = "kv.tile_mask"(%x, %mask) : (tensor<16x8xf32>, tensor<16x8xi1>) -> tensor<16x8xf32>
    "kv.tile_store_rows"(%y, %out, %stored, %bound) : (tensor<16x8xf32>, memref<?x?xf32, strided<[?, 1]>, 1>, tensor<16xi1>, tensor<16xi32>) -> ()
    gpu.return
  }
}

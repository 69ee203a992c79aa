// RUN: kv-opt %s --split-kv-loops --canonicalize | FileCheck %s

// Masks of which a part is not known, as a user's function has them: the other parts bound the loop, and the mask stays.

!tile = tensor<64x32xf32>
!where = tensor<64x32xi32>

gpu.module @kernels {
  // Documents, causally: which keys are of a query's document is not known, but none lies after it.
  // CHECK-LABEL: gpu.func @conjunction(
  // CHECK-SAME:    %[[FIRST:[a-z0-9]+]]: i32, %[[N:[a-z0-9]+]]: i32,
  // CHECK:         %[[LAST:.*]] = arith.addi %[[FIRST]], %c95_i32
  // CHECK:         %[[SOME:.*]] = arith.maxsi %[[LAST]], %c0_i32
  // CHECK:         %[[TILES:.*]] = arith.divui %[[SOME]], %c32_i32
  // CHECK:         %[[END:.*]] = arith.minsi %[[N]], %[[TILES]]
  // CHECK:         scf.for %{{.*}} = %c0_i32 to %[[END]] step
  // CHECK-NOT:       scf.if
  // CHECK:           "kv.tile_mask"
  gpu.func @conjunction(%first: i32, %n: i32, %x: !tile, %init: !tile, %ids: !where, %id: !where, %out: memref<?x32xf32>, %every: tensor<64xi1>, %at: tensor<64xi32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c32 = arith.constant 32 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %init) -> (!tile) : i32 {
      %base = arith.muli %j, %c32 : i32
      %kb = tensor.splat %base : tensor<32xi32>
      %ki = "kv.tile_index"() : () -> tensor<32xi32>
      %k = arith.addi %kb, %ki : tensor<32xi32>
      %ks = "kv.tile_broadcast"(%k) {dimension = 1 : i64} : (tensor<32xi32>) -> !where
      %qb = tensor.splat %first : tensor<64xi32>
      %qi = "kv.tile_index"() : () -> tensor<64xi32>
      %q = arith.addi %qb, %qi : tensor<64xi32>
      %qs = "kv.tile_broadcast"(%q) {dimension = 0 : i64} : (tensor<64xi32>) -> !where
      %same = arith.cmpi eq, %ids, %id : !where
      %causal = arith.cmpi sle, %ks, %qs : !where
      %m = arith.andi %same, %causal : tensor<64x32xi1>
      %y = "kv.tile_mask"(%x, %m) : (!tile, tensor<64x32xi1>) -> !tile
      %z = arith.addf %o, %y : !tile
      scf.yield %z : !tile
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!tile, memref<?x32xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

  // A prefix that all see, and causally after it: the loop ends where neither sees anything, and a tile is seen whole
  // where one of them shows all of it. The prefix's length is read before the loop, where that runs at all; a number that
  // is read may be any of 32 bits, so its bounds saturate.
  // CHECK-LABEL: gpu.func @disjunction(
  // CHECK-SAME:    %[[FIRST:[a-z0-9]+]]: i32, %[[N:[a-z0-9]+]]: i32,
  // CHECK:         %[[SOME:.*]] = arith.cmpi sgt, %[[N]], %c0_i32
  // CHECK:         %[[LENGTH:.*]] = scf.if %[[SOME]] -> (i32) {
  // CHECK-NEXT:      memref.load
  // CHECK:         arith.addi %[[FIRST]], %c95_i32
  // CHECK:         %[[CAUSAL:.*]] = arith.divui
  // CHECK:         %[[WIDE:.*]] = arith.extsi %[[LENGTH]] : i32 to i64
  // CHECK:         %[[LAST:.*]] = arith.subi %[[WIDE]], %c1_i64
  // CHECK:         arith.minsi %[[LAST]], %c2147483647_i64
  // CHECK:         %[[PREFIX:.*]] = arith.divui
  // CHECK:         %[[EITHER:.*]] = arith.maxsi %[[CAUSAL]], %[[PREFIX]]
  // CHECK:         %[[END:.*]] = arith.minsi %[[N]], %[[EITHER]]
  // CHECK:         scf.for %{{.*}} = %c0_i32 to %[[END]] step
  // CHECK:           %[[WHOLE:.*]] = arith.ori %{{.*}}, %{{.*}} : i1
  // CHECK:           scf.if %[[WHOLE]]
  gpu.func @disjunction(%first: i32, %n: i32, %x: !tile, %init: !tile, %lengths: memref<?xi32>, %b: index, %out: memref<?x32xf32>, %every: tensor<64xi1>, %at: tensor<64xi32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c32 = arith.constant 32 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %init) -> (!tile) : i32 {
      %base = arith.muli %j, %c32 : i32
      %kb = tensor.splat %base : tensor<32xi32>
      %ki = "kv.tile_index"() : () -> tensor<32xi32>
      %k = arith.addi %kb, %ki : tensor<32xi32>
      %ks = "kv.tile_broadcast"(%k) {dimension = 1 : i64} : (tensor<32xi32>) -> !where
      %qb = tensor.splat %first : tensor<64xi32>
      %qi = "kv.tile_index"() : () -> tensor<64xi32>
      %q = arith.addi %qb, %qi : tensor<64xi32>
      %qs = "kv.tile_broadcast"(%q) {dimension = 0 : i64} : (tensor<64xi32>) -> !where
      %causal = arith.cmpi sle, %ks, %qs : !where
      %length = memref.load %lengths[%b] : memref<?xi32>
      %ends = tensor.splat %length : !where
      %prefix = arith.cmpi slt, %ks, %ends : !where
      %m = arith.ori %causal, %prefix : tensor<64x32xi1>
      %y = "kv.tile_mask"(%x, %m) : (!tile, tensor<64x32xi1>) -> !tile
      %z = arith.addf %o, %y : !tile
      scf.yield %z : !tile
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!tile, memref<?x32xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

  // One side of the disjunction may hold anywhere: every tile is visited. Where the other shows all of a tile, that side
  // need not be asked.
  // CHECK-LABEL: gpu.func @unknown_side(
  // CHECK-SAME:    i32, %[[N:[a-z0-9]+]]: i32,
  // CHECK:         scf.for %{{.*}} = %c0_i32 to %[[N]] step
  // CHECK:           %[[WHOLE:.*]] = arith.cmpi sge
  // CHECK:           scf.if %[[WHOLE]]
  // CHECK:             arith.cmpi eq
  // CHECK:             "kv.tile_mask"
  gpu.func @unknown_side(%first: i32, %n: i32, %x: !tile, %init: !tile, %ids: !where, %id: !where, %out: memref<?x32xf32>, %every: tensor<64xi1>, %at: tensor<64xi32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c32 = arith.constant 32 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %init) -> (!tile) : i32 {
      %base = arith.muli %j, %c32 : i32
      %kb = tensor.splat %base : tensor<32xi32>
      %ki = "kv.tile_index"() : () -> tensor<32xi32>
      %k = arith.addi %kb, %ki : tensor<32xi32>
      %ks = "kv.tile_broadcast"(%k) {dimension = 1 : i64} : (tensor<32xi32>) -> !where
      %qs = tensor.splat %first : !where
      %same = arith.cmpi eq, %ids, %id : !where
      %causal = arith.cmpi sle, %ks, %qs : !where
      %m = arith.ori %same, %causal : tensor<64x32xi1>
      %y = "kv.tile_mask"(%x, %m) : (!tile, tensor<64x32xi1>) -> !tile
      %z = arith.addf %o, %y : !tile
      scf.yield %z : !tile
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!tile, memref<?x32xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

  // Left alone: a number that an iteration may change is not read before the loop.
  // CHECK-LABEL: gpu.func @written(
  // CHECK-SAME:    i32, %[[N:[a-z0-9]+]]: i32,
  // CHECK:         scf.for %{{.*}} = %c0_i32 to %[[N]] step
  // CHECK:           memref.load
  gpu.func @written(%first: i32, %n: i32, %x: !tile, %init: !tile, %lengths: memref<?xi32>, %b: index, %out: memref<?x32xf32>, %every: tensor<64xi1>, %at: tensor<64xi32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c32 = arith.constant 32 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %init) -> (!tile) : i32 {
      %base = arith.muli %j, %c32 : i32
      %kb = tensor.splat %base : tensor<32xi32>
      %ki = "kv.tile_index"() : () -> tensor<32xi32>
      %k = arith.addi %kb, %ki : tensor<32xi32>
      %ks = "kv.tile_broadcast"(%k) {dimension = 1 : i64} : (tensor<32xi32>) -> !where
      %length = memref.load %lengths[%b] : memref<?xi32>
      memref.store %j, %lengths[%b] : memref<?xi32>
      %ends = tensor.splat %length : !where
      %m = arith.cmpi slt, %ks, %ends : !where
      %y = "kv.tile_mask"(%x, %m) : (!tile, tensor<64x32xi1>) -> !tile
      %z = arith.addf %o, %y : !tile
      scf.yield %z : !tile
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!tile, memref<?x32xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }
}

// RUN: kv-opt %s --split-kv-loops --canonicalize | FileCheck %s
// RUN: sed -e '/@conjunction(/,/return/ s/%ids: !where/%lengths: memref<?xi32>, %b: index, &/' \
// RUN:   -e '/@conjunction(/,/return/ s/%m = .*/%length = memref.load %lengths[%b] : memref<?xi32> \
// RUN:     memref.store %j, %lengths[%b] : memref<?xi32> \
// RUN:     %ends = tensor.splat %length : !where \
// RUN:     %m = arith.cmpi slt, %ks, %ends : !where/' %s \
// RUN:   | kv-opt --split-kv-loops --canonicalize | FileCheck %s --check-prefix=WRITTEN
// RUN: sed -e '/@conjunction(/,/return/ s/%qs = .*/%qs = tensor.splat %first : !where/' \
// RUN:   -e '/@conjunction(/,/return/ s/%m = arith.andi/%m = arith.ori/' %s \
// RUN:   | kv-opt --split-kv-loops --canonicalize | FileCheck %s --check-prefix=SIDE
// RUN: sed -e '/@conjunction(/,/return/ s/%ids: !where/%lengths: memref<?xi32>, %b: index, &/' \
// RUN:   -e '/@conjunction(/,/return/ s/%m = .*/%length = memref.load %lengths[%b] : memref<?xi32> \
// RUN:     %ends = tensor.splat %length : !where \
// RUN:     %before = arith.cmpi slt, %ks, %ends : !where \
// RUN:     %m = arith.ori %causal, %before : tensor<64x32xi1>/' %s \
// RUN:   | kv-opt --split-kv-loops --canonicalize | FileCheck %s --check-prefix=EITHER

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
  // Left alone: a number that an iteration may change is not read before the loop.
  // WRITTEN-LABEL: gpu.func @conjunction(
  // WRITTEN-SAME:    i32, %[[N:[a-z0-9]+]]: i32,
  // WRITTEN:         scf.for %{{.*}} = %c0_i32 to %[[N]] step
  // WRITTEN:           memref.load
  // One side of the disjunction may hold anywhere: every tile is visited. Where the other shows all of a tile, that side
  // need not be asked.
  // SIDE-LABEL: gpu.func @conjunction(
  // SIDE-SAME:    i32, %[[N:[a-z0-9]+]]: i32,
  // SIDE:         scf.for %{{.*}} = %c0_i32 to %[[N]] step
  // SIDE:           %[[WHOLE:.*]] = arith.cmpi sge
  // SIDE:           scf.if %[[WHOLE]]
  // SIDE:             arith.cmpi eq
  // SIDE:             "kv.tile_mask"
  // A prefix that all see, and causally after it: the loop ends where neither sees anything, and a tile is seen whole
  // where one of them shows all of it. The prefix's length is read before the loop, where that runs at all; a number that
  // is read may be any of 32 bits, so its bounds saturate.
  // EITHER-LABEL: gpu.func @conjunction(
  // EITHER-SAME:    %[[FIRST:[a-z0-9]+]]: i32, %[[N:[a-z0-9]+]]: i32,
  // EITHER:         %[[SOME:.*]] = arith.cmpi sgt, %[[N]], %c0_i32
  // EITHER:         %[[LENGTH:.*]] = scf.if %[[SOME]] -> (i32) {
  // EITHER-NEXT:      memref.load
  // EITHER:         arith.addi %[[FIRST]], %c95_i32
  // EITHER:         %[[CAUSAL:.*]] = arith.divui
  // EITHER:         %[[WIDE:.*]] = arith.extsi %[[LENGTH]] : i32 to i64
  // EITHER:         %[[LAST:.*]] = arith.subi %[[WIDE]], %c1_i64
  // EITHER:         arith.minsi %[[LAST]], %c2147483647_i64
  // EITHER:         %[[PREFIX:.*]] = arith.divui
  // EITHER:         %[[EITHER:.*]] = arith.maxsi %[[CAUSAL]], %[[PREFIX]]
  // EITHER:         %[[END:.*]] = arith.minsi %[[N]], %[[EITHER]]
  // EITHER:         scf.for %{{.*}} = %c0_i32 to %[[END]] step
  // EITHER:           %[[WHOLE:.*]] = arith.ori %{{.*}}, %{{.*}} : i1
  // EITHER:           scf.if %[[WHOLE]]
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

}

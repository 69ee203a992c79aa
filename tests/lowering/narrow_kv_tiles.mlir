// RUN: kv-opt %s --narrow-kv-tiles --canonicalize | FileCheck %s
// RUN: kv-opt %s --narrow-kv-tiles='hoist=false' --canonicalize | FileCheck %s --check-prefix=STAYS
// RUN: kv-opt %s --narrow-kv-tiles='far=false' --canonicalize | FileCheck %s --check-prefix=WHOLE
// RUN: sed -e '/@far(/,/return/ s/.table: memref<?xf32>/&, %list: memref<?xi32>/' \
// RUN:   -e '/@far(/,/return/ s/%base = arith.muli %j/%at_j = arith.index_cast %j : i32 to index \
// RUN:     %where = memref.load %list[%at_j] : memref<?xi32> \
// RUN:     %base = arith.muli %where/' %s \
// RUN:   | kv-opt --narrow-kv-tiles --canonicalize | FileCheck %s --check-prefix=LISTED
// RUN: %if alone %{ kv-opt %S/Inputs/attention_alibi.mlir --kv-pipeline --target=sm_90a --arg=alibi_slopes=2 --stop-after=narrow-kv-tiles --check-semantics-of=narrow-kv-tiles --lengths=edges -o /dev/null %}

!tile = tensor<64x32xf32>

gpu.module @kernels {
  // A vector whose indices no iteration changes is read once, where there is an iteration.
  // CHECK-LABEL: gpu.func @rows(
  // CHECK-SAME:    i32, %[[N:[a-z0-9]+]]: i32,
  // CHECK:         %[[SOME:.*]] = arith.cmpi sgt, %[[N]], %c0_i32
  // CHECK:         %[[MASK:.*]] = tensor.splat %[[SOME]] : tensor<64xi1>
  // CHECK:         "kv.tile_gather"(%{{.*}}, %[[MASK]]
  // CHECK:         scf.for
  // CHECK-NOT:       kv.tile_gather
  // CHECK:         gpu.return
  // STAYS-LABEL:  gpu.func @rows(
  // STAYS:          scf.for
  // STAYS:            kv.tile_gather
  gpu.func @rows(%first: i32, %n: i32, %x: !tile, %init: !tile, %out: memref<?x32xf32>, %every: tensor<64xi1>, %at: tensor<64xi32>, %by_row: memref<?xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %yes = arith.constant dense<true> : tensor<64xi1>
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %init) -> (!tile) : i32 {
      %qb = tensor.splat %first : tensor<64xi32>
      %qi = "kv.tile_index"() : () -> tensor<64xi32>
      %q = arith.addi %qb, %qi : tensor<64xi32>
      %v = "kv.tile_gather"(%by_row, %yes, %q) : (memref<?xf32>, tensor<64xi1>, tensor<64xi32>) -> tensor<64xf32>
      %vs = "kv.tile_broadcast"(%v) {dimension = 0 : i64} : (tensor<64xf32>) -> !tile
      %z = arith.addf %o, %vs : !tile
      scf.yield %z : !tile
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!tile, memref<?x32xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

  // What an iteration may have written is read in it.
  // CHECK-LABEL: gpu.func @written(
  // CHECK:         scf.for
  // CHECK:           kv.tile_gather
  gpu.func @written(%first: i32, %n: i32, %x: !tile, %init: !tile, %out: memref<?x32xf32>, %every: tensor<64xi1>, %at: tensor<64xi32>, %by_row: memref<?xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %yes = arith.constant dense<true> : tensor<64xi1>
    scf.for %j = %c0 to %n step %c1 : i32 {
      %v = "kv.tile_gather"(%by_row, %yes, %at) : (memref<?xf32>, tensor<64xi1>, tensor<64xi32>) -> tensor<64xf32>
      "kv.tile_scatter"(%v, %by_row, %yes, %at) : (tensor<64xf32>, memref<?xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    }
    gpu.return
  }

  // The float of a difference of positions: one of the row's, one of the column's, counted from the first row.
  // CHECK-LABEL: gpu.func @distance(
  // CHECK-SAME:    %[[FIRST:[a-z0-9]+]]: i32,
  // CHECK:         scf.for
  // CHECK:           arith.sitofp %{{.*}} : tensor<32xi32> to tensor<32xf32>
  // CHECK:           arith.sitofp %{{.*}} : tensor<64xi32> to tensor<64xf32>
  // CHECK:           arith.subf %{{.*}} : tensor<64x32xf32>
  // CHECK-NOT:       arith.sitofp
  // CHECK:         gpu.return
  gpu.func @distance(%first: i32, %n: i32, %init: !tile, %out: memref<?x32xf32>, %every: tensor<64xi1>, %at: tensor<64xi32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c32 = arith.constant 32 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %init) -> (!tile) : i32 {
      %base = arith.muli %j, %c32 : i32
      %kb = tensor.splat %base : tensor<32xi32>
      %ki = "kv.tile_index"() : () -> tensor<32xi32>
      %k = arith.addi %kb, %ki : tensor<32xi32>
      %ks = "kv.tile_broadcast"(%k) {dimension = 1 : i64} : (tensor<32xi32>) -> tensor<64x32xi32>
      %qb = tensor.splat %first : tensor<64xi32>
      %qi = "kv.tile_index"() : () -> tensor<64xi32>
      %q = arith.addi %qb, %qi : tensor<64xi32>
      %qs = "kv.tile_broadcast"(%q) {dimension = 0 : i64} : (tensor<64xi32>) -> tensor<64x32xi32>
      %d = arith.subi %ks, %qs : tensor<64x32xi32>
      %f = arith.sitofp %d : tensor<64x32xi32> to !tile
      %z = arith.addf %o, %f : !tile
      scf.yield %z : !tile
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!tile, memref<?x32xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

  // A bias by distance: where every distance of a tile is at least 127, the last entry is read, before the loop.
  // CHECK-LABEL: gpu.func @far(
  // CHECK-SAME:    %[[FIRST:[a-z0-9]+]]: i32, %[[N:[a-z0-9]+]]: i32, %[[X:[a-z0-9]+]]: tensor<64x32xf32>
  // CHECK:         %[[SOME:.*]] = arith.cmpi sgt, %[[N]], %c0_i32
  // CHECK:         %[[LAST:.*]] = scf.if %[[SOME]] -> (f32) {
  // CHECK:           memref.load %{{.*}}[%c127]
  // CHECK:         scf.for %[[J:.*]] = %c0_i32
  // CHECK:           %[[FAR:.*]] = arith.cmpi sge
  // CHECK:           scf.if %[[FAR]] -> (tensor<64x32xf32>) {
  // CHECK:             %[[ONE:.*]] = tensor.splat %[[LAST]] : tensor<64x32xf32>
  // CHECK:             arith.addf %[[X]], %[[ONE]]
  // CHECK:           } else {
  // CHECK:             "kv.tile_gather"({{.*}}) -> tensor<64x32xf32>
  // CHECK:         gpu.return
  // WHOLE-LABEL:  gpu.func @far(
  // WHOLE-NOT:      scf.if
  // WHOLE:        gpu.return
  // Where a list says where the tiles are, it is the place of the tile that says whether it is far.
  // LISTED-LABEL: gpu.func @far(
  // LISTED:         scf.for
  // LISTED:           %[[PLACE:.*]] = memref.load
  // LISTED:           %[[BASE:.*]] = arith.muli %[[PLACE]], %c32_i32
  // LISTED:           %[[BACK:.*]] = arith.muli %[[PLACE]], %c-32_i32
  // LISTED:           %[[LEAST:.*]] = arith.addi %[[BACK]]
  // LISTED:           %[[FAR:.*]] = arith.cmpi sge, %[[LEAST]], %c0_i32
  // LISTED:           scf.if %[[FAR]]
  // LISTED:             arith.addf
  // LISTED:           } else {
  // LISTED:             "kv.tile_gather"({{.*}}) -> tensor<64x32xf32>
  // LISTED:         gpu.return
  gpu.func @far(%first: i32, %n: i32, %x: !tile, %init: !tile, %out: memref<?x32xf32>, %every: tensor<64xi1>, %at: tensor<64xi32>, %table: memref<?xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c32 = arith.constant 32 : i32
    %zero = arith.constant dense<0> : tensor<64x32xi32>
    %last = arith.constant dense<127> : tensor<64x32xi32>
    %yes = arith.constant dense<true> : tensor<64x32xi1>
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %init) -> (!tile) : i32 {
      %base = arith.muli %j, %c32 : i32
      %kb = tensor.splat %base : tensor<32xi32>
      %ki = "kv.tile_index"() : () -> tensor<32xi32>
      %k = arith.addi %kb, %ki : tensor<32xi32>
      %ks = "kv.tile_broadcast"(%k) {dimension = 1 : i64} : (tensor<32xi32>) -> tensor<64x32xi32>
      %qb = tensor.splat %first : tensor<64xi32>
      %qi = "kv.tile_index"() : () -> tensor<64xi32>
      %q = arith.addi %qb, %qi : tensor<64xi32>
      %qs = "kv.tile_broadcast"(%q) {dimension = 0 : i64} : (tensor<64xi32>) -> tensor<64x32xi32>
      %d = arith.subi %qs, %ks : tensor<64x32xi32>
      %held = arith.minsi %d, %last : tensor<64x32xi32>
      %i = arith.maxsi %held, %zero : tensor<64x32xi32>
      %bias = "kv.tile_gather"(%table, %yes, %i) : (memref<?xf32>, tensor<64x32xi1>, tensor<64x32xi32>) -> !tile
      %y = arith.addf %x, %bias : !tile
      %z = arith.addf %o, %y : !tile
      %w = arith.mulf %z, %y : !tile
      scf.yield %w : !tile
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!tile, memref<?x32xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

}

// RUN: kv-opt %s --skip-kv-maxima | FileCheck %s
// RUN: kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=skip-kv-maxima --check-semantics-of=skip-kv-maxima --arg=scale=64 --lengths=edges -o /dev/null
// RUN: sed 's/dense<8.0>/dense<3.0e38>/' %s | kv-opt --skip-kv-maxima | FileCheck %s --check-prefix=FAR
// A large scale: later tiles have scores so much larger that weights by the maximum before them are infinite.

// A maximum that may be exceeded by so much that the weights are no f32 bounds no sums.
// FAR-LABEL: gpu.func @weights
// FAR-NOT:     kv.warp_any
// FAR-LABEL: gpu.func @softmax

!tile = tensor<64x64xf32, "wgmma">
!row = tensor<64xf32, "rows(wgmma)">
!weights = tensor<64x64xbf16, "wgmma">

gpu.module @kernels {
  // Weights of any finite score: where no maximum is large, of exact products; a large one takes the branch, in which it
  // moves by what scores are.
  // CHECK-LABEL: gpu.func @weights
  // CHECK-SAME:    (%[[X:[^:]*]]: tensor<64x64xf32, "wgmma">
  // CHECK:         scf.for %{{.*}} iter_args(%[[M:.*]] = %{{.*}}, %{{.*}} = %{{.*}}, %{{.*}} = %{{.*}}, %{{.*}} = %{{.*}})
  // CHECK-NOT:       kv.tile_weights
  // CHECK:           %[[PRODUCT:.*]] = arith.mulf %[[X]], %{{.*}} fastmath<contract>
  // CHECK:           %[[POWER:.*]] = arith.subf %[[PRODUCT]], %{{.*}} fastmath<contract>
  // CHECK:           math.exp2 %[[POWER]]
  // CHECK:           %[[GROWN:.*]] = arith.cmpf ogt
  // CHECK:           %[[SIZE:.*]] = math.absf %[[M]]
  // CHECK:           %[[LARGE:.*]] = arith.cmpf ogt, %[[SIZE]]
  // CHECK:           %[[ASK:.*]] = arith.ori %[[GROWN]], %[[LARGE]]
  // CHECK:           %[[ANY:.*]] = "kv.warp_any"(%[[ASK]])
  // CHECK:           scf.if %[[ANY]]
  // CHECK:             %[[HIGHER:.*]] = arith.maxnumf %{{.*}}, %[[M]]
  // CHECK:             %[[M2:.*]] = arith.select %{{.*}}, %[[HIGHER]], %[[M]]
  // CHECK:             "kv.tile_weights"(%[[X]], %{{.*}}, %[[M2]])
  gpu.func @weights(%x: !tile, %start: !row, %zero: !row, %none: !tile, %first: !weights, %unit: f32, %n: i32, %out: memref<?x64xbf16>, %every: tensor<64xi1, "rows(wgmma)">, %at: tensor<64xi32, "rows(wgmma)">) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %slack = arith.constant dense<8.0> : !row
    %most = arith.constant dense<3.4e38> : !row
    %of_rows = tensor.splat %unit : !row
    %r:4 = scf.for %j = %c0 to %n step %c1 iter_args(%m = %start, %l = %zero, %o = %none, %p = %first) -> (!row, !row, !tile, !weights) : i32 {
      %max = "kv.tile_reduce"(%x) {axis = 1 : i64, kind = "max"} : (!tile) -> !row
      %product = arith.mulf %max, %of_rows : !row
      %top = arith.minnumf %product, %most : !row
      %bound = arith.addf %m, %slack : !row
      %above = arith.cmpf ogt, %top, %bound : !row
      %m2 = arith.select %above, %top, %m : tensor<64xi1, "rows(wgmma)">, !row
      %moved = arith.subf %m, %m2 : !row
      %alpha = math.exp2 %moved : !row
      %w = "kv.tile_weights"(%x, %of_rows, %m2) : (!tile, !row, !row) -> !tile
      %kept = arith.mulf %l, %alpha : !row
      %sum = "kv.tile_reduce"(%w) {axis = 1 : i64, kind = "add", kv.partial} : (!tile) -> !row
      %l2 = arith.addf %kept, %sum : !row
      %narrow = arith.truncf %w : !tile to !weights
      %factors = "kv.tile_broadcast"(%alpha) {dimension = 0 : i64} : (!row) -> !tile
      %o2 = arith.mulf %o, %factors : !tile
      scf.yield %m2, %l2, %o2, %narrow : !row, !row, !tile, !weights
    }
    "kv.tile_store_rows"(%r#3, %out, %every, %at) : (!weights, memref<?x64xbf16>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // Weights with the maximum so far; what was there for warps in which a sum of weights has grown.
  // CHECK-LABEL: gpu.func @softmax
  // CHECK-SAME:    (%[[X:[^:]*]]: tensor<64x64xf32, "wgmma">
  // CHECK:         scf.for %{{.*}} iter_args(%[[M:.*]] = %{{.*}}, %[[L:.*]] = %{{.*}}, %[[O:.*]] = %{{.*}}, %{{.*}} = %{{.*}})
  // CHECK-NOT:       kind = "max"
  // CHECK:           %[[KEPT:.*]] = "kv.tile_broadcast"(%[[M]])
  // CHECK:           %[[P:.*]] = math.exp2
  // CHECK:           %[[S:.*]] = "kv.tile_reduce"(%[[P]]) {{.*}}kv.partial
  // CHECK:           %[[L0:.*]] = arith.addf %[[L]], %[[S]]
  // CHECK:           %[[NARROW:.*]] = arith.truncf %[[P]]
  // CHECK:           %[[READY:.*]] = "kv.tile_ready"(%[[NARROW]])
  // CHECK:           %[[GROWN:.*]] = arith.cmpf ogt, %[[S]], %{{.*}}
  // CHECK:           %[[ANY:.*]] = "kv.warp_any"(%[[GROWN]])
  // CHECK:           %[[FOUND:.*]]:4 = scf.if %[[ANY]]
  // CHECK:             %[[TOP:.*]] = "kv.tile_reduce"(%[[X]]) {{.*}}kind = "max"
  // CHECK:             %[[MOST:.*]] = "kv.tile_reduce_lanes"(%[[S]]) {kind = "max"}
  // CHECK:             %[[MOVES:.*]] = arith.cmpf ogt, %[[MOST]]
  // CHECK:             arith.select %[[MOVES]], %{{.*}}, %[[M]]
  // CHECK:             math.exp2
  // CHECK:           } else {
  // CHECK:             scf.yield %[[M]], %{{.*}}, %[[L0]], %[[READY]]
  // CHECK:           %[[ALPHA:.*]] = "kv.tile_broadcast"(%[[FOUND]]#1)
  // CHECK:           arith.mulf %[[O]], %[[ALPHA]]
  // CHECK:           scf.yield %[[FOUND]]#0, %[[FOUND]]#2, %{{.*}}, %[[FOUND]]#3
  gpu.func @softmax(%x: !tile, %start: !row, %zero: !row, %none: !tile, %first: !weights, %unit: f32, %n: i32, %out: memref<?x64xbf16>, %every: tensor<64xi1, "rows(wgmma)">, %at: tensor<64xi32, "rows(wgmma)">) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %slack = arith.constant dense<8.0> : !row
    %of_rows = tensor.splat %unit : !row
    %of_tile = tensor.splat %unit : !tile
    %r:4 = scf.for %j = %c0 to %n step %c1 iter_args(%m = %start, %l = %zero, %o = %none, %p = %first) -> (!row, !row, !tile, !weights) : i32 {
      %max = "kv.tile_reduce"(%x) {axis = 1 : i64, kind = "max"} : (!tile) -> !row
      %top = arith.mulf %max, %of_rows : !row
      %bound = arith.addf %m, %slack : !row
      %above = arith.cmpf ogt, %top, %bound : !row
      %m2 = arith.select %above, %top, %m : tensor<64xi1, "rows(wgmma)">, !row
      %moved = arith.subf %m, %m2 : !row
      %alpha = math.exp2 %moved : !row
      %scaled = arith.mulf %x, %of_tile : !tile
      %spread = "kv.tile_broadcast"(%m2) {dimension = 0 : i64} : (!row) -> !tile
      %power = arith.subf %scaled, %spread : !tile
      %w = math.exp2 %power : !tile
      %kept = arith.mulf %l, %alpha : !row
      %sum = "kv.tile_reduce"(%w) {axis = 1 : i64, kind = "add", kv.partial} : (!tile) -> !row
      %l2 = arith.addf %kept, %sum : !row
      %narrow = arith.truncf %w : !tile to !weights
      %factors = "kv.tile_broadcast"(%alpha) {dimension = 0 : i64} : (!row) -> !tile
      %o2 = arith.mulf %o, %factors : !tile
      scf.yield %m2, %l2, %o2, %narrow : !row, !row, !tile, !weights
    }
    "kv.tile_store_rows"(%r#3, %out, %every, %at) : (!weights, memref<?x64xbf16>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // Left alone: a maximum that is of other scores than the weights, and one that moves below the largest score by another number a row.
  // CHECK-LABEL: gpu.func @others
  // CHECK-NOT:     kv.warp_any
  // CHECK:         gpu.return
  gpu.func @others(%x: !tile, %y: !tile, %start: !row, %below: !row, %zero: !row, %n: i32, %out: memref<?x64xf32>, %every: tensor<64xi1, "rows(wgmma)">, %at: tensor<64xi32, "rows(wgmma)">) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %slack = arith.constant dense<8.0> : !row
    %r:2 = scf.for %j = %c0 to %n step %c1 iter_args(%m = %start, %l = %zero) -> (!row, !row) : i32 {
      %top = "kv.tile_reduce"(%x) {axis = 1 : i64, kind = "max"} : (!tile) -> !row
      %bound = arith.addf %m, %slack : !row
      %above = arith.cmpf ogt, %top, %bound : !row
      %m2 = arith.select %above, %top, %m : tensor<64xi1, "rows(wgmma)">, !row
      %moved = arith.subf %m, %m2 : !row
      %alpha = math.exp2 %moved : !row
      %spread = "kv.tile_broadcast"(%m2) {dimension = 0 : i64} : (!row) -> !tile
      %power = arith.subf %y, %spread : !tile
      %w = math.exp2 %power : !tile
      %kept = arith.mulf %l, %alpha : !row
      %sum = "kv.tile_reduce"(%w) {axis = 1 : i64, kind = "add", kv.partial} : (!tile) -> !row
      %l2 = arith.addf %kept, %sum : !row
      scf.yield %m2, %l2 : !row, !row
    }
    %q:2 = scf.for %j = %c0 to %n step %c1 iter_args(%m = %r#0, %l = %r#1) -> (!row, !row) : i32 {
      %top = "kv.tile_reduce"(%x) {axis = 1 : i64, kind = "max"} : (!tile) -> !row
      %bound = arith.addf %m, %slack : !row
      %above = arith.cmpf ogt, %top, %bound : !row
      %lower = arith.subf %top, %below : !row
      %m2 = arith.select %above, %lower, %m : tensor<64xi1, "rows(wgmma)">, !row
      %moved = arith.subf %m, %m2 : !row
      %alpha = math.exp2 %moved : !row
      %spread = "kv.tile_broadcast"(%m2) {dimension = 0 : i64} : (!row) -> !tile
      %power = arith.subf %x, %spread : !tile
      %w = math.exp2 %power : !tile
      %kept = arith.mulf %l, %alpha : !row
      %sum = "kv.tile_reduce"(%w) {axis = 1 : i64, kind = "add", kv.partial} : (!tile) -> !row
      %l2 = arith.addf %kept, %sum : !row
      scf.yield %m2, %l2 : !row, !row
    }
    %alpha = "kv.tile_broadcast"(%q#1) {dimension = 0 : i64} : (!row) -> !tile
    "kv.tile_store_rows"(%alpha, %out, %every, %at) : (!tile, memref<?x64xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // A maximum that moves to a constant below the largest score, where weights are to be larger: the same bound of sums.
  // CHECK-LABEL: gpu.func @below
  // CHECK-SAME:    (%[[X:[^:]*]]: tensor<64x64xf32, "wgmma">
  // CHECK:         %[[MOST:.*]] = arith.constant dense<2.550000e+02>
  // CHECK:         %[[GROWN:.*]] = arith.cmpf ogt, %[[S:.*]], %[[MOST]]
  // CHECK:         %[[ANY:.*]] = "kv.warp_any"(%[[GROWN]])
  // CHECK:         scf.if %[[ANY]]
  // CHECK:           %[[TOP:.*]] = "kv.tile_reduce"(%[[X]]) {{.*}}kind = "max"
  // CHECK:           %[[LOWER:.*]] = arith.subf %[[TOP]]
  // CHECK:           %[[OF_ROW:.*]] = "kv.tile_reduce_lanes"(%[[S]]) {kind = "max"}
  // CHECK:           %[[MOVES:.*]] = arith.cmpf ogt, %[[OF_ROW]], %[[MOST]]
  // CHECK:           arith.select %[[MOVES]], %[[LOWER]]
  // CHECK:         gpu.return
  gpu.func @below(%x: !tile, %start: !row, %zero: !row, %n: i32, %out: memref<?x64xf32>, %every: tensor<64xi1, "rows(wgmma)">, %at: tensor<64xi32, "rows(wgmma)">) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %slack = arith.constant dense<8.0> : !row
    %four = arith.constant dense<4.0> : !row
    %q:2 = scf.for %j = %c0 to %n step %c1 iter_args(%m = %start, %l = %zero) -> (!row, !row) : i32 {
      %top = "kv.tile_reduce"(%x) {axis = 1 : i64, kind = "max"} : (!tile) -> !row
      %bound = arith.addf %m, %slack : !row
      %above = arith.cmpf ogt, %top, %bound : !row
      %lower = arith.subf %top, %four : !row
      %m2 = arith.select %above, %lower, %m : tensor<64xi1, "rows(wgmma)">, !row
      %moved = arith.subf %m, %m2 : !row
      %alpha = math.exp2 %moved : !row
      %spread = "kv.tile_broadcast"(%m2) {dimension = 0 : i64} : (!row) -> !tile
      %power = arith.subf %x, %spread : !tile
      %w = math.exp2 %power : !tile
      %kept = arith.mulf %l, %alpha : !row
      %sum = "kv.tile_reduce"(%w) {axis = 1 : i64, kind = "add", kv.partial} : (!tile) -> !row
      %l2 = arith.addf %kept, %sum : !row
      scf.yield %m2, %l2 : !row, !row
    }
    %alpha = "kv.tile_broadcast"(%q#1) {dimension = 0 : i64} : (!row) -> !tile
    "kv.tile_store_rows"(%alpha, %out, %every, %at) : (!tile, memref<?x64xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // Weights that are summed up when they have been rounded to 8 bits: one is too large when it has become 448, to which
  // the maximum's slack leads. The maximum then moves as it would have.
  // CHECK-LABEL: gpu.func @rounded
  // CHECK-SAME:    (%[[X:[^:]*]]: tensor<64x64xf32, "wgmma">
  // CHECK:         %[[P:.*]] = math.exp2
  // CHECK-NEXT:    %[[W:.*]] = "kv.cast"(%[[P]])
  // CHECK-NEXT:    %[[HELD:.*]] = "kv.tile_ready"(%[[W]])
  // CHECK-NEXT:    %[[LARGE:.*]] = "kv.tile_saturated"(%[[HELD]])
  // CHECK-NEXT:    %[[ANY:.*]] = "kv.warp_any"(%[[LARGE]])
  // CHECK-NEXT:    scf.if %[[ANY]]
  // CHECK:           %[[TOP:.*]] = "kv.tile_reduce"(%[[X]]) {{.*}}kind = "max"
  // CHECK:           %[[ABOVE:.*]] = arith.cmpf ogt, %[[TOP]],
  // CHECK:           arith.select %[[ABOVE]],
  // CHECK:           "kv.cast"
  // CHECK:         } else {
  // CHECK-NEXT:      scf.yield {{.*}}%[[HELD]]
  gpu.func @rounded(%x: !tile, %start: !row, %zero: !row, %none: tensor<64x64xf8E4M3FN, "wgmma">, %n: i32, %out: memref<?x64xf32>, %every: tensor<64xi1, "rows(wgmma)">, %at: tensor<64xi32, "rows(wgmma)">) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %slack = arith.constant dense<8.80735492> : !row
    %three = arith.constant dense<3.0> : !row
    %q:3 = scf.for %j = %c0 to %n step %c1 iter_args(%m = %start, %l = %zero, %before = %none) -> (!row, !row, tensor<64x64xf8E4M3FN, "wgmma">) : i32 {
      %top = "kv.tile_reduce"(%x) {axis = 1 : i64, kind = "max"} : (!tile) -> !row
      %bound = arith.addf %m, %slack : !row
      %above = arith.cmpf ogt, %top, %bound : !row
      %lower = arith.subf %top, %three : !row
      %m2 = arith.select %above, %lower, %m : tensor<64xi1, "rows(wgmma)">, !row
      %moved = arith.subf %m, %m2 : !row
      %alpha = math.exp2 %moved : !row
      %spread = "kv.tile_broadcast"(%m2) {dimension = 0 : i64} : (!row) -> !tile
      %power = arith.subf %x, %spread : !tile
      %w = math.exp2 %power : !tile
      %kept = arith.mulf %l, %alpha : !row
      %narrow = "kv.cast"(%w) : (!tile) -> tensor<64x64xf8E4M3FN, "wgmma">
      scf.yield %m2, %kept, %narrow : !row, !row, tensor<64x64xf8E4M3FN, "wgmma">
    }
    %alpha = "kv.tile_broadcast"(%q#1) {dimension = 0 : i64} : (!row) -> !tile
    "kv.tile_store_rows"(%alpha, %out, %every, %at) : (!tile, memref<?x64xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }
}

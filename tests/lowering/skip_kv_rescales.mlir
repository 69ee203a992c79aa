// RUN: kv-opt %s --skip-kv-rescales | FileCheck %s
// RUN: kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=skip-kv-rescales --check-semantics-of=skip-kv-rescales --arg=scale=2 --lengths=edges -o /dev/null
// A large scale: later tiles have scores so much larger that accumulators are rescaled.

!tile = tensor<64x64xf32, "wgmma">
!row = tensor<64xf32, "rows(wgmma)">

gpu.module @kernels {
  // A warp multiplies where one of its rows has a factor other than 1; what spreads the factors moves along.
  // CHECK-LABEL: gpu.func @rescale
  // CHECK:         scf.for
  // CHECK:           %[[ALPHA:.*]] = math.exp2
  // CHECK:           %[[OTHER:.*]] = arith.cmpf une, %[[ALPHA]], %{{.*}} : tensor<64xf32, "rows(wgmma)">
  // CHECK:           %[[ANY:.*]] = "kv.warp_any"(%[[OTHER]])
  // CHECK:           %[[O:.*]] = scf.if %[[ANY]] -> (tensor<64x64xf32, "wgmma">) {
  // CHECK-NEXT:        %[[SPREAD:.*]] = "kv.tile_broadcast"(%[[ALPHA]])
  // CHECK-NEXT:        arith.mulf %{{.*}}, %[[SPREAD]]
  // CHECK:           } else {
  // CHECK-NEXT:        scf.yield %{{.*}} : tensor<64x64xf32, "wgmma">
  // CHECK:           scf.yield %[[O]]
  gpu.func @rescale(%moved: !row, %start: !tile, %n: i32, %out: memref<?x64xf32>, %every: tensor<64xi1, "rows(wgmma)">, %at: tensor<64xi32, "rows(wgmma)">) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %start) -> (!tile) : i32 {
      %alpha = math.exp2 %moved : !row
      %spread = "kv.tile_broadcast"(%alpha) {dimension = 0 : i64} : (!row) -> !tile
      %o2 = arith.mulf %o, %spread : !tile
      scf.yield %o2 : !tile
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!tile, memref<?x64xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // The same behind kv.tile_ready, which pipeline-kv-loops puts before the wait of a rotated loop; operands the other way.
  // CHECK-LABEL: gpu.func @rotated
  // CHECK:           %[[ALPHA:.*]] = "kv.tile_ready"
  // CHECK:           arith.cmpf une, %[[ALPHA]]
  // CHECK:           scf.if
  gpu.func @rotated(%moved: !row, %start: !tile, %n: i32, %out: memref<?x64xf32>, %every: tensor<64xi1, "rows(wgmma)">, %at: tensor<64xi32, "rows(wgmma)">) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %start) -> (!tile) : i32 {
      %factor = math.exp2 %moved : !row
      %alpha = "kv.tile_ready"(%factor) : (!row) -> !row
      %spread = "kv.tile_broadcast"(%alpha) {dimension = 0 : i64} : (!row) -> !tile
      %o2 = arith.mulf %spread, %o : !tile
      scf.yield %o2 : !tile
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!tile, memref<?x64xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // Left alone: factors that nothing says are mostly 1, factors of columns, products of vectors, and all of it in no loop.
  // CHECK-LABEL: gpu.func @others
  // CHECK-NOT:     kv.warp_any
  // CHECK:         gpu.return
  gpu.func @others(%x: !row, %y: tensor<64xf32, "columns(wgmma:4)">, %start: !tile, %n: i32, %out: memref<?x64xf32>, %every: tensor<64xi1, "rows(wgmma)">, %at: tensor<64xi32, "rows(wgmma)">) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %start) -> (!tile) : i32 {
      %given = "kv.tile_broadcast"(%x) {dimension = 0 : i64} : (!row) -> !tile
      %o2 = arith.mulf %o, %given : !tile
      %e = math.exp2 %y : tensor<64xf32, "columns(wgmma:4)">
      %columns = "kv.tile_broadcast"(%e) {dimension = 1 : i64} : (tensor<64xf32, "columns(wgmma:4)">) -> !tile
      %o3 = arith.mulf %o2, %columns : !tile
      %f = math.exp2 %x : !row
      %l = arith.mulf %f, %x : !row
      %ls = "kv.tile_broadcast"(%l) {dimension = 0 : i64} : (!row) -> !tile
      %o4 = arith.addf %o3, %ls : !tile
      scf.yield %o4 : !tile
    }
    %alpha = math.exp2 %x : !row
    %spread = "kv.tile_broadcast"(%alpha) {dimension = 0 : i64} : (!row) -> !tile
    %last = arith.mulf %r, %spread : !tile
    "kv.tile_store_rows"(%last, %out, %every, %at) : (!tile, memref<?x64xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }
}

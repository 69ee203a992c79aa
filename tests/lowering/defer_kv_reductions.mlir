// RUN: kv-opt %s --defer-kv-reductions | FileCheck %s
// RUN: sed -e '/@sum(/,/return/ s/dense<0.0>/dense<1.0>/' %s | kv-opt --defer-kv-reductions | FileCheck %s --check-prefix=ALONE
// RUN: sed -e '/@sum(/,/return/ s/kind = "add"/kind = "max"/' %s | kv-opt --defer-kv-reductions | FileCheck %s --check-prefix=ALONE
// RUN: sed -e '/@sum(/,/return/ s/scf.yield/"kv.tile_scatter"(%l2, %out, %every, %at) : (!row, memref<?xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> () &/' %s | kv-opt --defer-kv-reductions | FileCheck %s --check-prefix=ALONE
// RUN: sed -e '/@sum(/,/return/ s/addf %kept/addf %l/' %s | kv-opt --defer-kv-reductions | FileCheck %s --check-prefix=ALONE
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=defer-kv-reductions --check-semantics-of=defer-kv-reductions --lengths=edges -o /dev/null %}

!tile = tensor<64x64xf32, "wgmma">
!row = tensor<64xf32, "rows(wgmma)">

gpu.module @kernels {
  // A carried sum of rows, times a factor that all columns share, is folded over the lanes once, behind the loop.
  // CHECK-LABEL: gpu.func @sum
  // CHECK:         %[[L:.*]] = scf.for
  // CHECK:           "kv.tile_reduce"(%{{.*}}) {axis = 1 : i64, kind = "add", kv.partial}
  // CHECK:         %[[WHOLE:.*]] = "kv.tile_reduce_lanes"(%[[L]]) {kind = "add"}
  // CHECK:         "kv.tile_scatter"(%[[WHOLE]]
  // Left alone: every thread of a row would count what the sum starts with.
  // Left alone: a largest element is no sum.
  // Left alone: the whole sum is asked for in every iteration.
  // Left alone: of another form, which a kernel may have; only the speed is lost.
  // ALONE-LABEL: gpu.func @sum
  // ALONE-NOT:     kv.partial
  // ALONE-NOT:     kv.tile_reduce_lanes
  // ALONE:         gpu.return
  gpu.func @sum(%p: !tile, %alpha: !row, %n: i32, %out: memref<?xf32>, %every: tensor<64xi1, "rows(wgmma)">, %at: tensor<64xi32, "rows(wgmma)">) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %zero = arith.constant dense<0.0> : !row
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%l = %zero) -> (!row) : i32 {
      %kept = arith.mulf %l, %alpha : !row
      %s = "kv.tile_reduce"(%p) {kind = "add", axis = 1 : i64} : (!tile) -> !row
      %l2 = arith.addf %kept, %s : !row
      scf.yield %l2 : !row
    }
    "kv.tile_scatter"(%r, %out, %every, %at) : (!row, memref<?xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

}

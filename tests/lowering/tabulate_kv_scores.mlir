// RUN: kv-opt %s --tabulate-kv-scores='computed=true' --canonicalize | FileCheck %s
// RUN: kv-opt %s --tabulate-kv-scores --canonicalize | FileCheck %s --check-prefix=READ
// RUN: kv-opt %s --tabulate-kv-scores='most=1024' --canonicalize | FileCheck %s --check-prefix=FEW
// RUN: kv-opt %s --tabulate-kv-scores --canonicalize --remarks-filter=tabulate-kv-scores 2>&1 >/dev/null | FileCheck %s --check-prefix=SAYS
// RUN: sed -e '/@by_head(/,/return/ s/memref<4x128xf32>) kernel/memref<?xf32>) kernel/' \
// RUN:   -e '/@by_head(/,/return/ s/%bias = .*/%of_key = "kv.tile_gather"(%%table, %yes, %ks) : (memref<?xf32>, tensor<64x32xi1>, !at) -> !tile \
// RUN:     %both_at = arith.addi %d, %hs : !at \
// RUN:     %of_both = "kv.tile_gather"(%%table, %yes, %both_at) : (memref<?xf32>, tensor<64x32xi1>, !at) -> !tile \
// RUN:     %bias = arith.addf %of_key, %of_both : !tile/' %s \
// RUN:   | kv-opt --tabulate-kv-scores='computed=true' --canonicalize | FileCheck %s --check-prefix=OTHERS
// RUN: kv-opt %{kernels}/biased.mlir --kv-pipeline --target=sm_90a --stop-after=tabulate-kv-scores --check-semantics-of=tabulate-kv-scores --grid=3 --arg=query=3x64x64 --arg=bias=32 --arg=out=3x64x64 --lengths=edges --model=%S/Inputs/models.py:biased -o /dev/null

!tile = tensor<64x32xf32>
!at = tensor<64x32xi32>

module attributes {gpu.container_module} {
gpu.module @kernels {
  // What an array of heads and distances holds: 16 tokens of 4 heads and 32 keys have 47 distances, by head 72 apart, of
  // 128 that are computed. What lies behind repeats the last. Rows of a head begin where their query's distance to the first key lies.
  // CHECK-LABEL: gpu.func @by_head(
  // CHECK-SAME:    %[[FIRST:[a-z0-9]+]]: i32, %[[N:[a-z0-9]+]]: i32, %[[X:[a-z0-9]+]]: tensor<64x32xf32>
  // CHECK:         %[[PLACE:.*]] = "kv.make_table"() {length = 384 : i64}
  // CHECK:         %[[OF_HEADS:.*]] = arith.muli %{{.*}} : tensor<64xi32>
  // CHECK:         %[[STARTS:.*]] = arith.addi %[[OF_HEADS]], %{{.*}} : tensor<64xi32>
  // CHECK:         scf.for
  // CHECK:           %[[I:.*]] = "kv.tile_index"() : () -> tensor<512xi32>
  // CHECK:           arith.divui %{{.*}}, %{{.*}} : tensor<512xi32>
  // CHECK:           %[[TABLE:.*]] = "kv.tile_gather"({{.*}}) -> tensor<512xf32>
  // CHECK:           "kv.table_store"(%[[TABLE]], %[[PLACE]]) {length = 384 : i64, pitch = 72 : i64, span = 128 : i64} : (tensor<512xf32>, !llvm.ptr<3>) -> ()
  // CHECK:           %[[BIAS:.*]] = "kv.tile_windows"(%[[PLACE]], %[[STARTS]]) {length = 384 : i64} : (!llvm.ptr<3>, tensor<64xi32>) -> tensor<64x32xf32>
  // CHECK:           arith.addf %[[X]], %[[BIAS]]
  // CHECK:         gpu.return
  // FEW-LABEL:   gpu.func @by_head(
  // FEW-NOT:       kv.tile_windows
  // FEW:         gpu.return
  // SAYS-DAG:    is computed once per distance and head
  // READ-LABEL:  gpu.func @by_head(
  // READ:          kv.make_table
  // READ:        gpu.return
  // What an array holds for a key is no function of the distance, and an index may lie outside of the array for a distance
  // that the tile has not, unless it is held inside.
  // OTHERS-LABEL: gpu.func @by_head(
  // OTHERS-NOT:     kv.tile_windows
  // OTHERS:         gpu.return
  gpu.func @by_head(%first: i32, %n: i32, %x: !tile, %init: !tile, %out: memref<?x32xf32>, %every: tensor<64xi1>, %at: tensor<64xi32>, %table: memref<4x128xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c32 = arith.constant 32 : i32
    %two = arith.constant dense<2> : tensor<64xi32>
    %three = arith.constant dense<3> : tensor<64xi32>
    %zero = arith.constant dense<0> : !at
    %last = arith.constant dense<127> : !at
    %yes = arith.constant dense<true> : tensor<64x32xi1>
    %row = "kv.tile_index"() : () -> tensor<64xi32>
    %token = arith.shrsi %row, %two : tensor<64xi32>
    %head = arith.andi %row, %three : tensor<64xi32>
    %qb = tensor.splat %first : tensor<64xi32>
    %q = arith.addi %qb, %token : tensor<64xi32>
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %init) -> (!tile) : i32 {
      %base = arith.muli %j, %c32 : i32
      %kb = tensor.splat %base : tensor<32xi32>
      %ki = "kv.tile_index"() : () -> tensor<32xi32>
      %k = arith.addi %kb, %ki : tensor<32xi32>
      %ks = "kv.tile_broadcast"(%k) {dimension = 1 : i64} : (tensor<32xi32>) -> !at
      %qs = "kv.tile_broadcast"(%q) {dimension = 0 : i64} : (tensor<64xi32>) -> !at
      %hs = "kv.tile_broadcast"(%head) {dimension = 0 : i64} : (tensor<64xi32>) -> !at
      %d = arith.subi %qs, %ks : !at
      %high = arith.minsi %d, %last : !at
      %i = arith.maxsi %high, %zero : !at
      %bias = "kv.tile_gather"(%table, %yes, %hs, %i) : (memref<4x128xf32>, tensor<64x32xi1>, !at, !at) -> !tile
      %y = arith.addf %x, %bias : !tile
      %z = arith.mulf %o, %y : !tile
      scf.yield %z : !tile
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!tile, memref<?x32xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

  // A logarithm of the distance is computed of each once, where that is asked for, of the floats that narrow-kv-tiles makes of positions; what one
  // addition costs is computed where it is needed.
  // CHECK-LABEL: gpu.func @of_distance(
  // CHECK:         scf.for
  // CHECK:           math.log %{{.*}} : tensor<128xf32>
  // CHECK:           "kv.table_store"({{.*}}) {{.*}} : (tensor<128xf32>, !llvm.ptr<3>) -> ()
  // CHECK:           "kv.tile_windows"({{.*}}) {length = 128 : i64} : (!llvm.ptr<3>, tensor<64xi32>) -> tensor<64x32xf32>
  // CHECK-NOT:       kv.tile_windows
  // CHECK:         gpu.return
  // READ-LABEL:  gpu.func @of_distance(
  // READ-NOT:      kv.make_table
  // READ:        gpu.return
  gpu.func @of_distance(%first: i32, %n: i32, %x: !tile, %init: !tile, %out: memref<?x32xf32>, %every: tensor<64xi1>, %at: tensor<64xi32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c32 = arith.constant 32 : i32
    %one = arith.constant dense<1.0> : !tile
    %row = "kv.tile_index"() : () -> tensor<64xi32>
    %b = tensor.splat %first : tensor<64xi32>
    %q = arith.addi %b, %row : tensor<64xi32>
    %qd = arith.subi %q, %b : tensor<64xi32>
    %qf = arith.sitofp %qd : tensor<64xi32> to tensor<64xf32>
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %init) -> (!tile) : i32 {
      %base = arith.muli %j, %c32 : i32
      %kb = tensor.splat %base : tensor<32xi32>
      %ki = "kv.tile_index"() : () -> tensor<32xi32>
      %k = arith.addi %kb, %ki : tensor<32xi32>
      %c = tensor.splat %first : tensor<32xi32>
      %kd = arith.subi %k, %c : tensor<32xi32>
      %kf = arith.sitofp %kd : tensor<32xi32> to tensor<32xf32>
      %ks = "kv.tile_broadcast"(%kf) {dimension = 1 : i64} : (tensor<32xf32>) -> !tile
      %qs = "kv.tile_broadcast"(%qf) {dimension = 0 : i64} : (tensor<64xf32>) -> !tile
      %d = arith.subf %qs, %ks : !tile
      %e = arith.addf %d, %one : !tile
      %log = math.log %e : !tile
      %y = arith.subf %x, %log : !tile
      %w = arith.addf %y, %d : !tile
      %z = arith.mulf %o, %w : !tile
      scf.yield %z : !tile
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!tile, memref<?x32xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

  // The table of a tile in a branch is made before the branch, where that is taken, for the pipeline to move.
  // CHECK-LABEL: gpu.func @in_a_branch(
  // CHECK:         scf.for
  // CHECK:           %[[FAR:.*]] = arith.cmpi sge
  // CHECK:           %[[NEAR:.*]] = arith.cmpi slt
  // CHECK:           scf.if %[[NEAR]] {
  // CHECK:             "kv.table_store"
  // CHECK:           }
  // CHECK:           scf.if %[[FAR]] -> (tensor<64x32xf32>) {
  // CHECK:           } else {
  // CHECK-NOT:         kv.table_store
  // CHECK:             "kv.tile_windows"
  // CHECK:         gpu.return
  gpu.func @in_a_branch(%first: i32, %n: i32, %x: !tile, %init: !tile, %out: memref<?x32xf32>, %every: tensor<64xi1>, %at: tensor<64xi32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c32 = arith.constant 32 : i32
    %row = "kv.tile_index"() : () -> tensor<64xi32>
    %b = tensor.splat %first : tensor<64xi32>
    %q = arith.addi %b, %row : tensor<64xi32>
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %init) -> (!tile) : i32 {
      %base = arith.muli %j, %c32 : i32
      %far = arith.cmpi sge, %first, %base : i32
      %y = scf.if %far -> (!tile) {
        scf.yield %x : !tile
      } else {
        %kb = tensor.splat %base : tensor<32xi32>
        %ki = "kv.tile_index"() : () -> tensor<32xi32>
        %k = arith.addi %kb, %ki : tensor<32xi32>
        %ks = "kv.tile_broadcast"(%k) {dimension = 1 : i64} : (tensor<32xi32>) -> !at
        %qs = "kv.tile_broadcast"(%q) {dimension = 0 : i64} : (tensor<64xi32>) -> !at
        %d = arith.subi %ks, %qs : !at
        %e = arith.sitofp %d : !at to !tile
        %root = math.sqrt %e : !tile
        %z = arith.subf %x, %root : !tile
        scf.yield %z : !tile
      }
      %w = arith.mulf %o, %y : !tile
      scf.yield %w : !tile
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!tile, memref<?x32xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

}
}

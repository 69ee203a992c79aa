// RUN: kv-opt %s --reverse-kv-loops | FileCheck %s
// RUN: kv-opt %s --reverse-kv-loops='every=true' | FileCheck %s --check-prefix=EVERY
// RUN: %if alone %{ kv-opt %S/Inputs/attention_alibi.mlir --kv-pipeline --target=sm_90a --arg=alibi_slopes=2 --stop-after=reverse-kv-loops --check-semantics-of=reverse-kv-loops --lengths=edges -o /dev/null %}

!tile = tensor<64x64xf32>
!rows = tensor<64xf32>

gpu.module @kernels {
  // A loop whose scores are computed of distances goes from the last tile to the first.
  // CHECK-LABEL: gpu.func @by_distance
  // CHECK-SAME:    %[[LOW:[^:]*]]: i32, %[[HIGH:[^:]*]]: i32
  // CHECK:         %[[SUM:.*]] = arith.addi %[[LOW]], %[[HIGH]]
  // CHECK:         %[[LAST:.*]] = arith.subi %[[SUM]], %c1
  // CHECK:         scf.for %[[I:.*]] = %[[LOW]] to %[[HIGH]]
  // CHECK:           %[[J:.*]] = arith.subi %[[LAST]], %[[I]]
  // CHECK:           arith.muli %[[J]], %c64
  // CHECK-NOT:       %[[I]]
  // CHECK:         gpu.return
  gpu.func @by_distance(%low: i32, %high: i32, %a: tensor<64x64xbf16>, %b: tensor<64x64xbf16>, %query: tensor<64xi32>, %base: i32, %none: !tile, %out: memref<?x64xf32>, %every: tensor<64xi1>, %at: tensor<64xi32>) kernel attributes {kv.tiled} {
    %c1 = arith.constant 1 : i32
    %c64 = arith.constant 64 : i32
    %r = scf.for %j = %low to %high step %c1 iter_args(%o = %none) -> (!tile) : i32 {
      %begin = arith.muli %j, %c64 : i32
      %s = "kv.dot"(%a, %b) {transpose_b = true} : (tensor<64x64xbf16>, tensor<64x64xbf16>) -> !tile
      %begins = tensor.splat %begin : tensor<64xi32>
      %numbers = "kv.tile_index"() : () -> tensor<64xi32>
      %keys = arith.addi %begins, %numbers : tensor<64xi32>
      %bases = tensor.splat %base : tensor<64xi32>
      %of_keys = arith.subi %keys, %bases : tensor<64xi32>
      %of_query = arith.subi %query, %bases : tensor<64xi32>
      %k = arith.sitofp %of_keys : tensor<64xi32> to !rows
      %q = arith.sitofp %of_query : tensor<64xi32> to !rows
      %ks = "kv.tile_broadcast"(%k) {dimension = 1 : i64} : (!rows) -> !tile
      %qs = "kv.tile_broadcast"(%q) {dimension = 0 : i64} : (!rows) -> !tile
      %distance = arith.subf %ks, %qs : !tile
      %x = arith.addf %s, %distance : !tile
      %o2 = arith.addf %o, %x : !tile
      scf.yield %o2 : !tile
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!tile, memref<?x64xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

  // Left alone: scores that no distance is part of.
  // CHECK-LABEL: gpu.func @others
  // CHECK:         scf.for %[[I:.*]] = %{{.*}} to
  // CHECK:           arith.muli %[[I]], %c64
  // EVERY-LABEL: gpu.func @others
  // EVERY:         scf.for %[[I:.*]] = %{{.*}} to
  // EVERY:           arith.subi %{{.*}}, %[[I]]
  gpu.func @others(%low: i32, %high: i32, %a: tensor<64x64xbf16>, %b: tensor<64x64xbf16>, %none: !tile, %out: memref<?x64xf32>, %every: tensor<64xi1>, %at: tensor<64xi32>) kernel attributes {kv.tiled} {
    %c1 = arith.constant 1 : i32
    %c64 = arith.constant 64 : i32
    %r = scf.for %j = %low to %high step %c1 iter_args(%o = %none) -> (!tile) : i32 {
      %begin = arith.muli %j, %c64 : i32
      %number = arith.sitofp %begin : i32 to f32
      %numbers = tensor.splat %number : !tile
      %s = "kv.dot"(%a, %b) {transpose_b = true} : (tensor<64x64xbf16>, tensor<64x64xbf16>) -> !tile
      %x = arith.addf %s, %numbers : !tile
      %o2 = arith.addf %o, %x : !tile
      scf.yield %o2 : !tile
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!tile, memref<?x64xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }
}

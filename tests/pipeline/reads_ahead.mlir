// RUN: kv-opt %s --pipeline-kv-loops | FileCheck %s
// RUN: kv-opt %s --pipeline-kv-loops='reads=false' | FileCheck %s --check-prefix=READS
// RUN: kv-opt %s --pipeline-kv-loops='reads=true' | FileCheck %s --check-prefix=ASKED

!tile = tensor<64x128xbf16, "shared">
!scores = tensor<128x64xf32, "wgmma">
!weights = tensor<128x64xbf16, "wgmma">
!sums = tensor<128x128xf32, "wgmma">
!q = tensor<128x128xbf16, "shared">
!terms = tensor<128x256xf8E4M3FN, "shared">
!row = tensor<128xf32, "rows(wgmma)">
!bytes = tensor<64x128xf8E4M3FN, "shared">

gpu.module @kernels {
  // The number from which a tile begins is read an iteration ahead, of the last one again, and that of the iteration before
  // is kept for its values.
  // CHECK-LABEL: gpu.func @reads
  // CHECK-SAME:    %[[N:[a-z0-9]+]]: i32, %{{.*}}, %[[LIST:[a-z0-9]+]]: memref<?xi32>
  // CHECK:         scf.for %[[J:.*]] = {{.*}} iter_args({{.*}}, %[[BEFORE:.*]] = %{{.*}}, %[[NOW:.*]] = %{{.*}}) ->
  // CHECK:           %[[AFTER:.*]] = arith.addi %[[J]],
  // CHECK:           %[[LAST:.*]] = arith.subi %[[N]],
  // CHECK:           %[[AT:.*]] = arith.minsi %[[AFTER]], %[[LAST]]
  // CHECK:           %[[PLACE:.*]] = arith.index_cast %[[AT]]
  // CHECK:           %[[NEXT:.*]] = memref.load %[[LIST]][%[[PLACE]]]
  // CHECK-NOT:       memref.load
  // CHECK:           "kv.tile_clear"(%{{.*}}, %[[BEFORE]],
  // CHECK:           arith.sitofp %[[NOW]]
  // CHECK:           scf.yield {{.*}}%[[NOW]], %[[NEXT]] :
  // READS-LABEL: gpu.func @reads
  // READS:         scf.for
  // READS-COUNT-2:   memref.load
  // READS:           "kv.dot_wait"(%{{.*}}) {pending = 1 : i64}
  gpu.func @reads(%n: i32, %q: !q, %places: memref<?xi32>, %zero: !sums, %at: tensor<128xi32, "rows(wgmma)">, %out: memref<?x128xf32>, %every: tensor<128xi1, "rows(wgmma)">) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64}} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %values = "kv.make_stages"() {buffer_name = "values", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %zero) -> (!sums) : i32 {
      %place = arith.index_cast %j : i32 to index
      %first = memref.load %places[%place] : memref<?xi32>
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !tile
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (!q, !tile) -> !scores
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      %number = arith.sitofp %first : i32 to f32
      %b = tensor.splat %number : !scores
      %y = arith.addf %s, %b : !scores
      %p = math.exp2 %y : !scores
      %w = arith.truncf %p : !scores to !weights
      %v = "kv.consumer_wait"(%values, %j) : (!kv.stages, i32) -> !tile
      %clear = "kv.tile_clear"(%v, %first, %n) : (!tile, i32, i32) -> !tile
      %o2 = "kv.dot"(%w, %clear, %o) {transpose_b = false} : (!weights, !tile, !sums) -> !sums
      "kv.consumer_release"(%values, %j) : (!kv.stages, i32) -> ()
      scf.yield %o2 : !sums
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!sums, memref<?x128xf32>, tensor<128xi1, "rows(wgmma)">, tensor<128xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // Not where tables are made, unless asked for: numbers are read where they are needed, of both iterations.
  // CHECK-LABEL: gpu.func @reads_beside_tables
  // CHECK:         scf.for
  // CHECK-NOT:       arith.minsi
  // CHECK-COUNT-2:   memref.load
  // CHECK:           "kv.table_store"
  // CHECK:           scf.yield
  // ASKED-LABEL: gpu.func @reads_beside_tables
  // ASKED:         scf.for
  // ASKED:           arith.minsi
  // ASKED:           memref.load
  // ASKED-NOT:       memref.load
  // ASKED:           "kv.table_store"
  // ASKED:           scf.yield
  gpu.func @reads_beside_tables(%n: i32, %q: !q, %places: memref<?xi32>, %zero: !sums, %at: tensor<128xi32, "rows(wgmma)">, %out: memref<?x128xf32>, %every: tensor<128xi1, "rows(wgmma)">, %x: tensor<256xf32, "spread:8">) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64}} {
    %t = "kv.make_table"() {length = 256 : i64} : () -> !llvm.ptr<3>
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %values = "kv.make_stages"() {buffer_name = "values", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %zero) -> (!sums) : i32 {
      %place = arith.index_cast %j : i32 to index
      %first = memref.load %places[%place] : memref<?xi32>
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !tile
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (!q, !tile) -> !scores
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      "kv.table_store"(%x, %t) {length = 256 : i64, pitch = 256 : i64, span = 256 : i64} : (tensor<256xf32, "spread:8">, !llvm.ptr<3>) -> ()
      %number = arith.sitofp %first : i32 to f32
      %b = tensor.splat %number : !scores
      %y = arith.addf %s, %b : !scores
      %p = math.exp2 %y : !scores
      %w = arith.truncf %p : !scores to !weights
      %v = "kv.consumer_wait"(%values, %j) : (!kv.stages, i32) -> !tile
      %clear = "kv.tile_clear"(%v, %first, %n) : (!tile, i32, i32) -> !tile
      %o2 = "kv.dot"(%w, %clear, %o) {transpose_b = false} : (!weights, !tile, !sums) -> !sums
      "kv.consumer_release"(%values, %j) : (!kv.stages, i32) -> ()
      scf.yield %o2 : !sums
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!sums, memref<?x128xf32>, tensor<128xi1, "rows(wgmma)">, tensor<128xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // Nor of rows that are split into terms.
  // CHECK-LABEL: gpu.func @reads_of_split_rows
  // CHECK:         scf.for
  // CHECK-NOT:       arith.minsi
  // CHECK-COUNT-2:   memref.load
  // CHECK:           scf.yield
  // ASKED-LABEL: gpu.func @reads_of_split_rows
  // ASKED:         scf.for
  // ASKED:           arith.minsi
  // ASKED:           memref.load
  // ASKED-NOT:       memref.load
  // ASKED:           scf.yield
  gpu.func @reads_of_split_rows(%n: i32, %q: !q, %places: memref<?xi32>, %zero: !sums, %at: tensor<128xi32, "rows(wgmma)">, %out: memref<?x128xf32>, %every: tensor<128xi1, "rows(wgmma)">) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64}} {
    %terms:2 = "kv.tile_terms"(%q) : (!q) -> (!terms, !row)
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !bytes} : () -> !kv.stages
    %values = "kv.make_stages"() {buffer_name = "values", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %zero) -> (!sums) : i32 {
      %place = arith.index_cast %j : i32 to index
      %first = memref.load %places[%place] : memref<?xi32>
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !bytes
      %s = "kv.dot"(%terms#0, %k) {transpose_b = true} : (!terms, !bytes) -> !scores
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      %number = arith.sitofp %first : i32 to f32
      %b = tensor.splat %number : !scores
      %y = arith.addf %s, %b : !scores
      %p = math.exp2 %y : !scores
      %w = arith.truncf %p : !scores to !weights
      %v = "kv.consumer_wait"(%values, %j) : (!kv.stages, i32) -> !tile
      %clear = "kv.tile_clear"(%v, %first, %n) : (!tile, i32, i32) -> !tile
      %o2 = "kv.dot"(%w, %clear, %o) {transpose_b = false} : (!weights, !tile, !sums) -> !sums
      "kv.consumer_release"(%values, %j) : (!kv.stages, i32) -> ()
      scf.yield %o2 : !sums
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!sums, memref<?x128xf32>, tensor<128xi1, "rows(wgmma)">, tensor<128xi32, "rows(wgmma)">) -> ()
    gpu.return
  }
}

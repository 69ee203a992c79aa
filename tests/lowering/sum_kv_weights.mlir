// RUN: kv-opt %s --sum-kv-weights | FileCheck %s
// RUN: kv-opt %s --sum-kv-weights --defer-kv-reductions --pipeline-kv-loops | FileCheck %s --check-prefix=ROTATED
// RUN: sed 's/row_sums = true/row_sums = true, behind = 32 : i64, ping_pong = true/; s/kv.promoted = 64/kv.promoted = 32/' %s | kv-opt - --sum-kv-weights --pipeline-kv-loops | FileCheck %s --check-prefix=BEHIND
// RUN: kv-opt %S/Inputs/attention_8bit.mlir --kv-pipeline --target=sm_90a --stop-after=promote-kv-sums | kv-opt - --sum-kv-weights --target=sm_90a --check-semantics-of=sum-kv-weights --lengths=edges:64 -o /dev/null

!scores = tensor<128x64xf32, "wgmma">
!row = tensor<128xf32, "rows(wgmma)">
!q8 = tensor<128x128xf8E4M3FN, "shared">
!keys8 = tensor<64x128xf8E4M3FN, "shared">
!weights8 = tensor<128x64xf8E4M3FN, "wgmma">
!values8 = tensor<64x64xf8E4M3FN, "shared(transposed)">
!sums = tensor<128x64xf32, "wgmma">

gpu.module @kernels {
  // The sum of the rounded weights, by a product with ones: of columns that are alike a thread takes its own.
  // CHECK-LABEL: gpu.func @attention
  // CHECK:         %[[ONES:.*]] = "kv.tile_ones"() : () -> tensor<8x64xf8E4M3FN, "shared">
  // CHECK:         scf.for %{{.*}} iter_args(%[[L:.*]] = %{{.*}}, %{{.*}} = %{{.*}})
  // CHECK:           %[[KEPT:.*]] = arith.mulf %[[L]], %{{.*}}
  // CHECK-NOT:       kind = "add"
  // CHECK:           %[[W:.*]] = "kv.cast"(%{{.*}})
  // CHECK:           %[[SUMS:.*]] = "kv.dot"(%[[W]], %[[ONES]]) {kv.row_sums, transpose_b = true} : ({{.*}}) -> tensor<128x8xf32, "wgmma">
  // CHECK:           %[[ROW:.*]] = "kv.tile_reduce"(%[[SUMS]]) {axis = 1 : i64, kind = "max", kv.partial}
  // CHECK:           %[[L2:.*]] = arith.addf %[[KEPT]], %[[ROW]]
  // CHECK:           "kv.dot"(%[[W]], {{.*}}kv.promoted = 64
  // CHECK:           scf.yield %[[L2]],
  // With the last columns of values, of the iteration before, in one group with these; and once more behind the loop.
  // ROTATED-LABEL: gpu.func @attention
  // ROTATED:         %[[ONES:.*]] = "kv.tile_ones"()
  // ROTATED:         scf.for %{{.*}} iter_args(%[[C:.*]] = %{{.*}}, %[[KEPT:.*]] = %{{.*}}, %[[W:.*]] = %{{.*}}) ->
  // ROTATED:           %[[V:.*]] = "kv.dot_start"(%[[W]], %{{.*}}) {kv.joined, transpose_b = false}
  // ROTATED-NEXT:      %[[T:.*]] = "kv.dot_start"(%[[W]], %[[ONES]]) {transpose_b = true}
  // ROTATED-NEXT:      %[[S:.*]] = "kv.dot_start"({{.*}}) {transpose_b = true}
  // ROTATED-NEXT:      %[[O:.*]]:2 = "kv.dot_wait"(%[[V]], %[[S]]) {pending = 1 : i64}
  // ROTATED:           %[[D:.*]]:2 = "kv.dot_wait"(%[[O]]#1, %[[T]]) {pending = 0 : i64}
  // ROTATED-NEXT:      %[[ROW:.*]] = "kv.tile_reduce"(%[[D]]#1)
  // ROTATED-NEXT:      %[[L:.*]] = arith.addf %[[KEPT]], %[[ROW]]
  // ROTATED:           arith.mulf %[[L]],
  // ROTATED:           scf.yield
  // ROTATED:         "kv.dot_start"({{.*}}) {kv.joined, transpose_b = false}
  // ROTATED-NEXT:    "kv.dot_start"(%{{.*}}, %[[ONES]]) {transpose_b = true}
  // ROTATED:         arith.addf
  // Columns behind the scores: the others are added beside these, of which the turn is passed when they are there.
  // BEHIND-LABEL:  gpu.func @attention
  // BEHIND:          %[[ONES:.*]] = "kv.tile_ones"()
  // BEHIND:          scf.for %{{.*}} iter_args(%[[C:.*]] = %{{.*}}, %[[KEPT:.*]] = %{{.*}}, %[[W:.*]] = %{{.*}}) ->
  // BEHIND:            "kv.turn_wait"() {groups = "all"}
  // BEHIND:            %[[V:.*]] = "kv.dot_start"(%[[W]], %{{.*}}) {transpose_b = false} : ({{.*}}tensor<64x32xf8E4M3FN
  // BEHIND-NEXT:       %[[S:.*]] = "kv.dot_start"({{.*}}) {transpose_b = true}
  // BEHIND-NEXT:       %[[O:.*]]:2 = "kv.dot_wait"(%[[V]], %[[S]]) {pending = 1 : i64}
  // BEHIND-NEXT:       "kv.tile_add_columns"(%[[C]], %[[O]]#0) {first_column = 0 : i64}
  // BEHIND:            %[[V2:.*]] = "kv.dot_start"(%[[W]], %{{.*}}) {kv.joined, transpose_b = false} : ({{.*}}tensor<64x32xf8E4M3FN
  // BEHIND-NEXT:       %[[T:.*]] = "kv.dot_start"(%[[W]], %[[ONES]]) {transpose_b = true}
  // BEHIND-NEXT:       %[[D:.*]]:2 = "kv.dot_wait"(%[[O]]#1, %[[V2]]) {pending = 1 : i64}
  // BEHIND-NEXT:       "kv.turn_pass"() {groups = "all"}
  // BEHIND-NEXT:       %[[E:.*]]:2 = "kv.dot_wait"(%[[D]]#1, %[[T]]) {pending = 0 : i64}
  // BEHIND-NEXT:       "kv.tile_add_columns"(%{{.*}}, %[[E]]#0) {first_column = 32 : i64}
  // BEHIND:            math.exp2 %[[D]]#0
  gpu.func @attention(%n: i32, %q: !q8, %zero: !sums, %none: !row, %alpha: !row, %rows: memref<?x64xf32>, %every: tensor<128xi1, "rows(wgmma)">, %at: tensor<128xi32, "rows(wgmma)">) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64, one_wait = true, row_sums = true}} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !keys8} : () -> !kv.stages
    %values = "kv.make_stages"() {buffer_name = "values", copy = "transposed", stages = 2 : i64, tile = !values8} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %start = arith.constant dense<0.0> : !row
    %r:2 = scf.for %j = %c0 to %n step %c1 iter_args(%l = %start, %o = %zero) -> (!row, !sums) : i32 {
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !keys8
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (!q8, !keys8) -> !scores
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      %p = math.exp2 %s : !scores
      %kept = arith.mulf %l, %alpha : !row
      %sum = "kv.tile_reduce"(%p) {kind = "add", axis = 1 : i64} : (!scores) -> !row
      %l2 = arith.addf %kept, %sum : !row
      %w = "kv.cast"(%p) : (!scores) -> !weights8
      %v = "kv.consumer_wait"(%values, %j) : (!kv.stages, i32) -> !values8
      %o2 = "kv.dot"(%w, %v, %o) {kv.promoted = 64 : i64, transpose_b = false} : (!weights8, !values8, !sums) -> !sums
      "kv.consumer_release"(%values, %j) : (!kv.stages, i32) -> ()
      scf.yield %l2, %o2 : !row, !sums
    }
    %spread = "kv.tile_broadcast"(%r#0) {dimension = 0 : i64} : (!row) -> !sums
    %made = arith.addf %r#1, %spread : !sums
    "kv.tile_store_rows"(%made, %rows, %every, %at) : (!sums, memref<?x64xf32>, tensor<128xi1, "rows(wgmma)">, tensor<128xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // Sums that are used as logarithms stay sums of what weights were: the schedule does not ask for others.
  // CHECK-LABEL: gpu.func @not_asked
  // CHECK-NOT:     kv.row_sums
  // CHECK:         gpu.return
  gpu.func @not_asked(%n: i32, %x: !scores, %zero: !sums, %none: !row, %v: !values8, %rows: memref<?x64xf32>, %every: tensor<128xi1, "rows(wgmma)">, %at: tensor<128xi32, "rows(wgmma)">) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {}} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %start = arith.constant dense<0.0> : !row
    %r:2 = scf.for %j = %c0 to %n step %c1 iter_args(%l = %start, %o = %zero) -> (!row, !sums) : i32 {
      %p = math.exp2 %x : !scores
      %kept = arith.mulf %l, %none : !row
      %sum = "kv.tile_reduce"(%p) {kind = "add", axis = 1 : i64} : (!scores) -> !row
      %l2 = arith.addf %kept, %sum : !row
      %w = "kv.cast"(%p) : (!scores) -> !weights8
      %o2 = "kv.dot"(%w, %v, %o) {kv.promoted = 64 : i64, transpose_b = false} : (!weights8, !values8, !sums) -> !sums
      scf.yield %l2, %o2 : !row, !sums
    }
    %spread = "kv.tile_broadcast"(%r#0) {dimension = 0 : i64} : (!row) -> !sums
    %made = arith.addf %r#1, %spread : !sums
    "kv.tile_store_rows"(%made, %rows, %every, %at) : (!sums, memref<?x64xf32>, tensor<128xi1, "rows(wgmma)">, tensor<128xi32, "rows(wgmma)">) -> ()
    gpu.return
  }
}

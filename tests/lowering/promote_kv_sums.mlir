// RUN: kv-opt %s --promote-kv-sums | FileCheck %s
// RUN: kv-opt %s --promote-kv-sums='columns=32' | FileCheck %s --check-prefix=GIVEN
// RUN: kv-opt %s --promote-kv-sums='columns=0' | FileCheck %s --check-prefix=NONE
// RUN: kv-opt %s --promote-kv-sums --pipeline-kv-loops | FileCheck %s --check-prefix=ROTATED
// RUN: not kv-opt %s --promote-kv-sums='columns=48' 2>&1 | FileCheck %s --check-prefix=REFUSED
// RUN: kv-opt %S/Inputs/attention_8bit.mlir --kv-pipeline --target=sm_90a --stop-after=specialize-kv-warps | kv-opt - --promote-kv-sums --target=sm_90a --check-semantics-of=promote-kv-sums --lengths=edges:64 -o /dev/null

!scores = tensor<128x64xf32, "wgmma">
!row = tensor<128xf32, "rows(wgmma)">
!q8 = tensor<128x128xf8E4M3FN, "shared">
!keys8 = tensor<64x128xf8E4M3FN, "shared">
!weights64 = tensor<128x64xf8E4M3FN, "wgmma">
!values64 = tensor<64x128xf8E4M3FN, "shared(transposed)">
!weights8 = tensor<128x64xf8E4M3FN, "wgmma">
!values8 = tensor<64x128xf8E4M3FN, "shared(transposed)">
!weights = tensor<128x64xbf16, "wgmma">
!values = tensor<64x128xbf16, "shared">
!sums = tensor<128x128xf32, "wgmma">

// REFUSED: error: {{.*}} columns at a time must be a multiple of 16 that divides 128, or 128, got 48
// NONE-NOT: kv.promoted
gpu.module @kernels {
  // Of 8-bit products the one whose sums a loop carries; in the kernels whose schedule asks for it.
  // CHECK-LABEL: gpu.func @asked
  // CHECK:         "kv.dot"(%{{.*}}, %{{.*}}) {transpose_b = false}
  // CHECK:         scf.for
  // CHECK:           "kv.dot"(%{{.*}}, %{{.*}}) {transpose_b = false}
  // CHECK:           "kv.dot"(%{{.*}}, %{{.*}}, %{{.*}}) {kv.promoted = 64 : i64, transpose_b = false}
  // GIVEN-LABEL: gpu.func @asked
  // GIVEN:           "kv.dot"(%{{.*}}, %{{.*}}, %{{.*}}) {kv.promoted = 32 : i64, transpose_b = false}
  gpu.func @asked(%n: i32, %w: !weights8, %v: !values8, %zero: !sums) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {promote = 64 : i64}} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %first = "kv.dot"(%w, %v) {transpose_b = false} : (!weights8, !values8) -> !sums
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %first) -> (!sums) : i32 {
      %fresh = "kv.dot"(%w, %v) {transpose_b = false} : (!weights8, !values8) -> !sums
      %sum = arith.addf %o, %fresh : !sums
      %o2 = "kv.dot"(%w, %v, %sum) {transpose_b = false} : (!weights8, !values8, !sums) -> !sums
      scf.yield %o2 : !sums
    }
    gpu.return
  }

  // CHECK-LABEL: gpu.func @not_asked
  // CHECK-NOT:     kv.promoted
  // CHECK:         gpu.return
  gpu.func @not_asked(%n: i32, %w: !weights8, %v: !values8, %zero: !sums) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {}} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %zero) -> (!sums) : i32 {
      %o2 = "kv.dot"(%w, %v, %o) {transpose_b = false} : (!weights8, !values8, !sums) -> !sums
      scf.yield %o2 : !sums
    }
    gpu.return
  }

  // Products of 16-bit elements are added up in f32 by the tensor cores.
  // CHECK-LABEL: gpu.func @wide
  // CHECK-NOT:     kv.promoted
  // CHECK:         gpu.return
  gpu.func @wide(%n: i32, %w: !weights, %v: !values, %zero: !sums) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {promote = 64 : i64}} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %zero) -> (!sums) : i32 {
      %o2 = "kv.dot"(%w, %v, %o) {transpose_b = false} : (!weights, !values, !sums) -> !sums
      scf.yield %o2 : !sums
    }
    gpu.return
  }

  // Sums that are added outside of the tensor cores: 64 columns of the second product, the other 64, and the first one
  // start in turn, two under way at a time. What is done is added to the sums beside the next.
  // ROTATED-LABEL: gpu.func @rotated
  // ROTATED:         %[[KEYS:.*]] = "kv.make_stages"() {buffer_name = "keys"
  // ROTATED:         %[[VALUES:.*]] = "kv.make_stages"() {buffer_name = "values"
  // ROTATED:         scf.if
  // ROTATED:           scf.for %{{.*}} iter_args(%{{.*}}, %[[C:.*]] = %{{.*}}, %[[W:.*]] = %{{.*}}) ->
  // ROTATED:             %[[V:.*]] = "kv.consumer_wait"(%[[VALUES]],
  // ROTATED:             %[[V0:.*]] = "kv.tile_columns"(%[[V]]) {first_column = 0 : i64}
  // ROTATED:             %[[T0:.*]] = "kv.dot_start"(%[[W]], %[[V0]]) {transpose_b = false}
  // ROTATED:             %[[V1:.*]] = "kv.tile_columns"(%[[V]]) {first_column = 64 : i64}
  // ROTATED:             %[[T1:.*]] = "kv.dot_start"(%[[W]], %[[V1]]) {transpose_b = false}
  // ROTATED-NEXT:        %[[A:.*]]:2 = "kv.dot_wait"(%[[T0]], %[[T1]]) {pending = 1 : i64}
  // ROTATED-NEXT:        %[[O0:.*]] = "kv.tile_add_columns"(%[[C]], %[[A]]#0) {first_column = 0 : i64}
  // ROTATED-NEXT:        %[[R0:.*]] = "kv.tile_ready"(%[[O0]])
  // ROTATED-NEXT:        %[[S:.*]] = "kv.dot_start"(%{{.*}}, %{{.*}}) {transpose_b = true}
  // ROTATED-NEXT:        %[[B:.*]]:2 = "kv.dot_wait"(%[[A]]#1, %[[S]]) {pending = 1 : i64}
  // ROTATED-NEXT:        %[[O1:.*]] = "kv.tile_add_columns"(%[[R0]], %[[B]]#0) {first_column = 64 : i64}
  // ROTATED-NEXT:        %[[R1:.*]] = "kv.tile_ready"(%[[O1]])
  // ROTATED-NEXT:        "kv.consumer_release"(%[[VALUES]],
  // ROTATED-NEXT:        %[[SCORES:.*]] = "kv.dot_wait"(%[[B]]#1) {pending = 0 : i64}
  // ROTATED:             math.exp2 %[[SCORES]]
  // ROTATED:             arith.mulf %[[R1]]
  // ROTATED:             scf.yield
  // The last product has the registers of the scores too: here of 64 columns, as many as there are keys.
  // ROTATED:           "kv.consumer_wait"(%[[VALUES]],
  // ROTATED:           "kv.dot_start"({{.*}}) {transpose_b = false} : ({{.*}}tensor<64x64xf8E4M3FN, "shared(transposed)">) ->
  // ROTATED:           %[[LAST:.*]] = "kv.dot_wait"(%{{.*}}) {pending = 0 : i64}
  // ROTATED-NEXT:      "kv.tile_add_columns"(%{{.*}}, %[[LAST]]) {first_column = 64 : i64}
  // ROTATED:           "kv.consumer_release"(%[[VALUES]],
  gpu.func @rotated(%n: i32, %q: !q8, %zero: !sums, %lowest: !row, %rows: memref<?x128xf32>, %every: tensor<128xi1, "rows(wgmma)">, %at: tensor<128xi32, "rows(wgmma)">) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64, one_wait = true, promote = 64 : i64}} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !keys8} : () -> !kv.stages
    %values = "kv.make_stages"() {buffer_name = "values", copy = "transposed", stages = 2 : i64, tile = !values64} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %r:2 = scf.for %j = %c0 to %n step %c1 iter_args(%m = %lowest, %o = %zero) -> (!row, !sums) : i32 {
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !keys8
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (!q8, !keys8) -> !scores
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      %top = "kv.tile_reduce"(%s) {kind = "max", axis = 1 : i64} : (!scores) -> !row
      %d = arith.subf %m, %top : !row
      %alpha = math.exp2 %d : !row
      %p = math.exp2 %s : !scores
      %w = "kv.cast"(%p) : (!scores) -> !weights64
      %v = "kv.consumer_wait"(%values, %j) : (!kv.stages, i32) -> !values64
      %spread = "kv.tile_broadcast"(%alpha) {dimension = 0 : i64} : (!row) -> !sums
      %scaled = arith.mulf %o, %spread : !sums
      %o2 = "kv.dot"(%w, %v, %scaled) {transpose_b = false} : (!weights64, !values64, !sums) -> !sums
      "kv.consumer_release"(%values, %j) : (!kv.stages, i32) -> ()
      scf.yield %top, %o2 : !row, !sums
    }
    "kv.tile_store_rows"(%r#1, %rows, %every, %at) : (!sums, memref<?x128xf32>, tensor<128xi1, "rows(wgmma)">, tensor<128xi32, "rows(wgmma)">) -> ()
    gpu.return
  }
}

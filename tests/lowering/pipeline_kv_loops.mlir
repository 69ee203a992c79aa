// RUN: kv-opt %s --pipeline-kv-loops | FileCheck %s
// RUN: kv-opt %s --pipeline-kv-loops='products=false lookups=false copies=false' | FileCheck %s --check-prefix=NONE
// RUN: kv-opt %s --pipeline-kv-loops='tables=false' | FileCheck %s --check-prefix=WAIT
// RUN: sed -e '/@rotate(/,/gpu.return/ s/one_wait = false/overlap = false/' %s | kv-opt --pipeline-kv-loops | FileCheck %s --check-prefix=ALONE
// RUN: sed -e '/@rotate(/,/gpu.return/ s/scf.yield/"kv.tile_store_rows"(%o2, %rows, %every, %at) : (!sums, memref<?x128xf32>, tensor<128xi1, "rows(wgmma)">, tensor<128xi32, "rows(wgmma)">) -> () &/' %s | kv-opt --pipeline-kv-loops | FileCheck %s --check-prefix=ALONE
// RUN: sed -e '/@rotate(/,/gpu.return/ s/%c0 =/%given = arith.constant dense<1.0> : !weights &/' -e '/@rotate(/,/gpu.return/ s/(%w, %v, .scaled)/(%given, %v, %o)/' %s | kv-opt --pipeline-kv-loops | FileCheck %s --check-prefix=ALONE
// RUN: sed -e '/@rotate(/,/return/ s/one_wait = false/ping_pong = true/' %s | kv-opt --pipeline-kv-loops | FileCheck %s --check-prefix=TURNS
// RUN: sed -e '/@rotate(/,/return/ s/one_wait = false/one_wait = true/' %s | kv-opt --pipeline-kv-loops | FileCheck %s --check-prefix=ONE
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=pipeline-kv-loops --check-semantics-of=pipeline-kv-loops --lengths=edges -o /dev/null %}
// RUN: sed 's/kind = "tile"/&, producer = false/' %S/Inputs/attention.mlir | kv-opt - --kv-pipeline --target=sm_90a --stop-after=pipeline-kv-loops --check-semantics-of=pipeline-kv-loops --lengths=edges -o /dev/null
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_80 --stop-after=pipeline-kv-loops --check-semantics-of=pipeline-kv-loops --lengths=edges -o /dev/null %}

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!tile = tensor<64x128xbf16, "shared">
!scores = tensor<128x64xf32, "wgmma">
!weights = tensor<128x64xbf16, "wgmma">
!sums = tensor<128x128xf32, "wgmma">
!row = tensor<128xf32, "rows(wgmma)">
!q = tensor<128x128xbf16, "shared">
!keys8 = tensor<64x128xf8E4M3FN, "shared">
!values8 = tensor<64x128xf8E4M3FN, "shared(transposed)">

gpu.module @kernels {
  // The first product of iteration i and the second of iteration i - 1 start together; the first alone is waited for
  // before the softmax, the second behind it. What waits for the second is ready before it: of the factors the vector,
  // not its broadcast, and weights, which come to the registers of the product when it has read those before. The wait and the release of the values lag by one iteration. Before the loop stands
  // the first softmax, behind it the last product; nothing happens where there is no iteration.
  // CHECK-LABEL: gpu.func @rotate
  // CHECK-SAME:    %[[COUNT:[a-z0-9]+]]: i32
  // CHECK:         %[[KEYS:.*]] = "kv.make_stages"() {buffer_name = "keys"
  // CHECK:         %[[VALUES:.*]] = "kv.make_stages"() {buffer_name = "values"
  // CHECK:         %[[SOME:.*]] = arith.cmpi slt, %{{.*}}, %[[COUNT]]
  // CHECK:         scf.if %[[SOME]]
  // CHECK:           "kv.consumer_wait"(%[[KEYS]],
  // CHECK:           "kv.dot"
  // CHECK:           "kv.consumer_release"(%[[KEYS]],
  // CHECK:           math.exp2
  // CHECK-NOT:       "kv.consumer_wait"(%[[VALUES]]
  // CHECK:           scf.for %[[J:.*]] = %{{.*}} iter_args(%{{.*}}, %[[C:.*]] = %{{.*}}, %[[W:.*]] = %{{.*}}) ->
  // CHECK:             "kv.consumer_wait"(%[[KEYS]], %[[J]])
  // CHECK:             %[[BEFORE:.*]] = arith.subi %[[J]],
  // CHECK:             %[[S:.*]] = "kv.dot_start"(%{{.*}}, %{{.*}}) {transpose_b = true}
  // CHECK-NEXT:        %[[V:.*]] = "kv.consumer_wait"(%[[VALUES]], %[[BEFORE]])
  // CHECK-NEXT:        %[[O:.*]] = "kv.dot_start"(%[[W]], %[[V]], %[[C]]) {transpose_b = false}
  // CHECK-NEXT:        %[[BOTH:.*]]:2 = "kv.dot_wait"(%[[S]], %[[O]]) {pending = 1 : i64}
  // CHECK-NEXT:        "kv.consumer_release"(%[[KEYS]], %[[J]])
  // CHECK:             "kv.tile_reduce"(%[[BOTH]]#0)
  // CHECK:             %[[ALPHA:.*]] = math.exp2
  // CHECK:             %[[P:.*]] = math.exp2
  // CHECK:             %[[NARROW:.*]] = arith.truncf %[[P]]
  // CHECK:             %[[AR:.*]] = "kv.tile_ready"(%[[ALPHA]])
  // CHECK:             %[[SPREAD:.*]] = "kv.tile_broadcast"(%[[AR]])
  // CHECK:             %[[DONE:.*]] = "kv.dot_wait"(%[[BOTH]]#1) {pending = 0 : i64}
  // CHECK-NEXT:        "kv.consumer_release"(%[[VALUES]], %[[BEFORE]])
  // CHECK-NEXT:        %[[NEXT:.*]] = "kv.tile_ready"(%[[NARROW]]) {kv.strict}
  // CHECK-NEXT:        arith.mulf %[[DONE]], %[[SPREAD]]
  // CHECK:             scf.yield {{.*}}%[[NEXT]]
  // CHECK:           "kv.consumer_wait"(%[[VALUES]],
  // CHECK:           "kv.dot"
  // CHECK:           "kv.consumer_release"(%[[VALUES]],
  // CHECK:         } else {
  // CHECK-NEXT:      scf.yield
  // CHECK-NOT:     kv.turn
  // CHECK:         "kv.tile_store_rows"
  // NONE-LABEL:  gpu.func @rotate
  // NONE-NOT:      kv.dot_start
  // NONE:          gpu.return
  // Two consumer warpgroups by turns: the last gives the first its turn; each waits, starts its products and passes on;
  // the turn that is left is taken by the first.
  // TURNS-LABEL: gpu.func @rotate
  // TURNS:         "kv.turn_pass"() {groups = "last"}
  // TURNS:         scf.for
  // TURNS:           "kv.turn_wait"() {groups = "all"}
  // TURNS-NEXT:      "kv.dot_start"
  // TURNS:           "kv.dot_start"
  // TURNS-NEXT:      "kv.turn_pass"() {groups = "all"}
  // TURNS-NEXT:      "kv.dot_wait"
  // TURNS:         "kv.turn_wait"() {groups = "first"}
  // Left alone: a schedule without overlap; sums that something else of the iteration reads; a second product that does not
  // need the first.
  // ALONE-LABEL: gpu.func @rotate(
  // ALONE-NOT:     kv.dot_start
  // ALONE:         gpu.return
  // Both products are waited for at once: stages are released, and the softmax follows as it was, weights narrowed.
  // ONE-LABEL: gpu.func @rotate
  // ONE:           scf.for
  // ONE:             %[[S:.*]] = "kv.dot_start"(%{{.*}}, %{{.*}}) {transpose_b = true}
  // ONE:             %[[O:.*]] = "kv.dot_start"({{.*}}) {transpose_b = false}
  // ONE-NEXT:        %[[BOTH:.*]]:2 = "kv.dot_wait"(%[[S]], %[[O]]) {pending = 0 : i64}
  // ONE-NEXT:        "kv.consumer_release"
  // ONE-NEXT:        "kv.consumer_release"
  // ONE-NOT:         kv.tile_ready
  // ONE:             %[[P:.*]] = math.exp2 %[[BOTH]]#0
  // ONE-NEXT:        arith.truncf %[[P]]
  // ONE-NOT:         kv.dot_wait
  // ONE:             arith.mulf %[[BOTH]]#1
  // ONE:             scf.yield
  gpu.func @rotate(%n: i32, %q: !q, %zero: !sums, %lowest: !row, %rows: memref<?x128xf32>, %every: tensor<128xi1, "rows(wgmma)">, %at: tensor<128xi32, "rows(wgmma)">) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64, one_wait = false}} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %values = "kv.make_stages"() {buffer_name = "values", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %r:2 = scf.for %j = %c0 to %n step %c1 iter_args(%m = %lowest, %o = %zero) -> (!row, !sums) : i32 {
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !tile
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (!q, !tile) -> !scores
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      %top = "kv.tile_reduce"(%s) {kind = "max", axis = 1 : i64} : (!scores) -> !row
      %d = arith.subf %m, %top : !row
      %alpha = math.exp2 %d : !row
      %p = math.exp2 %s : !scores
      %w = arith.truncf %p : !scores to !weights
      %v = "kv.consumer_wait"(%values, %j) : (!kv.stages, i32) -> !tile
      %spread = "kv.tile_broadcast"(%alpha) {dimension = 0 : i64} : (!row) -> !sums
      %scaled = arith.mulf %o, %spread : !sums
      %o2 = "kv.dot"(%w, %v, %scaled) {transpose_b = false} : (!weights, !tile, !sums) -> !sums
      "kv.consumer_release"(%values, %j) : (!kv.stages, i32) -> ()
      scf.yield %top, %o2 : !row, !sums
    }
    "kv.tile_store_rows"(%r#1, %rows, %every, %at) : (!sums, memref<?x128xf32>, tensor<128xi1, "rows(wgmma)">, tensor<128xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // Values that are columns of the keys' tile: the second product waits for nothing, and its stage is released behind it.
  // CHECK-LABEL: gpu.func @columns
  // CHECK:         %[[KEYS:.*]] = "kv.make_stages"
  // CHECK:         scf.for %[[I:.*]] = %{{.*}} iter_args
  // CHECK:           %[[K:.*]] = "kv.consumer_wait"(%[[KEYS]], %[[I]]) : (
  // CHECK:           "kv.dot_start"(%{{.*}}, %[[K]]) {transpose_b = true}
  // CHECK:           %[[BEFORE:.*]] = "kv.consumer_wait"(%[[KEYS]], %[[N:.*]]) {kv.awaited}
  // CHECK:           %[[V:.*]] = "kv.tile_columns"(%[[BEFORE]]) {first_column = 0 : i64}
  // CHECK:           "kv.dot_start"(%{{.*}}, %[[V]], %{{.*}}) {transpose_b = false}
  // CHECK:           "kv.dot_wait"(%{{.*}}) {pending = 0 : i64}
  // CHECK:           "kv.consumer_release"(%[[KEYS]], %[[N]])
  gpu.func @columns(%n: i32, %q: !q, %zero: !sums, %rows: memref<?x128xf32>, %every: tensor<128xi1, "rows(wgmma)">, %at: tensor<128xi32, "rows(wgmma)">) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64}} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %zero) -> (!sums) : i32 {
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !tile
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (!q, !tile) -> !scores
      %p = math.exp2 %s : !scores
      %w = arith.truncf %p : !scores to !weights
      %v = "kv.tile_columns"(%k) {first_column = 0 : i64} : (!tile) -> !tile
      %o2 = "kv.dot"(%w, %v, %o) {transpose_b = false} : (!weights, !tile, !sums) -> !sums
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      scf.yield %o2 : !sums
    }
    "kv.tile_store_rows"(%r, %rows, %every, %at) : (!sums, memref<?x128xf32>, tensor<128xi1, "rows(wgmma)">, tensor<128xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // A table of positions, with what it needs, is made when both products have started, and before one is waited for.
  // CHECK-LABEL: gpu.func @tables
  // CHECK:         %[[T:.*]] = "kv.make_table"
  // CHECK:         scf.for
  // CHECK:           "kv.dot_start"(%{{.*}}) {transpose_b = true}
  // CHECK:           "kv.dot_start"(%{{.*}}) {transpose_b = false}
  // CHECK:           arith.cmpi sgt
  // CHECK-NEXT:      scf.if
  // CHECK:             "kv.table_store"(%{{.*}}, %[[T]])
  // CHECK:           "kv.dot_wait"(%{{.*}}) {pending = 1 : i64}
  // CHECK-NOT:       kv.table_store
  // CHECK:           "kv.tile_windows"(%[[T]],
  // CHECK:           "kv.dot_wait"(%{{.*}}) {pending = 0 : i64}
  // WAIT-LABEL:  gpu.func @tables
  // WAIT:          scf.for
  // WAIT:            "kv.dot_wait"(%{{.*}}) {pending = 1 : i64}
  // WAIT:            "kv.table_store"
  // WAIT:            "kv.tile_windows"
  // WAIT:            "kv.dot_wait"(%{{.*}}) {pending = 0 : i64}
  gpu.func @tables(%n: i32, %q: !q, %zero: !sums, %x: tensor<256xf32, "spread:8">, %at: tensor<128xi32, "rows(wgmma)">) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64}} {
    %t = "kv.make_table"() {length = 256 : i64} : () -> !llvm.ptr<3>
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %values = "kv.make_stages"() {buffer_name = "values", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %zero) -> (!sums) : i32 {
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !tile
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (!q, !tile) -> !scores
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      %near = arith.cmpi sgt, %j, %c1 : i32
      scf.if %near {
        "kv.table_store"(%x, %t) {length = 256 : i64, pitch = 256 : i64, span = 256 : i64} : (tensor<256xf32, "spread:8">, !llvm.ptr<3>) -> ()
      }
      %bias = "kv.tile_windows"(%t, %at) {length = 256 : i64} : (!llvm.ptr<3>, tensor<128xi32, "rows(wgmma)">) -> !scores
      %y = arith.addf %s, %bias : !scores
      %p = math.exp2 %y : !scores
      %w = arith.truncf %p : !scores to !weights
      %v = "kv.consumer_wait"(%values, %j) : (!kv.stages, i32) -> !tile
      %o2 = "kv.dot"(%w, %v, %o) {transpose_b = false} : (!weights, !tile, !sums) -> !sums
      "kv.consumer_release"(%values, %j) : (!kv.stages, i32) -> ()
      scf.yield %o2 : !sums
    }
    %true = arith.constant dense<true> : tensor<128xi1, "rows(wgmma)">
    gpu.return
  }

  // The only stage of the keys is released when the scores are there, beside the other product. A turn of three
  // warpgroups lasts until short products are done.
  // CHECK-LABEL: gpu.func @one_stage
  // CHECK:         scf.for
  // CHECK:           "kv.turn_wait"() {groups = "all"}
  // CHECK-NEXT:      %[[S:.*]] = "kv.dot_start"
  // CHECK-NEXT:      %[[O:.*]] = "kv.dot_start"
  // CHECK-NEXT:      %[[FIRST:.*]]:2 = "kv.dot_wait"(%[[S]], %[[O]]) {pending = 1 : i64}
  // CHECK-NEXT:      "kv.consumer_release"(%[[KEYS:.*]], %{{.*}})
  // CHECK-NEXT:      %[[BOTH:.*]]:2 = "kv.dot_wait"(%[[FIRST]]#0, %[[FIRST]]#1) {pending = 0 : i64}
  // CHECK-NEXT:      "kv.turn_pass"() {groups = "all"}
  // CHECK-NEXT:      "kv.consumer_release"
  // CHECK-NOT:       kv.consumer_release
  // CHECK:           math.exp2 %[[BOTH]]#0
  gpu.func @one_stage(%n: i32, %q: tensor<192x64xbf16, "shared">, %zero: tensor<192x64xf32, "wgmma">, %rows: memref<?x64xf32>, %every: tensor<192xi1, "rows(wgmma)">, %at: tensor<192xi32, "rows(wgmma)">) kernel attributes {kv.tiled, kv.block = array<i32: 512, 1, 1>, kv.schedule = {consumers = 3 : i64, one_wait = true, ping_pong = true}} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 1 : i64, tile = tensor<64x64xbf16, "shared">} : () -> !kv.stages
    %values = "kv.make_stages"() {buffer_name = "values", copy = "tma", stages = 1 : i64, tile = tensor<64x64xbf16, "shared">} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %zero) -> (tensor<192x64xf32, "wgmma">) : i32 {
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> tensor<64x64xbf16, "shared">
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<192x64xbf16, "shared">, tensor<64x64xbf16, "shared">) -> tensor<192x64xf32, "wgmma">
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      %p = math.exp2 %s : tensor<192x64xf32, "wgmma">
      %w = arith.truncf %p : tensor<192x64xf32, "wgmma"> to tensor<192x64xbf16, "wgmma">
      %v = "kv.consumer_wait"(%values, %j) : (!kv.stages, i32) -> tensor<64x64xbf16, "shared">
      %o2 = "kv.dot"(%w, %v, %o) {transpose_b = false} : (tensor<192x64xbf16, "wgmma">, tensor<64x64xbf16, "shared">, tensor<192x64xf32, "wgmma">) -> tensor<192x64xf32, "wgmma">
      "kv.consumer_release"(%values, %j) : (!kv.stages, i32) -> ()
      scf.yield %o2 : tensor<192x64xf32, "wgmma">
    }
    "kv.tile_store_rows"(%r, %rows, %every, %at) : (tensor<192x64xf32, "wgmma">, memref<?x64xf32>, tensor<192xi1, "rows(wgmma)">, tensor<192xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // Of 8-bit products, which take no longer than the exponentials, a turn lasts until both are done.
  // CHECK-LABEL: gpu.func @short_turns
  // CHECK:         scf.for
  // CHECK:           "kv.turn_wait"() {groups = "all"}
  // CHECK-NEXT:      %[[S:.*]] = "kv.dot_start"
  // CHECK-NEXT:      %[[O:.*]] = "kv.dot_start"
  // CHECK-NEXT:      "kv.dot_wait"(%[[S]], %[[O]]) {pending = 0 : i64}
  // CHECK-NEXT:      "kv.turn_pass"() {groups = "all"}
  // CHECK:           math.exp2
  // CHECK:           "kv.cast"
  gpu.func @short_turns(%n: i32, %q: tensor<128x128xf8E4M3FN, "shared">, %zero: !sums, %rows: memref<?x128xf32>, %every: tensor<128xi1, "rows(wgmma)">, %at: tensor<128xi32, "rows(wgmma)">) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64, one_wait = true, ping_pong = true}} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !keys8} : () -> !kv.stages
    %values = "kv.make_stages"() {buffer_name = "values", copy = "transposed", stages = 2 : i64, tile = !values8} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %zero) -> (!sums) : i32 {
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !keys8
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<128x128xf8E4M3FN, "shared">, !keys8) -> !scores
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      %p = math.exp2 %s : !scores
      %w = "kv.cast"(%p) : (!scores) -> tensor<128x64xf8E4M3FN, "wgmma">
      %v = "kv.consumer_wait"(%values, %j) : (!kv.stages, i32) -> !values8
      %o2 = "kv.dot"(%w, %v, %o) {transpose_b = false} : (tensor<128x64xf8E4M3FN, "wgmma">, !values8, !sums) -> !sums
      "kv.consumer_release"(%values, %j) : (!kv.stages, i32) -> ()
      scf.yield %o2 : !sums
    }
    "kv.tile_store_rows"(%r, %rows, %every, %at) : (!sums, memref<?x128xf32>, tensor<128xi1, "rows(wgmma)">, tensor<128xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // Where the consumers copy themselves: as many copies as there are stages before the loop, and in it the copy of a
  // later iteration as soon as its stage is released.
  // CHECK-LABEL: gpu.func @copies
  // CHECK-SAME:    !kv.cache<{{.*}}, %[[COUNT:[a-z0-9]+]]: i32
  // CHECK:         %[[KEYS:.*]] = "kv.make_stages"
  // CHECK:         %[[AHEAD:.*]] = arith.minsi %[[COUNT]],
  // CHECK:         scf.for %[[I:.*]] = %{{.*}} to %[[AHEAD]] step
  // CHECK:           "kv.producer_acquire"(%[[KEYS]], %[[I]])
  // CHECK:           "kv.copy_start"(%[[KEYS]], %[[I]], {{.*}}) {first_column = 0 : i64, kv.prefetched
  // CHECK:         scf.for %[[J:.*]] = %{{.*}} to %[[COUNT]] step
  // CHECK-NOT:       kv.copy_start
  // CHECK:           "kv.consumer_wait"(%[[KEYS]], %[[J]])
  // CHECK:           "kv.consumer_release"(%[[KEYS]], %[[J]])
  // CHECK:           %[[LATER:.*]] = arith.addi %[[J]],
  // CHECK:           %[[MORE:.*]] = arith.cmpi slt, %[[LATER]], %[[COUNT]]
  // CHECK:           scf.if %[[MORE]] {
  // CHECK:             "kv.producer_acquire"(%[[KEYS]], %[[LATER]])
  // CHECK:             "kv.copy_start"(%[[KEYS]], %[[LATER]],
  // NONE-LABEL:  gpu.func @copies
  // NONE-NOT:      kv.prefetched
  // NONE:          gpu.return
  gpu.func @copies(%c: !cache, %n: i32, %q: !q) kernel attributes {kv.tiled, kv.block = array<i32: 256, 1, 1>} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "cp_async", stages = 3 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c64 = arith.constant 64 : i32
    scf.for %j = %c0 to %n step %c1 : i32 {
      %first = arith.muli %j, %c64 : i32
      "kv.producer_acquire"(%keys, %j) : (!kv.stages, i32) -> ()
      "kv.copy_start"(buffer = %keys, n = %j, cache = %c, batch = %c0, head = %c0, first = %first, count = %n) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32) -> ()
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !tile
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (!q, !tile) -> !scores
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
    }
    gpu.return
  }

  // A producer that copies rows by cp.async finishes a copy when it has started the next, and the last one behind the
  // loop. What is converted on its way needs its stage only then.
  // CHECK-LABEL: gpu.func @rows
  // CHECK-SAME:    %[[COUNT:[a-z0-9]+]]: i32) kernel
  // CHECK:         %[[KEYS:.*]] = "kv.make_stages"
  // CHECK:         scf.for %[[J:.*]] = %{{.*}} to %[[COUNT]] step
  // CHECK-NOT:       kv.producer_acquire
  // CHECK:           "kv.copy_start"(%[[KEYS]], %[[J]],
  // CHECK:           %[[N:.*]] = arith.addi %[[J]], %{{.*}}
  // CHECK:           scf.if
  // CHECK:             "kv.producer_acquire"(%[[KEYS]], %[[N]])
  // CHECK:             "kv.copy_finish"(%[[KEYS]], %[[N]]) {pending = 1 : i64}
  // CHECK:         scf.if
  // CHECK:           "kv.producer_acquire"(%[[KEYS]],
  // CHECK:           "kv.copy_finish"(%[[KEYS]], {{.*}}) {pending = 0 : i64}
  // CHECK:         gpu.return
  // NONE-LABEL:  gpu.func @rows
  // NONE-NOT:      kv.copy_finish
  // NONE:          gpu.return
  gpu.func @rows(%c: !fp8, %n: i32) kernel attributes {kv.tiled, kv.block = array<i32: 256, 1, 1>} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "staged", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c64 = arith.constant 64 : i32
    scf.for %j = %c0 to %n step %c1 : i32 {
      %first = arith.muli %j, %c64 : i32
      "kv.producer_acquire"(%keys, %j) : (!kv.stages, i32) -> ()
      "kv.copy_start"(buffer = %keys, n = %j, cache = %c, batch = %c0, head = %c0, first = %first, count = %n) {first_column = 0 : i64} : (!kv.stages, i32, !fp8, i32, i32, i32, i32) -> ()
    }
    gpu.return
  }

  // A producer's loop looks pages up one iteration before it copies from them.
  // CHECK-LABEL: gpu.func @lookups
  // CHECK:         %[[P0:.*]] = "kv.tile_pages"
  // CHECK:         scf.for %[[J:.*]] = %{{.*}} iter_args(%[[P:.*]] = %[[P0]]) -> (i32)
  // CHECK:           %[[FOLLOWING:.*]] = arith.addi %[[J]],
  // CHECK:           %[[AT:.*]] = arith.muli %[[FOLLOWING]],
  // CHECK:           %[[NEXT:.*]] = "kv.tile_pages"(%{{.*}}, %{{.*}}, %[[AT]], %{{.*}})
  // CHECK:           "kv.producer_acquire"(%{{.*}}, %[[J]])
  // CHECK:           "kv.copy_start"({{.*}}, %[[P]])
  // CHECK:           scf.yield %[[NEXT]] : i32
  // NONE-LABEL:  gpu.func @lookups
  // NONE:          scf.for
  // NONE:            "kv.tile_pages"
  gpu.func @lookups(%c: !cache, %n: i32, %m: !map) kernel attributes {kv.tiled, kv.block = array<i32: 256, 1, 1>} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 3 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c64 = arith.constant 64 : i32
    scf.for %j = %c0 to %n step %c1 : i32 {
      %first = arith.muli %j, %c64 : i32
      %p = "kv.tile_pages"(%c, %c0, %first, %n) {rows = 64 : i64, step = 16 : i64} : (!cache, i32, i32, i32) -> i32
      "kv.producer_acquire"(%keys, %j) : (!kv.stages, i32) -> ()
      "kv.copy_start"(buffer = %keys, n = %j, cache = %c, batch = %c0, head = %c0, first = %first, count = %n,
          descriptor = %m, pages = %p)
          {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, !map, i32) -> ()
    }
    gpu.return
  }

  // A loop in a loop that is rewritten stays as it is.
  // CHECK-LABEL: gpu.func @nested
  // CHECK:         scf.for {{.*}} iter_args
  // CHECK:           "kv.copy_start"
  // CHECK:           scf.for
  // CHECK-NEXT:        gpu.printf
  gpu.func @nested(%c: !cache, %n: i32, %m: !map) kernel attributes {kv.tiled, kv.block = array<i32: 256, 1, 1>} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 3 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c64 = arith.constant 64 : i32
    scf.for %j = %c0 to %n step %c1 : i32 {
      %first = arith.muli %j, %c64 : i32
      %p = "kv.tile_pages"(%c, %c0, %first, %n) {rows = 64 : i64, step = 16 : i64} : (!cache, i32, i32, i32) -> i32
      "kv.producer_acquire"(%keys, %j) : (!kv.stages, i32) -> ()
      "kv.copy_start"(buffer = %keys, n = %j, cache = %c, batch = %c0, head = %c0, first = %first, count = %n,
          descriptor = %m, pages = %p)
          {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, !map, i32) -> ()
      scf.for %i = %c0 to %j step %c1 : i32 {
        gpu.printf "%d", %i : i32
      }
    }
    gpu.return
  }

  // Beside products by mma.sync threads wait for groups of copies: once an iteration, when everybody has read what was
  // there before; pages of a later tile are looked up then, and its copy starts behind the product. What is converted on
  // its way is finished before the wait. Before the loop the first tiles are started, those that there are.
  // CHECK-LABEL: gpu.func @groups
  // CHECK-SAME:    %[[COUNT:[a-z0-9]+]]: i32
  // CHECK:         %[[K:.*]] = "kv.make_stages"() {buffer_name = "keys"
  // CHECK:         %[[V:.*]] = "kv.make_stages"() {buffer_name = "values"
  // CHECK:         "kv.copy_wait"() {pending = 0 : i64}
  // CHECK:         scf.if
  // CHECK:           "kv.tile_row_pages"
  // CHECK:           "kv.copy_start"(%[[K]],
  // CHECK:           "kv.copy_start"(%[[V]],
  // CHECK:         "kv.copy_commit"
  // CHECK:         scf.if
  // CHECK:         "kv.copy_commit"
  // CHECK:         scf.for %[[J:[a-z0-9]+]] =
  // CHECK-NEXT:      "kv.copy_finish"(%[[V]], %[[J]]) {pending = 1 : i64}
  // CHECK-NEXT:      "kv.copy_wait"() {pending = 1 : i64}
  // CHECK:           %[[LATER:.*]] = arith.addi %[[J]],
  // CHECK:           %[[HELD:.*]] = arith.minsi %[[LATER]],
  // CHECK:           %[[PAGES:.*]] = "kv.tile_row_pages"(%{{.*}}, %{{.*}}, %[[HELD]],
  // CHECK-NEXT:      "kv.consumer_wait"(%[[K]], %[[J]]) {kv.awaited}
  // CHECK-NEXT:      "kv.dot"
  // CHECK-NEXT:      %[[MORE:.*]] = arith.cmpi slt, %[[LATER]], %[[COUNT]]
  // CHECK-NEXT:      scf.if %[[MORE]]
  // CHECK-NEXT:        "kv.copy_start"(%[[K]], %[[HELD]], {{.*}}, %[[PAGES]])
  // CHECK-NEXT:        "kv.copy_start"(%[[V]], %[[HELD]],
  // CHECK:           "kv.copy_commit"
  // CHECK-NOT:       "kv.copy_start"
  // CHECK:         gpu.return
  // NONE-LABEL:  gpu.func @groups
  // NONE-NOT:      kv.copy_wait
  // NONE-NOT:      kv.awaited
  // NONE:          gpu.return
  gpu.func @groups(%n: i32, %c: !cache, %f: !fp8, %q: tensor<64x128xbf16, "mma">) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {instruction = "mma.sync"}} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "cp_async", stages = 3 : i64, tile = !tile} : () -> !kv.stages
    %values = "kv.make_stages"() {buffer_name = "values", copy = "staged", stages = 3 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    scf.for %j = %c0 to %n step %c1 : i32 {
      %p = "kv.tile_row_pages"(%c, %c0, %j, %n) {rows = 64 : i64} : (!cache, i32, i32, i32) -> i32
      "kv.producer_acquire"(%keys, %j) : (!kv.stages, i32) -> ()
      "kv.copy_start"(%keys, %j, %c, %c0, %c0, %j, %n, %p) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0>} : (!kv.stages, i32, !cache, i32, i32, i32, i32, i32) -> ()
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !tile
      "kv.producer_acquire"(%values, %j) : (!kv.stages, i32) -> ()
      "kv.copy_start"(%values, %j, %f, %c0, %c0, %j, %n) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0>} : (!kv.stages, i32, !fp8, i32, i32, i32, i32) -> ()
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<64x128xbf16, "mma">, !tile) -> tensor<64x64xf32, "mma">
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      %v = "kv.consumer_wait"(%values, %j) : (!kv.stages, i32) -> !tile
      %w = arith.truncf %s : tensor<64x64xf32, "mma"> to tensor<64x64xbf16, "mma">
      %o = "kv.dot"(%w, %v) {transpose_b = false} : (tensor<64x64xbf16, "mma">, !tile) -> tensor<64x128xf32, "mma">
      "kv.consumer_release"(%values, %j) : (!kv.stages, i32) -> ()
    }
    gpu.return
  }

  // Left alone: a kernel that is not over tiles.
  // CHECK-LABEL: gpu.func @plain
  // CHECK-NOT:     scf.if
  // CHECK:         gpu.return
  gpu.func @plain(%n: i32) kernel {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 3 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    scf.for %j = %c0 to %n step %c1 : i32 {
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !tile
    }
    gpu.return
  }
}

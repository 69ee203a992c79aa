// RUN: kv-opt %s --select-kv-copies | FileCheck %s
// RUN: kv-opt %s --select-kv-copies='stages=4' | FileCheck %s --check-prefix=STAGES
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=select-kv-copies --check-semantics-of=select-kv-copies --lengths=edges -o /dev/null %}

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!plain = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!narrow = !kv.cache<"paged", bf16, 8 : i64, 96 : i64, false, 16 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!tile = tensor<64x128xbf16, "shared">
!acc = tensor<64x64xf32, "wgmma">

gpu.module @kernels {
  // Keys and values of a collection by TMA: a circular buffer each, of as many stages as the schedule says, and both ask
  // for the pages of the keys' table. Values, whose rows past the end matter, are cleared after the wait; a tile is
  // released behind its last use.
  // CHECK-LABEL: gpu.func @tma
  // CHECK-DAG:     %[[KEYS:.*]] = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 3 : i64, tile = tensor<64x128xbf16, "shared">}
  // CHECK-DAG:     %[[VALUES:.*]] = "kv.make_stages"() {buffer_name = "values", copy = "tma", stages = 3 : i64, tile = tensor<64x128xbf16, "shared">}
  // CHECK:         %[[K:.*]] = "kv.key_cache"
  // CHECK:         %[[V:.*]] = "kv.value_cache"
  // CHECK:         scf.for %[[J:.*]] = %[[LOW:.*]] to
  // CHECK:           %[[N:.*]] = arith.subi %[[J]], %[[LOW]]
  // CHECK:           %[[P:.*]] = "kv.tile_pages"(%[[K]], {{.*}}) {rows = 64 : i64, step = 16 : i64}
  // CHECK:           "kv.producer_acquire"(%[[KEYS]], %[[N]])
  // CHECK:           "kv.copy_start"(%[[KEYS]], %[[N]], %[[K]], {{.*}}, %[[P]])
  // CHECK:           %[[KT:.*]] = "kv.consumer_wait"(%[[KEYS]], %[[N]])
  // CHECK-NOT:       "kv.tile_clear"
  // CHECK:           "kv.tile_pages"(%[[K]],
  // CHECK:           "kv.copy_start"(%[[VALUES]], {{.*}}, %[[V]],
  // CHECK:           %[[VT:.*]] = "kv.consumer_wait"(%[[VALUES]],
  // CHECK:           %[[BEGIN:.*]] = arith.subi
  // CHECK:           %[[END:.*]] = arith.subi
  // CHECK:           %[[CLEAR:.*]] = "kv.tile_clear"(%[[VT]], %[[BEGIN]], %[[END]])
  // CHECK:           "kv.dot"(%{{.*}}, %[[KT]])
  // CHECK:           "kv.consumer_release"(%[[KEYS]]
  // CHECK:           arith.truncf
  // CHECK:           "kv.dot"(%{{.*}}, %[[CLEAR]],
  // CHECK:           "kv.consumer_release"(%[[VALUES]]
  // STAGES-LABEL: gpu.func @tma
  // STAGES-COUNT-2: stages = 4 : i64
  gpu.func @tma(%pool: !pool, %layer: i32, %b: i32, %low: i32, %n: i32, %q: !tile, %start: tensor<64x128xf32, "wgmma">, %m: !map) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {stages = 3 : i64}} {
    %c1 = arith.constant 1 : i32
    %keys = "kv.key_cache"(%pool, %layer) : (!pool, i32) -> !cache
    %values = "kv.value_cache"(%pool, %layer) : (!pool, i32) -> !cache
    %r = scf.for %j = %low to %n step %c1 iter_args(%o = %start) -> (tensor<64x128xf32, "wgmma">) : i32 {
      %k = "kv.tile_load"(%keys, %b, %b, %j, %low, %n, %m) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32, !map) -> !tile
      %v = "kv.tile_load"(%values, %b, %b, %j, %low, %n, %m) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32, !map) -> !tile
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (!tile, !tile) -> !acc
      %p = arith.truncf %s : !acc to tensor<64x64xbf16, "wgmma">
      %o2 = "kv.dot"(%p, %v, %o) {transpose_b = false} : (tensor<64x64xbf16, "wgmma">, !tile, tensor<64x128xf32, "wgmma">) -> tensor<64x128xf32, "wgmma">
      scf.yield %o2 : tensor<64x128xf32, "wgmma">
    }
    gpu.return
  }

  // What a load promises its copy keeps.
  // CHECK-LABEL: gpu.func @promises
  // CHECK:         "kv.copy_start"({{.*}}) {constant, existing, first_column
  gpu.func @promises(%c: !cache, %n: i32, %q: !tile, %m: !map) kernel attributes {kv.tiled, kv.block = array<i32: 256, 1, 1>, kv.schedule = {producer = true}} {
    %c0 = arith.constant 0 : i32
    %k = "kv.tile_load"(%c, %c0, %c0, %c0, %c0, %n, %m) {constant, existing, first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32, !map) -> !tile
    %s = "kv.dot"(%q, %k) {transpose_b = true} : (!tile, !tile) -> !acc
    gpu.return
  }

  // A loop in another, as of persistent blocks: uses go on counting from round to round, carried by the outer loop.
  // CHECK-LABEL: gpu.func @rounds
  // CHECK:         scf.for {{.*}} iter_args(%[[BEFORE:.*]] = %{{.*}}) -> (i32)
  // CHECK:           scf.for %[[J:.*]] = %[[LOW:.*]] to %[[HIGH:.*]] step
  // CHECK:             %[[INSIDE:.*]] = arith.subi %[[J]], %[[LOW]]
  // CHECK:             %[[N:.*]] = arith.addi %[[BEFORE]], %[[INSIDE]]
  // CHECK:             "kv.producer_acquire"(%{{.*}}, %[[N]])
  // CHECK:           %[[ALL:.*]] = arith.subi %[[HIGH]], %[[LOW]]
  // CHECK:           %[[COUNT:.*]] = arith.maxsi %[[ALL]], %
  // CHECK:           %[[AFTER:.*]] = arith.addi %[[BEFORE]], %[[COUNT]]
  // CHECK:           scf.yield %[[AFTER]] : i32
  // STAGES-LABEL: gpu.func @rounds
  gpu.func @rounds(%c: !cache, %low: i32, %n: i32, %q: !tile) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %c1 = arith.constant 1 : i32
    scf.for %t = %low to %n step %c1 : i32 {
      scf.for %j = %low to %t step %c1 : i32 {
        %k = "kv.tile_load"(%c, %t, %t, %j, %low, %n) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> !tile
        %s = "kv.dot"(%q, %k) {transpose_b = true} : (!tile, !tile) -> !acc
      }
    }
    gpu.return
  }

  // Rows of a buffer which products read, in a loop of a kernel with a producer: copied ahead, numbered by the loop, and
  // released when rows have been stored through them.
  // CHECK-LABEL: gpu.func @rows
  // CHECK:         %[[ROWS:.*]] = "kv.make_stages"() {buffer_name = "rows", copy = "cp_async", stages = 2 : i64, tile = tensor<64x128xbf16, "shared">}
  // CHECK:         scf.for {{.*}} iter_args(%[[N:.*]] = %{{.*}}) -> (i32)
  // CHECK:           "kv.producer_acquire"(%[[ROWS]], %[[N]])
  // CHECK-NEXT:      "kv.copy_rows_start"(%[[ROWS]], %[[N]], %{{.*}}, %{{.*}}, %{{.*}})
  // CHECK-NEXT:      "kv.consumer_wait"(%[[ROWS]], %[[N]])
  // CHECK:           "kv.tile_store_rows"
  // CHECK-NEXT:      "kv.consumer_release"(%[[ROWS]], %[[N]])
  // CHECK:           %[[NEXT:.*]] = arith.addi %[[N]], %
  // CHECK:           scf.yield %[[NEXT]]
  // STAGES-LABEL: gpu.func @rows
  gpu.func @rows(%query: memref<?x128xbf16>, %out: memref<?x64xbf16>, %k: !tile, %low: i32, %n: i32, %true: tensor<64xi1, "rows(wgmma)">, %at: tensor<64xi32, "rows(wgmma)">) kernel attributes {kv.tiled, kv.block = array<i32: 256, 1, 1>, kv.schedule = {consumers = 1 : i64, producer = true, query_stages = 2 : i64}} {
    %c1 = arith.constant 1 : i32
    scf.for %t = %low to %n step %c1 : i32 {
      %q = "kv.tile_load_rows"(%query, %true, %at) : (memref<?x128xbf16>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> !tile
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (!tile, !tile) -> !acc
      %o = arith.truncf %s : !acc to tensor<64x64xbf16, "wgmma">
      "kv.tile_store_rows"(%o, %out, %true, %at) : (tensor<64x64xbf16, "wgmma">, memref<?x64xbf16>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    }
    gpu.return
  }

  // Two tiles beside one another are two copies to one stage, the second of which arrives on its barrier; so do rows of an
  // inner loop. Both have the stages of keys, and wait no longer than for the copies' start.
  // CHECK-LABEL: gpu.func @beside
  // CHECK-DAG:     %[[KEYS:.*]] = "kv.make_stages"() {buffer_name = "keys", copy = "cp_async", stages = 3 : i64, tile = tensor<64x128xbf16, "shared">}
  // CHECK-DAG:     %[[ROWS:.*]] = "kv.make_stages"() {buffer_name = "rows", copy = "cp_async", stages = 3 : i64, tile = tensor<64x128xbf16, "shared">}
  // CHECK:           "kv.producer_acquire"(%[[KEYS]], %[[N:[0-9]+]])
  // CHECK-NEXT:      "kv.copy_rows_start"(%[[KEYS]], %[[N]], {{.*}}) {columns = 64 : i64}
  // CHECK-NEXT:      %[[P:.*]] = "kv.tile_row_pages"(
  // CHECK-NEXT:      "kv.copy_start"(%[[KEYS]], %[[N]], {{.*}}, %[[P]]) {first_column = 32 : i64, {{.*}}tile_column = 64 : i64}
  // CHECK-NEXT:      %[[K:.*]] = "kv.consumer_wait"(%[[KEYS]], %[[N]])
  // CHECK:           "kv.copy_rows_start"(%[[ROWS]], {{.*}}) {async_arrive}
  // CHECK:           "kv.dot"(%{{.*}}, %[[K]])
  // CHECK-NEXT:      "kv.consumer_release"(%[[KEYS]], %[[N]])
  // CHECK:           "kv.consumer_release"(%[[ROWS]],
  // STAGES-LABEL: gpu.func @beside
  // STAGES-COUNT-2: stages = 4 : i64
  gpu.func @beside(%c: !narrow, %rows: memref<?x64xbf16>, %values: memref<?x128xbf16>, %q: !tile, %start: tensor<64x128xf32, "wgmma">, %low: i32, %n: i32, %true: tensor<64xi1, "rows(wgmma)">, %at: tensor<64xi32, "rows(wgmma)">) kernel attributes {kv.tiled, kv.block = array<i32: 256, 1, 1>, kv.schedule = {consumers = 1 : i64, producer = true, stages = 3 : i64}} {
    %c1 = arith.constant 1 : i32
    scf.for %t = %low to %n step %c1 : i32 {
      %r = scf.for %j = %low to %n step %c1 iter_args(%o = %start) -> (tensor<64x128xf32, "wgmma">) : i32 {
        %a = "kv.tile_load_rows"(%rows, %true, %at) : (memref<?x64xbf16>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> tensor<64x64xbf16, "shared">
        %b = "kv.tile_load"(%c, %low, %low, %j, %low, %n) {first_column = 32 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!narrow, i32, i32, i32, i32, i32) -> tensor<64x64xbf16, "shared">
        %k = "kv.tile_concatenate"(%a, %b) : (tensor<64x64xbf16, "shared">, tensor<64x64xbf16, "shared">) -> !tile
        %v = "kv.tile_load_rows"(%values, %true, %at) : (memref<?x128xbf16>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> !tile
        %s = "kv.dot"(%q, %k) {transpose_b = true} : (!tile, !tile) -> !acc
        %p = arith.truncf %s : !acc to tensor<64x64xbf16, "wgmma">
        %o2 = "kv.dot"(%p, %v, %o) {transpose_b = false} : (tensor<64x64xbf16, "wgmma">, !tile, tensor<64x128xf32, "wgmma">) -> tensor<64x128xf32, "wgmma">
        scf.yield %o2 : tensor<64x128xf32, "wgmma">
      }
    }
    gpu.return
  }

  // Without a descriptor: stored elements by cp.async, 8-bit ones are staged, others converted. Outside of a loop a
  // buffer has one stage. Buffers of one name are numbered.
  // CHECK-LABEL: gpu.func @others
  // CHECK-DAG:     {buffer_name = "tile", copy = "cp_async", stages = 1 : i64, tile = tensor<64x128xbf16, "shared">}
  // CHECK-DAG:     {buffer_name = "tile2", copy = "staged", stages = 1 : i64, tile = tensor<64x128xbf16, "shared">}
  // CHECK-DAG:     {buffer_name = "tile3", copy = "cp_async", stages = 1 : i64, tile = tensor<64x96xbf16, "shared">}
  // CHECK-DAG:     {buffer_name = "tile4", copy = "cp_async", stages = 1 : i64, tile = tensor<64x64xbf16, "shared">}
  // CHECK-NOT:     "kv.tile_pages"
  // CHECK:         %[[P:.*]] = "kv.tile_row_pages"(%{{.*}}, {{.*}}) {rows = 64 : i64}
  // CHECK:         "kv.copy_start"({{.*}}, %[[P]]) {{.*}}1, 0, 1, 0, 0>
  // CHECK-NOT:     "kv.tile_load"
  // CHECK:         gpu.return
  // STAGES-LABEL: gpu.func @others
  // STAGES-COUNT-4: stages = 1 : i64
  gpu.func @others(%c: !cache, %f: !fp8, %d: !narrow, %i: i32, %later: i32) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> !tile
    %1 = "kv.tile_load"(%f, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!fp8, i32, i32, i32, i32, i32) -> !tile
    %2 = "kv.tile_load"(%d, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!narrow, i32, i32, i32, i32, i32) -> tensor<64x96xbf16, "shared">
    %3 = "kv.tile_load"(%c, %i, %i, %later, %i, %i) {first_column = 64 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x64xbf16, "shared">
    %s = "kv.dot"(%0, %1) {transpose_b = true} : (!tile, !tile) -> !acc
    %t = "kv.dot"(%2, %2) {transpose_b = true} : (tensor<64x96xbf16, "shared">, tensor<64x96xbf16, "shared">) -> !acc
    %u = "kv.dot"(%3, %3) {transpose_b = true} : (tensor<64x64xbf16, "shared">, tensor<64x64xbf16, "shared">) -> !acc
    gpu.return
  }

  // Values that are columns of the keys: one copy, whose rows before the first that matters are cleared for both, and
  // which is released behind the product that reads some of its columns.
  // CHECK-LABEL: gpu.func @columns
  // CHECK:         %[[KEYS:.*]] = "kv.make_stages"() {buffer_name = "tile", copy = "cp_async", stages = 2 : i64, tile = tensor<64x128xbf16, "shared">}
  // CHECK-NOT:     "kv.make_stages"
  // CHECK:         scf.for
  // CHECK:           "kv.copy_start"(%[[KEYS]],
  // CHECK:           %[[TILE:.*]] = "kv.consumer_wait"(%[[KEYS]],
  // CHECK:           %[[FIRST:.*]] = arith.subi %[[BEGIN:.*]], %
  // CHECK:           %[[CLEAR:.*]] = "kv.tile_clear"(%[[TILE]], %[[FIRST]],
  // CHECK:           %[[PART:.*]] = "kv.tile_columns"(%[[CLEAR]]) {first_column = 64 : i64} : (tensor<64x128xbf16, "shared">) -> tensor<64x64xbf16, "shared">
  // CHECK:           "kv.dot"(%{{.*}}, %[[CLEAR]])
  // CHECK:           "kv.dot"(%{{.*}}, %[[PART]])
  // CHECK:           "kv.consumer_release"(%[[KEYS]],
  gpu.func @columns(%c: !cache, %b: i32, %begin: i32, %n: i32, %q: !tile) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {instruction = "mma.sync"}} {
    %c1 = arith.constant 1 : i32
    %c0 = arith.constant 0 : i32
    scf.for %j = %c0 to %n step %c1 : i32 {
      %k = "kv.tile_load"(%c, %b, %b, %j, %c0, %n) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> !tile
      %v = "kv.tile_load"(%c, %b, %b, %j, %begin, %n) {first_column = 64 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x64xbf16, "shared">
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (!tile, !tile) -> tensor<64x64xf32, "mma">
      %p = arith.truncf %s : tensor<64x64xf32, "mma"> to tensor<64x64xbf16, "mma">
      %o = "kv.dot"(%p, %v) {transpose_b = false} : (tensor<64x64xbf16, "mma">, tensor<64x64xbf16, "shared">) -> tensor<64x64xf32, "mma">
    }
    gpu.return
  }

  // Stages and phases are counted by iterations: a loop in steps of a tile's rows becomes one in steps of 1.
  // CHECK-LABEL: gpu.func @steps
  // CHECK:         %[[DISTANCE:.*]] = arith.addi %{{.*}}, %{{.*}} : i32
  // CHECK:         %[[TRIPS:.*]] = arith.divsi %[[DISTANCE]], %c64_i32
  // CHECK:         scf.for %[[I:.*]] = %{{.*}} to %[[TRIPS]] step %
  // CHECK-NEXT:      %[[MOVED:.*]] = arith.muli %[[I]], %c64_i32
  // CHECK-NEXT:      %[[J:.*]] = arith.addi %{{.*}}, %[[MOVED]]
  // CHECK:           %[[N:.*]] = arith.subi %[[I]],
  // CHECK:           "kv.copy_start"(%{{.*}}, %[[N]], %{{.*}}, %{{.*}}, %{{.*}}, %[[J]],
  gpu.func @steps(%c: !cache, %b: i32, %begin: i32, %n: i32, %q: !tile) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %c64_i32 = arith.constant 64 : i32
    %c0 = arith.constant 0 : i32
    scf.for %j = %begin to %n step %c64_i32 : i32 {
      %k = "kv.tile_load"(%c, %b, %b, %j, %c0, %n) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> !tile
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (!tile, !tile) -> !acc
    }
    gpu.return
  }

  // Parts of the columns of a tile that TMA brings, where the first product reads it along them; of one copy with values,
  // which are cleared with it, whatever brings it.
  // CHECK-LABEL: gpu.func @parts
  // CHECK:         %[[KEYS:.*]] = "kv.make_stages"() {buffer_name = "tile", copy = "tma", parts = 2 : i64, stages = 2 : i64
  // CHECK-NOT:     "kv.make_stages"
  // CHECK:           %[[TILE:.*]] = "kv.consumer_wait"(%[[KEYS]], %{{.*}}) {first_part}
  // CHECK:           %[[CLEAR:.*]] = "kv.tile_clear"(%[[TILE]],
  // CHECK:           %[[PART:.*]] = "kv.tile_columns"(%[[CLEAR]]) {first_column = 64 : i64}
  // CHECK:           "kv.dot"(%{{.*}}, %[[CLEAR]])
  // CHECK:           "kv.dot"(%{{.*}}, %[[PART]])
  // CHECK:           "kv.consumer_release"(%[[KEYS]],
  gpu.func @parts(%c: !cache, %b: i32, %begin: i32, %n: i32, %q: !tile, %m: !map) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {parts = 4 : i64}} {
    %c1 = arith.constant 1 : i32
    %c0 = arith.constant 0 : i32
    scf.for %j = %c0 to %n step %c1 : i32 {
      %k = "kv.tile_load"(%c, %b, %b, %j, %c0, %n, %m) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32, !map) -> !tile
      %v = "kv.tile_load"(%c, %b, %b, %j, %begin, %n) {first_column = 64 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x64xbf16, "shared">
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (!tile, !tile) -> !acc
      %p = arith.truncf %s : !acc to tensor<64x64xbf16, "wgmma">
      %o = "kv.dot"(%p, %v) {transpose_b = false} : (tensor<64x64xbf16, "wgmma">, tensor<64x64xbf16, "shared">) -> !acc
    }
    gpu.return
  }

  // The product of swapped operands reads the tile as A, whole.
  // CHECK-LABEL: gpu.func @no_parts
  // CHECK:         "kv.make_stages"() {buffer_name = "tile", copy = "tma", stages = 2 : i64
  gpu.func @no_parts(%c: !cache, %b: i32, %n: i32, %q: tensor<16x128xbf16, "shared">, %m: !map) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {parts = 2 : i64, swapped = true}} {
    %c1 = arith.constant 1 : i32
    %c0 = arith.constant 0 : i32
    scf.for %j = %c0 to %n step %c1 : i32 {
      %k = "kv.tile_load"(%c, %b, %b, %j, %c0, %n, %m) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32, !map) -> !tile
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<16x128xbf16, "shared">, !tile) -> tensor<16x64xf32, "transposed(wgmma:4)">
    }
    gpu.return
  }

  // Rows of the pool that lists name: entries are read in the place of pages, and what they name no row for comes as
  // zeros. Rows in which bf16 lie are converted by the threads that load them, listed or not.
  // CHECK-LABEL: gpu.func @lists
  // CHECK-DAG:     %[[ROWS:.*]] = "kv.make_stages"() {buffer_name = "tile", copy = "cp_async",
  // CHECK-DAG:     %[[FORMAT:.*]] = "kv.make_stages"() {buffer_name = "tile2", copy = "convert",
  // CHECK:         %[[ENTRIES:.*]] = "kv.tile_row_pages"(%{{.*}}, %[[LISTS:.*]]) {rows = 64 : i64} : ({{.*}}, memref<?x?xi32>) -> i32
  // CHECK:         "kv.copy_start"(%[[ROWS]], {{.*}}, %[[ENTRIES]], %[[LISTS]]) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0, 1, 0, 1>}
  // CHECK:         %[[TILE:.*]] = "kv.consumer_wait"(%[[ROWS]],
  // CHECK-NOT:     "kv.tile_clear"
  // CHECK:         "kv.copy_start"(%[[FORMAT]], {{.*}}) {first_column = 0 : i64, operandSegmentSizes = {{.*}}, rope = 16 : i64}
  gpu.func @lists(%c: !cache, %f: !plain, %i: i32, %n: i32, %lists: memref<?x?xi32>, %q: tensor<64x112xbf16, "shared">) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {instruction = "mma.sync"}} {
    %c0 = arith.constant 0 : i32
    %0 = "kv.tile_load"(%c, %i, %c0, %i, %c0, %n, %lists) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 1>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32, memref<?x?xi32>) -> !tile
    %1 = "kv.tile_load"(%f, %i, %c0, %i, %c0, %n) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, rope = 16 : i64, tail = "any"} : (!plain, i32, i32, i32, i32, i32) -> tensor<64x112xbf16, "shared">
    %s = "kv.dot"(%0, %0) {transpose_b = true} : (!tile, !tile) -> tensor<64x64xf32, "mma">
    %t = "kv.dot"(%q, %1) {transpose_b = true} : (tensor<64x112xbf16, "shared">, tensor<64x112xbf16, "shared">) -> tensor<64x64xf32, "mma">
    gpu.return
  }

  // Tiles that products read with tokens as columns are transposed on the way, which writes zeros outside of the sequence:
  // nothing is cleared behind the wait.
  // CHECK-LABEL: gpu.func @transposed
  // CHECK:         %[[B:.*]] = "kv.make_stages"() {buffer_name = "tile", copy = "transposed", stages = 2 : i64, tile = tensor<64x128xf8E4M3FN, "shared(transposed)">}
  // CHECK:         "kv.producer_acquire"(%[[B]],
  // CHECK:         "kv.copy_start"(%[[B]], %{{.*}}, %arg0, %{{.*}}, %{{.*}}, %{{.*}}, %[[COUNT:.*]], %[[BEGIN:.*]]) {{.*}}0, 0, 1, 0>
  // CHECK:         "kv.consumer_wait"(%[[B]],
  // CHECK-NOT:     "kv.tile_clear"
  // CHECK:         gpu.return
  gpu.func @transposed(%c: !plain, %i: i32, %begin: i32, %count: i32, %p: tensor<64x64xf8E4M3FN, "wgmma">) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %c1 = arith.constant 1 : i32
    scf.for %j = %i to %count step %c1 : i32 {
      %v = "kv.tile_load"(%c, %i, %i, %j, %begin, %count) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!plain, i32, i32, i32, i32, i32) -> tensor<64x128xf8E4M3FN, "shared(transposed)">
      %o = "kv.dot"(%p, %v) {transpose_b = false} : (tensor<64x64xf8E4M3FN, "wgmma">, tensor<64x128xf8E4M3FN, "shared(transposed)">) -> tensor<64x128xf32, "wgmma">
    }
    gpu.return
  }

  // Left alone: a load that does not lie in shared memory, and one of a kernel that is not over tiles.
  // CHECK-LABEL: gpu.func @registers
  // CHECK:         "kv.tile_load"
  // CHECK-NOT:     kv.copy_start
  gpu.func @registers(%c: !cache, %i: i32) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16, "wgmma">
    gpu.return
  }

  // CHECK-LABEL: gpu.func @plain
  // CHECK:         "kv.tile_load"
  // CHECK-NOT:     kv.copy_start
  gpu.func @plain(%c: !cache, %i: i32) kernel {
    %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> !tile
    gpu.return
  }
}

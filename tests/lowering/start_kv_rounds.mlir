// RUN: kv-opt %s --start-kv-rounds='every=true' | FileCheck %s
// RUN: kv-opt %s --start-kv-rounds | FileCheck %s --check-prefix=TABLES

!row = tensor<64xf32, "rows(wgmma)">
!places = tensor<64xi32, "rows(wgmma)">
!mask = tensor<64xi1, "rows(wgmma)">
!rows = tensor<64x64xbf16, "shared">
!terms = tensor<64x128xf8E4M3FN, "shared">
!keys = tensor<64x64xf8E4M3FN, "shared">
!tile = tensor<64x64xf32, "wgmma">

gpu.module @kernels {
  // What a list says is read beside the search, since it needs the number of the round alone; the bias of far keys, which
  // needs what the search finds, behind that. Rows are waited for when all is under way, and what needs them stays.
  // CHECK-LABEL: gpu.func @reads
  // CHECK:         ^bb0(%[[ROUND:.*]]: i32, %[[USE:.*]]: i32):
  // CHECK:           %[[PLACE:.*]] = arith.index_cast %[[ROUND]]
  // CHECK-NEXT:      %[[COUNT:.*]] = memref.load %{{.*}}[%[[PLACE]]]
  // CHECK:           %[[FOUND:.*]] = scf.while
  // CHECK:           %[[AT:.*]] = tensor.splat %[[FOUND]]
  // CHECK-NEXT:      "kv.tile_gather"(%{{.*}}, %{{.*}}, %[[AT]])
  // CHECK:           %[[Q:.*]] = "kv.consumer_wait"
  // CHECK-NEXT:      arith.negf %[[Q]]
  // CHECK-NEXT:      scf.for {{.*}} to %[[COUNT]]
  //
  // By default kernels stay as they are that make no tables, or do not split their rows into terms.
  // TABLES-LABEL: gpu.func @reads
  // TABLES:         "kv.consumer_wait"
  // TABLES:         memref.load
  // TABLES:         "kv.tile_gather"
  gpu.func @reads(%counter: memref<?xi8>, %first: i32, %n: i32, %list: memref<?xi32>, %bias: memref<?xf32>, %every: !mask, %out: memref<?xf32>) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %queue = "kv.make_queue"(%counter) {readers = 8 : i64} : (memref<?xi8>) -> !kv.queue
    %queries = "kv.make_stages"() {buffer_name = "rows", copy = "cp_async", stages = 2 : i64, tile = !rows} : () -> !kv.stages
    %r:2 = scf.while (%t = %first, %use = %c0) : (i32, i32) -> (i32, i32) {
      %more = arith.cmpi slt, %t, %n : i32
      scf.condition(%more) %t, %use : i32, i32
    } do {
    ^bb0(%t: i32, %use: i32):
      %b = scf.while (%x = %t) : (i32) -> (i32) {
        %big = arith.cmpi sgt, %x, %c1 : i32
        scf.condition(%big) %x : i32
      } do {
      ^bb0(%x: i32):
        %half = arith.shrsi %x, %c1 : i32
        scf.yield %half : i32
      }
      %q = "kv.consumer_wait"(%queries, %use) : (!kv.stages, i32) -> !rows
      %minus = arith.negf %q : !rows
      %place = arith.index_cast %t : i32 to index
      %count = memref.load %list[%place] : memref<?xi32>
      %at = tensor.splat %b : !places
      %far = "kv.tile_gather"(%bias, %every, %at) : (memref<?xf32>, !mask, !places) -> !row
      scf.for %j = %c0 to %count step %c1 : i32 {
        %s = "kv.dot"(%minus, %minus) {transpose_b = true} : (!rows, !rows) -> !tile
        "kv.tile_scatter"(%far, %out, %every, %at) : (!row, memref<?xf32>, !mask, !places) -> ()
      }
      %next = "kv.queue_next"(%queue, %use) : (!kv.queue, i32) -> i32
      %later = arith.addi %use, %c1 : i32
      scf.yield %next, %later : i32, i32
    }
    gpu.return
  }

  // TABLES-LABEL: gpu.func @tables
  // TABLES:         ^bb0
  // TABLES:           memref.load
  // TABLES:           "kv.consumer_wait"
  // TABLES-NOT:       memref.load
  // TABLES:           "kv.queue_next"
  gpu.func @tables(%counter: memref<?xi8>, %first: i32, %n: i32, %list: memref<?xi32>, %keys: !keys, %distances: tensor<256xf32, "spread:8">) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %table = "kv.make_table"() {length = 256 : i64} : () -> !llvm.ptr<3>
    %queue = "kv.make_queue"(%counter) {readers = 8 : i64} : (memref<?xi8>) -> !kv.queue
    %queries = "kv.make_stages"() {buffer_name = "rows", copy = "cp_async", stages = 2 : i64, tile = !rows} : () -> !kv.stages
    %r:2 = scf.while (%t = %first, %use = %c0) : (i32, i32) -> (i32, i32) {
      %more = arith.cmpi slt, %t, %n : i32
      scf.condition(%more) %t, %use : i32, i32
    } do {
    ^bb0(%t: i32, %use: i32):
      %q = "kv.consumer_wait"(%queries, %use) : (!kv.stages, i32) -> !rows
      %terms:2 = "kv.tile_terms"(%q) : (!rows) -> (!terms, !row)
      %place = arith.index_cast %t : i32 to index
      %count = memref.load %list[%place] : memref<?xi32>
      scf.for %j = %c0 to %count step %c1 : i32 {
        "kv.table_store"(%distances, %table) {length = 256 : i64, pitch = 256 : i64, span = 256 : i64} : (tensor<256xf32, "spread:8">, !llvm.ptr<3>) -> ()
        %s = "kv.dot"(%terms#0, %keys) {transpose_b = true} : (!terms, !keys) -> !tile
      }
      %next = "kv.queue_next"(%queue, %use) : (!kv.queue, i32) -> i32
      %later = arith.addi %use, %c1 : i32
      scf.yield %next, %later : i32, i32
    }
    gpu.return
  }
}

// RUN: kv-opt %s --verify-roundtrip --verify-kv --named-operands | FileCheck %s
// RUN: kv-opt %s --named-operands | kv-opt --named-operands | FileCheck %s
// RUN: kv-opt %s --emit-bytecode | kv-opt --named-operands | FileCheck %s

// Asynchrony of tile kernels: circular buffers, products in flight, roles, registers and turns.

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!tile = tensor<64x128xbf16, "shared">
!acc = tensor<64x64xf32, "wgmma">

// CHECK-LABEL: func.func @circular_buffers
// CHECK:         %[[K:.*]] = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = tensor<64x128xbf16, "shared">} : () -> !kv.stages
// CHECK:         %[[V:.*]] = "kv.make_stages"() {buffer_name = "values", copy = "cp_async", stages = 16 : i64, {{.*}}} : () -> !kv.stages
// CHECK:         %[[P:.*]] = "kv.tile_pages"(%{{.*}}, %{{.*}}, %{{.*}}, %{{.*}}) {rows = 64 : i64, step = 16 : i64} : ({{.*}}) -> i32
// CHECK:         %[[R:.*]] = "kv.tile_row_pages"(%{{.*}}, %{{.*}}, %{{.*}}, %{{.*}}) {rows = 64 : i64} : ({{.*}}) -> i32
// CHECK:         "kv.producer_acquire"(%[[K]], %{{.*}}) : (!kv.stages, i32) -> ()
// CHECK:         "kv.copy_start"(buffer = %[[K]], {{.*}}, descriptor = %{{.*}}, pages = %[[P]]) {first_column = 0 : i64}
// CHECK:         "kv.copy_start"(buffer = %[[K]], {{.*}}, descriptor = %{{[^ ]+}}) {first_column = 0 : i64}
// CHECK:         "kv.copy_start"(buffer = %[[V]], {{.*}}, count = %{{[^ ]+}}) {first_column = 0 : i64}
// CHECK:         "kv.copy_start"(buffer = %[[V]], {{.*}}, count = %{{[^ ]+}}, pages = %[[R]]) {first_column = 0 : i64}
// CHECK:         "kv.copy_finish"(%[[V]], %{{.*}}) {pending = 1 : i64} : (!kv.stages, i32) -> ()
// CHECK:         "kv.copy_commit"() : () -> ()
// CHECK:         "kv.copy_wait"() {pending = 1 : i64} : () -> ()
// CHECK:         %[[T:.*]] = "kv.consumer_wait"(%[[V]], %{{.*}}) : (!kv.stages, i32) -> tensor<64x128xbf16, "shared">
// CHECK:         "kv.tile_clear"(%[[T]], %{{.*}}, %{{.*}}) : (tensor<64x128xbf16, "shared">, i32, i32) -> tensor<64x128xbf16, "shared">
// CHECK:         "kv.consumer_release"(%[[V]], %{{.*}}) : (!kv.stages, i32) -> ()
func.func @circular_buffers(%c: !cache, %m: !map, %n: i32) {
  %k = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  %v = "kv.make_stages"() {buffer_name = "values", copy = "cp_async", stages = 16 : i64, tile = !tile} : () -> !kv.stages
  %p = "kv.tile_pages"(%c, %n, %n, %n) {rows = 64 : i64, step = 16 : i64} : (!cache, i32, i32, i32) -> i32
  %r = "kv.tile_row_pages"(%c, %n, %n, %n) {rows = 64 : i64} : (!cache, i32, i32, i32) -> i32
  "kv.producer_acquire"(%k, %n) : (!kv.stages, i32) -> ()
  "kv.copy_start"(buffer = %k, n = %n, cache = %c, batch = %n, head = %n, first = %n, count = %n, descriptor = %m,
      pages = %p) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, !map, i32) -> ()
  "kv.copy_start"(buffer = %k, n = %n, cache = %c, batch = %n, head = %n, first = %n, count = %n, descriptor = %m) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, !map) -> ()
  "kv.copy_start"(buffer = %v, n = %n, cache = %c, batch = %n, head = %n, first = %n, count = %n) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32) -> ()
  "kv.copy_start"(buffer = %v, n = %n, cache = %c, batch = %n, head = %n, first = %n, count = %n, pages = %r) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, i32) -> ()
  "kv.copy_finish"(%v, %n) {pending = 1 : i64} : (!kv.stages, i32) -> ()
  "kv.copy_commit"() : () -> ()
  "kv.copy_wait"() {pending = 1 : i64} : () -> ()
  %t = "kv.consumer_wait"(%v, %n) : (!kv.stages, i32) -> !tile
  %z = "kv.tile_clear"(%t, %n, %n) : (!tile, i32, i32) -> !tile
  "kv.consumer_release"(%v, %n) : (!kv.stages, i32) -> ()
  return
}

// Two products in flight: the older is waited for, the newer goes on.
// CHECK-LABEL: func.func @products
// CHECK:         %[[S:.*]] = "kv.dot_start"(%{{.*}}, %{{.*}}) {transpose_b = true} :
// CHECK:         %[[O:.*]] = "kv.dot_start"(%{{.*}}, %{{.*}}, %{{.*}}) {transpose_b = false} :
// CHECK:         %[[W:.*]]:2 = "kv.dot_wait"(%[[S]], %[[O]]) {pending = 1 : i64} :
// CHECK:         "kv.tile_ready"(%[[W]]#0) : (tensor<64x64xf32, "wgmma">) -> tensor<64x64xf32, "wgmma">
// CHECK:         "kv.dot_wait"(%[[W]]#1) {pending = 0 : i64} :
// CHECK:         "kv.tile_store_shared"(%{{.*}}, %{{.*}}) : (tensor<64x64xf32, "wgmma">, !llvm.ptr<3>) -> ()
// CHECK:         "kv.tile_store_direct"(source = %{{.*}}, buffer = %{{.*}}, masks = [%[[M:.*]], %[[M]]], indices = [%[[I:.*]], %[[I]]]) : (tensor<64x64xf32, "wgmma">, memref<?x64xf32>, i1, i1, i32, i32) -> ()
func.func @products(%q: !tile, %k: !tile, %p: tensor<64x64xbf16, "wgmma">, %v: tensor<64x64xbf16, "shared">, %c: !acc, %place: !llvm.ptr<3>, %b: memref<?x64xf32>, %m: i1, %i: i32) {
  %s = "kv.dot_start"(%q, %k) {transpose_b = true} : (!tile, !tile) -> !acc
  %o = "kv.dot_start"(%p, %v, %c) {transpose_b = false} : (tensor<64x64xbf16, "wgmma">, tensor<64x64xbf16, "shared">, !acc) -> !acc
  %w:2 = "kv.dot_wait"(%s, %o) {pending = 1 : i64} : (!acc, !acc) -> (!acc, !acc)
  %r = "kv.tile_ready"(%w#0) : (!acc) -> !acc
  %d = "kv.dot_wait"(%w#1) {pending = 0 : i64} : (!acc) -> !acc
  "kv.tile_store_shared"(%d, %place) : (!acc, !llvm.ptr<3>) -> ()
  "kv.tile_store_direct"(source = %d, buffer = %b, masks = [%m, %m], indices = [%i, %i]) : (!acc, memref<?x64xf32>, i1, i1, i32, i32) -> ()
  return
}

// Half of a tile's columns, where threads read them.
// CHECK-LABEL: func.func @staged
// CHECK:         "kv.tile_stage"(%{{.*}}) {columns = 32 : i64, first_column = 32 : i64} : (tensor<64x64xbf16, "wgmma">) -> !llvm.ptr<3>
func.func @staged(%x: tensor<64x64xbf16, "wgmma">) {
  %p = "kv.tile_stage"(%x) {first_column = 32 : i64, columns = 32 : i64} : (tensor<64x64xbf16, "wgmma">) -> !llvm.ptr<3>
  return
}

// CHECK-LABEL: func.func @rows_and_rounds
// CHECK:         "kv.copy_rows_start"(%{{.*}}, %{{.*}}, %{{.*}}, %{{.*}}, %{{.*}}) : (!kv.stages, i32, memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> ()
// CHECK:         %[[Q:.*]] = "kv.make_queue"(%{{.*}}) {readers = 12 : i64} : (memref<?xi8>) -> !kv.queue
// CHECK:         "kv.take_round"(%{{.*}}, %{{.*}}, %{{.*}}) : (memref<?xi8>, i32, i32) -> i32
// CHECK:         "kv.queue_fetch"(%[[Q]], %{{.*}}, %{{.*}}) : (!kv.queue, i32, i32) -> ()
// CHECK:         "kv.queue_next"(%[[Q]], %{{.*}}) : (!kv.queue, i32) -> i32
func.func @rows_and_rounds(%rows: memref<?x128xbf16>, %counter: memref<?xi8>, %m: tensor<64xi1>, %i: tensor<64xi32>, %n: i32) -> (i32, i32) {
  %s = "kv.make_stages"() {buffer_name = "rows", copy = "cp_async", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  "kv.copy_rows_start"(%s, %n, %rows, %m, %i) : (!kv.stages, i32, memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> ()
  %q = "kv.make_queue"(%counter) {readers = 12 : i64} : (memref<?xi8>) -> !kv.queue
  %t = "kv.take_round"(%counter, %n, %n) : (memref<?xi8>, i32, i32) -> i32
  "kv.queue_fetch"(%q, %t, %n) : (!kv.queue, i32, i32) -> ()
  %next = "kv.queue_next"(%q, %t) : (!kv.queue, i32) -> i32
  return %t, %next : i32, i32
}

// CHECK-LABEL: func.func @roles
// CHECK-DAG:     "kv.is_role"() {role = "producer"} : () -> i1
// CHECK-DAG:     "kv.is_role"() {role = "producer_warps_from_2"} : () -> i1
// CHECK-DAG:     "kv.is_role"() {role = "producer_warp_3"} : () -> i1
// CHECK-DAG:     "kv.is_role"() {role = "consumer"} : () -> i1
// CHECK:         "kv.set_registers"() {action = "decrease", count = 24 : i64} : () -> ()
// CHECK:         "kv.set_registers"() {action = "increase", count = 240 : i64} : () -> ()
// CHECK:         "kv.turn_pass"() {groups = "last"} : () -> ()
// CHECK:         "kv.turn_wait"() {groups = "all"} : () -> ()
// CHECK:         "kv.turn_pass"() {groups = "all"} : () -> ()
// CHECK:         "kv.turn_wait"() {groups = "first"} : () -> ()
func.func @roles() {
  %0 = "kv.is_role"() {role = "producer"} : () -> i1
  %1 = "kv.is_role"() {role = "producer_warp_3"} : () -> i1
  %2 = "kv.is_role"() {role = "consumer"} : () -> i1
  %3 = "kv.is_role"() {role = "producer_warps_from_2"} : () -> i1
  "kv.set_registers"() {action = "decrease", count = 24 : i64} : () -> ()
  "kv.set_registers"() {action = "increase", count = 240 : i64} : () -> ()
  "kv.turn_pass"() {groups = "last"} : () -> ()
  "kv.turn_wait"() {groups = "all"} : () -> ()
  "kv.turn_pass"() {groups = "all"} : () -> ()
  "kv.turn_wait"() {groups = "first"} : () -> ()
  return
}

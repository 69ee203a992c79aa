// RUN: kv-opt %s --verify-roundtrip --verify-kv --named-operands -o %t.named
// RUN: kv-opt %s --mlir-print-op-generic | kv-opt --named-operands | diff %t.named -
// RUN: kv-opt %s --emit-bytecode | kv-opt --named-operands | diff %t.named -

// Operations over tiles: in text by names and by places, and in bytes, all say the same.

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!dense = !kv.operand<"dense", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!tile = tensor<64x128xbf16, "shared">
!acc = tensor<64x64xf32, "wgmma">
!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!layers = !kv.collection<"fa3", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rowwise = !kv.operand<"ragged", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!mla = !kv.cache<"paged", f8E4M3FN, 1 : i64, 640 : i64, true, 64 : i64, f32, 640 : i64>
!rows = !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!ragged = !kv.tma<"ragged", bf16, array<i64: 1, 1, 16, 64>, array<i64: 16, 128>, 128 : i64>
!rope = !kv.tma<"rope", bf16, array<i64: 1, 64, 1, 64>, array<i64: 64, 1, 64>, 128 : i64>
!gather = !kv.tma<"gather4", i64, array<i64: 1, 72>, array<i64: 8, 72>, 16 : i64>
!scales = !kv.tma<"scale", f32, array<i64: 1, 64>, array<i64: 1, 64>, 16 : i64>
!cache_fragments = !kv.cache<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, f32, 128 : i64>

// Operations on tiles: every op, with and without what is optional, before layouts are chosen and after.

func.func @positions() {
  %i = "kv.tile_index"() : () -> tensor<64xi32>
  %rows = "kv.tile_broadcast"(%i) {dimension = 0 : i64} : (tensor<64xi32>) -> tensor<64x128xi32>
  %columns = "kv.tile_broadcast"(%i) {dimension = 1 : i64} : (tensor<64xi32>) -> tensor<80x64xi32>
  return
}

func.func @ramps(%start: tensor<64xf32>, %step: tensor<64xf32>) {
  %0 = "kv.tile_ramp"(%start, %step) : (tensor<64xf32>, tensor<64xf32>) -> tensor<64x128xf32>
  return
}

func.func @reductions(%x: tensor<64x128xf32>, %i: tensor<64x128xi32>) {
  %0 = "kv.tile_reduce"(%x) {kind = "max", axis = 1 : i64} : (tensor<64x128xf32>) -> tensor<64xf32>
  %1 = "kv.tile_reduce"(%x) {kind = "min", axis = 0 : i64} : (tensor<64x128xf32>) -> tensor<128xf32>
  %2 = "kv.tile_reduce"(%i) {kind = "add", axis = 1 : i64} : (tensor<64x128xi32>) -> tensor<64xi32>
  %3 = "kv.tile_reduce_lanes"(%0) {kind = "add"} : (tensor<64xf32>) -> tensor<64xf32>
  return
}

func.func @masks(%x: tensor<64x128xf32>, %seen: tensor<64x128xi1>, %rows: tensor<64xi1, "rows(wgmma)">) {
  %0 = "kv.tile_mask"(%x, %seen) : (tensor<64x128xf32>, tensor<64x128xi1>) -> tensor<64x128xf32>
  %1 = "kv.warp_any"(%rows) : (tensor<64xi1, "rows(wgmma)">) -> i1
  return
}

func.func @products(%q: tensor<64x128xbf16>, %k: tensor<96x128xbf16>, %p: tensor<64x96xbf16>, %o: tensor<64x128xf32>,
                    %qs: tensor<64x128xbf16, "shared">, %ks: tensor<96x128xbf16, "shared">) {
  %0 = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<64x128xbf16>, tensor<96x128xbf16>) -> tensor<64x96xf32>
  %1 = "kv.dot"(%p, %k, %o) {transpose_b = false} : (tensor<64x96xbf16>, tensor<96x128xbf16>, tensor<64x128xf32>) -> tensor<64x128xf32>
  %2 = "kv.dot"(%qs, %ks) {transpose_b = true} : (tensor<64x128xbf16, "shared">, tensor<96x128xbf16, "shared">) -> tensor<64x96xf32, "wgmma">
  return
}

// Caches and operands, stored elements and dequantized ones, parts of a head, with a descriptor and without.
func.func @loads(%c: !cache, %f: !fp8, %d: !dense, %m: !map, %i: i32) {
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  %1 = "kv.tile_load"(%c, %i, %i, %i, %i, %i, %m) {first_column = 64 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32, !map) -> tensor<64x64xbf16>
  %2 = "kv.tile_load"(%f, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!fp8, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  %3 = "kv.tile_load"(%d, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!dense, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  return
}

// Rows of the pool that lists name, and rows in which scales and bf16 keys lie.
func.func @rows(%c: !cache, %f: !kv.cache<"paged", f8E4M3FN, 1 : i64, 104 : i64, true, 16 : i64, none, 1 : i64>, %i: i32, %lists: memref<?x?xi32>) {
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i, %lists) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 1>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32, memref<?x?xi32>) -> tensor<64x128xbf16>
  %1 = "kv.tile_load"(%f, %i, %i, %i, %i, %i) {first_column = 0 : i64, inline_scales = 32 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, rope = 16 : i64, tail = "any"} : (!kv.cache<"paged", f8E4M3FN, 1 : i64, 104 : i64, true, 16 : i64, none, 1 : i64>, i32, i32, i32, i32, i32) -> tensor<64x80xbf16>
  return
}

func.func @buffers(%rows: memref<?x?x128xbf16>, %v: memref<?xf32>, %m: memref<?x?xf32>, %exists: tensor<64xi1>,
                   %i: tensor<64xi32>, %seen: tensor<8x64xi1>, %j: tensor<8x64xi32>) {
  %x = "kv.tile_load_rows"(%rows, %exists, %i, %i) : (memref<?x?x128xbf16>, tensor<64xi1>, tensor<64xi32>, tensor<64xi32>) -> tensor<64x128xbf16>
  "kv.tile_store_rows"(%x, %rows, %exists, %i, %i) : (tensor<64x128xbf16>, memref<?x?x128xbf16>, tensor<64xi1>, tensor<64xi32>, tensor<64xi32>) -> ()
  "kv.tile_store_rows"(%x, %rows, %exists, %i, %i) {first_column = 16 : i64, stored = 112 : i64} : (tensor<64x128xbf16>, memref<?x?x128xbf16>, tensor<64xi1>, tensor<64xi32>, tensor<64xi32>) -> ()
  %y = "kv.tile_gather"(%v, %exists, %i) : (memref<?xf32>, tensor<64xi1>, tensor<64xi32>) -> tensor<64xf32>
  %z = "kv.tile_gather"(%m, %seen, %j, %j) : (memref<?x?xf32>, tensor<8x64xi1>, tensor<8x64xi32>, tensor<8x64xi32>) -> tensor<8x64xf32>
  "kv.tile_scatter"(%y, %v, %exists, %i) : (tensor<64xf32>, memref<?xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
  return
}

// Asynchrony of tile kernels: circular buffers, products in flight, roles, registers and turns.

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
func.func @staging_products(%q: !tile, %k: !tile, %p: tensor<64x64xbf16, "wgmma">, %v: tensor<64x64xbf16, "shared">, %c: !acc, %place: !llvm.ptr<3>, %b: memref<?x64xf32>, %m: i1, %i: i32) {
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
func.func @staged(%x: tensor<64x64xbf16, "wgmma">) {
  %p = "kv.tile_stage"(%x) {first_column = 32 : i64, columns = 32 : i64} : (tensor<64x64xbf16, "wgmma">) -> !llvm.ptr<3>
  return
}

func.func @rows_and_work_items(%rows: memref<?x128xbf16>, %counter: memref<?xi8>, %m: tensor<64xi1>, %i: tensor<64xi32>, %n: i32) -> (i32, i32) {
  %s = "kv.make_stages"() {buffer_name = "rows", copy = "cp_async", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  "kv.copy_rows_start"(%s, %n, %rows, %m, %i) : (!kv.stages, i32, memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> ()
  %q = "kv.make_queue"(%counter) {readers = 12 : i64} : (memref<?xi8>) -> !kv.queue
  %t = "kv.take_work_item"(%counter, %n, %n) : (memref<?xi8>, i32, i32) -> i32
  "kv.queue_fetch"(%q, %t, %n) : (!kv.queue, i32, i32) -> ()
  %next = "kv.queue_next"(%q, %t) : (!kv.queue, i32) -> i32
  return %t, %next : i32, i32
}

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

// Copies by the tensor memory accelerator: every op, and every form of descriptor that a load takes.

func.func @tensor_map(%p: !pool, %l: !layers, %c: !cache, %d: !dense, %r: !rowwise, %i: i32) {
  %0 = "kv.tensor_map"(%p, %i) {half = "key"} : (!pool, i32) -> !map
  %1 = "kv.tensor_map"(%l, %i) {half = "value"} : (!layers, i32) -> !map
  %2 = "kv.tensor_map"(%c) {half = "key"} : (!cache) -> !map
  %3 = "kv.tensor_map"(%d) {half = "key"} : (!dense) -> !map
  %4 = "kv.tensor_map"(%r) {half = "key"} : (!rowwise) -> !rows
  return
}

func.func @load_box(%p: !map, %i: i32, %policy: i64, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) {
  "kv.tma_load_box"(map = %p, destination = %tile, barrier = %bar, coordinates = [%i, %i, %i, %i]) {cta_group = 1 : i64, multicast = 0 : i64} : (!map, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  "kv.tma_load_box"(map = %p, destination = %tile, barrier = %bar, policy = %policy, coordinates = [%i, %i, %i, %i]) {cta_group = 1 : i64, multicast = 3 : i64} : (!map, !llvm.ptr<3>, !llvm.ptr<3>, i64, i32, i32, i32, i32) -> ()
  return
}

func.func @load(%p: !map, %r: !rows, %g: !ragged, %4: !gather, %s: !scales, %i: i32, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) {
  "kv.tma_load"(%p, %tile, %bar, %i, %i, %i, %i) {smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!map, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  "kv.tma_load"(%r, %tile, %bar, %i, %i, %i) {smem_rows = 64 : i64, cta_group = 2 : i64, multicast = 0 : i64} : (!rows, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32) -> ()
  "kv.tma_load"(%g, %tile, %bar, %i, %i, %i, %i) {smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 3 : i64} : (!ragged, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  "kv.tma_load"(%4, %tile, %bar, %i, %i, %i, %i, %i) {smem_rows = 8 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!gather, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32, i32) -> ()
  "kv.tma_load"(%s, %tile, %bar, %i, %i) {smem_rows = 1 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!scales, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32) -> ()
  return
}

func.func @load_tile(%p: !map, %r: !rows, %o: !rope, %c: !cache, %d: !dense, %m: !mla, %i: i32, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) {
  "kv.tma_load_tile"(%p, %c, %i, %i, %i, %i, %i, %tile, %bar) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!map, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  "kv.tma_load_tile"(%r, %d, %i, %i, %i, %i, %i, %tile, %bar) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "skip"} : (!rows, !dense, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  "kv.tma_load_tile"(%o, %m, %i, %i, %i, %i, %i, %tile, %bar) {tile_rows = 64 : i64, smem_rows = 128 : i64, cta_group = 2 : i64, multicast = 0 : i64, beyond = "zero"} : (!rope, !mla, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

func.func @store(%g: !ragged, %i: i32, %tile: !llvm.ptr<3>) {
  "kv.tma_store"(%g, %tile, %i, %i, %i, %i) {smem_rows = 16 : i64} : (!ragged, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  "kv.tma_wait_stores"() {pending = 0 : i64, read = true} : () -> ()
  return
}

func.func @barriers(%p: !map, %i: i32, %bar: !llvm.ptr<3>) {
  "kv.tma_prefetch"(%p) : (!map) -> ()
  "kv.tma_init_barrier"(%bar) {arrivals = 1 : i64} : (!llvm.ptr<3>) -> ()
  "kv.tma_expect"(%p, %bar, %i) {arrive = false} : (!map, !llvm.ptr<3>, i32) -> ()
  "kv.tma_expect"(%p, %bar, %i) {arrive = true} : (!map, !llvm.ptr<3>, i32) -> ()
  "kv.tma_wait"(%bar, %i) : (!llvm.ptr<3>, i32) -> ()
  return
}

func.func @fragments(%c: !cache_fragments, %i: i32) {
  %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache_fragments, i32, i32, i32, i32, i32) -> tensor<64x128xi8, "shared">
  %a = "kv.tile_fragments"(%k) : (tensor<64x128xi8, "shared">) -> tensor<64x128xbf16, "wgmma">
  %s = "kv.tile_scales"(%c, %i, %i, %i, %i) {first_column = 0 : i64} : (!cache_fragments, i32, i32, i32, i32) -> tensor<64xf32, "rows(wgmma)">
  return
}

func.func @sharing(%x: tensor<64x32xbf16, "mma:4x2">, %k: tensor<32x576xbf16, "shared">, %t: tensor<64x128xf8E4M3FN, "shared(transposed)">, %o: tensor<64x64xf32, "wgmma">, %p: tensor<64x32xf32, "wgmma">, %l: tensor<32x64xbf16>, %r: tensor<32x16xbf16>) {
  %a = "kv.tile_share"(%x) : (tensor<64x32xbf16, "mma:4x2">) -> tensor<64x32xbf16, "shared">
  %v = "kv.tile_columns"(%k) {first_column = 64 : i64} : (tensor<32x576xbf16, "shared">) -> tensor<32x512xbf16, "shared">
  %w = "kv.tile_columns"(%t) {first_column = 8 : i64} : (tensor<64x128xf8E4M3FN, "shared(transposed)">) -> tensor<64x32xf8E4M3FN, "shared(transposed)">
  %b = "kv.tile_concatenate"(%l, %r) : (tensor<32x64xbf16>, tensor<32x16xbf16>) -> tensor<32x80xbf16>
  %s = "kv.tile_add_columns"(%o, %p) {first_column = 8 : i64} : (tensor<64x64xf32, "wgmma">, tensor<64x32xf32, "wgmma">) -> tensor<64x64xf32, "wgmma">
  return
}

func.func @operands(%x: tensor<64x32xbf16, "shared">, %y: tensor<64x32xbf16>, %z: tensor<64x64xf32>, %v: tensor<64xi32>) {
  %r = "kv.tile_unshare"(%x) : (tensor<64x32xbf16, "shared">) -> tensor<64x32xbf16, "wgmma">
  %t = "kv.tile_transpose"(%x) : (tensor<64x32xbf16, "shared">) -> tensor<32x64xbf16, "shared(transposed)">
  %u = "kv.tile_transpose"(%y) : (tensor<64x32xbf16>) -> tensor<32x64xbf16>
  %p = "kv.tile_slice"(%y) {first_row = 16 : i64, first_column = 8 : i64} : (tensor<64x32xbf16>) -> tensor<16x16xbf16>
  %s = "kv.tile_scan"(%z) {kind = "mul", axis = 1 : i64} : (tensor<64x64xf32>) -> tensor<64x64xf32>
  %w = "kv.tile_scan"(%v) {kind = "add", axis = 0 : i64} : (tensor<64xi32>) -> tensor<64xi32>
  %c = "kv.convert_layout"(%v) : (tensor<64xi32>) -> tensor<64xi32>
  %n = "kv.tile_total"(%v) {kind = "max"} : (tensor<64xi32>) -> i32
  %i = "kv.tile_solve"(%z, %z) : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  return
}

func.func @tables(%x: tensor<256xf32, "spread:8">, %i: tensor<128xi32, "rows(wgmma)">) {
  %t = "kv.make_table"() {length = 256 : i64} : () -> !llvm.ptr<3>
  "kv.table_store"(%x, %t) {length = 256 : i64, pitch = 256 : i64, span = 256 : i64} : (tensor<256xf32, "spread:8">, !llvm.ptr<3>) -> ()
  %w = "kv.tile_windows"(%t, %i) {length = 256 : i64} : (!llvm.ptr<3>, tensor<128xi32, "rows(wgmma)">) -> tensor<128x128xf32, "wgmma">
  return
}

func.func @terms(%q: tensor<64x80xbf16>, %k: tensor<128x96xf8E5M2>, %n: i32) {
  %t, %u = "kv.tile_terms"(%q) {operandSegmentSizes = array<i32: 1, 0>} : (tensor<64x80xbf16>) -> (tensor<64x192xf8E4M3FN>, tensor<64xf32>)
  %s = "kv.dot"(%t, %k) {transpose_b = true} : (tensor<64x192xf8E4M3FN>, tensor<128x96xf8E5M2>) -> tensor<64x128xf32>
  %t2, %u2 = "kv.tile_terms"(%q, %n) {operandSegmentSizes = array<i32: 1, 1>} : (tensor<64x80xbf16>, i32) -> (tensor<64x192xf8E4M3FN>, tensor<64xf32>)
  return
}

func.func @weights(%w: tensor<64x128xf8E4M3FN, "wgmma">, %x: tensor<64x128xf32>, %unit: tensor<64xf32>) {
  %ones = "kv.tile_ones"() : () -> tensor<8x128xf8E4M3FN, "shared">
  %large = "kv.tile_saturated"(%w) : (tensor<64x128xf8E4M3FN, "wgmma">) -> tensor<64xi1, "rows(wgmma)">
  %weights = "kv.tile_weights"(%x, %unit, %unit) : (tensor<64x128xf32>, tensor<64xf32>, tensor<64xf32>) -> tensor<64x128xf32>
  return
}

func.func @stores(%k: !kv.cache<"paged", bf16, 2 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>, %x: tensor<16x64xf32>, %i: i32) {
  "kv.tile_store"(%k, %i, %i, %i, %i, %x) {first_column = 0 : i64} : (!kv.cache<"paged", bf16, 2 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>, i32, i32, i32, i32, tensor<16x64xf32>) -> ()
  return
}

// RUN: kv-opt %s --verify-diagnostics

// What the verifiers of circular buffers, products in flight and roles refuse.

!tile = tensor<64x128xbf16, "shared">
!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!acc = tensor<64x64xf32, "wgmma">
!transposed = tensor<64x128xf8E4M3FN, "shared(transposed)">
!fp8_cache = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>

func.func @make_stages() {
  // expected-error @below {{'kv.make_stages' op stages must be an integer from 1 to 16, got 0 : i64}}
  "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 0 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.make_stages' op stages must be an integer from 1 to 16, got 17 : i64}}
  "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 17 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.make_stages' op tile must be the type of a tile of rank 2 with the layout "shared", got tensor<64x128xbf16>}}
  "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = tensor<64x128xbf16>} : () -> !kv.stages
  // expected-error @below {{'kv.make_stages' op tile must be the type of a tile of rank 2 with the layout "shared", got tensor<64xbf16, "shared">}}
  "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = tensor<64xbf16, "shared">} : () -> !kv.stages
  // expected-error @below {{'kv.make_stages' op tile must be the type of a tile of rank 2 with the layout "shared", got memref<64x128xbf16>}}
  "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = memref<64x128xbf16>} : () -> !kv.stages
  // expected-error @below {{'kv.make_stages' op copy must be one of tma, cp_async, staged, transposed, convert, got "bulk"}}
  "kv.make_stages"() {buffer_name = "keys", copy = "bulk", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.make_stages' op copy "transposed" needs the layout "shared(transposed)"}}
  "kv.make_stages"() {buffer_name = "values", copy = "tma", stages = 2 : i64, tile = !transposed} : () -> !kv.stages
  return
}

func.func @copy_start(%c: !pool, %i: i32, %d: !map, %c2: !cache, %c3: !fp8, %b4: !kv.stages, %c4: !fp8_cache) {
  %b = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.copy_start' op operand must be of type !kv.cache or !kv.operand, got !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
  "kv.copy_start"(buffer = %b, n = %i, cache = %c, batch = %i, head = %i, first = %i, count = %i, descriptor = %d) {first_column = 0 : i64} : (!kv.stages, i32, !pool, i32, i32, i32, i32, !map) -> ()
  // expected-error @below {{'kv.copy_start' op columns must be within the head's 128, rounded up to whole 16, got 128 from 8 : i64 on}}
  "kv.copy_start"(buffer = %b, n = %i, cache = %c2, batch = %i, head = %i, first = %i, count = %i, descriptor = %d) {first_column = 8 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, !map) -> ()
  // expected-error @below {{'kv.copy_start' op needs a descriptor for a buffer that is filled by tma, and for no other, got tma}}
  "kv.copy_start"(buffer = %b, n = %i, cache = %c2, batch = %i, head = %i, first = %i, count = %i) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32) -> ()
  %b2 = "kv.make_stages"() {buffer_name = "keys", copy = "cp_async", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.copy_start' op needs a descriptor for a buffer that is filled by tma, and for no other, got cp_async}}
  "kv.copy_start"(buffer = %b2, n = %i, cache = %c2, batch = %i, head = %i, first = %i, count = %i, descriptor = %d) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, !map) -> ()
  %b3 = "kv.make_stages"() {buffer_name = "keys", copy = "convert", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.copy_start' op takes pages only for a buffer that is filled by tma or cp_async, got convert}}
  "kv.copy_start"(buffer = %b3, n = %i, cache = %c2, batch = %i, head = %i, first = %i, count = %i, pages = %i) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, i32) -> ()
  // expected-error @below {{'kv.copy_start' op a descriptor copies elements without conversion, f8E4M3FN without scales, got tensor<64x128xbf16, "shared">}}
  "kv.copy_start"(buffer = %b, n = %i, cache = %c3, batch = %i, head = %i, first = %i, count = %i, descriptor = %d) {first_column = 0 : i64} : (!kv.stages, i32, !fp8, i32, i32, i32, i32, !map) -> ()
  // expected-error @below {{'kv.copy_start' op must name a buffer by the kv.make_stages that makes it: passes look at it there}}
  "kv.copy_start"(buffer = %b4, n = %i, cache = %c2, batch = %i, head = %i, first = %i, count = %i, descriptor = %d) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, !map) -> ()
  %b5 = "kv.make_stages"() {buffer_name = "values", copy = "transposed", stages = 2 : i64, tile = !transposed} : () -> !kv.stages
  // expected-error @below {{'kv.copy_start' op needs begin for a buffer that is filled by transposed, and for no other, got transposed}}
  "kv.copy_start"(buffer = %b5, n = %i, cache = %c4, batch = %i, head = %i, first = %i, count = %i) {first_column = 0 : i64} : (!kv.stages, i32, !fp8_cache, i32, i32, i32, i32) -> ()
  return
}

func.func @consumer_wait(%i: i32, %b2: !kv.stages) {
  %b = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.consumer_wait' op the result must be a tile of the buffer, tensor<64x128xbf16, "shared">, got tensor<64x64xbf16, "shared">}}
  "kv.consumer_wait"(%b, %i) : (!kv.stages, i32) -> tensor<64x64xbf16, "shared">
  // expected-error @below {{'kv.consumer_wait' op must name a buffer by the kv.make_stages that makes it: passes look at it there}}
  "kv.consumer_wait"(%b2, %i) : (!kv.stages, i32) -> !tile
  return
}

func.func @tile_clear_and_tile_row_pages(%x: !acc, %i: i32, %x2: !tile, %c: !cache) {
  // expected-error @below {{'kv.tile_clear' op the operand must be a tile of rank 2 with the layout "shared", got tensor<64x64xf32, "wgmma">}}
  "kv.tile_clear"(%x, %i, %i) : (!acc, i32, i32) -> !acc
  // expected-error @below {{'kv.tile_clear' op the result must be of the operand's type tensor<64x128xbf16, "shared">, got tensor<64x64xbf16, "shared">}}
  "kv.tile_clear"(%x2, %i, %i) : (!tile, i32, i32) -> tensor<64x64xbf16, "shared">
  // expected-error @below {{'kv.tile_row_pages' op rows must be from 1 to 128, one per lane of a warpgroup, got 144 : i64}}
  "kv.tile_row_pages"(%c, %i, %i, %i) {rows = 144 : i64} : (!cache, i32, i32, i32) -> i32
  return
}

func.func @tile_pages(%c: !cache, %i: i32, %c2: !pool) {
  // expected-error @below {{'kv.tile_pages' op rows must be from 1 to 32 steps, one per lane, got rows = 128 : i64 and step = 2 : i64}}
  "kv.tile_pages"(%c, %i, %i, %i) {rows = 128 : i64, step = 2 : i64} : (!cache, i32, i32, i32) -> i32
  // expected-error @below {{'kv.tile_pages' op rows must be from 1 to 32 steps, one per lane, got rows = 72 : i64 and step = 16 : i64}}
  "kv.tile_pages"(%c, %i, %i, %i) {rows = 72 : i64, step = 16 : i64} : (!cache, i32, i32, i32) -> i32
  // expected-error @below {{'kv.tile_pages' op rows must be from 1 to 32 steps, one per lane, got rows = 64 : i64 and step = 0 : i64}}
  "kv.tile_pages"(%c, %i, %i, %i) {rows = 64 : i64, step = 0 : i64} : (!cache, i32, i32, i32) -> i32
  // expected-error @below {{'kv.tile_pages' op operand must be of type !kv.cache or !kv.operand, got !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
  "kv.tile_pages"(%c2, %i, %i, %i) {rows = 64 : i64, step = 16 : i64} : (!pool, i32, i32, i32) -> i32
  return
}

func.func @tile_store_shared(%x: !tile, %p: !llvm.ptr<3>, %x2: !acc, %p2: !llvm.ptr<1>) {
  // expected-error @below {{'kv.tile_store_shared' op the operand must be a tile of rank 2 in registers, got tensor<64x128xbf16, "shared">}}
  "kv.tile_store_shared"(%x, %p) : (!tile, !llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.tile_store_shared' op place must be !llvm.ptr<3>, got !llvm.ptr<1>}}
  "kv.tile_store_shared"(%x2, %p2) : (!acc, !llvm.ptr<1>) -> ()
  return
}

func.func @tile_stage(%x: tensor<64x64xf32, "wgmma">, %x2: tensor<64x64xbf16, "wgmma">) {
  // expected-error @below {{'kv.tile_stage' op the operand must be a tile of rank 2 of bf16 or f16, got tensor<64x64xf32, "wgmma">}}
  "kv.tile_stage"(%x) {first_column = 0 : i64, columns = 64 : i64} : (tensor<64x64xf32, "wgmma">) -> !llvm.ptr<3>
  // expected-error @below {{'kv.tile_stage' op columns must be in the tile's 64, got 48 from 32 on}}
  "kv.tile_stage"(%x2) {first_column = 32 : i64, columns = 48 : i64} : (tensor<64x64xbf16, "wgmma">) -> !llvm.ptr<3>
  // expected-error @below {{'kv.tile_stage' op first_column and columns must be multiples of 16, got 8 : i64 and 32 : i64}}
  "kv.tile_stage"(%x2) {first_column = 8 : i64, columns = 32 : i64} : (tensor<64x64xbf16, "wgmma">) -> !llvm.ptr<3>
  // expected-error @below {{'kv.tile_stage' op the result must be !llvm.ptr<3>, got !llvm.ptr<1>}}
  "kv.tile_stage"(%x2) {first_column = 0 : i64, columns = 64 : i64} : (tensor<64x64xbf16, "wgmma">) -> !llvm.ptr<1>
  return
}

func.func @tile_store_direct(%x: !acc, %b: memref<?x?x64xf32>, %m: i1, %i: i32) {
  // expected-error @below {{'kv.tile_store_direct' op the buffer must be}}
  "kv.tile_store_direct"(source = %x, buffer = %b, masks = [%m, %m], indices = [%i, %i]) : (!acc, memref<?x?x64xf32>, i1, i1, i32, i32) -> ()
  return
}

func.func @dot_start(%q: !tile) {
  // expected-error @below {{'kv.dot_start' op a and b must share K = 128 and bf16, got tensor<64x128xbf16, "shared"> and tensor<64x128xbf16, "shared">}}
  "kv.dot_start"(%q, %q) {transpose_b = false} : (!tile, !tile) -> !acc
  // expected-error @below {{'kv.dot_start' op the result is in flight: only one kv.dot_wait may name it, got nothing}}
  "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  // expected-error @below {{'kv.dot_start' op the result is in flight: only one kv.dot_wait may name it, got kv.dot_wait, arith.negf}}
  %s = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  arith.negf %s : !acc
  "kv.dot_wait"(%s) {pending = 0 : i64} : (!acc) -> !acc
  // expected-error @below {{'kv.dot_start' op the result is in flight: only one kv.dot_wait may name it, got kv.dot_wait, kv.dot_wait}}
  %s2 = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  "kv.dot_wait"(%s2) {pending = 0 : i64} : (!acc) -> !acc
  "kv.dot_wait"(%s2) {pending = 0 : i64} : (!acc) -> !acc
  return
}

func.func @dot_wait(%q: !tile) {
  %s = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  %t = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  // expected-error @below {{'kv.dot_wait' op the newer result is in flight: only one kv.dot_wait may name it, got arith.negf}}
  %w:2 = "kv.dot_wait"(%s, %t) {pending = 1 : i64} : (!acc, !acc) -> (!acc, !acc)
  arith.negf %w#1 : !acc
  %s2 = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  // expected-error @below {{'kv.dot_wait' op pending must be from 0 to 0 (one less than the products), got 1 : i64}}
  "kv.dot_wait"(%s2) {pending = 1 : i64} : (!acc) -> !acc
  %s3 = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  // expected-error @below {{'kv.dot_wait' op pending must be from 0 to 0 (one less than the products), got -1 : i64}}
  "kv.dot_wait"(%s3) {pending = -1 : i64} : (!acc) -> !acc
  %s4 = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  // expected-error @below {{'kv.dot_wait' op the results must have the operands' types, got ['tensor<64x64xf32>'] for ['tensor<64x64xf32, "wgmma">']}}
  "kv.dot_wait"(%s4) {pending = 0 : i64} : (!acc) -> tensor<64x64xf32>
  %s5 = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  %t2 = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  // expected-error @below {{'kv.dot_wait' op the results must have the operands' types, got ['tensor<64x64xf32, "wgmma">'] for ['tensor<64x64xf32, "wgmma">', 'tensor<64x64xf32, "wgmma">']}}
  "kv.dot_wait"(%s5, %t2) {pending = 0 : i64} : (!acc, !acc) -> !acc
  return
}

func.func @tile_ready(%x: !tile, %x2: tensor<64xi32>, %x3: !acc) {
  // expected-error @below {{'kv.tile_ready' op the operand must be a tile of f32, bf16, f16 or f8E4M3FN in registers, got tensor<64x128xbf16, "shared">}}
  "kv.tile_ready"(%x) : (!tile) -> !tile
  // expected-error @below {{'kv.tile_ready' op the operand must be a tile of f32, bf16, f16 or f8E4M3FN in registers, got tensor<64xi32>}}
  "kv.tile_ready"(%x2) : (tensor<64xi32>) -> tensor<64xi32>
  // expected-error @below {{'kv.tile_ready' op the result must be of the operand's type tensor<64x64xf32, "wgmma">, got tensor<64x64xf32>}}
  "kv.tile_ready"(%x3) : (!acc) -> tensor<64x64xf32>
  return
}

func.func @is_role() {
  // expected-error @below {{'kv.is_role' op role must be one of producer, producer_warp_0, producer_warp_1, producer_warp_2, producer_warp_3, producer_warps_from_1, producer_warps_from_2, producer_warps_from_3, producer_group_0, producer_group_1, consumer, got "watcher"}}
  "kv.is_role"() {role = "watcher"} : () -> i1
  return
}

func.func @set_registers() {
  // expected-error @below {{'kv.set_registers' op count must be a multiple of 8 from 24 to 256, got 100 : i64}}
  "kv.set_registers"() {action = "increase", count = 100 : i64} : () -> ()
  // expected-error @below {{'kv.set_registers' op count must be a multiple of 8 from 24 to 256, got 16 : i64}}
  "kv.set_registers"() {action = "decrease", count = 16 : i64} : () -> ()
  // expected-error @below {{'kv.set_registers' op count must be a multiple of 8 from 24 to 256, got 264 : i64}}
  "kv.set_registers"() {action = "increase", count = 264 : i64} : () -> ()
  // expected-error @below {{'kv.set_registers' op action must be one of increase, decrease, got "set"}}
  "kv.set_registers"() {action = "set", count = 240 : i64} : () -> ()
  return
}

func.func @turn_wait_and_turn_pass() {
  // expected-error @below {{'kv.turn_wait' op groups must be one of all, first, got "last"}}
  "kv.turn_wait"() {groups = "last"} : () -> ()
  // expected-error @below {{'kv.turn_pass' op groups must be one of all, last, got "first"}}
  "kv.turn_pass"() {groups = "first"} : () -> ()
  return
}

func.func @copy_rows_start_and_take_work_item(%rows: memref<?x128xbf16>, %m: tensor<64xi1>, %i: tensor<64xi32>, %n: i32,
    %rows2: memref<?x?x128xbf16>, %counter: memref<?xi32>) {
  %s = "kv.make_stages"() {buffer_name = "rows", copy = "convert", stages = 2 : i64, tile = tensor<64x128xbf16, "shared">} : () -> !kv.stages
  // expected-error @below {{'kv.copy_rows_start' op needs a buffer that is filled by cp_async, got convert}}
  "kv.copy_rows_start"(%s, %n, %rows, %m, %i) : (!kv.stages, i32, memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> ()
  %s2 = "kv.make_stages"() {buffer_name = "rows", copy = "cp_async", stages = 2 : i64, tile = tensor<64x128xbf16, "shared">} : () -> !kv.stages
  // expected-error @below {{'kv.copy_rows_start' op the buffer must be a memref of rank 2, got memref<?x?x128xbf16>}}
  "kv.copy_rows_start"(%s2, %n, %rows2, %m, %i) : (!kv.stages, i32, memref<?x?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> ()
  // expected-error @below {{'kv.take_work_item' op the counter must have element type i8, got i32}}
  "kv.take_work_item"(%counter, %n, %n) : (memref<?xi32>, i32, i32) -> i32
  return
}

func.func @make_queue(%counter: memref<?xi8>) {
  // expected-error @below {{'kv.make_queue' op readers must be from 1 to 32 warps, got 0 : i64}}
  "kv.make_queue"(%counter) {readers = 0 : i64} : (memref<?xi8>) -> !kv.queue
  return
}

func.func @copy_finish_and_copy_wait(%i: i32) {
  %b = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.copy_finish' op finishes copies by cp_async, staged or transposed, got a buffer that is filled by tma}}
  "kv.copy_finish"(%b, %i) {pending = 0 : i64} : (!kv.stages, i32) -> ()
  %b2 = "kv.make_stages"() {buffer_name = "keys", copy = "staged", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.copy_finish' op pending must be an integer from 0 to 7, got -1 : i64}}
  "kv.copy_finish"(%b2, %i) {pending = -1 : i64} : (!kv.stages, i32) -> ()
  // expected-error @below {{'kv.copy_wait' op pending must be an integer from 0 to 7, got 8 : i64}}
  "kv.copy_wait"() {pending = 8 : i64} : () -> ()
  return
}

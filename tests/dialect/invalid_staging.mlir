// RUN: kv-opt %s --split-input-file --verify-diagnostics

// What the verifiers of circular buffers, products in flight and roles refuse. One chunk a rule.

!tile = tensor<64x128xbf16, "shared">
// Rule: a circular buffer has a stage.
func.func @rule() {
  // expected-error @below {{'kv.make_stages' op stages must be an integer from 1 to 16, got 0 : i64}}
  %0 = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 0 : i64, tile = !tile} : () -> !kv.stages
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
// Rule: a circular buffer has at most 16 stages.
func.func @rule() {
  // expected-error @below {{'kv.make_stages' op stages must be an integer from 1 to 16, got 17 : i64}}
  %0 = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 17 : i64, tile = !tile} : () -> !kv.stages
  return
}

// -----

// Rule: stages hold tiles in shared memory.
func.func @rule() {
  // expected-error @below {{'kv.make_stages' op tile must be the type of a tile of rank 2 with the layout "shared", got tensor<64x128xbf16>}}
  %0 = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = tensor<64x128xbf16>} : () -> !kv.stages
  return
}

// -----

// Rule: stages hold matrices.
func.func @rule() {
  // expected-error @below {{'kv.make_stages' op tile must be the type of a tile of rank 2 with the layout "shared", got tensor<64xbf16, "shared">}}
  %0 = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = tensor<64xbf16, "shared">} : () -> !kv.stages
  return
}

// -----

// Rule: stages hold tiles.
func.func @rule() {
  // expected-error @below {{'kv.make_stages' op tile must be the type of a tile of rank 2 with the layout "shared", got memref<64x128xbf16>}}
  %0 = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = memref<64x128xbf16>} : () -> !kv.stages
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
// Rule: copies are of three kinds.
func.func @rule() {
  // expected-error @below {{'kv.make_stages' op copy must be one of tma, cp_async, staged, transposed, convert, got "bulk"}}
  %0 = "kv.make_stages"() {buffer_name = "keys", copy = "bulk", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!tile = tensor<64x128xbf16, "shared">
// Rule: a copy reads a cache or operand.
func.func @rule(%c: !pool, %i: i32, %d: !map) {
  %b = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.copy_start' op operand must be of type !kv.cache or !kv.operand, got !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
  "kv.copy_start"(buffer = %b, n = %i, cache = %c, batch = %i, head = %i, first = %i, count = %i, descriptor = %d) {first_column = 0 : i64} : (!kv.stages, i32, !pool, i32, i32, i32, i32, !map) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!tile = tensor<64x128xbf16, "shared">
// Rule: a copy's columns lie in the head.
func.func @rule(%c: !cache, %i: i32, %d: !map) {
  %b = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.copy_start' op columns must be within the head's 128, rounded up to whole 16, got 128 from 8 : i64 on}}
  "kv.copy_start"(buffer = %b, n = %i, cache = %c, batch = %i, head = %i, first = %i, count = %i, descriptor = %d) {first_column = 8 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, !map) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!tile = tensor<64x128xbf16, "shared">
// Rule: a copy by TMA has a descriptor.
func.func @rule(%c: !cache, %i: i32, %d: !map) {
  %b = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.copy_start' op needs a descriptor for a buffer that is filled by tma, and for no other, got tma}}
  "kv.copy_start"(buffer = %b, n = %i, cache = %c, batch = %i, head = %i, first = %i, count = %i) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!tile = tensor<64x128xbf16, "shared">
// Rule: only a copy by TMA has a descriptor.
func.func @rule(%c: !cache, %i: i32, %d: !map) {
  %b = "kv.make_stages"() {buffer_name = "keys", copy = "cp_async", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.copy_start' op needs a descriptor for a buffer that is filled by tma, and for no other, got cp_async}}
  "kv.copy_start"(buffer = %b, n = %i, cache = %c, batch = %i, head = %i, first = %i, count = %i, descriptor = %d) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, !map) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!tile = tensor<64x128xbf16, "shared">
// Rule: only a copy by TMA or cp.async has its pages looked up before.
func.func @rule(%c: !cache, %i: i32, %d: !map) {
  %b = "kv.make_stages"() {buffer_name = "keys", copy = "convert", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.copy_start' op takes pages only for a buffer that is filled by tma or cp_async, got convert}}
  "kv.copy_start"(buffer = %b, n = %i, cache = %c, batch = %i, head = %i, first = %i, count = %i, pages = %i) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, i32) -> ()
  return
}

// -----

!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!tile = tensor<64x128xbf16, "shared">
// Rule: a copy does not convert by TMA.
func.func @rule(%c: !fp8, %i: i32, %d: !map) {
  %b = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.copy_start' op a descriptor copies elements without conversion, f8E4M3FN without scales, got tensor<64x128xbf16, "shared">}}
  "kv.copy_start"(buffer = %b, n = %i, cache = %c, batch = %i, head = %i, first = %i, count = %i, descriptor = %d) {first_column = 0 : i64} : (!kv.stages, i32, !fp8, i32, i32, i32, i32, !map) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: the buffer of a copy is in sight.
func.func @rule(%c: !cache, %i: i32, %d: !map, %b: !kv.stages) {
  // expected-error @below {{'kv.copy_start' op must name a buffer by the kv.make_stages that makes it: passes look at it there}}
  "kv.copy_start"(buffer = %b, n = %i, cache = %c, batch = %i, head = %i, first = %i, count = %i, descriptor = %d) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, !map) -> ()
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
// Rule: a buffer hands out its tiles.
func.func @rule(%i: i32) {
  %b = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.consumer_wait' op the result must be a tile of the buffer, tensor<64x128xbf16, "shared">, got tensor<64x64xbf16, "shared">}}
  %0 = "kv.consumer_wait"(%b, %i) : (!kv.stages, i32) -> tensor<64x64xbf16, "shared">
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
// Rule: the buffer of a wait is in sight.
func.func @rule(%b: !kv.stages, %i: i32) {
  // expected-error @below {{'kv.consumer_wait' op must name a buffer by the kv.make_stages that makes it: passes look at it there}}
  %0 = "kv.consumer_wait"(%b, %i) : (!kv.stages, i32) -> !tile
  return
}

// -----

!acc = tensor<64x64xf32, "wgmma">
// Rule: tiles in shared memory are cleared.
func.func @rule(%x: !acc, %i: i32) {
  // expected-error @below {{'kv.tile_clear' op the operand must be a tile of rank 2 with the layout "shared", got tensor<64x64xf32, "wgmma">}}
  %0 = "kv.tile_clear"(%x, %i, %i) : (!acc, i32, i32) -> !acc
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
// Rule: clearing keeps the type.
func.func @rule(%x: !tile, %i: i32) {
  // expected-error @below {{'kv.tile_clear' op the result must be of the operand's type tensor<64x128xbf16, "shared">, got tensor<64x64xbf16, "shared">}}
  %0 = "kv.tile_clear"(%x, %i, %i) : (!tile, i32, i32) -> tensor<64x64xbf16, "shared">
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a lane of the four warps that copy has at most one row.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.tile_row_pages' op rows must be from 1 to 128, one a lane of a warpgroup, got 144 : i64}}
  %0 = "kv.tile_row_pages"(%c, %i, %i, %i) {rows = 144 : i64} : (!cache, i32, i32, i32) -> i32
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a lane has at most one page.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.tile_pages' op rows must be from 1 to 32 steps, one a lane, got rows = 128 : i64 and step = 2 : i64}}
  %0 = "kv.tile_pages"(%c, %i, %i, %i) {rows = 128 : i64, step = 2 : i64} : (!cache, i32, i32, i32) -> i32
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a tile has whole steps of pages.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.tile_pages' op rows must be from 1 to 32 steps, one a lane, got rows = 72 : i64 and step = 16 : i64}}
  %0 = "kv.tile_pages"(%c, %i, %i, %i) {rows = 72 : i64, step = 16 : i64} : (!cache, i32, i32, i32) -> i32
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a step is positive.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.tile_pages' op rows must be from 1 to 32 steps, one a lane, got rows = 64 : i64 and step = 0 : i64}}
  %0 = "kv.tile_pages"(%c, %i, %i, %i) {rows = 64 : i64, step = 0 : i64} : (!cache, i32, i32, i32) -> i32
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: pages are those of a cache or operand.
func.func @rule(%c: !pool, %i: i32) {
  // expected-error @below {{'kv.tile_pages' op operand must be of type !kv.cache or !kv.operand, got !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
  %0 = "kv.tile_pages"(%c, %i, %i, %i) {rows = 64 : i64, step = 16 : i64} : (!pool, i32, i32, i32) -> i32
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
// Rule: a tile in registers is written to shared memory.
func.func @rule(%x: !tile, %p: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tile_store_shared' op the operand must be a tile of rank 2 in registers, got tensor<64x128xbf16, "shared">}}
  "kv.tile_store_shared"(%x, %p) : (!tile, !llvm.ptr<3>) -> ()
  return
}

// -----

// Rule: elements that threads read are of 16 bits.
func.func @rule(%x: tensor<64x64xf32, "wgmma">) {
  // expected-error @below {{'kv.tile_stage' op the operand must be a tile of rank 2 of bf16 or f16, got tensor<64x64xf32, "wgmma">}}
  %p = "kv.tile_stage"(%x) {first_column = 0 : i64, columns = 64 : i64} : (tensor<64x64xf32, "wgmma">) -> !llvm.ptr<3>
  return
}

// -----

// Rule: columns are those of the tile.
func.func @rule(%x: tensor<64x64xbf16, "wgmma">) {
  // expected-error @below {{'kv.tile_stage' op columns must be in the tile's 64, got 48 from 32 on}}
  %p = "kv.tile_stage"(%x) {first_column = 32 : i64, columns = 48 : i64} : (tensor<64x64xbf16, "wgmma">) -> !llvm.ptr<3>
  return
}

// -----

// Rule: columns go by 16, as registers hold them.
func.func @rule(%x: tensor<64x64xbf16, "wgmma">) {
  // expected-error @below {{'kv.tile_stage' op first_column and columns must be multiples of 16, got 8 : i64 and 32 : i64}}
  %p = "kv.tile_stage"(%x) {first_column = 8 : i64, columns = 32 : i64} : (tensor<64x64xbf16, "wgmma">) -> !llvm.ptr<3>
  return
}

// -----

!acc = tensor<64x64xf32, "wgmma">
// Rule: rows of a buffer have as many indices as its dimensions before the last.
func.func @rule(%x: !acc, %b: memref<?x?x64xf32>, %m: i1, %i: i32) {
  // expected-error @below {{'kv.tile_store_direct' op the buffer must be}}
  "kv.tile_store_direct"(source = %x, buffer = %b, masks = [%m, %m], indices = [%i, %i]) : (!acc, memref<?x?x64xf32>, i1, i1, i32, i32) -> ()
  return
}

// -----

!acc = tensor<64x64xf32, "wgmma">
// Rule: its place is in shared memory.
func.func @rule(%x: !acc, %p: !llvm.ptr<1>) {
  // expected-error @below {{'kv.tile_store_shared' op place must be !llvm.ptr<3>, got !llvm.ptr<1>}}
  "kv.tile_store_shared"(%x, %p) : (!acc, !llvm.ptr<1>) -> ()
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
!acc = tensor<64x64xf32, "wgmma">
// Rule: an asynchronous product has the shapes of a product.
func.func @rule(%q: !tile) {
  // expected-error @below {{'kv.dot_start' op a and b must share K = 128 and bf16, got tensor<64x128xbf16, "shared"> and tensor<64x128xbf16, "shared">}}
  %s = "kv.dot_start"(%q, %q) {transpose_b = false} : (!tile, !tile) -> !acc
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
!acc = tensor<64x64xf32, "wgmma">
// Rule: a product is waited for.
func.func @rule(%q: !tile) {
  // expected-error @below {{'kv.dot_start' op the result is in flight: only one kv.dot_wait may name it, got nothing}}
  %s = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
!acc = tensor<64x64xf32, "wgmma">
// Rule: what is in flight is not read.
func.func @rule(%q: !tile) {
  // expected-error @below {{'kv.dot_start' op the result is in flight: only one kv.dot_wait may name it, got kv.dot_wait, arith.negf}}
  %s = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  %x = arith.negf %s : !acc
  %w = "kv.dot_wait"(%s) {pending = 0 : i64} : (!acc) -> !acc
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
!acc = tensor<64x64xf32, "wgmma">
// Rule: one wait owns a product.
func.func @rule(%q: !tile) {
  // expected-error @below {{'kv.dot_start' op the result is in flight: only one kv.dot_wait may name it, got kv.dot_wait, kv.dot_wait}}
  %s = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  %w = "kv.dot_wait"(%s) {pending = 0 : i64} : (!acc) -> !acc
  %v = "kv.dot_wait"(%s) {pending = 0 : i64} : (!acc) -> !acc
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
!acc = tensor<64x64xf32, "wgmma">
// Rule: what is still in flight after a wait is not read.
func.func @rule(%q: !tile) {
  %s = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  %t = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  // expected-error @below {{'kv.dot_wait' op the newer result is in flight: only one kv.dot_wait may name it, got arith.negf}}
  %w:2 = "kv.dot_wait"(%s, %t) {pending = 1 : i64} : (!acc, !acc) -> (!acc, !acc)
  %x = arith.negf %w#1 : !acc
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
!acc = tensor<64x64xf32, "wgmma">
// Rule: a wait leaves fewer in flight than it is given.
func.func @rule(%q: !tile) {
  %s = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  // expected-error @below {{'kv.dot_wait' op pending must be from 0 to 0 (one less than the products), got 1 : i64}}
  %w = "kv.dot_wait"(%s) {pending = 1 : i64} : (!acc) -> !acc
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
!acc = tensor<64x64xf32, "wgmma">
// Rule: what a wait leaves in flight is counted.
func.func @rule(%q: !tile) {
  %s = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  // expected-error @below {{'kv.dot_wait' op pending must be from 0 to 0 (one less than the products), got -1 : i64}}
  %w = "kv.dot_wait"(%s) {pending = -1 : i64} : (!acc) -> !acc
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
!acc = tensor<64x64xf32, "wgmma">
// Rule: a wait keeps the types.
func.func @rule(%q: !tile) {
  %s = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  // expected-error @below {{'kv.dot_wait' op the results must have the operands' types, got ['tensor<64x64xf32>'] for ['tensor<64x64xf32, "wgmma">']}}
  %w = "kv.dot_wait"(%s) {pending = 0 : i64} : (!acc) -> tensor<64x64xf32>
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
!acc = tensor<64x64xf32, "wgmma">
// Rule: a wait hands back what it is given.
func.func @rule(%q: !tile) {
  %s = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  %t = "kv.dot_start"(%q, %q) {transpose_b = true} : (!tile, !tile) -> !acc
  // expected-error @below {{'kv.dot_wait' op the results must have the operands' types, got ['tensor<64x64xf32, "wgmma">'] for ['tensor<64x64xf32, "wgmma">', 'tensor<64x64xf32, "wgmma">']}}
  %w = "kv.dot_wait"(%s, %t) {pending = 0 : i64} : (!acc, !acc) -> !acc
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
// Rule: what is ready is in registers.
func.func @rule(%x: !tile) {
  // expected-error @below {{'kv.tile_ready' op the operand must be a tile of f32, bf16, f16 or f8E4M3FN in registers, got tensor<64x128xbf16, "shared">}}
  %0 = "kv.tile_ready"(%x) : (!tile) -> !tile
  return
}

// -----

// Rule: what is ready is f32.
func.func @rule(%x: tensor<64xi32>) {
  // expected-error @below {{'kv.tile_ready' op the operand must be a tile of f32, bf16, f16 or f8E4M3FN in registers, got tensor<64xi32>}}
  %0 = "kv.tile_ready"(%x) : (tensor<64xi32>) -> tensor<64xi32>
  return
}

// -----

!acc = tensor<64x64xf32, "wgmma">
// Rule: what is ready keeps its type.
func.func @rule(%x: !acc) {
  // expected-error @below {{'kv.tile_ready' op the result must be of the operand's type tensor<64x64xf32, "wgmma">, got tensor<64x64xf32>}}
  %0 = "kv.tile_ready"(%x) : (!acc) -> tensor<64x64xf32>
  return
}

// -----

// Rule: roles have names.
func.func @rule() {
  // expected-error @below {{'kv.is_role' op role must be one of producer, producer_warp_0, producer_warp_1, producer_warp_2, producer_warp_3, producer_warps_from_1, producer_warps_from_2, producer_warps_from_3, producer_group_0, producer_group_1, consumer, got "watcher"}}
  %0 = "kv.is_role"() {role = "watcher"} : () -> i1
  return
}

// -----

// Rule: registers are given in eights.
func.func @rule() {
  // expected-error @below {{'kv.set_registers' op count must be a multiple of 8 from 24 to 256, got 100 : i64}}
  "kv.set_registers"() {action = "increase", count = 100 : i64} : () -> ()
  return
}

// -----

// Rule: a thread has at least 24 registers.
func.func @rule() {
  // expected-error @below {{'kv.set_registers' op count must be a multiple of 8 from 24 to 256, got 16 : i64}}
  "kv.set_registers"() {action = "decrease", count = 16 : i64} : () -> ()
  return
}

// -----

// Rule: a thread has at most 256 registers.
func.func @rule() {
  // expected-error @below {{'kv.set_registers' op count must be a multiple of 8 from 24 to 256, got 264 : i64}}
  "kv.set_registers"() {action = "increase", count = 264 : i64} : () -> ()
  return
}

// -----

// Rule: registers are more or fewer.
func.func @rule() {
  // expected-error @below {{'kv.set_registers' op action must be one of increase, decrease, got "set"}}
  "kv.set_registers"() {action = "set", count = 240 : i64} : () -> ()
  return
}

// -----

// Rule: a turn is waited for by all, or by the first.
func.func @rule() {
  // expected-error @below {{'kv.turn_wait' op groups must be one of all, first, got "last"}}
  "kv.turn_wait"() {groups = "last"} : () -> ()
  return
}

// -----

// Rule: a turn is passed on by all, or by the last.
func.func @rule() {
  // expected-error @below {{'kv.turn_pass' op groups must be one of all, last, got "first"}}
  "kv.turn_pass"() {groups = "first"} : () -> ()
  return
}

// -----

// Rule: rows are copied by cp.async.
func.func @rule(%rows: memref<?x128xbf16>, %m: tensor<64xi1>, %i: tensor<64xi32>, %n: i32) {
  %s = "kv.make_stages"() {buffer_name = "rows", copy = "convert", stages = 2 : i64, tile = tensor<64x128xbf16, "shared">} : () -> !kv.stages
  // expected-error @below {{'kv.copy_rows_start' op needs a buffer that is filled by cp_async, got convert}}
  "kv.copy_rows_start"(%s, %n, %rows, %m, %i) : (!kv.stages, i32, memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> ()
  return
}

// -----

// Rule: rows have an index for every dimension but the last.
func.func @rule(%rows: memref<?x?x128xbf16>, %m: tensor<64xi1>, %i: tensor<64xi32>, %n: i32) {
  %s = "kv.make_stages"() {buffer_name = "rows", copy = "cp_async", stages = 2 : i64, tile = tensor<64x128xbf16, "shared">} : () -> !kv.stages
  // expected-error @below {{'kv.copy_rows_start' op the buffer must be a memref of rank 2, got memref<?x?x128xbf16>}}
  "kv.copy_rows_start"(%s, %n, %rows, %m, %i) : (!kv.stages, i32, memref<?x?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> ()
  return
}

// -----

// Rule: a counter is bytes.
func.func @rule(%counter: memref<?xi32>, %n: i32) {
  // expected-error @below {{'kv.take_round' op the counter must have element type i8, got i32}}
  %0 = "kv.take_round"(%counter, %n, %n) : (memref<?xi32>, i32, i32) -> i32
  return
}

// -----

// Rule: warps read a queue.
func.func @rule(%counter: memref<?xi8>) {
  // expected-error @below {{'kv.make_queue' op readers must be from 1 to 32 warps, got 0 : i64}}
  %0 = "kv.make_queue"(%counter) {readers = 0 : i64} : (memref<?xi8>) -> !kv.queue
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
// Rule: copies by TMA end by themselves.
func.func @rule(%i: i32) {
  %b = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.copy_finish' op finishes copies by cp_async, staged or transposed, got a buffer that is filled by tma}}
  "kv.copy_finish"(%b, %i) {pending = 0 : i64} : (!kv.stages, i32) -> ()
  return
}

// -----

!tile = tensor<64x128xbf16, "shared">
// Rule: some copies go on.
func.func @rule(%i: i32) {
  %b = "kv.make_stages"() {buffer_name = "keys", copy = "staged", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.copy_finish' op pending must be an integer from 0 to 7, got -1 : i64}}
  "kv.copy_finish"(%b, %i) {pending = -1 : i64} : (!kv.stages, i32) -> ()
  return
}

// -----

// Rule: some groups of copies go on.
func.func @rule() {
  // expected-error @below {{'kv.copy_wait' op pending must be an integer from 0 to 7, got 8 : i64}}
  "kv.copy_wait"() {pending = 8 : i64} : () -> ()
  return
}

// -----

!tile = tensor<64x128xf8E4M3FN, "shared(transposed)">
// Rule: a tile with tokens as columns is transposed on its way.
func.func @rule() {
  // expected-error @below {{'kv.make_stages' op copy "transposed" needs the layout "shared(transposed)"}}
  %b = "kv.make_stages"() {buffer_name = "values", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  return
}

// -----

!cache = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!tile = tensor<64x128xf8E4M3FN, "shared(transposed)">
// Rule: what transposes a tile knows where the sequence begins in it.
func.func @rule(%i: i32, %c: !cache) {
  %b = "kv.make_stages"() {buffer_name = "values", copy = "transposed", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.copy_start' op needs begin for a buffer that is filled by transposed, and for no other, got transposed}}
  "kv.copy_start"(buffer = %b, n = %i, cache = %c, batch = %i, head = %i, first = %i, count = %i) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32) -> ()
  return
}

// -----

// Rule: what is put into shared memory lies there.
func.func @rule(%x: tensor<64x64xbf16, "wgmma">) {
  // expected-error @below {{'kv.tile_stage' op the result must be !llvm.ptr<3>, got !llvm.ptr<1>}}
  %p = "kv.tile_stage"(%x) {first_column = 0 : i64, columns = 64 : i64} : (tensor<64x64xbf16, "wgmma">) -> !llvm.ptr<1>
  return
}

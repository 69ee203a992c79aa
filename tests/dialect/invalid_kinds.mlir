// RUN: kv-opt %s --split-input-file --verify-diagnostics

// Members that a kind of cache or operand does not have. One chunk a member.

!cache = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: a continuous cache has no scales to read.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.load_scale' op needs a quantized cache (one with a scale type), got one without scales}}
  %0 = "kv.load_scale"(%c, %i, %i, %i, %i) {width = 1 : i64} : (!cache, i32, i32, i32, i32) -> f32
  return
}

// -----

!cache = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: a continuous cache has no scales to write.
func.func @rule(%c: !cache, %i: i32, %x: f32) {
  // expected-error @below {{'kv.store_scale' op needs a quantized cache (one with a scale type), got one without scales}}
  "kv.store_scale"(%c, %i, %i, %i, %i, %x) {oob = "drop"} : (!cache, i32, i32, i32, i32, f32) -> ()
  return
}

// -----

!cache = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: a continuous cache is not quantized.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.load_raw' op needs a quantized cache (one with a scale type), got one without scales}}
  %0 = "kv.load_raw"(%c, %i, %i, %i, %i) {width = 1 : i64} : (!cache, i32, i32, i32, i32) -> bf16
  return
}

// -----

!cache = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: a continuous cache has no scales to point at.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.scale_block_ptr' op needs a quantized cache (one with a scale type), got one without scales}}
  %0 = "kv.scale_block_ptr"(%c, %i, %i, %i, %i) : (!cache, i32, i32, i32, i32) -> !llvm.ptr<1>
  return
}

// -----

!cache = !kv.cache<"fa3", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: an fa3 cache has no rows to encode.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.tma_row' op needs a paged or continuous cache: an fa3 cache has no rows}}
  %0 = "kv.tma_row"(%c, %i) : (!cache, i32) -> i32
  return
}

// -----

!cache = !kv.cache<"fa3", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: an fa3 cache has no rows to count.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.num_rows' op needs a paged or continuous cache: an fa3 cache has no rows}}
  %0 = "kv.num_rows"(%c) : (!cache) -> i32
  return
}

// -----

!cache = !kv.cache<"fa3", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: an fa3 cache has no row of a token.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.row_index' op needs a paged or continuous cache: an fa3 cache has no rows}}
  %0 = "kv.row_index"(%c, %i, %i) : (!cache, i32, i32) -> i32
  return
}

// -----

!cache = !kv.cache<"fa3", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: an fa3 cache has no rows of a tile.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.populate' op needs a paged or continuous cache: an fa3 cache has no rows}}
  %0 = "kv.populate"(%c, %i, %i) {tile_rows = 16 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true} : (!cache, i32, i32) -> !kv.rows<16 : i64, 16 : i64>
  return
}

// -----

!cache = !kv.cache<"fa3", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: an fa3 cache has no scales to read.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.load_scale' op needs a quantized cache (one with a scale type), got one without scales}}
  %0 = "kv.load_scale"(%c, %i, %i, %i, %i) {width = 1 : i64} : (!cache, i32, i32, i32, i32) -> f32
  return
}

// -----

!tile = !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!cache = !kv.cache<"fa3", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: an fa3 cache has no table of descriptors.
func.func @rule(%p: !tile, %c: !cache, %i: i32, %s: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load_tile' op a TMA tile needs a paged or continuous cache, or a dense or ragged operand, got fa3: a cache of that kind has no rows}}
  "kv.tma_load_tile"(%p, %c, %i, %i, %i, %i, %i, %s, %s) {tile_rows = 16 : i64, smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!tile, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// -----

!tile = !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!cache = !kv.operand<"scales", i8, 8 : i64, 128 : i64, false, 16 : i64, f32, 64 : i64>
// Rule: scales are read one by one.
func.func @rule(%p: !tile, %c: !cache, %i: i32, %s: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load_tile' op a TMA tile needs a paged or continuous cache, or a dense or ragged operand, got scales: scales are read one by one}}
  "kv.tma_load_tile"(%p, %c, %i, %i, %i, %i, %i, %s, %s) {tile_rows = 16 : i64, smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!tile, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// -----

!tile = !kv.tma<"rope", bf16, array<i64: 64, 1, 64>, array<i64: 64, 1, 64>, 128 : i64>
!cache = !kv.operand<"dense", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: a dense operand has no rope part.
func.func @rule(%p: !tile, %c: !cache, %i: i32, %s: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load_tile' op a rope TMA tile needs a paged cache, got dense}}
  "kv.tma_load_tile"(%p, %c, %i, %i, %i, %i, %i, %s, %s) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!tile, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// -----

!tile = !kv.tma<"rope", bf16, array<i64: 64, 1, 64>, array<i64: 64, 1, 64>, 128 : i64>
!cache = !kv.operand<"ragged", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: a ragged operand has no rope part.
func.func @rule(%p: !tile, %c: !cache, %i: i32, %s: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load_tile' op a rope TMA tile needs a paged cache, got ragged}}
  "kv.tma_load_tile"(%p, %c, %i, %i, %i, %i, %i, %s, %s) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!tile, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// -----

// Rule: scales of fa3 pools.
// expected-error @below {{'func.func' op argument #0 has a malformed type: scales need a paged cache, got a fa3 one; got !kv.cache<"fa3", i8, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>}}
func.func private @type(!kv.cache<"fa3", i8, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>)

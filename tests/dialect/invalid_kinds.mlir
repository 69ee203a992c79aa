// RUN: kv-opt %s --verify-diagnostics

// Members that a kind of cache or operand does not have.

!continuous = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!fa3 = !kv.cache<"fa3", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!tile = !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!scales = !kv.operand<"scales", i8, 8 : i64, 128 : i64, false, 16 : i64, f32, 64 : i64>
!rope = !kv.tma<"rope", bf16, array<i64: 64, 1, 64>, array<i64: 64, 1, 64>, 128 : i64>
!dense = !kv.operand<"dense", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!ragged = !kv.operand<"ragged", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>

func.func @kinds(%c: !continuous, %i: i32, %c2: !fa3, %x: f32) {
  // expected-error @below {{'kv.load_scale' op needs a quantized cache (one with a scale type), got one without scales}}
  "kv.load_scale"(%c, %i, %i, %i, %i) {width = 1 : i64} : (!continuous, i32, i32, i32, i32) -> f32
  // expected-error @below {{'kv.load_scale' op needs a quantized cache (one with a scale type), got one without scales}}
  "kv.load_scale"(%c2, %i, %i, %i, %i) {width = 1 : i64} : (!fa3, i32, i32, i32, i32) -> f32
  // expected-error @below {{'kv.store_scale' op needs a quantized cache (one with a scale type), got one without scales}}
  "kv.store_scale"(%c, %i, %i, %i, %i, %x) {oob = "drop"} : (!continuous, i32, i32, i32, i32, f32) -> ()
  // expected-error @below {{'kv.load_raw' op needs a quantized cache (one with a scale type), got one without scales}}
  "kv.load_raw"(%c, %i, %i, %i, %i) {width = 1 : i64} : (!continuous, i32, i32, i32, i32) -> bf16
  // expected-error @below {{'kv.scale_block_ptr' op needs a quantized cache (one with a scale type), got one without scales}}
  "kv.scale_block_ptr"(%c, %i, %i, %i, %i) : (!continuous, i32, i32, i32, i32) -> !llvm.ptr<1>
  return
}

func.func @kinds_2(%c: !fa3, %i: i32) {
  // expected-error @below {{'kv.tma_row' op needs a paged or continuous cache: an fa3 cache has no rows}}
  "kv.tma_row"(%c, %i) : (!fa3, i32) -> i32
  // expected-error @below {{'kv.num_rows' op needs a paged or continuous cache: an fa3 cache has no rows}}
  "kv.num_rows"(%c) : (!fa3) -> i32
  // expected-error @below {{'kv.row_index' op needs a paged or continuous cache: an fa3 cache has no rows}}
  "kv.row_index"(%c, %i, %i) : (!fa3, i32, i32) -> i32
  // expected-error @below {{'kv.populate' op needs a paged or continuous cache: an fa3 cache has no rows}}
  "kv.populate"(%c, %i, %i) {tile_rows = 16 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true} : (!fa3, i32, i32) -> !kv.rows<16 : i64, 16 : i64>
  return
}

func.func @tma_load_tile(%p: !tile, %c: !fa3, %i: i32, %s: !llvm.ptr<3>, %c2: !scales, %p2: !rope, %c3: !dense,
    %c4: !ragged) {
  // expected-error @below {{'kv.tma_load_tile' op a TMA tile needs a paged or continuous cache, or a dense or ragged operand, got fa3: a cache of that kind has no rows}}
  "kv.tma_load_tile"(%p, %c, %i, %i, %i, %i, %i, %s, %s) {tile_rows = 16 : i64, smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!tile, !fa3, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.tma_load_tile' op a TMA tile needs a paged or continuous cache, or a dense or ragged operand, got scales: scales are read one by one}}
  "kv.tma_load_tile"(%p, %c2, %i, %i, %i, %i, %i, %s, %s) {tile_rows = 16 : i64, smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!tile, !scales, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.tma_load_tile' op a rope TMA tile needs a paged cache, got dense}}
  "kv.tma_load_tile"(%p2, %c3, %i, %i, %i, %i, %i, %s, %s) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!rope, !dense, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.tma_load_tile' op a rope TMA tile needs a paged cache, got ragged}}
  "kv.tma_load_tile"(%p2, %c4, %i, %i, %i, %i, %i, %s, %s) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!rope, !ragged, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// expected-error @below {{'func.func' op argument #0 has a malformed type: scales need a paged cache, got a fa3 one; got !kv.cache<"fa3", i8, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>}}
func.func private @scales(!kv.cache<"fa3", i8, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>)

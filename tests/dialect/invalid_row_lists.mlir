// RUN: kv-opt %s --verify-diagnostics

// What the verifiers of tiles of listed rows, and of rows with a format, refuse.

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!tile = tensor<64x128xbf16, "shared">
!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!continuous = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>

func.func @copy_start(%c: !cache, %i: i32, %d: !map, %l: memref<?x?xi32>, %c2: !fp8) {
  %b = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.copy_start' op takes a descriptor only without lists and row formats}}
  "kv.copy_start"(buffer = %b, n = %i, cache = %c, batch = %i, head = %i, first = %i, count = %i, descriptor = %d, lists = %l) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, !map, memref<?x?xi32>) -> ()
  %b2 = "kv.make_stages"() {buffer_name = "keys", copy = "staged", stages = 2 : i64, tile = !tile} : () -> !kv.stages
  // expected-error @below {{'kv.copy_start' op lists and row formats need copies by cp_async or convert, got staged}}
  "kv.copy_start"(buffer = %b2, n = %i, cache = %c2, batch = %i, head = %i, first = %i, count = %i, lists = %l) {first_column = 0 : i64} : (!kv.stages, i32, !fp8, i32, i32, i32, i32, memref<?x?xi32>) -> ()
  return
}

func.func @tile_load(%c: !continuous, %i: i32, %l: memref<?x?xi32>, %c2: !cache) {
  // expected-error @below {{'kv.tile_load' op lists need a paged cache, got !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>}}
  "kv.tile_load"(cache = %c, batch = %i, head = %i, first = %i, begin = %i, count = %i, lists = %l) {first_column = 0 : i64, tail = "zero"} : (!continuous, i32, i32, i32, i32, i32, memref<?x?xi32>) -> tensor<64x128xbf16>
  // expected-error @below {{'kv.tile_load' op rope and inline_scales need large enough 8-bit rows, got !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
  "kv.tile_load"(cache = %c2, batch = %i, head = %i, first = %i, begin = %i, count = %i) {first_column = 0 : i64, tail = "zero", rope = 32 : i64} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  return
}

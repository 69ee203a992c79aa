// RUN: kv-opt %s --split-input-file --verify-diagnostics

!f8 = !kv.cache<"paged", f8E4M3FN, 2 : i64, 64 : i64, false, 16 : i64, f32, 64 : i64>
!bf16 = !kv.cache<"paged", bf16, 2 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>

func.func @tile_load(%k: !f8, %i: i32, %k2: !bf16) {
  // expected-error @below {{'kv.tile_load' op dequantizes, so the tile must not have the storage type f8E4M3FN}}
  "kv.tile_load"(%k, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!f8, i32, i32, i32, i32, i32) -> tensor<16x64xf8E4M3FN>
  // expected-error @below {{'kv.tile_load' op the tile must have a float element type, got i32}}
  "kv.tile_load"(%k2, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!bf16, i32, i32, i32, i32, i32) -> tensor<16x64xi32>
  return
}

func.func @tile_store_rows(%x: tensor<64x128xbf16>, %b: memref<?x128xbf16>, %m: tensor<64xi1>, %i: tensor<64xi32>) {
  // expected-error @below {{'kv.tile_store_rows' op first_column must be a multiple of 16, got 8}}
  "kv.tile_store_rows"(%x, %b, %m, %i) {first_column = 8 : i64} : (tensor<64x128xbf16>, memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> ()
  return
}

func.func @tile_store(%k: !f8, %i: i32, %n: !kv.cache<"paged", i8, 2 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>, %x: tensor<16x64xf32>,
    %k2: !bf16, %y: tensor<16x64xi32>, %z: tensor<16x32xf32>) {
  // expected-error @below {{'kv.tile_store' op stores to caches of floats or with scales, got !kv.cache<"paged", i8}}
  "kv.tile_store"(%n, %i, %i, %i, %i, %x) {first_column = 0 : i64} : (!kv.cache<"paged", i8, 2 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>, i32, i32, i32, i32, tensor<16x64xf32>) -> ()
  // expected-error @below {{'kv.tile_store' op the value must have a float element type, got i32}}
  "kv.tile_store"(%k2, %i, %i, %i, %i, %y) {first_column = 0 : i64} : (!bf16, i32, i32, i32, i32, tensor<16x64xi32>) -> ()
  // expected-error @below {{'kv.tile_store' op writes whole heads to a cache with scales}}
  "kv.tile_store"(%k, %i, %i, %i, %i, %z) {first_column = 0 : i64} : (!f8, i32, i32, i32, i32, tensor<16x32xf32>) -> ()
  return
}

func.func @tile_ramp(%x: tensor<64xf32>, %y: tensor<128xf32>, %x2: tensor<64xbf16>) {
  // expected-error @below {{'kv.tile_ramp' op step must be 64xf32, got tensor<128xf32>}}
  "kv.tile_ramp"(%x, %y) : (tensor<64xf32>, tensor<128xf32>) -> tensor<64x128xf32>
  // expected-error @below {{'kv.tile_ramp' op the result must be a tile of f32, got tensor<64x128xbf16>}}
  "kv.tile_ramp"(%x2, %x2) : (tensor<64xbf16>, tensor<64xbf16>) -> tensor<64x128xbf16>
  return
}

// -----

// A conversion keeps the shape of a tile.
func.func @shapes(%x: tensor<4x8xf32>) {
  // expected-error @below {{'kv.cast' op must keep the number of lanes, got (4, 8) and (8, 4)}}
  %t = "kv.cast"(%x) : (tensor<4x8xf32>) -> tensor<8x4xf8E4M3FN>
  return
}

// RUN: kv-opt %s --verify-roundtrip --verify-kv | FileCheck %s

!cache = !kv.cache<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, f32, 128 : i64>

// CHECK-LABEL: func.func @fragments
// CHECK:         "kv.tile_load"({{.*}} -> tensor<64x128xi8, "shared">
// CHECK:         "kv.tile_fragments"(%{{.*}}) : (tensor<64x128xi8, "shared">) -> tensor<64x128xbf16, "wgmma">
// CHECK:         "kv.tile_scales"(%{{.*}}) {first_column = 0 : i64} : ({{.*}}) -> tensor<64xf32, "rows(wgmma)">
func.func @fragments(%c: !cache, %i: i32) {
  %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xi8, "shared">
  %a = "kv.tile_fragments"(%k) : (tensor<64x128xi8, "shared">) -> tensor<64x128xbf16, "wgmma">
  %s = "kv.tile_scales"(%c, %i, %i, %i, %i) {first_column = 0 : i64} : (!cache, i32, i32, i32, i32) -> tensor<64xf32, "rows(wgmma)">
  return
}

// RUN: kv-opt %s --verify-roundtrip --verify-kv --named-operands | FileCheck %s

// CHECK-LABEL: func.func @sharing
// CHECK:         "kv.tile_share"(%{{.*}}) : (tensor<64x32xbf16, "mma:4x2">) -> tensor<64x32xbf16, "shared">
// CHECK:         "kv.tile_columns"(%{{.*}}) {first_column = 64 : i64} : (tensor<32x576xbf16, "shared">) -> tensor<32x512xbf16, "shared">
// CHECK:         "kv.tile_columns"(%{{.*}}) {first_column = 8 : i64} : (tensor<64x128xf8E4M3FN, "shared(transposed)">) -> tensor<64x32xf8E4M3FN, "shared(transposed)">
// CHECK:         "kv.tile_beside"(%{{.*}}, %{{.*}}) : (tensor<32x64xbf16>, tensor<32x16xbf16>) -> tensor<32x80xbf16>
// CHECK:         "kv.tile_add_columns"(%{{.*}}, %{{.*}}) {first_column = 8 : i64} : (tensor<64x64xf32, "wgmma">, tensor<64x32xf32, "wgmma">) -> tensor<64x64xf32, "wgmma">
func.func @sharing(%x: tensor<64x32xbf16, "mma:4x2">, %k: tensor<32x576xbf16, "shared">, %t: tensor<64x128xf8E4M3FN, "shared(transposed)">, %o: tensor<64x64xf32, "wgmma">, %p: tensor<64x32xf32, "wgmma">, %l: tensor<32x64xbf16>, %r: tensor<32x16xbf16>) {
  %a = "kv.tile_share"(%x) : (tensor<64x32xbf16, "mma:4x2">) -> tensor<64x32xbf16, "shared">
  %v = "kv.tile_columns"(%k) {first_column = 64 : i64} : (tensor<32x576xbf16, "shared">) -> tensor<32x512xbf16, "shared">
  %w = "kv.tile_columns"(%t) {first_column = 8 : i64} : (tensor<64x128xf8E4M3FN, "shared(transposed)">) -> tensor<64x32xf8E4M3FN, "shared(transposed)">
  %b = "kv.tile_beside"(%l, %r) : (tensor<32x64xbf16>, tensor<32x16xbf16>) -> tensor<32x80xbf16>
  %s = "kv.tile_add_columns"(%o, %p) {first_column = 8 : i64} : (tensor<64x64xf32, "wgmma">, tensor<64x32xf32, "wgmma">) -> tensor<64x64xf32, "wgmma">
  return
}

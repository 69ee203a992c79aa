// RUN: kv-opt %s --verify-roundtrip --verify-kv --named-operands | FileCheck %s

// CHECK-LABEL: func.func @sharing
// CHECK:         "kv.tile_share"(%{{.*}}) : (tensor<64x32xbf16, "mma:4x2">) -> tensor<64x32xbf16, "shared">
// CHECK:         "kv.tile_columns"(%{{.*}}) {first_column = 64 : i64} : (tensor<32x576xbf16, "shared">) -> tensor<32x512xbf16, "shared">
func.func @sharing(%x: tensor<64x32xbf16, "mma:4x2">, %k: tensor<32x576xbf16, "shared">) {
  %a = "kv.tile_share"(%x) : (tensor<64x32xbf16, "mma:4x2">) -> tensor<64x32xbf16, "shared">
  %v = "kv.tile_columns"(%k) {first_column = 64 : i64} : (tensor<32x576xbf16, "shared">) -> tensor<32x512xbf16, "shared">
  return
}

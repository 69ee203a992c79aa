// RUN: kv-opt %s --verify-roundtrip --verify-kv --named-operands | FileCheck %s

// CHECK-LABEL: func.func @weights
// CHECK:         "kv.tile_ones"() : () -> tensor<8x128xf8E4M3FN, "shared">
// CHECK:         "kv.tile_saturated"(%{{.*}}) : (tensor<64x128xf8E4M3FN, "wgmma">) -> tensor<64xi1, "rows(wgmma)">
func.func @weights(%w: tensor<64x128xf8E4M3FN, "wgmma">) {
  %ones = "kv.tile_ones"() : () -> tensor<8x128xf8E4M3FN, "shared">
  %large = "kv.tile_saturated"(%w) : (tensor<64x128xf8E4M3FN, "wgmma">) -> tensor<64xi1, "rows(wgmma)">
  return
}

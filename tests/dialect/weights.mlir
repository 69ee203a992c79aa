// RUN: kv-opt %s --verify-roundtrip --verify-kv --named-operands | FileCheck %s

// CHECK-LABEL: func.func @weights
// CHECK:         "kv.tile_ones"() : () -> tensor<8x128xf8E4M3FN, "shared">
// CHECK:         "kv.tile_saturated"(%{{.*}}) : (tensor<64x128xf8E4M3FN, "wgmma">) -> tensor<64xi1, "rows(wgmma)">
// CHECK:         "kv.tile_weights"(%{{.*}}, %{{.*}}, %{{.*}}) : (tensor<64x128xf32>, tensor<64xf32>, tensor<64xf32>) -> tensor<64x128xf32>
func.func @weights(%w: tensor<64x128xf8E4M3FN, "wgmma">, %x: tensor<64x128xf32>, %unit: tensor<64xf32>) {
  %ones = "kv.tile_ones"() : () -> tensor<8x128xf8E4M3FN, "shared">
  %large = "kv.tile_saturated"(%w) : (tensor<64x128xf8E4M3FN, "wgmma">) -> tensor<64xi1, "rows(wgmma)">
  %weights = "kv.tile_weights"(%x, %unit, %unit) : (tensor<64x128xf32>, tensor<64xf32>, tensor<64xf32>) -> tensor<64x128xf32>
  return
}

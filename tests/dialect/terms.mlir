// RUN: kv-opt %s --verify-roundtrip --verify-kv | FileCheck %s

// CHECK-LABEL: func.func @terms
// CHECK:         %[[T:.*]]:2 = "kv.tile_terms"(%{{.*}}) {operandSegmentSizes = array<i32: 1, 0>} : (tensor<64x80xbf16>) -> (tensor<64x192xf8E4M3FN>, tensor<64xf32>)
// CHECK:         "kv.dot"(%[[T]]#0, %{{.*}}) {transpose_b = true} : (tensor<64x192xf8E4M3FN>, tensor<128x96xf8E5M2>) -> tensor<64x128xf32>
// CHECK:         "kv.tile_terms"(%{{.*}}, %{{.*}}) {operandSegmentSizes = array<i32: 1, 1>} : (tensor<64x80xbf16>, i32) -> (tensor<64x192xf8E4M3FN>, tensor<64xf32>)
func.func @terms(%q: tensor<64x80xbf16>, %k: tensor<128x96xf8E5M2>, %n: i32) {
  %t, %u = "kv.tile_terms"(%q) {operandSegmentSizes = array<i32: 1, 0>} : (tensor<64x80xbf16>) -> (tensor<64x192xf8E4M3FN>, tensor<64xf32>)
  %s = "kv.dot"(%t, %k) {transpose_b = true} : (tensor<64x192xf8E4M3FN>, tensor<128x96xf8E5M2>) -> tensor<64x128xf32>
  %t2, %u2 = "kv.tile_terms"(%q, %n) {operandSegmentSizes = array<i32: 1, 1>} : (tensor<64x80xbf16>, i32) -> (tensor<64x192xf8E4M3FN>, tensor<64xf32>)
  return
}

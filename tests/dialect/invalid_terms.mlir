// RUN: kv-opt %s --verify-diagnostics

func.func @tile_terms(%q: tensor<64x64xf16>, %q2: tensor<64x80xbf16>, %q3: tensor<64x64xbf16>) {
  // expected-error @below {{'kv.tile_terms' op the operand must be a tile of rank 2 of bf16, got tensor<64x64xf16>}}
  "kv.tile_terms"(%q) {operandSegmentSizes = array<i32: 1, 0>} : (tensor<64x64xf16>) -> (tensor<64x128xf8E4M3FN>, tensor<64xf32>)
  // expected-error @below {{'kv.tile_terms' op the terms must be 64 x 192 x f8E4M3FN, got tensor<64x160xf8E4M3FN>}}
  "kv.tile_terms"(%q2) {operandSegmentSizes = array<i32: 1, 0>} : (tensor<64x80xbf16>) -> (tensor<64x160xf8E4M3FN>, tensor<64xf32>)
  // expected-error @below {{'kv.tile_terms' op the powers must be 64 x f32, got tensor<128xf32>}}
  "kv.tile_terms"(%q3) {operandSegmentSizes = array<i32: 1, 0>} : (tensor<64x64xbf16>) -> (tensor<64x128xf8E4M3FN>, tensor<128xf32>)
  return
}

func.func @dot(%a: tensor<64x128xf8E4M3FN>, %b: tensor<64x128xf8E4M3FN>) {
  // expected-error @below {{'kv.dot' op a and b must share K = 128 and f8E4M3FN, got tensor<64x128xf8E4M3FN> and tensor<64x128xf8E4M3FN>}}
  "kv.dot"(%a, %b) {transpose_b = false} : (tensor<64x128xf8E4M3FN>, tensor<64x128xf8E4M3FN>) -> tensor<64x128xf32>
  return
}

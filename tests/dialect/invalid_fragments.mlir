// RUN: kv-opt %s --split-input-file --verify-diagnostics

// Rule: what is converted has 8 bits.
func.func @rule(%k: tensor<64x128xbf16, "shared">) {
  // expected-error @below {{'kv.tile_fragments' op the operand must be a tile of rank 2 of f8E4M3FN, f8E5M2, i8, got tensor<64x128xbf16, "shared">}}
  %a = "kv.tile_fragments"(%k) : (tensor<64x128xbf16, "shared">) -> tensor<64x128xbf16, "wgmma">
  return
}

// -----

// Rule: it lies in shared memory by rows.
func.func @rule(%k: tensor<64x128xf8E4M3FN, "shared(transposed)">) {
  // expected-error @below {{'kv.tile_fragments' op the operand must have the layout "shared", got tensor<64x128xf8E4M3FN, "shared(transposed)">}}
  %a = "kv.tile_fragments"(%k) : (tensor<64x128xf8E4M3FN, "shared(transposed)">) -> tensor<64x128xbf16, "wgmma">
  return
}

// -----

// Rule: products take 16 bits, of the same shape.
func.func @rule(%k: tensor<64x128xf8E4M3FN, "shared">) {
  // expected-error @below {{'kv.tile_fragments' op the result must be a tile of the operand's shape of bf16 or f16, got tensor<64x128xf32, "wgmma">}}
  %a = "kv.tile_fragments"(%k) : (tensor<64x128xf8E4M3FN, "shared">) -> tensor<64x128xf32, "wgmma">
  return
}

// -----

// Rule: threads hold the result.
func.func @rule(%k: tensor<64x128xf8E4M3FN, "shared">) {
  // expected-error @below {{'kv.tile_fragments' op the result must be in registers, got tensor<64x128xbf16, "shared">}}
  %a = "kv.tile_fragments"(%k) : (tensor<64x128xf8E4M3FN, "shared">) -> tensor<64x128xbf16, "shared">
  return
}

// -----

!cache = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>

// Rule: there are scales.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.tile_scales' op needs a quantized cache (one with scales), got !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
  %s = "kv.tile_scales"(%c, %i, %i, %i, %i) {first_column = 0 : i64} : (!cache, i32, i32, i32, i32) -> tensor<64xf32>
  return
}

// -----

!cache = !kv.cache<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, f32, 64 : i64>

// Rule: the column is one of the head.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.tile_scales' op first_column must lie in the head's 128, got 128 : i64}}
  %s = "kv.tile_scales"(%c, %i, %i, %i, %i) {first_column = 128 : i64} : (!cache, i32, i32, i32, i32) -> tensor<64xf32>
  return
}

// -----

!cache = !kv.cache<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, f32, 64 : i64>

// Rule: scales are f32, one of a token.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.tile_scales' op the result must be a vector of f32, got tensor<64xf16>}}
  %s = "kv.tile_scales"(%c, %i, %i, %i, %i) {first_column = 0 : i64} : (!cache, i32, i32, i32, i32) -> tensor<64xf16>
  return
}

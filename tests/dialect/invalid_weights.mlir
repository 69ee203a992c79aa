// RUN: kv-opt %s --verify-kv --split-input-file --verify-diagnostics

func.func @ones_in_registers() {
  // expected-error @below {{'kv.tile_ones' op the result must be a tile of rank 2 of f8E4M3FN with layout shared, got tensor<8x128xf8E4M3FN, "wgmma">}}
  %0 = "kv.tile_ones"() : () -> tensor<8x128xf8E4M3FN, "wgmma">
  return
}

// -----

func.func @ones_of_16_bits() {
  // expected-error @below {{'kv.tile_ones' op the result must be a tile of rank 2 of f8E4M3FN with layout shared, got tensor<8x128xbf16, "shared">}}
  %0 = "kv.tile_ones"() : () -> tensor<8x128xbf16, "shared">
  return
}

// -----

func.func @saturated_16_bits(%x: tensor<64x128xbf16, "wgmma">) {
  // expected-error @below {{'kv.tile_saturated' op the operand must be a tile of rank 2 of f8E4M3FN, got tensor<64x128xbf16, "wgmma">}}
  %0 = "kv.tile_saturated"(%x) : (tensor<64x128xbf16, "wgmma">) -> tensor<64xi1, "rows(wgmma)">
  return
}

// -----

func.func @saturated_in_shared_memory(%x: tensor<64x128xf8E4M3FN, "shared">) {
  // expected-error @below {{'kv.tile_saturated' op the operand must be a tile in registers, got tensor<64x128xf8E4M3FN, "shared">}}
  %0 = "kv.tile_saturated"(%x) : (tensor<64x128xf8E4M3FN, "shared">) -> tensor<64xi1, "rows(wgmma)">
  return
}

// -----

func.func @saturated_columns(%x: tensor<64x128xf8E4M3FN, "wgmma">) {
  // expected-error @below {{'kv.tile_saturated' op the result must be 64 x i1, got tensor<128xi1, "rows(wgmma)">}}
  %0 = "kv.tile_saturated"(%x) : (tensor<64x128xf8E4M3FN, "wgmma">) -> tensor<128xi1, "rows(wgmma)">
  return
}

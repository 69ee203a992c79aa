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

// -----

func.func @weights_of_16_bits(%x: tensor<64x128xbf16>, %unit: tensor<64xf32>) {
  // expected-error @below {{'kv.tile_weights' op scores must be a tile of rank 2 of f32, got tensor<64x128xbf16>}}
  %0 = "kv.tile_weights"(%x, %unit, %unit) : (tensor<64x128xbf16>, tensor<64xf32>, tensor<64xf32>) -> tensor<64x128xbf16>
  return
}

// -----

func.func @weights_under_maxima_of_columns(%x: tensor<64x128xf32>, %unit: tensor<64xf32>, %m: tensor<128xf32>) {
  // expected-error @below {{'kv.tile_weights' op maximum must be 64 x f32, got tensor<128xf32>}}
  %0 = "kv.tile_weights"(%x, %unit, %m) : (tensor<64x128xf32>, tensor<64xf32>, tensor<128xf32>) -> tensor<64x128xf32>
  return
}

// -----

func.func @weights_that_are_converted(%x: tensor<64x128xf32>, %unit: tensor<64xf32>) {
  // expected-error @below {{'kv.tile_weights' op the result must be tensor<64x128xf32>, got tensor<64x128xbf16>}}
  %0 = "kv.tile_weights"(%x, %unit, %unit) : (tensor<64x128xf32>, tensor<64xf32>, tensor<64xf32>) -> tensor<64x128xbf16>
  return
}

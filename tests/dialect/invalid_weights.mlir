// RUN: kv-opt %s --verify-kv --verify-diagnostics

func.func @tile_ones() {
  // expected-error @below {{'kv.tile_ones' op the result must be a tile of rank 2 of f8E4M3FN with layout shared, got tensor<8x128xf8E4M3FN, "wgmma">}}
  "kv.tile_ones"() : () -> tensor<8x128xf8E4M3FN, "wgmma">
  // expected-error @below {{'kv.tile_ones' op the result must be a tile of rank 2 of f8E4M3FN with layout shared, got tensor<8x128xbf16, "shared">}}
  "kv.tile_ones"() : () -> tensor<8x128xbf16, "shared">
  return
}

func.func @tile_saturated(%x: tensor<64x128xbf16, "wgmma">, %x2: tensor<64x128xf8E4M3FN, "shared">,
    %x3: tensor<64x128xf8E4M3FN, "wgmma">) {
  // expected-error @below {{'kv.tile_saturated' op the operand must be a tile of rank 2 of f8E4M3FN, got tensor<64x128xbf16, "wgmma">}}
  "kv.tile_saturated"(%x) : (tensor<64x128xbf16, "wgmma">) -> tensor<64xi1, "rows(wgmma)">
  // expected-error @below {{'kv.tile_saturated' op the operand must be a tile in registers, got tensor<64x128xf8E4M3FN, "shared">}}
  "kv.tile_saturated"(%x2) : (tensor<64x128xf8E4M3FN, "shared">) -> tensor<64xi1, "rows(wgmma)">
  // expected-error @below {{'kv.tile_saturated' op the result must be 64 x i1, got tensor<128xi1, "rows(wgmma)">}}
  "kv.tile_saturated"(%x3) : (tensor<64x128xf8E4M3FN, "wgmma">) -> tensor<128xi1, "rows(wgmma)">
  return
}

func.func @tile_weights(%x: tensor<64x128xbf16>, %scale_log2: tensor<64xf32>, %x2: tensor<64x128xf32>, %m: tensor<128xf32>) {
  // expected-error @below {{'kv.tile_weights' op scores must be a tile of rank 2 of f32, got tensor<64x128xbf16>}}
  "kv.tile_weights"(%x, %scale_log2, %scale_log2) : (tensor<64x128xbf16>, tensor<64xf32>, tensor<64xf32>) -> tensor<64x128xbf16>
  // expected-error @below {{'kv.tile_weights' op maximum must be 64 x f32, got tensor<128xf32>}}
  "kv.tile_weights"(%x2, %scale_log2, %m) : (tensor<64x128xf32>, tensor<64xf32>, tensor<128xf32>) -> tensor<64x128xf32>
  // expected-error @below {{'kv.tile_weights' op the result must be tensor<64x128xf32>, got tensor<64x128xbf16>}}
  "kv.tile_weights"(%x2, %scale_log2, %scale_log2) : (tensor<64x128xf32>, tensor<64xf32>, tensor<64xf32>) -> tensor<64x128xbf16>
  return
}

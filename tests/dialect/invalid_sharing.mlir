// RUN: kv-opt %s --verify-diagnostics

func.func @tile_share(%x: tensor<64x32xi16, "mma:4x2">, %x2: tensor<64x64xbf16, "shared">,
    %x3: tensor<64x32xbf16, "mma:4x2">) {
  // expected-error @below {{'kv.tile_share' op the operand must be a tile of rank 2 of bf16, f16, f32, i8, got tensor<64x32xi16, "mma:4x2">}}
  "kv.tile_share"(%x) : (tensor<64x32xi16, "mma:4x2">) -> tensor<64x32xi16, "shared">
  // expected-error @below {{'kv.tile_share' op the operand must be a tile in registers, got tensor<64x64xbf16, "shared">}}
  "kv.tile_share"(%x2) : (tensor<64x64xbf16, "shared">) -> tensor<64x64xbf16, "shared">
  // expected-error @below {{'kv.tile_share' op the result must be tensor<64x32xbf16, "shared">, got tensor<64x64xbf16, "shared">}}
  "kv.tile_share"(%x3) : (tensor<64x32xbf16, "mma:4x2">) -> tensor<64x64xbf16, "shared">
  return
}

func.func @tile_columns(%x: tensor<64x128xbf16, "mma">, %x2: tensor<64x128xbf16, "shared">,
    %x3: tensor<64x128xf8E4M3FN, "shared(transposed)">) {
  // expected-error @below {{'kv.tile_columns' op the operand must be a tile of rank 2 with the layout shared, got tensor<64x128xbf16, "mma">}}
  "kv.tile_columns"(%x) {first_column = 0 : i64} : (tensor<64x128xbf16, "mma">) -> tensor<64x64xbf16, "shared">
  // expected-error @below {{'kv.tile_columns' op the result must have the operand's rows and elements, got tensor<64x128xbf16, "shared"> and tensor<32x64xbf16, "shared">}}
  "kv.tile_columns"(%x2) {first_column = 0 : i64} : (tensor<64x128xbf16, "shared">) -> tensor<32x64xbf16, "shared">
  // expected-error @below {{'kv.tile_columns' op columns must start at a multiple of 64 and be within the operand's 128, got 64 from 32 : i64 on}}
  "kv.tile_columns"(%x2) {first_column = 32 : i64} : (tensor<64x128xbf16, "shared">) -> tensor<64x64xbf16, "shared">
  // expected-error @below {{'kv.tile_columns' op columns must start at a multiple of 64 and be within the operand's 128, got 128 from 64 : i64 on}}
  "kv.tile_columns"(%x2) {first_column = 64 : i64} : (tensor<64x128xbf16, "shared">) -> tensor<64x128xbf16, "shared">
  // expected-error @below {{'kv.tile_columns' op the result must have the operand's layout, got tensor<64x128xf8E4M3FN, "shared(transposed)"> and tensor<64x64xf8E4M3FN, "shared">}}
  "kv.tile_columns"(%x3) {first_column = 0 : i64} : (tensor<64x128xf8E4M3FN, "shared(transposed)">) -> tensor<64x64xf8E4M3FN, "shared">
  // expected-error @below {{'kv.tile_columns' op columns must start at a multiple of 8 and be within the operand's 128, got 64 from 4 : i64 on}}
  "kv.tile_columns"(%x3) {first_column = 4 : i64} : (tensor<64x128xf8E4M3FN, "shared(transposed)">) -> tensor<64x64xf8E4M3FN, "shared(transposed)">
  return
}

func.func @tile_add_columns(%x: tensor<64x64xbf16, "wgmma">, %y: tensor<64x32xf32, "wgmma">,
    %x2: tensor<64x64xf32, "wgmma">, %y2: tensor<64x32xf32, "shared">, %y3: tensor<128x32xf32, "wgmma">) {
  // expected-error @below {{'kv.tile_add_columns' op the operand must be a tile of rank 2 of f32 in registers, got tensor<64x64xbf16, "wgmma">}}
  "kv.tile_add_columns"(%x, %y) {first_column = 0 : i64} : (tensor<64x64xbf16, "wgmma">, tensor<64x32xf32, "wgmma">) -> tensor<64x64xbf16, "wgmma">
  // expected-error @below {{'kv.tile_add_columns' op the added tile must be a tile of rank 2 of f32 in registers, got tensor<64x32xf32, "shared">}}
  "kv.tile_add_columns"(%x2, %y2) {first_column = 0 : i64} : (tensor<64x64xf32, "wgmma">, tensor<64x32xf32, "shared">) -> tensor<64x64xf32, "wgmma">
  // expected-error @below {{'kv.tile_add_columns' op the added tile needs the operand's rows and layout, got tensor<64x64xf32, "wgmma"> and tensor<128x32xf32, "wgmma">}}
  "kv.tile_add_columns"(%x2, %y3) {first_column = 0 : i64} : (tensor<64x64xf32, "wgmma">, tensor<128x32xf32, "wgmma">) -> tensor<64x64xf32, "wgmma">
  // expected-error @below {{'kv.tile_add_columns' op columns must start at a multiple of 8 and be within the operand's 64, got 32 from 40 : i64 on}}
  "kv.tile_add_columns"(%x2, %y) {first_column = 40 : i64} : (tensor<64x64xf32, "wgmma">, tensor<64x32xf32, "wgmma">) -> tensor<64x64xf32, "wgmma">
  // expected-error @below {{'kv.tile_add_columns' op the result must be of the operand's type tensor<64x64xf32, "wgmma">, got tensor<64x32xf32, "wgmma">}}
  "kv.tile_add_columns"(%x2, %y) {first_column = 0 : i64} : (tensor<64x64xf32, "wgmma">, tensor<64x32xf32, "wgmma">) -> tensor<64x32xf32, "wgmma">
  return
}

func.func @tile_concatenate(%l: tensor<64xbf16>, %r: tensor<32x16xbf16>, %l2: tensor<32x64xbf16>, %r2: tensor<64x16xbf16>,
    %l3: tensor<32x44xbf16>) {
  // expected-error @below {{'kv.tile_concatenate' op needs tiles of rank 2, got tensor<64xbf16> and tensor<32x16xbf16>}}
  "kv.tile_concatenate"(%l, %r) : (tensor<64xbf16>, tensor<32x16xbf16>) -> tensor<32x80xbf16>
  // expected-error @below {{'kv.tile_concatenate' op the operands must have the same rows and elements, got tensor<32x64xbf16> and tensor<64x16xbf16>}}
  "kv.tile_concatenate"(%l2, %r2) : (tensor<32x64xbf16>, tensor<64x16xbf16>) -> tensor<32x80xbf16>
  // expected-error @below {{'kv.tile_concatenate' op the first operand must have a multiple of 8 columns, got 44}}
  "kv.tile_concatenate"(%l3, %r) : (tensor<32x44xbf16>, tensor<32x16xbf16>) -> tensor<32x60xbf16>
  // expected-error @below {{'kv.tile_concatenate' op the result must be tensor<32x80xbf16>, got tensor<32x96xbf16>}}
  "kv.tile_concatenate"(%l2, %r) : (tensor<32x64xbf16>, tensor<32x16xbf16>) -> tensor<32x96xbf16>
  return
}

func.func @tile_unshare(%x: tensor<64x32xbf16, "wgmma">, %y: tensor<64x32xbf16, "shared">) {
  // expected-error @below {{'kv.tile_unshare' op the operand must be a tile of rank 2 in shared memory, got tensor<64x32xbf16, "wgmma">}}
  "kv.tile_unshare"(%x) : (tensor<64x32xbf16, "wgmma">) -> tensor<64x32xbf16, "wgmma">
  // expected-error @below {{'kv.tile_unshare' op the result must have the operand's extents and elements, got tensor<64x16xbf16, "wgmma">}}
  "kv.tile_unshare"(%y) : (tensor<64x32xbf16, "shared">) -> tensor<64x16xbf16, "wgmma">
  // expected-error @below {{'kv.tile_unshare' op the result must be a tile in registers, got tensor<64x32xbf16, "shared">}}
  "kv.tile_unshare"(%y) : (tensor<64x32xbf16, "shared">) -> tensor<64x32xbf16, "shared">
  return
}

func.func @tile_transpose(%x: tensor<64x32xbf16>, %y: tensor<64x32xbf16, "shared">) {
  // expected-error @below {{'kv.tile_transpose' op the result must be tensor<32x64xbf16>, got tensor<64x32xbf16>}}
  "kv.tile_transpose"(%x) : (tensor<64x32xbf16>) -> tensor<64x32xbf16>
  // expected-error @below {{'kv.tile_transpose' op the result must be tensor<32x64xbf16, "shared(transposed)">, got tensor<32x64xbf16, "shared">}}
  "kv.tile_transpose"(%y) : (tensor<64x32xbf16, "shared">) -> tensor<32x64xbf16, "shared">
  return
}

func.func @tile_slice(%x: tensor<64x32xbf16>, %v: tensor<64xbf16>) {
  // expected-error @below {{'kv.tile_slice' op needs tiles of rank 2, got tensor<64xbf16>}}
  "kv.tile_slice"(%v) {first_row = 0 : i64, first_column = 0 : i64} : (tensor<64xbf16>) -> tensor<64x16xbf16>
  // expected-error @below {{'kv.tile_slice' op the result must have the operand's elements, got tensor<64x32xbf16> and tensor<64x16xf32>}}
  "kv.tile_slice"(%x) {first_row = 0 : i64, first_column = 0 : i64} : (tensor<64x32xbf16>) -> tensor<64x16xf32>
  // expected-error @below {{'kv.tile_slice' op must be within the operand's 32, got 16 from 24 : i64 on}}
  "kv.tile_slice"(%x) {first_row = 0 : i64, first_column = 24 : i64} : (tensor<64x32xbf16>) -> tensor<64x16xbf16>
  return
}

func.func @lines(%x: tensor<64x64xbf16>, %y: tensor<64x64xf32>, %z: tensor<60x60xf32>, %b: tensor<32x64xf32>, %v: tensor<64xf32>) {
  // expected-error @below {{'kv.tile_scan' op the operand must be a tile of f32 or i32, got tensor<64x64xbf16>}}
  "kv.tile_scan"(%x) {kind = "add", axis = 0 : i64} : (tensor<64x64xbf16>) -> tensor<64x64xbf16>
  // expected-error @below {{'kv.tile_scan' op axis must be below the operand's rank 1, got 1 : i64}}
  "kv.tile_scan"(%v) {kind = "add", axis = 1 : i64} : (tensor<64xf32>) -> tensor<64xf32>
  // expected-error @below {{'kv.tile_scan' op the result must be of the operand's type tensor<64x64xf32>, got tensor<64xf32>}}
  "kv.tile_scan"(%y) {kind = "mul", axis = 1 : i64} : (tensor<64x64xf32>) -> tensor<64xf32>
  // expected-error @below {{'kv.tile_total' op the operand must be a vector of f32 or i32, got tensor<64x64xf32>}}
  %0 = "kv.tile_total"(%y) {kind = "add"} : (tensor<64x64xf32>) -> f32
  // expected-error @below {{'kv.tile_total' op the result must be f32, got i32}}
  %1 = "kv.tile_total"(%v) {kind = "add"} : (tensor<64xf32>) -> i32
  // expected-error @below {{'kv.convert_layout' op the result must have the operand's extents and elements, got tensor<32xf32>}}
  %2 = "kv.convert_layout"(%v) : (tensor<64xf32>) -> tensor<32xf32>
  // expected-error @below {{'kv.tile_solve' op the right side must be a tile of rank 2 of f32, got tensor<64x64xbf16>}}
  "kv.tile_solve"(%y, %x) : (tensor<64x64xf32>, tensor<64x64xbf16>) -> tensor<64x64xbf16>
  // expected-error @below {{'kv.tile_solve' op the triangle must be square with 16, 32, 48 or 64 rows, got 60 x 60}}
  "kv.tile_solve"(%z, %y) : (tensor<60x60xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  // expected-error @below {{'kv.tile_solve' op the right side must have the triangle's 64 rows, got 32}}
  "kv.tile_solve"(%y, %b) : (tensor<64x64xf32>, tensor<32x64xf32>) -> tensor<32x64xf32>
  return
}

func.func @tile_load_rows_from(%x: memref<?x64xbf16>, %m: tensor<64xi1>, %i: tensor<64xi32>) {
  // expected-error @below {{'kv.tile_load_rows' op first_column must be a multiple of 16, got 8}}
  "kv.tile_load_rows"(%x, %m, %i) {first_column = 8 : i64} : (memref<?x64xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x32xbf16>
  return
}

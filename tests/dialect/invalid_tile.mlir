// RUN: kv-opt %s --split-input-file --verify-diagnostics

// What the verifiers of tiles refuse. One chunk a rule.

// Rule: a tile has static extents.
func.func @rule() {
  // expected-error @below {{'kv.tile_index' op the result must be a tile of rank 1, got tensor<?xi32>}}
  %0 = "kv.tile_index"() : () -> tensor<?xi32>
  return
}

// -----

// Rule: a tile has one or two dimensions.
func.func @rule(%b: memref<?xf32>, %m: tensor<4xi1>, %j: tensor<4xi32>) {
  // expected-error @below {{'kv.tile_gather' op the result must be a tile (a static tensor of rank 1 or 2), got tensor<4x4x4xf32>}}
  %0 = "kv.tile_gather"(%b, %m, %j) : (memref<?xf32>, tensor<4xi1>, tensor<4xi32>) -> tensor<4x4x4xf32>
  return
}

// -----

// Rule: an extent of 1 is none: a scalar is no tile.
func.func @rule() {
  // expected-error @below {{'kv.tile_index' op the result must have extents of at least 2, got tensor<1xi32>: a scalar is no tile}}
  %0 = "kv.tile_index"() : () -> tensor<1xi32>
  return
}

// -----

// Rule: no extent is 0.
func.func @rule(%x: tensor<64xf32>) {
  // expected-error @below {{'kv.tile_broadcast' op the result must have extents of at least 2, got tensor<64x0xf32>: a scalar is no tile}}
  %0 = "kv.tile_broadcast"(%x) {dimension = 0 : i64} : (tensor<64xf32>) -> tensor<64x0xf32>
  return
}

// -----

// Rule: a layout is one that is known.
func.func @rule() {
  // expected-error @below {{'kv.tile_index' op the result has no layout that is known: the layout 'rows(tensor)' must say how many warps it is for, as in tensor:4}}
  %0 = "kv.tile_index"() : () -> tensor<64xi32, "rows(tensor)">
  return
}

// -----

// Rule: a layout is a name.
func.func @rule() {
  // expected-error @below {{'kv.tile_index' op the result has no layout that is known: the encoding must be a layout's name, got 3 : i64}}
  %0 = "kv.tile_index"() : () -> tensor<64xi32, 3 : i64>
  return
}

// -----

// Rule: a layout fits the extents.
func.func @rule(%x: tensor<64xf32>) {
  // expected-error @below {{'kv.tile_broadcast' op the result has no layout that is known: columns must be a positive multiple of the 8 that the threads cover at a time, got 100}}
  %0 = "kv.tile_broadcast"(%x) {dimension = 0 : i64} : (tensor<64xf32>) -> tensor<64x100xf32, "wgmma">
  return
}

// -----

// Rule: positions are a vector.
func.func @rule() {
  // expected-error @below {{'kv.tile_index' op the result must be a tile of rank 1, got tensor<4x64xi32>}}
  %0 = "kv.tile_index"() : () -> tensor<4x64xi32>
  return
}

// -----

// Rule: positions are i32.
func.func @rule() {
  // expected-error @below {{'kv.tile_index' op the result must have elements of type i32, got i64}}
  %0 = "kv.tile_index"() : () -> tensor<64xi64>
  return
}

// -----

// Rule: what is repeated is a vector.
func.func @rule(%x: tensor<64x64xf32>) {
  // expected-error @below {{'kv.tile_broadcast' op the operand must be a tile of rank 1, got tensor<64x64xf32>}}
  %0 = "kv.tile_broadcast"(%x) {dimension = 0 : i64} : (tensor<64x64xf32>) -> tensor<64x64xf32>
  return
}

// -----

// Rule: a vector runs along one of two dimensions.
func.func @rule(%x: tensor<64xf32>) {
  // expected-error @below {{'kv.tile_broadcast' op dimension must be 0 or 1, got 2 : i64}}
  %0 = "kv.tile_broadcast"(%x) {dimension = 2 : i64} : (tensor<64xf32>) -> tensor<64x64xf32>
  return
}

// -----

// Rule: the vector is as long as the dimension.
func.func @rule(%x: tensor<64xf32>) {
  // expected-error @below {{'kv.tile_broadcast' op the result must have 64 x f32 in dimension 1, got tensor<64x128xf32>}}
  %0 = "kv.tile_broadcast"(%x) {dimension = 1 : i64} : (tensor<64xf32>) -> tensor<64x128xf32>
  return
}

// -----

// Rule: repeating keeps the element type.
func.func @rule(%x: tensor<64xf32>) {
  // expected-error @below {{'kv.tile_broadcast' op the result must have 64 x f32 in dimension 0, got tensor<64x128xbf16>}}
  %0 = "kv.tile_broadcast"(%x) {dimension = 0 : i64} : (tensor<64xf32>) -> tensor<64x128xbf16>
  return
}

// -----

// Rule: reductions are of three kinds.
func.func @rule(%x: tensor<64x128xf32>) {
  // expected-error @below {{'kv.tile_reduce' op kind must be one of max, min, add, got "mul"}}
  %0 = "kv.tile_reduce"(%x) {kind = "mul", axis = 1 : i64} : (tensor<64x128xf32>) -> tensor<64xf32>
  return
}

// -----

// Rule: one of two dimensions goes.
func.func @rule(%x: tensor<64x128xf32>) {
  // expected-error @below {{'kv.tile_reduce' op axis must be 0 or 1, got -1 : i64}}
  %0 = "kv.tile_reduce"(%x) {kind = "add", axis = -1 : i64} : (tensor<64x128xf32>) -> tensor<64xf32>
  return
}

// -----

// Rule: the other dimension stays.
func.func @rule(%x: tensor<64x128xf32>) {
  // expected-error @below {{'kv.tile_reduce' op the result must be 128 x f32, got tensor<64xf32>}}
  %0 = "kv.tile_reduce"(%x) {kind = "add", axis = 0 : i64} : (tensor<64x128xf32>) -> tensor<64xf32>
  return
}

// -----

// Rule: a reduction keeps the element type.
func.func @rule(%x: tensor<64x128xbf16>) {
  // expected-error @below {{'kv.tile_reduce' op the result must be 64 x bf16, got tensor<64xf32>}}
  %0 = "kv.tile_reduce"(%x) {kind = "add", axis = 1 : i64} : (tensor<64x128xbf16>) -> tensor<64xf32>
  return
}

// -----

// Rule: numbers are reduced.
func.func @rule(%x: tensor<64x128xi1>) {
  // expected-error @below {{'kv.tile_reduce' op the operand must have numeric elements, got i1}}
  %0 = "kv.tile_reduce"(%x) {kind = "max", axis = 1 : i64} : (tensor<64x128xi1>) -> tensor<64xi1>
  return
}

// -----

// Rule: a vector has no rows to reduce.
func.func @rule(%x: tensor<64xf32>) {
  // expected-error @below {{'kv.tile_reduce' op the operand must be a tile of rank 2, got tensor<64xf32>}}
  %0 = "kv.tile_reduce"(%x) {kind = "max", axis = 0 : i64} : (tensor<64xf32>) -> tensor<64xf32>
  return
}

// -----

// Rule: reductions over lanes are of the same kinds.
func.func @rule(%x: tensor<64xf32>) {
  // expected-error @below {{'kv.tile_reduce_lanes' op kind must be one of max, min, add, got "any"}}
  %0 = "kv.tile_reduce_lanes"(%x) {kind = "any"} : (tensor<64xf32>) -> tensor<64xf32>
  return
}

// -----

// Rule: lanes are folded in a vector.
func.func @rule(%x: tensor<64x64xf32>) {
  // expected-error @below {{'kv.tile_reduce_lanes' op the operand must be a tile of rank 1, got tensor<64x64xf32>}}
  %0 = "kv.tile_reduce_lanes"(%x) {kind = "add"} : (tensor<64x64xf32>) -> tensor<64x64xf32>
  return
}

// -----

// Rule: folding lanes keeps the type.
func.func @rule(%x: tensor<64xf32>) {
  // expected-error @below {{'kv.tile_reduce_lanes' op the result must be of the operand's type tensor<64xf32>, got tensor<32xf32>}}
  %0 = "kv.tile_reduce_lanes"(%x) {kind = "add"} : (tensor<64xf32>) -> tensor<32xf32>
  return
}

// -----

// Rule: a mask has the shape of the scores.
func.func @rule(%x: tensor<64x128xf32>, %m: tensor<128x64xi1>) {
  // expected-error @below {{'kv.tile_mask' op the mask must be 64x128xi1, got tensor<128x64xi1>}}
  %0 = "kv.tile_mask"(%x, %m) : (tensor<64x128xf32>, tensor<128x64xi1>) -> tensor<64x128xf32>
  return
}

// -----

// Rule: a mask is of i1.
func.func @rule(%x: tensor<64x128xf32>) {
  // expected-error @below {{'kv.tile_mask' op the mask must be 64x128xi1, got tensor<64x128xf32>}}
  %0 = "kv.tile_mask"(%x, %x) : (tensor<64x128xf32>, tensor<64x128xf32>) -> tensor<64x128xf32>
  return
}

// -----

// Rule: scores are floats: integers have no minus infinity.
func.func @rule(%x: tensor<64x128xi32>, %m: tensor<64x128xi1>) {
  // expected-error @below {{'kv.tile_mask' op scores must have a float element type, got i32}}
  %0 = "kv.tile_mask"(%x, %m) : (tensor<64x128xi32>, tensor<64x128xi1>) -> tensor<64x128xi32>
  return
}

// -----

// Rule: a mask keeps the scores' type.
func.func @rule(%x: tensor<64x128xf32>, %m: tensor<64x128xi1>) {
  // expected-error @below {{'kv.tile_mask' op the result must be of the operand's type tensor<64x128xf32>, got tensor<64x128xbf16>}}
  %0 = "kv.tile_mask"(%x, %m) : (tensor<64x128xf32>, tensor<64x128xi1>) -> tensor<64x128xbf16>
  return
}

// -----

// Rule: a warp asks of a mask.
func.func @rule(%x: tensor<64xf32, "rows(wgmma)">) {
  // expected-error @below {{'kv.warp_any' op the mask must be 64xi1, got tensor<64xf32, "rows(wgmma)">}}
  %0 = "kv.warp_any"(%x) : (tensor<64xf32, "rows(wgmma)">) -> i1
  return
}

// -----

// Rule: a warp asks of rows.
func.func @rule(%x: tensor<64x64xi1, "wgmma">) {
  // expected-error @below {{'kv.warp_any' op the mask must be a tile of rank 1, got tensor<64x64xi1, "wgmma">}}
  %0 = "kv.warp_any"(%x) : (tensor<64x64xi1, "wgmma">) -> i1
  return
}

// -----

// Rule: the inner extents of a product are one.
func.func @rule(%x: tensor<64x128xbf16>) {
  // expected-error @below {{'kv.dot' op a and b must share K = 128 and bf16, got tensor<64x128xbf16> and tensor<64x128xbf16>}}
  %0 = "kv.dot"(%x, %x) {transpose_b = false} : (tensor<64x128xbf16>, tensor<64x128xbf16>) -> tensor<64x128xf32>
  return
}

// -----

// Rule: both operands of a product have one type.
func.func @rule(%x: tensor<64x64xbf16>, %y: tensor<64x64xf16>) {
  // expected-error @below {{'kv.dot' op a and b must share K = 64 and bf16, got tensor<64x64xbf16> and tensor<64x64xf16>}}
  %0 = "kv.dot"(%x, %y) {transpose_b = false} : (tensor<64x64xbf16>, tensor<64x64xf16>) -> tensor<64x64xf32>
  return
}

// -----

// Rule: products are of floats.
func.func @rule(%x: tensor<64x64xi8>) {
  // expected-error @below {{'kv.dot' op a and b must have a float element type, got i8}}
  %0 = "kv.dot"(%x, %x) {transpose_b = false} : (tensor<64x64xi8>, tensor<64x64xi8>) -> tensor<64x64xf32>
  return
}

// -----

// Rule: a product has A's rows and B's columns.
func.func @rule(%x: tensor<64x64xbf16>) {
  // expected-error @below {{'kv.dot' op the result must be 64 x 64 x f32, got tensor<64x32xf32>}}
  %0 = "kv.dot"(%x, %x) {transpose_b = false} : (tensor<64x64xbf16>, tensor<64x64xbf16>) -> tensor<64x32xf32>
  return
}

// -----

// Rule: a product is of f32.
func.func @rule(%x: tensor<64x64xbf16>) {
  // expected-error @below {{'kv.dot' op the result must be 64 x 64 x f32, got tensor<64x64xbf16>}}
  %0 = "kv.dot"(%x, %x) {transpose_b = false} : (tensor<64x64xbf16>, tensor<64x64xbf16>) -> tensor<64x64xbf16>
  return
}

// -----

// Rule: the accumulator has the product's type.
func.func @rule(%x: tensor<64x64xbf16>) {
  // expected-error @below {{'kv.dot' op c must have the result's type tensor<64x64xf32>, got tensor<64x64xbf16>}}
  %0 = "kv.dot"(%x, %x, %x) {transpose_b = false} : (tensor<64x64xbf16>, tensor<64x64xbf16>, tensor<64x64xbf16>) -> tensor<64x64xf32>
  return
}

// -----

// Rule: the accumulator lies as the product does.
func.func @rule(%x: tensor<64x64xbf16, "shared">, %c: tensor<64x64xf32>) {
  // expected-error @below {{'kv.dot' op c must have the result's type tensor<64x64xf32, "wgmma">, got tensor<64x64xf32>}}
  %0 = "kv.dot"(%x, %x, %c) {transpose_b = false} : (tensor<64x64xbf16, "shared">, tensor<64x64xbf16, "shared">, tensor<64x64xf32>) -> tensor<64x64xf32, "wgmma">
  return
}

// -----

// Rule: whether B is transposed is a bool.
func.func @rule(%x: tensor<64x64xbf16>) {
  // expected-error @below {{'kv.dot' op transpose_b must be a bool, got "yes"}}
  %0 = "kv.dot"(%x, %x) {transpose_b = "yes"} : (tensor<64x64xbf16>, tensor<64x64xbf16>) -> tensor<64x64xf32>
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: rows of a cache or operand are loaded, not of a collection.
func.func @rule(%c: !pool, %i: i32) {
  // expected-error @below {{'kv.tile_load' op operand must be of type !kv.cache or !kv.operand, got !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!pool, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a loaded tile is a matrix.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.tile_load' op the result must be a tile of rank 2, got tensor<128xbf16>}}
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<128xbf16>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: columns lie in the head.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.tile_load' op columns must be within the head's 128, rounded up to whole 16, got 128 from 64 : i64 on}}
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 64 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: no column is negative.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.tile_load' op columns must be within the head's 128, rounded up to whole 16, got 128 from -64 : i64 on}}
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = -64 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: elements are dequantized to floats.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.tile_load' op the tile must have a float element type, got i8}}
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xi8>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: rows past the last are zeros, or nobody cares.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.tile_load' op tail must be one of zero, any, got "keep"}}
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "keep"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  return
}

// -----

!cache = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: lists name rows of pages.
func.func @rule(%c: !cache, %i: i32, %lists: memref<?x?xi32>) {
  // expected-error @below {{'kv.tile_load' op lists need a paged cache, got}}
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i, %lists) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 1>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32, memref<?x?xi32>) -> tensor<64x128xbf16>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: lists are of i32.
func.func @rule(%c: !cache, %i: i32, %lists: memref<?x?xi64>) {
  // expected-error @below {{'kv.tile_load' op lists must have element type i32, got i64}}
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i, %lists) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 1>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32, memref<?x?xi64>) -> tensor<64x128xbf16>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: keys of bf16 lie behind elements of 8 bits.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.tile_load' op rope and inline_scales need large enough 8-bit rows, got}}
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, rope = 16 : i64, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x112xbf16>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a descriptor is one.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.tile_load' op descriptor must be of type !kv.tma, got i32}}
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: boxes make a tile up.
func.func @rule(%c: !cache, %i: i32, %d: !map) {
  // expected-error @below {{'kv.tile_load' op the tile must be whole boxes of a tiled descriptor, got 72 rows and !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>}}
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i, %d) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32, !map) -> tensor<72x128xbf16>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!ragged = !kv.tma<"ragged", bf16, array<i64: 1, 1, 16, 64>, array<i64: 16, 128>, 128 : i64>
// Rule: boxes are those of a tiled descriptor.
func.func @rule(%c: !cache, %i: i32, %d: !ragged) {
  // expected-error @below {{'kv.tile_load' op the tile must be whole boxes of a tiled descriptor, got 64 rows and !kv.tma<"ragged", bf16, array<i64: 1, 1, 16, 64>, array<i64: 16, 128>, 128 : i64>}}
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i, %d) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32, !ragged) -> tensor<64x128xbf16>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: a descriptor does not convert.
func.func @rule(%c: !cache, %i: i32, %d: !map) {
  // expected-error @below {{'kv.tile_load' op a descriptor copies elements without conversion, bf16 without scales, got tensor<64x128xf16>}}
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i, %d) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32, !map) -> tensor<64x128xf16>
  return
}

// -----

!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: a descriptor does not dequantize to f32.
func.func @rule(%c: !fp8, %i: i32, %d: !map) {
  // expected-error @below {{'kv.tile_load' op a descriptor copies elements without conversion, f8E4M3FN without scales, got tensor<64x128xf32>}}
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i, %d) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, tail = "zero"} : (!fp8, i32, i32, i32, i32, i32, !map) -> tensor<64x128xf32>
  return
}

// -----

// Rule: a row is found by all but the last index.
func.func @rule(%b: memref<?x?x128xbf16>, %m: tensor<64xi1>, %i: tensor<64xi32>) {
  // expected-error @below {{'kv.tile_load_rows' op the buffer must be a memref of rank 2, got memref<?x?x128xbf16>}}
  %0 = "kv.tile_load_rows"(%b, %m, %i) : (memref<?x?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x128xbf16>
  return
}

// -----

// Rule: rows keep the buffer's element type.
func.func @rule(%b: memref<?x128xbf16>, %m: tensor<64xi1>, %i: tensor<64xi32>) {
  // expected-error @below {{'kv.tile_load_rows' op the buffer must have element type f32, got bf16}}
  %0 = "kv.tile_load_rows"(%b, %m, %i) : (memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x128xf32>
  return
}

// -----

// Rule: a row has an index each.
func.func @rule(%b: memref<?x128xbf16>, %m: tensor<64xi1>, %i: tensor<32xi32>) {
  // expected-error @below {{'kv.tile_load_rows' op an index must be 64xi32, got tensor<32xi32>}}
  %0 = "kv.tile_load_rows"(%b, %m, %i) : (memref<?x128xbf16>, tensor<64xi1>, tensor<32xi32>) -> tensor<64x128xbf16>
  return
}

// -----

// Rule: a mask of rows is of i1.
func.func @rule(%b: memref<?x128xbf16>, %i: tensor<64xi32>) {
  // expected-error @below {{'kv.tile_load_rows' op the mask must be 64xi1, got tensor<64xi32>}}
  %0 = "kv.tile_load_rows"(%b, %i, %i) : (memref<?x128xbf16>, tensor<64xi32>, tensor<64xi32>) -> tensor<64x128xbf16>
  return
}

// -----

// Rule: rows of a matrix are stored.
func.func @rule(%x: tensor<64xbf16>, %b: memref<?x128xbf16>, %m: tensor<64xi1>, %i: tensor<64xi32>) {
  // expected-error @below {{'kv.tile_store_rows' op the value must be a tile of rank 2, got tensor<64xbf16>}}
  "kv.tile_store_rows"(%x, %b, %m, %i) : (tensor<64xbf16>, memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> ()
  return
}

// -----

// Rule: stored rows have the buffer's element type.
func.func @rule(%x: tensor<64x128xf32>, %b: memref<?x128xbf16>, %m: tensor<64xi1>, %i: tensor<64xi32>) {
  // expected-error @below {{'kv.tile_store_rows' op the buffer must have element type f32, got bf16}}
  "kv.tile_store_rows"(%x, %b, %m, %i) : (tensor<64x128xf32>, memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> ()
  return
}

// -----

// Rule: elements are gathered from a buffer.
func.func @rule(%b: tensor<64xf32>, %m: tensor<64xi1>, %i: tensor<64xi32>) {
  // expected-error @below {{'kv.tile_gather' op the buffer must be a memref of rank 1, got tensor<64xf32>}}
  %0 = "kv.tile_gather"(%b, %m, %i) : (tensor<64xf32>, tensor<64xi1>, tensor<64xi32>) -> tensor<64xf32>
  return
}

// -----

// Rule: an element is found by as many indices as the buffer has dimensions.
func.func @rule(%b: memref<?x?xf32>, %m: tensor<64xi1>, %i: tensor<64xi32>) {
  // expected-error @below {{'kv.tile_gather' op the buffer must be a memref of rank 1, got memref<?x?xf32>}}
  %0 = "kv.tile_gather"(%b, %m, %i) : (memref<?x?xf32>, tensor<64xi1>, tensor<64xi32>) -> tensor<64xf32>
  return
}

// -----

// Rule: indices are i32.
func.func @rule(%b: memref<?xf32>, %m: tensor<64xi1>, %i: tensor<64xi64>) {
  // expected-error @below {{'kv.tile_gather' op an index must be 64xi32, got tensor<64xi64>}}
  %0 = "kv.tile_gather"(%b, %m, %i) : (memref<?xf32>, tensor<64xi1>, tensor<64xi64>) -> tensor<64xf32>
  return
}

// -----

// Rule: indices have the shape of what is written.
func.func @rule(%x: tensor<64x64xf32>, %b: memref<?xf32>, %m: tensor<64x64xi1>, %i: tensor<64xi32>) {
  // expected-error @below {{'kv.tile_scatter' op an index must be 64x64xi32, got tensor<64xi32>}}
  "kv.tile_scatter"(%x, %b, %m, %i) : (tensor<64x64xf32>, memref<?xf32>, tensor<64x64xi1>, tensor<64xi32>) -> ()
  return
}

// -----

// Rule: what is written has the buffer's element type.
func.func @rule(%x: tensor<64xf32>, %b: memref<?xbf16>, %m: tensor<64xi1>, %i: tensor<64xi32>) {
  // expected-error @below {{'kv.tile_scatter' op the buffer must have element type f32, got bf16}}
  "kv.tile_scatter"(%x, %b, %m, %i) : (tensor<64xf32>, memref<?xbf16>, tensor<64xi1>, tensor<64xi32>) -> ()
  return
}

// -----

// Rule: a buffer has some of a tile's columns.
func.func @rule(%b: memref<?x72xbf16>, %m: tensor<64xi1>, %i: tensor<64xi32>) {
  // expected-error @below {{'kv.tile_load_rows' op stored must be from 1 to the tile's 80 columns, got 96}}
  %0 = "kv.tile_load_rows"(%b, %m, %i) {stored = 96 : i64} : (memref<?x72xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x80xbf16>
  return
}

// -----

!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!map = !kv.tma<"tiled", f8E4M3FN, array<i64: 1, 16, 1, 128>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: boxes that are converted have their pages looked up before.
func.func @rule(%c: !fp8, %i: i32, %d: !map) {
  %b = "kv.make_stages"() {buffer_name = "keys", copy = "staged", stages = 2 : i64, tile = tensor<64x128xbf16, "shared">} : () -> !kv.stages
  // expected-error @below {{'kv.copy_start' op needs a descriptor and pages, or neither, for a buffer that is filled by staged}}
  "kv.copy_start"(%b, %i, %c, %i, %i, %i, %i, %d) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0>} : (!kv.stages, i32, !fp8, i32, i32, i32, i32, !map) -> ()
  return
}

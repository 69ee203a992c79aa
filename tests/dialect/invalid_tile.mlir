// RUN: kv-opt %s --verify-diagnostics

// What the verifiers of tiles refuse.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!continuous = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!ragged = !kv.tma<"ragged", bf16, array<i64: 1, 1, 16, 64>, array<i64: 16, 128>, 128 : i64>
!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!fp8_map = !kv.tma<"tiled", f8E4M3FN, array<i64: 1, 16, 1, 128>, array<i64: 16, 1, 128>, 128 : i64>

func.func @tile_index() {
  // expected-error @below {{'kv.tile_index' op the result must be a tile of rank 1, got tensor<?xi32>}}
  "kv.tile_index"() : () -> tensor<?xi32>
  // expected-error @below {{'kv.tile_index' op the result must have extents of at least 2, got tensor<1xi32>: a scalar is no tile}}
  "kv.tile_index"() : () -> tensor<1xi32>
  // expected-error @below {{'kv.tile_index' op the result has no layout that is known: the layout 'rows(tensor)' must say how many warps it is for, as in tensor:4}}
  "kv.tile_index"() : () -> tensor<64xi32, "rows(tensor)">
  // expected-error @below {{'kv.tile_index' op the result has no layout that is known: the encoding must be a layout's name, got 3 : i64}}
  "kv.tile_index"() : () -> tensor<64xi32, 3 : i64>
  // expected-error @below {{'kv.tile_index' op the result must be a tile of rank 1, got tensor<4x64xi32>}}
  "kv.tile_index"() : () -> tensor<4x64xi32>
  // expected-error @below {{'kv.tile_index' op the result must have elements of type i32, got i64}}
  "kv.tile_index"() : () -> tensor<64xi64>
  return
}

func.func @tile_gather(%b: memref<?xf32>, %m: tensor<4xi1>, %j: tensor<4xi32>, %b2: tensor<64xf32>, %m2: tensor<64xi1>,
    %i: tensor<64xi32>, %b3: memref<?x?xf32>, %i2: tensor<64xi64>) {
  // expected-error @below {{'kv.tile_gather' op the result must be a tile (a static tensor of rank 1 or 2), got tensor<4x4x4xf32>}}
  "kv.tile_gather"(%b, %m, %j) : (memref<?xf32>, tensor<4xi1>, tensor<4xi32>) -> tensor<4x4x4xf32>
  // expected-error @below {{'kv.tile_gather' op the buffer must be a memref of rank 1, got tensor<64xf32>}}
  "kv.tile_gather"(%b2, %m2, %i) : (tensor<64xf32>, tensor<64xi1>, tensor<64xi32>) -> tensor<64xf32>
  // expected-error @below {{'kv.tile_gather' op the buffer must be a memref of rank 1, got memref<?x?xf32>}}
  "kv.tile_gather"(%b3, %m2, %i) : (memref<?x?xf32>, tensor<64xi1>, tensor<64xi32>) -> tensor<64xf32>
  // expected-error @below {{'kv.tile_gather' op an index must be 64xi32, got tensor<64xi64>}}
  "kv.tile_gather"(%b, %m2, %i2) : (memref<?xf32>, tensor<64xi1>, tensor<64xi64>) -> tensor<64xf32>
  return
}

func.func @tile_broadcast(%x: tensor<64xf32>, %x2: tensor<64x64xf32>) {
  // expected-error @below {{'kv.tile_broadcast' op the result must have extents of at least 2, got tensor<64x0xf32>: a scalar is no tile}}
  "kv.tile_broadcast"(%x) {dimension = 0 : i64} : (tensor<64xf32>) -> tensor<64x0xf32>
  // expected-error @below {{'kv.tile_broadcast' op the result has no layout that is known: columns must be a positive multiple of the 8 that the threads cover at a time, got 100}}
  "kv.tile_broadcast"(%x) {dimension = 0 : i64} : (tensor<64xf32>) -> tensor<64x100xf32, "wgmma">
  // expected-error @below {{'kv.tile_broadcast' op the operand must be a tile of rank 1, got tensor<64x64xf32>}}
  "kv.tile_broadcast"(%x2) {dimension = 0 : i64} : (tensor<64x64xf32>) -> tensor<64x64xf32>
  // expected-error @below {{'kv.tile_broadcast' op dimension must be 0 or 1, got 2 : i64}}
  "kv.tile_broadcast"(%x) {dimension = 2 : i64} : (tensor<64xf32>) -> tensor<64x64xf32>
  // expected-error @below {{'kv.tile_broadcast' op the result must have 64 x f32 in dimension 1, got tensor<64x128xf32>}}
  "kv.tile_broadcast"(%x) {dimension = 1 : i64} : (tensor<64xf32>) -> tensor<64x128xf32>
  // expected-error @below {{'kv.tile_broadcast' op the result must have 64 x f32 in dimension 0, got tensor<64x128xbf16>}}
  "kv.tile_broadcast"(%x) {dimension = 0 : i64} : (tensor<64xf32>) -> tensor<64x128xbf16>
  return
}

func.func @tile_reduce(%x: tensor<64x128xf32>, %x2: tensor<64x128xbf16>, %x3: tensor<64x128xi1>, %x4: tensor<64xf32>) {
  // expected-error @below {{'kv.tile_reduce' op kind must be one of max, min, add, got "mul"}}
  "kv.tile_reduce"(%x) {kind = "mul", axis = 1 : i64} : (tensor<64x128xf32>) -> tensor<64xf32>
  // expected-error @below {{'kv.tile_reduce' op axis must be 0 or 1, got -1 : i64}}
  "kv.tile_reduce"(%x) {kind = "add", axis = -1 : i64} : (tensor<64x128xf32>) -> tensor<64xf32>
  // expected-error @below {{'kv.tile_reduce' op the result must be 128 x f32, got tensor<64xf32>}}
  "kv.tile_reduce"(%x) {kind = "add", axis = 0 : i64} : (tensor<64x128xf32>) -> tensor<64xf32>
  // expected-error @below {{'kv.tile_reduce' op the result must be 64 x bf16, got tensor<64xf32>}}
  "kv.tile_reduce"(%x2) {kind = "add", axis = 1 : i64} : (tensor<64x128xbf16>) -> tensor<64xf32>
  // expected-error @below {{'kv.tile_reduce' op the operand must have numeric elements, got i1}}
  "kv.tile_reduce"(%x3) {kind = "max", axis = 1 : i64} : (tensor<64x128xi1>) -> tensor<64xi1>
  // expected-error @below {{'kv.tile_reduce' op the operand must be a tile of rank 2, got tensor<64xf32>}}
  "kv.tile_reduce"(%x4) {kind = "max", axis = 0 : i64} : (tensor<64xf32>) -> tensor<64xf32>
  return
}

func.func @tile_reduce_lanes(%x: tensor<64xf32>, %x2: tensor<64x64xf32>) {
  // expected-error @below {{'kv.tile_reduce_lanes' op kind must be one of max, min, add, got "any"}}
  "kv.tile_reduce_lanes"(%x) {kind = "any"} : (tensor<64xf32>) -> tensor<64xf32>
  // expected-error @below {{'kv.tile_reduce_lanes' op the operand must be a tile of rank 1, got tensor<64x64xf32>}}
  "kv.tile_reduce_lanes"(%x2) {kind = "add"} : (tensor<64x64xf32>) -> tensor<64x64xf32>
  // expected-error @below {{'kv.tile_reduce_lanes' op the result must be of the operand's type tensor<64xf32>, got tensor<32xf32>}}
  "kv.tile_reduce_lanes"(%x) {kind = "add"} : (tensor<64xf32>) -> tensor<32xf32>
  return
}

func.func @tile_mask(%x: tensor<64x128xf32>, %m: tensor<128x64xi1>, %x2: tensor<64x128xi32>, %m2: tensor<64x128xi1>) {
  // expected-error @below {{'kv.tile_mask' op the mask must be 64x128xi1, got tensor<128x64xi1>}}
  "kv.tile_mask"(%x, %m) : (tensor<64x128xf32>, tensor<128x64xi1>) -> tensor<64x128xf32>
  // expected-error @below {{'kv.tile_mask' op the mask must be 64x128xi1, got tensor<64x128xf32>}}
  "kv.tile_mask"(%x, %x) : (tensor<64x128xf32>, tensor<64x128xf32>) -> tensor<64x128xf32>
  // expected-error @below {{'kv.tile_mask' op scores must have a float element type, got i32}}
  "kv.tile_mask"(%x2, %m2) : (tensor<64x128xi32>, tensor<64x128xi1>) -> tensor<64x128xi32>
  // expected-error @below {{'kv.tile_mask' op the result must be of the operand's type tensor<64x128xf32>, got tensor<64x128xbf16>}}
  "kv.tile_mask"(%x, %m2) : (tensor<64x128xf32>, tensor<64x128xi1>) -> tensor<64x128xbf16>
  return
}

func.func @warp_any(%x: tensor<64xf32, "rows(wgmma)">, %x2: tensor<64x64xi1, "wgmma">) {
  // expected-error @below {{'kv.warp_any' op the mask must be 64xi1, got tensor<64xf32, "rows(wgmma)">}}
  "kv.warp_any"(%x) : (tensor<64xf32, "rows(wgmma)">) -> i1
  // expected-error @below {{'kv.warp_any' op the mask must be a tile of rank 1, got tensor<64x64xi1, "wgmma">}}
  "kv.warp_any"(%x2) : (tensor<64x64xi1, "wgmma">) -> i1
  return
}

func.func @dot(%x: tensor<64x128xbf16>, %x2: tensor<64x64xbf16>, %y: tensor<64x64xf16>, %x3: tensor<64x64xi8>,
    %x4: tensor<64x64xbf16, "shared">, %c: tensor<64x64xf32>, %x5: tensor<64x64xi16>) {
  // expected-error @below {{'kv.dot' op a and b must have a float element type or i8, got i16}}
  "kv.dot"(%x5, %x5) {transpose_b = false} : (tensor<64x64xi16>, tensor<64x64xi16>) -> tensor<64x64xf32>
  // expected-error @below {{'kv.dot' op a and b must share K = 128 and bf16, got tensor<64x128xbf16> and tensor<64x128xbf16>}}
  "kv.dot"(%x, %x) {transpose_b = false} : (tensor<64x128xbf16>, tensor<64x128xbf16>) -> tensor<64x128xf32>
  // expected-error @below {{'kv.dot' op a and b must share K = 64 and bf16, got tensor<64x64xbf16> and tensor<64x64xf16>}}
  "kv.dot"(%x2, %y) {transpose_b = false} : (tensor<64x64xbf16>, tensor<64x64xf16>) -> tensor<64x64xf32>
  // expected-error @below {{'kv.dot' op the result must be 64 x 64 x i32, got tensor<64x64xf32>}}
  "kv.dot"(%x3, %x3) {transpose_b = false} : (tensor<64x64xi8>, tensor<64x64xi8>) -> tensor<64x64xf32>
  // expected-error @below {{'kv.dot' op the result must be 64 x 64 x f32, got tensor<64x32xf32>}}
  "kv.dot"(%x2, %x2) {transpose_b = false} : (tensor<64x64xbf16>, tensor<64x64xbf16>) -> tensor<64x32xf32>
  // expected-error @below {{'kv.dot' op the result must be 64 x 64 x f32, got tensor<64x64xbf16>}}
  "kv.dot"(%x2, %x2) {transpose_b = false} : (tensor<64x64xbf16>, tensor<64x64xbf16>) -> tensor<64x64xbf16>
  // expected-error @below {{'kv.dot' op c must have the result's type tensor<64x64xf32>, got tensor<64x64xbf16>}}
  "kv.dot"(%x2, %x2, %x2) {transpose_b = false} : (tensor<64x64xbf16>, tensor<64x64xbf16>, tensor<64x64xbf16>) -> tensor<64x64xf32>
  // expected-error @below {{'kv.dot' op c must have the result's type tensor<64x64xf32, "wgmma">, got tensor<64x64xf32>}}
  "kv.dot"(%x4, %x4, %c) {transpose_b = false} : (tensor<64x64xbf16, "shared">, tensor<64x64xbf16, "shared">, tensor<64x64xf32>) -> tensor<64x64xf32, "wgmma">
  // expected-error @below {{'kv.dot' op transpose_b must be a bool, got "yes"}}
  "kv.dot"(%x2, %x2) {transpose_b = "yes"} : (tensor<64x64xbf16>, tensor<64x64xbf16>) -> tensor<64x64xf32>
  return
}

func.func @tile_load(%c: !pool, %i: i32, %c2: !cache, %c3: !continuous, %lists: memref<?x?xi32>,
    %lists2: memref<?x?xi64>, %d: !map, %d2: !ragged, %c4: !fp8) {
  // expected-error @below {{'kv.tile_load' op operand must be of type !kv.cache or !kv.operand, got !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
  "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!pool, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  // expected-error @below {{'kv.tile_load' op the result must be a tile of rank 2, got tensor<128xbf16>}}
  "kv.tile_load"(%c2, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<128xbf16>
  // expected-error @below {{'kv.tile_load' op columns must be within the head's 128, rounded up to whole 16, got 128 from 64 : i64 on}}
  "kv.tile_load"(%c2, %i, %i, %i, %i, %i) {first_column = 64 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  // expected-error @below {{'kv.tile_load' op columns must be within the head's 128, rounded up to whole 16, got 128 from -64 : i64 on}}
  "kv.tile_load"(%c2, %i, %i, %i, %i, %i) {first_column = -64 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  // expected-error @below {{'kv.tile_load' op the tile must have a float element type, got i8}}
  "kv.tile_load"(%c2, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xi8>
  // expected-error @below {{'kv.tile_load' op tail must be one of zero, any, got "keep"}}
  "kv.tile_load"(%c2, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "keep"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  // expected-error @below {{'kv.tile_load' op lists need a paged cache, got}}
  "kv.tile_load"(%c3, %i, %i, %i, %i, %i, %lists) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 1>, tail = "zero"} : (!continuous, i32, i32, i32, i32, i32, memref<?x?xi32>) -> tensor<64x128xbf16>
  // expected-error @below {{'kv.tile_load' op lists must have element type i32, got i64}}
  "kv.tile_load"(%c2, %i, %i, %i, %i, %i, %lists2) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 1>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32, memref<?x?xi64>) -> tensor<64x128xbf16>
  // expected-error @below {{'kv.tile_load' op rope and inline_scales need large enough 8-bit rows, got}}
  "kv.tile_load"(%c2, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, rope = 16 : i64, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x112xbf16>
  // expected-error @below {{'kv.tile_load' op descriptor must be of type !kv.tma, got i32}}
  "kv.tile_load"(%c2, %i, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  // expected-error @below {{'kv.tile_load' op the tile must be whole boxes of a tiled descriptor, got 72 rows and !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>}}
  "kv.tile_load"(%c2, %i, %i, %i, %i, %i, %d) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32, !map) -> tensor<72x128xbf16>
  // expected-error @below {{'kv.tile_load' op the tile must be whole boxes of a tiled descriptor, got 64 rows and !kv.tma<"ragged", bf16, array<i64: 1, 1, 16, 64>, array<i64: 16, 128>, 128 : i64>}}
  "kv.tile_load"(%c2, %i, %i, %i, %i, %i, %d2) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32, !ragged) -> tensor<64x128xbf16>
  // expected-error @below {{'kv.tile_load' op a descriptor copies elements without conversion, bf16 without scales, got tensor<64x128xf16>}}
  "kv.tile_load"(%c2, %i, %i, %i, %i, %i, %d) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32, !map) -> tensor<64x128xf16>
  // expected-error @below {{'kv.tile_load' op a descriptor copies elements without conversion, f8E4M3FN without scales, got tensor<64x128xf32>}}
  "kv.tile_load"(%c4, %i, %i, %i, %i, %i, %d) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, tail = "zero"} : (!fp8, i32, i32, i32, i32, i32, !map) -> tensor<64x128xf32>
  return
}

func.func @tile_load_rows(%b: memref<?x?x128xbf16>, %m: tensor<64xi1>, %i: tensor<64xi32>, %b2: memref<?x128xbf16>,
    %i2: tensor<32xi32>, %b3: memref<?x72xbf16>) {
  // expected-error @below {{'kv.tile_load_rows' op the buffer must be a memref of rank 2, got memref<?x?x128xbf16>}}
  "kv.tile_load_rows"(%b, %m, %i) : (memref<?x?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x128xbf16>
  // expected-error @below {{'kv.tile_load_rows' op the buffer must have element type f32, got bf16}}
  "kv.tile_load_rows"(%b2, %m, %i) : (memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x128xf32>
  // expected-error @below {{'kv.tile_load_rows' op an index must be 64xi32, got tensor<32xi32>}}
  "kv.tile_load_rows"(%b2, %m, %i2) : (memref<?x128xbf16>, tensor<64xi1>, tensor<32xi32>) -> tensor<64x128xbf16>
  // expected-error @below {{'kv.tile_load_rows' op the mask must be 64xi1, got tensor<64xi32>}}
  "kv.tile_load_rows"(%b2, %i, %i) : (memref<?x128xbf16>, tensor<64xi32>, tensor<64xi32>) -> tensor<64x128xbf16>
  // expected-error @below {{'kv.tile_load_rows' op stored must be from 1 to the tile's 80 columns, got 96}}
  "kv.tile_load_rows"(%b3, %m, %i) {stored = 96 : i64} : (memref<?x72xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x80xbf16>
  return
}

func.func @tile_store_rows(%x: tensor<64xbf16>, %b: memref<?x128xbf16>, %m: tensor<64xi1>, %i: tensor<64xi32>,
    %x2: tensor<64x128xf32>) {
  // expected-error @below {{'kv.tile_store_rows' op the value must be a tile of rank 2, got tensor<64xbf16>}}
  "kv.tile_store_rows"(%x, %b, %m, %i) : (tensor<64xbf16>, memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> ()
  // expected-error @below {{'kv.tile_store_rows' op the buffer must have element type f32, got bf16}}
  "kv.tile_store_rows"(%x2, %b, %m, %i) : (tensor<64x128xf32>, memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> ()
  return
}

func.func @tile_scatter(%x: tensor<64x64xf32>, %b: memref<?xf32>, %m: tensor<64x64xi1>, %i: tensor<64xi32>,
    %x2: tensor<64xf32>, %b2: memref<?xbf16>, %m2: tensor<64xi1>) {
  // expected-error @below {{'kv.tile_scatter' op an index must be 64x64xi32, got tensor<64xi32>}}
  "kv.tile_scatter"(%x, %b, %m, %i) : (tensor<64x64xf32>, memref<?xf32>, tensor<64x64xi1>, tensor<64xi32>) -> ()
  // expected-error @below {{'kv.tile_scatter' op the buffer must have element type f32, got bf16}}
  "kv.tile_scatter"(%x2, %b2, %m2, %i) : (tensor<64xf32>, memref<?xbf16>, tensor<64xi1>, tensor<64xi32>) -> ()
  return
}

func.func @copy_start(%c: !fp8, %i: i32, %d: !fp8_map) {
  %b = "kv.make_stages"() {buffer_name = "keys", copy = "staged", stages = 2 : i64, tile = tensor<64x128xbf16, "shared">} : () -> !kv.stages
  // expected-error @below {{'kv.copy_start' op needs a descriptor and pages, or neither, for a buffer that is filled by staged}}
  "kv.copy_start"(%b, %i, %c, %i, %i, %i, %i, %d) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0>} : (!kv.stages, i32, !fp8, i32, i32, i32, i32, !fp8_map) -> ()
  return
}

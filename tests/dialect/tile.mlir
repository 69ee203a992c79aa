// RUN: kv-opt %s --verify-roundtrip --verify-kv | FileCheck %s
// RUN: kv-opt %s | kv-opt | FileCheck %s
// RUN: kv-opt %s --emit-bytecode | kv-opt | FileCheck %s

// Operations on tiles: every op, with and without what is optional, before layouts are chosen and after.

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!dense = !kv.operand<"dense", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>

// CHECK-LABEL: func.func @positions
// CHECK:         %[[I:.*]] = "kv.tile_index"() : () -> tensor<64xi32>
// CHECK:         "kv.tile_broadcast"(%[[I]]) {dimension = 0 : i64} : (tensor<64xi32>) -> tensor<64x128xi32>
// CHECK:         "kv.tile_broadcast"(%[[I]]) {dimension = 1 : i64} : (tensor<64xi32>) -> tensor<80x64xi32>
func.func @positions() {
  %i = "kv.tile_index"() : () -> tensor<64xi32>
  %rows = "kv.tile_broadcast"(%i) {dimension = 0 : i64} : (tensor<64xi32>) -> tensor<64x128xi32>
  %columns = "kv.tile_broadcast"(%i) {dimension = 1 : i64} : (tensor<64xi32>) -> tensor<80x64xi32>
  return
}

// CHECK-LABEL: func.func @ramps
// CHECK:         "kv.tile_ramp"(%{{.*}}, %{{.*}}) : (tensor<64xf32>, tensor<64xf32>) -> tensor<64x128xf32>
func.func @ramps(%start: tensor<64xf32>, %step: tensor<64xf32>) {
  %0 = "kv.tile_ramp"(%start, %step) : (tensor<64xf32>, tensor<64xf32>) -> tensor<64x128xf32>
  return
}

// CHECK-LABEL: func.func @reductions
// CHECK:         "kv.tile_reduce"(%{{.*}}) {axis = 1 : i64, kind = "max"} : (tensor<64x128xf32>) -> tensor<64xf32>
// CHECK:         "kv.tile_reduce"(%{{.*}}) {axis = 0 : i64, kind = "min"} : (tensor<64x128xf32>) -> tensor<128xf32>
// CHECK:         "kv.tile_reduce"(%{{.*}}) {axis = 1 : i64, kind = "add"} : (tensor<64x128xi32>) -> tensor<64xi32>
// CHECK:         "kv.tile_reduce_lanes"(%{{.*}}) {kind = "add"} : (tensor<64xf32>) -> tensor<64xf32>
func.func @reductions(%x: tensor<64x128xf32>, %i: tensor<64x128xi32>) {
  %0 = "kv.tile_reduce"(%x) {kind = "max", axis = 1 : i64} : (tensor<64x128xf32>) -> tensor<64xf32>
  %1 = "kv.tile_reduce"(%x) {kind = "min", axis = 0 : i64} : (tensor<64x128xf32>) -> tensor<128xf32>
  %2 = "kv.tile_reduce"(%i) {kind = "add", axis = 1 : i64} : (tensor<64x128xi32>) -> tensor<64xi32>
  %3 = "kv.tile_reduce_lanes"(%0) {kind = "add"} : (tensor<64xf32>) -> tensor<64xf32>
  return
}

// CHECK-LABEL: func.func @masks
// CHECK:         "kv.tile_mask"(%{{.*}}, %{{.*}}) : (tensor<64x128xf32>, tensor<64x128xi1>) -> tensor<64x128xf32>
// CHECK:         "kv.warp_any"(%{{.*}}) : (tensor<64xi1, "rows(wgmma)">) -> i1
func.func @masks(%x: tensor<64x128xf32>, %seen: tensor<64x128xi1>, %rows: tensor<64xi1, "rows(wgmma)">) {
  %0 = "kv.tile_mask"(%x, %seen) : (tensor<64x128xf32>, tensor<64x128xi1>) -> tensor<64x128xf32>
  %1 = "kv.warp_any"(%rows) : (tensor<64xi1, "rows(wgmma)">) -> i1
  return
}

// CHECK-LABEL: func.func @products
// CHECK:         "kv.dot"(%{{.*}}, %{{.*}}) {transpose_b = true} : (tensor<64x128xbf16>, tensor<96x128xbf16>) -> tensor<64x96xf32>
// CHECK:         "kv.dot"(%{{.*}}, %{{.*}}, %{{.*}}) {transpose_b = false} : (tensor<64x96xbf16>, tensor<96x128xbf16>, tensor<64x128xf32>) -> tensor<64x128xf32>
// CHECK:         "kv.dot"(%{{.*}}, %{{.*}}) {transpose_b = true} : (tensor<64x128xbf16, "shared">, tensor<96x128xbf16, "shared">) -> tensor<64x96xf32, "wgmma">
func.func @products(%q: tensor<64x128xbf16>, %k: tensor<96x128xbf16>, %p: tensor<64x96xbf16>, %o: tensor<64x128xf32>,
                    %qs: tensor<64x128xbf16, "shared">, %ks: tensor<96x128xbf16, "shared">) {
  %0 = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<64x128xbf16>, tensor<96x128xbf16>) -> tensor<64x96xf32>
  %1 = "kv.dot"(%p, %k, %o) {transpose_b = false} : (tensor<64x96xbf16>, tensor<96x128xbf16>, tensor<64x128xf32>) -> tensor<64x128xf32>
  %2 = "kv.dot"(%qs, %ks) {transpose_b = true} : (tensor<64x128xbf16, "shared">, tensor<96x128xbf16, "shared">) -> tensor<64x96xf32, "wgmma">
  return
}

// Caches and operands, stored elements and dequantized ones, parts of a head, with a descriptor and without.
// CHECK-LABEL: func.func @loads
// CHECK:         "kv.tile_load"({{.*}}) {first_column = 0 : i64, {{.*}}tail = "zero"} : (!kv.cache<"paged", bf16, {{.*}}, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
// CHECK:         "kv.tile_load"({{.*}}) {first_column = 64 : i64, {{.*}}tail = "any"} : ({{.*}}, i32, i32, i32, i32, i32, !kv.tma<{{.*}}) -> tensor<64x64xbf16>
// CHECK:         "kv.tile_load"({{.*}}) {{.*}} : (!kv.cache<"paged", f8E4M3FN, {{.*}} -> tensor<64x128xbf16>
// CHECK:         "kv.tile_load"({{.*}}) {{.*}} : (!kv.operand<"dense", {{.*}} -> tensor<64x128xbf16>
func.func @loads(%c: !cache, %f: !fp8, %d: !dense, %m: !map, %i: i32) {
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  %1 = "kv.tile_load"(%c, %i, %i, %i, %i, %i, %m) {first_column = 64 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32, !map) -> tensor<64x64xbf16>
  %2 = "kv.tile_load"(%f, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!fp8, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  %3 = "kv.tile_load"(%d, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!dense, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  return
}

// Rows of the pool that lists name, and rows in which scales and bf16 keys lie.
// CHECK-LABEL: func.func @rows
// CHECK:         "kv.tile_load"({{.*}}) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 1>, tail = "zero"} : ({{.*}}, memref<?x?xi32>) -> tensor<64x128xbf16>
// CHECK:         "kv.tile_load"({{.*}}) {first_column = 0 : i64, inline_scales = 32 : i64, {{.*}}, rope = 16 : i64, tail = "any"} : {{.*}} -> tensor<64x80xbf16>
func.func @rows(%c: !cache, %f: !kv.cache<"paged", f8E4M3FN, 1 : i64, 104 : i64, true, 16 : i64, none, 1 : i64>, %i: i32, %lists: memref<?x?xi32>) {
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i, %lists) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 1>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32, memref<?x?xi32>) -> tensor<64x128xbf16>
  %1 = "kv.tile_load"(%f, %i, %i, %i, %i, %i) {first_column = 0 : i64, inline_scales = 32 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, rope = 16 : i64, tail = "any"} : (!kv.cache<"paged", f8E4M3FN, 1 : i64, 104 : i64, true, 16 : i64, none, 1 : i64>, i32, i32, i32, i32, i32) -> tensor<64x80xbf16>
  return
}

// CHECK-LABEL: func.func @buffers
// CHECK:         %[[X:.*]] = "kv.tile_load_rows"(%{{.*}}, %{{.*}}, %{{.*}}, %{{.*}}) : (memref<?x?x128xbf16>, tensor<64xi1>, tensor<64xi32>, tensor<64xi32>) -> tensor<64x128xbf16>
// CHECK:         "kv.tile_store_rows"(%[[X]], %{{.*}}, %{{.*}}, %{{.*}}, %{{.*}}) : (tensor<64x128xbf16>, memref<?x?x128xbf16>, tensor<64xi1>, tensor<64xi32>, tensor<64xi32>) -> ()
// CHECK:         "kv.tile_store_rows"(%[[X]], {{.*}}) {first_column = 16 : i64, stored = 112 : i64}
// CHECK:         %[[Y:.*]] = "kv.tile_gather"(%{{.*}}, %{{.*}}, %{{.*}}) : (memref<?xf32>, tensor<64xi1>, tensor<64xi32>) -> tensor<64xf32>
// CHECK:         "kv.tile_gather"(%{{.*}}, %{{.*}}, %{{.*}}, %{{.*}}) : (memref<?x?xf32>, tensor<8x64xi1>, tensor<8x64xi32>, tensor<8x64xi32>) -> tensor<8x64xf32>
// CHECK:         "kv.tile_scatter"(%[[Y]], %{{.*}}, %{{.*}}, %{{.*}}) : (tensor<64xf32>, memref<?xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
func.func @buffers(%rows: memref<?x?x128xbf16>, %v: memref<?xf32>, %m: memref<?x?xf32>, %exists: tensor<64xi1>,
                   %i: tensor<64xi32>, %seen: tensor<8x64xi1>, %j: tensor<8x64xi32>) {
  %x = "kv.tile_load_rows"(%rows, %exists, %i, %i) : (memref<?x?x128xbf16>, tensor<64xi1>, tensor<64xi32>, tensor<64xi32>) -> tensor<64x128xbf16>
  "kv.tile_store_rows"(%x, %rows, %exists, %i, %i) : (tensor<64x128xbf16>, memref<?x?x128xbf16>, tensor<64xi1>, tensor<64xi32>, tensor<64xi32>) -> ()
  "kv.tile_store_rows"(%x, %rows, %exists, %i, %i) {first_column = 16 : i64, stored = 112 : i64} : (tensor<64x128xbf16>, memref<?x?x128xbf16>, tensor<64xi1>, tensor<64xi32>, tensor<64xi32>) -> ()
  %y = "kv.tile_gather"(%v, %exists, %i) : (memref<?xf32>, tensor<64xi1>, tensor<64xi32>) -> tensor<64xf32>
  %z = "kv.tile_gather"(%m, %seen, %j, %j) : (memref<?x?xf32>, tensor<8x64xi1>, tensor<8x64xi32>, tensor<8x64xi32>) -> tensor<8x64xf32>
  "kv.tile_scatter"(%y, %v, %exists, %i) : (tensor<64xf32>, memref<?xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
  return
}

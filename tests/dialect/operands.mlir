// RUN: kv-opt %s --verify-roundtrip | FileCheck %s
// RUN: kv-opt %s --verify-kv --verify-roundtrip | FileCheck %s

// Attention operands: every op of the interface with each kind of operand.

!cached = !kv.operand<"paged", f16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!fp8 = !kv.operand<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!scales = !kv.operand<"scales", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!dense = !kv.operand<"dense", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 128 : i64>
!dense8 = !kv.operand<"dense", i8, 8 : i64, 128 : i64, false, 0 : i64, f32, 32 : i64>
!ragged = !kv.operand<"ragged", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 128 : i64>
!ragged8 = !kv.operand<"ragged", i8, 8 : i64, 128 : i64, false, 0 : i64, f32, 32 : i64>

// CHECK-LABEL: func.func @of_cached
func.func @of_cached(%x: !cached, %b: i32, %t: i32, %h: i32, %d: i32) {
  // CHECK: "kv.cache_length"(%{{.+}}, %{{.+}}) : (!kv.operand<"paged",{{.+}}, i32) -> i32
  %n = "kv.cache_length"(%x, %b) : (!cached, i32) -> i32
  // CHECK: "kv.max_context_length"(
  %m = "kv.max_context_length"(%x) : (!cached) -> i32
  // CHECK: "kv.num_rows"(
  %rows = "kv.num_rows"(%x) : (!cached) -> i32
  // CHECK: "kv.row_index"(
  %row = "kv.row_index"(%x, %b, %t) : (!cached, i32, i32) -> i32
  // CHECK: "kv.tma_row"(
  %tma = "kv.tma_row"(%x, %t) : (!cached, i32) -> i32
  // CHECK: "kv.populate"({{.+}} -> !kv.rows<64 : i64, 16 : i64>
  %first = "kv.populate"(%x, %b, %t) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!cached, i32, i32) -> !kv.rows<64 : i64, 16 : i64>
  // CHECK: %[[P:.+]] = "kv.page"(
  %page = "kv.page"(%x, %b, %t) : (!cached, i32, i32) -> i32
  // CHECK: "kv.raw_page"(
  %raw = "kv.raw_page"(%x, %b, %t) : (!cached, i32, i32) -> i32
  // CHECK: "kv.load"({{.+}}, %[[P]]) {width = 4 : i64} : (!kv.operand<"paged",
  %v = "kv.load"(%x, %b, %h, %t, %d, %page) {width = 4 : i64} : (!cached, i32, i32, i32, i32, i32) -> vector<4xf16>
  // CHECK: "kv.block_ptr"(
  %at = "kv.block_ptr"(%x, %b, %t, %h, %d) {tile = 1 : i64} : (!cached, i32, i32, i32, i32) -> !llvm.ptr<1>
  // CHECK: "kv.scales_base"(
  %base = "kv.scales_base"(%x) : (!cached) -> !llvm.ptr<1>
  // CHECK: "kv.load_tile"(
  %tile = "kv.alloc_shared"() {bytes = 32768 : i64, alignment = 128 : i64} : () -> !llvm.ptr<3>
  "kv.load_tile"(%x, %b, %h, %t, %n, %tile, %d) {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 128 : i64, mode = "async"}
    : (!cached, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  // CHECK: "kv.field"(%{{.+}}) {field = "lookup"}
  %f = "kv.field"(%x) {field = "lookup"} : (!cached) -> !llvm.ptr<1>
  return
}

// CHECK-LABEL: func.func @of_fp8
func.func @of_fp8(%x: !fp8, %b: i32, %t: i32, %h: i32, %d: i32) {
  // CHECK: "kv.cache_length"(%{{.+}}, %{{.+}}) : (!kv.operand<"paged",{{.+}}, i32) -> i32
  %n = "kv.cache_length"(%x, %b) : (!fp8, i32) -> i32
  // CHECK: "kv.max_context_length"(
  %m = "kv.max_context_length"(%x) : (!fp8) -> i32
  // CHECK: "kv.num_rows"(
  %rows = "kv.num_rows"(%x) : (!fp8) -> i32
  // CHECK: "kv.row_index"(
  %row = "kv.row_index"(%x, %b, %t) : (!fp8, i32, i32) -> i32
  // CHECK: "kv.tma_row"(
  %tma = "kv.tma_row"(%x, %t) : (!fp8, i32) -> i32
  // CHECK: "kv.populate"({{.+}} -> !kv.rows<64 : i64, 16 : i64>
  %first = "kv.populate"(%x, %b, %t) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!fp8, i32, i32) -> !kv.rows<64 : i64, 16 : i64>
  // CHECK: %[[P:.+]] = "kv.page"(
  %page = "kv.page"(%x, %b, %t) : (!fp8, i32, i32) -> i32
  // CHECK: "kv.raw_page"(
  %raw = "kv.raw_page"(%x, %b, %t) : (!fp8, i32, i32) -> i32
  // CHECK: "kv.load"({{.+}}, %[[P]]) {width = 4 : i64} : (!kv.operand<"paged",
  %v = "kv.load"(%x, %b, %h, %t, %d, %page) {width = 4 : i64} : (!fp8, i32, i32, i32, i32, i32) -> vector<4xbf16>
  // CHECK: "kv.block_ptr"(
  %at = "kv.block_ptr"(%x, %b, %t, %h, %d) {tile = 1 : i64} : (!fp8, i32, i32, i32, i32) -> !llvm.ptr<1>
  // CHECK: "kv.scales_base"(
  %base = "kv.scales_base"(%x) : (!fp8) -> !llvm.ptr<1>
  // CHECK: "kv.load_scale"({{.+}} -> f32
  %s = "kv.load_scale"(%x, %b, %h, %t, %d) {width = 1 : i64} : (!fp8, i32, i32, i32, i32) -> f32
  // CHECK: "kv.scale_block_ptr"(
  %sat = "kv.scale_block_ptr"(%x, %b, %t, %h, %d) : (!fp8, i32, i32, i32, i32) -> !llvm.ptr<1>
  // CHECK: "kv.load_raw"({{.+}} -> vector<8xf8E4M3FN>
  %q = "kv.load_raw"(%x, %b, %h, %t, %d) {width = 8 : i64} : (!fp8, i32, i32, i32, i32) -> vector<8xf8E4M3FN>
  // CHECK: "kv.load_tile"(
  %tile = "kv.alloc_shared"() {bytes = 32768 : i64, alignment = 128 : i64} : () -> !llvm.ptr<3>
  "kv.load_tile"(%x, %b, %h, %t, %n, %tile, %d) {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 128 : i64, mode = "async"}
    : (!fp8, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  // CHECK: "kv.field"(%{{.+}}) {field = "lookup"}
  %f = "kv.field"(%x) {field = "lookup"} : (!fp8) -> !llvm.ptr<1>
  return
}

// CHECK-LABEL: func.func @of_scales
func.func @of_scales(%x: !scales, %b: i32, %t: i32, %h: i32, %d: i32) {
  // CHECK: "kv.cache_length"(%{{.+}}, %{{.+}}) : (!kv.operand<"scales",{{.+}}, i32) -> i32
  %n = "kv.cache_length"(%x, %b) : (!scales, i32) -> i32
  // CHECK: "kv.max_context_length"(
  %m = "kv.max_context_length"(%x) : (!scales) -> i32
  // CHECK: "kv.num_rows"(
  %rows = "kv.num_rows"(%x) : (!scales) -> i32
  // CHECK: "kv.row_index"(
  %row = "kv.row_index"(%x, %b, %t) : (!scales, i32, i32) -> i32
  // CHECK: "kv.tma_row"(
  %tma = "kv.tma_row"(%x, %t) : (!scales, i32) -> i32
  // CHECK: "kv.populate"({{.+}} -> !kv.rows<64 : i64, 16 : i64>
  %first = "kv.populate"(%x, %b, %t) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!scales, i32, i32) -> !kv.rows<64 : i64, 16 : i64>
  // CHECK: %[[P:.+]] = "kv.page"(
  %page = "kv.page"(%x, %b, %t) : (!scales, i32, i32) -> i32
  // CHECK: "kv.raw_page"(
  %raw = "kv.raw_page"(%x, %b, %t) : (!scales, i32, i32) -> i32
  // CHECK: "kv.load"({{.+}}, %[[P]]) {width = 4 : i64} : (!kv.operand<"scales",
  %v = "kv.load"(%x, %b, %h, %t, %d, %page) {width = 4 : i64} : (!scales, i32, i32, i32, i32, i32) -> vector<4xf32>
  // CHECK: "kv.block_ptr"(
  %at = "kv.block_ptr"(%x, %b, %t, %h, %d) {tile = 1 : i64} : (!scales, i32, i32, i32, i32) -> !llvm.ptr<1>
  // CHECK: "kv.scales_base"(
  %base = "kv.scales_base"(%x) : (!scales) -> !llvm.ptr<1>
  // CHECK: "kv.load_scale"({{.+}} -> f32
  %s = "kv.load_scale"(%x, %b, %h, %t, %d) {width = 1 : i64} : (!scales, i32, i32, i32, i32) -> f32
  // CHECK: "kv.scale_block_ptr"(
  %sat = "kv.scale_block_ptr"(%x, %b, %t, %h, %d) : (!scales, i32, i32, i32, i32) -> !llvm.ptr<1>
  // CHECK: "kv.field"(%{{.+}}) {field = "lookup"}
  %f = "kv.field"(%x) {field = "lookup"} : (!scales) -> !llvm.ptr<1>
  return
}

// CHECK-LABEL: func.func @of_dense
func.func @of_dense(%x: !dense, %b: i32, %t: i32, %h: i32, %d: i32) {
  // CHECK: "kv.cache_length"(%{{.+}}, %{{.+}}) : (!kv.operand<"dense",{{.+}}, i32) -> i32
  %n = "kv.cache_length"(%x, %b) : (!dense, i32) -> i32
  // CHECK: "kv.max_context_length"(
  %m = "kv.max_context_length"(%x) : (!dense) -> i32
  // CHECK: "kv.num_rows"(
  %rows = "kv.num_rows"(%x) : (!dense) -> i32
  // CHECK: "kv.row_index"(
  %row = "kv.row_index"(%x, %b, %t) : (!dense, i32, i32) -> i32
  // CHECK: "kv.tma_row"(
  %tma = "kv.tma_row"(%x, %t) : (!dense, i32) -> i32
  // CHECK: "kv.populate"({{.+}} -> !kv.rows<64 : i64, 0 : i64>
  %first = "kv.populate"(%x, %b, %t) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!dense, i32, i32) -> !kv.rows<64 : i64, 0 : i64>
  // CHECK: %[[P:.+]] = "kv.page"(
  %page = "kv.page"(%x, %b, %t) : (!dense, i32, i32) -> i32
  // CHECK: "kv.raw_page"(
  %raw = "kv.raw_page"(%x, %b, %t) : (!dense, i32, i32) -> i32
  // CHECK: "kv.load"({{.+}}, %[[P]]) {width = 4 : i64} : (!kv.operand<"dense",
  %v = "kv.load"(%x, %b, %h, %t, %d, %page) {width = 4 : i64} : (!dense, i32, i32, i32, i32, i32) -> vector<4xf16>
  // CHECK: "kv.block_ptr"(
  %at = "kv.block_ptr"(%x, %b, %t, %h, %d) {tile = 1 : i64} : (!dense, i32, i32, i32, i32) -> !llvm.ptr<1>
  // CHECK: "kv.scales_base"(
  %base = "kv.scales_base"(%x) : (!dense) -> !llvm.ptr<1>
  // CHECK: "kv.load_scale"({{.+}} -> f16
  %s = "kv.load_scale"(%x, %b, %h, %t, %d) {width = 1 : i64} : (!dense, i32, i32, i32, i32) -> f16
  // CHECK: "kv.load_tile"(
  %tile = "kv.alloc_shared"() {bytes = 32768 : i64, alignment = 128 : i64} : () -> !llvm.ptr<3>
  "kv.load_tile"(%x, %b, %h, %t, %n, %tile, %d) {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 128 : i64, mode = "async"}
    : (!dense, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  // CHECK: "kv.field"(%{{.+}}) {field = "lengths"}
  %f = "kv.field"(%x) {field = "lengths"} : (!dense) -> !llvm.ptr<1>
  return
}

// CHECK-LABEL: func.func @of_dense8
func.func @of_dense8(%x: !dense8, %b: i32, %t: i32, %h: i32, %d: i32) {
  // CHECK: "kv.cache_length"(%{{.+}}, %{{.+}}) : (!kv.operand<"dense",{{.+}}, i32) -> i32
  %n = "kv.cache_length"(%x, %b) : (!dense8, i32) -> i32
  // CHECK: "kv.max_context_length"(
  %m = "kv.max_context_length"(%x) : (!dense8) -> i32
  // CHECK: "kv.num_rows"(
  %rows = "kv.num_rows"(%x) : (!dense8) -> i32
  // CHECK: "kv.row_index"(
  %row = "kv.row_index"(%x, %b, %t) : (!dense8, i32, i32) -> i32
  // CHECK: "kv.tma_row"(
  %tma = "kv.tma_row"(%x, %t) : (!dense8, i32) -> i32
  // CHECK: "kv.populate"({{.+}} -> !kv.rows<64 : i64, 0 : i64>
  %first = "kv.populate"(%x, %b, %t) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!dense8, i32, i32) -> !kv.rows<64 : i64, 0 : i64>
  // CHECK: %[[P:.+]] = "kv.page"(
  %page = "kv.page"(%x, %b, %t) : (!dense8, i32, i32) -> i32
  // CHECK: "kv.raw_page"(
  %raw = "kv.raw_page"(%x, %b, %t) : (!dense8, i32, i32) -> i32
  // CHECK: "kv.load"({{.+}}, %[[P]]) {width = 4 : i64} : (!kv.operand<"dense",
  %v = "kv.load"(%x, %b, %h, %t, %d, %page) {width = 4 : i64} : (!dense8, i32, i32, i32, i32, i32) -> vector<4xf32>
  // CHECK: "kv.block_ptr"(
  %at = "kv.block_ptr"(%x, %b, %t, %h, %d) {tile = 1 : i64} : (!dense8, i32, i32, i32, i32) -> !llvm.ptr<1>
  // CHECK: "kv.scales_base"(
  %base = "kv.scales_base"(%x) : (!dense8) -> !llvm.ptr<1>
  // CHECK: "kv.load_scale"({{.+}} -> f32
  %s = "kv.load_scale"(%x, %b, %h, %t, %d) {width = 1 : i64} : (!dense8, i32, i32, i32, i32) -> f32
  // CHECK: "kv.scale_block_ptr"(
  %sat = "kv.scale_block_ptr"(%x, %b, %t, %h, %d) : (!dense8, i32, i32, i32, i32) -> !llvm.ptr<1>
  // CHECK: "kv.load_raw"({{.+}} -> vector<8xi8>
  %q = "kv.load_raw"(%x, %b, %h, %t, %d) {width = 8 : i64} : (!dense8, i32, i32, i32, i32) -> vector<8xi8>
  // CHECK: "kv.load_tile"(
  %tile = "kv.alloc_shared"() {bytes = 32768 : i64, alignment = 128 : i64} : () -> !llvm.ptr<3>
  "kv.load_tile"(%x, %b, %h, %t, %n, %tile, %d) {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 128 : i64, mode = "async"}
    : (!dense8, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  // CHECK: "kv.field"(%{{.+}}) {field = "lengths"}
  %f = "kv.field"(%x) {field = "lengths"} : (!dense8) -> !llvm.ptr<1>
  return
}

// CHECK-LABEL: func.func @of_ragged
func.func @of_ragged(%x: !ragged, %b: i32, %t: i32, %h: i32, %d: i32) {
  // CHECK: "kv.cache_length"(%{{.+}}, %{{.+}}) : (!kv.operand<"ragged",{{.+}}, i32) -> i32
  %n = "kv.cache_length"(%x, %b) : (!ragged, i32) -> i32
  // CHECK: "kv.num_rows"(
  %rows = "kv.num_rows"(%x) : (!ragged) -> i32
  // CHECK: "kv.row_index"(
  %row = "kv.row_index"(%x, %b, %t) : (!ragged, i32, i32) -> i32
  // CHECK: "kv.tma_row"(
  %tma = "kv.tma_row"(%x, %t) : (!ragged, i32) -> i32
  // CHECK: "kv.populate"({{.+}} -> !kv.rows<64 : i64, 0 : i64>
  %first = "kv.populate"(%x, %b, %t) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!ragged, i32, i32) -> !kv.rows<64 : i64, 0 : i64>
  // CHECK: %[[P:.+]] = "kv.page"(
  %page = "kv.page"(%x, %b, %t) : (!ragged, i32, i32) -> i32
  // CHECK: "kv.raw_page"(
  %raw = "kv.raw_page"(%x, %b, %t) : (!ragged, i32, i32) -> i32
  // CHECK: "kv.load"({{.+}}, %[[P]]) {width = 4 : i64} : (!kv.operand<"ragged",
  %v = "kv.load"(%x, %b, %h, %t, %d, %page) {width = 4 : i64} : (!ragged, i32, i32, i32, i32, i32) -> vector<4xf16>
  // CHECK: "kv.block_ptr"(
  %at = "kv.block_ptr"(%x, %b, %t, %h, %d) {tile = 1 : i64} : (!ragged, i32, i32, i32, i32) -> !llvm.ptr<1>
  // CHECK: "kv.scales_base"(
  %base = "kv.scales_base"(%x) : (!ragged) -> !llvm.ptr<1>
  // CHECK: "kv.load_scale"({{.+}} -> f16
  %s = "kv.load_scale"(%x, %b, %h, %t, %d) {width = 1 : i64} : (!ragged, i32, i32, i32, i32) -> f16
  // CHECK: "kv.scale_block_ptr"(
  %sat = "kv.scale_block_ptr"(%x, %b, %t, %h, %d) : (!ragged, i32, i32, i32, i32) -> !llvm.ptr<1>
  // CHECK: "kv.load_tile"(
  %tile = "kv.alloc_shared"() {bytes = 32768 : i64, alignment = 128 : i64} : () -> !llvm.ptr<3>
  "kv.load_tile"(%x, %b, %h, %t, %n, %tile, %d) {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 128 : i64, mode = "async"}
    : (!ragged, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  // CHECK: "kv.field"(%{{.+}}) {field = "offsets"}
  %f = "kv.field"(%x) {field = "offsets"} : (!ragged) -> !llvm.ptr<1>
  return
}

// CHECK-LABEL: func.func @of_ragged8
func.func @of_ragged8(%x: !ragged8, %b: i32, %t: i32, %h: i32, %d: i32) {
  // CHECK: "kv.cache_length"(%{{.+}}, %{{.+}}) : (!kv.operand<"ragged",{{.+}}, i32) -> i32
  %n = "kv.cache_length"(%x, %b) : (!ragged8, i32) -> i32
  // CHECK: "kv.num_rows"(
  %rows = "kv.num_rows"(%x) : (!ragged8) -> i32
  // CHECK: "kv.row_index"(
  %row = "kv.row_index"(%x, %b, %t) : (!ragged8, i32, i32) -> i32
  // CHECK: "kv.tma_row"(
  %tma = "kv.tma_row"(%x, %t) : (!ragged8, i32) -> i32
  // CHECK: "kv.populate"({{.+}} -> !kv.rows<64 : i64, 0 : i64>
  %first = "kv.populate"(%x, %b, %t) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!ragged8, i32, i32) -> !kv.rows<64 : i64, 0 : i64>
  // CHECK: %[[P:.+]] = "kv.page"(
  %page = "kv.page"(%x, %b, %t) : (!ragged8, i32, i32) -> i32
  // CHECK: "kv.raw_page"(
  %raw = "kv.raw_page"(%x, %b, %t) : (!ragged8, i32, i32) -> i32
  // CHECK: "kv.load"({{.+}}, %[[P]]) {width = 4 : i64} : (!kv.operand<"ragged",
  %v = "kv.load"(%x, %b, %h, %t, %d, %page) {width = 4 : i64} : (!ragged8, i32, i32, i32, i32, i32) -> vector<4xf32>
  // CHECK: "kv.block_ptr"(
  %at = "kv.block_ptr"(%x, %b, %t, %h, %d) {tile = 1 : i64} : (!ragged8, i32, i32, i32, i32) -> !llvm.ptr<1>
  // CHECK: "kv.scales_base"(
  %base = "kv.scales_base"(%x) : (!ragged8) -> !llvm.ptr<1>
  // CHECK: "kv.load_scale"({{.+}} -> f32
  %s = "kv.load_scale"(%x, %b, %h, %t, %d) {width = 1 : i64} : (!ragged8, i32, i32, i32, i32) -> f32
  // CHECK: "kv.scale_block_ptr"(
  %sat = "kv.scale_block_ptr"(%x, %b, %t, %h, %d) : (!ragged8, i32, i32, i32, i32) -> !llvm.ptr<1>
  // CHECK: "kv.load_raw"({{.+}} -> vector<8xi8>
  %q = "kv.load_raw"(%x, %b, %h, %t, %d) {width = 8 : i64} : (!ragged8, i32, i32, i32, i32) -> vector<8xi8>
  // CHECK: "kv.load_tile"(
  %tile = "kv.alloc_shared"() {bytes = 32768 : i64, alignment = 128 : i64} : () -> !llvm.ptr<3>
  "kv.load_tile"(%x, %b, %h, %t, %n, %tile, %d) {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 128 : i64, mode = "async"}
    : (!ragged8, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  // CHECK: "kv.field"(%{{.+}}) {field = "offsets"}
  %f = "kv.field"(%x) {field = "offsets"} : (!ragged8) -> !llvm.ptr<1>
  return
}

// A cache becomes an operand of its elements, or of its scales: the result's kind says which.
// CHECK-LABEL: func.func @made
func.func @made(%c: !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>) {
  // CHECK: "kv.make_operand"(%{{.+}}) : (!kv.cache<{{.+}}>) -> !kv.operand<"paged", f8E4M3FN,
  %elements = "kv.make_operand"(%c) : (!kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>) -> !fp8
  // CHECK: "kv.make_operand"(%{{.+}}) : (!kv.cache<{{.+}}>) -> !kv.operand<"scales", f8E4M3FN,
  %scales = "kv.make_operand"(%c) : (!kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>) -> !scales
  return
}

// CHECK-LABEL: func.func @attention_cached
func.func @attention_cached(%k: !cached, %v: !cached, %q: memref<?x16x128xf16>, %o: memref<?xi32>, %s: f32) {
  // CHECK: "kv.operand_attention"(%{{[a-z0-9]+}}, %{{[a-z0-9]+}}, %{{[a-z0-9]+}}, %{{[a-z0-9]+}},
  // CHECK-SAME: (!kv.operand<"paged",{{.+}}>, !kv.operand<"paged",
  "kv.operand_attention"(keys = %k, values = %v, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!cached, !cached, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  return
}

// CHECK-LABEL: func.func @attention_dense
func.func @attention_dense(%k: !dense, %v: !dense, %q: memref<?x16x128xf16>, %o: memref<?xi32>, %s: f32) {
  // CHECK: "kv.operand_attention"(%{{[a-z0-9]+}}, %{{[a-z0-9]+}}, %{{[a-z0-9]+}}, %{{[a-z0-9]+}},
  // CHECK-SAME: (!kv.operand<"dense",{{.+}}>, !kv.operand<"dense",
  "kv.operand_attention"(keys = %k, values = %v, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!dense, !dense, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  return
}

// CHECK-LABEL: func.func @attention_ragged
func.func @attention_ragged(%k: !ragged, %v: !ragged, %q: memref<?x16x128xf16>, %o: memref<?xi32>, %s: f32) {
  // CHECK: "kv.operand_attention"(%{{[a-z0-9]+}}, %{{[a-z0-9]+}}, %{{[a-z0-9]+}}, %{{[a-z0-9]+}},
  // CHECK-SAME: (!kv.operand<"ragged",{{.+}}>, !kv.operand<"ragged",
  "kv.operand_attention"(keys = %k, values = %v, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!ragged, !ragged, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  return
}

// CHECK-LABEL: func.func @attention_ragged8
func.func @attention_ragged8(%k: !ragged8, %v: !ragged8, %q: memref<?x16x128xf16>, %o: memref<?xi32>, %s: f32) {
  // CHECK: "kv.operand_attention"(%{{[a-z0-9]+}}, %{{[a-z0-9]+}}, %{{[a-z0-9]+}}, %{{[a-z0-9]+}},
  // CHECK-SAME: (!kv.operand<"ragged",{{.+}}>, !kv.operand<"ragged",
  "kv.operand_attention"(keys = %k, values = %v, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!ragged8, !ragged8, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  return
}

// RUN: kv-opt %s --verify-roundtrip --named-operands | FileCheck %s
// RUN: kv-opt %s --mlir-print-op-generic | kv-opt --named-operands | FileCheck %s

// One function a group; every op and every optional operand at least once.

!paged = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!paged_view = !kv.operand<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!fp8_pool = !kv.collection<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!latent = !kv.cache<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!latent_pool = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!index_pool = !kv.collection<"paged", f16, 1 : i64, 128 : i64, true, 64 : i64, none, 1 : i64>
!region = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>

// === tier 2: metadata

// CHECK-LABEL: func.func @handles
func.func @handles(%pool: !pool, %fp8_pool: !fp8_pool, %layer: i32) {
  // CHECK: %[[K:.+]] = "kv.key_cache"(%{{.+}}, %{{.+}}) : (!kv.collection<{{.+}}>, i32) -> !kv.cache<"paged", bf16,
  %k = "kv.key_cache"(%pool, %layer) : (!pool, i32) -> !paged
  // CHECK: "kv.value_cache"(%{{.+}}, %{{.+}}) : (!kv.collection<{{.+}}>, i32) -> !kv.cache<"paged", bf16,
  %v = "kv.value_cache"(%pool, %layer) : (!pool, i32) -> !paged
  // CHECK: "kv.key_cache"(%{{.+}}, %{{.+}}) : (!kv.collection<{{.+}}>, i32) -> !kv.cache<"paged", f8E4M3FN, {{.+}}, f32, 32 : i64>
  %q = "kv.key_cache"(%fp8_pool, %layer) : (!fp8_pool, i32) -> !fp8
  // CHECK: "kv.make_operand"(%[[K]]) : (!kv.cache<{{.+}}>) -> !kv.operand<"paged", bf16,
  %view = "kv.make_operand"(%k) : (!paged) -> !paged_view
  return
}

// CHECK-LABEL: func.func @fields
func.func @fields(%k: !paged, %fp8: !fp8, %pool: !pool) {
  // CHECK: "kv.field"(%{{.+}}) {field = "base"} : (!kv.cache<{{.+}}>) -> !llvm.ptr<1>
  %base = "kv.field"(%k) {field = "base"} : (!paged) -> !llvm.ptr<1>
  // CHECK: "kv.field"(%{{.+}}) {field = "stride0"} : (!kv.cache<{{.+}}>) -> i64
  %s0 = "kv.field"(%k) {field = "stride0"} : (!paged) -> i64
  // CHECK: "kv.field"(%{{.+}}) {field = "scales_stride0"} : (!kv.cache<{{.+}}>) -> i64
  %ss0 = "kv.field"(%fp8) {field = "scales_stride0"} : (!fp8) -> i64
  // CHECK: "kv.field"(%{{.+}}) {field = "num_layers"} : (!kv.collection<{{.+}}>) -> i32
  %layers = "kv.field"(%pool) {field = "num_layers"} : (!pool) -> i32
  return
}

// CHECK-LABEL: func.func @make
func.func @make(%p: !llvm.ptr<1>, %n: i32, %s: i64) {
  // CHECK: "kv.make_cache"(
  // CHECK-SAME: (!llvm.ptr<1>, i64, i32, i32, !llvm.ptr<1>, i64, i32, !llvm.ptr<1>, i32, i32, i32) -> !kv.cache<"paged", bf16,
  %c = "kv.make_cache"(base = %p, stride0 = %s, num_blocks = %n, capacity = %n, lookup = %p, lookup_stride = %s,
      lookup_columns = %n, lengths = %p, batch = %n, max_seq_length = %n, max_cache_length = %n)
    : (!llvm.ptr<1>, i64, i32, i32, !llvm.ptr<1>, i64, i32, !llvm.ptr<1>, i32, i32, i32) -> !paged
  // CHECK: "kv.make_cache"(
  // CHECK-SAME: !llvm.ptr<1>, i64) -> !kv.cache<"paged", f8E4M3FN,
  %q = "kv.make_cache"(base = %p, stride0 = %s, num_blocks = %n, capacity = %n, lookup = %p, lookup_stride = %s,
      lookup_columns = %n, lengths = %p, batch = %n, max_seq_length = %n, max_cache_length = %n, scales = %p,
      scales_stride0 = %s)
    : (!llvm.ptr<1>, i64, i32, i32, !llvm.ptr<1>, i64, i32, !llvm.ptr<1>, i32, i32, i32, !llvm.ptr<1>, i64) -> !fp8
  // CHECK: "kv.make_collection"(
  // CHECK-SAME: i32, i64, i64, i64) -> !kv.collection<"paged", bf16,
  %pool = "kv.make_collection"(blocks = %p, stride0 = %s, num_blocks = %n, capacity = %n, lookup = %p,
      lookup_stride = %s, lookup_columns = %n, lengths = %p, batch = %n, max_seq_length = %n, max_cache_length = %n,
      num_layers = %n, kv_stride = %s, layer_stride = %s, lookup_layer_stride = %s)
    : (!llvm.ptr<1>, i64, i32, i32, !llvm.ptr<1>, i64, i32, !llvm.ptr<1>, i32, i32, i32, i32, i64, i64, i64) -> !pool
  return
}

// CHECK-LABEL: func.func @lengths
func.func @lengths(%k: !paged, %view: !paged_view, %pool: !pool, %b: i32) {
  // CHECK: "kv.cache_length"(%{{.+}}, %{{.+}}) : (!kv.cache<{{.+}}>, i32) -> i32
  %0 = "kv.cache_length"(%k, %b) : (!paged, i32) -> i32
  // CHECK: "kv.cache_length"(%{{.+}}, %{{.+}}) : (!kv.operand<{{.+}}>, i32) -> i32
  %1 = "kv.cache_length"(%view, %b) : (!paged_view, i32) -> i32
  // CHECK: "kv.cache_lengths"(%{{.+}}) : (!kv.collection<{{.+}}>) -> !llvm.ptr<1>
  %2 = "kv.cache_lengths"(%pool) : (!pool) -> !llvm.ptr<1>
  // CHECK: "kv.max_prompt_length"(%{{.+}}) : (!kv.cache<{{.+}}>) -> i32
  %3 = "kv.max_prompt_length"(%k) : (!paged) -> i32
  // CHECK: "kv.max_context_length"(%{{.+}}) : (!kv.cache<{{.+}}>) -> i32
  %4 = "kv.max_context_length"(%k) : (!paged) -> i32
  // CHECK: "kv.is_empty"(%{{.+}}) : (!kv.cache<{{.+}}>) -> i1
  %5 = "kv.is_empty"(%k) : (!paged) -> i1
  // CHECK: "kv.device_attribute"() {attribute = "multiprocessors"} : () -> i32
  %7 = "kv.device_attribute"() {attribute = "multiprocessors"} : () -> i32
  // CHECK: "kv.num_rows"(%{{.+}}) : (!kv.cache<{{.+}}>) -> i32
  %6 = "kv.num_rows"(%k) : (!paged) -> i32
  return
}

// === tier 2: addressing

// CHECK-LABEL: func.func @pages_and_rows
func.func @pages_and_rows(%k: !paged, %c: !region, %b: i32, %t: i32) {
  // CHECK: "kv.page"(%{{.+}}, %{{.+}}, %{{.+}}) : (!kv.cache<{{.+}}>, i32, i32) -> i32
  %0 = "kv.page"(%k, %b, %t) : (!paged, i32, i32) -> i32
  // CHECK: "kv.raw_page"(%{{.+}}, %{{.+}}, %{{.+}}) : (!kv.cache<{{.+}}>, i32, i32) -> i32
  %1 = "kv.raw_page"(%k, %b, %t) : (!paged, i32, i32) -> i32
  // CHECK: "kv.row_index"(%{{.+}}, %{{.+}}, %{{.+}}) : (!kv.cache<"continuous", {{.+}}>, i32, i32) -> i32
  %2 = "kv.row_index"(%c, %b, %t) : (!region, i32, i32) -> i32
  // CHECK: "kv.tma_row"(%{{.+}}, %{{.+}}) : (!kv.cache<{{.+}}>, i32) -> i32
  %3 = "kv.tma_row"(%k, %t) : (!paged, i32) -> i32
  // CHECK: "kv.load_pages"(%{{.+}}, %{{.+}}, %{{.+}}) {count = 4 : i64} : (!kv.cache<{{.+}}>, i32, i32) -> vector<4xi32>
  %4 = "kv.load_pages"(%k, %b, %t) {count = 4 : i64} : (!paged, i32, i32) -> vector<4xi32>
  return
}

// CHECK-LABEL: func.func @populate
func.func @populate(%k: !paged, %c: !region, %b: i32, %t: i32) {
  // CHECK: %[[ROWS:.+]] = "kv.populate"(%{{.+}}) {base_alignment = 0 : i64, is_leader = true, pair_cta = false, tile_rows = 64 : i64} : {{.+}} -> !kv.rows<64 : i64, 16 : i64>
  %rows = "kv.populate"(%k, %b, %t) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!paged, i32, i32) -> !kv.rows<64 : i64, 16 : i64>
  // CHECK: "kv.get_row"(%[[ROWS]], %{{.+}}) : (!kv.rows<64 : i64, 16 : i64>, i32) -> i32
  %row = "kv.get_row"(%rows, %t) : (!kv.rows<64 : i64, 16 : i64>, i32) -> i32
  // CHECK: "kv.populate"{{.+}} is_leader = false, pair_cta = true{{.+}} -> !kv.rows<64 : i64, 16 : i64>
  %half = "kv.populate"(%k, %b, %t) {tile_rows = 64 : i64, base_alignment = 16 : i64, pair_cta = true, is_leader = false}
    : (!paged, i32, i32) -> !kv.rows<64 : i64, 16 : i64>
  // CHECK: "kv.populate"{{.+}} -> !kv.rows<64 : i64, 0 : i64>
  %one = "kv.populate"(%c, %b, %t) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!region, i32, i32) -> !kv.rows<64 : i64, 0 : i64>
  // CHECK: "kv.make_rows"(%{{.+}}, %{{.+}}) : (i32, i32) -> !kv.rows<32 : i64, 16 : i64>
  %made = "kv.make_rows"(%row, %t) : (i32, i32) -> !kv.rows<32 : i64, 16 : i64>
  return
}

// CHECK-LABEL: func.func @pointers
func.func @pointers(%k: !paged, %q: !fp8, %i: i32, %buffer: memref<?x?xf32, strided<[?, 1]>, 1>) {
  // CHECK: "kv.block_ptr"(%{{.+}}) {tile = 16 : i64} : (!kv.cache<{{.+}}>, i32, i32, i32, i32) -> !llvm.ptr<1>
  %0 = "kv.block_ptr"(%k, %i, %i, %i, %i) {tile = 16 : i64} : (!paged, i32, i32, i32, i32) -> !llvm.ptr<1>
  %page = "kv.page"(%k, %i, %i) : (!paged, i32, i32) -> i32
  // CHECK: "kv.block_ptr"(%{{.+}}) {tile = 1 : i64} : (!kv.cache<{{.+}}>, i32, i32, i32, i32, i32) -> !llvm.ptr<1>
  %1 = "kv.block_ptr"(%k, %i, %i, %i, %i, %page) {tile = 1 : i64} : (!paged, i32, i32, i32, i32, i32) -> !llvm.ptr<1>
  // CHECK: "kv.scale_block_ptr"(%{{.+}}) : (!kv.cache<{{.+}}>, i32, i32, i32, i32) -> !llvm.ptr<1>
  %2 = "kv.scale_block_ptr"(%q, %i, %i, %i, %i) : (!fp8, i32, i32, i32, i32) -> !llvm.ptr<1>
  // CHECK: "kv.scale_block_ptr"(%{{.+}}) : (!kv.cache<{{.+}}>, i32, i32, i32, i32, i32) -> !llvm.ptr<1>
  %3 = "kv.scale_block_ptr"(%q, %i, %i, %i, %i, %page) : (!fp8, i32, i32, i32, i32, i32) -> !llvm.ptr<1>
  // CHECK: "kv.scales_base"(%{{.+}}) : (!kv.cache<{{.+}}>) -> !llvm.ptr<1>
  %4 = "kv.scales_base"(%q) : (!fp8) -> !llvm.ptr<1>
  // CHECK: "kv.buffer_address"(%{{.+}}, %{{.+}}, %{{.+}}) : (memref<?x?xf32, strided<[?, 1]>, 1>, i32, i32) -> !llvm.ptr<1>
  %5 = "kv.buffer_address"(%buffer, %i, %i) : (memref<?x?xf32, strided<[?, 1]>, 1>, i32, i32) -> !llvm.ptr<1>
  return
}

// === tier 2: access

// CHECK-LABEL: func.func @loads
func.func @loads(%k: !paged, %view: !paged_view, %q: !fp8, %i: i32) {
  // CHECK: "kv.load"(%{{.+}}) {width = 1 : i64} : (!kv.cache<{{.+}}>, i32, i32, i32, i32) -> bf16
  %0 = "kv.load"(%k, %i, %i, %i, %i) {width = 1 : i64} : (!paged, i32, i32, i32, i32) -> bf16
  // CHECK: "kv.load"(%{{.+}}) {width = 8 : i64} : (!kv.operand<{{.+}}>, i32, i32, i32, i32) -> vector<8xf32>
  %1 = "kv.load"(%view, %i, %i, %i, %i) {width = 8 : i64} : (!paged_view, i32, i32, i32, i32) -> vector<8xf32>
  %page = "kv.page"(%q, %i, %i) : (!fp8, i32, i32) -> i32
  // CHECK: "kv.load"(%{{.+}}) {width = 16 : i64} : (!kv.cache<{{.+}}>, i32, i32, i32, i32, i32) -> vector<16xbf16>
  %2 = "kv.load"(%q, %i, %i, %i, %i, %page) {width = 16 : i64} : (!fp8, i32, i32, i32, i32, i32) -> vector<16xbf16>
  // CHECK: "kv.load_raw"(%{{.+}}) {width = 16 : i64} : (!kv.cache<{{.+}}>, i32, i32, i32, i32) -> vector<16xf8E4M3FN>
  %3 = "kv.load_raw"(%q, %i, %i, %i, %i) {width = 16 : i64} : (!fp8, i32, i32, i32, i32) -> vector<16xf8E4M3FN>
  // CHECK: "kv.load_scale"(%{{.+}}) {width = 4 : i64} : (!kv.cache<{{.+}}>, i32, i32, i32, i32, i32) -> vector<4xf32>
  %4 = "kv.load_scale"(%q, %i, %i, %i, %i, %page) {width = 4 : i64} : (!fp8, i32, i32, i32, i32, i32) -> vector<4xf32>
  // A planning pass may add attributes of its own; they are kept.
  // CHECK: "kv.load"(%{{.+}}) {plan = {alignment = 16 : i64}, width = 8 : i64}
  %5 = "kv.load"(%k, %i, %i, %i, %i) {width = 8 : i64, plan = {alignment = 16 : i64}} : (!paged, i32, i32, i32, i32) -> vector<8xbf16>
  return
}

// CHECK-LABEL: func.func @stores
func.func @stores(%k: !paged, %q: !fp8, %i: i32, %x: vector<8xbf16>, %y: vector<16xf8E4M3FN>, %s: f32) {
  // CHECK: "kv.store"(%{{.+}}) {oob = "drop"} : (!kv.cache<{{.+}}>, i32, i32, i32, i32, vector<8xbf16>) -> ()
  "kv.store"(%k, %i, %i, %i, %i, %x) {oob = "drop"} : (!paged, i32, i32, i32, i32, vector<8xbf16>) -> ()
  %page = "kv.raw_page"(%q, %i, %i) : (!fp8, i32, i32) -> i32
  // CHECK: "kv.store"(%{{.+}}) {oob = "trap"} : (!kv.cache<{{.+}}>, i32, i32, i32, i32, vector<16xf8E4M3FN>, i32) -> ()
  "kv.store"(%q, %i, %i, %i, %i, %y, %page) {oob = "trap"} : (!fp8, i32, i32, i32, i32, vector<16xf8E4M3FN>, i32) -> ()
  // CHECK: "kv.store_scale"(%{{.+}}) {oob = "unchecked"} : (!kv.cache<{{.+}}>, i32, i32, i32, i32, f32) -> ()
  "kv.store_scale"(%q, %i, %i, %i, %i, %s) {oob = "unchecked"} : (!fp8, i32, i32, i32, i32, f32) -> ()
  return
}

// CHECK-LABEL: func.func @casts
func.func @casts(%x: vector<8xf32>, %y: f8E4M3FN) {
  // CHECK: "kv.cast"(%{{.+}}) : (vector<8xf32>) -> vector<8xf8E4M3FN>
  %0 = "kv.cast"(%x) : (vector<8xf32>) -> vector<8xf8E4M3FN>
  // CHECK: "kv.cast"(%{{.+}}) : (f8E4M3FN) -> bf16
  %1 = "kv.cast"(%y) : (f8E4M3FN) -> bf16
  return
}

// === tier 2: tiles

// CHECK-LABEL: func.func @tiles
func.func @tiles(%k: !paged, %i: i32) {
  // CHECK: "kv.alloc_shared"() {alignment = 128 : i64, bytes = 16384 : i64} : () -> !llvm.ptr<3>
  %p = "kv.alloc_shared"() {bytes = 16384 : i64, alignment = 128 : i64} : () -> !llvm.ptr<3>
  // CHECK: "kv.load_tile"(%{{.+}}) {mode = "async", num_threads = 128 : i64, pitch = 256 : i64, swizzle = 128 : i64, tile_rows = 64 : i64} : (!kv.cache<{{.+}}>, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  "kv.load_tile"(%k, %i, %i, %i, %i, %p, %i) {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 128 : i64, mode = "async"}
    : (!paged, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  // CHECK: "kv.store_tile"(%{{.+}}) {mode = "sync", num_threads = 128 : i64, pitch = 272 : i64, swizzle = 0 : i64, tile_rows = 8 : i64} : (!kv.cache<{{.+}}>, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  "kv.store_tile"(%k, %i, %i, %i, %i, %p, %i) {tile_rows = 8 : i64, num_threads = 128 : i64, pitch = 272 : i64, swizzle = 0 : i64, mode = "sync"}
    : (!paged, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  return
}

// === tier 1: writing

// CHECK-LABEL: func.func @append
func.func @append(%pool: !pool, %fp8: !fp8_pool, %latent: !latent_pool, %layer: i32, %x: memref<?x8x128xbf16>,
                  %row: memref<?x1x576xbf16>, %scales: memref<?x8x4xf32>, %offsets: memref<?xi32>) {
  // CHECK: "kv.append"(collection = %{{.+}}, layer = %{{.+}}, key = %{{.+}}, row_offsets = %{{.+}}, value = %{{[^ ]+}}) :
  "kv.append"(collection = %pool, layer = %layer, key = %x, row_offsets = %offsets, value = %x)
    : (!pool, i32, memref<?x8x128xbf16>, memref<?xi32>, memref<?x8x128xbf16>) -> ()
  // CHECK: "kv.append"(collection = %{{.+}}, layer = %{{.+}}, key = %{{.+}}, row_offsets = %{{[^ ]+}}) :
  "kv.append"(collection = %latent, layer = %layer, key = %row, row_offsets = %offsets)
    : (!latent_pool, i32, memref<?x1x576xbf16>, memref<?xi32>) -> ()
  // CHECK: "kv.append"({{.+}}, value = %{{.+}}, key_scale = %{{.+}}, value_scale = %{{[^ ]+}}) :
  "kv.append"(collection = %fp8, layer = %layer, key = %x, row_offsets = %offsets, value = %x, key_scale = %scales,
      value_scale = %scales)
    : (!fp8_pool, i32, memref<?x8x128xbf16>, memref<?xi32>, memref<?x8x128xbf16>, memref<?x8x4xf32>, memref<?x8x4xf32>) -> ()
  return
}

// CHECK-LABEL: func.func @rope
func.func @rope(%pool: !pool, %layer: i32, %q: memref<?x32x128xbf16>, %x: memref<?x8x128xbf16>, %offsets: memref<?xi32>,
                %freqs: memref<?x128xf32>, %gamma: memref<128xf32>, %ids: memref<3x?xi32>) {
  // CHECK: "kv.rope_append"(
  // CHECK-SAME: interleaved = true
  "kv.rope_append"(collection = %pool, layer = %layer, query = %q, key = %x, value = %x, row_offsets = %offsets,
      freqs = %freqs, query_out = %q)
    {interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>) -> ()
  // CHECK: "kv.rope_append"(
  // CHECK-SAME: interleaved = false
  // CHECK-SAME: memref<128xf32>, memref<128xf32>) -> ()
  "kv.rope_append"(collection = %pool, layer = %layer, query = %q, key = %x, value = %x, row_offsets = %offsets,
      freqs = %freqs, query_out = %q, q_gamma = %gamma, k_gamma = %gamma)
    {interleaved = false, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>,
       memref<128xf32>, memref<128xf32>) -> ()
  // CHECK: "kv.rope"(
  // CHECK-SAME: mrope_section = array<i64>
  "kv.rope"(%pool, %layer, %q, %offsets, %freqs, %q) {interleaved = true, mrope_section = array<i64>}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>) -> ()
  // CHECK: "kv.rope"(
  // CHECK-SAME: mrope_section = array<i64: 16, 24, 24>
  "kv.rope"(%pool, %layer, %q, %offsets, %freqs, %q, %ids) {interleaved = false, mrope_section = array<i64: 16, 24, 24>}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>, memref<3x?xi32>) -> ()
  return
}

// CHECK-LABEL: func.func @in_place
func.func @in_place(%pool: !pool, %other: !index_pool, %layer: i32, %q: memref<?x32x128xbf16>,
                    %padded: memref<?x?x32x128xbf16>, %i32s: memref<?xi32>, %freqs: memref<?x64xf32>,
                    %gamma: memref<128xf32>, %ids: memref<3x?x?xi32>, %iq: memref<?x4x128xf16>) {
  // CHECK: "kv.rope_padded"(
  // CHECK-SAME: mrope_section = array<i64>
  "kv.rope_padded"(%pool, %layer, %padded, %i32s, %freqs, %padded) {interleaved = true, mrope_section = array<i64>}
    : (!pool, i32, memref<?x?x32x128xbf16>, memref<?xi32>, memref<?x64xf32>, memref<?x?x32x128xbf16>) -> ()
  // CHECK: "kv.rope_padded"(
  // CHECK-SAME: memref<3x?x?xi32>) -> ()
  "kv.rope_padded"(%pool, %layer, %padded, %i32s, %freqs, %padded, %ids) {interleaved = false, mrope_section = array<i64: 16, 8, 8>}
    : (!pool, i32, memref<?x?x32x128xbf16>, memref<?xi32>, memref<?x64xf32>, memref<?x?x32x128xbf16>, memref<3x?x?xi32>) -> ()
  // CHECK: "kv.qk_norm"(
  // CHECK-SAME: q_gamma = %{{[^ ]+}}, k_gamma = %{{[^ ]+}}) {
  "kv.qk_norm"(collection = %pool, layer = %layer, query = %q, row_offsets = %i32s, query_out = %q, q_gamma = %gamma,
      k_gamma = %gamma)
    {interleaved = false, eps = 1.0e-6 : f32, weight_offset = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x32x128xbf16>, memref<128xf32>, memref<128xf32>) -> ()
  // CHECK: "kv.qk_norm"(
  // CHECK-SAME: k_gamma = %{{[^ ]+}}, freqs = %{{[^ ]+}}, index_collection = %{{[^ ]+}}, index_query = %{{[^ ]+}}, index_query_out = %{{[^ ]+}}, index_q_gamma = %{{[^ ]+}}, index_k_gamma = %{{[^ ]+}}) {
  "kv.qk_norm"(collection = %pool, layer = %layer, query = %q, row_offsets = %i32s, query_out = %q, q_gamma = %gamma,
      k_gamma = %gamma, freqs = %freqs, index_collection = %other, index_query = %iq, index_query_out = %iq,
      index_q_gamma = %gamma, index_k_gamma = %gamma)
    {interleaved = true, eps = 1.0e-6 : f32, weight_offset = 1.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x32x128xbf16>, memref<128xf32>, memref<128xf32>, memref<?x64xf32>,
       !index_pool, memref<?x4x128xf16>, memref<?x4x128xf16>, memref<128xf32>, memref<128xf32>) -> ()
  return
}

// CHECK-LABEL: func.func @writes
func.func @writes(%k: !paged, %pool: !pool, %layer: i32, %x: memref<?x8x128xbf16>, %padded: memref<?x?x8x128xbf16>,
                  %gamma: memref<128xf32>, %pairs: memref<?x2048xbf16>, %rows: memref<?x1024xbf16>, %i32s: memref<?xi32>) {
  // CHECK: "kv.store_ragged"(%{{.+}}) : (!kv.cache<{{.+}}>, memref<?x8x128xbf16>, memref<?xi32>) -> ()
  "kv.store_ragged"(%k, %x, %i32s) : (!paged, memref<?x8x128xbf16>, memref<?xi32>) -> ()
  // CHECK: "kv.store_padded"(%{{.+}}) : (!kv.cache<{{.+}}>, memref<?x?x8x128xbf16>, memref<?xi32>) -> ()
  "kv.store_padded"(%k, %padded, %i32s) : (!paged, memref<?x?x8x128xbf16>, memref<?xi32>) -> ()
  // CHECK: "kv.rms_norm"(
  // CHECK-SAME: multiply_before_cast = false
  "kv.rms_norm"(%k, %gamma, %i32s, %layer) {eps = 1.0e-6 : f32, weight_offset = 1.0 : f32, multiply_before_cast = false}
    : (!paged, memref<128xf32>, memref<?xi32>, i32) -> ()
  // CHECK: "kv.radd"(%{{.+}}) : (!kv.collection<{{.+}}>, i32, memref<?x2048xbf16>, memref<?xi32>, i32) -> ()
  "kv.radd"(%pool, %layer, %pairs, %i32s, %layer) : (!pool, i32, memref<?x2048xbf16>, memref<?xi32>, i32) -> ()
  // CHECK: "kv.iadd_2m"(%{{.+}}) : (!kv.collection<{{.+}}>, i32, memref<?x1024xbf16>, memref<?xi32>) -> ()
  "kv.iadd_2m"(%pool, %layer, %rows, %i32s) : (!pool, i32, memref<?x1024xbf16>, memref<?xi32>) -> ()
  return
}

// === tier 1: copying and bookkeeping

// CHECK-LABEL: func.func @copies
func.func @copies(%k: !paged, %c: !region, %pool: !pool, %ids: memref<?x?xi32>, %i32s: memref<?xi32>,
                  %out: memref<?x?x8x128xbf16>, %layer: i32) {
  // CHECK: "kv.gather"(%{{.+}}) : (!kv.cache<{{.+}}>, memref<?x?xi32>, memref<?xi32>, memref<?x?x8x128xbf16>) -> ()
  "kv.gather"(%k, %ids, %i32s, %out) : (!paged, memref<?x?xi32>, memref<?xi32>, memref<?x?x8x128xbf16>) -> ()
  // CHECK: "kv.copy_pages"(%{{.+}}) : (!kv.collection<{{.+}}>, memref<?xi32>, memref<?xi32>) -> ()
  "kv.copy_pages"(%pool, %i32s, %i32s) : (!pool, memref<?xi32>, memref<?xi32>) -> ()
  // CHECK: "kv.commit"(%{{.+}}) : (!kv.collection<{{.+}}>, memref<?x?xi32>, memref<?xi32>) -> ()
  "kv.commit"(%pool, %ids, %i32s) : (!pool, memref<?x?xi32>, memref<?xi32>) -> ()
  // CHECK: "kv.commit"(%{{.+}}) : (!kv.collection<{{.+}}>, memref<?xi32>, memref<?xi32>, i32) -> ()
  "kv.commit"(%pool, %i32s, %i32s, %layer) : (!pool, memref<?xi32>, memref<?xi32>, i32) -> ()
  // CHECK: "kv.transfer_pages"(%{{.+}}) : (!kv.collection<{{.+}}>, !kv.collection<{{.+}}>, memref<?xi32>, memref<?xi32>) -> ()
  "kv.transfer_pages"(%pool, %pool, %i32s, %i32s) : (!pool, !pool, memref<?xi32>, memref<?xi32>) -> ()
  // CHECK: "kv.transfer_pages"(%{{.+}}) : (!kv.collection<{{.+}}>, !kv.collection<{{.+}}>, memref<?xi32>, memref<?xi32>, i32) -> ()
  "kv.transfer_pages"(%pool, %pool, %i32s, %i32s, %layer) : (!pool, !pool, memref<?xi32>, memref<?xi32>, i32) -> ()
  // CHECK: "kv.convert"(%{{.+}}) : (!kv.cache<"paged", {{.+}}>, !kv.cache<"continuous", {{.+}}>) -> ()
  "kv.convert"(%k, %c) : (!paged, !region) -> ()
  return
}

// CHECK-LABEL: func.func @bookkeeping
func.func @bookkeeping(%table: memref<?x?xi32>, %i32s: memref<?xi32>, %id: i32) {
  // CHECK: "kv.remap_sparse_indices"(%{{.+}}) {page_size = 16 : i64}
  "kv.remap_sparse_indices"(%table, %i32s, %table, %id, %table) {page_size = 16 : i64}
    : (memref<?x?xi32>, memref<?xi32>, memref<?x?xi32>, i32, memref<?x?xi32>) -> ()
  // CHECK: "kv.cache_row_offsets"(%{{.+}}) : (memref<?xi32>, memref<?xi32>, memref<?xi32>) -> ()
  "kv.cache_row_offsets"(%i32s, %i32s, %i32s) : (memref<?xi32>, memref<?xi32>, memref<?xi32>) -> ()
  // CHECK: "kv.increment_cache_lengths"(%{{.+}}) : (memref<?xi32>, memref<?xi32>) -> ()
  "kv.increment_cache_lengths"(%i32s, %i32s) : (memref<?xi32>, memref<?xi32>) -> ()
  return
}

// CHECK-LABEL: func.func @ragged
func.func @ragged(%x: memref<?x64xbf16>, %i32s: memref<?xi32>, %end: i32, %o: memref<?x8x64xbf16>, %lse: memref<?x8xf32>) {
  // CHECK: "kv.merge_attention"(%{{.+}}) : (memref<?x8x64xbf16>, memref<?x8xf32>, memref<?x8x64xbf16>, memref<?x8xf32>, memref<?x8x64xbf16>, memref<?x8xf32>) -> ()
  "kv.merge_attention"(%o, %lse, %o, %lse, %o, %lse)
    : (memref<?x8x64xbf16>, memref<?x8xf32>, memref<?x8x64xbf16>, memref<?x8xf32>, memref<?x8x64xbf16>, memref<?x8xf32>) -> ()
  // CHECK: "kv.sliced_add"(%{{.+}}) : (memref<?x64xbf16>, memref<?x64xbf16>, i32, memref<?x64xbf16>) -> ()
  "kv.sliced_add"(%x, %x, %end, %x) : (memref<?x64xbf16>, memref<?x64xbf16>, i32, memref<?x64xbf16>) -> ()
  // CHECK: "kv.merge_ragged"(%{{.+}}) : (memref<?x64xbf16>, memref<?xi32>, memref<?x64xbf16>, memref<?xi32>, memref<?x64xbf16>, memref<?xi32>) -> ()
  "kv.merge_ragged"(%x, %i32s, %x, %i32s, %x, %i32s)
    : (memref<?x64xbf16>, memref<?xi32>, memref<?x64xbf16>, memref<?xi32>, memref<?x64xbf16>, memref<?xi32>) -> ()
  // CHECK: "kv.shift_tokens"(%{{.+}}) : (memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>) -> ()
  "kv.shift_tokens"(%i32s, %i32s, %i32s, %i32s) : (memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>) -> ()
  return
}

// === tier 1: attention

// CHECK-LABEL: func.func @attention
func.func @attention(%pool: !pool, %layer: i32, %q: memref<?x32x128xbf16>, %offsets: memref<?xi32>, %scale: f32,
                     %sinks: memref<32xf32>, %lse: memref<?x32xf32>) {
  // CHECK: "kv.attention"(
  // CHECK-SAME: mask = "causal"
  "kv.attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x32x128xbf16>) -> ()
  // CHECK: "kv.attention"(
  // CHECK-SAME: mask = "sliding_window"
  // CHECK-SAME: span = 4096 : i64
  "kv.attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %q,
      sinks = %sinks, lse = %lse, kv_offsets = %offsets, alibi_slopes = %sinks)
    {mask = "sliding_window", span = 4096 : i64, softcap = 30.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x32x128xbf16>, memref<32xf32>, memref<?x32xf32>, memref<?xi32>, memref<32xf32>) -> ()
  return
}

// CHECK-LABEL: func.func @attention_padded
func.func @attention_padded(%pool: !pool, %layer: i32, %q: memref<?x?x32x128xbf16>, %valid: memref<?xi32>, %scale: f32,
                            %sinks: memref<32xf32>, %lse: memref<?x?x32xf32>) {
  // CHECK: "kv.attention_padded"(
  // CHECK-SAME: mask = "chunked"
  "kv.attention_padded"(collection = %pool, layer = %layer, query = %q, valid_lengths = %valid, scale = %scale,
      out = %q)
    {mask = "chunked", span = 64 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x?x32x128xbf16>, memref<?xi32>, f32, memref<?x?x32x128xbf16>) -> ()
  // CHECK: "kv.attention_padded"(
  // CHECK-SAME: softcap = 3.000000e+01 : f32
  "kv.attention_padded"(collection = %pool, layer = %layer, query = %q, valid_lengths = %valid, scale = %scale,
      out = %q, sinks = %sinks, lse = %lse, kv_offsets = %valid)
    {mask = "null", span = 0 : i64, softcap = 30.0 : f32}
    : (!pool, i32, memref<?x?x32x128xbf16>, memref<?xi32>, f32, memref<?x?x32x128xbf16>, memref<32xf32>, memref<?x?x32xf32>, memref<?xi32>) -> ()
  return
}

// CHECK-LABEL: func.func @mla
func.func @mla(%pool: !latent_pool, %cache: !latent, %layer: i32, %q: memref<?x16x576xbf16>, %out: memref<?x16x512xbf16>,
               %i32s: memref<?xi32>, %table: memref<?x?xi32>, %rows: memref<?x576xbf16>, %scale: f32) {
  // CHECK: "kv.mla_attention"(
  // CHECK-SAME: value_size = 512 : i64
  "kv.mla_attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %i32s, scale = %scale, out = %out)
    {value_size = 512 : i64, mask = "causal", span = 0 : i64}
    : (!latent_pool, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>) -> ()
  // CHECK: "kv.mla_prefill_plan"(%{{.+}}) {buffer_tokens = 8192 : i64}
  "kv.mla_prefill_plan"(%i32s, %i32s, %table, %table, %i32s) {buffer_tokens = 8192 : i64}
    : (memref<?xi32>, memref<?xi32>, memref<?x?xi32>, memref<?x?xi32>, memref<?xi32>) -> ()
  // CHECK: "kv.mla_decompress"(%{{.+}}) : (!kv.cache<{{.+}}>, memref<?xi32>, memref<?xi32>, memref<?x576xbf16>) -> ()
  "kv.mla_decompress"(%cache, %i32s, %i32s, %rows) : (!latent, memref<?xi32>, memref<?xi32>, memref<?x576xbf16>) -> ()
  return
}

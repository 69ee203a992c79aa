// RUN: kv-opt %s --verify-roundtrip --verify-kv --named-operands -o %t.named
// RUN: kv-opt %s --mlir-print-op-generic | kv-opt --named-operands | diff %t.named -
// RUN: kv-opt %s --emit-bytecode | kv-opt --named-operands | diff %t.named -

// Every op and every optional operand at least once, in the forms by names, by places and of bytes: all say the same.
// One function a group; attributes and types are printed as they are read, or the round trip fails.

!paged = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!paged_view = !kv.operand<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!fp8_pool = !kv.collection<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!latent = !kv.cache<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!latent_pool = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!index_pool = !kv.collection<"paged", f16, 1 : i64, 128 : i64, true, 64 : i64, none, 1 : i64>
!region = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!bytes = !kv.collection<"paged", f8E4M3FN, 1 : i64, 640 : i64, true, 64 : i64, f32, 640 : i64>
!eight = !kv.collection<"paged", f8E4M3FN, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!scaled = !kv.collection<"paged", f8E4M3FN, 1 : i64, 656 : i64, true, 64 : i64, none, 1 : i64>
!index = !kv.collection<"paged", bf16, 1 : i64, 64 : i64, true, 64 : i64, none, 1 : i64>
!q = memref<?x32x128xbf16>
!batch = memref<?x?x32x128xbf16>
!wide = memref<?x16x576xbf16>
!index_pages = !kv.collection<"paged", f8E4M3FN, 1 : i64, 128 : i64, true, 64 : i64, f32, 128 : i64>
!cached = !kv.operand<"paged", f16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!fp8_operands = !kv.operand<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!scales = !kv.operand<"scales", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!dense = !kv.operand<"dense", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 128 : i64>
!dense8 = !kv.operand<"dense", i8, 8 : i64, 128 : i64, false, 0 : i64, f32, 32 : i64>
!ragged = !kv.operand<"ragged", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 128 : i64>
!ragged8 = !kv.operand<"ragged", i8, 8 : i64, 128 : i64, false, 0 : i64, f32, 32 : i64>

// === tier 2: metadata

func.func @handles(%pool: !pool, %fp8_pool: !fp8_pool, %layer: i32) {
  %k = "kv.key_cache"(%pool, %layer) : (!pool, i32) -> !paged
  %v = "kv.value_cache"(%pool, %layer) : (!pool, i32) -> !paged
  %q = "kv.key_cache"(%fp8_pool, %layer) : (!fp8_pool, i32) -> !fp8
  %view = "kv.make_operand"(%k) : (!paged) -> !paged_view
  return
}

func.func @fields(%k: !paged, %fp8: !fp8, %pool: !pool) {
  %base = "kv.field"(%k) {field = "base"} : (!paged) -> !llvm.ptr<1>
  %s0 = "kv.field"(%k) {field = "stride0"} : (!paged) -> i64
  %ss0 = "kv.field"(%fp8) {field = "scales_stride0"} : (!fp8) -> i64
  %layers = "kv.field"(%pool) {field = "num_layers"} : (!pool) -> i32
  return
}

func.func @make(%p: !llvm.ptr<1>, %n: i32, %s: i64) {
  %c = "kv.make_cache"(base = %p, stride0 = %s, num_blocks = %n, capacity = %n, lookup = %p, lookup_stride = %s,
      lookup_columns = %n, lengths = %p, batch = %n, max_seq_length = %n, max_cache_length = %n)
    : (!llvm.ptr<1>, i64, i32, i32, !llvm.ptr<1>, i64, i32, !llvm.ptr<1>, i32, i32, i32) -> !paged
  %q = "kv.make_cache"(base = %p, stride0 = %s, num_blocks = %n, capacity = %n, lookup = %p, lookup_stride = %s,
      lookup_columns = %n, lengths = %p, batch = %n, max_seq_length = %n, max_cache_length = %n, scales = %p,
      scales_stride0 = %s)
    : (!llvm.ptr<1>, i64, i32, i32, !llvm.ptr<1>, i64, i32, !llvm.ptr<1>, i32, i32, i32, !llvm.ptr<1>, i64) -> !fp8
  %pool = "kv.make_collection"(blocks = %p, stride0 = %s, num_blocks = %n, capacity = %n, lookup = %p,
      lookup_stride = %s, lookup_columns = %n, lengths = %p, batch = %n, max_seq_length = %n, max_cache_length = %n,
      num_layers = %n, kv_stride = %s, layer_stride = %s, lookup_layer_stride = %s)
    : (!llvm.ptr<1>, i64, i32, i32, !llvm.ptr<1>, i64, i32, !llvm.ptr<1>, i32, i32, i32, i32, i64, i64, i64) -> !pool
  return
}

func.func @lengths(%k: !paged, %view: !paged_view, %pool: !pool, %b: i32) {
  %0 = "kv.cache_length"(%k, %b) : (!paged, i32) -> i32
  %1 = "kv.cache_length"(%view, %b) : (!paged_view, i32) -> i32
  %2 = "kv.cache_lengths"(%pool) : (!pool) -> !llvm.ptr<1>
  %3 = "kv.max_prompt_length"(%k) : (!paged) -> i32
  %4 = "kv.max_context_length"(%k) : (!paged) -> i32
  %5 = "kv.is_empty"(%k) : (!paged) -> i1
  %7 = "kv.device_attribute"() {attribute = "multiprocessors"} : () -> i32
  %6 = "kv.num_rows"(%k) : (!paged) -> i32
  return
}

// === tier 2: addressing

func.func @pages_and_rows(%k: !paged, %c: !region, %b: i32, %t: i32) {
  %0 = "kv.page"(%k, %b, %t) : (!paged, i32, i32) -> i32
  %1 = "kv.raw_page"(%k, %b, %t) : (!paged, i32, i32) -> i32
  %2 = "kv.row_index"(%c, %b, %t) : (!region, i32, i32) -> i32
  %3 = "kv.tma_row"(%k, %t) : (!paged, i32) -> i32
  %4 = "kv.load_pages"(%k, %b, %t) {count = 4 : i64} : (!paged, i32, i32) -> vector<4xi32>
  return
}

func.func @populate(%k: !paged, %c: !region, %b: i32, %t: i32) {
  %rows = "kv.populate"(%k, %b, %t) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!paged, i32, i32) -> !kv.rows<64 : i64, 16 : i64>
  %row = "kv.get_row"(%rows, %t) : (!kv.rows<64 : i64, 16 : i64>, i32) -> i32
  %half = "kv.populate"(%k, %b, %t) {tile_rows = 64 : i64, base_alignment = 16 : i64, pair_cta = true, is_leader = false}
    : (!paged, i32, i32) -> !kv.rows<64 : i64, 16 : i64>
  %one = "kv.populate"(%c, %b, %t) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!region, i32, i32) -> !kv.rows<64 : i64, 0 : i64>
  %made = "kv.make_rows"(%row, %t) : (i32, i32) -> !kv.rows<32 : i64, 16 : i64>
  return
}

func.func @pointers(%k: !paged, %q: !fp8, %i: i32, %buffer: memref<?x?xf32, strided<[?, 1]>, 1>) {
  %0 = "kv.block_ptr"(%k, %i, %i, %i, %i) {tile = 16 : i64} : (!paged, i32, i32, i32, i32) -> !llvm.ptr<1>
  %page = "kv.page"(%k, %i, %i) : (!paged, i32, i32) -> i32
  %1 = "kv.block_ptr"(%k, %i, %i, %i, %i, %page) {tile = 1 : i64} : (!paged, i32, i32, i32, i32, i32) -> !llvm.ptr<1>
  %2 = "kv.scale_block_ptr"(%q, %i, %i, %i, %i) : (!fp8, i32, i32, i32, i32) -> !llvm.ptr<1>
  %3 = "kv.scale_block_ptr"(%q, %i, %i, %i, %i, %page) : (!fp8, i32, i32, i32, i32, i32) -> !llvm.ptr<1>
  %4 = "kv.scales_base"(%q) : (!fp8) -> !llvm.ptr<1>
  %5 = "kv.buffer_address"(%buffer, %i, %i) : (memref<?x?xf32, strided<[?, 1]>, 1>, i32, i32) -> !llvm.ptr<1>
  return
}

// === tier 2: access

func.func @loads(%k: !paged, %view: !paged_view, %q: !fp8, %i: i32) {
  %0 = "kv.load"(%k, %i, %i, %i, %i) {width = 1 : i64} : (!paged, i32, i32, i32, i32) -> bf16
  %1 = "kv.load"(%view, %i, %i, %i, %i) {width = 8 : i64} : (!paged_view, i32, i32, i32, i32) -> vector<8xf32>
  %page = "kv.page"(%q, %i, %i) : (!fp8, i32, i32) -> i32
  %2 = "kv.load"(%q, %i, %i, %i, %i, %page) {width = 16 : i64} : (!fp8, i32, i32, i32, i32, i32) -> vector<16xbf16>
  %3 = "kv.load_raw"(%q, %i, %i, %i, %i) {width = 16 : i64} : (!fp8, i32, i32, i32, i32) -> vector<16xf8E4M3FN>
  %4 = "kv.load_scale"(%q, %i, %i, %i, %i, %page) {width = 4 : i64} : (!fp8, i32, i32, i32, i32, i32) -> vector<4xf32>
  // A planning pass may add attributes of its own; they are kept.
  %5 = "kv.load"(%k, %i, %i, %i, %i) {width = 8 : i64, plan = {alignment = 16 : i64}} : (!paged, i32, i32, i32, i32) -> vector<8xbf16>
  return
}

func.func @stores(%k: !paged, %q: !fp8, %i: i32, %x: vector<8xbf16>, %y: vector<16xf8E4M3FN>, %s: f32) {
  "kv.store"(%k, %i, %i, %i, %i, %x) {oob = "drop"} : (!paged, i32, i32, i32, i32, vector<8xbf16>) -> ()
  %page = "kv.raw_page"(%q, %i, %i) : (!fp8, i32, i32) -> i32
  "kv.store"(%q, %i, %i, %i, %i, %y, %page) {oob = "trap"} : (!fp8, i32, i32, i32, i32, vector<16xf8E4M3FN>, i32) -> ()
  "kv.store_scale"(%q, %i, %i, %i, %i, %s) {oob = "unchecked"} : (!fp8, i32, i32, i32, i32, f32) -> ()
  return
}

func.func @casts(%x: vector<8xf32>, %y: f8E4M3FN) {
  %0 = "kv.cast"(%x) : (vector<8xf32>) -> vector<8xf8E4M3FN>
  %1 = "kv.cast"(%y) : (f8E4M3FN) -> bf16
  return
}

// === tier 2: tiles

func.func @tiles(%k: !paged, %i: i32) {
  %p = "kv.alloc_shared"() {bytes = 16384 : i64, alignment = 128 : i64} : () -> !llvm.ptr<3>
  "kv.load_tile"(%k, %i, %i, %i, %i, %p, %i) {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 128 : i64, mode = "async"}
    : (!paged, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  "kv.store_tile"(%k, %i, %i, %i, %i, %p, %i) {tile_rows = 8 : i64, num_threads = 128 : i64, pitch = 272 : i64, swizzle = 0 : i64, mode = "sync"}
    : (!paged, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  return
}

// === tier 1: writing

func.func @append(%pool: !pool, %fp8: !fp8_pool, %latent: !latent_pool, %layer: i32, %x: memref<?x8x128xbf16>,
                  %row: memref<?x1x576xbf16>, %scales: memref<?x8x4xf32>, %offsets: memref<?xi32>) {
  "kv.append"(collection = %pool, layer = %layer, key = %x, row_offsets = %offsets, value = %x)
    : (!pool, i32, memref<?x8x128xbf16>, memref<?xi32>, memref<?x8x128xbf16>) -> ()
  "kv.append"(collection = %latent, layer = %layer, key = %row, row_offsets = %offsets)
    : (!latent_pool, i32, memref<?x1x576xbf16>, memref<?xi32>) -> ()
  "kv.append"(collection = %fp8, layer = %layer, key = %x, row_offsets = %offsets, value = %x, key_scale = %scales,
      value_scale = %scales)
    : (!fp8_pool, i32, memref<?x8x128xbf16>, memref<?xi32>, memref<?x8x128xbf16>, memref<?x8x4xf32>, memref<?x8x4xf32>) -> ()
  return
}

func.func @rope(%pool: !pool, %layer: i32, %q: memref<?x32x128xbf16>, %x: memref<?x8x128xbf16>, %offsets: memref<?xi32>,
                %freqs: memref<?x128xf32>, %gamma: memref<128xf32>, %ids: memref<3x?xi32>) {
  "kv.rope_append"(collection = %pool, layer = %layer, query = %q, key = %x, value = %x, row_offsets = %offsets,
      freqs = %freqs, query_out = %q)
    {interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>) -> ()
  "kv.rope_append"(collection = %pool, layer = %layer, query = %q, key = %x, value = %x, row_offsets = %offsets,
      freqs = %freqs, query_out = %q, q_gamma = %gamma, k_gamma = %gamma)
    {interleaved = false, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>,
       memref<128xf32>, memref<128xf32>) -> ()
  "kv.rope"(%pool, %layer, %q, %offsets, %freqs, %q) {interleaved = true, mrope_section = array<i64>}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>) -> ()
  "kv.rope"(%pool, %layer, %q, %offsets, %freqs, %q, %ids) {interleaved = false, mrope_section = array<i64: 16, 24, 24>}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>, memref<3x?xi32>) -> ()
  return
}

func.func @in_place(%pool: !pool, %other: !index_pool, %layer: i32, %q: memref<?x32x128xbf16>,
                    %padded: memref<?x?x32x128xbf16>, %i32s: memref<?xi32>, %freqs: memref<?x64xf32>,
                    %gamma: memref<128xf32>, %ids: memref<3x?x?xi32>, %iq: memref<?x4x128xf16>) {
  "kv.rope_padded"(%pool, %layer, %padded, %i32s, %freqs, %padded) {interleaved = true, mrope_section = array<i64>}
    : (!pool, i32, memref<?x?x32x128xbf16>, memref<?xi32>, memref<?x64xf32>, memref<?x?x32x128xbf16>) -> ()
  "kv.rope_padded"(%pool, %layer, %padded, %i32s, %freqs, %padded, %ids) {interleaved = false, mrope_section = array<i64: 16, 8, 8>}
    : (!pool, i32, memref<?x?x32x128xbf16>, memref<?xi32>, memref<?x64xf32>, memref<?x?x32x128xbf16>, memref<3x?x?xi32>) -> ()
  "kv.qk_norm"(collection = %pool, layer = %layer, query = %q, row_offsets = %i32s, query_out = %q, q_gamma = %gamma,
      k_gamma = %gamma)
    {interleaved = false, eps = 1.0e-6 : f32, weight_offset = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x32x128xbf16>, memref<128xf32>, memref<128xf32>) -> ()
  "kv.qk_norm"(collection = %pool, layer = %layer, query = %q, row_offsets = %i32s, query_out = %q, q_gamma = %gamma,
      k_gamma = %gamma, freqs = %freqs, index_collection = %other, index_query = %iq, index_query_out = %iq,
      index_q_gamma = %gamma, index_k_gamma = %gamma)
    {interleaved = true, eps = 1.0e-6 : f32, weight_offset = 1.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x32x128xbf16>, memref<128xf32>, memref<128xf32>, memref<?x64xf32>,
       !index_pool, memref<?x4x128xf16>, memref<?x4x128xf16>, memref<128xf32>, memref<128xf32>) -> ()
  return
}

func.func @writes(%k: !paged, %pool: !pool, %layer: i32, %x: memref<?x8x128xbf16>, %padded: memref<?x?x8x128xbf16>,
                  %gamma: memref<128xf32>, %pairs: memref<?x2048xbf16>, %rows: memref<?x1024xbf16>, %i32s: memref<?xi32>) {
  "kv.store_ragged"(%k, %x, %i32s) : (!paged, memref<?x8x128xbf16>, memref<?xi32>) -> ()
  "kv.store_padded"(%k, %padded, %i32s) : (!paged, memref<?x?x8x128xbf16>, memref<?xi32>) -> ()
  "kv.rms_norm"(%k, %gamma, %i32s, %layer) {eps = 1.0e-6 : f32, weight_offset = 1.0 : f32, multiply_before_cast = false}
    : (!paged, memref<128xf32>, memref<?xi32>, i32) -> ()
  "kv.radd"(%pool, %layer, %pairs, %i32s, %layer) : (!pool, i32, memref<?x2048xbf16>, memref<?xi32>, i32) -> ()
  "kv.iadd_2m"(%pool, %layer, %rows, %i32s) : (!pool, i32, memref<?x1024xbf16>, memref<?xi32>) -> ()
  return
}

// === tier 1: copying and bookkeeping

func.func @copies(%k: !paged, %c: !region, %pool: !pool, %ids: memref<?x?xi32>, %i32s: memref<?xi32>,
                  %out: memref<?x?x8x128xbf16>, %layer: i32) {
  "kv.gather"(%k, %ids, %i32s, %out) : (!paged, memref<?x?xi32>, memref<?xi32>, memref<?x?x8x128xbf16>) -> ()
  "kv.copy_pages"(%pool, %i32s, %i32s) : (!pool, memref<?xi32>, memref<?xi32>) -> ()
  "kv.commit"(%pool, %ids, %i32s) : (!pool, memref<?x?xi32>, memref<?xi32>) -> ()
  "kv.commit"(%pool, %i32s, %i32s, %layer) : (!pool, memref<?xi32>, memref<?xi32>, i32) -> ()
  "kv.transfer_pages"(%pool, %pool, %i32s, %i32s) : (!pool, !pool, memref<?xi32>, memref<?xi32>) -> ()
  "kv.transfer_pages"(%pool, %pool, %i32s, %i32s, %layer) : (!pool, !pool, memref<?xi32>, memref<?xi32>, i32) -> ()
  "kv.convert"(%k, %c) : (!paged, !region) -> ()
  return
}

func.func @bookkeeping(%table: memref<?x?xi32>, %i32s: memref<?xi32>, %id: i32) {
  "kv.remap_sparse_indices"(%table, %i32s, %table, %id, %table) {page_size = 16 : i64}
    : (memref<?x?xi32>, memref<?xi32>, memref<?x?xi32>, i32, memref<?x?xi32>) -> ()
  "kv.cache_row_offsets"(%i32s, %i32s, %i32s) : (memref<?xi32>, memref<?xi32>, memref<?xi32>) -> ()
  "kv.increment_cache_lengths"(%i32s, %i32s) : (memref<?xi32>, memref<?xi32>) -> ()
  return
}

func.func @ragged(%x: memref<?x64xbf16>, %i32s: memref<?xi32>, %end: i32, %o: memref<?x8x64xbf16>, %lse: memref<?x8xf32>) {
  "kv.merge_attention"(%o, %lse, %o, %lse, %o, %lse)
    : (memref<?x8x64xbf16>, memref<?x8xf32>, memref<?x8x64xbf16>, memref<?x8xf32>, memref<?x8x64xbf16>, memref<?x8xf32>) -> ()
  "kv.sliced_add"(%x, %x, %end, %x) : (memref<?x64xbf16>, memref<?x64xbf16>, i32, memref<?x64xbf16>) -> ()
  "kv.merge_ragged"(%x, %i32s, %x, %i32s, %x, %i32s)
    : (memref<?x64xbf16>, memref<?xi32>, memref<?x64xbf16>, memref<?xi32>, memref<?x64xbf16>, memref<?xi32>) -> ()
  "kv.shift_tokens"(%i32s, %i32s, %i32s, %i32s) : (memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>) -> ()
  return
}

// === tier 1: attention

func.func @attention(%pool: !pool, %layer: i32, %q: memref<?x32x128xbf16>, %offsets: memref<?xi32>, %scale: f32,
                     %sinks: memref<32xf32>, %lse: memref<?x32xf32>) {
  "kv.attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x32x128xbf16>) -> ()
  "kv.attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %q,
      sinks = %sinks, lse = %lse, kv_offsets = %offsets, alibi_slopes = %sinks)
    {mask = "sliding_window", span = 4096 : i64, softcap = 30.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x32x128xbf16>, memref<32xf32>, memref<?x32xf32>, memref<?xi32>, memref<32xf32>) -> ()
  return
}

func.func @attention_padded(%pool: !pool, %layer: i32, %q: memref<?x?x32x128xbf16>, %valid: memref<?xi32>, %scale: f32,
                            %sinks: memref<32xf32>, %lse: memref<?x?x32xf32>) {
  "kv.attention_padded"(collection = %pool, layer = %layer, query = %q, valid_lengths = %valid, scale = %scale,
      out = %q)
    {mask = "chunked", span = 64 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x?x32x128xbf16>, memref<?xi32>, f32, memref<?x?x32x128xbf16>) -> ()
  "kv.attention_padded"(collection = %pool, layer = %layer, query = %q, valid_lengths = %valid, scale = %scale,
      out = %q, sinks = %sinks, lse = %lse, kv_offsets = %valid)
    {mask = "null", span = 0 : i64, softcap = 30.0 : f32}
    : (!pool, i32, memref<?x?x32x128xbf16>, memref<?xi32>, f32, memref<?x?x32x128xbf16>, memref<32xf32>, memref<?x?x32xf32>, memref<?xi32>) -> ()
  return
}

func.func @mla(%pool: !latent_pool, %cache: !latent, %layer: i32, %q: memref<?x16x576xbf16>, %out: memref<?x16x512xbf16>,
               %i32s: memref<?xi32>, %table: memref<?x?xi32>, %rows: memref<?x576xbf16>, %scale: f32) {
  "kv.mla_attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %i32s, scale = %scale, out = %out)
    {value_size = 512 : i64, mask = "causal", span = 0 : i64}
    : (!latent_pool, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>) -> ()
  "kv.mla_prefill_plan"(%i32s, %i32s, %table, %table, %i32s) {buffer_tokens = 8192 : i64}
    : (memref<?xi32>, memref<?xi32>, memref<?x?xi32>, memref<?x?xi32>, memref<?xi32>) -> ()
  "kv.mla_decompress"(%cache, %i32s, %i32s, %rows) : (!latent, memref<?xi32>, memref<?xi32>, memref<?x576xbf16>) -> ()
  return
}

// === tier 1: attention over latent rows

func.func @sparse(%pool: !latent_pool, %bytes: !bytes, %layer: i32, %q: memref<?x16x576xbf16>, %out: memref<?x16x512xbf16>,
                  %i32s: memref<?xi32>, %rows: memref<?x?xi32>, %scale: f32, %unrounded: memref<?x16x512xf32>,
                  %sinks: memref<16xf32>, %lse: memref<?x16xf32>) {
  "kv.mla_attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %i32s, scale = %scale, out = %out,
      indices = %rows)
    {value_size = 512 : i64, mask = "null", span = 0 : i64}
    : (!latent_pool, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?xi32>) -> ()
  "kv.mla_attention"(collection = %bytes, layer = %layer, query = %q, row_offsets = %i32s, scale = %scale,
      out = %out, indices = %rows, topk_lengths = %i32s)
    {value_size = 512 : i64, mask = "null", span = 0 : i64}
    : (!bytes, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?xi32>, memref<?xi32>) -> ()
  "kv.mla_attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %i32s, scale = %scale,
      out = %unrounded, sinks = %sinks, lse = %lse, prior = %unrounded, prior_lse = %lse)
    {value_size = 512 : i64, mask = "causal", span = 0 : i64}
    : (!latent_pool, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xf32>, memref<16xf32>, memref<?x16xf32>, memref<?x16x512xf32>, memref<?x16xf32>) -> ()
  return
}

func.func @functions(%pool: !latent_pool, %layer: i32, %q: memref<?x16x576xbf16>, %out: memref<?x16x512xbf16>,
                     %i32s: memref<?xi32>, %scale: f32, %bias: memref<?x?xf32>, %ids: memref<?x?xi32>) {
  "kv.mla_attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %i32s, scale = %scale, out = %out,
      kv_offsets = %i32s, array0 = %bias, array1 = %ids)
    {value_size = 512 : i64, mask = "document@01234567", score = "t5@89abcdef", span = 0 : i64}
    : (!latent_pool, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?xi32>, memref<?x?xf32>, memref<?x?xi32>) -> ()
  return
}

func.func @query_of_8_bits(%pool: !eight, %layer: i32, %q: memref<?x16x576xf8E4M3FN>, %out: memref<?x16x512xbf16>,
                           %i32s: memref<?xi32>, %scale: f32) {
  "kv.mla_attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %i32s, scale = %scale, out = %out)
    {value_size = 512 : i64, mask = "causal", span = 0 : i64}
    : (!eight, i32, memref<?x16x576xf8E4M3FN>, memref<?xi32>, f32, memref<?x16x512xbf16>) -> ()
  return
}

func.func @scales_in_rows(%pool: !scaled, %layer: i32, %q: memref<?x16x576xbf16>, %out: memref<?x16x512xbf16>,
                          %i32s: memref<?xi32>, %scale: f32) {
  "kv.mla_attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %i32s, scale = %scale, out = %out)
    {value_size = 512 : i64, mask = "causal", span = 0 : i64,
     inline_scales = 128 : i64}
    : (!scaled, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>) -> ()
  return
}

func.func @prefill_chunk(%pool: !latent_pool, %bytes: !bytes, %layer: i32, %q: memref<?x16x192xbf16>, %k: memref<?x16x128xbf16>,
                         %v: memref<?x16x96xbf16>, %i32s: memref<?xi32>, %scale: f32, %lse: memref<?x16xf32>) {
  "kv.mla_prefill_chunk"(%pool, %layer, %q, %i32s, %k, %v, %i32s, %i32s, %scale, %v, %lse) {accumulate = false, bf16_rope = false}
    : (!latent_pool, i32, memref<?x16x192xbf16>, memref<?xi32>, memref<?x16x128xbf16>, memref<?x16x96xbf16>, memref<?xi32>, memref<?xi32>, f32, memref<?x16x96xbf16>, memref<?x16xf32>) -> ()
  "kv.mla_prefill_chunk"(%bytes, %layer, %q, %i32s, %k, %v, %i32s, %i32s, %scale, %v, %lse) {accumulate = true, bf16_rope = true}
    : (!bytes, i32, memref<?x16x192xbf16>, memref<?xi32>, memref<?x16x128xbf16>, memref<?x16x96xbf16>, memref<?xi32>, memref<?xi32>, f32, memref<?x16x96xbf16>, memref<?x16xf32>) -> ()
  return
}

// === tier 1: products into caches

func.func @projections(%pool: !pool, %index: !index, %layer: i32, %x: memref<?x4096xbf16>, %w: memref<6144x4096xbf16>,
                       %wi: memref<6464x4096xbf16>, %wkv: memref<2048x4096xbf16>, %wk: memref<1024x4096xbf16>,
                       %offsets: memref<?xi32>, %q: !q, %bias: memref<6144xbf16>, %freqs: memref<?x128xf32>,
                       %gamma: memref<128xf32>, %iq: memref<?x4x64xbf16>) {
  "kv.project_append"(collection = %pool, layer = %layer, x = %x, weight = %w, row_offsets = %offsets, query_out = %q)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xbf16>, memref<6144x4096xbf16>, memref<?xi32>, !q) -> ()
  "kv.project_append"(collection = %pool, layer = %layer, x = %x, weight = %w, row_offsets = %offsets,
      query_out = %q, bias = %bias, freqs = %freqs, q_gamma = %gamma, k_gamma = %gamma)
    {scaling = "none", weight_format = "plain", interleaved = false, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xbf16>, memref<6144x4096xbf16>, memref<?xi32>, !q, memref<6144xbf16>, memref<?x128xf32>, memref<128xf32>, memref<128xf32>) -> ()
  "kv.project_append"(collection = %pool, layer = %layer, x = %x, weight = %wi, row_offsets = %offsets,
      query_out = %q, index_collection = %index, index_query_out = %iq)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xbf16>, memref<6464x4096xbf16>, memref<?xi32>, !q, !index, memref<?x4x64xbf16>) -> ()
  // Keys and values, and keys alone.
  "kv.project_append"(collection = %pool, layer = %layer, x = %x, weight = %wkv, row_offsets = %offsets)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xbf16>, memref<2048x4096xbf16>, memref<?xi32>) -> ()
  "kv.project_append"(collection = %pool, layer = %layer, x = %x, weight = %wk, row_offsets = %offsets)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xbf16>, memref<1024x4096xbf16>, memref<?xi32>) -> ()
  "kv.project_append_padded"(collection = %pool, layer = %layer, x = %x, weight = %w, valid_lengths = %offsets,
      query_out = %q)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xbf16>, memref<6144x4096xbf16>, memref<?xi32>, !q) -> ()
  return
}

func.func @scales(%pool: !pool, %layer: i32, %x: memref<?x4096xf8E4M3FN>, %w: memref<6144x4096xf8E4M3FN>,
                  %offsets: memref<?xi32>, %q: !q, %xs: memref<?x32xf32>, %ws: memref<48x32xf32>) {
  "kv.project_append"(collection = %pool, layer = %layer, x = %x, weight = %w, row_offsets = %offsets,
      query_out = %q, x_scale = %xs, weight_scale = %ws)
    {scaling = "block", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xf8E4M3FN>, memref<6144x4096xf8E4M3FN>, memref<?xi32>, !q, memref<?x32xf32>, memref<48x32xf32>) -> ()
  return
}

func.func @groups(%pool: !pool, %layer: i32, %x: memref<?x4096xbf16>, %w: memref<6144x2048xi8>, %w8: memref<6144x4096xf8E4M3FN>,
                  %x4: memref<?x2048xi8>, %x8: memref<?x4096xf8E4M3FN>, %offsets: memref<?xi32>, %q: !q,
                  %s: memref<6144x32xbf16>, %xs: memref<?x128xf8E8M0FNU>, %ws: memref<48x32x32x4x4xf8E8M0FNU>,
                  %xs4: memref<?x64x32x4x4xf8E4M3FN>, %ws4: memref<48x64x32x4x4xf8E4M3FN>, %one: memref<1x1xf32>) {
  // 4 bits with scales and minima of 128 elements.
  "kv.project_append"(collection = %pool, layer = %layer, x = %x, weight = %w, row_offsets = %offsets,
      query_out = %q, weight_scale = %s, weight_min = %s)
    {scaling = "group", weight_format = "uint4", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xbf16>, memref<6144x2048xi8>, memref<?xi32>, !q, memref<6144x32xbf16>, memref<6144x32xbf16>) -> ()
  // MXFP8: tokens with scales [T, K / 32], a weight with those of tensor cores.
  "kv.project_append"(collection = %pool, layer = %layer, x = %x8, weight = %w8, row_offsets = %offsets,
      query_out = %q, x_scale = %xs, weight_scale = %ws)
    {scaling = "group", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xf8E4M3FN>, memref<6144x4096xf8E4M3FN>, memref<?xi32>, !q, memref<?x128xf8E8M0FNU>, memref<48x32x32x4x4xf8E8M0FNU>) -> ()
  // FP4 with one number for all.
  "kv.project_append"(collection = %pool, layer = %layer, x = %x4, weight = %w, row_offsets = %offsets,
      query_out = %q, x_scale = %xs4, weight_scale = %ws4, tensor_scale = %one)
    {scaling = "group", weight_format = "e2m1", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x2048xi8>, memref<6144x2048xi8>, memref<?xi32>, !q, memref<?x64x32x4x4xf8E4M3FN>, memref<48x64x32x4x4xf8E4M3FN>, memref<1x1xf32>) -> ()
  return
}

func.func @latent(%pool: !latent_pool, %layer: i32, %x: memref<?x64xbf16>, %w: memref<768x64xbf16>, %offsets: memref<?xi32>,
                  %q: memref<?x1x192xbf16>) {
  "kv.project_append"(collection = %pool, layer = %layer, x = %x, weight = %w, row_offsets = %offsets, query_out = %q)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!latent_pool, i32, memref<?x64xbf16>, memref<768x64xbf16>, memref<?xi32>, memref<?x1x192xbf16>) -> ()
  return
}

// A matrix as the operand of one sequence.
func.func @rows(%x: memref<?x4096xbf16>) {
  %rows = "kv.buffer_operand"(%x) : (memref<?x4096xbf16>) -> !kv.operand<"dense", bf16, 64 : i64, 64 : i64, false, 0 : i64, none, 1 : i64>
  return
}

// Scores and masks that are functions: the IR has their names, and the arrays that they read.

func.func @attention_functions_functions(%pool: !pool, %layer: i32, %q: !q, %offsets: memref<?xi32>, %scale: f32, %bias: memref<?x?xf32>, %ids: memref<?x?xi32>) {
  "kv.attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %q,
      array0 = %bias, array1 = %ids)
    {mask = "document@01234567", score = "t5@89abcdef", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !q, memref<?xi32>, f32, !q, memref<?x?xf32>, memref<?x?xi32>) -> ()
  return
}

// Block masks: made of ragged and padded queries, and taken by attention.

func.func @block_masks_ragged(%pool: !pool, %layer: i32, %q: !q, %offsets: memref<?xi32>, %scale: f32, %ids: memref<?x?xi32>, %blocks: memref<?x?x?xi32>) {
  "kv.block_mask"(collection = %pool, query = %q, blocks = %blocks, row_offsets = %offsets, array0 = %ids)
    {mask = "document@01234567", rows = 128 : i64, keys = 128 : i64}
    : (!pool, !q, memref<?x?x?xi32>, memref<?xi32>, memref<?x?xi32>) -> ()
  "kv.attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %q, array0 = %ids, block_mask = %blocks)
    {mask = "document@01234567", span = 0 : i64, softcap = 0.0 : f32, block_rows = 128 : i64, block_keys = 128 : i64}
    : (!pool, i32, !q, memref<?xi32>, f32, !q, memref<?x?xi32>, memref<?x?x?xi32>) -> ()
  return
}

func.func @padded(%pool: !pool, %q: !batch, %lengths: memref<?xi32>, %keys: memref<?xi32>, %blocks: memref<?x?x?xi32>) {
  "kv.block_mask"(collection = %pool, query = %q, blocks = %blocks, valid_lengths = %lengths, kv_offsets = %keys)
    {mask = "prefix@01234567", rows = 64 : i64, keys = 32 : i64}
    : (!pool, !batch, memref<?x?x?xi32>, memref<?xi32>, memref<?xi32>) -> ()
  return
}

func.func @latent_rows(%pool: !latent_pool, %layer: i32, %q: !wide, %offsets: memref<?xi32>, %scale: f32, %out: memref<?x16x512xbf16>, %blocks: memref<?x?x?xi32>) {
  "kv.block_mask"(collection = %pool, query = %q, blocks = %blocks, row_offsets = %offsets)
    {mask = "causal@01234567", rows = 16 : i64, keys = 64 : i64}
    : (!latent_pool, !wide, memref<?x?x?xi32>, memref<?xi32>) -> ()
  "kv.mla_attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out, block_mask = %blocks)
    {mask = "causal@01234567", span = 0 : i64, value_size = 512 : i64, block_rows = 16 : i64, block_keys = 64 : i64}
    : (!latent_pool, i32, !wide, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?x?xi32>) -> ()
  return
}

// Lists of pages: what attends to them, and what makes them.

func.func @pages_attention(%pool: !pool, %layer: i32, %q: !q, %p: !batch, %o: memref<?xi32>, %s: f32, %pages: memref<?x8x?xi32>, %n: memref<?x8xi32>) {
  "kv.attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %o, scale = %s, out = %q,
      pages = %pages)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !q, memref<?xi32>, f32, !q, memref<?x8x?xi32>) -> ()
  "kv.attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %o, scale = %s, out = %q,
      pages = %pages, page_counts = %n)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !q, memref<?xi32>, f32, !q, memref<?x8x?xi32>, memref<?x8xi32>) -> ()
  "kv.attention_padded"(collection = %pool, layer = %layer, query = %p, valid_lengths = %o, scale = %s, out = %p,
      pages = %pages, page_counts = %n)
    {mask = "null", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !batch, memref<?xi32>, f32, !batch, memref<?x8x?xi32>, memref<?x8xi32>) -> ()
  return
}

func.func @choice(%pool: !pool, %layer: i32, %q: !q, %o: memref<?xi32>, %s: memref<?x?x8x2x128xbf16>, %m: memref<?x?x8x1x128xf32>, %pages: memref<?x8x?xi32>, %n: memref<?x8xi32>) {
  "kv.summarize_pages"(%pool, %layer, %s, %o) : (!pool, i32, memref<?x?x8x2x128xbf16>, memref<?xi32>) -> ()
  "kv.select_pages"(%pool, %layer, %q, %o, %m, %pages, %n) {first = 1 : i64, last = 2 : i64}
    : (!pool, i32, !q, memref<?xi32>, memref<?x?x8x1x128xf32>, memref<?x8x?xi32>, memref<?x8xi32>) -> ()
  return
}

func.func @indexer(%pool: !index_pages, %layer: i32, %q: memref<?x64x128xf8E4M3FN>, %w: memref<?x64xf32>, %o: memref<?xi32>, %s: memref<?x?xf32>, %t: memref<?x?xi32>, %n: memref<?xi32>) {
  "kv.index_scores"(%pool, %layer, %q, %w, %o, %s)
    : (!index_pages, i32, memref<?x64x128xf8E4M3FN>, memref<?x64xf32>, memref<?xi32>, memref<?x?xf32>) -> ()
  "kv.select_tokens"(%s, %t, %n) : (memref<?x?xf32>, memref<?x?xi32>, memref<?xi32>) -> ()
  return
}

// The tables of prefixes that sequences share, and of what follows them.

func.func @split(%a: memref<?x?xi32>, %b: memref<?xi32>, %c: memref<?xi32>, %d: memref<?xi32>, %e: memref<?xi32>, %f: memref<?x?xi32>, %g: memref<?xi32>, %h: memref<?xi32>, %i: memref<?xi32>, %j: memref<?x?xi32>, %k: memref<?xi32>) {
  "kv.split_prefixes"(%a, %b, %c, %d, %e, %f, %g, %h, %i, %j, %k) {page_size = 16 : i64}
    : (memref<?x?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?x?xi32>, memref<?xi32>, memref<?xi32>, memref<?xi32>, memref<?x?xi32>, memref<?xi32>) -> ()
  return
}

// Attention that is combined with a result over other keys, and one that is not rounded to the query's type.

func.func @prior_attention(%pool: !pool, %layer: i32, %q: !q, %p: !batch, %o: memref<?xi32>, %s: f32, %x: memref<?x32x128xf32>, %l: memref<?x32xf32>, %px: memref<?x?x32x128xf32>, %pl: memref<?x?x32xf32>) {
  "kv.attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %o, scale = %s, out = %x, lse = %l)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !q, memref<?xi32>, f32, memref<?x32x128xf32>, memref<?x32xf32>) -> ()
  "kv.attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %o, scale = %s, out = %q, prior = %x,
      prior_lse = %l)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !q, memref<?xi32>, f32, !q, memref<?x32x128xf32>, memref<?x32xf32>) -> ()
  "kv.attention_padded"(collection = %pool, layer = %layer, query = %p, valid_lengths = %o, scale = %s, out = %p,
      prior = %px, prior_lse = %pl)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !batch, memref<?xi32>, f32, !batch, memref<?x?x32x128xf32>, memref<?x?x32xf32>) -> ()
  return
}

// Attention operands: every op of the interface with each kind of operand, and what scales are asked for.

func.func @of_cached(%x: !cached, %b: i32, %t: i32, %h: i32, %d: i32) {
  %n = "kv.cache_length"(%x, %b) : (!cached, i32) -> i32
  %m = "kv.max_context_length"(%x) : (!cached) -> i32
  %rows = "kv.num_rows"(%x) : (!cached) -> i32
  %row = "kv.row_index"(%x, %b, %t) : (!cached, i32, i32) -> i32
  %tma = "kv.tma_row"(%x, %t) : (!cached, i32) -> i32
  %first = "kv.populate"(%x, %b, %t) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!cached, i32, i32) -> !kv.rows<64 : i64, 16 : i64>
  %page = "kv.page"(%x, %b, %t) : (!cached, i32, i32) -> i32
  %raw = "kv.raw_page"(%x, %b, %t) : (!cached, i32, i32) -> i32
  %v = "kv.load"(%x, %b, %h, %t, %d, %page) {width = 4 : i64} : (!cached, i32, i32, i32, i32, i32) -> vector<4xf16>
  %at = "kv.block_ptr"(%x, %b, %t, %h, %d) {tile = 1 : i64} : (!cached, i32, i32, i32, i32) -> !llvm.ptr<1>
  %base = "kv.scales_base"(%x) : (!cached) -> !llvm.ptr<1>
  %tile = "kv.alloc_shared"() {bytes = 32768 : i64, alignment = 128 : i64} : () -> !llvm.ptr<3>
  "kv.load_tile"(%x, %b, %h, %t, %n, %tile, %d) {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 128 : i64, mode = "async"}
    : (!cached, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  %f = "kv.field"(%x) {field = "lookup"} : (!cached) -> !llvm.ptr<1>
  return
}

func.func @of_fp8(%x: !fp8_operands, %b: i32, %t: i32, %h: i32, %d: i32) {
  %page = "kv.page"(%x, %b, %t) : (!fp8_operands, i32, i32) -> i32
  %v = "kv.load"(%x, %b, %h, %t, %d, %page) {width = 4 : i64} : (!fp8_operands, i32, i32, i32, i32, i32) -> vector<4xbf16>
  %base = "kv.scales_base"(%x) : (!fp8_operands) -> !llvm.ptr<1>
  %s = "kv.load_scale"(%x, %b, %h, %t, %d) {width = 1 : i64} : (!fp8_operands, i32, i32, i32, i32) -> f32
  %sat = "kv.scale_block_ptr"(%x, %b, %t, %h, %d) : (!fp8_operands, i32, i32, i32, i32) -> !llvm.ptr<1>
  %q = "kv.load_raw"(%x, %b, %h, %t, %d) {width = 8 : i64} : (!fp8_operands, i32, i32, i32, i32) -> vector<8xf8E4M3FN>
  return
}

func.func @of_scales(%x: !scales, %b: i32, %t: i32, %h: i32, %d: i32) {
  %n = "kv.cache_length"(%x, %b) : (!scales, i32) -> i32
  %m = "kv.max_context_length"(%x) : (!scales) -> i32
  %rows = "kv.num_rows"(%x) : (!scales) -> i32
  %row = "kv.row_index"(%x, %b, %t) : (!scales, i32, i32) -> i32
  %tma = "kv.tma_row"(%x, %t) : (!scales, i32) -> i32
  %first = "kv.populate"(%x, %b, %t) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!scales, i32, i32) -> !kv.rows<64 : i64, 16 : i64>
  %page = "kv.page"(%x, %b, %t) : (!scales, i32, i32) -> i32
  %raw = "kv.raw_page"(%x, %b, %t) : (!scales, i32, i32) -> i32
  %v = "kv.load"(%x, %b, %h, %t, %d, %page) {width = 4 : i64} : (!scales, i32, i32, i32, i32, i32) -> vector<4xf32>
  %at = "kv.block_ptr"(%x, %b, %t, %h, %d) {tile = 1 : i64} : (!scales, i32, i32, i32, i32) -> !llvm.ptr<1>
  %base = "kv.scales_base"(%x) : (!scales) -> !llvm.ptr<1>
  %s = "kv.load_scale"(%x, %b, %h, %t, %d) {width = 1 : i64} : (!scales, i32, i32, i32, i32) -> f32
  %sat = "kv.scale_block_ptr"(%x, %b, %t, %h, %d) : (!scales, i32, i32, i32, i32) -> !llvm.ptr<1>
  %f = "kv.field"(%x) {field = "lookup"} : (!scales) -> !llvm.ptr<1>
  return
}

func.func @of_dense(%x: !dense, %b: i32, %t: i32, %h: i32, %d: i32) {
  %n = "kv.cache_length"(%x, %b) : (!dense, i32) -> i32
  %m = "kv.max_context_length"(%x) : (!dense) -> i32
  %rows = "kv.num_rows"(%x) : (!dense) -> i32
  %row = "kv.row_index"(%x, %b, %t) : (!dense, i32, i32) -> i32
  %tma = "kv.tma_row"(%x, %t) : (!dense, i32) -> i32
  %first = "kv.populate"(%x, %b, %t) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!dense, i32, i32) -> !kv.rows<64 : i64, 0 : i64>
  %page = "kv.page"(%x, %b, %t) : (!dense, i32, i32) -> i32
  %raw = "kv.raw_page"(%x, %b, %t) : (!dense, i32, i32) -> i32
  %v = "kv.load"(%x, %b, %h, %t, %d, %page) {width = 4 : i64} : (!dense, i32, i32, i32, i32, i32) -> vector<4xf16>
  %at = "kv.block_ptr"(%x, %b, %t, %h, %d) {tile = 1 : i64} : (!dense, i32, i32, i32, i32) -> !llvm.ptr<1>
  %base = "kv.scales_base"(%x) : (!dense) -> !llvm.ptr<1>
  %s = "kv.load_scale"(%x, %b, %h, %t, %d) {width = 1 : i64} : (!dense, i32, i32, i32, i32) -> f16
  %tile = "kv.alloc_shared"() {bytes = 32768 : i64, alignment = 128 : i64} : () -> !llvm.ptr<3>
  "kv.load_tile"(%x, %b, %h, %t, %n, %tile, %d) {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 128 : i64, mode = "async"}
    : (!dense, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  %f = "kv.field"(%x) {field = "lengths"} : (!dense) -> !llvm.ptr<1>
  return
}

func.func @of_dense8(%x: !dense8, %b: i32, %t: i32, %h: i32, %d: i32) {
  %page = "kv.page"(%x, %b, %t) : (!dense8, i32, i32) -> i32
  %v = "kv.load"(%x, %b, %h, %t, %d, %page) {width = 4 : i64} : (!dense8, i32, i32, i32, i32, i32) -> vector<4xf32>
  %base = "kv.scales_base"(%x) : (!dense8) -> !llvm.ptr<1>
  %s = "kv.load_scale"(%x, %b, %h, %t, %d) {width = 1 : i64} : (!dense8, i32, i32, i32, i32) -> f32
  %sat = "kv.scale_block_ptr"(%x, %b, %t, %h, %d) : (!dense8, i32, i32, i32, i32) -> !llvm.ptr<1>
  %q = "kv.load_raw"(%x, %b, %h, %t, %d) {width = 8 : i64} : (!dense8, i32, i32, i32, i32) -> vector<8xi8>
  return
}

func.func @of_ragged(%x: !ragged, %b: i32, %t: i32, %h: i32, %d: i32) {
  %n = "kv.cache_length"(%x, %b) : (!ragged, i32) -> i32
  %rows = "kv.num_rows"(%x) : (!ragged) -> i32
  %row = "kv.row_index"(%x, %b, %t) : (!ragged, i32, i32) -> i32
  %tma = "kv.tma_row"(%x, %t) : (!ragged, i32) -> i32
  %first = "kv.populate"(%x, %b, %t) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!ragged, i32, i32) -> !kv.rows<64 : i64, 0 : i64>
  %page = "kv.page"(%x, %b, %t) : (!ragged, i32, i32) -> i32
  %raw = "kv.raw_page"(%x, %b, %t) : (!ragged, i32, i32) -> i32
  %v = "kv.load"(%x, %b, %h, %t, %d, %page) {width = 4 : i64} : (!ragged, i32, i32, i32, i32, i32) -> vector<4xf16>
  %at = "kv.block_ptr"(%x, %b, %t, %h, %d) {tile = 1 : i64} : (!ragged, i32, i32, i32, i32) -> !llvm.ptr<1>
  %base = "kv.scales_base"(%x) : (!ragged) -> !llvm.ptr<1>
  %s = "kv.load_scale"(%x, %b, %h, %t, %d) {width = 1 : i64} : (!ragged, i32, i32, i32, i32) -> f16
  %sat = "kv.scale_block_ptr"(%x, %b, %t, %h, %d) : (!ragged, i32, i32, i32, i32) -> !llvm.ptr<1>
  %tile = "kv.alloc_shared"() {bytes = 32768 : i64, alignment = 128 : i64} : () -> !llvm.ptr<3>
  "kv.load_tile"(%x, %b, %h, %t, %n, %tile, %d) {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 128 : i64, mode = "async"}
    : (!ragged, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  %f = "kv.field"(%x) {field = "offsets"} : (!ragged) -> !llvm.ptr<1>
  return
}

func.func @of_ragged8(%x: !ragged8, %b: i32, %t: i32, %h: i32, %d: i32) {
  %page = "kv.page"(%x, %b, %t) : (!ragged8, i32, i32) -> i32
  %v = "kv.load"(%x, %b, %h, %t, %d, %page) {width = 4 : i64} : (!ragged8, i32, i32, i32, i32, i32) -> vector<4xf32>
  %base = "kv.scales_base"(%x) : (!ragged8) -> !llvm.ptr<1>
  %s = "kv.load_scale"(%x, %b, %h, %t, %d) {width = 1 : i64} : (!ragged8, i32, i32, i32, i32) -> f32
  %sat = "kv.scale_block_ptr"(%x, %b, %t, %h, %d) : (!ragged8, i32, i32, i32, i32) -> !llvm.ptr<1>
  %q = "kv.load_raw"(%x, %b, %h, %t, %d) {width = 8 : i64} : (!ragged8, i32, i32, i32, i32) -> vector<8xi8>
  return
}

// A cache becomes an operand of its elements, or of its scales: the result's kind says which.
func.func @made(%c: !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>) {
  %elements = "kv.make_operand"(%c) : (!kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>) -> !fp8_operands
  %scales = "kv.make_operand"(%c) : (!kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>) -> !scales
  return
}

func.func @attention_cached(%k: !cached, %v: !cached, %q: memref<?x16x128xf16>, %o: memref<?xi32>, %s: f32) {
  "kv.operand_attention"(keys = %k, values = %v, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!cached, !cached, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  return
}

func.func @attention_dense(%k: !dense, %v: !dense, %q: memref<?x16x128xf16>, %o: memref<?xi32>, %s: f32) {
  "kv.operand_attention"(keys = %k, values = %v, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!dense, !dense, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  return
}

func.func @attention_ragged(%k: !ragged, %v: !ragged, %q: memref<?x16x128xf16>, %o: memref<?xi32>, %s: f32) {
  "kv.operand_attention"(keys = %k, values = %v, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!ragged, !ragged, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  return
}

func.func @attention_ragged8(%k: !ragged8, %v: !ragged8, %q: memref<?x16x128xf16>, %o: memref<?xi32>, %s: f32) {
  "kv.operand_attention"(keys = %k, values = %v, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!ragged8, !ragged8, memref<?x16x128xf16>, memref<?xi32>, f32, memref<?x16x128xf16>) -> ()
  return
}

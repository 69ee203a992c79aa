// RUN: kv-opt %s --split-input-file --verify-diagnostics

// What the verifiers of handles and addressing ops refuse.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!h96 = !kv.cache<"paged", bf16, 8 : i64, 96 : i64, false, 16 : i64, none, 1 : i64>
!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!latent_cache = !kv.cache<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!view = !kv.operand<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!fa3 = !kv.cache<"fa3", bf16, 8 : i64, 128 : i64, false, 128 : i64, none, 1 : i64>
!rows = !kv.rows<64 : i64, 16 : i64>
!odd = !kv.cache<"paged", i8, 8 : i64, 20 : i64, false, 16 : i64, none, 1 : i64>
!region = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>

func.func @page(%c: i64, %i: i32, %c2: !pool) {
  // expected-error @below {{'kv.page' op operand must be of type !kv.cache or !kv.operand, got i64}}
  "kv.page"(%c, %i, %i) : (i64, i32, i32) -> i32
  // expected-error @below {{'kv.page' op operand must be of type !kv.cache or !kv.operand, got !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
  "kv.page"(%c2, %i, %i) : (!pool, i32, i32) -> i32
  return
}

func.func @make_cache_and_key_cache(%p: !llvm.ptr<1>, %n: i32, %s: i64, %p2: !llvm.ptr, %c: !pool, %i: i32) {
  // expected-error @below {{'kv.make_cache' op takes 13 fields for !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>, got 11}}
  "kv.make_cache"(base = %p, stride0 = %s, num_blocks = %n, capacity = %n, lookup = %p, lookup_stride = %s,
      lookup_columns = %n, lengths = %p, batch = %n, max_seq_length = %n, max_cache_length = %n)
    : (!llvm.ptr<1>, i64, i32, i32, !llvm.ptr<1>, i64, i32, !llvm.ptr<1>, i32, i32, i32) -> !fp8
  // expected-error @below {{'kv.make_cache' op field base must be !llvm.ptr<1>, got !llvm.ptr}}
  "kv.make_cache"(base = %p2, stride0 = %s, num_blocks = %n, capacity = %n, lookup = %p2, lookup_stride = %s,
      lookup_columns = %n, lengths = %p2, batch = %n, max_seq_length = %n, max_cache_length = %n)
    : (!llvm.ptr, i64, i32, i32, !llvm.ptr, i64, i32, !llvm.ptr, i32, i32, i32) -> !cache
  // expected-error @below {{'kv.key_cache' op result must have the parameters of the collection !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>, got !kv.cache<"paged", bf16, 8 : i64, 96 : i64, false, 16 : i64, none, 1 : i64>}}
  "kv.key_cache"(%c, %i) : (!pool, i32) -> !h96
  return
}

func.func @value_cache(%c: !latent, %i: i32) {
  // expected-error @below {{'kv.value_cache' op needs a collection with values: an MLA one has only latent keys (is_mla = true)}}
  "kv.value_cache"(%c, %i) : (!latent, i32) -> !latent_cache
  return
}

func.func @make_operand(%c: !h96) {
  // expected-error @below {{'kv.make_operand' op result must have the cache's parameters !kv.operand<"paged", bf16, 8 : i64, 96 : i64, false, 16 : i64, none, 1 : i64>, got !kv.operand<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
  "kv.make_operand"(%c) : (!h96) -> !view
  return
}

func.func @handles(%c: !cache) {
  // expected-error @below {{'kv.field' op field must be one of base, stride0, num_blocks, capacity, lookup, lookup_stride, lookup_columns, lengths, batch, max_seq_length, max_cache_length, got scales}}
  "kv.field"(%c) {field = "scales"} : (!cache) -> !llvm.ptr<1>
  // expected-error @below {{'kv.field' op field stride0 must have type i64, got i32}}
  "kv.field"(%c) {field = "stride0"} : (!cache) -> i32
  // expected-error @below {{'kv.device_attribute' op attribute must be one of multiprocessors, shared_bytes, l2_bytes, warp_size, got "color"}}
  "kv.device_attribute"() {attribute = "color"} : () -> i32
  // expected-error @below {{'kv.cache_lengths' op result must be !llvm.ptr<1>, got !llvm.ptr}}
  "kv.cache_lengths"(%c) : (!cache) -> !llvm.ptr
  return
}

func.func @num_rows_and_row_index(%c: !fa3, %i: i32) {
  // expected-error @below {{'kv.num_rows' op needs a paged or continuous cache: an fa3 cache has no rows}}
  "kv.num_rows"(%c) : (!fa3) -> i32
  // expected-error @below {{'kv.row_index' op needs a paged or continuous cache: an fa3 cache has no rows}}
  "kv.row_index"(%c, %i, %i) : (!fa3, i32, i32) -> i32
  return
}

func.func @populate(%c: !cache, %i: i32, %c2: !odd) {
  // expected-error @below {{'kv.populate' op tile rows and page size must divide one another, got 24 and 16}}
  "kv.populate"(%c, %i, %i) {tile_rows = 24 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!cache, i32, i32) -> !rows
  // expected-error @below {{'kv.populate' op tile rows must be positive, got 0}}
  "kv.populate"(%c, %i, %i) {tile_rows = 0 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!cache, i32, i32) -> !rows
  // expected-error @below {{'kv.populate' op a tile must span at most 16 pages (the lookup table's padding), got 32}}
  "kv.populate"(%c, %i, %i) {tile_rows = 512 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!cache, i32, i32) -> !rows
  // expected-error @below {{'kv.populate' op base alignment must be a multiple of the page size 16 when a tile spans several pages, got 8}}
  "kv.populate"(%c, %i, %i) {tile_rows = 64 : i64, base_alignment = 8 : i64, pair_cta = false, is_leader = true}
    : (!cache, i32, i32) -> !rows
  // expected-error @below {{'kv.populate' op base alignment must be positive, got -4}}
  "kv.populate"(%c, %i, %i) {tile_rows = 64 : i64, base_alignment = -4 : i64, pair_cta = false, is_leader = true}
    : (!cache, i32, i32) -> !rows
  // expected-error @below {{'kv.populate' op pair_cta needs one page per tile or an even number, got 3}}
  "kv.populate"(%c2, %i, %i) {tile_rows = 48 : i64, base_alignment = 0 : i64, pair_cta = true, is_leader = true}
    : (!odd, i32, i32) -> !kv.rows<48 : i64, 16 : i64>
  // expected-error @below {{'kv.populate' op pair_cta needs an even number of tile rows, got 1}}
  "kv.populate"(%c, %i, %i) {tile_rows = 1 : i64, base_alignment = 1 : i64, pair_cta = true, is_leader = true}
    : (!cache, i32, i32) -> !kv.rows<1 : i64, 16 : i64>
  // expected-error @below {{'kv.populate' op result must be !kv.rows<32 : i64, 16 : i64>, got !kv.rows<64 : i64, 16 : i64>}}
  "kv.populate"(%c, %i, %i) {tile_rows = 32 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!cache, i32, i32) -> !rows
  // expected-error @below {{'kv.populate' op tile_rows and base_alignment must be integers and pair_cta a bool}}
  "kv.populate"(%c, %i, %i) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = 1 : i64, is_leader = true}
    : (!cache, i32, i32) -> !rows
  return
}

func.func @get_row_and_make_rows(%c: i32, %i: i32) {
  // expected-error @below {{'kv.get_row' op operand must be of type !kv.rows, got i32}}
  "kv.get_row"(%c, %c) : (i32, i32) -> i32
  // expected-error @below {{'kv.make_rows' op result must be of type !kv.rows, got i32}}
  "kv.make_rows"(%i) : (i32) -> i32
  // expected-error @below {{'kv.make_rows' op takes 4 rows for !kv.rows<64 : i64, 16 : i64>, got 2}}
  "kv.make_rows"(%i, %i) : (i32, i32) -> !rows
  return
}

func.func @load_pages(%c: !region, %i: i32, %c2: !cache) {
  // expected-error @below {{'kv.load_pages' op needs a paged cache, whose table has one row per sequence}}
  "kv.load_pages"(%c, %i, %i) {count = 4 : i64} : (!region, i32, i32) -> vector<4xi32>
  // expected-error @below {{'kv.load_pages' op count must be 1, 2, 4 or 8, got 3 : i64}}
  "kv.load_pages"(%c2, %i, %i) {count = 3 : i64} : (!cache, i32, i32) -> vector<3xi32>
  // expected-error @below {{'kv.load_pages' op result must be vector<4xi32>, got vector<8xi32>}}
  "kv.load_pages"(%c2, %i, %i) {count = 4 : i64} : (!cache, i32, i32) -> vector<8xi32>
  return
}

func.func @block_ptr(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.block_ptr' op tile must be a positive integer, got 0 : i64}}
  "kv.block_ptr"(%c, %i, %i, %i, %i) {tile = 0 : i64} : (!cache, i32, i32, i32, i32) -> !llvm.ptr<1>
  // expected-error @below {{'kv.block_ptr' op tile must divide the page size 16, got 12}}
  "kv.block_ptr"(%c, %i, %i, %i, %i) {tile = 12 : i64} : (!cache, i32, i32, i32, i32) -> !llvm.ptr<1>
  // expected-error @below {{'kv.block_ptr' op result must be !llvm.ptr<1>, got !llvm.ptr<3>}}
  "kv.block_ptr"(%c, %i, %i, %i, %i) {tile = 16 : i64} : (!cache, i32, i32, i32, i32) -> !llvm.ptr<3>
  return
}

func.func @scale_block_ptr(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.scale_block_ptr' op needs a quantized cache (one with a scale type), got one without scales}}
  "kv.scale_block_ptr"(%c, %i, %i, %i, %i) : (!cache, i32, i32, i32, i32) -> !llvm.ptr<1>
  return
}

func.func @buffer_address(%b: i32, %i: i32, %b2: memref<f32>, %b3: memref<?x?xf32>) {
  // expected-error @below {{'kv.buffer_address' op buffer must be a memref of rank 1, got i32}}
  "kv.buffer_address"(%b, %i) : (i32, i32) -> !llvm.ptr<1>
  // expected-error @below {{'kv.buffer_address' op takes one index per dimension and at least one, got none for memref<f32>}}
  "kv.buffer_address"(%b2) : (memref<f32>) -> !llvm.ptr<1>
  // expected-error @below {{'kv.buffer_address' op buffer must be a memref of rank 1, got memref<?x?xf32>}}
  "kv.buffer_address"(%b3, %i) : (memref<?x?xf32>, i32) -> !llvm.ptr<1>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Indices are i32.
func.func @rule(%c: !cache, %i: i64) {
  // expected-error @below {{expected 'i32' but got 'i64'}}
  %0 = "kv.page"(%c, %i, %i) : (!cache, i64, i64) -> i32
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Attributes are required.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{attribute "width" is expected but not provided}}
  %0 = "kv.load"(%c, %i, %i, %i, %i) : (!cache, i32, i32, i32, i32) -> bf16
  return
}

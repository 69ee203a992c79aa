// RUN: kv-opt %s --split-input-file --verify-diagnostics

// What the verifiers of handles and addressing ops refuse. One chunk a rule.

// Rule: an operand that must be a handle is one.
func.func @rule(%c: i64, %i: i32) {
  // expected-error @below {{'kv.page' op operand must be of type !kv.cache or !kv.operand, got i64}}
  %0 = "kv.page"(%c, %i, %i) : (i64, i32, i32) -> i32
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a collection is not a cache.
func.func @rule(%c: !pool, %i: i32) {
  // expected-error @below {{'kv.page' op operand must be of type !kv.cache or !kv.operand, got !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
  %0 = "kv.page"(%c, %i, %i) : (!pool, i32, i32) -> i32
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: indices are i32.
func.func @rule(%c: !cache, %i: i64) {
  // expected-error @below {{expected 'i32' but got 'i64'}}
  %0 = "kv.page"(%c, %i, %i) : (!cache, i64, i64) -> i32
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: attributes are required.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{attribute "width" is expected but not provided}}
  %0 = "kv.load"(%c, %i, %i, %i, %i) : (!cache, i32, i32, i32, i32) -> bf16
  return
}

// -----

!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
// Rule: make_cache takes the fields of its kind.
func.func @rule(%p: !llvm.ptr<1>, %n: i32, %s: i64) {
  // expected-error @below {{'kv.make_cache' op takes 13 fields for !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>, got 11}}
  %0 = "kv.make_cache"(base = %p, stride0 = %s, num_blocks = %n, capacity = %n, lookup = %p, lookup_stride = %s,
      lookup_columns = %n, lengths = %p, batch = %n, max_seq_length = %n, max_cache_length = %n)
    : (!llvm.ptr<1>, i64, i32, i32, !llvm.ptr<1>, i64, i32, !llvm.ptr<1>, i32, i32, i32) -> !fp8
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: fields that are pointers point to device memory.
func.func @rule(%p: !llvm.ptr, %n: i32, %s: i64) {
  // expected-error @below {{'kv.make_cache' op field base must be !llvm.ptr<1>, got !llvm.ptr}}
  %0 = "kv.make_cache"(base = %p, stride0 = %s, num_blocks = %n, capacity = %n, lookup = %p, lookup_stride = %s,
      lookup_columns = %n, lengths = %p, batch = %n, max_seq_length = %n, max_cache_length = %n)
    : (!llvm.ptr, i64, i32, i32, !llvm.ptr, i64, i32, !llvm.ptr, i32, i32, i32) -> !cache
  return
}

// -----

!h96 = !kv.cache<"paged", bf16, 8 : i64, 96 : i64, false, 16 : i64, none, 1 : i64>
!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a view has the parameters of its collection.
func.func @rule(%c: !pool, %i: i32) {
  // expected-error @below {{'kv.key_cache' op result must have the parameters of the collection !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>, got !kv.cache<"paged", bf16, 8 : i64, 96 : i64, false, 16 : i64, none, 1 : i64>}}
  %0 = "kv.key_cache"(%c, %i) : (!pool, i32) -> !h96
  return
}

// -----

!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!latent_cache = !kv.cache<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
// Rule: an MLA collection has no values.
func.func @rule(%c: !latent, %i: i32) {
  // expected-error @below {{'kv.value_cache' op needs a collection with values: an MLA one has only latent keys (is_mla = true)}}
  %0 = "kv.value_cache"(%c, %i) : (!latent, i32) -> !latent_cache
  return
}

// -----

!h96 = !kv.cache<"paged", bf16, 8 : i64, 96 : i64, false, 16 : i64, none, 1 : i64>
!view = !kv.operand<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: an operand has its cache's parameters.
func.func @rule(%c: !h96) {
  // expected-error @below {{'kv.make_operand' op result must have the cache's parameters !kv.operand<"paged", bf16, 8 : i64, 96 : i64, false, 16 : i64, none, 1 : i64>, got !kv.operand<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
  %0 = "kv.make_operand"(%c) : (!h96) -> !view
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a field has a name that the handle has.
func.func @rule(%c: !cache) {
  // expected-error @below {{'kv.field' op field must be one of base, stride0, num_blocks, capacity, lookup, lookup_stride, lookup_columns, lengths, batch, max_seq_length, max_cache_length, got scales}}
  %0 = "kv.field"(%c) {field = "scales"} : (!cache) -> !llvm.ptr<1>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a field has its own type.
func.func @rule(%c: !cache) {
  // expected-error @below {{'kv.field' op field stride0 must have type i64, got i32}}
  %0 = "kv.field"(%c) {field = "stride0"} : (!cache) -> i32
  return
}

// -----

// Rule: device attributes are those that a program can ask for.
func.func @rule() {
  // expected-error @below {{'kv.device_attribute' op attribute must be one of multiprocessors, shared_bytes, l2_bytes, warp_size, got "color"}}
  %0 = "kv.device_attribute"() {attribute = "color"} : () -> i32
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: lengths are in device memory.
func.func @rule(%c: !cache) {
  // expected-error @below {{'kv.cache_lengths' op result must be !llvm.ptr<1>, got !llvm.ptr}}
  %0 = "kv.cache_lengths"(%c) : (!cache) -> !llvm.ptr
  return
}

// -----

!fa3 = !kv.cache<"fa3", bf16, 8 : i64, 128 : i64, false, 128 : i64, none, 1 : i64>
// Rule: an fa3 cache has no rows.
func.func @rule(%c: !fa3) {
  // expected-error @below {{'kv.num_rows' op needs a paged or continuous cache: an fa3 cache has no rows}}
  %0 = "kv.num_rows"(%c) : (!fa3) -> i32
  return
}

// -----

!fa3 = !kv.cache<"fa3", bf16, 8 : i64, 128 : i64, false, 128 : i64, none, 1 : i64>
// Rule: row_index needs rows.
func.func @rule(%c: !fa3, %i: i32) {
  // expected-error @below {{'kv.row_index' op needs a paged or continuous cache: an fa3 cache has no rows}}
  %0 = "kv.row_index"(%c, %i, %i) : (!fa3, i32, i32) -> i32
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = !kv.rows<64 : i64, 16 : i64>
// Rule: a populated tile and a page divide one another.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.populate' op tile rows and page size must divide one another, got 24 and 16}}
  %0 = "kv.populate"(%c, %i, %i) {tile_rows = 24 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!cache, i32, i32) -> !rows
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = !kv.rows<64 : i64, 16 : i64>
// Rule: a populated tile has rows.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.populate' op tile rows must be positive, got 0}}
  %0 = "kv.populate"(%c, %i, %i) {tile_rows = 0 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!cache, i32, i32) -> !rows
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = !kv.rows<64 : i64, 16 : i64>
// Rule: a populated tile spans at most 16 pages.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.populate' op a tile must span at most 16 pages (the lookup table's padding), got 32}}
  %0 = "kv.populate"(%c, %i, %i) {tile_rows = 512 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!cache, i32, i32) -> !rows
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = !kv.rows<64 : i64, 16 : i64>
// Rule: base_alignment covers whole pages.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.populate' op base alignment must be a multiple of the page size 16 when a tile spans several pages, got 8}}
  %0 = "kv.populate"(%c, %i, %i) {tile_rows = 64 : i64, base_alignment = 8 : i64, pair_cta = false, is_leader = true}
    : (!cache, i32, i32) -> !rows
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = !kv.rows<64 : i64, 16 : i64>
// Rule: base_alignment is positive.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.populate' op base alignment must be positive, got -4}}
  %0 = "kv.populate"(%c, %i, %i) {tile_rows = 64 : i64, base_alignment = -4 : i64, pair_cta = false, is_leader = true}
    : (!cache, i32, i32) -> !rows
  return
}

// -----

!odd = !kv.cache<"paged", i8, 8 : i64, 20 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a CTA of a pair takes half of the pages.
func.func @rule(%c: !odd, %i: i32) {
  // expected-error @below {{'kv.populate' op pair_cta needs one page a tile or an even number, got 3}}
  %0 = "kv.populate"(%c, %i, %i) {tile_rows = 48 : i64, base_alignment = 0 : i64, pair_cta = true, is_leader = true}
    : (!odd, i32, i32) -> !kv.rows<48 : i64, 16 : i64>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a CTA pair shares a tile in halves.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.populate' op pair_cta needs an even number of tile rows, got 1}}
  %0 = "kv.populate"(%c, %i, %i) {tile_rows = 1 : i64, base_alignment = 1 : i64, pair_cta = true, is_leader = true}
    : (!cache, i32, i32) -> !kv.rows<1 : i64, 16 : i64>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = !kv.rows<64 : i64, 16 : i64>
// Rule: populate gives the rows of its tile.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.populate' op result must be !kv.rows<32 : i64, 16 : i64>, got !kv.rows<64 : i64, 16 : i64>}}
  %0 = "kv.populate"(%c, %i, %i) {tile_rows = 32 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true}
    : (!cache, i32, i32) -> !rows
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = !kv.rows<64 : i64, 16 : i64>
// Rule: populate's attributes have their types.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.populate' op tile_rows and base_alignment must be integers and pair_cta a bool}}
  %0 = "kv.populate"(%c, %i, %i) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = 1 : i64, is_leader = true}
    : (!cache, i32, i32) -> !rows
  return
}

// -----

// Rule: get_row takes rows.
func.func @rule(%c: i32) {
  // expected-error @below {{'kv.get_row' op operand must be of type !kv.rows, got i32}}
  %0 = "kv.get_row"(%c, %c) : (i32, i32) -> i32
  return
}

// -----

// Rule: make_rows gives rows.
func.func @rule(%i: i32) {
  // expected-error @below {{'kv.make_rows' op result must be of type !kv.rows, got i32}}
  %0 = "kv.make_rows"(%i) : (i32) -> i32
  return
}

// -----

!rows = !kv.rows<64 : i64, 16 : i64>
// Rule: make_rows takes one row a page.
func.func @rule(%i: i32) {
  // expected-error @below {{'kv.make_rows' op takes 4 rows for !kv.rows<64 : i64, 16 : i64>, got 2}}
  %0 = "kv.make_rows"(%i, %i) : (i32, i32) -> !rows
  return
}

// -----

!region = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: load_pages reads a row of the table.
func.func @rule(%c: !region, %i: i32) {
  // expected-error @below {{'kv.load_pages' op needs a paged cache, whose table has one row per sequence}}
  %0 = "kv.load_pages"(%c, %i, %i) {count = 4 : i64} : (!region, i32, i32) -> vector<4xi32>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: load_pages reads what one vector load can.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.load_pages' op count must be 1, 2, 4 or 8, got 3 : i64}}
  %0 = "kv.load_pages"(%c, %i, %i) {count = 3 : i64} : (!cache, i32, i32) -> vector<3xi32>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: load_pages gives count pages.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.load_pages' op result must be vector<4xi32>, got vector<8xi32>}}
  %0 = "kv.load_pages"(%c, %i, %i) {count = 4 : i64} : (!cache, i32, i32) -> vector<8xi32>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a block has tokens.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.block_ptr' op tile must be a positive integer, got 0 : i64}}
  %0 = "kv.block_ptr"(%c, %i, %i, %i, %i) {tile = 0 : i64} : (!cache, i32, i32, i32, i32) -> !llvm.ptr<1>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a block lies in one page.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.block_ptr' op tile must divide the page size 16, got 12}}
  %0 = "kv.block_ptr"(%c, %i, %i, %i, %i) {tile = 12 : i64} : (!cache, i32, i32, i32, i32) -> !llvm.ptr<1>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a block is in device memory.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.block_ptr' op result must be !llvm.ptr<1>, got !llvm.ptr<3>}}
  %0 = "kv.block_ptr"(%c, %i, %i, %i, %i) {tile = 16 : i64} : (!cache, i32, i32, i32, i32) -> !llvm.ptr<3>
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: only a quantized cache has scales.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.scale_block_ptr' op needs a quantized cache (one with a scale type), got one without scales}}
  %0 = "kv.scale_block_ptr"(%c, %i, %i, %i, %i) : (!cache, i32, i32, i32, i32) -> !llvm.ptr<1>
  return
}

// -----

// Rule: a buffer is a memref.
func.func @rule(%b: i32, %i: i32) {
  // expected-error @below {{'kv.buffer_address' op buffer must be a memref of rank 1, got i32}}
  %0 = "kv.buffer_address"(%b, %i) : (i32, i32) -> !llvm.ptr<1>
  return
}

// -----

// Rule: a buffer has dimensions.
func.func @rule(%b: memref<f32>) {
  // expected-error @below {{'kv.buffer_address' op takes one index per dimension and at least one, got none for memref<f32>}}
  %0 = "kv.buffer_address"(%b) : (memref<f32>) -> !llvm.ptr<1>
  return
}

// -----

// Rule: a buffer takes one index a dimension.
func.func @rule(%b: memref<?x?xf32>, %i: i32) {
  // expected-error @below {{'kv.buffer_address' op buffer must be a memref of rank 1, got memref<?x?xf32>}}
  %0 = "kv.buffer_address"(%b, %i) : (memref<?x?xf32>, i32) -> !llvm.ptr<1>
  return
}

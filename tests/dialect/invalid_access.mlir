// RUN: kv-opt %s --verify-diagnostics

// What the verifiers of accesses and tiles refuse.

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!view = !kv.operand<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!odd = !kv.cache<"paged", i8, 8 : i64, 20 : i64, false, 16 : i64, none, 1 : i64>
!int4 = !kv.cache<"paged", ui4, 8 : i64, 128 : i64, false, 16 : i64, vector<2xf16>, 32 : i64>
!h96 = !kv.cache<"paged", bf16, 8 : i64, 96 : i64, false, 16 : i64, none, 1 : i64>

func.func @load(%c: !cache, %i: i32, %c2: !fp8) {
  // expected-error @below {{'kv.load' op width must be a positive integer, got 0 : i64}}
  "kv.load"(%c, %i, %i, %i, %i) {width = 0 : i64} : (!cache, i32, i32, i32, i32) -> bf16
  // expected-error @below {{'kv.load' op result must have width = 8 lanes, got vector<4xbf16>}}
  "kv.load"(%c, %i, %i, %i, %i) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<4xbf16>
  // expected-error @below {{'kv.load' op result must have width = 8 lanes, got vector<2x4xbf16>}}
  "kv.load"(%c, %i, %i, %i, %i) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<2x4xbf16>
  // expected-error @below {{'kv.load' op width must be at most 128, the extent of the dimension, got 256}}
  "kv.load"(%c, %i, %i, %i, %i) {width = 256 : i64} : (!cache, i32, i32, i32, i32) -> vector<256xbf16>
  // expected-error @below {{'kv.load' op result element must be a float type, got i32}}
  "kv.load"(%c, %i, %i, %i, %i) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xi32>
  // expected-error @below {{'kv.load' op dequantizes, so the result must not have the storage type f8E4M3FN: use kv.load_raw}}
  "kv.load"(%c2, %i, %i, %i, %i) {width = 8 : i64} : (!fp8, i32, i32, i32, i32) -> vector<8xf8E4M3FN>
  // expected-error @below {{'kv.load' op width must divide the granularity 32, so that one scale serves all lanes, got 64}}
  "kv.load"(%c2, %i, %i, %i, %i) {width = 64 : i64} : (!fp8, i32, i32, i32, i32) -> vector<64xf32>
  return
}

func.func @packed(%c: !int4, %i: i32) {
  // expected-error @below {{'kv.load' op width must be even where elements share bytes, got vector<3xf32>}}
  "kv.load"(%c, %i, %i, %i, %i) {width = 3 : i64} : (!int4, i32, i32, i32, i32) -> vector<3xf32>
  // expected-error @below {{'kv.load_raw' op width must be at most 64, the extent of the dimension, got 128}}
  "kv.load_raw"(%c, %i, %i, %i, %i) {width = 128 : i64} : (!int4, i32, i32, i32, i32) -> vector<128xi8>
  // expected-error @below {{'kv.row_index' op takes no cache of u4, of which two elements share a byte, yet}}
  "kv.row_index"(%c, %i, %i) : (!int4, i32, i32) -> i32
  return
}

func.func @load_raw(%c: !cache, %i: i32, %c2: !fp8) {
  // expected-error @below {{'kv.load_raw' op needs a quantized cache (one with a scale type), got one without scales}}
  "kv.load_raw"(%c, %i, %i, %i, %i) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
  // expected-error @below {{'kv.load_raw' op result must have element type f8E4M3FN, got f32}}
  "kv.load_raw"(%c2, %i, %i, %i, %i) {width = 8 : i64} : (!fp8, i32, i32, i32, i32) -> vector<8xf32>
  return
}

func.func @load_scale(%c: !fp8, %i: i32) {
  // expected-error @below {{'kv.load_scale' op width must be at most 4, the extent of the dimension, got 8}}
  "kv.load_scale"(%c, %i, %i, %i, %i) {width = 8 : i64} : (!fp8, i32, i32, i32, i32) -> vector<8xf32>
  // expected-error @below {{'kv.load_scale' op result must have element type f32, got bf16}}
  "kv.load_scale"(%c, %i, %i, %i, %i) {width = 1 : i64} : (!fp8, i32, i32, i32, i32) -> bf16
  return
}

func.func @store(%c: !cache, %i: i32, %x: vector<8xf32>, %x2: vector<256xbf16>, %x3: bf16, %c2: !view) {
  // expected-error @below {{'kv.store' op value must have element type bf16, got f32}}
  "kv.store"(%c, %i, %i, %i, %i, %x) {oob = "drop"} : (!cache, i32, i32, i32, i32, vector<8xf32>) -> ()
  // expected-error @below {{'kv.store' op value must be a scalar or a vector of at most 128 lanes, got vector<256xbf16>}}
  "kv.store"(%c, %i, %i, %i, %i, %x2) {oob = "drop"} : (!cache, i32, i32, i32, i32, vector<256xbf16>) -> ()
  // expected-error @below {{'kv.store' op oob must be one of drop, trap, unchecked, got "ignore"}}
  "kv.store"(%c, %i, %i, %i, %i, %x3) {oob = "ignore"} : (!cache, i32, i32, i32, i32, bf16) -> ()
  // expected-error @below {{'kv.store' op operand must be of type !kv.cache, got !kv.operand<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
  "kv.store"(%c2, %i, %i, %i, %i, %x3) {oob = "drop"} : (!view, i32, i32, i32, i32, bf16) -> ()
  return
}

func.func @store_scale(%c: !cache, %i: i32, %x: f32, %c2: !fp8, %x2: bf16, %x3: vector<8xf32>) {
  // expected-error @below {{'kv.store_scale' op needs a quantized cache (one with a scale type), got one without scales}}
  "kv.store_scale"(%c, %i, %i, %i, %i, %x) {oob = "drop"} : (!cache, i32, i32, i32, i32, f32) -> ()
  // expected-error @below {{'kv.store_scale' op value must have element type f32, got bf16}}
  "kv.store_scale"(%c2, %i, %i, %i, %i, %x2) {oob = "drop"} : (!fp8, i32, i32, i32, i32, bf16) -> ()
  // expected-error @below {{'kv.store_scale' op value must be a scalar or a vector of at most 4 lanes, got vector<8xf32>}}
  "kv.store_scale"(%c2, %i, %i, %i, %i, %x3) {oob = "drop"} : (!fp8, i32, i32, i32, i32, vector<8xf32>) -> ()
  return
}

func.func @cast(%x: vector<8xf32>, %x2: index) {
  // expected-error @below {{'kv.cast' op must keep the number of lanes, got 8 and 4}}
  "kv.cast"(%x) : (vector<8xf32>) -> vector<4xf8E4M3FN>
  // expected-error @below {{'kv.cast' op must convert between element types of the dialect, got index}}
  "kv.cast"(%x2) : (index) -> f8E4M3FN
  return
}

func.func @alloc_shared() {
  // expected-error @below {{'kv.alloc_shared' op bytes must be an integer in [1, 1048576], got 0 : i64}}
  "kv.alloc_shared"() {bytes = 0 : i64, alignment = 16 : i64} : () -> !llvm.ptr<3>
  // expected-error @below {{'kv.alloc_shared' op bytes must be an integer in [1, 1048576], got 9223372036854775807 : i64}}
  "kv.alloc_shared"() {bytes = 9223372036854775807 : i64, alignment = 16 : i64} : () -> !llvm.ptr<3>
  // expected-error @below {{'kv.alloc_shared' op alignment must be a power of two up to 1048576, got 24 : i64}}
  "kv.alloc_shared"() {bytes = 16 : i64, alignment = 24 : i64} : () -> !llvm.ptr<3>
  // expected-error @below {{'kv.alloc_shared' op result must be !llvm.ptr<3>, got !llvm.ptr<1>}}
  "kv.alloc_shared"() {bytes = 16 : i64, alignment = 16 : i64} : () -> !llvm.ptr<1>
  return
}

func.func @load_tile(%c: !odd, %i: i32, %p: !llvm.ptr<3>, %c2: !cache, %c3: !h96, %p2: !llvm.ptr<1>) {
  // expected-error @below {{'kv.load_tile' op needs rows of a multiple of 16 bytes, got 20}}
  "kv.load_tile"(%c, %i, %i, %i, %i, %p, %i)
    {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 0 : i64, mode = "async"}
    : (!odd, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  // expected-error @below {{'kv.load_tile' op tile_rows and num_threads must be positive integers, got 64 : i64 and 0 : i64}}
  "kv.load_tile"(%c2, %i, %i, %i, %i, %p, %i)
    {tile_rows = 64 : i64, num_threads = 0 : i64, pitch = 256 : i64, swizzle = 0 : i64, mode = "async"}
    : (!cache, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  // expected-error @below {{'kv.load_tile' op a tile must have at most 262144 bytes and 1024 threads, got 4294967296 rows of 256 bytes and 128 threads}}
  "kv.load_tile"(%c2, %i, %i, %i, %i, %p, %i)
    {tile_rows = 4294967296 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 0 : i64, mode = "async"}
    : (!cache, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  // expected-error @below {{'kv.load_tile' op a thread must copy at most 256 times 16 bytes, as its copies are unrolled, got 1024: 64 rows of 256 bytes over 1 threads}}
  "kv.load_tile"(%c2, %i, %i, %i, %i, %p, %i)
    {tile_rows = 64 : i64, num_threads = 1 : i64, pitch = 256 : i64, swizzle = 0 : i64, mode = "async"}
    : (!cache, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  // expected-error @below {{'kv.load_tile' op tile_rows and the page size must divide one another, got 24 and 16}}
  "kv.load_tile"(%c2, %i, %i, %i, %i, %p, %i)
    {tile_rows = 24 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 0 : i64, mode = "async"}
    : (!cache, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  // expected-error @below {{'kv.load_tile' op pitch must be a multiple of 16 of at least the row's 256 bytes, or 128 with swizzle 128, got 128 : i64}}
  "kv.load_tile"(%c2, %i, %i, %i, %i, %p, %i)
    {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 128 : i64, swizzle = 0 : i64, mode = "async"}
    : (!cache, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  // expected-error @below {{'kv.load_tile' op swizzle must be 0 or 128, got 64 : i64}}
  "kv.load_tile"(%c2, %i, %i, %i, %i, %p, %i)
    {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 64 : i64, mode = "async"}
    : (!cache, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  // expected-error @below {{'kv.load_tile' op swizzle 128 needs rows and a pitch of a multiple of 128 bytes, got 192 and 192}}
  "kv.load_tile"(%c3, %i, %i, %i, %i, %p, %i)
    {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 192 : i64, swizzle = 128 : i64, mode = "async"}
    : (!h96, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  // expected-error @below {{'kv.load_tile' op the tile must be in shared memory (!llvm.ptr<3>), got !llvm.ptr<1>}}
  "kv.load_tile"(%c2, %i, %i, %i, %i, %p2, %i)
    {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 0 : i64, mode = "async"}
    : (!cache, i32, i32, i32, i32, !llvm.ptr<1>, i32) -> ()
  // expected-error @below {{'kv.load_tile' op mode must be one of async, sync, got "later"}}
  "kv.load_tile"(%c2, %i, %i, %i, %i, %p, %i)
    {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 0 : i64, mode = "later"}
    : (!cache, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  return
}

func.func @store_tile(%c: !cache, %i: i32, %p: !llvm.ptr<3>) {
  // expected-error @below {{'kv.store_tile' op mode must be one of sync, got "async"}}
  "kv.store_tile"(%c, %i, %i, %i, %i, %p, %i)
    {tile_rows = 64 : i64, num_threads = 128 : i64, pitch = 256 : i64, swizzle = 0 : i64, mode = "async"}
    : (!cache, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
  return
}

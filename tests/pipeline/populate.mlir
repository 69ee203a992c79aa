// RUN: kv-opt %s --emit=ptx --target=sm_90a | FileCheck %s
// RUN: kv-opt %s --emit=ptx --target=sm_100a | FileCheck %s
// RUN: kv-opt %s --emit=ptx --target=sm_90a --disable=vectorize-kv-lookups | FileCheck %s --check-prefix=SCALAR

// Loads of the lookup table by tile rows BN, page size P and the promised alignment of the base: n = BN / P entries in
// chunks of min(lowbit(n), lowbit(alignment / P), 8), one load each; 8 entries are two loads of 16 bytes.

!p16 = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!flat = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!out = memref<?xi32, strided<[1]>, 1>

gpu.module @kernels {
  // BN = 192, P = 16, alignment 192: 12 pages, chunk 4: 3 loads.
  // CHECK-LABEL: .visible .entry bn192_p16_a192(
  // CHECK-NOT:     ld.global
  // CHECK-COUNT-3: ld.global.nc.v4.b32
  // CHECK-NOT:     ld.global
  // CHECK:         ret;
  // SCALAR-LABEL: .visible .entry bn192_p16_a192(
  // SCALAR-NOT:    ld.global.nc.v
  // SCALAR:        ret;
  gpu.func @bn192_p16_a192(%c: !p16, %b: i32, %tile: i32, %x: !out) kernel {
    %n = arith.constant 192 : i32
    %base = arith.muli %tile, %n : i32
    %r = "kv.populate"(%c, %b, %base) {tile_rows = 192 : i64, base_alignment = 192 : i64, pair_cta = false, is_leader = true} : (!p16, i32, i32) -> !kv.rows<192 : i64, 16 : i64>
    %ti = gpu.thread_id x
    %t = arith.index_cast %ti : index to i32
    %row = "kv.get_row"(%r, %t) : (!kv.rows<192 : i64, 16 : i64>, i32) -> i32
    memref.store %row, %x[%ti] : !out
    gpu.return
  }

  // BN = 256, P = 16, alignment 256: 16 pages, chunk 8: 2 loads of two halves.
  // CHECK-LABEL: .visible .entry bn256_p16_a256(
  // CHECK-NOT:     ld.global
  // CHECK-COUNT-4: ld.global.nc.v4.b32
  // CHECK-NOT:     ld.global
  // CHECK:         ret;
  // SCALAR-LABEL: .visible .entry bn256_p16_a256(
  // SCALAR-NOT:    ld.global.nc.v
  // SCALAR:        ret;
  gpu.func @bn256_p16_a256(%c: !p16, %b: i32, %tile: i32, %x: !out) kernel {
    %n = arith.constant 256 : i32
    %base = arith.muli %tile, %n : i32
    %r = "kv.populate"(%c, %b, %base) {tile_rows = 256 : i64, base_alignment = 256 : i64, pair_cta = false, is_leader = true} : (!p16, i32, i32) -> !kv.rows<256 : i64, 16 : i64>
    %ti = gpu.thread_id x
    %t = arith.index_cast %ti : index to i32
    %row = "kv.get_row"(%r, %t) : (!kv.rows<256 : i64, 16 : i64>, i32) -> i32
    memref.store %row, %x[%ti] : !out
    gpu.return
  }

  // A continuous cache has one entry a sequence.
  // CHECK-LABEL: .visible .entry region(
  // CHECK-NOT:     ld.global
  // CHECK:         ld.global.nc.b32
  // CHECK-NOT:     ld.global
  // CHECK:         ret;
  gpu.func @region(%c: !flat, %b: i32, %base: i32, %x: !out) kernel {
    %ti = gpu.thread_id x
    %t = arith.index_cast %ti : index to i32
    %r = "kv.populate"(%c, %b, %base) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true} : (!flat, i32, i32) -> !kv.rows<64 : i64, 0 : i64>
    %row = "kv.get_row"(%r, %t) : (!kv.rows<64 : i64, 0 : i64>, i32) -> i32
    memref.store %row, %x[%ti] : !out
    gpu.return
  }
}

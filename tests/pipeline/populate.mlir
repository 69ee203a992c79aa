// RUN: kv-opt %s --emit=ptx --target=sm_90a | FileCheck %s
// RUN: kv-opt %s --emit=ptx --target=sm_100a | FileCheck %s
// RUN: kv-opt %s --emit=ptx --target=sm_90a --disable=vectorize-kv-lookups | FileCheck %s --check-prefix=SCALAR

// Loads of the lookup table by tile rows BN, page size P and the promised alignment of the base: n = BN / P entries in
// chunks of min(lowbit(n), lowbit(alignment / P), 8), one load each; 8 entries are two loads of 16 bytes.

!p16 = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!p128 = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 128 : i64, none, 1 : i64>
!p256 = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 256 : i64, none, 1 : i64>
!flat = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!out = memref<?xi32, strided<[1]>, 1>

gpu.module @kernels {
  // BN = 128, P = 128, alignment 128: 1 page, a scalar load.
  // CHECK-LABEL: .visible .entry bn128_p128_a128(
  // CHECK-NOT:     ld.global
  // CHECK-COUNT-1: ld.global.nc.b32
  // CHECK-NOT:     ld.global
  // CHECK:         ret;
  // SCALAR-LABEL: .visible .entry bn128_p128_a128(
  // SCALAR-NOT:    ld.global.nc.v
  // SCALAR:        ret;
  gpu.func @bn128_p128_a128(%c: !p128, %b: i32, %tile: i32, %x: !out) kernel {
    %n = arith.constant 128 : i32
    %base = arith.muli %tile, %n : i32
    %r = "kv.populate"(%c, %b, %base) {tile_rows = 128 : i64, base_alignment = 128 : i64, pair_cta = false, is_leader = true} : (!p128, i32, i32) -> !kv.rows<128 : i64, 128 : i64>
    %o0 = arith.constant 0 : i32
    %r0 = "kv.get_row"(%r, %o0) : (!kv.rows<128 : i64, 128 : i64>, i32) -> i32
    %x0 = arith.constant 0 : index
    memref.store %r0, %x[%x0] : !out
    gpu.return
  }

  // BN = 256, P = 128, alignment 256: 2 pages, chunk 2: 1 load.
  // CHECK-LABEL: .visible .entry bn256_p128_a256(
  // CHECK-NOT:     ld.global
  // CHECK-COUNT-1: ld.global.nc.v2.b32
  // CHECK-NOT:     ld.global
  // CHECK:         ret;
  // SCALAR-LABEL: .visible .entry bn256_p128_a256(
  // SCALAR-NOT:    ld.global.nc.v
  // SCALAR:        ret;
  gpu.func @bn256_p128_a256(%c: !p128, %b: i32, %tile: i32, %x: !out) kernel {
    %n = arith.constant 256 : i32
    %base = arith.muli %tile, %n : i32
    %r = "kv.populate"(%c, %b, %base) {tile_rows = 256 : i64, base_alignment = 256 : i64, pair_cta = false, is_leader = true} : (!p128, i32, i32) -> !kv.rows<256 : i64, 128 : i64>
    %o0 = arith.constant 0 : i32
    %r0 = "kv.get_row"(%r, %o0) : (!kv.rows<256 : i64, 128 : i64>, i32) -> i32
    %x0 = arith.constant 0 : index
    memref.store %r0, %x[%x0] : !out
    %o1 = arith.constant 128 : i32
    %r1 = "kv.get_row"(%r, %o1) : (!kv.rows<256 : i64, 128 : i64>, i32) -> i32
    %x1 = arith.constant 1 : index
    memref.store %r1, %x[%x1] : !out
    gpu.return
  }

  // BN = 256, P = 128, alignment 128: 2 pages, chunk 1: 2 loads.
  // CHECK-LABEL: .visible .entry bn256_p128_a128(
  // CHECK-NOT:     ld.global
  // CHECK-COUNT-2: ld.global.nc.b32
  // CHECK-NOT:     ld.global
  // CHECK:         ret;
  // SCALAR-LABEL: .visible .entry bn256_p128_a128(
  // SCALAR-NOT:    ld.global.nc.v
  // SCALAR:        ret;
  gpu.func @bn256_p128_a128(%c: !p128, %b: i32, %tile: i32, %x: !out) kernel {
    %n = arith.constant 128 : i32
    %base = arith.muli %tile, %n : i32
    %r = "kv.populate"(%c, %b, %base) {tile_rows = 256 : i64, base_alignment = 128 : i64, pair_cta = false, is_leader = true} : (!p128, i32, i32) -> !kv.rows<256 : i64, 128 : i64>
    %o0 = arith.constant 0 : i32
    %r0 = "kv.get_row"(%r, %o0) : (!kv.rows<256 : i64, 128 : i64>, i32) -> i32
    %x0 = arith.constant 0 : index
    memref.store %r0, %x[%x0] : !out
    %o1 = arith.constant 128 : i32
    %r1 = "kv.get_row"(%r, %o1) : (!kv.rows<256 : i64, 128 : i64>, i32) -> i32
    %x1 = arith.constant 1 : index
    memref.store %r1, %x[%x1] : !out
    gpu.return
  }

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
    %o0 = arith.constant 0 : i32
    %r0 = "kv.get_row"(%r, %o0) : (!kv.rows<192 : i64, 16 : i64>, i32) -> i32
    %x0 = arith.constant 0 : index
    memref.store %r0, %x[%x0] : !out
    %o1 = arith.constant 16 : i32
    %r1 = "kv.get_row"(%r, %o1) : (!kv.rows<192 : i64, 16 : i64>, i32) -> i32
    %x1 = arith.constant 1 : index
    memref.store %r1, %x[%x1] : !out
    %o2 = arith.constant 32 : i32
    %r2 = "kv.get_row"(%r, %o2) : (!kv.rows<192 : i64, 16 : i64>, i32) -> i32
    %x2 = arith.constant 2 : index
    memref.store %r2, %x[%x2] : !out
    %o3 = arith.constant 48 : i32
    %r3 = "kv.get_row"(%r, %o3) : (!kv.rows<192 : i64, 16 : i64>, i32) -> i32
    %x3 = arith.constant 3 : index
    memref.store %r3, %x[%x3] : !out
    %o4 = arith.constant 64 : i32
    %r4 = "kv.get_row"(%r, %o4) : (!kv.rows<192 : i64, 16 : i64>, i32) -> i32
    %x4 = arith.constant 4 : index
    memref.store %r4, %x[%x4] : !out
    %o5 = arith.constant 80 : i32
    %r5 = "kv.get_row"(%r, %o5) : (!kv.rows<192 : i64, 16 : i64>, i32) -> i32
    %x5 = arith.constant 5 : index
    memref.store %r5, %x[%x5] : !out
    %o6 = arith.constant 96 : i32
    %r6 = "kv.get_row"(%r, %o6) : (!kv.rows<192 : i64, 16 : i64>, i32) -> i32
    %x6 = arith.constant 6 : index
    memref.store %r6, %x[%x6] : !out
    %o7 = arith.constant 112 : i32
    %r7 = "kv.get_row"(%r, %o7) : (!kv.rows<192 : i64, 16 : i64>, i32) -> i32
    %x7 = arith.constant 7 : index
    memref.store %r7, %x[%x7] : !out
    %o8 = arith.constant 128 : i32
    %r8 = "kv.get_row"(%r, %o8) : (!kv.rows<192 : i64, 16 : i64>, i32) -> i32
    %x8 = arith.constant 8 : index
    memref.store %r8, %x[%x8] : !out
    %o9 = arith.constant 144 : i32
    %r9 = "kv.get_row"(%r, %o9) : (!kv.rows<192 : i64, 16 : i64>, i32) -> i32
    %x9 = arith.constant 9 : index
    memref.store %r9, %x[%x9] : !out
    %o10 = arith.constant 160 : i32
    %r10 = "kv.get_row"(%r, %o10) : (!kv.rows<192 : i64, 16 : i64>, i32) -> i32
    %x10 = arith.constant 10 : index
    memref.store %r10, %x[%x10] : !out
    %o11 = arith.constant 176 : i32
    %r11 = "kv.get_row"(%r, %o11) : (!kv.rows<192 : i64, 16 : i64>, i32) -> i32
    %x11 = arith.constant 11 : index
    memref.store %r11, %x[%x11] : !out
    gpu.return
  }

  // BN = 128, P = 16, alignment 128: 8 pages, chunk 8: 1 load of two halves.
  // CHECK-LABEL: .visible .entry bn128_p16_a128(
  // CHECK-NOT:     ld.global
  // CHECK-COUNT-2: ld.global.nc.v4.b32
  // CHECK-NOT:     ld.global
  // CHECK:         ret;
  // SCALAR-LABEL: .visible .entry bn128_p16_a128(
  // SCALAR-NOT:    ld.global.nc.v
  // SCALAR:        ret;
  gpu.func @bn128_p16_a128(%c: !p16, %b: i32, %tile: i32, %x: !out) kernel {
    %n = arith.constant 128 : i32
    %base = arith.muli %tile, %n : i32
    %r = "kv.populate"(%c, %b, %base) {tile_rows = 128 : i64, base_alignment = 128 : i64, pair_cta = false, is_leader = true} : (!p16, i32, i32) -> !kv.rows<128 : i64, 16 : i64>
    %o0 = arith.constant 0 : i32
    %r0 = "kv.get_row"(%r, %o0) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    %x0 = arith.constant 0 : index
    memref.store %r0, %x[%x0] : !out
    %o1 = arith.constant 16 : i32
    %r1 = "kv.get_row"(%r, %o1) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    %x1 = arith.constant 1 : index
    memref.store %r1, %x[%x1] : !out
    %o2 = arith.constant 32 : i32
    %r2 = "kv.get_row"(%r, %o2) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    %x2 = arith.constant 2 : index
    memref.store %r2, %x[%x2] : !out
    %o3 = arith.constant 48 : i32
    %r3 = "kv.get_row"(%r, %o3) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    %x3 = arith.constant 3 : index
    memref.store %r3, %x[%x3] : !out
    %o4 = arith.constant 64 : i32
    %r4 = "kv.get_row"(%r, %o4) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    %x4 = arith.constant 4 : index
    memref.store %r4, %x[%x4] : !out
    %o5 = arith.constant 80 : i32
    %r5 = "kv.get_row"(%r, %o5) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    %x5 = arith.constant 5 : index
    memref.store %r5, %x[%x5] : !out
    %o6 = arith.constant 96 : i32
    %r6 = "kv.get_row"(%r, %o6) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    %x6 = arith.constant 6 : index
    memref.store %r6, %x[%x6] : !out
    %o7 = arith.constant 112 : i32
    %r7 = "kv.get_row"(%r, %o7) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    %x7 = arith.constant 7 : index
    memref.store %r7, %x[%x7] : !out
    gpu.return
  }

  // BN = 128, P = 16, alignment 16: 8 pages, chunk 1: 8 loads.
  // CHECK-LABEL: .visible .entry bn128_p16_a16(
  // CHECK-NOT:     ld.global
  // CHECK-COUNT-8: ld.global.nc.b32
  // CHECK-NOT:     ld.global
  // CHECK:         ret;
  // SCALAR-LABEL: .visible .entry bn128_p16_a16(
  // SCALAR-NOT:    ld.global.nc.v
  // SCALAR:        ret;
  gpu.func @bn128_p16_a16(%c: !p16, %b: i32, %tile: i32, %x: !out) kernel {
    %n = arith.constant 16 : i32
    %base = arith.muli %tile, %n : i32
    %r = "kv.populate"(%c, %b, %base) {tile_rows = 128 : i64, base_alignment = 16 : i64, pair_cta = false, is_leader = true} : (!p16, i32, i32) -> !kv.rows<128 : i64, 16 : i64>
    %o0 = arith.constant 0 : i32
    %r0 = "kv.get_row"(%r, %o0) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    %x0 = arith.constant 0 : index
    memref.store %r0, %x[%x0] : !out
    %o1 = arith.constant 16 : i32
    %r1 = "kv.get_row"(%r, %o1) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    %x1 = arith.constant 1 : index
    memref.store %r1, %x[%x1] : !out
    %o2 = arith.constant 32 : i32
    %r2 = "kv.get_row"(%r, %o2) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    %x2 = arith.constant 2 : index
    memref.store %r2, %x[%x2] : !out
    %o3 = arith.constant 48 : i32
    %r3 = "kv.get_row"(%r, %o3) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    %x3 = arith.constant 3 : index
    memref.store %r3, %x[%x3] : !out
    %o4 = arith.constant 64 : i32
    %r4 = "kv.get_row"(%r, %o4) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    %x4 = arith.constant 4 : index
    memref.store %r4, %x[%x4] : !out
    %o5 = arith.constant 80 : i32
    %r5 = "kv.get_row"(%r, %o5) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    %x5 = arith.constant 5 : index
    memref.store %r5, %x[%x5] : !out
    %o6 = arith.constant 96 : i32
    %r6 = "kv.get_row"(%r, %o6) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    %x6 = arith.constant 6 : index
    memref.store %r6, %x[%x6] : !out
    %o7 = arith.constant 112 : i32
    %r7 = "kv.get_row"(%r, %o7) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    %x7 = arith.constant 7 : index
    memref.store %r7, %x[%x7] : !out
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
    %o0 = arith.constant 0 : i32
    %r0 = "kv.get_row"(%r, %o0) : (!kv.rows<256 : i64, 16 : i64>, i32) -> i32
    %x0 = arith.constant 0 : index
    memref.store %r0, %x[%x0] : !out
    %o1 = arith.constant 16 : i32
    %r1 = "kv.get_row"(%r, %o1) : (!kv.rows<256 : i64, 16 : i64>, i32) -> i32
    %x1 = arith.constant 1 : index
    memref.store %r1, %x[%x1] : !out
    %o2 = arith.constant 32 : i32
    %r2 = "kv.get_row"(%r, %o2) : (!kv.rows<256 : i64, 16 : i64>, i32) -> i32
    %x2 = arith.constant 2 : index
    memref.store %r2, %x[%x2] : !out
    %o3 = arith.constant 48 : i32
    %r3 = "kv.get_row"(%r, %o3) : (!kv.rows<256 : i64, 16 : i64>, i32) -> i32
    %x3 = arith.constant 3 : index
    memref.store %r3, %x[%x3] : !out
    %o4 = arith.constant 64 : i32
    %r4 = "kv.get_row"(%r, %o4) : (!kv.rows<256 : i64, 16 : i64>, i32) -> i32
    %x4 = arith.constant 4 : index
    memref.store %r4, %x[%x4] : !out
    %o5 = arith.constant 80 : i32
    %r5 = "kv.get_row"(%r, %o5) : (!kv.rows<256 : i64, 16 : i64>, i32) -> i32
    %x5 = arith.constant 5 : index
    memref.store %r5, %x[%x5] : !out
    %o6 = arith.constant 96 : i32
    %r6 = "kv.get_row"(%r, %o6) : (!kv.rows<256 : i64, 16 : i64>, i32) -> i32
    %x6 = arith.constant 6 : index
    memref.store %r6, %x[%x6] : !out
    %o7 = arith.constant 112 : i32
    %r7 = "kv.get_row"(%r, %o7) : (!kv.rows<256 : i64, 16 : i64>, i32) -> i32
    %x7 = arith.constant 7 : index
    memref.store %r7, %x[%x7] : !out
    %o8 = arith.constant 128 : i32
    %r8 = "kv.get_row"(%r, %o8) : (!kv.rows<256 : i64, 16 : i64>, i32) -> i32
    %x8 = arith.constant 8 : index
    memref.store %r8, %x[%x8] : !out
    %o9 = arith.constant 144 : i32
    %r9 = "kv.get_row"(%r, %o9) : (!kv.rows<256 : i64, 16 : i64>, i32) -> i32
    %x9 = arith.constant 9 : index
    memref.store %r9, %x[%x9] : !out
    %o10 = arith.constant 160 : i32
    %r10 = "kv.get_row"(%r, %o10) : (!kv.rows<256 : i64, 16 : i64>, i32) -> i32
    %x10 = arith.constant 10 : index
    memref.store %r10, %x[%x10] : !out
    %o11 = arith.constant 176 : i32
    %r11 = "kv.get_row"(%r, %o11) : (!kv.rows<256 : i64, 16 : i64>, i32) -> i32
    %x11 = arith.constant 11 : index
    memref.store %r11, %x[%x11] : !out
    %o12 = arith.constant 192 : i32
    %r12 = "kv.get_row"(%r, %o12) : (!kv.rows<256 : i64, 16 : i64>, i32) -> i32
    %x12 = arith.constant 12 : index
    memref.store %r12, %x[%x12] : !out
    %o13 = arith.constant 208 : i32
    %r13 = "kv.get_row"(%r, %o13) : (!kv.rows<256 : i64, 16 : i64>, i32) -> i32
    %x13 = arith.constant 13 : index
    memref.store %r13, %x[%x13] : !out
    %o14 = arith.constant 224 : i32
    %r14 = "kv.get_row"(%r, %o14) : (!kv.rows<256 : i64, 16 : i64>, i32) -> i32
    %x14 = arith.constant 14 : index
    memref.store %r14, %x[%x14] : !out
    %o15 = arith.constant 240 : i32
    %r15 = "kv.get_row"(%r, %o15) : (!kv.rows<256 : i64, 16 : i64>, i32) -> i32
    %x15 = arith.constant 15 : index
    memref.store %r15, %x[%x15] : !out
    gpu.return
  }

  // BN = 64, P = 256, alignment 64: 1 page, a scalar load.
  // CHECK-LABEL: .visible .entry bn64_p256_a64(
  // CHECK-NOT:     ld.global
  // CHECK-COUNT-1: ld.global.nc.b32
  // CHECK-NOT:     ld.global
  // CHECK:         ret;
  // SCALAR-LABEL: .visible .entry bn64_p256_a64(
  // SCALAR-NOT:    ld.global.nc.v
  // SCALAR:        ret;
  gpu.func @bn64_p256_a64(%c: !p256, %b: i32, %tile: i32, %x: !out) kernel {
    %n = arith.constant 64 : i32
    %base = arith.muli %tile, %n : i32
    %r = "kv.populate"(%c, %b, %base) {tile_rows = 64 : i64, base_alignment = 64 : i64, pair_cta = false, is_leader = true} : (!p256, i32, i32) -> !kv.rows<64 : i64, 256 : i64>
    %o0 = arith.constant 0 : i32
    %r0 = "kv.get_row"(%r, %o0) : (!kv.rows<64 : i64, 256 : i64>, i32) -> i32
    %x0 = arith.constant 0 : index
    memref.store %r0, %x[%x0] : !out
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

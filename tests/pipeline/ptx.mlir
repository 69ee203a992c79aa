// RUN: kv-opt %s --emit=ptx --target=sm_90a | FileCheck %s
// RUN: kv-opt %s --emit=ptx --target=sm_80 | FileCheck %s --check-prefixes=CHECK,SM80
// RUN: kv-opt %s --emit=ptx --target=sm_90a --disable=plan-kv-access | FileCheck %s --check-prefix=UNPLANNED

// What the passes are for, seen in the PTX: 16-byte accesses, the read-only path, look-ups by vector.

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!quant = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 128 : i64>

// SM80: .version 7.0
// SM80: .target sm_80
gpu.module @kernels {
  // CHECK-LABEL: .visible .entry copy_out(
  // CHECK:         ld.global.nc.v4.b32
  // CHECK:         st.global.v4.b32
  // UNPLANNED-LABEL: .visible .entry copy_out(
  // UNPLANNED-NOT: ld.global.nc.v4
  // UNPLANNED:     ret;
  gpu.func @copy_out(%c: !cache, %x: memref<?xbf16, strided<[1]>, 1>) kernel {
    %bi = gpu.block_id x
    %ti = gpu.thread_id x
    %b = arith.index_cast %bi : index to i32
    %t = arith.index_cast %ti : index to i32
    %c0 = arith.constant 0 : i32
    %v = "kv.load"(%c, %b, %c0, %t, %c0) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
    %i = arith.constant 0 : index
    vector.store %v, %x[%i] {alignment = 16 : i64} : memref<?xbf16, strided<[1]>, 1>, vector<8xbf16>
    gpu.return
  }

  // Eight pages of a tile: two loads of four entries.
  // CHECK-LABEL: .visible .entry rows(
  // CHECK-COUNT-2: ld.global.nc.v4.b32
  // CHECK:         ret;
  gpu.func @rows(%c: !cache, %x: memref<?xi32, strided<[1]>, 1>) kernel {
    %bi = gpu.block_id x
    %b = arith.index_cast %bi : index to i32
    %ti = gpu.thread_id x
    %t = arith.index_cast %ti : index to i32
    %c0 = arith.constant 0 : i32
    %r = "kv.populate"(%c, %b, %c0) {tile_rows = 128 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true} : (!cache, i32, i32) -> !kv.rows<128 : i64, 16 : i64>
    %row = "kv.get_row"(%r, %t) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    memref.store %row, %x[%ti] : memref<?xi32, strided<[1]>, 1>
    gpu.return
  }
}

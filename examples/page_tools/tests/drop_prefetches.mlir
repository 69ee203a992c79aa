// RUN: kv-opt %s --drop-prefetches | FileCheck %s
// RUN: kv-opt %s --drop-prefetches --check-semantics-of=drop-prefetches --target=sm_90a --grid=2 --block=32 --arg=sums=2 --lengths=edges -o %t

// The first line says what becomes of the IR, the second that a kernel with it still computes what it did.

!cache = !kv.cache<"paged", f32, 1 : i64, 8 : i64, false, 16 : i64, none, 1 : i64>

gpu.module @kernels {
  // CHECK-LABEL: gpu.func @sum
  // CHECK:         scf.for
  // CHECK-NOT:       kv.prefetch_page
  // CHECK:           "kv.load"
  gpu.func @sum(%cache: !cache, %sums: memref<?xf32>) kernel attributes {
      kv.args = [{name = "cache", kind = "cache"}, {name = "sums", kind = "buffer", dtype = "f32"}]} {
    %block = gpu.block_id x
    %b = arith.index_cast %block : index to i32
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c16 = arith.constant 16 : i32
    %zero = arith.constant 0.0 : f32
    %length = "kv.cache_length"(%cache, %b) : (!cache, i32) -> i32
    %sum = scf.for %t = %c0 to %length step %c1 iter_args(%so_far = %zero) -> (f32) : i32 {
      %ahead = arith.addi %t, %c16 : i32
      "kv.prefetch_page"(cache = %cache, batch = %b, token = %ahead, line = %c0) : (!cache, i32, i32, i32) -> ()
      %x = "kv.load"(%cache, %b, %c0, %t, %c0) {width = 1 : i64} : (!cache, i32, i32, i32, i32) -> f32
      %more = arith.addf %so_far, %x : f32
      scf.yield %more : f32
    }
    memref.store %sum, %sums[%block] : memref<?xf32>
    gpu.return
  }
}

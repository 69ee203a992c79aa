// RUN: kv-opt %s --lower-kv-tiles | FileCheck %s
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_80 --stop-after=lower-kv-tiles --check-semantics-of=lower-kv-tiles --lengths=edges -o /dev/null %}

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!single = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 1 : i64, none, 1 : i64>

gpu.module @kernels {
  // One page, one look-up, one address; the copies differ by constants. A partial tile asks for zeros by size.
  // CHECK-LABEL: gpu.func @one_page
  // CHECK:         scf.if
  // CHECK:           "kv.page"
  // CHECK:           "kv.block_ptr"
  // CHECK-NOT:       kv.page
  // CHECK:           llvm.getelementptr %{{.*}}[4096] : (!llvm.ptr<1>)
  // CHECK:           llvm.getelementptr %{{.*}}[28672] : (!llvm.ptr<1>)
  // CHECK:         } else {
  // CHECK:           arith.select %{{.*}}, %c16_i32
  // CHECK:           nvvm.cp.async.shared.global {{.*}}, 16, cache = cg, %{{.*}} :
  gpu.func @one_page(%c: !cache, %b: i32, %base: i32, %valid: i32, %lane: i32, %dst: !llvm.ptr<3>) kernel {
    "kv.load_tile"(%c, %b, %b, %base, %valid, %dst, %lane) {tile_rows = 16 : i64, num_threads = 32 : i64, pitch = 256 : i64, swizzle = 128 : i64, mode = "async"} : (!cache, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
    gpu.return
  }

  // With a pitch of 128, rows of 256 bytes are two panels: chunk 8 of a row lies 16 rows of 128 bytes after chunk 0.
  // CHECK-LABEL: gpu.func @panels
  // CHECK:         %[[ROW:.*]] = arith.shrui %[[LANE:.*]], %c4_i32
  // CHECK:         %[[CHUNK:.*]] = arith.andi %[[LANE]], %c15_i32
  // CHECK:         %[[PANEL:.*]] = arith.shrui %[[CHUNK]], %c3_i32
  // CHECK:         %[[IN:.*]] = arith.andi %[[CHUNK]], %c7_i32
  // CHECK:         arith.xori %[[IN]]
  // CHECK:         arith.shli %[[PANEL]], %c11_i32
  // CHECK:         arith.shli %[[ROW]], %c7_i32
  gpu.func @panels(%c: !cache, %b: i32, %base: i32, %valid: i32, %lane: i32, %dst: !llvm.ptr<3>) kernel {
    "kv.load_tile"(%c, %b, %b, %base, %valid, %dst, %lane) {tile_rows = 16 : i64, num_threads = 32 : i64, pitch = 128 : i64, swizzle = 128 : i64, mode = "async"} : (!cache, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
    gpu.return
  }

  // Every row its own page: a look-up for each copy.
  // CHECK-LABEL: gpu.func @page_of_one
  // CHECK-COUNT-8: "kv.page"
  // CHECK:         } else {
  gpu.func @page_of_one(%c: !single, %b: i32, %base: i32, %valid: i32, %lane: i32, %dst: !llvm.ptr<3>) kernel {
    "kv.load_tile"(%c, %b, %b, %base, %valid, %dst, %lane) {tile_rows = 16 : i64, num_threads = 32 : i64, pitch = 256 : i64, swizzle = 0 : i64, mode = "async"} : (!single, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
    gpu.return
  }

  // A store goes to tokens that exist and pages of the pool.
  // CHECK-LABEL: gpu.func @store
  // CHECK:         "kv.raw_page"
  // CHECK:         arith.cmpi ult
  // CHECK:         scf.if
  // CHECK:           llvm.store
  gpu.func @store(%c: !cache, %b: i32, %base: i32, %valid: i32, %lane: i32, %src: !llvm.ptr<3>) kernel {
    "kv.store_tile"(%c, %b, %b, %base, %valid, %src, %lane) {tile_rows = 16 : i64, num_threads = 32 : i64, pitch = 256 : i64, swizzle = 0 : i64, mode = "sync"} : (!cache, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
    gpu.return
  }
}

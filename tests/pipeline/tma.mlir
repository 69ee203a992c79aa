// RUN: kv-opt %s --emit=ptx --target=sm_90a | FileCheck %s --check-prefixes=CHECK,SM90
// RUN: kv-opt %s --emit=ptx --target=sm_90 | FileCheck %s
// RUN: kv-opt %s --emit=ptx --target=sm_100a | FileCheck %s
// RUN: not kv-opt %s --emit=ptx --target=sm_80 2>&1 | FileCheck %s --check-prefix=OLD
// RUN: not kv-opt %s --kv-pipeline --target=host 2>&1 | FileCheck %s --check-prefix=HOST

// A tile from a kernel's argument to the copies: the descriptor is 128 bytes of parameter space.

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!keys = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>

// SM90: .version 8.0
// SM90: .target sm_90a
// CHECK: .extern .shared .align 1024 .b8 kv_shared[]
// CHECK-LABEL: .visible .entry tile(
// CHECK:         .param .align 64 .b8 tile_param_11[128]
// CHECK:         mov.b64 [[MAP:%rd[0-9]+]], tile_param_11;
// CHECK:         cvta.param.u64 [[PTR:%rd[0-9]+]], [[MAP]];
// CHECK:         mbarrier.init.shared.b64
// CHECK:         fence.mbarrier_init.release.cluster
// CHECK:         mbarrier.arrive.expect_tx.shared.b64
// CHECK-COUNT-4: cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [{{%r[0-9]+}}], {{\[}}[[PTR]],
// CHECK:         bar.sync
// CHECK:         mbarrier.try_wait.parity.shared.b64
// OLD: error: 'kv.tma_init_barrier' op is a copy by the tensor memory accelerator, which needs sm_90 or later, got target sm_80
// HOST: error: 'kv.tma_init_barrier' op is a copy by the tensor memory accelerator of sm_90 and later: the host target has none
gpu.module @kernels {
  gpu.func @tile(%c: !cache, %keys: !keys, %b: i32) kernel {
    %tile = "kv.alloc_shared"() {bytes = 8192 : i64, alignment = 1024 : i64} : () -> !llvm.ptr<3>
    %bar = "kv.alloc_shared"() {bytes = 8 : i64, alignment = 8 : i64} : () -> !llvm.ptr<3>
    %x = gpu.thread_id x
    %t = arith.index_cast %x : index to i32
    %c0 = arith.constant 0 : i32
    %c2 = arith.constant 2 : i32
    %c32 = arith.constant 32 : i32
    %one = arith.cmpi eq, %t, %c0 : i32
    scf.if %one {
      "kv.tma_init_barrier"(%bar) {arrivals = 1 : i64} : (!llvm.ptr<3>) -> ()
      "kv.tma_expect"(%keys, %bar, %c2) {arrive = true} : (!keys, !llvm.ptr<3>, i32) -> ()
      "kv.tma_load_tile"(%keys, %c, %b, %c0, %c0, %c32, %c0, %tile, %bar) {tile_rows = 32 : i64, smem_rows = 32 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!keys, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
    }
    gpu.barrier
    "kv.tma_wait"(%bar, %c0) : (!llvm.ptr<3>, i32) -> ()
    gpu.return
  }
}

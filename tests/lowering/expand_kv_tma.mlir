// RUN: kv-opt %s --expand-kv-tma='target=sm_90a' --split-input-file --verify-diagnostics | FileCheck %s
// RUN: kv-opt %{kernels}/largest_keys.mlir --kv-pipeline --target=sm_90a --stop-after=expand-kv-tma --check-semantics-of=expand-kv-tma --grid=3 --arg=out=3x64 --lengths=edges:32 --model=%S/Inputs/models.py:largest_keys -o /dev/null

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!large = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 64 : i64, none, 1 : i64>
!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!rows = !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>

gpu.module @kernels {
  // One load a page; one whose tokens do not exist reads before the first page, which gives zeros.
  // CHECK-LABEL: gpu.func @pages
  // CHECK:         arith.cmpi slt, %c0{{.*}}, %[[VALID:.*]] : i32
  // CHECK:         "kv.page"
  // CHECK:         %[[OUT:.*]] = arith.constant -1 : i32
  // CHECK:         arith.select %{{.*}}, %{{.*}}, %[[OUT]]
  // CHECK:         "kv.tma_load"{{.*}}smem_rows = 32
  // CHECK:         "kv.page"
  // CHECK:         llvm.getelementptr %{{.*}}[2048]
  // CHECK:         "kv.tma_load"
  // CHECK-NOT:     kv.tma_load
  gpu.func @pages(%m: !pages, %c: !cache, %i: i32, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) kernel {
    "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %tile, %bar) {tile_rows = 32 : i64, smem_rows = 32 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!pages, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
    gpu.return
  }

  // Without pages, rows: a whole box before the first row is out of bounds.
  // CHECK-LABEL: gpu.func @rows
  // CHECK:         "kv.row_index"
  // CHECK:         arith.constant -16 : i32
  // CHECK:         "kv.tma_load"
  gpu.func @rows(%m: !rows, %c: !cache, %i: i32, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) kernel {
    "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %tile, %bar) {tile_rows = 16 : i64, smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!rows, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
    gpu.return
  }

  // What is skipped is not started. Boxes of a page share its number, each with its slot.
  // CHECK-LABEL: gpu.func @skip
  // CHECK:         scf.if
  // CHECK-NOT:       arith.select
  // CHECK:           %[[PAGE:.*]] = "kv.page"
  // CHECK:           "kv.tma_load"(%{{.*}}, %{{.*}}, %{{.*}}, %[[PAGE]],
  // CHECK:         scf.if
  gpu.func @skip(%m: !pages, %c: !large, %i: i32, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) kernel {
    "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %tile, %bar) {tile_rows = 32 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "skip"} : (!pages, !large, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
    gpu.return
  }
}

// -----

!gather = !kv.tma<"gather4", bf16, array<i64: 1, 64>, array<i64: 8, 128>, 128 : i64>
gpu.module @kernels {
  gpu.func @gather(%m: !gather, %i: i32, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) kernel {
    // expected-error @below {{'kv.tma_load' op gathers rows, which needs sm_100a, got target sm_90a}}
    "kv.tma_load"(%m, %tile, %bar, %i, %i, %i, %i, %i) {smem_rows = 8 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!gather, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32, i32) -> ()
    gpu.return
  }
}

// -----

!rows = !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
gpu.module @kernels {
  gpu.func @pair(%m: !rows, %i: i32, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) kernel {
    // expected-error @below {{'kv.tma_load' op with cta_group = 2 copies for a CTA pair, which needs sm_100a, got target sm_90a}}
    "kv.tma_load"(%m, %tile, %bar, %i, %i, %i) {smem_rows = 16 : i64, cta_group = 2 : i64, multicast = 0 : i64} : (!rows, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32) -> ()
    gpu.return
  }
}

// RUN: kv-opt %s --allow-unregistered-dialect --plan-kv-access | FileCheck %s
// RUN: kv-opt %s --allow-unregistered-dialect --plan-kv-access='read-only=false max-alignment=8' | FileCheck %s --check-prefix=LESS
// RUN: %if alone %{ kv-opt %{kernels}/rescale.mlir --kv-pipeline --target=sm_90a --stop-after=plan-kv-access --check-semantics-of=plan-kv-access --grid=3x2 --arg=factors=2 --arg=sums=3x16 --lengths=edges --model=%S/Inputs/models.py:rescale -o /dev/null %}

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!odd = !kv.cache<"paged", bf16, 8 : i64, 36 : i64, false, 16 : i64, none, 1 : i64>
!quant = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 64 : i64>

gpu.module @kernels {
  // Nothing writes a bf16 cache here: the read-only path, 16 bytes.
  // CHECK-LABEL: gpu.func @only_reads
  // CHECK-SAME:    kv.read_only_args = array<i64: 0, 1>
  // CHECK:         "kv.load"{{.*}} {kv.alignment = 16 : i64, kv.read_only, width = 8 : i64}
  // LESS-LABEL:  gpu.func @only_reads
  // LESS-NOT:      read_only
  // LESS:          "kv.load"{{.*}} {kv.alignment = 8 : i64, width = 8 : i64}
  gpu.func @only_reads(%c: !cache, %x: memref<?xf32, strided<[1]>, 1>, %b: i32) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
    gpu.return
  }

  // A store to any cache of the type ends that: caches of a launch may be views of one pool.
  // CHECK-LABEL: gpu.func @reads_and_writes
  // CHECK:         "kv.load"{{.*}} {kv.alignment = 16 : i64, width = 8 : i64}
  // CHECK:         "kv.store"{{.*}} {kv.alignment = 16 : i64, oob = "drop"}
  gpu.func @reads_and_writes(%c: !cache, %d: !cache, %b: i32) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
    "kv.store"(%d, %b, %b, %b, %b, %v) {oob = "drop"} : (!cache, i32, i32, i32, i32, vector<8xbf16>) -> ()
    gpu.return
  }

  // A head of 36 elements is a multiple of 8 bytes, not of 16.
  // CHECK-LABEL: gpu.func @odd_head
  // CHECK:         "kv.load"{{.*}} {kv.alignment = 8 : i64
  gpu.func @odd_head(%c: !odd, %b: i32) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b) {width = 4 : i64} : (!odd, i32, i32, i32, i32) -> vector<4xbf16>
    gpu.return
  }

  // Values and scales are judged apart: writing scales leaves the values read-only.
  // CHECK-LABEL: gpu.func @scales_written
  // CHECK:         "kv.load"{{.*}} {kv.alignment = 16 : i64, kv.read_only, width = 16 : i64}
  gpu.func @scales_written(%c: !quant, %b: i32, %s: f32) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b) {width = 16 : i64} : (!quant, i32, i32, i32, i32) -> vector<16xf32>
    "kv.store_scale"(%c, %b, %b, %b, %b, %s) {oob = "drop"} : (!quant, i32, i32, i32, i32, f32) -> ()
    gpu.return
  }

  // A write through a raw pointer may go anywhere.
  // CHECK-LABEL: gpu.func @raw_pointer
  // CHECK-NOT:     read_only
  // CHECK:         gpu.return
  gpu.func @raw_pointer(%c: !cache, %b: i32, %p: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
    llvm.store %b, %p : i32, !llvm.ptr<1>
    gpu.return
  }

  // Nothing is known of an op of another dialect: on a handle or a buffer it writes everything.
  // CHECK-LABEL: gpu.func @foreign_on_a_handle
  // CHECK-NOT:     read_only
  // CHECK:         gpu.return
  gpu.func @foreign_on_a_handle(%c: !cache, %d: !odd, %o: memref<?xf32>, %b: i32, %x: bf16) kernel {
    "kvx.store"(%d, %b, %x) : (!odd, i32, bf16) -> ()
    %v = "kv.load"(%c, %b, %b, %b, %b) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
    gpu.return
  }

  // CHECK-LABEL: gpu.func @foreign_on_a_buffer
  // CHECK-NOT:     read_only
  // CHECK:         gpu.return
  gpu.func @foreign_on_a_buffer(%c: !cache, %o: memref<?xf32>, %b: i32) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
    "kvx.accumulate"(%o, %b) : (memref<?xf32>, i32) -> ()
    gpu.return
  }

  // One that has neither reaches nothing.
  // CHECK-LABEL: gpu.func @foreign_on_numbers
  // CHECK:         "kv.load"{{.*}}kv.read_only
  gpu.func @foreign_on_numbers(%c: !cache, %b: i32) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
    "kvx.mix"(%b) : (i32) -> ()
    gpu.return
  }

  // Nor is anything known of what is called; assembly says what it does.
  // CHECK-LABEL: gpu.func @calls
  // CHECK-NOT:     read_only
  // CHECK:         gpu.return
  gpu.func @calls(%c: !cache, %b: i32, %p: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
    llvm.call_intrinsic "llvm.nvvm.prefetch.global.L2"(%p) : (!llvm.ptr<1>) -> ()
    gpu.return
  }

  // CHECK-LABEL: gpu.func @assembly_that_stores
  // CHECK-NOT:     read_only
  // CHECK:         gpu.return
  gpu.func @assembly_that_stores(%c: !cache, %b: i32, %p: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
    llvm.inline_asm has_side_effects "st.global.b32 [$0], $1;", "l,r" %p, %b : (!llvm.ptr<1>, i32) -> ()
    gpu.return
  }

  // CHECK-LABEL: gpu.func @assembly_on_shared_memory
  // CHECK:         "kv.load"{{.*}}kv.read_only
  gpu.func @assembly_on_shared_memory(%c: !cache, %b: i32, %s: i32, %p: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
    llvm.inline_asm has_side_effects "cp.async.cg.shared.global [$0], [$1], 16;", "r,l" %s, %p : (i32, !llvm.ptr<1>) -> ()
    llvm.inline_asm has_side_effects "st.shared.b32 [$0], $1;", "r,r" %s, %b : (i32, i32) -> ()
    gpu.return
  }
}

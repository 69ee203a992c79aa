// RUN: kv-opt %s --allocate-kv-shared --split-input-file --verify-diagnostics | FileCheck %s
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=allocate-kv-shared --check-semantics-of=allocate-kv-shared --lengths=edges -o /dev/null %}

// CHECK: llvm.mlir.global external @kv_shared() {addr_space = 3 : i32, alignment = 128 : i64} : !llvm.array<0 x i8>
gpu.module @kernels {
  // Each at its alignment, the strictest first: nothing is lost between them.
  // CHECK-LABEL: gpu.func @two_blocks
  // CHECK-SAME:    kv.shared_bytes = 288 : i64
  // CHECK:         llvm.getelementptr %{{.*}}[256]
  // CHECK:         llvm.getelementptr %{{.*}}[0]
  gpu.func @two_blocks() kernel {
    %a = "kv.alloc_shared"() {bytes = 20 : i64, alignment = 16 : i64} : () -> !llvm.ptr<3>
    %b = "kv.alloc_shared"() {bytes = 256 : i64, alignment = 128 : i64} : () -> !llvm.ptr<3>
    gpu.return
  }

  // CHECK-LABEL: gpu.func @none
  // CHECK-SAME:    kv.shared_bytes = 0 : i64
  gpu.func @none() kernel {
    gpu.return
  }
}

// -----

// The block as a whole is aligned as the strictest allocation of a module's kernels asks.
// CHECK: llvm.mlir.global external @kv_shared() {addr_space = 3 : i32, alignment = 1024 : i64}
gpu.module @kernels {
  gpu.func @aligned() kernel {
    %a = "kv.alloc_shared"() {bytes = 16 : i64, alignment = 16 : i64} : () -> !llvm.ptr<3>
    %b = "kv.alloc_shared"() {bytes = 4096 : i64, alignment = 1024 : i64} : () -> !llvm.ptr<3>
    %c = "kv.alloc_shared"() {bytes = 4096 : i64, alignment = 256 : i64} : () -> !llvm.ptr<3>
    gpu.return
  }
}

// -----

gpu.module @kernels {
  gpu.func @in_a_loop(%n: index) kernel {
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    scf.for %i = %c0 to %n step %c1 {
      // expected-error @below {{must be outside loops and branches}}
      %a = "kv.alloc_shared"() {bytes = 16 : i64, alignment = 16 : i64} : () -> !llvm.ptr<3>
    }
    gpu.return
  }
}

// RUN: kv-opt %s --check-kv-lowered --split-input-file --verify-diagnostics | FileCheck %s
// It verifies: there is no answer that it could change.

// CHECK-LABEL: gpu.func @clean
gpu.module @kernels {
  gpu.func @clean(%x: f32) kernel {
    gpu.return
  }
}

// -----

gpu.module @kernels {
  gpu.func @left(%i: i32) kernel {
    // expected-error @below {{'kv.alloc_shared' op was not lowered by any pass of the pipeline}}
    %a = "kv.alloc_shared"() {bytes = 16 : i64, alignment = 16 : i64} : () -> !llvm.ptr<3>
    gpu.return
  }
}

// -----

// What tiles become on the host.
func.func @tiles(%x: f32) {
  // expected-error @below {{'tensor.splat' op was not lowered by any pass of the pipeline}}
  %a = tensor.splat %x : tensor<4xf32>
  return
}

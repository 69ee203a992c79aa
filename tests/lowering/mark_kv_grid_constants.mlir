// RUN: kv-opt %s --mark-kv-grid-constants | FileCheck %s
// RUN: sed 's/array<i32: 1, 2>/array<i32: 1, 3>/' %s | not kv-opt --mark-kv-grid-constants 2>&1 | FileCheck %s --check-prefix=BEYOND
// BEYOND: 'llvm.func' op tensormap_params must be numbers of its 3 parameters, got [1, 3]
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=mark-kv-grid-constants --check-semantics-of=mark-kv-grid-constants --lengths=edges -o /dev/null %}

module attributes {gpu.container_module} {
  gpu.module @kernels {
    // CHECK-LABEL: llvm.func @two
    // CHECK-SAME:    (%{{.*}}: i32 {llvm.noundef}, %{{.*}}: !llvm.ptr {llvm.align = 64 : i64, llvm.byval = !llvm.array<16 x i64>, nvvm.grid_constant}, %{{.*}}: !llvm.ptr {llvm.align = 64 : i64, llvm.byval = !llvm.array<16 x i64>, nvvm.grid_constant})
    // CHECK-NOT:     tensormap_params
    llvm.func @two(%n: i32 {llvm.noundef}, %a: !llvm.ptr, %b: !llvm.ptr) attributes {gpu.kernel, nvvm.kernel, tensormap_params = array<i32: 1, 2>} {
      llvm.return
    }

    // CHECK-LABEL: llvm.func @none(%{{.*}}: !llvm.ptr) attributes
    llvm.func @none(%a: !llvm.ptr) attributes {gpu.kernel, nvvm.kernel} {
      llvm.return
    }
  }
}

// RUN: not kv-opt %s --emit=ptx --target=sm_80 2>&1 | FileCheck %s
// RUN: kv-opt %s --emit=ptx --target=sm_90 | FileCheck %s --check-prefix=PTX

// An instruction that the target does not have is refused where LLVM would end the process; for a chip that has it, code
// is generated with the PTX ISA that it needs.
// PTX: .version 8.0
// PTX: elect.sync
gpu.module @kernels {
  gpu.func @one(%out: memref<?xi32, strided<[1]>, 1>) kernel {
    // CHECK: error: 'nvvm.elect.sync' op needs sm_90 or later, got target sm_80
    %yes = nvvm.elect.sync -> i1
    scf.if %yes {
      %i = arith.constant 0 : index
      %c = arith.constant 1 : i32
      memref.store %c, %out[%i] : memref<?xi32, strided<[1]>, 1>
    }
    gpu.return
  }
}

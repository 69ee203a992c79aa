// RUN: kv-opt %s --check-kv-waits | FileCheck %s
// RUN: kv-opt %s --check-kv-waits='seconds=3' | FileCheck %s --check-prefix=THREE
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --insert-after=lower-kv-tma=check-kv-waits --stop-after=check-kv-waits --check-semantics-of=check-kv-waits --lengths=edges -o /dev/null %}

gpu.module @kernels {
  // A loop that waits for a barrier ends the kernel when it has lasted too long; other loops stay as they are.
  // CHECK-LABEL: gpu.func @waits
  // CHECK:         %[[START:.*]] = llvm.inline_asm has_side_effects {{.*}}globaltimer
  // CHECK:         scf.while
  // CHECK:           scf.condition
  // CHECK:           %[[MOST:.*]] = arith.constant 10000000000 : i64
  // CHECK:           %[[NOW:.*]] = llvm.inline_asm has_side_effects {{.*}}globaltimer
  // CHECK:           %[[LASTED:.*]] = arith.subi %[[NOW]], %[[START]]
  // CHECK:           %[[IN_TIME:.*]] = arith.cmpi ult, %[[LASTED]], %[[MOST]]
  // CHECK:           cf.assert %[[IN_TIME]], "{{.*}}check_kv_waits.mlir:{{[0-9]+}}:5: waited 10 s for full_keys"
  // CHECK:         scf.while
  // CHECK-NOT:     cf.assert
  // CHECK:         gpu.return
  // THREE:         arith.constant 3000000000 : i64
  // THREE:         waited 3 s for full_keys
  gpu.func @waits(%barrier: i32, %more: i1) kernel {
    %c0 = arith.constant 0 : i32

    scf.while : () -> () {
      %done = llvm.inline_asm has_side_effects "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [$1], 0; selp.b32 $0, 1, 0, p; }", "=r,r,~{memory}" %barrier : (i32) -> i32
      %no = arith.cmpi eq, %done, %c0 : i32
      scf.condition(%no)
    } do {
      scf.yield
    } attributes {kv.barrier = "full_keys"}
    scf.while : () -> () {
      scf.condition(%more)
    } do {
      scf.yield
    }
    gpu.return
  }
}

// RUN: kv-opt %s --lower-kv-trace="marks=64" | FileCheck %s
// RUN: kv-opt %s --lower-kv-trace="marks=64 target=host" | FileCheck %s --check-prefix=HOST
// RUN: kv-opt %s --lower-kv-trace | FileCheck %s --check-prefix=OFF
// RUN: not kv-opt %s --lower-kv-trace="marks=48" 2>&1 | FileCheck %s --check-prefix=WRONG
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --insert-after=start-kv-work=trace-kv-phases --insert-after=plan-kv-access=lower-kv-trace --stop-after=lower-kv-trace --check-semantics-of=lower-kv-trace --lengths=edges -o /dev/null %}

// WRONG: marks must be a power of two, or 0, got 48

gpu.module @kernels {
  // CHECK:         llvm.mlir.global external @_mlir_kv_trace({{.*}}) {addr_space = 1 : i32, alignment = 8 : i64}
  // OFF-NOT:       llvm.mlir.global

  // The first thread of a warp takes a record when the kernel begins, where the buffer is one for rings of 64 marks. A
  // mark is the clock above twice the label's number, and 1 for an end; the kernel's attribute has the labels.
  // CHECK-LABEL: gpu.func @phases
  // CHECK-SAME:    "{\22kernel\22: \22phases\22, \22labels\22: [\22load\22, \22store\22]}"
  // CHECK:         %[[COUNT:.*]] = llvm.alloca
  // CHECK:         llvm.mlir.addressof @_mlir_kv_trace
  // CHECK:         arith.constant 31 : i32
  // CHECK:         %[[BUFFER:.*]] = scf.if {{.*}} -> (i64) {
  // CHECK:         %[[RECORD:.*]] = scf.if {{.*}} -> (i64) {
  // CHECK:           arith.cmpi eq, %{{.*}}, %c64_i64
  // CHECK:           llvm.atomicrmw add
  // CHECK:         llvm.inline_asm has_side_effects {{.*}}"mov.u64 $0, %gridid;"
  // CHECK:         "mov.u64 $0, %globaltimer;"
  // CHECK:         %[[HAS:.*]] = arith.cmpi ne, %[[RECORD]], %c0_i64
  // CHECK-NEXT:    scf.if %[[HAS]] {
  // CHECK-NEXT:      %[[N:.*]] = llvm.load %[[COUNT]]
  // CHECK:           arith.constant 63 : i32
  // CHECK:           %[[CLOCK:.*]] = llvm.inline_asm has_side_effects {{.*}}"mov.u64 $0, %clock64;", "=l,~{memory}"
  // CHECK:           %[[HIGH:.*]] = arith.shli %[[CLOCK]], %c16_i64
  // CHECK:           arith.ori %[[HIGH]], %c0_i64
  // CHECK:         memref.store
  // CHECK:           arith.ori %{{.*}}, %c1_i64
  // CHECK:           arith.ori %{{.*}}, %c2_i64
  // CHECK:           arith.ori %{{.*}}, %c3_i64
  // CHECK:         "mov.u64 $0, %globaltimer;"
  // CHECK:         gpu.return
  // On the host the clock is the processor's, and what counts marks lies in the record.
  // HOST-LABEL:  gpu.func @phases
  // HOST-NOT:      llvm.alloca
  // HOST-NOT:      inline_asm
  // HOST:          llvm.call_intrinsic "llvm.readcyclecounter"
  // OFF-LABEL:   gpu.func @phases
  // OFF-NEXT:      %[[ZERO:.*]] = arith.constant 0
  // OFF-NEXT:      memref.store
  // OFF-NEXT:      gpu.return
  gpu.func @phases(%out: memref<?xi32, strided<[1]>, 1>, %i: index) kernel {
    %zero = arith.constant 0 : i32
    "kv.trace_mark"() {label = "load", edge = "begin"} : () -> ()
    memref.store %zero, %out[%i] : memref<?xi32, strided<[1]>, 1>
    "kv.trace_mark"() {label = "load", edge = "end"} : () -> ()
    "kv.trace_mark"() {label = "store", edge = "begin"} : () -> ()
    "kv.trace_mark"() {label = "store", edge = "end"} : () -> ()
    gpu.return
  }

  // A kernel without marks stays as it is.
  // CHECK-LABEL: gpu.func @plain
  // CHECK-NEXT:    gpu.return
  gpu.func @plain() kernel {
    gpu.return
  }
}

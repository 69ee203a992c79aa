// RUN: kv-opt %s --allow-unregistered-dialect --index-kv-loops | FileCheck %s
// RUN: kv-opt %s --allow-unregistered-dialect --index-kv-loops --index-kv-loops | FileCheck %s
// RUN: not kv-opt %s --allow-unregistered-dialect --scf-for-loop-peeling 2>&1 | FileCheck %s --check-prefix=BEFORE
// RUN: kv-opt %s --allow-unregistered-dialect --index-kv-loops --canonicalize --scf-for-loop-peeling --lower-affine | FileCheck %s --check-prefix=PEELED
// RUN: %if alone %{ kv-opt %{kernels}/rescale.mlir --kv-pipeline --target=sm_90a --insert-after=plan-kv-access=index-kv-loops --stop-after=index-kv-loops --check-semantics-of=index-kv-loops --grid=3x2 --arg=factors=2 --arg=sums=3x16 --lengths=edges --model=%S/Inputs/models.py:rescale -o /dev/null %}
// Loops over i32, which the kernel language makes, become loops over index; upstream's passes then take them.
// BEFORE: error: 'affine.apply' op operand #0 must be variadic of index, but got 'i32'

// CHECK-LABEL: func.func @sum(
// CHECK-SAME:      %[[N:.*]]: i32
// CHECK-DAG:     %[[LOW:.*]] = arith.index_cast %c0_i32 : i32 to index
// CHECK-DAG:     %[[HIGH:.*]] = arith.index_cast %[[N]] : i32 to index
// CHECK-DAG:     %[[STEP:.*]] = arith.index_cast %c4_i32 : i32 to index
// CHECK:         scf.for %[[I:.*]] = %[[LOW]] to %[[HIGH]] step %[[STEP]] iter_args
// CHECK-NEXT:      %[[NARROW:.*]] = arith.index_cast %[[I]] : index to i32
// CHECK-NEXT:      arith.addi %{{.*}}, %[[NARROW]] : i32
// Peeled: the rest is a loop of its own.
// PEELED-LABEL: func.func @sum(
// PEELED-COUNT-2: scf.for
// PEELED-LABEL: func.func @unsigned(
func.func @sum(%n: i32) -> i32 {
  %c0 = arith.constant 0 : i32
  %c4 = arith.constant 4 : i32
  %sum = scf.for %i = %c0 to %n step %c4 iter_args(%s = %c0) -> (i32) : i32 {
    %next = arith.addi %s, %i : i32
    scf.yield %next : i32
  }
  func.return %sum : i32
}

// CHECK-LABEL: func.func @unsigned(
// CHECK:         arith.index_castui %{{.*}} : i32 to index
// CHECK:         scf.for unsigned %[[I:.*]] = 
// CHECK-NEXT:      arith.index_castui %[[I]] : index to i32
// CHECK-NOT:     arith.index_cast
func.func @unsigned(%n: i32, %x: memref<?xi32>) {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  scf.for unsigned %i = %c0 to %n step %c1 : i32 {
    "test.use"(%i) : (i32) -> ()
  }
  func.return
}

// A loop over index stays.
// CHECK-LABEL: func.func @index(
// CHECK-NOT:     index_cast
func.func @index(%n: index) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  scf.for %i = %c0 to %n step %c1 {
    "test.use"(%i) : (index) -> ()
  }
  func.return
}

// RUN: kv-opt %s --queue-kv-work | FileCheck %s
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=queue-kv-work --check-semantics-of=queue-kv-work --lengths=edges -o /dev/null %}

gpu.module @kernels {
  // Every role takes its numbers from the queue, which counts the warps that read it: 1 + 2 + 8. One thread fetches, in
  // the first warp's iterations: at their start, and of the last ones at their end.
  // CHECK-LABEL: gpu.func @roles
  // CHECK:         %[[QUEUE:.*]] = "kv.make_queue"(%[[COUNTER:.*]]) {readers = 11 : i64} : (memref<?xi8>) -> !kv.queue
  // CHECK:         "kv.is_role"() {role = "producer_warp_0"}
  // CHECK:         scf.while (%[[T:.*]] = %[[BLOCK:.*]], %[[USE:.*]] = %{{.*}}, %[[SUM:.*]] = %{{.*}}) : (i32, i32, i32)
  // CHECK:           %[[MORE:.*]] = arith.cmpi slt, %[[T]], %[[N:.*]] : i32
  // CHECK:           scf.condition(%[[MORE]]) %[[T]], %[[USE]], %[[SUM]]
  // CHECK:         ^bb0(%[[T1:.*]]: i32, %[[USE1:.*]]: i32, %[[SUM1:.*]]: i32):
  // CHECK:           %[[FOUR:.*]] = arith.muli %[[BLOCKS:.*]], %c4
  // CHECK:           %[[LATER:.*]] = arith.addi %[[T1]], %[[FOUR]]
  // CHECK:           %[[LAST:.*]] = arith.cmpi sge, %[[LATER]], %[[N]]
  // CHECK:           %[[NOT:.*]] = arith.xori %[[LAST]], %true
  // CHECK:           scf.if %[[NOT]] {
  // CHECK-NEXT:        "kv.queue_fetch"(%[[QUEUE]], %[[USE1]], %[[N]])
  // CHECK:           %[[SUM2:.*]] = arith.addi %[[SUM1]], %[[T1]]
  // CHECK-NEXT:      scf.if %[[LAST]] {
  // CHECK-NEXT:        "kv.queue_fetch"(%[[QUEUE]], %[[USE1]], %[[N]])
  // CHECK:           %[[NEXT:.*]] = "kv.queue_next"(%[[QUEUE]], %[[USE1]])
  // CHECK:           %[[USE2:.*]] = arith.addi %[[USE1]],
  // CHECK:           scf.yield %[[NEXT]], %[[USE2]], %[[SUM2]]
  // CHECK:         "kv.is_role"() {role = "producer_warps_from_2"}
  // CHECK:         scf.while
  // CHECK-NOT:       kv.queue_fetch
  // CHECK:           "kv.queue_next"
  // CHECK:         } else {
  // CHECK:         scf.while
  // CHECK-NOT:       kv.queue_fetch
  // CHECK:           "kv.queue_next"
  // CHECK-NOT:     kv.take_work_item
  // CHECK:         {kv.roles}
  gpu.func @roles(%counter: memref<?xi8>, %block: i32, %n: i32, %blocks: i32) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64, producer = true}} {
    %c0 = arith.constant 0 : i32
    %producer = "kv.is_role"() {role = "producer"} : () -> i1
    scf.if %producer {
      %keys = "kv.is_role"() {role = "producer_warp_0"} : () -> i1
      scf.if %keys {
        %r = scf.for %i = %block to %n step %blocks iter_args(%sum = %c0) -> (i32) : i32 {
          %t = "kv.take_work_item"(%counter, %i, %n) : (memref<?xi8>, i32, i32) -> i32
          %s = arith.addi %sum, %t : i32
          scf.yield %s : i32
        }
      }
      %rows = "kv.is_role"() {role = "producer_warps_from_2"} : () -> i1
      scf.if %rows {
        scf.for %i = %block to %n step %blocks : i32 {
          %t = "kv.take_work_item"(%counter, %i, %n) : (memref<?xi8>, i32, i32) -> i32
        }
      }
    } else {
      scf.for %i = %block to %n step %blocks : i32 {
        %t = "kv.take_work_item"(%counter, %i, %n) : (memref<?xi8>, i32, i32) -> i32
      }
    } {kv.roles}
    gpu.return
  }

  // Blocks that may start late have no number of their own: all are fetched, larger by the number of blocks.
  // CHECK-LABEL: gpu.func @late
  // CHECK:         %[[QUEUE:.*]] = "kv.make_queue"
  // CHECK:         %[[END:.*]] = arith.addi %[[N:.*]], %[[BLOCKS:.*]] : i32
  // CHECK:         "kv.queue_fetch"(%[[QUEUE]], %c0{{.*}}, %[[END]])
  // CHECK:         %[[FIRST:.*]] = "kv.queue_next"(%[[QUEUE]], %c0{{.*}})
  // CHECK:         scf.while (%[[T:.*]] = %[[FIRST]], %[[USE:.*]] = %c1
  // CHECK:           arith.cmpi slt, %[[T]], %[[END]]
  // CHECK:           %[[ITEM:.*]] = arith.subi %{{.*}}, %[[BLOCKS]]
  // CHECK:           "kv.is_role"() {role = "producer_warp_1"}
  // CHECK-NOT:     "kv.queue_fetch"
  // CHECK:         scf.while
  gpu.func @late(%counter: memref<?xi8>, %block: i32, %n: i32, %blocks: i32, %out: memref<?xi32>) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64, producer = true}} {
    %producer = "kv.is_role"() {role = "producer"} : () -> i1
    scf.if %producer {
      %keys = "kv.is_role"() {role = "producer_warp_0"} : () -> i1
      scf.if %keys {
        scf.for %i = %block to %n step %blocks : i32 {
          %t = "kv.take_work_item"(%counter, %i, %n) {late} : (memref<?xi8>, i32, i32) -> i32
          %at = arith.index_cast %t : i32 to index
          memref.store %t, %out[%at] : memref<?xi32>
        }
      }
      %values = "kv.is_role"() {role = "producer_warp_1"} : () -> i1
      scf.if %values {
        scf.for %i = %block to %n step %blocks : i32 {
          %t = "kv.take_work_item"(%counter, %i, %n) {late} : (memref<?xi8>, i32, i32) -> i32
        }
      }
    } {kv.roles}
    gpu.return
  }

  // Without a producer blocks keep their turns.
  // CHECK-LABEL: gpu.func @turns
  // CHECK:         scf.for
  // CHECK-NEXT:      "kv.take_work_item"
  gpu.func @turns(%counter: memref<?xi8>, %block: i32, %n: i32, %blocks: i32) kernel attributes {kv.tiled, kv.block = array<i32: 256, 1, 1>} {
    scf.for %i = %block to %n step %blocks : i32 {
      %t = "kv.take_work_item"(%counter, %i, %n) : (memref<?xi8>, i32, i32) -> i32
    }
    gpu.return
  }
}

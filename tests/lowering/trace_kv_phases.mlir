// RUN: kv-opt %s --trace-kv-phases | FileCheck %s
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --insert-after=start-kv-work=trace-kv-phases --stop-after=trace-kv-phases --check-semantics-of=trace-kv-phases --lengths=edges -o /dev/null %}

!acc = tensor<64x64xf32, "wgmma">
!tile = tensor<64x128xbf16, "shared">
!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>

gpu.module @kernels {
  // What waits for a buffer, or fills it, becomes a phase with the buffer's name; products and turns have theirs.
  // CHECK-LABEL: gpu.func @consumer
  // CHECK:         "kv.trace_mark"() {edge = "begin", label = "wait to fill values"}
  // CHECK-NEXT:    "kv.producer_acquire"
  // CHECK-NEXT:    "kv.trace_mark"() {edge = "end", label = "wait to fill values"}
  // CHECK-NEXT:    "kv.trace_mark"() {edge = "begin", label = "copy values"}
  // CHECK-NEXT:    "kv.copy_start"
  // CHECK-NEXT:    "kv.trace_mark"() {edge = "end", label = "copy values"}
  // CHECK-NEXT:    "kv.trace_mark"() {edge = "begin", label = "finish values"}
  // CHECK-NEXT:    "kv.copy_finish"
  // CHECK-NEXT:    "kv.trace_mark"() {edge = "end", label = "finish values"}
  // CHECK-NEXT:    "kv.trace_mark"() {edge = "begin", label = "wait for values"}
  // CHECK-NEXT:    %[[T:.*]] = "kv.consumer_wait"
  // CHECK-NEXT:    "kv.trace_mark"() {edge = "end", label = "wait for values"}
  // CHECK-NEXT:    "kv.trace_mark"() {edge = "begin", label = "start product"}
  // CHECK-NEXT:    "kv.dot_start"
  // CHECK-NEXT:    "kv.trace_mark"() {edge = "end", label = "start product"}
  // CHECK-NEXT:    "kv.trace_mark"() {edge = "begin", label = "wait for product"}
  // CHECK-NEXT:    "kv.dot_wait"
  // CHECK-NEXT:    "kv.trace_mark"() {edge = "end", label = "wait for product"}
  // CHECK-NEXT:    "kv.consumer_release"
  // CHECK-NEXT:    gpu.return
  gpu.func @consumer(%c: !cache, %q: !tile, %n: i32) kernel {
    %v = "kv.make_stages"() {buffer_name = "values", copy = "cp_async", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    "kv.producer_acquire"(%v, %n) : (!kv.stages, i32) -> ()
    "kv.copy_start"(buffer = %v, n = %n, cache = %c, batch = %n, head = %n, first = %n, count = %n) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32) -> ()
    "kv.copy_finish"(%v, %n) {pending = 0 : i64} : (!kv.stages, i32) -> ()
    %t = "kv.consumer_wait"(%v, %n) : (!kv.stages, i32) -> !tile
    %s = "kv.dot_start"(%q, %t) {transpose_b = true} : (!tile, !tile) -> !acc
    %d = "kv.dot_wait"(%s) {pending = 0 : i64} : (!acc) -> !acc
    "kv.consumer_release"(%v, %n) : (!kv.stages, i32) -> ()
    gpu.return
  }

  // CHECK-LABEL: gpu.func @plain
  // CHECK-NOT:     kv.trace_mark
  // CHECK:         gpu.return
  gpu.func @plain() kernel {
    gpu.barrier
    gpu.return
  }
}

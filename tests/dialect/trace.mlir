// RUN: kv-opt %s | kv-opt | FileCheck %s
// RUN: kv-opt %s --cse --canonicalize | FileCheck %s

// A mark has an effect of its own: two that are equal are two, and none is dropped.
// CHECK-LABEL: gpu.func @marks
// CHECK:         "kv.trace_mark"() {edge = "begin", label = "softmax"} : () -> ()
// CHECK-NEXT:    "kv.trace_mark"() {edge = "begin", label = "softmax"} : () -> ()
// CHECK-NEXT:    "kv.trace_mark"() {edge = "end", label = "softmax"} : () -> ()
gpu.module @kernels {
  gpu.func @marks() kernel {
    "kv.trace_mark"() {label = "softmax", edge = "begin"} : () -> ()
    "kv.trace_mark"() {label = "softmax", edge = "begin"} : () -> ()
    "kv.trace_mark"() {label = "softmax", edge = "end"} : () -> ()
    gpu.return
  }
}

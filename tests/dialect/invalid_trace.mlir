// RUN: kv-opt %s --verify-diagnostics

func.func @trace_mark() {
  // expected-error @below {{'kv.trace_mark' op label must be a string that is not empty, got ""}}
  "kv.trace_mark"() {label = "", edge = "begin"} : () -> ()
  // expected-error @below {{'kv.trace_mark' op edge must be one of begin, end, got "middle"}}
  "kv.trace_mark"() {label = "softmax", edge = "middle"} : () -> ()
  return
}

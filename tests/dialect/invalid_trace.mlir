// RUN: kv-opt %s --split-input-file --verify-diagnostics

func.func @no_label() {
  // expected-error @below {{'kv.trace_mark' op label must be a string that is not empty, got ""}}
  "kv.trace_mark"() {label = "", edge = "begin"} : () -> ()
  return
}

// -----

func.func @no_edge() {
  // expected-error @below {{'kv.trace_mark' op edge must be one of begin, end, got "middle"}}
  "kv.trace_mark"() {label = "softmax", edge = "middle"} : () -> ()
  return
}

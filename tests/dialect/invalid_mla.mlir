// RUN: kv-opt %s --split-input-file --verify-diagnostics

// What the verifiers of the ops on latent rows refuse, beside invalid_operations.mlir. One chunk a rule.

!latent = !kv.collection<"continuous", bf16, 1 : i64, 576 : i64, true, 0 : i64, none, 1 : i64>
// Rule: encoded rows are those of pages.
func.func @rule(%c: !latent, %i: i32, %q: memref<?x16x576xbf16>, %o: memref<?xi32>, %s: f32, %out: memref<?x16x512xbf16>, %x: memref<?x?xi32>) {
  // expected-error @below {{'kv.mla_attention' op indices needs a collection of pages, got a continuous one}}
  "kv.mla_attention"(%c, %i, %q, %o, %s, %out, %x)
    {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, value_size = 512 : i64, mask = "null", span = 0 : i64}
    : (!latent, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?xi32>) -> ()
  return
}

// -----

!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
// Rule: a list stands in the place of a mask.
func.func @rule(%c: !latent, %i: i32, %q: memref<?x16x576xbf16>, %o: memref<?xi32>, %s: f32, %out: memref<?x16x512xbf16>, %x: memref<?x?xi32>) {
  // expected-error @below {{'kv.mla_attention' op indices says what a row sees: mask must be null, got "causal"}}
  "kv.mla_attention"(%c, %i, %q, %o, %s, %out, %x)
    {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, value_size = 512 : i64, mask = "causal", span = 0 : i64}
    : (!latent, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?xi32>) -> ()
  return
}

// -----

!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
// Rule: a list is 32-bit integers.
func.func @rule(%c: !latent, %i: i32, %q: memref<?x16x576xbf16>, %o: memref<?xi32>, %s: f32, %out: memref<?x16x512xbf16>, %x: memref<?x?xi64>) {
  // expected-error @below {{'kv.mla_attention' op indices must have element type i32, got i64}}
  "kv.mla_attention"(%c, %i, %q, %o, %s, %out, %x)
    {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>, value_size = 512 : i64, mask = "null", span = 0 : i64}
    : (!latent, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?xi64>) -> ()
  return
}

// -----

!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
// Rule: lengths are those of lists.
func.func @rule(%c: !latent, %i: i32, %q: memref<?x16x576xbf16>, %o: memref<?xi32>, %s: f32, %out: memref<?x16x512xbf16>) {
  // expected-error @below {{'kv.mla_attention' op topk_lengths needs indices}}
  "kv.mla_attention"(%c, %i, %q, %o, %s, %out, %o)
    {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 1>, value_size = 512 : i64, mask = "null", span = 0 : i64}
    : (!latent, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?xi32>) -> ()
  return
}

// -----

!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
// Rule: there is one length a list.
func.func @rule(%c: !latent, %i: i32, %q: memref<?x16x576xbf16>, %o: memref<?xi32>, %s: f32, %out: memref<?x16x512xbf16>, %x: memref<?x?xi32>) {
  // expected-error @below {{'kv.mla_attention' op topk_lengths must be a memref of rank 1, got memref<?x?xi32>}}
  "kv.mla_attention"(%c, %i, %q, %o, %s, %out, %x, %x)
    {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 1>, value_size = 512 : i64, mask = "null", span = 0 : i64}
    : (!latent, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?xi32>, memref<?x?xi32>) -> ()
  return
}

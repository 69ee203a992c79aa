// RUN: kv-opt %s --split-input-file --verify-diagnostics

// What the verifier refuses of lists of pages. One chunk a rule.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: counts belong to lists.
func.func @rule(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: f32, %n: memref<?x8xi32>) {
  // expected-error @below {{'kv.attention' op page_counts needs pages, whose entries it counts}}
  "kv.attention"(%c, %i, %q, %o, %s, %q, %n)
    {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1>, mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x8xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: only collections with pages have lists of them.
func.func @rule(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: f32, %p: memref<?x8x?xi32>) {
  // expected-error @below {{'kv.attention' op pages needs a collection with pages, got a continuous one}}
  "kv.attention"(%c, %i, %q, %o, %s, %q, %p)
    {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0>, mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x8x?xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: a list a sequence and KV head.
func.func @rule(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: f32, %p: memref<?x?xi32>) {
  // expected-error @below {{'kv.attention' op pages must be a memref of rank 3, got memref<?x?xi32>}}
  "kv.attention"(%c, %i, %q, %o, %s, %q, %p)
    {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0>, mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x?xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: page numbers are i32.
func.func @rule(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: f32, %p: memref<?x8x?xi64>) {
  // expected-error @below {{'kv.attention' op pages must have element type i32, got i64}}
  "kv.attention"(%c, %i, %q, %o, %s, %q, %p)
    {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0>, mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x8x?xi64>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: lists are of the KV heads.
func.func @rule(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: f32, %p: memref<?x32x?xi32>) {
  // expected-error @below {{'kv.attention' op pages must have 8 in dimension 1, got 32}}
  "kv.attention"(%c, %i, %q, %o, %s, %q, %p)
    {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0>, mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x32x?xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
// Rule: counts are of the lists.
func.func @rule(%c: !pool, %i: i32, %q: !rows, %o: memref<?xi32>, %s: f32, %p: memref<?x8x?xi32>, %n: memref<?xi32>) {
  // expected-error @below {{'kv.attention' op page_counts must be a memref of rank 2, got memref<?xi32>}}
  "kv.attention"(%c, %i, %q, %o, %s, %q, %p, %n)
    {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1>, mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x8x?xi32>, memref<?xi32>) -> ()
  return
}

// RUN: kv-opt %s --split-input-file --verify-diagnostics

// What the verifiers of copies between pools and of ragged batches refuse. One chunk a rule.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!other = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 32 : i64, none, 1 : i64>
// Rule: pages go to pages of the same type, whatever their strides.
func.func @rule(%a: !pool, %b: !other, %ids: memref<?xi32>) {
  // expected-error @below {{'kv.transfer_pages' op pools must be of the same type but for strides, got !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64> and !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 32 : i64, none, 1 : i64>}}
  "kv.transfer_pages"(%a, %b, %ids, %ids) : (!pool, !other, memref<?xi32>, memref<?xi32>) -> ()
  return
}

// -----

!pool = !kv.collection<"fa3", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: layers of an fa3 pool share its pages.
func.func @rule(%a: !pool, %ids: memref<?xi32>, %layer: i32) {
  // expected-error @below {{'kv.transfer_pages' op takes no layer for fa3 pools, since all layers share their pages}}
  "kv.transfer_pages"(%a, %a, %ids, %ids, %layer) : (!pool, !pool, memref<?xi32>, memref<?xi32>, i32) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: page ids are 32-bit.
func.func @rule(%a: !pool, %ids: memref<?xi64>, %ids32: memref<?xi32>) {
  // expected-error @below {{'kv.transfer_pages' op source_pages must have element type i32, got i64}}
  "kv.transfer_pages"(%a, %a, %ids, %ids32) : (!pool, !pool, memref<?xi64>, memref<?xi32>) -> ()
  return
}

// -----

// Rule: what is added has one type.
func.func @rule(%a: memref<?x64xbf16>, %b: memref<?x64xf32>, %end: i32) {
  // expected-error @below {{'kv.sliced_add' op b must have element type bf16, got f32}}
  "kv.sliced_add"(%a, %b, %end, %a) : (memref<?x64xbf16>, memref<?x64xf32>, i32, memref<?x64xbf16>) -> ()
  return
}

// -----

// Rule: what is added are numbers of at most 32 bits.
func.func @rule(%a: memref<?x64xi64>, %end: i32) {
  // expected-error @below {{'kv.sliced_add' op a must have element type f32 or f16 or bf16 or i8 or i16 or i32, got i64}}
  "kv.sliced_add"(%a, %a, %end, %a) : (memref<?x64xi64>, memref<?x64xi64>, i32, memref<?x64xi64>) -> ()
  return
}

// -----

// Rule: merged rows have two dimensions.
func.func @rule(%a: memref<?xbf16>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.merge_ragged' op a must be a memref of rank 2, got memref<?xbf16>}}
  "kv.merge_ragged"(%a, %o, %a, %o, %a, %o) : (memref<?xbf16>, memref<?xi32>, memref<?xbf16>, memref<?xi32>, memref<?xbf16>, memref<?xi32>) -> ()
  return
}

// -----

// Rule: tokens are 32-bit.
func.func @rule(%t: memref<?xi64>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.shift_tokens' op tokens must have element type i32, got i64}}
  "kv.shift_tokens"(%t, %o, %o, %t) : (memref<?xi64>, memref<?xi32>, memref<?xi32>, memref<?xi64>) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!other = !kv.cache<"paged", bf16, 4 : i64, 128 : i64, false, array<i64: 32, 128, 4096>, none, 1 : i64>
// Rule: the heads of both caches are the same.
func.func @rule(%p: !other, %c: !cache) {
  // expected-error @below {{'kv.convert' op source and destination must have the same heads and head size, got 8 x 128 and 4 x 128}}
  "kv.convert"(%c, %p) : (!cache, !other) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: both sides are caches.
func.func @rule(%p: memref<?x32x8x128xbf16, strided<[?, ?, ?, 1]>, 1>, %c: !cache) {
  // expected-error @below {{'kv.convert' op operand must be of type !kv.cache, got memref<?x32x8x128xbf16, strided<[?, ?, ?, 1]>, 1>}}
  "kv.convert"(%p, %c) : (memref<?x32x8x128xbf16, strided<[?, ?, ?, 1]>, 1>, !cache) -> ()
  return
}

// -----

// Rule: merged outputs are of one type.
func.func @rule(%a: memref<?x8x64xbf16>, %b: memref<?x8x64xf32>, %l: memref<?x8xf32>) {
  // expected-error @below {{'kv.merge_attention' op b must have element type bf16, got f32}}
  "kv.merge_attention"(%a, %l, %b, %l, %a, %l) : (memref<?x8x64xbf16>, memref<?x8xf32>, memref<?x8x64xf32>, memref<?x8xf32>, memref<?x8x64xbf16>, memref<?x8xf32>) -> ()
  return
}

// -----

// Rule: logarithms are f32.
func.func @rule(%a: memref<?x8x64xbf16>, %l: memref<?x8xbf16>) {
  // expected-error @below {{'kv.merge_attention' op a_lse must have element type f32, got bf16}}
  "kv.merge_attention"(%a, %l, %a, %l, %a, %l) : (memref<?x8x64xbf16>, memref<?x8xbf16>, memref<?x8x64xbf16>, memref<?x8xbf16>, memref<?x8x64xbf16>, memref<?x8xbf16>) -> ()
  return
}

// -----

// Rule: lists of accepted tokens have a row a sequence, or stand at the rows of the step.
!pool = !kv.collection<"paged", f16, 2 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>
func.func @rule(%c: !pool, %l: memref<?x?x?xi32>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.commit' op accepted must be a memref of rank 1 or 2, got memref<?x?x?xi32>}}
  "kv.commit"(%c, %l, %o) : (!pool, memref<?x?x?xi32>, memref<?xi32>) -> ()
  return
}

// -----

// Rule: accepted tokens are numbers of 32 bits.
!pool = !kv.collection<"paged", f16, 2 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>
func.func @rule(%c: !pool, %l: memref<?xi64>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.commit' op accepted must have element type i32, got i64}}
  "kv.commit"(%c, %l, %o) : (!pool, memref<?xi64>, memref<?xi32>) -> ()
  return
}

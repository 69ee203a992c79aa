// RUN: kv-opt %s --verify-diagnostics

// What the verifiers of copies between pools and of ragged batches refuse.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!other = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 32 : i64, none, 1 : i64>
!fa3_pool = !kv.collection<"fa3", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rotated = !kv.cache<"paged", ui4, 8 : i64, 128 : i64, false, 16 : i64, vector<2xf16>, array<i64: 128, 128>>
!strided = !kv.cache<"paged", bf16, 4 : i64, 128 : i64, false, array<i64: 32, 128, 4096>, none, 1 : i64>
!small_pool = !kv.collection<"paged", f16, 2 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>

func.func @transfer_pages(%a: !pool, %b: !other, %ids: memref<?xi32>, %a2: !fa3_pool, %layer: i32, %ids2: memref<?xi64>,
    %ids32: memref<?xi32>) {
  // expected-error @below {{'kv.transfer_pages' op pools must be of the same type but for strides, got !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64> and !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 32 : i64, none, 1 : i64>}}
  "kv.transfer_pages"(%a, %b, %ids, %ids) : (!pool, !other, memref<?xi32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.transfer_pages' op takes no layer for fa3 pools, since all layers share their pages}}
  "kv.transfer_pages"(%a2, %a2, %ids, %ids, %layer) : (!fa3_pool, !fa3_pool, memref<?xi32>, memref<?xi32>, i32) -> ()
  // expected-error @below {{'kv.transfer_pages' op source_pages must have element type i32, got i64}}
  "kv.transfer_pages"(%a, %a, %ids2, %ids32) : (!pool, !pool, memref<?xi64>, memref<?xi32>) -> ()
  return
}

func.func @sliced_add(%a: memref<?x64xbf16>, %b: memref<?x64xf32>, %end: i32, %a2: memref<?x64xi64>) {
  // expected-error @below {{'kv.sliced_add' op b must have element type bf16, got f32}}
  "kv.sliced_add"(%a, %b, %end, %a) : (memref<?x64xbf16>, memref<?x64xf32>, i32, memref<?x64xbf16>) -> ()
  // expected-error @below {{'kv.sliced_add' op a must have element type f32 or f16 or bf16 or i8 or i16 or i32, got i64}}
  "kv.sliced_add"(%a2, %a2, %end, %a2) : (memref<?x64xi64>, memref<?x64xi64>, i32, memref<?x64xi64>) -> ()
  return
}

func.func @merge_ragged_and_shift_tokens(%a: memref<?xbf16>, %o: memref<?xi32>, %t: memref<?xi64>) {
  // expected-error @below {{'kv.merge_ragged' op a must be a memref of rank 2, got memref<?xbf16>}}
  "kv.merge_ragged"(%a, %o, %a, %o, %a, %o) : (memref<?xbf16>, memref<?xi32>, memref<?xbf16>, memref<?xi32>, memref<?xbf16>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.shift_tokens' op tokens must have element type i32, got i64}}
  "kv.shift_tokens"(%t, %o, %o, %t) : (memref<?xi64>, memref<?xi32>, memref<?xi32>, memref<?xi64>) -> ()
  return
}

func.func @convert(%p: !strided, %c: !cache, %p2: memref<?x32x8x128xbf16, strided<[?, ?, ?, 1]>, 1>, %r: !rotated) {
  // expected-error @below {{'kv.convert' op takes no cache of rotated blocks, whose loads give rotated values: use kv.append}}
  "kv.convert"(%r, %c) : (!rotated, !cache) -> ()
  // expected-error @below {{'kv.convert' op source and destination must have the same heads and head size, got 8 x 128 and 4 x 128}}
  "kv.convert"(%c, %p) : (!cache, !strided) -> ()
  // expected-error @below {{'kv.convert' op operand must be of type !kv.cache, got memref<?x32x8x128xbf16, strided<[?, ?, ?, 1]>, 1>}}
  "kv.convert"(%p2, %c) : (memref<?x32x8x128xbf16, strided<[?, ?, ?, 1]>, 1>, !cache) -> ()
  return
}

func.func @merge_attention(%a: memref<?x8x64xbf16>, %b: memref<?x8x64xf32>, %l: memref<?x8xf32>,
    %l2: memref<?x8xbf16>) {
  // expected-error @below {{'kv.merge_attention' op b must have element type bf16, got f32}}
  "kv.merge_attention"(%a, %l, %b, %l, %a, %l) : (memref<?x8x64xbf16>, memref<?x8xf32>, memref<?x8x64xf32>, memref<?x8xf32>, memref<?x8x64xbf16>, memref<?x8xf32>) -> ()
  // expected-error @below {{'kv.merge_attention' op a_lse must have element type f32, got bf16}}
  "kv.merge_attention"(%a, %l2, %a, %l2, %a, %l2) : (memref<?x8x64xbf16>, memref<?x8xbf16>, memref<?x8x64xbf16>, memref<?x8xbf16>, memref<?x8x64xbf16>, memref<?x8xbf16>) -> ()
  return
}

func.func @commit(%c: !small_pool, %l: memref<?x?x?xi32>, %o: memref<?xi32>, %l2: memref<?xi64>) {
  // expected-error @below {{'kv.commit' op accepted must be a memref of rank 1 or 2, got memref<?x?x?xi32>}}
  "kv.commit"(%c, %l, %o) : (!small_pool, memref<?x?x?xi32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.commit' op accepted must have element type i32, got i64}}
  "kv.commit"(%c, %l2, %o) : (!small_pool, memref<?xi64>, memref<?xi32>) -> ()
  return
}

// RUN: kv-opt %s | kv-opt | FileCheck %s
// RUN: kv-opt %s --mlir-print-op-generic | kv-opt | FileCheck %s
// RUN: kv-opt %s --verify-kv | FileCheck %s

// Block masks: made of ragged and padded queries, and taken by attention.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16>
!batch = memref<?x?x32x128xbf16>

// CHECK-LABEL: func.func @ragged
func.func @ragged(%pool: !pool, %layer: i32, %q: !rows, %offsets: memref<?xi32>, %scale: f32, %ids: memref<?x?xi32>, %blocks: memref<?x?x?xi32>) {
  // CHECK: "kv.block_mask"(
  // CHECK-SAME: keys = 128 : i64, mask = "document@01234567"
  // CHECK-SAME: rows = 128 : i64
  "kv.block_mask"(collection = %pool, query = %q, blocks = %blocks, row_offsets = %offsets, array0 = %ids)
    {mask = "document@01234567", rows = 128 : i64, keys = 128 : i64}
    : (!pool, !rows, memref<?x?x?xi32>, memref<?xi32>, memref<?x?xi32>) -> ()
  // CHECK: "kv.attention"(
  // CHECK-SAME: block_keys = 128 : i64, block_rows = 128 : i64
  "kv.attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %q, array0 = %ids, block_mask = %blocks)
    {mask = "document@01234567", span = 0 : i64, softcap = 0.0 : f32, block_rows = 128 : i64, block_keys = 128 : i64}
    : (!pool, i32, !rows, memref<?xi32>, f32, !rows, memref<?x?xi32>, memref<?x?x?xi32>) -> ()
  return
}

// CHECK-LABEL: func.func @padded
func.func @padded(%pool: !pool, %q: !batch, %lengths: memref<?xi32>, %keys: memref<?xi32>, %blocks: memref<?x?x?xi32>) {
  // CHECK: "kv.block_mask"(
  "kv.block_mask"(collection = %pool, query = %q, blocks = %blocks, valid_lengths = %lengths, kv_offsets = %keys)
    {mask = "prefix@01234567", rows = 64 : i64, keys = 32 : i64}
    : (!pool, !batch, memref<?x?x?xi32>, memref<?xi32>, memref<?xi32>) -> ()
  return
}

!latents = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!wide = memref<?x16x576xbf16>

// CHECK-LABEL: func.func @latent_rows
func.func @latent_rows(%pool: !latents, %layer: i32, %q: !wide, %offsets: memref<?xi32>, %scale: f32, %out: memref<?x16x512xbf16>, %blocks: memref<?x?x?xi32>) {
  // CHECK: "kv.block_mask"(
  "kv.block_mask"(collection = %pool, query = %q, blocks = %blocks, row_offsets = %offsets)
    {mask = "causal@01234567", rows = 16 : i64, keys = 64 : i64}
    : (!latents, !wide, memref<?x?x?xi32>, memref<?xi32>) -> ()
  // CHECK: "kv.mla_attention"(
  // CHECK-SAME: block_keys = 64 : i64, block_rows = 16 : i64
  "kv.mla_attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out, block_mask = %blocks)
    {mask = "causal@01234567", span = 0 : i64, value_size = 512 : i64, block_rows = 16 : i64, block_keys = 64 : i64}
    : (!latents, i32, !wide, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?x?xi32>) -> ()
  return
}

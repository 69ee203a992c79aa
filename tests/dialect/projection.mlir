// RUN: kv-opt %s --verify-roundtrip | FileCheck %s
// RUN: kv-opt %s --mlir-print-op-generic | kv-opt | FileCheck %s

// Products into caches: every op, every optional operand.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!index = !kv.collection<"paged", bf16, 1 : i64, 64 : i64, true, 64 : i64, none, 1 : i64>
!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!q = memref<?x32x128xbf16>

// CHECK-LABEL: func.func @projections
func.func @projections(%pool: !pool, %index: !index, %layer: i32, %x: memref<?x4096xbf16>, %w: memref<6144x4096xbf16>,
                       %wi: memref<6464x4096xbf16>, %wkv: memref<2048x4096xbf16>, %wk: memref<1024x4096xbf16>,
                       %offsets: memref<?xi32>, %q: !q, %bias: memref<6144xbf16>, %freqs: memref<?x128xf32>,
                       %gamma: memref<128xf32>, %iq: memref<?x4x64xbf16>) {
  // CHECK: "kv.project_append"({{.*}}scaling = "none"
  "kv.project_append"(collection = %pool, layer = %layer, x = %x, weight = %w, row_offsets = %offsets, query_out = %q)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xbf16>, memref<6144x4096xbf16>, memref<?xi32>, !q) -> ()
  // CHECK: "kv.project_append"({{.*}}interleaved = false
  "kv.project_append"(collection = %pool, layer = %layer, x = %x, weight = %w, row_offsets = %offsets,
      query_out = %q, bias = %bias, freqs = %freqs, q_gamma = %gamma, k_gamma = %gamma)
    {scaling = "none", weight_format = "plain", interleaved = false, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xbf16>, memref<6144x4096xbf16>, memref<?xi32>, !q, memref<6144xbf16>, memref<?x128xf32>, memref<128xf32>, memref<128xf32>) -> ()
  // CHECK: "kv.project_append"({{.*}}memref<?x4x64xbf16>) -> ()
  "kv.project_append"(collection = %pool, layer = %layer, x = %x, weight = %wi, row_offsets = %offsets,
      query_out = %q, index_collection = %index, index_query_out = %iq)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xbf16>, memref<6464x4096xbf16>, memref<?xi32>, !q, !index, memref<?x4x64xbf16>) -> ()
  // Keys and values, and keys alone.
  // CHECK: "kv.project_append"({{.*}}memref<2048x4096xbf16>, memref<?xi32>) -> ()
  "kv.project_append"(collection = %pool, layer = %layer, x = %x, weight = %wkv, row_offsets = %offsets)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xbf16>, memref<2048x4096xbf16>, memref<?xi32>) -> ()
  // CHECK: "kv.project_append"({{.*}}memref<1024x4096xbf16>, memref<?xi32>) -> ()
  "kv.project_append"(collection = %pool, layer = %layer, x = %x, weight = %wk, row_offsets = %offsets)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xbf16>, memref<1024x4096xbf16>, memref<?xi32>) -> ()
  // CHECK: "kv.project_append_padded"(
  "kv.project_append_padded"(collection = %pool, layer = %layer, x = %x, weight = %w, valid_lengths = %offsets,
      query_out = %q)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xbf16>, memref<6144x4096xbf16>, memref<?xi32>, !q) -> ()
  return
}

// CHECK-LABEL: func.func @scales
func.func @scales(%pool: !pool, %layer: i32, %x: memref<?x4096xf8E4M3FN>, %w: memref<6144x4096xf8E4M3FN>,
                  %offsets: memref<?xi32>, %q: !q, %xs: memref<?x32xf32>, %ws: memref<48x32xf32>) {
  // CHECK: "kv.project_append"({{.*}}scaling = "block"
  "kv.project_append"(collection = %pool, layer = %layer, x = %x, weight = %w, row_offsets = %offsets,
      query_out = %q, x_scale = %xs, weight_scale = %ws)
    {scaling = "block", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xf8E4M3FN>, memref<6144x4096xf8E4M3FN>, memref<?xi32>, !q, memref<?x32xf32>, memref<48x32xf32>) -> ()
  return
}

// CHECK-LABEL: func.func @groups
func.func @groups(%pool: !pool, %layer: i32, %x: memref<?x4096xbf16>, %w: memref<6144x2048xi8>, %w8: memref<6144x4096xf8E4M3FN>,
                  %x4: memref<?x2048xi8>, %x8: memref<?x4096xf8E4M3FN>, %offsets: memref<?xi32>, %q: !q,
                  %s: memref<6144x32xbf16>, %xs: memref<?x128xf8E8M0FNU>, %ws: memref<48x32x32x4x4xf8E8M0FNU>,
                  %xs4: memref<?x64x32x4x4xf8E4M3FN>, %ws4: memref<48x64x32x4x4xf8E4M3FN>, %one: memref<1x1xf32>) {
  // 4 bits with scales and minima of 128 elements.
  // CHECK: "kv.project_append"({{.*}}scaling = "group", weight_format = "uint4"
  "kv.project_append"(collection = %pool, layer = %layer, x = %x, weight = %w, row_offsets = %offsets,
      query_out = %q, weight_scale = %s, weight_min = %s)
    {scaling = "group", weight_format = "uint4", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xbf16>, memref<6144x2048xi8>, memref<?xi32>, !q, memref<6144x32xbf16>, memref<6144x32xbf16>) -> ()
  // MXFP8: tokens with scales [T, K / 32], a weight with those of tensor cores.
  // CHECK: "kv.project_append"({{.*}}weight_format = "plain"
  "kv.project_append"(collection = %pool, layer = %layer, x = %x8, weight = %w8, row_offsets = %offsets,
      query_out = %q, x_scale = %xs, weight_scale = %ws)
    {scaling = "group", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x4096xf8E4M3FN>, memref<6144x4096xf8E4M3FN>, memref<?xi32>, !q, memref<?x128xf8E8M0FNU>, memref<48x32x32x4x4xf8E8M0FNU>) -> ()
  // FP4 with one number for all.
  // CHECK: "kv.project_append"({{.*}}weight_format = "e2m1"
  "kv.project_append"(collection = %pool, layer = %layer, x = %x4, weight = %w, row_offsets = %offsets,
      query_out = %q, x_scale = %xs4, weight_scale = %ws4, tensor_scale = %one)
    {scaling = "group", weight_format = "e2m1", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x2048xi8>, memref<6144x2048xi8>, memref<?xi32>, !q, memref<?x64x32x4x4xf8E4M3FN>, memref<48x64x32x4x4xf8E4M3FN>, memref<1x1xf32>) -> ()
  return
}

// CHECK-LABEL: func.func @latent
func.func @latent(%pool: !latent, %layer: i32, %x: memref<?x64xbf16>, %w: memref<768x64xbf16>, %offsets: memref<?xi32>,
                  %q: memref<?x1x192xbf16>) {
  // CHECK: "kv.project_append"({{.*}}memref<768x64xbf16>
  "kv.project_append"(collection = %pool, layer = %layer, x = %x, weight = %w, row_offsets = %offsets, query_out = %q)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!latent, i32, memref<?x64xbf16>, memref<768x64xbf16>, memref<?xi32>, memref<?x1x192xbf16>) -> ()
  return
}

// A matrix as the operand of one sequence.
// CHECK-LABEL: func.func @rows
func.func @rows(%x: memref<?x4096xbf16>) {
  // CHECK: "kv.buffer_operand"(%{{.*}}) : (memref<?x4096xbf16>) -> !kv.operand<"dense", bf16, 64 : i64, 64 : i64
  %rows = "kv.buffer_operand"(%x) : (memref<?x4096xbf16>) -> !kv.operand<"dense", bf16, 64 : i64, 64 : i64, false, 0 : i64, none, 1 : i64>
  return
}

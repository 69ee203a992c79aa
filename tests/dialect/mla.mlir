// RUN: kv-opt %s --verify-roundtrip --named-operands | FileCheck %s
// RUN: kv-opt %s --mlir-print-op-generic | kv-opt --named-operands | FileCheck %s

// Attention over latent rows: every op and every optional operand that ops.mlir does not have.

!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!bytes = !kv.collection<"paged", f8E4M3FN, 1 : i64, 640 : i64, true, 64 : i64, f32, 640 : i64>

// CHECK-LABEL: func.func @sparse
func.func @sparse(%pool: !latent, %bytes: !bytes, %layer: i32, %q: memref<?x16x576xbf16>, %out: memref<?x16x512xbf16>,
                  %i32s: memref<?xi32>, %rows: memref<?x?xi32>, %scale: f32, %unrounded: memref<?x16x512xf32>,
                  %sinks: memref<16xf32>, %lse: memref<?x16xf32>) {
  // CHECK: "kv.mla_attention"({{.*}}, indices = %{{[^ ]+}}) {{{.*}}memref<?x?xi32>) -> ()
  "kv.mla_attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %i32s, scale = %scale, out = %out,
      indices = %rows)
    {value_size = 512 : i64, mask = "null", span = 0 : i64}
    : (!latent, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?xi32>) -> ()
  // CHECK: "kv.mla_attention"({{.*}}, indices = %{{.+}}, topk_lengths = %{{[^ ]+}}) {{{.*}}memref<?x?xi32>, memref<?xi32>) -> ()
  "kv.mla_attention"(collection = %bytes, layer = %layer, query = %q, row_offsets = %i32s, scale = %scale,
      out = %out, indices = %rows, topk_lengths = %i32s)
    {value_size = 512 : i64, mask = "null", span = 0 : i64}
    : (!bytes, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?x?xi32>, memref<?xi32>) -> ()
  // CHECK: "kv.mla_attention"({{.*}}memref<16xf32>, memref<?x16xf32>, memref<?x16x512xf32>, memref<?x16xf32>) -> ()
  "kv.mla_attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %i32s, scale = %scale,
      out = %unrounded, sinks = %sinks, lse = %lse, prior = %unrounded, prior_lse = %lse)
    {value_size = 512 : i64, mask = "causal", span = 0 : i64}
    : (!latent, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xf32>, memref<16xf32>, memref<?x16xf32>, memref<?x16x512xf32>, memref<?x16xf32>) -> ()
  return
}

// CHECK-LABEL: func.func @functions
func.func @functions(%pool: !latent, %layer: i32, %q: memref<?x16x576xbf16>, %out: memref<?x16x512xbf16>,
                     %i32s: memref<?xi32>, %scale: f32, %bias: memref<?x?xf32>, %ids: memref<?x?xi32>) {
  // CHECK: "kv.mla_attention"({{.*}}, kv_offsets = %{{.+}}, array0 = %{{.+}}, array1 = %{{[^ ]+}}) {mask = "document@01234567", score = "t5@89abcdef"
  "kv.mla_attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %i32s, scale = %scale, out = %out,
      kv_offsets = %i32s, array0 = %bias, array1 = %ids)
    {value_size = 512 : i64, mask = "document@01234567", score = "t5@89abcdef", span = 0 : i64}
    : (!latent, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>, memref<?xi32>, memref<?x?xf32>, memref<?x?xi32>) -> ()
  return
}

!eight = !kv.collection<"paged", f8E4M3FN, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>

// CHECK-LABEL: func.func @query_of_8_bits
func.func @query_of_8_bits(%pool: !eight, %layer: i32, %q: memref<?x16x576xf8E4M3FN>, %out: memref<?x16x512xbf16>,
                           %i32s: memref<?xi32>, %scale: f32) {
  // CHECK: "kv.mla_attention"({{.*}}memref<?x16x576xf8E4M3FN>
  "kv.mla_attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %i32s, scale = %scale, out = %out)
    {value_size = 512 : i64, mask = "causal", span = 0 : i64}
    : (!eight, i32, memref<?x16x576xf8E4M3FN>, memref<?xi32>, f32, memref<?x16x512xbf16>) -> ()
  return
}

!scaled = !kv.collection<"paged", f8E4M3FN, 1 : i64, 656 : i64, true, 64 : i64, none, 1 : i64>

// CHECK-LABEL: func.func @scales_in_rows
func.func @scales_in_rows(%pool: !scaled, %layer: i32, %q: memref<?x16x576xbf16>, %out: memref<?x16x512xbf16>,
                          %i32s: memref<?xi32>, %scale: f32) {
  // CHECK: "kv.mla_attention"({{.*}}inline_scales = 128 : i64
  "kv.mla_attention"(collection = %pool, layer = %layer, query = %q, row_offsets = %i32s, scale = %scale, out = %out)
    {value_size = 512 : i64, mask = "causal", span = 0 : i64,
     inline_scales = 128 : i64}
    : (!scaled, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>) -> ()
  return
}

// CHECK-LABEL: func.func @prefill_chunk
func.func @prefill_chunk(%pool: !latent, %bytes: !bytes, %layer: i32, %q: memref<?x16x192xbf16>, %k: memref<?x16x128xbf16>,
                         %v: memref<?x16x96xbf16>, %i32s: memref<?xi32>, %scale: f32, %lse: memref<?x16xf32>) {
  // CHECK: "kv.mla_prefill_chunk"(%{{.+}}) {accumulate = false, bf16_rope = false} : (!kv.collection<"paged", bf16,
  "kv.mla_prefill_chunk"(%pool, %layer, %q, %i32s, %k, %v, %i32s, %i32s, %scale, %v, %lse) {accumulate = false, bf16_rope = false}
    : (!latent, i32, memref<?x16x192xbf16>, memref<?xi32>, memref<?x16x128xbf16>, memref<?x16x96xbf16>, memref<?xi32>, memref<?xi32>, f32, memref<?x16x96xbf16>, memref<?x16xf32>) -> ()
  // CHECK: "kv.mla_prefill_chunk"(%{{.+}}) {accumulate = true, bf16_rope = true} : (!kv.collection<"paged", f8E4M3FN,
  "kv.mla_prefill_chunk"(%bytes, %layer, %q, %i32s, %k, %v, %i32s, %i32s, %scale, %v, %lse) {accumulate = true, bf16_rope = true}
    : (!bytes, i32, memref<?x16x192xbf16>, memref<?xi32>, memref<?x16x128xbf16>, memref<?x16x96xbf16>, memref<?xi32>, memref<?xi32>, f32, memref<?x16x96xbf16>, memref<?x16xf32>) -> ()
  return
}

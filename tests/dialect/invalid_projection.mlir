// RUN: kv-opt %s --verify-diagnostics

// What the verifiers of products into caches refuse.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>

func.func @project_append(%c: !pool, %i: i32, %x: memref<?x64xbf16>, %w: memref<6016x64xbf16>, %o: memref<?xi32>,
    %q: memref<?x32x128xbf16>, %w2: memref<6144x32xbf16>, %w3: memref<?x64xbf16>, %w4: memref<6144x64xbf16>,
    %q2: memref<?x32x128xf16>, %x2: memref<?x64xf16>, %w5: memref<6144x64xf16>, %s: memref<1x1xf32>,
    %g: memref<128xf32>) {
  // expected-error @below {{'kv.project_append' op weight must have 6144 rows (4096 of query + 1024 of key + 1024 of value), got 6016}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w, row_offsets = %o, query_out = %q)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6016x64xbf16>, memref<?xi32>, memref<?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.project_append' op x and weight must have one K and one element type, got memref<?x64xbf16> and memref<6144x32xbf16>}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w2, row_offsets = %o, query_out = %q)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x32xbf16>, memref<?xi32>, memref<?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.project_append' op x and weight must have static K, and weight static N, got memref<?x64xbf16> and memref<?x64xbf16>}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w3, row_offsets = %o, query_out = %q)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<?x64xbf16>, memref<?xi32>, memref<?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.project_append' op query_out must have the element type of x, bf16, got f16}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w4, row_offsets = %o, query_out = %q2)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x64xbf16>, memref<?xi32>, memref<?x32x128xf16>) -> ()
  // expected-error @below {{'kv.project_append' op collection must take f16, which products are rounded to, got bf16}}
  "kv.project_append"(collection = %c, layer = %i, x = %x2, weight = %w5, row_offsets = %o, query_out = %q2)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xf16>, memref<6144x64xf16>, memref<?xi32>, memref<?x32x128xf16>) -> ()
  // expected-error @below {{'kv.project_append' op takes x_scale and weight_scale unless scaling is none, got scaling row}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w4, row_offsets = %o, query_out = %q)
    {scaling = "row", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x64xbf16>, memref<?xi32>, memref<?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.project_append' op takes scales with x and weight of f8E4M3FN, got bf16}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w4, row_offsets = %o, query_out = %q,
      x_scale = %s, weight_scale = %s)
    {scaling = "tensor", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x64xbf16>, memref<?xi32>, memref<?x32x128xbf16>, memref<1x1xf32>, memref<1x1xf32>) -> ()
  // expected-error @below {{'kv.project_append' op scaling must be one of none, tensor, row, block, group, got "column"}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w4, row_offsets = %o, query_out = %q)
    {scaling = "column", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x64xbf16>, memref<?xi32>, memref<?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.project_append' op takes both q_gamma and k_gamma, or neither}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w4, row_offsets = %o, query_out = %q,
      q_gamma = %g)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x64xbf16>, memref<?xi32>, memref<?x32x128xbf16>, memref<128xf32>) -> ()
  return
}

func.func @project_append_padded(%c: !pool, %i: i32, %x: memref<?x64xbf16>, %w: memref<2048x64xbf16>, %o: memref<?xi32>,
    %f: memref<?x128xf32>) {
  // expected-error @below {{'kv.project_append_padded' op needs query_out with freqs or gammas}}
  "kv.project_append_padded"(collection = %c, layer = %i, x = %x, weight = %w, valid_lengths = %o, freqs = %f)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<2048x64xbf16>, memref<?xi32>, memref<?x128xf32>) -> ()
  return
}

func.func @project_append_2(%c: !latent, %i: i32, %x: memref<?x64xbf16>, %w: memref<1152x64xbf16>, %o: memref<?xi32>,
    %q: memref<?x1x576xbf16>, %f: memref<?x64xf32>, %c2: !pool, %w2: memref<6144x64xbf16>, %q2: memref<?x32x128xbf16>,
    %n: !pool, %b: memref<4096xbf16>, %w3: memref<6144x32xi8>, %weight_scale: memref<6144x2xbf16>) {
  // expected-error @below {{'kv.project_append' op needs a collection with values (is_mla = false)}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w, row_offsets = %o, query_out = %q, freqs = %f)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!latent, i32, memref<?x64xbf16>, memref<1152x64xbf16>, memref<?xi32>, memref<?x1x576xbf16>, memref<?x64xf32>) -> ()
  // expected-error @below {{'kv.project_append' op takes both index_collection and index_query_out, or neither}}
  "kv.project_append"(collection = %c2, layer = %i, x = %x, weight = %w2, row_offsets = %o, query_out = %q2,
      index_collection = %n)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x64xbf16>, memref<?xi32>, memref<?x32x128xbf16>, !pool) -> ()
  // expected-error @below {{'kv.project_append' op bias must have 6144 in dimension 0, got 4096}}
  "kv.project_append"(collection = %c2, layer = %i, x = %x, weight = %w2, row_offsets = %o, query_out = %q2, bias = %b)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x64xbf16>, memref<?xi32>, memref<?x32x128xbf16>, memref<4096xbf16>) -> ()
  // expected-error @below {{'kv.project_append' op weight_format must be one of plain, uint4b8, int4, uint4, e2m1, got "int3"}}
  "kv.project_append"(collection = %c2, layer = %i, x = %x, weight = %w3, row_offsets = %o, query_out = %q2, weight_scale = %weight_scale)
    {scaling = "group", weight_format = "int3", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x32xi8>, memref<?xi32>, memref<?x32x128xbf16>, memref<6144x2xbf16>) -> ()
  // expected-error @below {{'kv.project_append' op needs scaling group with weight_format uint4b8, got none}}
  "kv.project_append"(collection = %c2, layer = %i, x = %x, weight = %w2, row_offsets = %o, query_out = %q2)
    {scaling = "none", weight_format = "uint4b8", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x64xbf16>, memref<?xi32>, memref<?x32x128xbf16>) -> ()
  return
}

func.func @project_append_3(%c: !pool, %i: i32, %x: memref<?x64xbf16>, %w: memref<6144x64xi8>, %o: memref<?xi32>,
    %q: memref<?x32x128xbf16>, %weight_scale: memref<6144x2xbf16>, %w2: memref<6144x32xf8E4M3FN>,
    %w3: memref<6144x32xi8>, %weight_scale2: memref<6144x3xbf16>, %weight_scale3: memref<6000x2xbf16>,
    %weight_scale4: memref<48x1x32x4x4xbf16>, %weight_scale5: memref<48x2x32x4x4xf8E8M0FNU>,
    %x_scale: memref<?x2xbf16>) {
  // expected-error @below {{'kv.project_append' op x and weight must have one K, got memref<?x64xbf16> and memref<6144x64xi8> of weight_format uint4b8}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w, row_offsets = %o, query_out = %q, weight_scale = %weight_scale)
    {scaling = "group", weight_format = "uint4b8", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x64xi8>, memref<?xi32>, memref<?x32x128xbf16>, memref<6144x2xbf16>) -> ()
  // expected-error @below {{'kv.project_append' op weight must have bytes of two elements with weight_format uint4b8, got memref<6144x32xf8E4M3FN>}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w2, row_offsets = %o, query_out = %q, weight_scale = %weight_scale)
    {scaling = "group", weight_format = "uint4b8", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x32xf8E4M3FN>, memref<?xi32>, memref<?x32x128xbf16>, memref<6144x2xbf16>) -> ()
  // expected-error @below {{'kv.project_append' op weight_scale must have groups of a multiple of 8 elements that divide K = 64, got 3}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w3, row_offsets = %o, query_out = %q, weight_scale = %weight_scale2)
    {scaling = "group", weight_format = "uint4b8", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x32xi8>, memref<?xi32>, memref<?x32x128xbf16>, memref<6144x3xbf16>) -> ()
  // expected-error @below {{'kv.project_append' op weight_scale must have shape [6144, 2], got [6000, 2]}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w3, row_offsets = %o, query_out = %q, weight_scale = %weight_scale3)
    {scaling = "group", weight_format = "uint4b8", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x32xi8>, memref<?xi32>, memref<?x32x128xbf16>, memref<6000x2xbf16>) -> ()
  // expected-error @below {{'kv.project_append' op weight_scale of rank 5 must be of f8e4m3 or f8e8m0, got bf16}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w3, row_offsets = %o, query_out = %q, weight_scale = %weight_scale4)
    {scaling = "group", weight_format = "uint4b8", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x32xi8>, memref<?xi32>, memref<?x32x128xbf16>, memref<48x1x32x4x4xbf16>) -> ()
  // expected-error @below {{'kv.project_append' op weight_scale must have shape [48, 1, 32, 4, 4], got [48, 2, 32, 4, 4]}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w3, row_offsets = %o, query_out = %q, weight_scale = %weight_scale5)
    {scaling = "group", weight_format = "uint4b8", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x32xi8>, memref<?xi32>, memref<?x32x128xbf16>, memref<48x2x32x4x4xf8E8M0FNU>) -> ()
  // expected-error @below {{'kv.project_append' op takes weight_scale with scaling group, and x_scale where x is of f8E4M3FN or bytes}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w3, row_offsets = %o, query_out = %q, x_scale = %x_scale, weight_scale = %weight_scale)
    {scaling = "group", weight_format = "uint4b8", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x32xi8>, memref<?xi32>, memref<?x32x128xbf16>, memref<?x2xbf16>, memref<6144x2xbf16>) -> ()
  return
}

func.func @project_append_4(%c: !pool, %i: i32, %x: memref<?x64xf8E4M3FN>, %w: memref<6144x32xi8>, %o: memref<?xi32>,
    %q: memref<?x32x128xbf16>, %x_scale: memref<?x2xbf16>, %weight_scale: memref<6144x2xbf16>, %x2: memref<?x64xbf16>,
    %weight_min: memref<6144x2xf32>, %w2: memref<6144x64xbf16>, %tensor_scale: memref<1x1xf32>) {
  // expected-error @below {{'kv.project_append' op x must be of floats, or f8E4M3FN as a weight of weight_format plain, or bytes as one of e2m1, got memref<?x64xf8E4M3FN> with memref<6144x32xi8> and weight_format uint4b8}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w, row_offsets = %o, query_out = %q, x_scale = %x_scale, weight_scale = %weight_scale)
    {scaling = "group", weight_format = "uint4b8", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xf8E4M3FN>, memref<6144x32xi8>, memref<?xi32>, memref<?x32x128xbf16>, memref<?x2xbf16>, memref<6144x2xbf16>) -> ()
  // expected-error @below {{'kv.project_append' op weight_min must be of the type of weight_scale, got memref<6144x2xf32>}}
  "kv.project_append"(collection = %c, layer = %i, x = %x2, weight = %w, row_offsets = %o, query_out = %q, weight_scale = %weight_scale, weight_min = %weight_min)
    {scaling = "group", weight_format = "uint4b8", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x32xi8>, memref<?xi32>, memref<?x32x128xbf16>, memref<6144x2xbf16>, memref<6144x2xf32>) -> ()
  // expected-error @below {{'kv.project_append' op takes weight_min and tensor_scale with scaling group, got none}}
  "kv.project_append"(collection = %c, layer = %i, x = %x2, weight = %w2, row_offsets = %o, query_out = %q, tensor_scale = %tensor_scale)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x64xbf16>, memref<6144x64xbf16>, memref<?xi32>, memref<?x32x128xbf16>, memref<1x1xf32>) -> ()
  return
}

func.func @buffer_operand(%x: memref<?x100xbf16>, %x2: memref<?x128xbf16>) {
  // expected-error @below {{'kv.buffer_operand' op the buffer must have 128 in dimension 1, got 100}}
  "kv.buffer_operand"(%x) : (memref<?x100xbf16>) -> !kv.operand<"dense", bf16, 2 : i64, 64 : i64, false, 0 : i64, none, 1 : i64>
  // expected-error @below {{'kv.buffer_operand' op result must be a dense operand with packed rows and no scales, got !kv.operand}}
  "kv.buffer_operand"(%x2) : (memref<?x128xbf16>) -> !kv.operand<"ragged", bf16, 2 : i64, 64 : i64, false, 0 : i64, none, 1 : i64>
  return
}

// RUN: kv-opt %s --verify-diagnostics

// What the verifiers of the tier-1 ops refuse.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!fp8_pool = !kv.collection<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!int4_pool = !kv.collection<"paged", ui4, 8 : i64, 128 : i64, false, 16 : i64, vector<2xf16>, 32 : i64>
!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!h96 = !kv.cache<"paged", bf16, 8 : i64, 96 : i64, false, 16 : i64, none, 1 : i64>
!int = !kv.collection<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>

func.func @append(%c: !pool, %i: i32, %k: memref<?x8x128xbf16>, %o: memref<?xi32>, %c2: !latent,
    %k2: memref<?x1x576xbf16>, %v: memref<?x1x576xbf16>, %k3: memref<?x4x128xbf16>, %v2: memref<?x8x128xbf16>,
    %v3: memref<?x8x64xbf16>, %k4: memref<?x8x128xf32>, %c3: !fp8_pool, %k5: memref<?x8x128xf8E4M3FN>,
    %k6: memref<?x1024xbf16>) {
  // expected-error @below {{'kv.append' op takes a value operand for this collection (is_mla = false)}}
  "kv.append"(collection = %c, layer = %i, key = %k, row_offsets = %o)
    : (!pool, i32, memref<?x8x128xbf16>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.append' op takes no value operand for this collection (is_mla = true)}}
  "kv.append"(collection = %c2, layer = %i, key = %k2, row_offsets = %o, value = %v)
    : (!latent, i32, memref<?x1x576xbf16>, memref<?xi32>, memref<?x1x576xbf16>) -> ()
  // expected-error @below {{'kv.append' op key must have 8 in dimension 1, got 4}}
  "kv.append"(collection = %c, layer = %i, key = %k3, row_offsets = %o, value = %v2)
    : (!pool, i32, memref<?x4x128xbf16>, memref<?xi32>, memref<?x8x128xbf16>) -> ()
  // expected-error @below {{'kv.append' op value must have 128 in dimension 2, got 64}}
  "kv.append"(collection = %c, layer = %i, key = %k, row_offsets = %o, value = %v3)
    : (!pool, i32, memref<?x8x128xbf16>, memref<?xi32>, memref<?x8x64xbf16>) -> ()
  // expected-error @below {{'kv.append' op key must have element type bf16, got f32}}
  "kv.append"(collection = %c, layer = %i, key = %k4, row_offsets = %o, value = %v2)
    : (!pool, i32, memref<?x8x128xf32>, memref<?xi32>, memref<?x8x128xbf16>) -> ()
  // expected-error @below {{'kv.append' op key must have element type f32 or f16 or bf16, got f8E4M3FN}}
  "kv.append"(collection = %c3, layer = %i, key = %k5, row_offsets = %o, value = %v2)
    : (!fp8_pool, i32, memref<?x8x128xf8E4M3FN>, memref<?xi32>, memref<?x8x128xbf16>) -> ()
  // expected-error @below {{'kv.append' op key must be a memref of rank 3, got memref<?x1024xbf16>}}
  "kv.append"(collection = %c, layer = %i, key = %k6, row_offsets = %o, value = %v2)
    : (!pool, i32, memref<?x1024xbf16>, memref<?xi32>, memref<?x8x128xbf16>) -> ()
  return
}

func.func @append_2(%c: !pool, %i: i32, %k: memref<*xbf16>, %o: memref<?xi32>, %v: memref<?x8x128xbf16>,
    %k2: memref<?x8x128xbf16>, %o2: memref<?xi64>, %o3: memref<?x?xi32>, %s: memref<?x8x4xf32>, %c2: !fp8_pool,
    %s2: memref<?x8x8xf32>, %c3: !int4_pool, %s3: memref<2xf32>) {
  // expected-error @below {{'kv.append' op takes tensor_scales for a cache of at most 8 bits without zeros only}}
  "kv.append"(collection = %c3, layer = %i, key = %k2, row_offsets = %o, value = %v, tensor_scales = %s3)
    : (!int4_pool, i32, memref<?x8x128xbf16>, memref<?xi32>, memref<?x8x128xbf16>, memref<2xf32>) -> ()
  // expected-error @below {{'kv.append' op takes key_scale or tensor_scales, not both}}
  "kv.append"(collection = %c2, layer = %i, key = %k2, row_offsets = %o, value = %v, key_scale = %s, tensor_scales = %s3)
    : (!fp8_pool, i32, memref<?x8x128xbf16>, memref<?xi32>, memref<?x8x128xbf16>, memref<?x8x4xf32>, memref<2xf32>) -> ()
  // expected-error @below {{'kv.append' op computes scales and zeros of this cache itself: leave key_scale and value_scale out}}
  "kv.append"(collection = %c3, layer = %i, key = %k2, row_offsets = %o, value = %v, key_scale = %s2)
    : (!int4_pool, i32, memref<?x8x128xbf16>, memref<?xi32>, memref<?x8x128xbf16>, memref<?x8x8xf32>) -> ()
  // expected-error @below {{'kv.append' op key must be a memref of rank 3, got memref<*xbf16>}}
  "kv.append"(collection = %c, layer = %i, key = %k, row_offsets = %o, value = %v)
    : (!pool, i32, memref<*xbf16>, memref<?xi32>, memref<?x8x128xbf16>) -> ()
  // expected-error @below {{'kv.append' op row_offsets must have element type i32, got i64}}
  "kv.append"(collection = %c, layer = %i, key = %k2, row_offsets = %o2, value = %v)
    : (!pool, i32, memref<?x8x128xbf16>, memref<?xi64>, memref<?x8x128xbf16>) -> ()
  // expected-error @below {{'kv.append' op row_offsets must be a memref of rank 1, got memref<?x?xi32>}}
  "kv.append"(collection = %c, layer = %i, key = %k2, row_offsets = %o3, value = %v)
    : (!pool, i32, memref<?x8x128xbf16>, memref<?x?xi32>, memref<?x8x128xbf16>) -> ()
  // expected-error @below {{'kv.append' op needs a quantized cache (one with a scale type), got one without scales}}
  "kv.append"(collection = %c, layer = %i, key = %k2, row_offsets = %o, value = %v, key_scale = %s)
    : (!pool, i32, memref<?x8x128xbf16>, memref<?xi32>, memref<?x8x128xbf16>, memref<?x8x4xf32>) -> ()
  // expected-error @below {{'kv.append' op key_scale must have 4 in dimension 2, got 8}}
  "kv.append"(collection = %c2, layer = %i, key = %k2, row_offsets = %o, value = %v, key_scale = %s2)
    : (!fp8_pool, i32, memref<?x8x128xbf16>, memref<?xi32>, memref<?x8x128xbf16>, memref<?x8x8xf32>) -> ()
  return
}

func.func @rope_append(%c: !pool, %i: i32, %q: memref<?x32x128xbf16>, %k: memref<?x8x128xbf16>, %o: memref<?xi32>,
    %f: memref<?x63xf32>, %f2: memref<?x256xf32>, %f3: memref<?x?xf32>, %f4: memref<?x128xbf16>, %f5: memref<?x128xf32>,
    %g: memref<128xf32>, %q2: memref<?x32x64xbf16>, %c2: !latent) {
  // expected-error @below {{'kv.rope_append' op freqs must have an even R of at most 128 in dimension 1, got 63}}
  "kv.rope_append"(collection = %c, layer = %i, query = %q, key = %k, value = %k, row_offsets = %o, freqs = %f,
      query_out = %q)
    {interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x63xf32>, memref<?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.rope_append' op freqs must have an even R of at most 128 in dimension 1, got 256}}
  "kv.rope_append"(collection = %c, layer = %i, query = %q, key = %k, value = %k, row_offsets = %o, freqs = %f2,
      query_out = %q)
    {interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x256xf32>, memref<?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.rope_append' op freqs must have a static extent R in dimension 1, got a dynamic one}}
  "kv.rope_append"(collection = %c, layer = %i, query = %q, key = %k, value = %k, row_offsets = %o, freqs = %f3,
      query_out = %q)
    {interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x?xf32>, memref<?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.rope_append' op freqs must have element type f32, got bf16}}
  "kv.rope_append"(collection = %c, layer = %i, query = %q, key = %k, value = %k, row_offsets = %o, freqs = %f4,
      query_out = %q)
    {interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x128xbf16>, memref<?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.rope_append' op takes both q_gamma and k_gamma, or neither}}
  "kv.rope_append"(collection = %c, layer = %i, query = %q, key = %k, value = %k, row_offsets = %o, freqs = %f5,
      query_out = %q, q_gamma = %g)
    {interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>, memref<128xf32>) -> ()
  // expected-error @below {{'kv.rope_append' op query must have 128 in dimension 2, got 64}}
  "kv.rope_append"(collection = %c, layer = %i, query = %q2, key = %k, value = %k, row_offsets = %o, freqs = %f5,
      query_out = %q2)
    {interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, memref<?x32x64xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x64xbf16>) -> ()
  // expected-error @below {{'kv.rope_append' op needs a collection with values (is_mla = false)}}
  "kv.rope_append"(collection = %c2, layer = %i, query = %q, key = %k, value = %k, row_offsets = %o, freqs = %f5,
      query_out = %q)
    {interleaved = true, eps = 1.0e-6 : f32}
    : (!latent, i32, memref<?x32x128xbf16>, memref<?x8x128xbf16>, memref<?x8x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>) -> ()
  return
}

func.func @rope(%c: !fp8_pool, %i: i32, %q: memref<?x32x128xbf16>, %o: memref<?xi32>, %f: memref<?x128xf32>,
    %c2: !pool) {
  // expected-error @below {{'kv.rope' op needs a cache without scales: rotate before quantizing with kv.rope_append}}
  "kv.rope"(%c, %i, %q, %o, %f, %q) {interleaved = true, mrope_section = array<i64>}
    : (!fp8_pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.rope' op position_ids must be a memref of rank 2, got memref<?xi32>}}
  "kv.rope"(%c2, %i, %q, %o, %f, %q, %o) {interleaved = true, mrope_section = array<i64: 32, 32>}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, memref<?x128xf32>, memref<?x32x128xbf16>, memref<?xi32>) -> ()
  return
}

func.func @store_ragged(%c: !cache, %x: memref<?x8x128xf32>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.store_ragged' op x must have element type bf16, got f32}}
  "kv.store_ragged"(%c, %x, %o) : (!cache, memref<?x8x128xf32>, memref<?xi32>) -> ()
  return
}

func.func @store_padded(%c: !cache, %x: memref<?x8x128xbf16>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.store_padded' op x must be a memref of rank 4, got memref<?x8x128xbf16>}}
  "kv.store_padded"(%c, %x, %o) : (!cache, memref<?x8x128xbf16>, memref<?xi32>) -> ()
  return
}

func.func @rms_norm(%c: !fp8, %g: memref<128xf32>, %o: memref<?xi32>, %n: i32, %c2: !cache, %g2: memref<256xf32>) {
  // expected-error @below {{'kv.rms_norm' op needs a float cache without scales}}
  "kv.rms_norm"(%c, %g, %o, %n) {eps = 1.0e-6 : f32, weight_offset = 0.0 : f32, multiply_before_cast = true}
    : (!fp8, memref<128xf32>, memref<?xi32>, i32) -> ()
  // expected-error @below {{'kv.rms_norm' op gamma must have at most 128 or exactly 1024 elements, got 256}}
  "kv.rms_norm"(%c2, %g2, %o, %n) {eps = 1.0e-6 : f32, weight_offset = 0.0 : f32, multiply_before_cast = true}
    : (!cache, memref<256xf32>, memref<?xi32>, i32) -> ()
  return
}

func.func @radd(%c: !pool, %i: i32, %a: memref<?x1024xbf16>, %o: memref<?xi32>, %c2: !latent,
    %a2: memref<?x1152xbf16>) {
  // expected-error @below {{'kv.radd' op a must have 2048 in dimension 1, got 1024}}
  "kv.radd"(%c, %i, %a, %o, %i) : (!pool, i32, memref<?x1024xbf16>, memref<?xi32>, i32) -> ()
  // expected-error @below {{'kv.radd' op needs a collection with values (is_mla = false)}}
  "kv.radd"(%c2, %i, %a2, %o, %i) : (!latent, i32, memref<?x1152xbf16>, memref<?xi32>, i32) -> ()
  return
}

func.func @iadd_2m(%c: !pool, %i: i32, %a: memref<?x2048xbf16>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.iadd_2m' op kv must have 1024 in dimension 1, got 2048}}
  "kv.iadd_2m"(%c, %i, %a, %o) : (!pool, i32, memref<?x2048xbf16>, memref<?xi32>) -> ()
  return
}

func.func @gather(%c: !cache, %t: memref<?x?xi32>, %o: memref<?xi32>, %x: memref<?x?x8x128xf32>) {
  // expected-error @below {{'kv.gather' op out must have element type bf16, got f32}}
  "kv.gather"(%c, %t, %o, %x) : (!cache, memref<?x?xi32>, memref<?xi32>, memref<?x?x8x128xf32>) -> ()
  return
}

func.func @copy_pages(%c: !pool, %t: memref<?x?xi32>, %o: memref<?xi32>) {
  // expected-error @below {{'kv.copy_pages' op source must be a memref of rank 1, got memref<?x?xi32>}}
  "kv.copy_pages"(%c, %t, %o) : (!pool, memref<?x?xi32>, memref<?xi32>) -> ()
  return
}

func.func @operations(%c: !cache, %d: !h96, %t: memref<?x?xi32>, %o: memref<?xi32>, %i: i32, %x: memref<?xi64>) {
  // expected-error @below {{'kv.convert' op source and destination must have the same heads and head size, got 8 x 128 and 8 x 96}}
  "kv.convert"(%c, %d) : (!cache, !h96) -> ()
  // expected-error @below {{'kv.remap_sparse_indices' op page_size must be a positive integer, got 0 : i64}}
  "kv.remap_sparse_indices"(%t, %o, %t, %i, %t) {page_size = 0 : i64}
    : (memref<?x?xi32>, memref<?xi32>, memref<?x?xi32>, i32, memref<?x?xi32>) -> ()
  // expected-error @below {{'kv.remap_sparse_indices' op lookup_table must be a memref of rank 2, got memref<?xi32>}}
  "kv.remap_sparse_indices"(%t, %o, %o, %i, %t) {page_size = 16 : i64}
    : (memref<?x?xi32>, memref<?xi32>, memref<?xi32>, i32, memref<?x?xi32>) -> ()
  // expected-error @below {{'kv.cache_row_offsets' op out must have element type i32, got i64}}
  "kv.cache_row_offsets"(%o, %o, %x) : (memref<?xi32>, memref<?xi32>, memref<?xi64>) -> ()
  // expected-error @below {{'kv.increment_cache_lengths' op cache_lengths must have element type i32, got i64}}
  "kv.increment_cache_lengths"(%x, %o) : (memref<?xi64>, memref<?xi32>) -> ()
  return
}

func.func @attention(%c: !pool, %i: i32, %q: memref<?x16x128xbf16>, %out: memref<?x16x128xbf16>, %o: memref<?xi32>,
    %s: f32, %q2: memref<?x12x128xbf16>, %out2: memref<?x12x128xbf16>, %q3: memref<?x?x128xbf16>,
    %out3: memref<?x?x128xbf16>, %q4: memref<?x32x128xf32>, %out4: memref<?x32x128xf32>, %q5: memref<?x32x128xbf16>) {
  // expected-error @below {{'kv.attention' op has a schedule whose batch_invariant needs fixed splits of at least one token, got split_size = 0}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {batch_invariant = true, split_size = 0 : i64}}
    : (!pool, i32, memref<?x16x128xbf16>, memref<?xi32>, f32, memref<?x16x128xbf16>) -> ()
  // expected-error @below {{'kv.attention' op has a schedule whose batch_invariant must be true or false, got 2}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {batch_invariant = 2 : i64}}
    : (!pool, i32, memref<?x16x128xbf16>, memref<?xi32>, f32, memref<?x16x128xbf16>) -> ()
  // expected-error @below {{'kv.attention' op query heads must be a multiple of the 8 KV heads, got 12}}
  "kv.attention"(collection = %c, layer = %i, query = %q2, row_offsets = %o, scale = %s, out = %out2)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x12x128xbf16>, memref<?xi32>, f32, memref<?x12x128xbf16>) -> ()
  // expected-error @below {{'kv.attention' op query must have a static number of heads in dimension 1, got a dynamic one}}
  "kv.attention"(collection = %c, layer = %i, query = %q3, row_offsets = %o, scale = %s, out = %out3)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x?x128xbf16>, memref<?xi32>, f32, memref<?x?x128xbf16>) -> ()
  // expected-error @below {{'kv.attention' op query must have element type bf16, got f32}}
  "kv.attention"(collection = %c, layer = %i, query = %q4, row_offsets = %o, scale = %s, out = %out4)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xf32>, memref<?xi32>, f32, memref<?x32x128xf32>) -> ()
  // expected-error @below {{'kv.attention' op out must have 32 in dimension 1, got 16}}
  "kv.attention"(collection = %c, layer = %i, query = %q5, row_offsets = %o, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x16x128xbf16>) -> ()
  return
}

func.func @attention_2(%c: !int, %i: i32, %q: memref<?x32x128xbf16>, %out: memref<?x32x128xbf16>, %o: memref<?xi32>,
    %s: f32, %c2: !latent, %c3: !pool, %n: memref<8xf32>) {
  // expected-error @below {{'kv.attention' op needs a float cache or one with scales, got element type i8}}
  "kv.attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!int, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.attention' op needs a collection with values (is_mla = false)}}
  "kv.attention"(collection = %c2, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!latent, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.attention' op mask must be one of causal, null, sliding_window, chunked, chunked_causal, got "prefix"}}
  "kv.attention"(collection = %c3, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {mask = "prefix", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.attention' op span (the window or chunk) must be positive for mask sliding_window, got 0 : i64}}
  "kv.attention"(collection = %c3, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {mask = "sliding_window", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x32x128xbf16>) -> ()
  // expected-error @below {{'kv.attention' op alibi_slopes must have 32 in dimension 0, got 8}}
  "kv.attention"(collection = %c3, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out, alibi_slopes = %n)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x32x128xbf16>, memref<8xf32>) -> ()
  // expected-error @below {{'kv.attention' op sinks must have 32 in dimension 0, got 8}}
  "kv.attention"(collection = %c3, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out, sinks = %n)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, memref<?x32x128xbf16>, memref<?xi32>, f32, memref<?x32x128xbf16>, memref<8xf32>) -> ()
  return
}

func.func @mla_attention(%c: !pool, %i: i32, %q: memref<?x16x576xbf16>, %o: memref<?xi32>, %s: f32,
    %out: memref<?x16x512xbf16>, %c2: !latent, %out2: memref<?x16x576xbf16>) {
  // expected-error @below {{'kv.mla_attention' op needs an MLA collection (is_mla = true)}}
  "kv.mla_attention"(collection = %c, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {value_size = 512 : i64, mask = "causal", span = 0 : i64}
    : (!pool, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>) -> ()
  // expected-error @below {{'kv.mla_attention' op value_size must be in [1, 576], got 640 : i64}}
  "kv.mla_attention"(collection = %c2, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out)
    {value_size = 640 : i64, mask = "causal", span = 0 : i64}
    : (!latent, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x512xbf16>) -> ()
  // expected-error @below {{'kv.mla_attention' op out must have 512 in dimension 2, got 576}}
  "kv.mla_attention"(collection = %c2, layer = %i, query = %q, row_offsets = %o, scale = %s, out = %out2)
    {value_size = 512 : i64, mask = "causal", span = 0 : i64}
    : (!latent, i32, memref<?x16x576xbf16>, memref<?xi32>, f32, memref<?x16x576xbf16>) -> ()
  return
}

func.func @mla_prefill_plan_and_mla_decompress(%o: memref<?xi32>, %t: memref<?x?xi32>, %c: !cache,
    %x: memref<?x128xbf16>) {
  // expected-error @below {{'kv.mla_prefill_plan' op buffer_tokens must be a positive integer, got 0 : i64}}
  "kv.mla_prefill_plan"(%o, %o, %t, %t, %o) {buffer_tokens = 0 : i64}
    : (memref<?xi32>, memref<?xi32>, memref<?x?xi32>, memref<?x?xi32>, memref<?xi32>) -> ()
  // expected-error @below {{'kv.mla_decompress' op needs a cache of one head, got 8}}
  "kv.mla_decompress"(%c, %o, %o, %x) : (!cache, memref<?xi32>, memref<?xi32>, memref<?x128xbf16>) -> ()
  return
}

// RUN: kv-opt %s --expand-kv-operations='target=sm_90a' --split-input-file --verify-diagnostics

// Expansions choose nothing: they say which entries of a schedule select-kv-schedule has not written.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

func.func @no_kind(%c: !pool, %layer: i32, %q: !rows, %o: !table, %s: f32) {
  // expected-error @below {{the schedule must have a kind, which select-kv-schedule chooses: run it before}}
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %o, scale = %s, out = %q) {mask = "causal", span = 0 : i64, softcap = 0.0 : f32} : (!pool, i32, !rows, !table, f32, !rows) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

func.func @tiles(%c: !pool, %layer: i32, %q: !rows, %o: !table, %s: f32) {
  // expected-error @below {{the schedule must have keys, stages, query_stages, producer, producers, staging_stages, overlap, one_wait, ping_pong, occupancy, persistent, splits, stored_keys, instruction, split_columns, parts, which select-kv-schedule chooses: run it before}}
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %o, scale = %s, out = %q) {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {kind = "tile", rows = 64 : i64}} : (!pool, i32, !rows, !table, f32, !rows) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

func.func @decode(%c: !pool, %layer: i32, %q: !rows, %o: !table, %s: f32) {
  // expected-error @below {{the schedule must have warps, stages, blocks, min_tiles, combine, split_size, which select-kv-schedule chooses: run it before}}
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %o, scale = %s, out = %q) {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {kind = "decode", max_queries = 1 : i64, tile = 16 : i64}} : (!pool, i32, !rows, !table, f32, !rows) -> ()
  return
}

// -----

!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!queries = memref<?x16x576xbf16, strided<[?, ?, 1]>, 1>
!values = memref<?x16x512xbf16, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

func.func @latent(%c: !latent, %layer: i32, %q: !queries, %o: !table, %s: f32, %out: !values) {
  // expected-error @below {{the schedule must have tiles, box_rows, which select-kv-schedule chooses: run it before}}
  "kv.mla_attention"(collection = %c, layer = %layer, query = %q, row_offsets = %o, scale = %s, out = %out) {value_size = 512 : i64, mask = "causal", span = 0 : i64, schedule = {kind = "latent", instruction = "wgmma", rows = 64 : i64}} : (!latent, i32, !queries, !table, f32, !values) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!x = memref<?x4096xbf16, strided<[4096, 1]>, 1>
!w = memref<6144x4096xbf16, strided<[4096, 1]>, 1>
!q = memref<?x32x128xbf16, strided<[4096, 128, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

func.func @product(%c: !pool, %i: i32, %x: !x, %w: !w, %o: !table, %q: !q) {
  // expected-error @below {{the schedule must have runs, warps, which select-kv-schedule chooses: run it before}}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w, row_offsets = %o, query_out = %q)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32, schedule = {kind = "full_k", max_tokens = 8 : i64, tile_columns = 48 : i64}}
    : (!pool, i32, !x, !w, !table, !q) -> ()
  return
}

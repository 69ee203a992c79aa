// RUN: kv-opt %s --select-kv-schedule='target=sm_90a' | FileCheck %s
// RUN: kv-opt %s --select-kv-schedule='target=sm_80' | FileCheck %s --check-prefix=AMPERE

// Blocks have all of K of their columns where heads need no other columns.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!x = memref<?x4096xbf16, strided<[4096, 1]>, 1>
!w = memref<6144x4096xbf16, strided<[4096, 1]>, 1>
!w5 = memref<5120x4096xbf16, strided<[4096, 1]>, 1>
!q = memref<?x32x128xbf16, strided<[4096, 128, 1]>, 1>
!q5 = memref<?x24x128xbf16, strided<[3072, 128, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>
!gamma = memref<128xf32, strided<[1]>, 1>

// AMPERE-NOT: kind = "full_k"
// CHECK-LABEL: func.func @products
func.func @products(%c: !pool, %i: i32, %x: !x, %w: !w, %w5: !w5, %o: !table, %q: !q, %q5: !q5, %g: !gamma) {
  // CHECK: "kv.project_append"{{.*}}schedule = {kind = "full_k", max_tokens = 8 : i64, runs = 1 : i64, tile_columns = 48 : i64, warps = 16 : i64}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w, row_offsets = %o, query_out = %q)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32, schedule = {max_tokens = 8 : i64}}
    : (!pool, i32, !x, !w, !table, !q) -> ()
  // CHECK: "kv.project_append"{{.*}}schedule = {atoms = 1 : i64, kind = "full_k", max_tokens = 1024 : i64, rows = 256 : i64, stages = 3 : i64, tile_columns = 192 : i64}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w, row_offsets = %o, query_out = %q)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32, schedule = {max_tokens = 1024 : i64}}
    : (!pool, i32, !x, !w, !table, !q) -> ()
  // 107 blocks of 48 columns.
  // CHECK: "kv.project_append"{{.*}}schedule = {kind = "full_k", max_tokens = 8 : i64, runs = 1 : i64, tile_columns = 48 : i64, warps = 16 : i64}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w5, row_offsets = %o, query_out = %q5)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32, schedule = {max_tokens = 8 : i64}}
    : (!pool, i32, !x, !w5, !table, !q5) -> ()
  // Of more tokens, an entry of tiles, and norms.
  // CHECK: "kv.project_append"{{.*}}schedule = {columns = 256 : i64, fused = true, kind = "tile", rows = 128 : i64, stages = 3 : i64}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w, row_offsets = %o, query_out = %q)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, !x, !w, !table, !q) -> ()
  // CHECK: "kv.project_append"{{.*}}schedule = {columns = 96 : i64, fused = false, kind = "tile", max_tokens = 128 : i64, rows = 128 : i64, stages = 6 : i64}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w, row_offsets = %o, query_out = %q)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32, schedule = {columns = 96 : i64, max_tokens = 128 : i64}}
    : (!pool, i32, !x, !w, !table, !q) -> ()
  // CHECK: "kv.project_append"{{.*}}schedule = {atoms = 2 : i64, instruction = "wgmma", kind = "stream_k", max_tokens = 8 : i64, rows = 128 : i64, stages = 4 : i64}
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w, row_offsets = %o, query_out = %q, q_gamma = %g, k_gamma = %g)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32, schedule = {max_tokens = 8 : i64}}
    : (!pool, i32, !x, !w, !table, !q, !gamma, !gamma) -> ()
  return
}

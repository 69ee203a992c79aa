// Causal attention with a slope per head, as tiles of 64 query rows and 64 keys.
!pool = !kv.collection<"paged", bf16, 1 : i64, 64 : i64, false, 64 : i64, none, 1 : i64>
!rows = memref<?x2x64xbf16, strided<[?, ?, 1]>, 1>

func.func @attention(%c: !pool, %layer: i32, %q: !rows, %offsets: memref<?xi32, strided<[1]>, 1>, %scale: f32, %out: !rows, %slopes: memref<?xf32, strided<[1]>, 1>)
    attributes {kv.args = [
      {kind = "collection", name = "collection"}, {kind = "scalar", name = "layer", dtype = "i32"},
      {kind = "buffer", name = "query", dtype = "bf16"}, {kind = "buffer", name = "row_offsets", dtype = "i32"},
      {kind = "scalar", name = "scale", dtype = "f32"}, {kind = "buffer", name = "out", dtype = "bf16"}, {kind = "buffer", name = "alibi_slopes", dtype = "f32"}]} {
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out, alibi_slopes = %slopes)
      {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {kind = "tile", rows = 64 : i64, keys = 64 : i64, stages = 2 : i64}}
      : (!pool, i32, !rows, memref<?xi32, strided<[1]>, 1>, f32, !rows, memref<?xf32, strided<[1]>, 1>) -> ()
  return
}

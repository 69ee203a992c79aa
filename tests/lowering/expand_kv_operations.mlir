// RUN: kv-opt %s --select-kv-schedule='target=sm_90a' --expand-kv-operations='target=sm_90a' --split-input-file --verify-diagnostics | FileCheck %s
// RUN: kv-opt %s --select-kv-schedule='target=host' --expand-kv-operations='target=host' --split-input-file | FileCheck %s --check-prefix=HOST
// RUN: kv-opt %s --select-kv-schedule='target=sm_90a' --expand-kv-operations='target=sm_90a check=true' --split-input-file --verify-diagnostics | FileCheck %s --check-prefix=CONTENTS
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=expand-kv-operations --check-semantics-of=expand-kv-operations --lengths=edges -o /dev/null %}

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!rows = memref<?x8x128xbf16, strided<[?, ?, 1]>, 1>
!row = memref<?x1x576xbf16, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// Kernels come once for equal types and schedules, however often they are launched.
// CHECK-LABEL: func.func @two_layers
// CHECK-NOT:     kv.append
// CHECK:         %[[T:.+]] = memref.dim %arg3
// CHECK:         arith.constant 256 : i32
// CHECK:         gpu.launch_func @kernels::@append blocks in ({{.+}}) threads in ({{.+}}) args(%arg0 : {{.+}}, %arg1 : i32
// CHECK:         gpu.launch_func @kernels::@append blocks in ({{.+}}) threads in ({{.+}}) args(%arg0 : {{.+}}, %arg2 : i32
// CHECK:         return
// CHECK:       gpu.module @kernels
// CHECK:         gpu.func @append({{.*}} kernel attributes {kv.args = [{kind = "collection", name = "collection"}
// One vector of 16 bytes of keys and of values; a store tests its page.
// CHECK:         vector.load {{.*}} {alignment = 16 : i64} {{.*}}, vector<8xbf16>
// CHECK:         vector.load {{.*}} {alignment = 16 : i64} {{.*}}, vector<8xbf16>
// CHECK-COUNT-2: "kv.store"({{.*}} {oob = "drop"} : ({{.*}}, vector<8xbf16>)
// CHECK-NOT:     gpu.func
// On the host a block is one thread, which takes a whole token.
// On request kernels that check the offsets and the lengths run before each.
// CONTENTS-LABEL: func.func @two_layers
// CONTENTS:         gpu.launch_func @kernels::@check_offsets {{.*}} args(%arg4 : {{.+}}, %{{.+}} : i32
// CONTENTS:         gpu.launch_func @kernels::@check_lengths {{.*}} args(%arg0 : {{.+}}, %arg4 : {{.+}}, %{{.+}} : i32
// CONTENTS:         gpu.launch_func @kernels::@append
// CONTENTS:         gpu.launch_func @kernels::@check_offsets
// CONTENTS:         gpu.launch_func @kernels::@check_lengths
// CONTENTS:         gpu.launch_func @kernels::@append
// CONTENTS:         gpu.func @check_offsets
// CONTENTS:         cf.assert {{.*}}kv.append: row_offsets must not be negative
// HOST-LABEL: func.func @two_layers
// HOST-NOT:     arith.constant 256 : i32
// HOST:         gpu.launch_func
// HOST-NOT:     nvvm
func.func @two_layers(%c: !pool, %first: i32, %second: i32, %k: !rows, %offsets: !table, %v: !rows) {
  "kv.append"(collection = %c, layer = %first, key = %k, row_offsets = %offsets, value = %v) : (!pool, i32, !rows, !table, !rows) -> ()
  "kv.append"(collection = %c, layer = %second, key = %k, row_offsets = %offsets, value = %v) : (!pool, i32, !rows, !table, !rows) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x8x128xbf16, strided<[?, ?, 1]>, 1>
!freqs = memref<?x128xf32, strided<[?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// The same types with other attributes are other kernels.
// CHECK-LABEL: func.func @both_layouts
// CHECK:         gpu.launch_func @kernels::@rope_append
// CHECK:         gpu.launch_func @kernels::@rope_append_2
// CHECK:       gpu.func @rope_append(
// CHECK:       gpu.func @rope_append_2(
func.func @both_layouts(%c: !pool, %layer: i32, %x: !rows, %offsets: !table, %freqs: !freqs) {
  "kv.rope_append"(collection = %c, layer = %layer, query = %x, key = %x, value = %x, row_offsets = %offsets,
      freqs = %freqs, query_out = %x)
      {interleaved = true, eps = 1.0e-6 : f32} : (!pool, i32, !rows, !rows, !rows, !table, !freqs, !rows) -> ()
  "kv.rope_append"(collection = %c, layer = %layer, query = %x, key = %x, value = %x, row_offsets = %offsets,
      freqs = %freqs, query_out = %x)
      {interleaved = false, eps = 1.0e-6 : f32} : (!pool, i32, !rows, !rows, !rows, !table, !freqs, !rows) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 64 : i64>
!rows = memref<?x8x128xbf16, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// A granule's threads, here eight, find its largest magnitude together; on the host one thread has it.
// CHECK-LABEL: gpu.func @append_quantized
// CHECK:         gpu.shuffle xor {{.*}}
// CHECK:         gpu.shuffle xor {{.*}}
// CHECK:         gpu.shuffle xor {{.*}}
// CHECK-NOT:     gpu.shuffle
// CHECK:         "kv.store"({{.*}}vector<8xf8E4M3FN>
// CHECK:         "kv.store_scale"
// HOST-LABEL:  gpu.func @append_quantized
// HOST-NOT:      gpu.shuffle
// HOST:          "kv.store_scale"
func.func @quantized(%c: !pool, %layer: i32, %k: !rows, %offsets: !table, %v: !rows) {
  "kv.append"(collection = %c, layer = %layer, key = %k, row_offsets = %offsets, value = %v) : (!pool, i32, !rows, !table, !rows) -> ()
  return
}

// -----

!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!row = memref<?x1x576xbf16, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// Rows that are aligned to four bytes are read so.
// CHECK-LABEL: func.func @latent_keys
// CHECK:       gpu.func @append
// CHECK:         vector.load {{.*}} {alignment = 4 : i64} {{.*}}, vector<8xbf16>
// CHECK-NOT:     kv.value_cache
func.func @latent_keys(%c: !latent, %layer: i32, %k: !row, %offsets: !table) {
  "kv.append"(collection = %c, layer = %layer, key = %k, row_offsets = %offsets) {kv.row_alignment = 4 : i64} : (!latent, i32, !row, !table) -> ()
  return
}

// -----

!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 24 : i64, none, 1 : i64>
!queries = memref<?x16x576xbf16, strided<[?, ?, 1]>, 1>
!values = memref<?x16x512xbf16, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>
!lists = memref<?x?xi32, strided<[?, 1]>, 1>

// Rows that a list names are gathered one by one into the same tiles, whatever the page size; one that names nothing
// asks for no byte, which fills it with zeros. Query rows of 8 bytes are gathered, and multiplied by mma.sync.
// CHECK-LABEL: func.func @listed_rows
// CHECK:         gpu.launch_func @kernels::@attention_latent_few blocks
// CHECK:         gpu.launch_func @kernels::@attention blocks
// CHECK:       gpu.func @attention_latent_few({{.*}}name = "args.partials"}{{.*}}name = "args.lists"}, {{.*}}name = "args.list_counts"}
// CHECK-NOT:     kv.load_tile
// CHECK:         memref.load %{{.+}} : memref<?x?xi32, strided<[?, 1]>, 1>
// CHECK:         %[[OPERAND:.+]] = "kv.make_operand"
// CHECK:         "kv.block_ptr"(%[[OPERAND]]
// CHECK:         nvvm.cp.async.shared.global %{{.+}}, %{{.+}}, 16, cache = cg, %{{.+}} : !llvm.ptr<3>, !llvm.ptr<1>, i32
// CHECK:       gpu.func @attention({{.*}}name = "a.out"}{{.*}}name = "a.lists"}
// CHECK-NOT:     list_counts
// CHECK:         "kv.tile_gather"(%arg2
// CHECK:         "kv.tile_load"(
// HOST-LABEL: func.func @listed_rows
// HOST:         gpu.launch_func @kernels::@attention blocks
// HOST:         gpu.launch_func @kernels::@attention_2 blocks
func.func @listed_rows(%c: !latent, %layer: i32, %q: !queries, %o: !table, %s: f32, %out: !values, %x: !lists) {
  "kv.mla_attention"(collection = %c, layer = %layer, query = %q, row_offsets = %o, scale = %s, out = %out,
      indices = %x, topk_lengths = %o)
    {value_size = 512 : i64, mask = "null", span = 0 : i64}
    : (!latent, i32, !queries, !table, f32, !values, !lists, !table) -> ()
  "kv.mla_attention"(collection = %c, layer = %layer, query = %q, row_offsets = %o, scale = %s, out = %out,
      indices = %x)
    {value_size = 512 : i64, mask = "null", span = 0 : i64, kv.row_alignment = 8 : i64}
    : (!latent, i32, !queries, !table, f32, !values, !lists) -> ()
  return
}

// -----

!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!queries = memref<?x16x192xbf16, strided<[?, ?, 1]>, 1>
!keys = memref<?x16x128xbf16, strided<[?, ?, 1]>, 1>
!lse = memref<?x16xf32, strided<[?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// A key is read from the chunk's buffer and, its last columns, from the latent row; the value from a buffer. What
// accumulates is another kernel, which reads what it will write. Rows of 8 bytes are no tiles'.
// CHECK-LABEL: func.func @prefill_chunk
// CHECK:         gpu.launch_func @kernels::@attention blocks
// CHECK:         gpu.launch_func @kernels::@attention_2 blocks
// CHECK:         gpu.launch_func @kernels::@attention_simt blocks
// CHECK:       gpu.func @attention({{.*}}name = "a.lse"}, {{.*}}name = "a.chunk_keys"}, {{.*}}name = "a.chunk_starts"}
// CHECK-NOT:     kv.tile_gather
// CHECK:         %[[Q:.*]] = "kv.tile_load_rows"(%arg2
// CHECK:         scf.for
// CHECK:           %[[NOPE:.*]] = "kv.tile_load_rows"(%arg7
// CHECK:           %[[ROPE:.*]] = "kv.tile_load"({{.*}}first_column = 512 : i64
// CHECK:           %[[V:.*]] = "kv.tile_load_rows"(%arg8
// CHECK:           %[[K:.*]] = "kv.tile_concatenate"(%[[NOPE]], %[[ROPE]])
// CHECK:           "kv.dot"(%{{.*}}, %[[K]]) {transpose_b = true}
// CHECK:           "kv.dot"(%{{.*}}, %[[V]], %{{.*}}) {transpose_b = false}
// CHECK:         "kv.tile_store_rows"(%{{.*}}, %arg5
// CHECK:       gpu.func @attention_2(
// CHECK:         "kv.tile_gather"(%arg6
// CHECK:         "kv.tile_gather"(%arg5
// CHECK:       gpu.func @attention_simt(
// CHECK-NOT:     vector.load %arg5
// CHECK:         vector.load %arg7[{{.*}} {alignment = 8 : i64} {{.*}}, vector<8xbf16>
// CHECK:         "kv.load"({{.*}}vector<8xbf16>
// CHECK:         vector.load %arg8[
// CHECK:         memref.store %{{.+}}, %arg6[
// HOST-LABEL: func.func @prefill_chunk
// HOST:         gpu.launch_func @kernels::@attention blocks
// HOST:         gpu.launch_func @kernels::@attention_2 blocks
func.func @prefill_chunk(%c: !latent, %layer: i32, %q: !queries, %o: !table, %k: !keys, %v: !keys, %s: f32, %out: !keys, %lse: !lse) {
  "kv.mla_prefill_chunk"(%c, %layer, %q, %o, %k, %v, %o, %o, %s, %out, %lse) {accumulate = false, bf16_rope = false}
    : (!latent, i32, !queries, !table, !keys, !keys, !table, !table, f32, !keys, !lse) -> ()
  "kv.mla_prefill_chunk"(%c, %layer, %q, %o, %k, %v, %o, %o, %s, %out, %lse) {accumulate = true, bf16_rope = false}
    : (!latent, i32, !queries, !table, !keys, !keys, !table, !table, f32, !keys, !lse) -> ()
  "kv.mla_prefill_chunk"(%c, %layer, %q, %o, %k, %v, %o, %o, %s, %out, %lse) {accumulate = false, bf16_rope = false, kv.row_alignment = 8 : i64}
    : (!latent, i32, !queries, !table, !keys, !keys, !table, !table, f32, !keys, !lse) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!index = !kv.collection<"paged", bf16, 1 : i64, 128 : i64, true, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16, strided<[?, ?, 1]>, 1>
!padded = memref<?x?x32x128xbf16, strided<[?, ?, ?, 1]>, 1>
!freqs = memref<?x64xf32, strided<[?, 1]>, 1>
!gamma = memref<128xf32, strided<[1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// Sixteen threads have a head of 128 and find its mean square together; index heads are the second row of the grid.
// CHECK-LABEL: func.func @norms
// CHECK:         gpu.launch_func @kernels::@qk_norm_dual
// CHECK:         gpu.launch_func @kernels::@rope_padded
// CHECK-LABEL: gpu.func @qk_norm_dual
// CHECK:         gpu.block_id y
// CHECK-COUNT-4: gpu.shuffle xor
// CHECK-LABEL: gpu.func @rope_padded
// CHECK-NOT:     gpu.shuffle
// HOST-LABEL: func.func @norms
// HOST:         gpu.launch_func @kernels::@qk_norm_dual
func.func @norms(%c: !pool, %x: !index, %layer: i32, %q: !rows, %offsets: !table, %g: !gamma, %f: !freqs, %p: !padded) {
  "kv.qk_norm"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, query_out = %q, q_gamma = %g,
      k_gamma = %g, freqs = %f, index_collection = %x, index_query = %q, index_query_out = %q, index_q_gamma = %g,
      index_k_gamma = %g)
    {interleaved = false, eps = 1.0e-6 : f32, weight_offset = 0.0 : f32}
    : (!pool, i32, !rows, !table, !rows, !gamma, !gamma, !freqs, !index, !rows, !rows, !gamma, !gamma) -> ()
  "kv.rope_padded"(%c, %layer, %p, %offsets, %f, %p) {interleaved = false, mrope_section = array<i64>}
    : (!pool, i32, !padded, !table, !freqs, !padded) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!dense = !kv.operand<"dense", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!ragged = !kv.operand<"ragged", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// One kernel takes a collection's layer and operands of buffers, each without the arguments that the others have.
// CHECK-LABEL: func.func @attention
// CHECK:         gpu.launch_func @kernels::@attention blocks
// CHECK-SAME:      args(%arg0 : !kv.collection<{{[^>]+}}>, %arg1 : i32, %cast{{[_0-9]*}} : memref<
// CHECK:         gpu.launch_func @kernels::@attention_2 blocks
// CHECK-SAME:      args(%arg2 : !kv.operand<"dense", {{[^>]+}}>, %arg3 : !kv.operand<"dense", {{[^>]+}}>, %cast{{[_0-9]*}} : memref<
// CHECK:         gpu.launch_func @kernels::@attention_3 blocks
// CHECK-SAME:      args(%arg4 : !kv.operand<"ragged", {{[^>]+}}>, %arg5 : !kv.operand<"ragged", {{[^>]+}}>, %cast{{[_0-9]*}} : memref<
// CHECK:       gpu.func @attention({{.*}}name = "a.collection"}{{.*}}name = "a.layer"}, {{.*}}name = "a.query"}
// CHECK:         "kv.key_cache"
// CHECK:       gpu.func @attention_2({{.*}}name = "a.keys"}{{.*}}name = "a.values"}, {{.*}}name = "a.query"}
// CHECK-NOT:     kv.key_cache
// CHECK:         "kv.tile_load"({{.*}}!kv.operand<"dense",
// CHECK:       gpu.func @attention_3(
// CHECK:         "kv.tile_load"({{.*}}!kv.operand<"ragged",
// HOST-LABEL: func.func @attention
// HOST:         gpu.launch_func @kernels::@attention blocks
// HOST:         gpu.launch_func @kernels::@attention_2 blocks
// HOST:         gpu.launch_func @kernels::@attention_3 blocks
func.func @attention(%c: !pool, %layer: i32, %dk: !dense, %dv: !dense, %rk: !ragged, %rv: !ragged, %q: !rows, %o: !table, %s: f32) {
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !rows, !table, f32, !rows) -> ()
  "kv.operand_attention"(keys = %dk, values = %dv, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!dense, !dense, !rows, !table, f32, !rows) -> ()
  "kv.operand_attention"(keys = %rk, values = %rv, query = %q, row_offsets = %o, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!ragged, !ragged, !rows, !table, f32, !rows) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!padded = memref<?x?x32x128xbf16, strided<[?, ?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// Each sequence of a padded batch has the tiles of a full one, 128 rows of a KV head's four query heads each.
// CHECK-LABEL: func.func @attention_padded
// CHECK:         %[[B:.+]] = memref.dim %arg3
// CHECK:         %[[SEQUENCES:.+]] = arith.index_cast %[[B]]
// CHECK:         %[[S:.+]] = memref.dim %arg2, %c1
// CHECK:         arith.constant 127 : i32
// CHECK:         %[[TILES:.+]] = arith.shrui
// CHECK:         arith.muli %[[SEQUENCES]], %[[TILES]]
// CHECK:         gpu.launch_func @kernels::@attention blocks
// CHECK:         gpu.launch_func @kernels::@attention_decode blocks
// CHECK:         gpu.launch_func @kernels::@attention_combine blocks
// CHECK:       gpu.func @attention({{.*}}name = "a.query"}, {{{[^}]*}}name = "a.extents"}
// HOST-LABEL: func.func @attention_padded
// HOST:         gpu.launch_func @kernels::@attention blocks
func.func @attention_padded(%c: !pool, %layer: i32, %q: !padded, %valid: !table, %s: f32) {
  "kv.attention_padded"(collection = %c, layer = %layer, query = %q, valid_lengths = %valid, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32}
    : (!pool, i32, !padded, !table, f32, !padded) -> ()
  "kv.attention_padded"(collection = %c, layer = %layer, query = %q, valid_lengths = %valid, scale = %s, out = %q)
    {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {max_queries = 2 : i64, max_batch = 1 : i64}}
    : (!pool, i32, !padded, !table, f32, !padded) -> ()
  return
}

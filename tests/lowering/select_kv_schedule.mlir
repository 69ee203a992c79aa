// RUN: kv-opt %s --select-kv-schedule='target=sm_90a' --split-input-file --verify-diagnostics | FileCheck %s
// RUN: kv-opt %s --select-kv-schedule='target=sm_90a' --select-kv-schedule='target=sm_90a' --split-input-file --verify-diagnostics | FileCheck %s
// RUN: not kv-opt %s --select-kv-schedule='target=host' --split-input-file 2>/dev/null | FileCheck %s --check-prefix=HOST
// RUN: not kv-opt %s --select-kv-schedule='target=host' --split-input-file 2>&1 >/dev/null | FileCheck %s --check-prefix=REFUSED
// RUN: kv-opt %s --select-kv-schedule='target=sm_90a' --split-input-file --verify-diagnostics --remarks-filter=select-kv-schedule 2>&1 >/dev/null | FileCheck %s --check-prefix=REMARK
// RUN: env KVARN_TUNE=%S/Inputs/tune.json kv-opt %s --select-kv-schedule='target=sm_90a' --split-input-file --verify-diagnostics | FileCheck %s --check-prefix=TUNED
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=select-kv-schedule --check-semantics-of=select-kv-schedule --lengths=edges -o /dev/null %}

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16, strided<[?, ?, 1]>, 1>
!wide = memref<?x64x128xbf16, strided<[?, ?, 1]>, 1>
!padded = memref<?x?x32x128xbf16, strided<[?, ?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// One sequence: a merge kernel; entries that are given stay.
// CHECK-LABEL: func.func @one_sequence
// CHECK:         schedule = {blocks = 1 : i64, combine = 16 : i64, kind = "decode", max_batch = 1 : i64, max_queries = 1 : i64, min_tiles = 2 : i64, split_size = 0 : i64, stages = 4 : i64, tile = 16 : i64, warps = 4 : i64}
// REFUSED: 'kv.attention' op cannot be scheduled for host: the schedule's entry 'stages' is only for kernels of kind tile or decode: a host kernel of this operation has kind, max_queries, max_batch, batch_invariant, early
// The user's table has an entry for it too, which gives way to what the operation says.
// TUNED-LABEL: func.func @one_sequence
// TUNED:         schedule = {blocks = 3 : i64, combine = 8 : i64, {{.*}}min_tiles = 2 : i64, {{.*}}stages = 4 : i64
func.func @one_sequence(%c: !pool, %layer: i32, %q: !rows, %offsets: !table, %scale: f32, %out: !rows) {
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {max_queries = 1 : i64, max_batch = 1 : i64, stages = 4 : i64}} : (!pool, i32, !rows, !table, f32, !rows) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16, strided<[?, ?, 1]>, 1>
!wide = memref<?x64x128xbf16, strided<[?, ?, 1]>, 1>
!padded = memref<?x?x32x128xbf16, strided<[?, ?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// Many sequences: the kernel merges by itself.
// CHECK-LABEL: func.func @many_sequences
// CHECK:         combine = 0 : i64, kind = "decode"
// TUNED-LABEL: func.func @many_sequences
// TUNED:         combine = 0 : i64, kind = "decode", {{.*}}stages = 2 : i64
func.func @many_sequences(%c: !pool, %layer: i32, %q: !rows, %offsets: !table, %scale: f32, %out: !rows) {
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {max_queries = 1 : i64, max_batch = 128 : i64}} : (!pool, i32, !rows, !table, f32, !rows) -> ()
  return
}

// A batch-invariant sequence is cut by its own length into tiles of one size, whatever the table has for the batch.
// CHECK-LABEL: func.func @invariant_one
// CHECK:         batch_invariant = true, {{.*}}combine = 16 : i64, {{.*}}split_size = 64 : i64, {{.*}}tile = 16 : i64
// TUNED-LABEL: func.func @invariant_one
// TUNED:         blocks = 3 : i64, combine = 8 : i64, {{.*}}split_size = 64 : i64, {{.*}}tile = 16 : i64
func.func @invariant_one(%c: !pool, %layer: i32, %q: !rows, %offsets: !table, %scale: f32, %out: !rows) {
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {max_queries = 1 : i64, max_batch = 1 : i64, batch_invariant = true}} : (!pool, i32, !rows, !table, f32, !rows) -> ()
  return
}

// CHECK-LABEL: func.func @invariant_many
// CHECK:         batch_invariant = true, {{.*}}combine = 0 : i64, {{.*}}split_size = 64 : i64, {{.*}}tile = 16 : i64
func.func @invariant_many(%c: !pool, %layer: i32, %q: !rows, %offsets: !table, %scale: f32, %out: !rows) {
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {max_queries = 1 : i64, max_batch = 128 : i64, batch_invariant = true}} : (!pool, i32, !rows, !table, f32, !rows) -> ()
  return
}

// Speculated tokens: more rows than a decode's warp has are tiles, of the fewest rows that hold them.
// CHECK-LABEL: func.func @many_rows_of_few
// CHECK:         kind = "tile", max_batch = 16 : i64, {{.*}}rows = 64 : i64
func.func @many_rows_of_few(%c: !pool, %layer: i32, %q: !wide, %offsets: !table, %scale: f32, %out: !wide) {
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {max_queries = 8 : i64, max_batch = 16 : i64}} : (!pool, i32, !wide, !table, f32, !wide) -> ()
  return
}

// CHECK-LABEL: func.func @many_rows_of_many
// CHECK:         kind = "tile"
func.func @many_rows_of_many(%c: !pool, %layer: i32, %q: !wide, %offsets: !table, %scale: f32, %out: !wide) {
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {max_queries = 8 : i64, max_batch = 128 : i64}} : (!pool, i32, !wide, !table, f32, !wide) -> ()
  return
}

// Without a bound of the new tokens it is no decode; the host has one kind only.
// CHECK-LABEL: func.func @unbounded
// CHECK:         schedule = {{.*}}kind = "tile"
// HOST-LABEL: func.func @unbounded
// HOST:         schedule = {kind = "host"}
func.func @unbounded(%c: !pool, %layer: i32, %q: !rows, %offsets: !table, %scale: f32, %out: !rows) {
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {mask = "causal", span = 0 : i64, softcap = 0.0 : f32} : (!pool, i32, !rows, !table, f32, !rows) -> ()
  return
}

// A padded batch has the schedules of a ragged one.
// CHECK-LABEL: func.func @padded
// CHECK:         combine = 0 : i64, kind = "decode"
// CHECK:         schedule = {{.*}}kind = "tile"
// HOST-LABEL: func.func @padded
// HOST-COUNT-2: kind = "host"
func.func @padded(%c: !pool, %layer: i32, %q: !padded, %valid: !table, %scale: f32, %out: !padded) {
  "kv.attention_padded"(collection = %c, layer = %layer, query = %q, valid_lengths = %valid, scale = %scale,
      out = %out)
      {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {max_queries = 1 : i64, max_batch = 128 : i64}} : (!pool, i32, !padded, !table, f32, !padded) -> ()
  "kv.attention_padded"(collection = %c, layer = %layer, query = %q, valid_lengths = %valid, scale = %scale,
      out = %out)
      {mask = "causal", span = 0 : i64, softcap = 0.0 : f32} : (!pool, i32, !padded, !table, f32, !padded) -> ()
  return
}

// Latent rows, chunks and operands have a kind too; operations with one kernel have nothing to choose.
// CHECK-LABEL: func.func @others
// CHECK:         "kv.mla_attention"{{.*}}schedule = {box_rows = 16 : i64, instruction = "wgmma", kind = "latent", rows = 64 : i64, tiles = 0 : i64}
// CHECK:         "kv.operand_attention"{{.*}}schedule = {{.*}}kind = "tile"
// CHECK:         "kv.append"
// CHECK-NOT:     schedule
// HOST-LABEL: func.func @others
// HOST:         "kv.mla_attention"{{.*}}schedule = {kind = "host"}
// HOST:         "kv.operand_attention"{{.*}}schedule = {kind = "host"}
!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 16 : i64, none, 1 : i64>
!keys = !kv.operand<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!wider = memref<?x16x576xbf16, strided<[?, ?, 1]>, 1>
!values = memref<?x16x512xbf16, strided<[?, ?, 1]>, 1>
!tokens = memref<?x8x128xbf16, strided<[?, ?, 1]>, 1>
func.func @others(%c: !pool, %latent: !latent, %keys: !keys, %layer: i32, %q: !rows, %wide: !wider, %offsets: !table, %scale: f32, %out: !values, %x: !tokens) {
  "kv.mla_attention"(collection = %latent, layer = %layer, query = %wide, row_offsets = %offsets, scale = %scale,
      out = %out)
      {value_size = 512 : i64, mask = "causal", span = 0 : i64} : (!latent, i32, !wider, !table, f32, !values) -> ()
  "kv.operand_attention"(keys = %keys, values = %keys, query = %q, row_offsets = %offsets, scale = %scale, out = %q) {mask = "causal", span = 0 : i64, softcap = 0.0 : f32} : (!keys, !keys, !rows, !table, f32, !rows) -> ()
  "kv.append"(collection = %c, layer = %layer, key = %x, row_offsets = %offsets, value = %x) : (!pool, i32, !tokens, !table, !tokens) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// A schedule that says all of it stays as it is.
// CHECK-LABEL: func.func @complete
// CHECK:         schedule = {blocks = 2 : i64, combine = 8 : i64, early = true, kind = "decode", max_batch = 4 : i64, max_queries = 1 : i64, min_tiles = 3 : i64, split_size = 128 : i64, stages = 3 : i64, tile = 32 : i64, warps = 2 : i64}
// REFUSED: the schedule's kind must be host on host, got 'decode'
func.func @complete(%c: !pool, %layer: i32, %q: !rows, %offsets: !table, %scale: f32, %out: !rows) {
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {blocks = 2 : i64, combine = 8 : i64, early = true, kind = "decode", max_batch = 4 : i64, max_queries = 1 : i64, min_tiles = 3 : i64, split_size = 128 : i64, stages = 3 : i64, tile = 32 : i64, warps = 2 : i64}} : (!pool, i32, !rows, !table, f32, !rows) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// What is legal depends on the case: three warps cannot share eight heads.
func.func @rule(%c: !pool, %layer: i32, %q: !rows, %offsets: !table, %scale: f32, %out: !rows) {
  // expected-error @below {{'kv.attention' op cannot be scheduled for sm_90a: the schedule's warps must be 1, 2, 4 or 8, a divisor of the 8 warps that a token's query rows need, got 3}}
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {max_queries = 1 : i64, warps = 3 : i64}} : (!pool, i32, !rows, !table, f32, !rows) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x128xbf16, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// An entry that the chosen kernel does not have is not passed over.
func.func @rule(%c: !pool, %layer: i32, %q: !rows, %offsets: !table, %scale: f32, %out: !rows) {
  // expected-error @below {{'kv.attention' op cannot be scheduled for sm_90a: the schedule's entry 'blocks' is only for kernels of kind decode: a tile kernel of this operation has kind, max_queries, max_batch, batch_invariant, early, expected_rows, rows, keys, stages, query_stages, producer, producers, staging_stages, overlap, one_wait, ping_pong, occupancy, persistent}}
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {blocks = 3 : i64}} : (!pool, i32, !rows, !table, f32, !rows) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 520 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x520xbf16, strided<[?, ?, 1]>, 1>
!small = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 4 : i64, none, 1 : i64>
!whole = memref<?x32x128xbf16, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// A slower kernel is taken where the others cannot be, and a remark says why. Pages of any size are tiles.
// CHECK-LABEL: func.func @slower
// CHECK:         kind = "simt"
// CHECK:         kind = "tile"
// CHECK:         kind = "simt"
// REMARK:      remark: missed: kind simt is not the fastest: a kernel of kind decode needs a head size of a multiple of 8 up to 512, got 520 [select-kv-schedule]
// REMARK:      remark: missed: kind simt is not the fastest: a kernel of kind tile needs a head size up to 512, got 520
// REMARK-NOT:  remark:
func.func @slower(%c: !pool, %s: !small, %layer: i32, %q: !rows, %w: !whole, %offsets: !table, %scale: f32, %out: !rows, %to: !whole) {
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {kv.row_alignment = 16 : i64, mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {max_queries = 1 : i64}} : (!pool, i32, !rows, !table, f32, !rows) -> ()
  "kv.attention"(collection = %s, layer = %layer, query = %w, row_offsets = %offsets, scale = %scale, out = %to) {kv.row_alignment = 16 : i64, mask = "causal", span = 0 : i64, softcap = 0.0 : f32} : (!small, i32, !whole, !table, f32, !whole) -> ()
  "kv.attention"(collection = %s, layer = %layer, query = %w, row_offsets = %offsets, scale = %scale, out = %to) {kv.row_alignment = 16 : i64, mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {kind = "simt"}} : (!small, i32, !whole, !table, f32, !whole) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", f8E4M3FN, 8 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x32x64xbf16, strided<[?, ?, 1]>, 1>
!halves = memref<?x32x64xf16, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// A mixed batch: sequences of few new tokens go to a decode kernel, if the launch finds the batch uneven.
// CHECK-LABEL: func.func @mixed
// CHECK:         decode_blocks = {{.*}}decode_max_batch = 128 : i64, {{.*}}decode_share = 10 : i64, {{.*}}decode_threshold = 2 : i64, {{.*}}kind = "tile", {{.*}}uneven = true
// CHECK:         decode_threshold = 2 : i64, {{.*}}uneven = false
// CHECK:         batch_invariant = true, {{.*}}decode_max_batch = 1024 : i64, {{.*}}decode_threshold = 2 : i64, {{.*}}uneven = false
// CHECK-NOT:     uneven
// CHECK:         return
func.func @mixed(%c: !pool, %layer: i32, %q: !rows, %offsets: !table, %scale: f32, %out: !rows) {
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {kv.row_alignment = 16 : i64, mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {max_batch = 128 : i64}} : (!pool, i32, !rows, !table, f32, !rows) -> ()
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {kv.row_alignment = 16 : i64, mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {decode_threshold = 2 : i64, max_batch = 128 : i64}} : (!pool, i32, !rows, !table, f32, !rows) -> ()
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {kv.row_alignment = 16 : i64, mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {batch_invariant = true}} : (!pool, i32, !rows, !table, f32, !rows) -> ()
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {kv.row_alignment = 16 : i64, mask = "causal", span = 0 : i64, softcap = 0.0 : f32, schedule = {decode_threshold = 0 : i64, max_batch = 128 : i64}} : (!pool, i32, !rows, !table, f32, !rows) -> ()
  return
}

// 8-bit keys are multiplied as they are stored by a query of bf16, or a remark says why they are converted.
// CHECK-LABEL: func.func @stored_keys
// CHECK:         stored_keys = true
// CHECK:         stored_keys = false
// REMARK:      remark: missed: keys are converted before they are multiplied: unconverted keys need a bf16 query over f8e4m3 or f8e5m2 keys by wgmma, got f16 over f8e4m3 by wgmma
// REMARK-NOT:  remark:
func.func @stored_keys(%c: !pool, %layer: i32, %q: !rows, %h: !halves, %offsets: !table, %scale: f32, %out: !rows, %to: !halves) {
  "kv.attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {kv.row_alignment = 16 : i64, mask = "causal", span = 0 : i64, softcap = 0.0 : f32} : (!pool, i32, !rows, !table, f32, !rows) -> ()
  "kv.attention"(collection = %c, layer = %layer, query = %h, row_offsets = %offsets, scale = %scale, out = %to) {kv.row_alignment = 16 : i64, mask = "causal", span = 0 : i64, softcap = 0.0 : f32} : (!pool, i32, !halves, !table, f32, !halves) -> ()
  return
}

// -----

!rows = !kv.collection<"paged", f32, 1 : i64, 576 : i64, true, 16 : i64, none, 1 : i64>
!queries = memref<?x16x576xf32, strided<[?, ?, 1]>, 1>
!values = memref<?x16x512xf32, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// So it is with latent rows.
// CHECK-LABEL: func.func @slower_latent
// CHECK:         schedule = {kind = "simt"}
// REMARK:      remark: missed: kind simt is not the fastest: that of kind latent on wgmma needs a query of bf16, f16 or f8e4m3 and an output of its type or f32, got f32 and f32
func.func @slower_latent(%c: !rows, %layer: i32, %q: !queries, %offsets: !table, %scale: f32, %out: !values) {
  "kv.mla_attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {kv.row_alignment = 16 : i64, value_size = 512 : i64, mask = "causal", span = 0 : i64} : (!rows, i32, !queries, !table, f32, !values) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 16 : i64, none, 1 : i64>
!queries = memref<?x16x576xbf16, strided<[?, ?, 1]>, 1>
!values = memref<?x16x512xbf16, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// Functions over latent rows and offsets of keys are for every kernel of kind latent.
// CHECK-LABEL: func.func @functions_of_latent
// CHECK-COUNT-2: schedule = {box_rows = 16 : i64, instruction = "wgmma", kind = "latent", rows = 64 : i64, tiles = 0 : i64}
// REMARK-NOT:  remark:
func.func @functions_of_latent(%c: !pool, %layer: i32, %q: !queries, %offsets: !table, %scale: f32, %out: !values) {
  "kv.mla_attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {kv.row_alignment = 16 : i64, value_size = 512 : i64, mask = "causal", score = "t5@0123", span = 0 : i64} : (!pool, i32, !queries, !table, f32, !values) -> ()
  "kv.mla_attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out, kv_offsets = %offsets) {kv.row_alignment = 16 : i64, value_size = 512 : i64, mask = "causal", span = 0 : i64} : (!pool, i32, !queries, !table, f32, !values, !table) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 16 : i64, none, 1 : i64>
!queries = memref<?x16x576xbf16, strided<[?, ?, 1]>, 1>
!values = memref<?x16x512xbf16, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// Entries that are decided here are nobody's to set.
func.func @decided(%c: !pool, %layer: i32, %q: !queries, %offsets: !table, %scale: f32, %out: !values) {
  // expected-error @below {{'kv.mla_attention' op cannot be scheduled for sm_90a: the schedule's rows must be 64, which nothing but this pass decides, got 32}}
  "kv.mla_attention"(collection = %c, layer = %layer, query = %q, row_offsets = %offsets, scale = %scale, out = %out) {kv.row_alignment = 16 : i64, value_size = 512 : i64, mask = "causal", span = 0 : i64, schedule = {kind = "latent", rows = 32 : i64}} : (!pool, i32, !queries, !table, f32, !values) -> ()
  return
}

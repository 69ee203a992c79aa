// RUN: kv-opt %s --expand-kv-operations='target=sm_90a' --split-input-file --verify-diagnostics | FileCheck %s
// RUN: kv-opt %s --expand-kv-operations='target=host' --split-input-file | FileCheck %s --check-prefix=HOST

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
// HOST-LABEL: func.func @two_layers
// HOST-NOT:     arith.constant 256 : i32
// HOST:         gpu.launch_func
// HOST-NOT:     nvvm
func.func @two_layers(%c: !pool, %first: i32, %second: i32, %k: !rows, %offsets: !table, %v: !rows) {
  "kv.append"(%c, %first, %k, %offsets, %v) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 0, 0>} : (!pool, i32, !rows, !table, !rows) -> ()
  "kv.append"(%c, %second, %k, %offsets, %v) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 0, 0>} : (!pool, i32, !rows, !table, !rows) -> ()
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
  "kv.rope_append"(%c, %layer, %x, %x, %x, %offsets, %freqs, %x) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 1, 0, 0>, interleaved = true, eps = 1.0e-6 : f32} : (!pool, i32, !rows, !rows, !rows, !table, !freqs, !rows) -> ()
  "kv.rope_append"(%c, %layer, %x, %x, %x, %offsets, %freqs, %x) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 1, 0, 0>, interleaved = false, eps = 1.0e-6 : f32} : (!pool, i32, !rows, !rows, !rows, !table, !freqs, !rows) -> ()
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
  "kv.append"(%c, %layer, %k, %offsets, %v) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 0, 0>} : (!pool, i32, !rows, !table, !rows) -> ()
  return
}

// -----

!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!row = memref<?x1x576xbf16, strided<[?, ?, 1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// Rows that are aligned to four bytes are read so; a schedule sets the block.
// CHECK-LABEL: func.func @latent_keys
// CHECK:         arith.constant 128 : i32
// CHECK:       gpu.func @append
// CHECK:         vector.load {{.*}} {alignment = 4 : i64} {{.*}}, vector<8xbf16>
// CHECK-NOT:     kv.value_cache
func.func @latent_keys(%c: !latent, %layer: i32, %k: !row, %offsets: !table) {
  "kv.append"(%c, %layer, %k, %offsets) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 0, 0, 0>, kv.row_alignment = 4 : i64, schedule = {threads = 128 : i64}} : (!latent, i32, !row, !table) -> ()
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
  "kv.qk_norm"(%c, %layer, %q, %offsets, %q, %g, %g, %f, %x, %q, %q, %g, %g)
    {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1>, interleaved = false, eps = 1.0e-6 : f32, weight_offset = 0.0 : f32}
    : (!pool, i32, !rows, !table, !rows, !gamma, !gamma, !freqs, !index, !rows, !rows, !gamma, !gamma) -> ()
  "kv.rope_padded"(%c, %layer, %p, %offsets, %f, %p) {interleaved = false, mrope_section = array<i64>}
    : (!pool, i32, !padded, !table, !freqs, !padded) -> ()
  return
}

// RUN: kv-opt %s --select-kv-schedule='target=sm_90a' --expand-kv-operations='target=sm_90a' | FileCheck %s
// RUN: kv-opt %s --select-kv-schedule='target=sm_80' --expand-kv-operations='target=sm_80' | FileCheck %s --check-prefix=AMPERE
// RUN: kv-opt %s --select-kv-schedule='target=host' --expand-kv-operations='target=host' | FileCheck %s --check-prefix=HOST

// Which kernels a product into a cache becomes, by its tokens, its weight and the target.

!pool = !kv.collection<"paged", bf16, 2 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>
!x = memref<?x256xbf16, strided<[256, 1]>, 1>
!w = memref<384x256xbf16, strided<[256, 1]>, 1>
!w4 = memref<384x128xi8, strided<[128, 1]>, 1>
!s = memref<384x8xbf16, strided<[8, 1]>, 1>
!q = memref<?x2x64xbf16, strided<[128, 64, 1]>, 1>
!gamma = memref<64xf32, strided<[1]>, 1>
!table = memref<?xi32, strided<[1]>, 1>

// Few tokens whose heads are normalised read the weight in even parts; more have tiles of their own shape; a weight of 4 bits is converted in
// registers, or before kernels of many tokens. A workspace's rows are described to TMA as an argument's are.
// CHECK-LABEL: func.func @products
// CHECK:         gpu.launch_func @kernels::@project_few blocks
// CHECK:         gpu.launch_func @kernels::@project_few_finish blocks
// CHECK:         gpu.launch_func @kernels::@project_append blocks
// CHECK:         gpu.launch_func @kernels::@project_finish blocks
// CHECK:         gpu.launch_func @kernels::@project_few_2 blocks
// CHECK:         gpu.launch_func @kernels::@project_few_finish
// CHECK:         %[[VALUES:.+]] = memref.alloc({{.*}}) : memref<?x256xbf16, strided<[256, 1]>, 1>
// CHECK:         gpu.launch_func @kernels::@dequantize blocks
// CHECK:         "kv.buffer_operand"(%[[VALUES]])
// CHECK:         gpu.launch_func @kernels::@project_append
// CHECK-NOT:     kv.project_append
// CHECK:         return
// CHECK:       gpu.func @project_few_2(
// CHECK:         prmt.b32
// CHECK:         nvvm.mma.sync
// Without wgmma all are mma.sync's, of few tokens in even parts too.
// AMPERE-LABEL: func.func @products
// AMPERE:         gpu.launch_func @kernels::@project_few blocks
// AMPERE:         gpu.launch_func @kernels::@project_few_finish blocks
// AMPERE:         gpu.launch_func @kernels::@project_few_2 blocks
// AMPERE:         gpu.launch_func @kernels::@project_few_3 blocks
// AMPERE:         gpu.launch_func @kernels::@dequantize blocks
// AMPERE:         gpu.launch_func @kernels::@project_append blocks
// AMPERE:         return
// AMPERE:       nvvm.mma.sync
// HOST-LABEL: func.func @products
// HOST:         gpu.launch_func @kernels::@project blocks
// HOST:         gpu.launch_func @kernels::@project_finish blocks
// HOST:         gpu.launch_func @kernels::@dequantize blocks
// HOST-NOT:     project_few
// HOST:         return
func.func @products(%c: !pool, %i: i32, %x: !x, %w: !w, %w4: !w4, %s: !s, %o: !table, %q: !q, %g: !gamma) {
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w, row_offsets = %o, query_out = %q, q_gamma = %g, k_gamma = %g)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32, schedule = {max_tokens = 8 : i64}}
    : (!pool, i32, !x, !w, !table, !q, !gamma, !gamma) -> ()
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w, row_offsets = %o, query_out = %q, q_gamma = %g, k_gamma = %g)
    {scaling = "none", weight_format = "plain", interleaved = true, eps = 1.0e-6 : f32, schedule = {max_tokens = 64 : i64}}
    : (!pool, i32, !x, !w, !table, !q, !gamma, !gamma) -> ()
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w4, row_offsets = %o, query_out = %q, weight_scale = %s)
    {scaling = "group", weight_format = "uint4b8", interleaved = true, eps = 1.0e-6 : f32, schedule = {max_tokens = 8 : i64}}
    : (!pool, i32, !x, !w4, !table, !q, !s) -> ()
  "kv.project_append"(collection = %c, layer = %i, x = %x, weight = %w4, row_offsets = %o, query_out = %q, weight_scale = %s)
    {scaling = "group", weight_format = "uint4b8", interleaved = true, eps = 1.0e-6 : f32}
    : (!pool, i32, !x, !w4, !table, !q, !s) -> ()
  return
}

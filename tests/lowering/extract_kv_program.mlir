// RUN: kv-opt %s --extract-kv-program --split-input-file --verify-diagnostics | FileCheck %s
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=extract-kv-program --check-semantics-of=extract-kv-program --lengths=edges -o /dev/null %}

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = memref<?x8x128xbf16, strided<[?, ?, 1]>, 1>
!any = memref<?x?x?xbf16, strided<[?, ?, 1]>, 1>
!bytes = memref<?xi8, strided<[1]>, 1>

// Shapes, fields, scalars and facts of the device become expressions; scratch memory is named; the function goes.
// CHECK: kv.program = "{\22name\22: \22step\22
// CHECK-SAME: \22entry\22: \22fill\22
// CHECK-SAME: \22grid\22: {{\[\[}}\22min\22, [\22floordiv\22, [\22add\22, [\22arg\22, 1, \22shape0\22], 7], 8], [\22mul\22, [\22device\22, \22multiprocessors\22], 4]], [\22arg\22, 0, \22batch\22], 1]
// CHECK-SAME: \22block\22: [128, 1, 1]
// CHECK-SAME: \22args\22: {{\[\[}}\22arg\22, 0], [\22arg\22, 1], [\22arg\22, 2], [\22workspace\22, \22workspace0\22]]
// CHECK-SAME: \22attributes\22: {\22programmatic\22: true}
// CHECK-SAME: \22entry\22: \22merge\22
// CHECK-SAME: \22grid\22: {{\[\[}}\22select\22, [\22gt\22, [\22arg\22, 2, \22value\22], 0], 2, 1], 1, 1]
// CHECK-SAME: \22args\22: {{\[\[}}\22workspace\22, \22workspace0\22], [\22add\22, [\22arg\22, 2, \22value\22], 1]]
// CHECK-SAME: \22workspaces\22: [{\22name\22: \22workspace0\22, \22bytes\22: [\22mul\22, [\22arg\22, 1, \22shape0\22], 64], \22zeroed\22: true}]
// CHECK-SAME: kv.program_args = [{kind = "collection", name = "c"}
// CHECK-NOT:  func.func
// CHECK:      gpu.func @fill
// CHECK:      gpu.func @merge
module attributes {gpu.container_module} {
  func.func @step(%c: !pool, %x: !rows, %n: i32) attributes {kv.args = [{kind = "collection", name = "c"}, {kind = "buffer", name = "x", dtype = "bf16"}, {kind = "scalar", name = "n", dtype = "i32"}]} {
    %c0 = arith.constant 0 : index
    %one = arith.constant 1 : index
    %threads = arith.constant 128 : index
    %i0 = arith.constant 0 : i32
    %i1 = arith.constant 1 : i32
    %i2 = arith.constant 2 : i32
    %i3 = arith.constant 3 : i32
    %i6 = arith.constant 6 : i32
    %i7 = arith.constant 7 : i32
    %dim = memref.dim %x, %c0 : !rows
    %t = arith.index_cast %dim : index to i32
    %up = arith.addi %t, %i7 : i32
    %blocks = arith.shrui %up, %i3 : i32
    %sms = "kv.device_attribute"() {attribute = "multiprocessors"} : () -> i32
    %most = arith.shli %sms, %i2 : i32
    %grid = arith.minui %blocks, %most : i32
    %gx = arith.index_cast %grid : i32 to index
    %batch = "kv.field"(%c) {field = "batch"} : (!pool) -> i32
    %gy = arith.index_cast %batch : i32 to index
    %size = arith.shli %t, %i6 : i32
    %bytes = arith.index_cast %size : i32 to index
    %scratch = memref.alloc(%bytes) {kv.zeroed} : !bytes
    %any = memref.cast %x : !rows to !any
    gpu.launch_func @kernels::@fill blocks in (%gx, %gy, %one) threads in (%threads, %one, %one) args(%c : !pool, %any : !any, %n : i32, %scratch : !bytes) {kv.programmatic}
    %positive = arith.cmpi sgt, %n, %i0 : i32
    %parts = arith.select %positive, %i2, %i1 : i32
    %gp = arith.index_cast %parts : i32 to index
    %next = arith.addi %n, %i1 : i32
    gpu.launch_func @kernels::@merge blocks in (%gp, %one, %one) threads in (%threads, %one, %one) args(%scratch : !bytes, %next : i32)
    return
  }
  gpu.module @kernels {
    gpu.func @fill(%c: !pool, %x: !any, %n: i32, %scratch: !bytes) kernel {
      gpu.return
    }
    gpu.func @merge(%scratch: !bytes, %n: i32) kernel {
      gpu.return
    }
  }
}

// -----

!table = memref<?xi32, strided<[1]>, 1>

// What the device holds is not known when a program is launched.
module attributes {gpu.container_module} {
  func.func @reads_memory(%x: !table) {
    %c0 = arith.constant 0 : index
    %one = arith.constant 1 : index
    // expected-error @+1 {{'memref.load' op cannot be part of a program: a launch may depend on shapes, fields, scalars and device facts only}}
    %n = memref.load %x[%c0] : !table
    %grid = arith.index_cast %n : i32 to index
    gpu.launch_func @kernels::@k blocks in (%grid, %one, %one) threads in (%one, %one, %one) args(%x : !table)
    return
  }
  gpu.module @kernels {
    gpu.func @k(%x: !table) kernel {
      gpu.return
    }
  }
}

// -----

!table = memref<?xi32, strided<[1]>, 1>

module attributes {gpu.container_module} {
  func.func @first(%x: !table) {
    %one = arith.constant 1 : index
    gpu.launch_func @kernels::@k blocks in (%one, %one, %one) threads in (%one, %one, %one) args(%x : !table)
    return
  }
  // expected-error @+1 {{'func.func' op must be the only function with launches of its module}}
  func.func @second(%x: !table) {
    %one = arith.constant 1 : index
    gpu.launch_func @kernels::@k blocks in (%one, %one, %one) threads in (%one, %one, %one) args(%x : !table)
    return
  }
  gpu.module @kernels {
    gpu.func @k(%x: !table) kernel {
      gpu.return
    }
  }
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!dense = !kv.operand<"dense", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>

// A descriptor becomes what the loader makes it of: the argument, its half, the layer's expression.
// CHECK: kv.program
// CHECK-SAME: \22args\22: {{\[\[}}\22tensor_map\22, 0, \22value\22, [\22add\22, [\22arg\22, 2, \22value\22], 1]], [\22tensor_map\22, 1, \22key\22]]
// CHECK-NOT: kv.tensor_map
module attributes {gpu.container_module} {
  func.func @descriptors(%c: !pool, %d: !dense, %layer: i32) {
    %one = arith.constant 1 : index
    %i1 = arith.constant 1 : i32
    %next = arith.addi %layer, %i1 : i32
    %values = "kv.tensor_map"(%c, %next) {half = "value"} : (!pool, i32) -> !pages
    %queries = "kv.tensor_map"(%d) {half = "key"} : (!dense) -> !pages
    gpu.launch_func @kernels::@k blocks in (%one, %one, %one) threads in (%one, %one, %one) args(%values : !pages, %queries : !pages)
    return
  }
  gpu.module @kernels {
    gpu.func @k(%v: !pages, %q: !pages) kernel {
      gpu.return
    }
  }
}

// -----

!parts = memref<?x128xf32, strided<[128, 1]>, 1>
!any = memref<?x?xf32, strided<[?, 1]>, 1>

// Scratch memory may be rows of other elements than bytes: as large as they are, and the argument says how wide.
// CHECK: \22args\22: {{\[\[}}\22workspace\22, \22workspace0\22, 128]]
// CHECK-SAME: \22workspaces\22: [{\22name\22: \22workspace0\22, \22bytes\22: [\22mul\22, [\22arg\22, 0, \22value\22], 512], \22zeroed\22: false}]
module attributes {gpu.container_module} {
  func.func @step(%n: i32) attributes {kv.args = [{kind = "scalar", name = "n", dtype = "i32"}]} {
    %one = arith.constant 1 : index
    %rows = arith.index_cast %n : i32 to index
    %parts = memref.alloc(%rows) : !parts
    %any = memref.cast %parts : !parts to !any
    gpu.launch_func @kernels::@fill blocks in (%one, %one, %one) threads in (%one, %one, %one) args(%any : !any)
    return
  }
  gpu.module @kernels {
    gpu.func @fill(%parts: !any) kernel {
      gpu.return
    }
  }
}

// -----

!x = memref<?x4096xbf16, strided<[?, 1]>, 1>
!rows = !kv.operand<"dense", bf16, 64 : i64, 64 : i64, false, 0 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 128, 1, 64>, array<i64: 128, 1, 64>, 128 : i64>

// The descriptor of a buffer's rows says what heads its columns are.
// CHECK: \22args\22: {{\[\[}}\22tensor_map\22, 0, \22rows\22, 64, 64]]
module attributes {gpu.container_module} {
  func.func @step(%x: !x) {
    %one = arith.constant 1 : index
    %r = "kv.buffer_operand"(%x) : (!x) -> !rows
    %m = "kv.tensor_map"(%r) {half = "key"} : (!rows) -> !map
    gpu.launch_func @kernels::@k blocks in (%one, %one, %one) threads in (%one, %one, %one) args(%m : !map)
    return
  }
  gpu.module @kernels {
    gpu.func @k(%m: !map) kernel { gpu.return }
  }
}

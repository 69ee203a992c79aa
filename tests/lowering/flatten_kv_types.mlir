// RUN: kv-opt %s --flatten-kv-types --split-input-file --verify-diagnostics | FileCheck %s
// RUN: %if alone %{ kv-opt %{kernels}/rescale.mlir --kv-pipeline --target=sm_90a --stop-after=flatten-kv-types --check-semantics-of=flatten-kv-types --grid=3x2 --arg=factors=2 --arg=sums=3x16 --lengths=edges --model=%S/Inputs/models.py:rescale -o /dev/null %}

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>

gpu.module @kernels {
  // A cache becomes its fields, in the order of the layout; the record says which is which.
  // CHECK-LABEL: gpu.func @cache
  // CHECK-SAME:    (%arg0: !llvm.ptr<1>, %arg1: i64, %arg2: i32, %arg3: i32, %arg4: !llvm.ptr<1>, %arg5: i64, %arg6: i32, %arg7: !llvm.ptr<1>, %arg8: i32, %arg9: i32, %arg10: i32, %arg11: f32)
  // CHECK-SAME:    {arg = 0 : i64, field = "base", type = "ptr"}, {arg = 0 : i64, field = "stride0", type = "i64"}
  // CHECK-SAME:    {arg = 1 : i64, field = "value", type = "f32"}
  // CHECK:         llvm.store %arg11, %arg0
  gpu.func @cache(%c: !cache, %alpha: f32) kernel {
    %p = "kv.field"(%c) {field = "base"} : (!cache) -> !llvm.ptr<1>
    llvm.store %alpha, %p : f32, !llvm.ptr<1>
    gpu.return
  }

  // The rows of a buffer are one sequence that has them all.
  // CHECK-LABEL: gpu.func @rows
  // CHECK-SAME:    (%arg0: !llvm.ptr<1>, %arg1: i64, %arg2: i64, %arg3: i64, %arg4: !llvm.ptr<1>)
  // CHECK:         %[[T:.*]] = arith.trunci %arg1 : i64 to i32
  // CHECK:         llvm.store %[[T]], %arg4
  // CHECK:         llvm.store %arg0, %arg4
  // CHECK-NOT:     kv.buffer_operand
  gpu.func @rows(%x: memref<?x?xbf16, strided<[?, 1]>, 1>, %out: !llvm.ptr<1>) kernel {
    %r = "kv.buffer_operand"(%x) : (memref<?x?xbf16, strided<[?, 1]>, 1>) -> !kv.operand<"dense", bf16, 2 : i64, 64 : i64, false, 0 : i64, none, 1 : i64>
    %t = "kv.field"(%r) {field = "capacity"} : (!kv.operand<"dense", bf16, 2 : i64, 64 : i64, false, 0 : i64, none, 1 : i64>) -> i32
    llvm.store %t, %out : i32, !llvm.ptr<1>
    %p = "kv.field"(%r) {field = "base"} : (!kv.operand<"dense", bf16, 2 : i64, 64 : i64, false, 0 : i64, none, 1 : i64>) -> !llvm.ptr<1>
    llvm.store %p, %out : !llvm.ptr<1>, !llvm.ptr<1>
    gpu.return
  }

  // A view of a layer: the blocks, moved by the layer (and from K to V); the rest is the collection's.
  // CHECK-LABEL: gpu.func @views
  // CHECK:         %[[L:.*]] = arith.extui %arg{{.*}} : i32 to i64
  // CHECK:         arith.muli %[[L]], %arg{{.*}} : i64
  // CHECK:         arith.addi
  // CHECK:         %[[V:.*]] = llvm.getelementptr %arg0[%{{.*}}] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, bf16
  // CHECK:         llvm.store %arg4, %[[V]]
  // CHECK-NOT:     kv.value_cache
  gpu.func @views(%pool: !pool, %layer: i32) kernel {
    %v = "kv.value_cache"(%pool, %layer) : (!pool, i32) -> !cache
    %p = "kv.field"(%v) {field = "base"} : (!cache) -> !llvm.ptr<1>
    %t = "kv.field"(%v) {field = "lookup"} : (!cache) -> !llvm.ptr<1>
    llvm.store %t, %p : !llvm.ptr<1>, !llvm.ptr<1>
    gpu.return
  }

  // A buffer: pointer, extents, and strides of all dimensions but the last. A bool is a byte.
  // CHECK-LABEL: gpu.func @buffer
  // CHECK-SAME:    (%arg0: !llvm.ptr<1>, %arg1: i64, %arg2: i64, %arg3: i64, %arg4: i8)
  // CHECK:         arith.cmpi ne, %arg4
  gpu.func @buffer(%x: memref<?x?xf32, strided<[?, 1]>, 1>, %flag: i1) kernel {
    scf.if %flag {
      gpu.printf "yes\n"
    }
    gpu.return
  }
}

// -----

!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
gpu.module @kernels {
  // A descriptor: one pointer to the parameter, whose number is kept for mark-kv-grid-constants.
  // CHECK-LABEL: gpu.func @descriptor
  // CHECK-SAME:    (%{{.*}}: i32, %[[MAP:.*]]: !llvm.ptr)
  // CHECK-SAME:    kv.params = [{arg = 0 : i64, field = "value", type = "i32"}, {arg = 1 : i64, field = "value", type = "tensormap"}]
  // CHECK-SAME:    tensormap_params = array<i32: 1>
  // CHECK:         llvm.inline_asm {{.*}} %[[MAP]] :
  gpu.func @descriptor(%n: i32, %m: !pages) kernel {
    %p = "kv.field"(%m) {field = "value"} : (!pages) -> !llvm.ptr
    llvm.inline_asm has_side_effects "prefetch.tensormap [$0];", "l" %p : (!llvm.ptr) -> ()
    gpu.return
  }
}

// -----

gpu.module @kernels {
  gpu.func @unlowered(%x: memref<?xf32, strided<[1]>, 1>) kernel {
    %c0 = arith.constant 0 : index
    // expected-error @below {{'memref.load' op uses argument 0 in a way that no pass lowers}}
    %v = memref.load %x[%c0] : memref<?xf32, strided<[1]>, 1>
    gpu.return
  }
}

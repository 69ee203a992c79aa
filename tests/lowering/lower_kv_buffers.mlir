// RUN: kv-opt %s --lower-kv-buffers --canonicalize --split-input-file --verify-diagnostics | FileCheck %s
// RUN: %if alone %{ kv-opt %{kernels}/rescale.mlir --kv-pipeline --target=sm_90a --stop-after=lower-kv-buffers --check-semantics-of=lower-kv-buffers --grid=3x2 --arg=factors=2 --arg=sums=3x16 --lengths=edges --model=%S/Inputs/models.py:rescale -o /dev/null %}

gpu.module @kernels {
  // Strides are fields; the plan's read-only arguments load through the read-only path; alignments are recorded.
  // CHECK-LABEL: gpu.func @vectors
  // CHECK-SAME:    kv.arg_alignments = array<i64: 16, 8, 0>
  // CHECK:         %[[S:.*]] = "kv.field"(%arg0) {field = "stride0"}
  // CHECK:         arith.muli %{{.*}}, %[[S]] : i64
  // CHECK:         llvm.load {{.*}} invariant {alignment = 16 : i64} : !llvm.ptr<1> -> vector<8xbf16>
  // CHECK:         llvm.store {{.*}} {alignment = 8 : i64} : vector<2xf32>, !llvm.ptr<1>
  gpu.func @vectors(%x: memref<?x?xbf16, strided<[?, 1]>, 1>, %y: memref<?xf32, strided<[1]>, 1>, %i: i32) kernel attributes {kv.read_only_args = array<i64: 0>} {
    %j = arith.index_cast %i : i32 to index
    %v = vector.load %x[%j, %j] {alignment = 16 : i64} : memref<?x?xbf16, strided<[?, 1]>, 1>, vector<8xbf16>
    %w = vector.extract_strided_slice %v {offsets = [0], sizes = [2], strides = [1]} : vector<8xbf16> to vector<2xbf16>
    %f = arith.extf %w : vector<2xbf16> to vector<2xf32>
    vector.store %f, %y[%j] {alignment = 8 : i64} : memref<?xf32, strided<[1]>, 1>, vector<2xf32>
    gpu.return
  }

  // CHECK-LABEL: gpu.func @scalars
  // CHECK:         "kv.field"(%arg0) {field = "shape0"}
  // CHECK:         llvm.load {{.*}} {alignment = 4 : i64} : !llvm.ptr<1> -> i32
  // CHECK:         llvm.atomicrmw add {{.*}} monotonic
  gpu.func @scalars(%x: memref<?xi32, strided<[1]>, 1>) kernel {
    %c0 = arith.constant 0 : index
    %n = memref.dim %x, %c0 : memref<?xi32, strided<[1]>, 1>
    %v = memref.load %x[%n] : memref<?xi32, strided<[1]>, 1>
    %old = memref.atomic_rmw addi %v, %x[%c0] : (i32, memref<?xi32, strided<[1]>, 1>) -> i32
    gpu.return
  }

  // 8-bit floats travel as bytes, in words where four of them make one.
  // CHECK-LABEL: gpu.func @bytes
  // CHECK:         llvm.load {{.*}} -> vector<2xi32>
  // CHECK:         llvm.store {{.*}} : vector<2xi32>
  gpu.func @bytes(%x: memref<?xf8E4M3FN, strided<[1]>, 1>, %y: memref<?xf8E4M3FN, strided<[1]>, 1>) kernel {
    %c0 = arith.constant 0 : index
    %v = vector.load %x[%c0] {alignment = 8 : i64} : memref<?xf8E4M3FN, strided<[1]>, 1>, vector<8xf8E4M3FN>
    vector.store %v, %y[%c0] {alignment = 8 : i64} : memref<?xf8E4M3FN, strided<[1]>, 1>, vector<8xf8E4M3FN>
    gpu.return
  }

  // CHECK-LABEL: gpu.func @address
  // CHECK:         llvm.getelementptr {{.*}} -> !llvm.ptr<1>, f32
  gpu.func @address(%x: memref<?x?xf32, strided<[?, 1]>, 1>, %i: i32, %out: !llvm.ptr<1>) kernel {
    %p = "kv.buffer_address"(%x, %i, %i) : (memref<?x?xf32, strided<[?, 1]>, 1>, i32, i32) -> !llvm.ptr<1>
    llvm.store %p, %out : !llvm.ptr<1>, !llvm.ptr<1>
    gpu.return
  }
}

// -----

gpu.module @kernels {
  gpu.func @local(%i: i32) kernel {
    %m = memref.alloca() : memref<4xf32>
    %c0 = arith.constant 0 : index
    // expected-error @below {{'memref.load' op must access a buffer argument of the kernel, got a memref made inside it}}
    %v = memref.load %m[%c0] : memref<4xf32>
    gpu.return
  }
}

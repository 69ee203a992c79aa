// RUN: kv-opt %s --lower-kv-access --canonicalize --cse | FileCheck %s
// RUN: kv-opt %s --lower-kv-access --canonicalize --cse --flatten-kv-types | FileCheck %s --check-prefix=FLAT

// Operands of each kind: what stands for the look-up of a page, and the parameters that they become.

!scales = !kv.operand<"scales", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!dense = !kv.operand<"dense", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!dense8 = !kv.operand<"dense", i8, 8 : i64, 128 : i64, false, 0 : i64, f32, 32 : i64>
!ragged = !kv.operand<"ragged", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>

gpu.module @kernels {
  // The sequence of a dense operand is its page, clamped like one.
  // CHECK-LABEL: gpu.func @dense
  // CHECK-NOT:     {field = "lookup"}
  // CHECK:         %[[IN:.*]] = arith.cmpi ult, %arg1,
  // CHECK:         %[[ENTRY:.*]] = arith.select %[[IN]], %arg1, %{{.*}} : i32
  // CHECK:         %[[PAGE:.*]] = arith.minui %[[ENTRY]],
  // CHECK:         %[[WIDE:.*]] = arith.extui %[[PAGE]] : i32 to i64
  // CHECK:         arith.muli %[[WIDE]], %{{.*}} : i64
  // CHECK:         llvm.load {{.*}} -> vector<8xf16>
  // FLAT-LABEL: gpu.func @dense
  // FLAT-SAME:    (%{{.*}}: !llvm.ptr<1>, %{{.*}}: i64, %{{.*}}: i32, %{{.*}}: i32, %{{.*}}: i32, %{{.*}}: !llvm.ptr<1>, %{{.*}}: i32,
  // FLAT-SAME:    field = "base", {{.*}}field = "stride0", {{.*}}field = "num_blocks", {{.*}}field = "capacity", {{.*}}field = "batch", {{.*}}field = "lengths",
  gpu.func @dense(%x: !dense, %b: i32, %t: i32, %out: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%x, %b, %b, %t, %b) {width = 8 : i64} : (!dense, i32, i32, i32, i32) -> vector<8xf16>
    llvm.store %v, %out : vector<8xf16>, !llvm.ptr<1>
    gpu.return
  }

  // A null pointer to lengths means S of all; lengths do not pass it.
  // CHECK-LABEL: gpu.func @dense_length
  // CHECK:         %[[GIVEN:.*]] = llvm.icmp "ne" %{{.*}}, %{{.*}} : !llvm.ptr<1>
  // CHECK:         scf.if %[[GIVEN]] -> (i32)
  // CHECK:           %[[N:.*]] = llvm.load {{.*}} invariant
  // CHECK:           arith.minui %[[N]], %[[S:.*]] : i32
  // CHECK:         } else {
  // CHECK:           scf.yield %[[S]]
  gpu.func @dense_length(%x: !dense, %b: i32, %out: !llvm.ptr<1>) kernel {
    %n = "kv.cache_length"(%x, %b) : (!dense, i32) -> i32
    llvm.store %n, %out : i32, !llvm.ptr<1>
    gpu.return
  }

  // A dense operand with scales dequantizes.
  // CHECK-LABEL: gpu.func @dense_scales
  // CHECK-DAG:     "kv.field"(%arg0) {field = "scales_stride0"}
  // CHECK:         arith.mulf
  // FLAT-LABEL: gpu.func @dense_scales
  // FLAT-SAME:    field = "lengths", {{.*}}field = "scales", {{.*}}field = "scales_stride0",
  gpu.func @dense_scales(%x: !dense8, %b: i32, %out: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%x, %b, %b, %b, %b) {width = 4 : i64} : (!dense8, i32, i32, i32, i32) -> vector<4xf32>
    llvm.store %v, %out : vector<4xf32>, !llvm.ptr<1>
    gpu.return
  }

  // The first row of a ragged operand's sequence is its page: one look-up serves all tokens.
  // CHECK-LABEL: gpu.func @ragged
  // CHECK:         %[[OFFSETS:.*]] = "kv.field"(%arg0) {field = "offsets"}
  // CHECK:         llvm.getelementptr %[[OFFSETS]]
  // CHECK:         %[[FIRST:.*]] = llvm.load {{.*}} invariant
  // CHECK-COUNT-2: llvm.load {{.*}} -> vector<8xf16>
  // FLAT-LABEL: gpu.func @ragged
  // FLAT-SAME:    field = "batch", {{.*}}field = "offsets",
  gpu.func @ragged(%x: !ragged, %b: i32, %t: i32, %u: i32, %out: !llvm.ptr<1>) kernel {
    %page = "kv.page"(%x, %b, %t) : (!ragged, i32, i32) -> i32
    %v = "kv.load"(%x, %b, %b, %t, %b, %page) {width = 8 : i64} : (!ragged, i32, i32, i32, i32, i32) -> vector<8xf16>
    %w = "kv.load"(%x, %b, %b, %u, %b, %page) {width = 8 : i64} : (!ragged, i32, i32, i32, i32, i32) -> vector<8xf16>
    llvm.store %v, %out : vector<8xf16>, !llvm.ptr<1>
    llvm.store %w, %out : vector<8xf16>, !llvm.ptr<1>
    gpu.return
  }

  // Its length is a difference of offsets, held to the rows that there are.
  // CHECK-LABEL: gpu.func @ragged_length
  // CHECK:         %[[FIRST:.*]] = arith.minui
  // CHECK:         %[[END:.*]] = arith.minui
  // CHECK:         %[[LEAST:.*]] = arith.minui %[[FIRST]], %[[END]]
  // CHECK:         arith.subi %[[END]], %[[LEAST]]
  gpu.func @ragged_length(%x: !ragged, %b: i32, %out: !llvm.ptr<1>) kernel {
    %n = "kv.cache_length"(%x, %b) : (!ragged, i32) -> i32
    llvm.store %n, %out : i32, !llvm.ptr<1>
    gpu.return
  }

  // The data of an operand of scales are the scales; it has none itself.
  // CHECK-LABEL: gpu.func @scales
  // CHECK:         %[[NULL:.*]] = llvm.mlir.zero : !llvm.ptr<1>
  // CHECK:         %[[ZERO:.*]] = arith.constant 0.000000e+00 : f32
  // CHECK-NOT:     {field = "base"}
  // CHECK:         %[[BASE:.*]] = "kv.field"(%arg0) {field = "scales"}
  // CHECK:         %[[AT:.*]] = llvm.getelementptr %[[BASE]]
  // CHECK:         %[[V:.*]] = llvm.load %[[AT]] {alignment = 4 : i64} : !llvm.ptr<1> -> f32
  // CHECK-DAG:     llvm.store %[[V]], %[[OUT:.*]] : f32
  // CHECK-DAG:     llvm.store %[[ZERO]], %[[OUT]] : f32
  // CHECK-DAG:     llvm.store %[[NULL]], %[[OUT]] : !llvm.ptr<1>
  gpu.func @scales(%x: !scales, %b: i32, %page: i32, %out: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%x, %b, %b, %b, %b, %page) {width = 1 : i64} : (!scales, i32, i32, i32, i32, i32) -> f32
    %z = "kv.load_scale"(%x, %b, %b, %b, %b, %page) {width = 1 : i64} : (!scales, i32, i32, i32, i32, i32) -> f32
    %p = "kv.scale_block_ptr"(%x, %b, %b, %b, %b, %page) : (!scales, i32, i32, i32, i32, i32) -> !llvm.ptr<1>
    llvm.store %v, %out : f32, !llvm.ptr<1>
    llvm.store %z, %out : f32, !llvm.ptr<1>
    llvm.store %p, %out : !llvm.ptr<1>, !llvm.ptr<1>
    gpu.return
  }

  // A row of a buffer is its own index.
  // CHECK-LABEL: gpu.func @rows
  // CHECK:         llvm.store %arg1, %{{.*}} : i32
  gpu.func @rows(%x: !dense, %encoded: i32, %out: !llvm.ptr<1>) kernel {
    %r = "kv.tma_row"(%x, %encoded) : (!dense, i32) -> i32
    llvm.store %r, %out : i32, !llvm.ptr<1>
    gpu.return
  }
}

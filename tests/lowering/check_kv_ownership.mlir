// RUN: kv-opt %s --check-kv-ownership | FileCheck %s
// RUN: kv-opt %s --check-kv-ownership="target=host" | FileCheck %s --check-prefix=HOST
// RUN: %if alone %{ kv-opt %{kernels}/rescale.mlir --kv-pipeline --target=sm_90a --insert-after=extract-kv-program=check-kv-ownership --stop-after=check-kv-ownership --check-semantics-of=check-kv-ownership --grid=3x2 --arg=factors=2 --arg=sums=3x16 --lengths=edges --model=%S/Inputs/models.py:rescale -o /dev/null %}

!paged = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!flat = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!quant = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 64 : i64>
!dense = !kv.operand<"dense", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>

gpu.module @kernels {
  // CHECK:         llvm.mlir.global external @_mlir_kv_ownership({{.*}}) {addr_space = 1 : i32, alignment = 8 : i64}

  // The region of the pool and the expected entries of the table are looked up once, where the handle is made. A load
  // compares, and what it finds goes with its number: the attribute says which access that is.
  // CHECK-LABEL: gpu.func @load
  // CHECK-SAME:    attributes {kv.ownership = {"[[LOAD:[0-9]+]]" = "{{.*}}check_kv_ownership.mlir:[[@LINE+25]]:10: kv.load of kernel load|reads"}}
  // CHECK:         %[[BASE:.*]] = "kv.field"(%arg0) {field = "base"}
  // CHECK:         "kv.field"(%arg0) {field = "lookup"}
  // CHECK:         %[[VARIABLE:.*]] = llvm.mlir.addressof @_mlir_kv_ownership
  // CHECK:         llvm.load %[[VARIABLE]]
  // CHECK:         %[[REGION:.*]]:2 = scf.while
  // CHECK:         %[[TABLE:.*]]:2 = scf.while
  // CHECK:         %[[WATCHED:.*]] = arith.cmpi ne, %[[REGION]]#1, %c0_i64
  // CHECK:         scf.if %[[WATCHED]] {
  // CHECK:           %[[ENTRY:.*]] = scf.if {{.*}} -> (i32)
  // CHECK:             "kv.raw_page"(%arg0, %arg1, %arg3)
  // CHECK:           %[[GENERATION:.*]] = llvm.load {{.*}} -> i32
  // CHECK:           %[[EXPECTED:.*]] = scf.if {{.*}} -> (i32)
  // CHECK:           } else {
  // CHECK:           %[[WRITTEN:.*]] = llvm.load {{.*}} -> i32
  // CHECK:           arith.cmpi ne, %[[WRITTEN]], %[[GENERATION]]
  // CHECK:           arith.cmpi ne, %[[ENTRY]], %[[EXPECTED]]
  // CHECK:           %[[WRONG:.*]] = arith.cmpi ne, {{.*}}, %c0_i32
  // CHECK:           scf.if %[[WRONG]] {
  // CHECK:             llvm.atomicrmw add
  // CHECK:             %[[NUMBER:.*]] = arith.constant [[LOAD]] : i64
  // CHECK:             llvm.store %[[NUMBER]]
  // CHECK:         "kv.load"(%arg0, %arg1, %arg2, %arg3, %arg4)
  // CHECK-NOT:     cf.assert
  gpu.func @load(%c: !paged, %b: i32, %h: i32, %t: i32, %d: i32, %out: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%c, %b, %h, %t, %d) {width = 8 : i64} : (!paged, i32, i32, i32, i32) -> vector<8xbf16>
    llvm.store %v, %out : vector<8xbf16>, !llvm.ptr<1>
    gpu.return
  }

  // A store asks who else uses the page, and notes the slot as written where nothing is wrong; the page that it is
  // given is what is checked.
  // CHECK-LABEL: gpu.func @store
  // CHECK-SAME:    kv.store of kernel store|writes"
  // CHECK-NOT:     kv.raw_page
  // CHECK:         arith.cmpi sgt, %{{.*}}, %c1_i32
  // CHECK:         llvm.atomicrmw
  // CHECK:         %[[RIGHT:.*]] = arith.cmpi eq, %{{.*}}, %c0_i32
  // CHECK-NEXT:    scf.if %[[RIGHT]] {
  // CHECK-NEXT:      llvm.store %{{.*}}, %{{.*}} {alignment = 4 : i64} : i32
  // CHECK:         "kv.store"
  gpu.func @store(%c: !paged, %b: i32, %v: bf16, %page: i32) kernel {
    "kv.store"(%c, %b, %b, %b, %b, %v, %page) {oob = "drop"} : (!paged, i32, i32, i32, i32, bf16, i32) -> ()
    gpu.return
  }

  // What a quantized load reads are elements and scales, which have regions of their own.
  // CHECK-LABEL: gpu.func @quantized
  // CHECK-SAME:    kv.load of kernel quantized|reads the scales of"
  // CHECK-DAG:     "kv.field"(%arg0) {field = "base"}
  // CHECK-DAG:     "kv.field"(%arg0) {field = "scales"}
  // CHECK-COUNT-2: llvm.atomicrmw
  // CHECK:         "kv.load"
  gpu.func @quantized(%c: !quant, %b: i32, %out: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b) {width = 8 : i64} : (!quant, i32, i32, i32, i32) -> vector<8xf32>
    llvm.store %v, %out : vector<8xf32>, !llvm.ptr<1>
    gpu.return
  }

  // A continuous cache has regions instead of pages, and its lookup table one column.
  // CHECK-LABEL: gpu.func @continuous
  // CHECK:         "kv.field"(%arg0) {field = "capacity"}
  // CHECK:         llvm.atomicrmw
  gpu.func @continuous(%c: !flat, %b: i32, %out: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b) {width = 8 : i64} : (!flat, i32, i32, i32, i32) -> vector<8xbf16>
    llvm.store %v, %out : vector<8xbf16>, !llvm.ptr<1>
    gpu.return
  }

  // The tokens of a tile that exist are shared among the threads of the block; on the host one has them all.
  // CHECK-LABEL: gpu.func @tile
  // CHECK:         %[[THREAD:.*]] = gpu.thread_id x
  // CHECK:         gpu.block_dim x
  // CHECK:         scf.for
  // CHECK:           llvm.atomicrmw
  // CHECK:         "kv.tile_load"
  // HOST-LABEL:  gpu.func @tile
  // HOST-NOT:      gpu.thread_id
  // HOST:          scf.for {{.*}} step %c1_i32
  // HOST:          "kv.tile_load"
  gpu.func @tile(%c: !paged, %b: i32, %n: i32) kernel {
    %v = "kv.tile_load"(%c, %b, %b, %b, %b, %n) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!paged, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
    gpu.return
  }

  // A load through an address is held to the token of the page at which it is: 2048 bytes a token, 256 a head. One
  // of another pointer is not.
  // CHECK-LABEL: gpu.func @address
  // CHECK-SAME:    attributes {kv.ownership = {"{{[0-9]+}}" = "{{.*}}: load by address of kernel address|reads"}}
  // CHECK:         %[[START:.*]] = "kv.block_ptr"
  // CHECK:         %[[AT:.*]] = llvm.getelementptr %[[START]]
  // CHECK:         %[[TO:.*]] = llvm.ptrtoint %[[AT]]
  // CHECK:         %[[FROM:.*]] = llvm.ptrtoint %[[START]]
  // CHECK:         arith.subi %[[TO]], %[[FROM]]
  // CHECK:         arith.constant 2048 : i64
  // CHECK:         arith.constant 256 : i64
  // CHECK:         "kv.raw_page"
  // CHECK:         llvm.load %[[AT]] {alignment = 2 : i64}
  // CHECK-NEXT:    llvm.store
  gpu.func @address(%c: !paged, %b: i32, %out: !llvm.ptr<1>) kernel {
    %p = "kv.block_ptr"(%c, %b, %b, %b, %b) {tile = 1 : i64} : (!paged, i32, i32, i32, i32) -> !llvm.ptr<1>
    %at = llvm.getelementptr %p[%b] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i8
    %v = llvm.load %at {alignment = 2 : i64} : !llvm.ptr<1> -> bf16
    llvm.store %v, %out : bf16, !llvm.ptr<1>
    gpu.return
  }

  // Operands that are no caches have no pages.
  // CHECK-LABEL: gpu.func @dense
  // CHECK-NOT:     kv_ownership
  // CHECK:         "kv.load"
  gpu.func @dense(%c: !dense, %b: i32, %out: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b) {width = 8 : i64} : (!dense, i32, i32, i32, i32) -> vector<8xbf16>
    llvm.store %v, %out : vector<8xbf16>, !llvm.ptr<1>
    gpu.return
  }
}

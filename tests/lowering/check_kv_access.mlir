// RUN: kv-opt %s --check-kv-access | FileCheck %s
// RUN: kv-opt %s --check-kv-access --canonicalize | FileCheck %s --check-prefix=FOLDED
// RUN: %if alone %{ kv-opt %{kernels}/rescale.mlir --kv-pipeline --target=sm_90a --insert-after=extract-kv-program=check-kv-access --stop-after=check-kv-access --check-semantics-of=check-kv-access --grid=3x2 --arg=factors=2 --arg=sums=3x16 --lengths=edges --model=%S/Inputs/models.py:rescale -o /dev/null %}

!paged = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!flat = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!quant = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 64 : i64>

gpu.module @kernels {
  // CHECK-LABEL: gpu.func @load
  // CHECK:         %[[BATCH:.*]] = "kv.field"(%arg0) {field = "batch"}
  // CHECK:         %[[IN_BATCH:.*]] = arith.cmpi ult, %arg1, %[[BATCH]]
  // CHECK:         cf.assert %[[IN_BATCH]], "{{.*}}check_kv_access.mlir:29:10: kv.load: the sequence must be in the batch"
  // CHECK:         %[[HEAD:.*]] = arith.cmpi ult, %arg2, %c8_i32
  // CHECK:         cf.assert %[[HEAD]], "{{.*}}: kv.load: the head must be in [0, 8)"
  // CHECK:         %[[DIM:.*]] = arith.cmpi ult, %arg4, %c121_i32
  // CHECK:         cf.assert %[[DIM]], "{{.*}}: kv.load: the dim must be in [0, 120] for 8 elements"
  // CHECK:         %[[COLUMN:.*]] = arith.shrui %arg3, %c4_i32
  // CHECK:         %[[COLUMNS:.*]] = "kv.field"(%arg0) {field = "lookup_columns"}
  // CHECK:         %[[IN_TABLE:.*]] = arith.cmpi ult, %[[COLUMN]], %[[COLUMNS]]
  // CHECK:         cf.assert %[[IN_TABLE]], "{{.*}}: kv.load: the token must be in the lookup table"
  // CHECK:         %[[PAGE:.*]] = "kv.raw_page"(%arg0, %arg1, %arg3)
  // CHECK:         %[[PAGES:.*]] = "kv.field"(%arg0) {field = "num_blocks"}
  // CHECK:         %[[IN_POOL:.*]] = arith.cmpi ult, %[[PAGE]], %[[PAGES]]
  // CHECK:         cf.assert %[[IN_POOL]], "{{.*}}: kv.load: the token's page must be in the pool"
  // CHECK:         "kv.load"(%arg0, %arg1, %arg2, %arg3, %arg4)
  // The access keeps its location: that is where the message points.
  gpu.func @load(%c: !paged, %b: i32, %h: i32, %t: i32, %d: i32, %out: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%c, %b, %h, %t, %d) {width = 8 : i64} : (!paged, i32, i32, i32, i32) -> vector<8xbf16>
    llvm.store %v, %out : vector<8xbf16>, !llvm.ptr<1>
    gpu.return
  }

  // A store of one element; the page that it is given is what is checked.
  // CHECK-LABEL: gpu.func @store
  // CHECK:         cf.assert %{{.*}}, "{{.*}}: kv.store: the dim must be in [0, 127] for 1 elements"
  // CHECK-NOT:     kv.raw_page
  // CHECK:         %[[PAGES:.*]] = "kv.field"(%arg0) {field = "num_blocks"}
  // CHECK:         arith.cmpi ult, %arg3, %[[PAGES]]
  // CHECK:         "kv.store"
  gpu.func @store(%c: !paged, %b: i32, %v: bf16, %page: i32) kernel {
    "kv.store"(%c, %b, %b, %b, %b, %v, %page) {oob = "drop"} : (!paged, i32, i32, i32, i32, bf16, i32) -> ()
    gpu.return
  }

  // Without pages a token lies in its sequence's block.
  // CHECK-LABEL: gpu.func @continuous
  // CHECK:         %[[CAPACITY:.*]] = "kv.field"(%arg0) {field = "capacity"}
  // CHECK:         %[[INSIDE:.*]] = arith.cmpi ult, %arg1, %[[CAPACITY]]
  // CHECK:         cf.assert %[[INSIDE]], "{{.*}}: kv.load: the token must be in the sequence's region"
  gpu.func @continuous(%c: !flat, %b: i32, %out: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b) {width = 8 : i64} : (!flat, i32, i32, i32, i32) -> vector<8xbf16>
    llvm.store %v, %out : vector<8xbf16>, !llvm.ptr<1>
    gpu.return
  }

  // Scales count in granules of 64 dims; what is known at compile time is decided there.
  // CHECK-LABEL: gpu.func @scale
  // CHECK:         arith.shrui %c64_i32, %c6_i32
  // CHECK:         cf.assert %{{.*}}, "{{.*}}: kv.load_scale: the dim must be in granule [0, 1] for 1 scales"
  // FOLDED-LABEL: gpu.func @scale
  // FOLDED:         kv.load_scale: the sequence must be in the batch
  // FOLDED-NOT:     the head must be
  // FOLDED-NOT:     granule
  // FOLDED:         kv.load_scale: the token must be in the lookup table
  gpu.func @scale(%c: !quant, %b: i32, %out: !llvm.ptr<1>) kernel {
    %h = arith.constant 7 : i32
    %d = arith.constant 64 : i32
    %s = "kv.load_scale"(%c, %b, %h, %b, %d) {width = 1 : i64} : (!quant, i32, i32, i32, i32) -> f32
    llvm.store %s, %out : f32, !llvm.ptr<1>
    gpu.return
  }

  // Of a tile, the last token that exists: base + min(valid, 16) - 1, or none.
  // CHECK-LABEL: gpu.func @tile
  // CHECK:         cf.assert %{{.*}}, "{{.*}}: kv.load_tile: the head must be in [0, 8)"
  // CHECK:         %[[COUNT:.*]] = arith.minui %arg3, %c16_i32
  // CHECK:         %[[NONE:.*]] = arith.cmpi eq, %[[COUNT]], %c0_i32
  // CHECK:         %[[END:.*]] = arith.addi %arg2, %[[COUNT]]
  // CHECK:         %[[LAST:.*]] = arith.subi %[[END]], %c1_i32
  // CHECK:         arith.select %[[NONE]], %{{.*}}, %[[LAST]]
  // CHECK:         cf.assert %{{.*}}, "{{.*}}: kv.load_tile: the token must be in the lookup table"
  // CHECK:         "kv.load_tile"
  gpu.func @tile(%c: !paged, %b: i32, %base: i32, %valid: i32, %thread: i32) kernel {
    %s = "kv.alloc_shared"() {bytes = 4096 : i64, alignment = 128 : i64} : () -> !llvm.ptr<3>
    "kv.load_tile"(%c, %b, %b, %base, %valid, %s, %thread) {tile_rows = 16 : i64, num_threads = 32 : i64, swizzle = 0 : i64, mode = "async", pitch = 256 : i64} : (!paged, i32, i32, i32, i32, !llvm.ptr<3>, i32) -> ()
    gpu.return
  }

  // Lengths are a table of the batch.
  // CHECK-LABEL: gpu.func @length
  // CHECK:         cf.assert %{{.*}}, "{{.*}}: kv.cache_length: the sequence must be in the batch"
  // CHECK-NEXT:    "kv.cache_length"
  gpu.func @length(%c: !paged, %b: i32, %out: !llvm.ptr<1>) kernel {
    %n = "kv.cache_length"(%c, %b) : (!paged, i32) -> i32
    llvm.store %n, %out : i32, !llvm.ptr<1>
    gpu.return
  }

  // A tile of several pages keeps its promise, and reads entries of the table only; one of a page reads its token's.
  // CHECK-LABEL: gpu.func @populate
  // CHECK:         cf.assert %{{.*}}, "{{.*}}: kv.populate: the sequence must be in the batch"
  // CHECK:         %[[REST:.*]] = arith.andi %arg2, %c127_i32
  // CHECK:         %[[WHOLE:.*]] = arith.cmpi eq, %[[REST]], %{{.*}}
  // CHECK:         cf.assert %[[WHOLE]], "{{.*}}: kv.populate: the base must be a multiple of the promised alignment 128"
  // CHECK:         %[[LAST:.*]] = arith.addi %{{.*}}, %c8_i64
  // CHECK:         %[[INSIDE:.*]] = arith.cmpi ule, %[[LAST]], %{{.*}}
  // CHECK:         cf.assert %[[INSIDE]], "{{.*}}: kv.populate: the 8 entries from the column up must be in the lookup table: pad its columns"
  // CHECK:         "kv.populate"
  // CHECK:         cf.assert %{{.*}}, "{{.*}}: kv.populate: the token must be in the lookup table"
  // CHECK:         "kv.populate"
  // CHECK:         cf.assert %{{.*}}, "{{.*}}: kv.load_pages: the column must be a multiple of 4"
  // CHECK:         cf.assert %{{.*}}, "{{.*}}: kv.load_pages: the 4 entries from the column up must be in the lookup table: pad its columns"
  // CHECK:         "kv.load_pages"
  gpu.func @populate(%c: !paged, %b: i32, %base: i32, %out: !llvm.ptr<1>) kernel {
    %r = "kv.populate"(%c, %b, %base) {tile_rows = 128 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true} : (!paged, i32, i32) -> !kv.rows<128 : i64, 16 : i64>
    %s = "kv.populate"(%c, %b, %base) {tile_rows = 8 : i64, base_alignment = 1 : i64, pair_cta = false, is_leader = true} : (!paged, i32, i32) -> !kv.rows<8 : i64, 16 : i64>
    %p = "kv.load_pages"(%c, %b, %base) {count = 4 : i64} : (!paged, i32, i32) -> vector<4xi32>
    llvm.store %p, %out : vector<4xi32>, !llvm.ptr<1>
    gpu.return
  }
}

// RUN: kv-opt %s --lower-kv-access --canonicalize --cse --split-input-file --verify-diagnostics | FileCheck %s
// RUN: kv-opt %s --lower-kv-access='clamp=false' --canonicalize --cse --split-input-file --verify-diagnostics | FileCheck %s --check-prefix=TRUST
// RUN: %if alone %{ kv-opt %{kernels}/rescale.mlir --kv-pipeline --target=sm_90a --stop-after=lower-kv-access --check-semantics-of=lower-kv-access --grid=3x2 --arg=factors=2 --arg=sums=3x16 --lengths=edges --model=%S/Inputs/models.py:rescale -o /dev/null %}

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!hnd = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, array<i64: 16, 128, 2048>, none, 1 : i64>
!both = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, array<i64: 16, 256, 4096>, none, 1 : i64>
!flat = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!int4 = !kv.cache<"paged", ui4, 8 : i64, 128 : i64, false, 16 : i64, vector<2xf16>, 32 : i64>
!mxfp4 = !kv.cache<"paged", f4E2M1FN, 8 : i64, 128 : i64, false, 16 : i64, f8E8M0FNU, 32 : i64>
!quant = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 64 : i64>

gpu.module @kernels {
  // The page is a 64-bit product, what lies inside the page 32-bit arithmetic; the load keeps the plan.
  // CHECK-LABEL: gpu.func @load
  // CHECK-DAG:     %[[STRIDE:.*]] = "kv.field"(%arg0) {field = "stride0"}
  // CHECK-DAG:     %[[PAGE:.*]] = arith.extui %arg2 : i32 to i64
  // CHECK:         arith.muli %[[PAGE]], %[[STRIDE]] : i64
  // CHECK:         %[[A:.*]] = llvm.getelementptr
  // CHECK:         llvm.load %[[A]] invariant {alignment = 16 : i64} : !llvm.ptr<1> -> vector<8xbf16>
  gpu.func @load(%c: !cache, %b: i32, %page: i32, %out: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b, %page) {width = 8 : i64, kv.alignment = 16 : i64, kv.read_only} : (!cache, i32, i32, i32, i32, i32) -> vector<8xbf16>
    llvm.store %v, %out : vector<8xbf16>, !llvm.ptr<1>
    gpu.return
  }

  // The strides of tokens and heads are the type's: 2^7 and 2^11 where heads lie before tokens, 2^8 and 2^12 where
  // keys and values share a row too. What lies inside the page stays 32-bit arithmetic.
  // CHECK-LABEL: gpu.func @strided
  // CHECK-DAG:     %[[C7:.*]] = arith.constant 7 : i32
  // CHECK-DAG:     %[[C11:.*]] = arith.constant 11 : i32
  // CHECK-DAG:     %[[C8:.*]] = arith.constant 8 : i32
  // CHECK-DAG:     %[[C12:.*]] = arith.constant 12 : i32
  // CHECK:         %[[S:.*]] = arith.andi %arg4, %{{.*}} : i32
  // CHECK:         %[[T:.*]] = arith.shli %[[S]], %[[C7]] : i32
  // CHECK:         %[[H:.*]] = arith.shli %arg3, %[[C11]] : i32
  // CHECK:         %[[R:.*]] = arith.addi %[[T]], %[[H]] : i32
  // CHECK:         %[[I:.*]] = arith.addi %[[R]], %arg5 : i32
  // CHECK:         arith.extui %[[I]] : i32 to i64
  // CHECK:         arith.shli %[[S]], %[[C8]] : i32
  // CHECK:         arith.shli %arg3, %[[C12]] : i32
  gpu.func @strided(%hnd: !hnd, %both: !both, %b: i32, %h: i32, %t: i32, %d: i32, %page: i32, %out: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%hnd, %b, %h, %t, %d, %page) {width = 8 : i64} : (!hnd, i32, i32, i32, i32, i32) -> vector<8xbf16>
    %w = "kv.load"(%both, %b, %h, %t, %d, %page) {width = 8 : i64} : (!both, i32, i32, i32, i32, i32) -> vector<8xbf16>
    llvm.store %v, %out : vector<8xbf16>, !llvm.ptr<1>
    llvm.store %w, %out : vector<8xbf16>, !llvm.ptr<1>
    gpu.return
  }

  // Two elements share a byte: the offset is halved, the low half is the even element, and a zero follows the scale.
  // CHECK-LABEL: gpu.func @packed
  // CHECK:         %[[BYTES:.*]] = llvm.load {{.*}} : !llvm.ptr<1> -> i32
  // CHECK:         %[[B:.*]] = llvm.bitcast %[[BYTES]] : i32 to vector<4xi8>
  // CHECK:         %[[PAIR:.*]] = llvm.load {{.*}} {alignment = 4 : i64} : !llvm.ptr<1> -> vector<2xf16>
  // CHECK:         %[[SCALE:.*]] = vector.extract %[[PAIR]][0]
  // CHECK:         %[[ZERO:.*]] = vector.extract %[[PAIR]][1]
  // CHECK:         %[[LOW:.*]] = arith.andi %[[B]], %{{.*}} : vector<4xi8>
  // CHECK:         %[[HIGH:.*]] = arith.shrui %[[B]], %{{.*}} : vector<4xi8>
  // CHECK:         vector.interleave %[[LOW]], %[[HIGH]]
  // CHECK:         %[[SUM:.*]] = arith.addf
  // CHECK:         arith.mulf %[[SUM]]
  gpu.func @packed(%c: !int4, %b: i32, %page: i32, %out: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b, %page) {width = 8 : i64, kv.alignment = 4 : i64} : (!int4, i32, i32, i32, i32, i32) -> vector<8xf32>
    llvm.store %v, %out : vector<8xf32>, !llvm.ptr<1>
    gpu.return
  }

  // The exponent and mantissa of f4e2m1 are moved to those of f16, and the sign to its place: the number times 2^-14.
  // CHECK-LABEL: gpu.func @fp4
  // CHECK-DAG:     %[[LIFT:.*]] = arith.constant dense<1.638400e+04> : vector<8xf32>
  // CHECK:         %[[WORDS:.*]] = arith.extui {{.*}} : vector<8xi8> to vector<8xi16>
  // CHECK:         arith.shli {{.*}} : vector<8xi16>
  // CHECK:         arith.shli {{.*}} : vector<8xi16>
  // CHECK:         %[[HALF:.*]] = arith.bitcast {{.*}} : vector<8xi16> to vector<8xf16>
  // CHECK:         %[[WIDE:.*]] = arith.extf %[[HALF]]
  // CHECK:         arith.mulf %[[WIDE]], %[[LIFT]]
  gpu.func @fp4(%c: !mxfp4, %b: i32, %page: i32, %out: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b, %page) {width = 8 : i64, kv.alignment = 4 : i64} : (!mxfp4, i32, i32, i32, i32, i32) -> vector<8xf32>
    llvm.store %v, %out : vector<8xf32>, !llvm.ptr<1>
    gpu.return
  }

  // Without a plan an access is aligned to one element.
  // CHECK-LABEL: gpu.func @unplanned
  // CHECK:         llvm.load {{.*}} {alignment = 2 : i64} : !llvm.ptr<1> -> vector<8xbf16>
  gpu.func @unplanned(%c: !cache, %b: i32, %page: i32, %out: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %b, %page) {width = 8 : i64} : (!cache, i32, i32, i32, i32, i32) -> vector<8xbf16>
    llvm.store %v, %out : vector<8xbf16>, !llvm.ptr<1>
    gpu.return
  }

  // A page is clamped to the pool: entries outside the table count as -1, and the least of entry and last page is taken.
  // CHECK-LABEL: gpu.func @page
  // CHECK-DAG:     "kv.field"(%arg0) {field = "lookup_columns"}
  // CHECK:         %[[E:.*]] = llvm.load {{.*}} invariant {alignment = 4 : i64} : !llvm.ptr<1> -> i32
  // CHECK:         %[[S:.*]] = arith.select {{.*}}, %[[E]], %{{.*}} : i32
  // CHECK:         %[[PAGES:.*]] = "kv.field"(%arg0) {field = "num_blocks"}
  // CHECK:         %[[LAST:.*]] = arith.subi %[[PAGES]], %c1_i32 : i32
  // CHECK:         arith.minui %[[S]], %[[LAST]]
  // TRUST-LABEL: gpu.func @page
  // TRUST-NOT:     arith.minui
  // TRUST:         gpu.return
  gpu.func @page(%c: !cache, %b: i32, %t: i32, %out: !llvm.ptr<1>) kernel {
    %p = "kv.page"(%c, %b, %t) : (!cache, i32, i32) -> i32
    llvm.store %p, %out : i32, !llvm.ptr<1>
    gpu.return
  }

  // A store outside the pool is dropped; an unchecked one trusts the table.
  // CHECK-LABEL: gpu.func @store
  // CHECK:         %[[IN:.*]] = arith.cmpi ult, %arg2, %{{.*}} : i32
  // CHECK:         scf.if %[[IN]]
  // CHECK:           llvm.store
  // CHECK:         llvm.store
  gpu.func @store(%c: !cache, %b: i32, %page: i32, %v: vector<8xbf16>) kernel {
    "kv.store"(%c, %b, %b, %b, %b, %v, %page) {oob = "drop"} : (!cache, i32, i32, i32, i32, vector<8xbf16>, i32) -> ()
    "kv.store"(%c, %b, %b, %b, %b, %v, %page) {oob = "unchecked"} : (!cache, i32, i32, i32, i32, vector<8xbf16>, i32) -> ()
    gpu.return
  }

  // A region of a continuous cache may be larger than 32 bits address: all of it is 64-bit arithmetic. A token past the
  // region is read as its last one.
  // CHECK-LABEL: gpu.func @continuous
  // CHECK:         %[[SLOTS:.*]] = "kv.field"(%arg0) {field = "capacity"}
  // CHECK:         %[[LAST:.*]] = arith.subi %[[SLOTS]], %{{.*}} : i32
  // CHECK:         %[[SLOT:.*]] = arith.minui %arg2, %[[LAST]] : i32
  // CHECK:         %[[T:.*]] = arith.extui %[[SLOT]] : i32 to i64
  // CHECK:         arith.shli %[[T]], %{{.*}} : i64
  // CHECK-NOT:     lookup_stride
  // TRUST-LABEL: gpu.func @continuous
  // TRUST-NOT:     arith.minui
  // TRUST:         gpu.return
  gpu.func @continuous(%c: !flat, %b: i32, %t: i32, %page: i32, %out: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%c, %b, %b, %t, %b, %page) {width = 1 : i64} : (!flat, i32, i32, i32, i32, i32) -> bf16
    llvm.store %v, %out : bf16, !llvm.ptr<1>
    gpu.return
  }

  // A store past the region is dropped, as one outside the pool is.
  // CHECK-LABEL: gpu.func @store_continuous
  // CHECK-DAG:     %[[PAGE:.*]] = arith.cmpi ult, %arg3, %{{.*}} : i32
  // CHECK-DAG:     %[[SLOTS:.*]] = "kv.field"(%arg0) {field = "capacity"}
  // CHECK-DAG:     %[[SLOT:.*]] = arith.cmpi ult, %arg2, %[[SLOTS]] : i32
  // CHECK:         %[[IN:.*]] = arith.andi %[[PAGE]], %[[SLOT]] : i1
  // CHECK:         scf.if %[[IN]]
  // CHECK-NOT:       arith.minui
  // CHECK:           llvm.store
  gpu.func @store_continuous(%c: !flat, %b: i32, %t: i32, %page: i32, %v: vector<8xbf16>) kernel {
    "kv.store"(%c, %b, %b, %t, %b, %v, %page) {oob = "drop"} : (!flat, i32, i32, i32, i32, vector<8xbf16>, i32) -> ()
    gpu.return
  }

  // A length is held to what the sequence's row of the table, or its region, has room for.
  // CHECK-LABEL: gpu.func @lengths
  // CHECK:         %[[L:.*]] = llvm.load {{.*}} invariant {alignment = 4 : i64} : !llvm.ptr<1> -> i32
  // CHECK:         %[[COLUMNS:.*]] = "kv.field"(%arg0) {field = "lookup_columns"}
  // CHECK:         %[[ROOM:.*]] = arith.shli %[[COLUMNS]], %c4_i32 : i32
  // CHECK:         arith.minui %[[L]], %[[ROOM]] : i32
  // CHECK:         %[[SLOTS:.*]] = "kv.field"(%arg1) {field = "capacity"}
  // CHECK:         arith.minui %{{.*}}, %[[SLOTS]] : i32
  // TRUST-LABEL: gpu.func @lengths
  // TRUST-NOT:     arith.minui
  // TRUST:         gpu.return
  gpu.func @lengths(%c: !cache, %f: !flat, %b: i32, %out: !llvm.ptr<1>) kernel {
    %n = "kv.cache_length"(%c, %b) : (!cache, i32) -> i32
    llvm.store %n, %out : i32, !llvm.ptr<1>
    %m = "kv.cache_length"(%f, %b) : (!flat, i32) -> i32
    llvm.store %m, %out : i32, !llvm.ptr<1>
    gpu.return
  }

  // A quantized load: bytes as words, one scale at the floor of dim / granularity, the product in f32.
  // CHECK-LABEL: gpu.func @dequantize
  // CHECK:         llvm.load {{.*}} -> vector<4xi32>
  // CHECK:         arith.shrui %arg2, %{{.*}} : i32
  // CHECK:         llvm.load {{.*}} {alignment = 4 : i64} : !llvm.ptr<1> -> f32
  // CHECK:         "kv.cast"{{.*}} -> vector<16xf32>
  // CHECK:         arith.mulf
  // CHECK:         arith.truncf {{.*}} to vector<16xbf16>
  gpu.func @dequantize(%c: !quant, %b: i32, %d: i32, %page: i32, %out: !llvm.ptr<1>) kernel {
    %v = "kv.load"(%c, %b, %b, %b, %d, %page) {width = 16 : i64, kv.alignment = 16 : i64} : (!quant, i32, i32, i32, i32, i32) -> vector<16xbf16>
    llvm.store %v, %out : vector<16xbf16>, !llvm.ptr<1>
    gpu.return
  }

  // A negative encoded index stays negative.
  // CHECK-LABEL: gpu.func @tma_row
  // CHECK:         arith.cmpi slt, %arg1
  // CHECK:         arith.select {{.*}} : i32
  gpu.func @tma_row(%c: !cache, %e: i32, %out: !llvm.ptr<1>) kernel {
    %r = "kv.tma_row"(%c, %e) : (!cache, i32) -> i32
    llvm.store %r, %out : i32, !llvm.ptr<1>
    gpu.return
  }

  // Eight entries are two loads of 16 bytes, of the last sequence at most, each of the last columns at most.
  // CHECK-LABEL: gpu.func @load_pages
  // CHECK:         %[[SEQUENCE:.*]] = arith.minui %arg1
  // CHECK:         %[[FIRST:.*]] = arith.minui %arg1, %[[LAST:.*]] :
  // CHECK:         llvm.load {{.*}} invariant {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xi32>
  // CHECK:         %[[NEXT:.*]] = arith.addi %arg1, %c4_i32
  // CHECK:         arith.minui %[[NEXT]], %[[LAST]]
  // CHECK:         llvm.load {{.*}} invariant {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xi32>
  gpu.func @load_pages(%c: !cache, %b: i32, %out: !llvm.ptr<1>) kernel {
    %p = "kv.load_pages"(%c, %b, %b) {count = 8 : i64} : (!cache, i32, i32) -> vector<8xi32>
    llvm.store %p, %out : vector<8xi32>, !llvm.ptr<1>
    gpu.return
  }
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
gpu.module @kernels {
  gpu.func @rows_from_outside(%r: !kv.rows<128 : i64, 16 : i64>, %i: i32) kernel {
    // expected-error @below {{'kv.get_row' op needs rows made by kv.populate in the same function}}
    %x = "kv.get_row"(%r, %i) : (!kv.rows<128 : i64, 16 : i64>, i32) -> i32
    gpu.return
  }
}

// -----

!own = !kv.cache<"paged", !kv.code<"e2m3@0", 6 : i64, "7.5">, 8 : i64, 128 : i64, false, 16 : i64, f16, 32 : i64>
gpu.module @kernels {
  gpu.func @without_functions(%c: !own, %b: i32, %page: i32, %out: !llvm.ptr<1>) kernel {
    // expected-error @below {{'kv.load' op needs the functions of the code 'e2m3@0': import the module that makes it (kv.Code)}}
    %v = "kv.load"(%c, %b, %b, %b, %b, %page) {width = 8 : i64} : (!own, i32, i32, i32, i32, i32) -> vector<8xf32>
    llvm.store %v, %out : vector<8xf32>, !llvm.ptr<1>
    gpu.return
  }
}

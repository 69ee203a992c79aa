// REQUIRES: native-effects
// RUN: kv-opt %s --canonicalize | FileCheck %s --check-prefixes=CHECK,DCE
// RUN: kv-opt %s --cse | FileCheck %s --check-prefixes=CHECK,CSE
// RUN: kv-opt %s --loop-invariant-code-motion | FileCheck %s --check-prefixes=CHECK,LICM

// Upstream passes treat the kv ops as their classes declare: pure ones like arithmetic, readers of a cache like
// loads, writers like stores.

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!fp8 = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>
!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>

// An op without a use and without a write goes away, a chain of them too.
// CHECK-LABEL: func.func @dead
// DCE-NEXT:      return
func.func @dead(%c: !cache, %pool: !pool, %i: i32) {
  %k = "kv.key_cache"(%pool, %i) : (!pool, i32) -> !cache
  %length = "kv.cache_length"(%k, %i) : (!cache, i32) -> i32
  %page = "kv.page"(%c, %i, %i) : (!cache, i32, i32) -> i32
  %x = "kv.load"(%c, %i, %i, %i, %i, %page) {width = 8 : i64} : (!cache, i32, i32, i32, i32, i32) -> vector<8xbf16>
  return
}

// A store has no use either, but stays.
// CHECK-LABEL: func.func @stores_stay
// CHECK:         "kv.store"
// CHECK:         "kv.store_scale"
func.func @stores_stay(%c: !cache, %q: !fp8, %i: i32, %x: bf16, %s: f32) {
  "kv.store"(%c, %i, %i, %i, %i, %x) {oob = "drop"} : (!cache, i32, i32, i32, i32, bf16) -> ()
  "kv.store_scale"(%q, %i, %i, %i, %i, %s) {oob = "drop"} : (!fp8, i32, i32, i32, i32, f32) -> ()
  return
}

// Equal pure ops become one.
// CHECK-LABEL: func.func @equal_pages
// CSE:           %[[PAGE:.+]] = "kv.page"
// CSE-NOT:       "kv.page"
// CSE:           return %[[PAGE]], %[[PAGE]]
func.func @equal_pages(%c: !cache, %b: i32, %t: i32) -> (i32, i32) {
  %0 = "kv.page"(%c, %b, %t) : (!cache, i32, i32) -> i32
  %1 = "kv.page"(%c, %b, %t) : (!cache, i32, i32) -> i32
  return %0, %1 : i32, i32
}

// Ops that differ in an attribute are not equal.
// CHECK-LABEL: func.func @different_attributes
// CSE:           "kv.field"(%{{.+}}) {field = "batch"}
// CSE:           "kv.field"(%{{.+}}) {field = "capacity"}
func.func @different_attributes(%c: !cache) -> (i32, i32) {
  %0 = "kv.field"(%c) {field = "batch"} : (!cache) -> i32
  %1 = "kv.field"(%c) {field = "capacity"} : (!cache) -> i32
  return %0, %1 : i32, i32
}

// Equal loads become one as long as nothing is stored between them.
// CHECK-LABEL: func.func @equal_loads
// CSE:           %[[X:.+]] = "kv.load"
// CSE-NOT:       "kv.load"
// CSE:           return %[[X]], %[[X]]
func.func @equal_loads(%c: !cache, %i: i32) -> (bf16, bf16) {
  %0 = "kv.load"(%c, %i, %i, %i, %i) {width = 1 : i64} : (!cache, i32, i32, i32, i32) -> bf16
  %1 = "kv.load"(%c, %i, %i, %i, %i) {width = 1 : i64} : (!cache, i32, i32, i32, i32) -> bf16
  return %0, %1 : bf16, bf16
}

// A store between them keeps both, in order.
// CHECK-LABEL: func.func @store_between_loads
// CHECK:         %[[A:.+]] = "kv.load"
// CHECK-NEXT:    "kv.store"
// CHECK-NEXT:    %[[B:.+]] = "kv.load"
// CHECK-NEXT:    return %[[A]], %[[B]]
func.func @store_between_loads(%c: !cache, %i: i32, %x: bf16) -> (bf16, bf16) {
  %0 = "kv.load"(%c, %i, %i, %i, %i) {width = 1 : i64} : (!cache, i32, i32, i32, i32) -> bf16
  "kv.store"(%c, %i, %i, %i, %i, %x) {oob = "drop"} : (!cache, i32, i32, i32, i32, bf16) -> ()
  %1 = "kv.load"(%c, %i, %i, %i, %i) {width = 1 : i64} : (!cache, i32, i32, i32, i32) -> bf16
  return %0, %1 : bf16, bf16
}

// Pages do not depend on what caches hold: a store between equal look-ups does not keep them apart.
// CHECK-LABEL: func.func @store_between_pages
// CSE:           %[[PAGE:.+]] = "kv.page"
// CSE-NEXT:      "kv.store"
// CSE-NEXT:      return %[[PAGE]], %[[PAGE]]
func.func @store_between_pages(%c: !cache, %i: i32, %x: bf16) -> (i32, i32) {
  %0 = "kv.page"(%c, %i, %i) : (!cache, i32, i32) -> i32
  "kv.store"(%c, %i, %i, %i, %i, %x) {oob = "drop"} : (!cache, i32, i32, i32, i32, bf16) -> ()
  %1 = "kv.page"(%c, %i, %i) : (!cache, i32, i32) -> i32
  return %0, %1 : i32, i32
}

// What does not change in a loop leaves it when it is pure; an access stays, since the loop may not run at all.
// CHECK-LABEL: func.func @loop
// LICM:          "kv.page"
// LICM:          "kv.cache_length"
// LICM:          scf.for
// LICM-NEXT:       "kv.load"
// LICM-NEXT:       "kv.store"
func.func @loop(%c: !cache, %i: i32, %n: index) {
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  scf.for %k = %zero to %n step %one {
    %page = "kv.page"(%c, %i, %i) : (!cache, i32, i32) -> i32
    %length = "kv.cache_length"(%c, %i) : (!cache, i32) -> i32
    %x = "kv.load"(%c, %i, %i, %i, %i, %page) {width = 1 : i64} : (!cache, i32, i32, i32, i32, i32) -> bf16
    "kv.store"(%c, %i, %i, %length, %i, %x) {oob = "drop"} : (!cache, i32, i32, i32, i32, bf16) -> ()
  }
  return
}

// Each allocation is a block of its own, though the ops are equal.
// CHECK-LABEL: func.func @allocations
// CHECK:         %[[A:.+]] = "kv.alloc_shared"
// CHECK:         %[[B:.+]] = "kv.alloc_shared"
// CHECK:         return %[[A]], %[[B]]
func.func @allocations() -> (!llvm.ptr<3>, !llvm.ptr<3>) {
  %0 = "kv.alloc_shared"() {bytes = 1024 : i64, alignment = 16 : i64} : () -> !llvm.ptr<3>
  %1 = "kv.alloc_shared"() {bytes = 1024 : i64, alignment = 16 : i64} : () -> !llvm.ptr<3>
  return %0, %1 : !llvm.ptr<3>, !llvm.ptr<3>
}

// Tier-1 ops: writing ones stay, and order the ones that read.
// CHECK-LABEL: func.func @operations
// CHECK:         "kv.gather"
// CHECK-NEXT:    "kv.store_ragged"
// CHECK-NEXT:    "kv.gather"
// CHECK-NEXT:    return
func.func @operations(%c: !cache, %ids: memref<?x?xi32>, %offsets: memref<?xi32>, %out: memref<?x?x8x128xbf16>,
                      %x: memref<?x8x128xbf16>) {
  "kv.gather"(%c, %ids, %offsets, %out) : (!cache, memref<?x?xi32>, memref<?xi32>, memref<?x?x8x128xbf16>) -> ()
  "kv.store_ragged"(%c, %x, %offsets) : (!cache, memref<?x8x128xbf16>, memref<?xi32>) -> ()
  "kv.gather"(%c, %ids, %offsets, %out) : (!cache, memref<?x?xi32>, memref<?xi32>, memref<?x?x8x128xbf16>) -> ()
  return
}

// Copies by TMA and waits for them stay, in order, and so do reads of shared memory between them, though all are equal.
// CHECK-LABEL: func.func @copies
// CHECK-COUNT-2: "kv.tma_prefetch"
// CHECK:         "kv.tma_expect"
// CHECK-NEXT:    "kv.tma_load"
// CHECK-NEXT:    "kv.tma_wait"
// CHECK-NEXT:    llvm.load
// CHECK-NEXT:    "kv.tma_expect"
// CHECK-NEXT:    "kv.tma_load"
// CHECK-NEXT:    "kv.tma_wait"
// CHECK-NEXT:    llvm.load
func.func @copies(%m: !kv.tma<"scale", f32, array<i64: 1, 64>, array<i64: 1, 64>, 16 : i64>, %i: i32,
                  %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) -> (i32, i32) {
  "kv.tma_prefetch"(%m) : (!kv.tma<"scale", f32, array<i64: 1, 64>, array<i64: 1, 64>, 16 : i64>) -> ()
  "kv.tma_prefetch"(%m) : (!kv.tma<"scale", f32, array<i64: 1, 64>, array<i64: 1, 64>, 16 : i64>) -> ()
  "kv.tma_expect"(%m, %bar, %i) {arrive = true} : (!kv.tma<"scale", f32, array<i64: 1, 64>, array<i64: 1, 64>, 16 : i64>, !llvm.ptr<3>, i32) -> ()
  "kv.tma_load"(%m, %tile, %bar, %i, %i) {smem_rows = 1 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!kv.tma<"scale", f32, array<i64: 1, 64>, array<i64: 1, 64>, 16 : i64>, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32) -> ()
  "kv.tma_wait"(%bar, %i) : (!llvm.ptr<3>, i32) -> ()
  %x = llvm.load %tile : !llvm.ptr<3> -> i32
  "kv.tma_expect"(%m, %bar, %i) {arrive = true} : (!kv.tma<"scale", f32, array<i64: 1, 64>, array<i64: 1, 64>, 16 : i64>, !llvm.ptr<3>, i32) -> ()
  "kv.tma_load"(%m, %tile, %bar, %i, %i) {smem_rows = 1 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!kv.tma<"scale", f32, array<i64: 1, 64>, array<i64: 1, 64>, 16 : i64>, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32) -> ()
  "kv.tma_wait"(%bar, %i) : (!llvm.ptr<3>, i32) -> ()
  %y = llvm.load %tile : !llvm.ptr<3> -> i32
  return %x, %y : i32, i32
}

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

// Tiles: positions, broadcasts, reductions, masks and products are arithmetic, and so are look-ups of pages and roles.
// CHECK-LABEL: func.func @dead_tiles
// DCE-NEXT:      return
func.func @dead_tiles(%c: !cache, %i: i32, %q: tensor<64x128xbf16>, %rows: memref<?x128xbf16>, %lse: memref<?xf32>) {
  %positions = "kv.tile_index"() : () -> tensor<64xi32>
  %limit = tensor.splat %i : tensor<64xi32>
  %exists = arith.cmpi slt, %positions, %limit : tensor<64xi32>
  %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  %x = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<64x128xbf16>, tensor<64x128xbf16>) -> tensor<64x64xf32>
  %seen = "kv.tile_broadcast"(%exists) {dimension = 1 : i64} : (tensor<64xi1>) -> tensor<64x64xi1>
  %y = "kv.tile_mask"(%x, %seen) : (tensor<64x64xf32>, tensor<64x64xi1>) -> tensor<64x64xf32>
  %m = "kv.tile_reduce"(%y) {kind = "max", axis = 1 : i64} : (tensor<64x64xf32>) -> tensor<64xf32>
  %n = "kv.tile_reduce_lanes"(%m) {kind = "max"} : (tensor<64xf32>) -> tensor<64xf32>
  %line = "kv.tile_ramp"(%m, %n) : (tensor<64xf32>, tensor<64xf32>) -> tensor<64x64xf32>
  %any = "kv.warp_any"(%exists) : (tensor<64xi1>) -> i1
  %r = "kv.tile_load_rows"(%rows, %exists, %positions) : (memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x128xbf16>
  %g = "kv.tile_gather"(%lse, %exists, %positions) : (memref<?xf32>, tensor<64xi1>, tensor<64xi32>) -> tensor<64xf32>
  %role = "kv.is_role"() {role = "producer"} : () -> i1
  %pages = "kv.tile_pages"(%c, %i, %i, %i) {rows = 64 : i64, step = 16 : i64} : (!cache, i32, i32, i32) -> i32
  %of_rows = "kv.tile_row_pages"(%c, %i, %i, %i) {rows = 64 : i64} : (!cache, i32, i32, i32) -> i32
  return
}

// Equal loads of a tile become one, unless the cache is written between them.
// CHECK-LABEL: func.func @equal_tiles
// CSE:           %[[A:.+]] = "kv.tile_load"
// CSE-NEXT:      "kv.store"
// CSE-NEXT:      %[[B:.+]] = "kv.tile_load"
// CSE-NEXT:      return %[[A]], %[[B]], %[[B]]
func.func @equal_tiles(%c: !cache, %i: i32, %x: bf16) -> (tensor<64x128xbf16>, tensor<64x128xbf16>, tensor<64x128xbf16>) {
  %0 = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  "kv.store"(%c, %i, %i, %i, %i, %x) {oob = "drop"} : (!cache, i32, i32, i32, i32, bf16) -> ()
  %1 = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  %2 = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
  return %0, %1, %2 : tensor<64x128xbf16>, tensor<64x128xbf16>, tensor<64x128xbf16>
}

// Rows that are written stay, and order those that are read.
// CHECK-LABEL: func.func @written_tiles
// CHECK:         "kv.tile_load_rows"
// CHECK-NEXT:    "kv.tile_store_rows"
// CHECK-NEXT:    "kv.tile_load_rows"
// CHECK-NEXT:    "kv.tile_scatter"
// CHECK-NEXT:    return
func.func @written_tiles(%rows: memref<?x128xbf16>, %lse: memref<?xf32>, %exists: tensor<64xi1>, %at: tensor<64xi32>, %l: tensor<64xf32>) -> tensor<64x128xbf16> {
  %x = "kv.tile_load_rows"(%rows, %exists, %at) : (memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x128xbf16>
  "kv.tile_store_rows"(%x, %rows, %exists, %at) : (tensor<64x128xbf16>, memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> ()
  %y = "kv.tile_load_rows"(%rows, %exists, %at) : (memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x128xbf16>
  "kv.tile_scatter"(%l, %lse, %exists, %at) : (tensor<64xf32>, memref<?xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
  return %y : tensor<64x128xbf16>
}

// What waits for others, or tells them, stays where it is, though nothing uses it and all are equal.
// CHECK-LABEL: func.func @synchronization
// CHECK:         scf.for
// CHECK-NEXT:      "kv.producer_acquire"
// CHECK-NEXT:      "kv.copy_start"
// CHECK-NEXT:      "kv.consumer_wait"
// CHECK-NEXT:      "kv.tile_clear"
// CHECK-NEXT:      "kv.dot_start"
// CHECK-NEXT:      "kv.dot_wait"
// CHECK-NEXT:      "kv.consumer_release"
// CHECK-NEXT:      "kv.turn_wait"
// CHECK-NEXT:      "kv.turn_pass"
// CHECK-NEXT:      "kv.turn_pass"
// CHECK:         "kv.set_registers"
// CHECK-NEXT:    return
func.func @synchronization(%c: !cache, %q: tensor<64x128xbf16, "shared">, %i: i32, %n: index) {
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %b = "kv.make_stages"() {buffer_name = "keys", copy = "cp_async", stages = 2 : i64, tile = tensor<64x128xbf16, "shared">} : () -> !kv.stages
  scf.for %j = %zero to %n step %one {
    "kv.producer_acquire"(%b, %i) : (!kv.stages, i32) -> ()
    "kv.copy_start"(buffer = %b, n = %i, cache = %c, batch = %i, head = %i, first = %i, count = %i) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32) -> ()
    %t = "kv.consumer_wait"(%b, %i) : (!kv.stages, i32) -> tensor<64x128xbf16, "shared">
    %z = "kv.tile_clear"(%t, %i, %i) : (tensor<64x128xbf16, "shared">, i32, i32) -> tensor<64x128xbf16, "shared">
    %s = "kv.dot_start"(%q, %z) {transpose_b = true} : (tensor<64x128xbf16, "shared">, tensor<64x128xbf16, "shared">) -> tensor<64x64xf32, "wgmma">
    %d = "kv.dot_wait"(%s) {pending = 0 : i64} : (tensor<64x64xf32, "wgmma">) -> tensor<64x64xf32, "wgmma">
    "kv.consumer_release"(%b, %i) : (!kv.stages, i32) -> ()
    "kv.turn_wait"() {groups = "all"} : () -> ()
    "kv.turn_pass"() {groups = "all"} : () -> ()
    "kv.turn_pass"() {groups = "all"} : () -> ()
  }
  "kv.set_registers"() {action = "increase", count = 240 : i64} : () -> ()
  return
}

// Each circular buffer is its own, though the ops are equal.
// CHECK-LABEL: func.func @buffers
// CHECK:         %[[A:.+]] = "kv.make_stages"
// CHECK:         %[[B:.+]] = "kv.make_stages"
// CHECK:         "kv.consumer_release"(%[[A]]
// CHECK:         "kv.consumer_release"(%[[B]]
func.func @buffers(%i: i32) {
  %0 = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = tensor<64x128xbf16, "shared">} : () -> !kv.stages
  %1 = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = tensor<64x128xbf16, "shared">} : () -> !kv.stages
  "kv.consumer_release"(%0, %i) : (!kv.stages, i32) -> ()
  "kv.consumer_release"(%1, %i) : (!kv.stages, i32) -> ()
  return
}

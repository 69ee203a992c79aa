// RUN: kv-opt %s --split-input-file --verify-diagnostics

// Copies by the tensor memory accelerator that their verifiers refuse.

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!gather = !kv.tma<"gather4", bf16, array<i64: 1, 64>, array<i64: 8, 128>, 128 : i64>
!eight = !kv.tma<"tiled", bf16, array<i64: 8, 1, 8>, array<i64: 8, 1, 16>, 16 : i64>
!rows = !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!fa3 = !kv.cache<"fa3", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rope = !kv.tma<"rope", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 64>, 128 : i64>
!cont = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!scales = !kv.operand<"scales", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 128 : i64>
!ragged = !kv.operand<"ragged", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!f32 = !kv.tma<"tiled", f32, array<i64: 16, 1, 32>, array<i64: 16, 1, 128>, 128 : i64>
!wide = !kv.tma<"tiled", bf16, array<i64: 1, 32, 1, 64>, array<i64: 32, 1, 128>, 128 : i64>
!four = !kv.tma<"tiled", bf16, array<i64: 4, 1, 8>, array<i64: 4, 1, 8>, 16 : i64>
!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!mla = !kv.collection<"paged", bf16, 1 : i64, 128 : i64, true, 16 : i64, none, 1 : i64>
!f32_map = !kv.tma<"tiled", f32, array<i64: 1, 16, 1, 32>, array<i64: 16, 1, 128>, 128 : i64>
!narrow = !kv.cache<"paged", bf16, 8 : i64, 20 : i64, false, 16 : i64, none, 1 : i64>
!one = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 64>, 128 : i64>

func.func @tma_load(%m: !cache, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>, %m2: !pages, %p2: !llvm.ptr<1>,
    %m3: !gather, %m4: !eight) {
  // expected-error @below {{'kv.tma_load' op map must be a TMA descriptor: expected a !kv.tma type, got !kv.cache<}}
  "kv.tma_load"(%m, %p, %q, %i, %i, %i, %i) {smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!cache, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  // expected-error @below {{'kv.tma_load' op tile and barrier must be in shared memory (!llvm.ptr<3>), got !llvm.ptr<1>}}
  "kv.tma_load"(%m2, %p2, %q, %i, %i, %i, %i) {smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<1>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  // expected-error @below {{'kv.tma_load' op takes the coordinates page, slot, head, column of a tiled descriptor of rank 4, got 3}}
  "kv.tma_load"(%m2, %p, %q, %i, %i, %i) {smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32) -> ()
  // expected-error @below {{'kv.tma_load' op takes the coordinates row0, row1, row2, row3, column of a gather4 descriptor of rank 2, got 4}}
  "kv.tma_load"(%m3, %p, %q, %i, %i, %i, %i) {smem_rows = 8 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!gather, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  // expected-error @below {{'kv.tma_load' op smem_rows must be at least the box's 16 rows, got 8 : i64}}
  "kv.tma_load"(%m2, %p, %q, %i, %i, %i, %i) {smem_rows = 8 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  // expected-error @below {{'kv.tma_load' op chunks must start at multiples of 128 bytes, got chunks of 9 rows of 16 bytes}}
  "kv.tma_load"(%m4, %p, %q, %i, %i, %i) {smem_rows = 9 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!eight, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32) -> ()
  // expected-error @below {{'kv.tma_load' op cta_group must be 1 or 2, got 3 : i64}}
  "kv.tma_load"(%m2, %p, %q, %i, %i, %i, %i) {smem_rows = 16 : i64, cta_group = 3 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  // expected-error @below {{'kv.tma_load' op multicast must be a mask of 16 bits, 0 for none, got 65536 : i64}}
  "kv.tma_load"(%m2, %p, %q, %i, %i, %i, %i) {smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 65536 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  return
}

func.func @tma_load_tile(%m: !gather, %c: !cache, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>, %m2: !rows, %c2: !fa3,
    %m3: !rope, %c3: !cont, %c4: !scales, %c5: !ragged, %m4: !pages, %m5: !f32, %m6: !wide) {
  // expected-error @below {{'kv.tma_load_tile' op takes a descriptor of the form tiled or rope, got gather4: use kv.tma_load}}
  "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!gather, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.tma_load_tile' op a TMA tile needs a paged or continuous cache, or a dense or ragged operand, got fa3: a cache of that kind has no rows}}
  "kv.tma_load_tile"(%m2, %c2, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!rows, !fa3, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.tma_load_tile' op a rope TMA tile needs a paged cache, got continuous}}
  "kv.tma_load_tile"(%m3, %c3, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!rope, !cont, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.tma_load_tile' op a rope part behind the content needs an 8-bit cache, got bf16}}
  "kv.tma_load_tile"(%m3, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!rope, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.tma_load_tile' op a TMA tile needs a paged or continuous cache, or a dense or ragged operand, got scales: scales are read one by one}}
  "kv.tma_load_tile"(%m2, %c4, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!rows, !scales, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.tma_load_tile' op a rope TMA tile needs a paged cache, got ragged}}
  "kv.tma_load_tile"(%m3, %c5, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!rope, !ragged, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.tma_load_tile' op coordinates of page and slot need sequences of one length, got a ragged operand}}
  "kv.tma_load_tile"(%m4, %c5, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!pages, !ragged, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.tma_load_tile' op the descriptor must have the cache's dtype bf16, got f32}}
  "kv.tma_load_tile"(%m5, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!f32, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.tma_load_tile' op tile_rows must be a multiple of the box's 16 rows, got 24}}
  "kv.tma_load_tile"(%m4, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 24 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!pages, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.tma_load_tile' op the box's rows must divide the page size 16, got 32}}
  "kv.tma_load_tile"(%m6, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!wide, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.tma_load_tile' op smem_rows must be at least the tile's 64, got 32}}
  "kv.tma_load_tile"(%m4, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 32 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!pages, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

func.func @tma_load_tile_2(%m: !four, %c: !cache, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>, %m2: !pages) {
  // expected-error @below {{'kv.tma_load_tile' op each copy must start at a multiple of 128 bytes of shared memory, got boxes of 4 and chunks of 64 rows of 16 bytes}}
  "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!four, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.tma_load_tile' op beyond must be one of zero, skip, got "wrap"}}
  "kv.tma_load_tile"(%m2, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "wrap"} : (!pages, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

func.func @tma(%m: !gather, %i: i32, %p: !llvm.ptr<3>, %m2: !pages, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_store' op takes a descriptor of the form tiled or ragged, got gather4}}
  "kv.tma_store"(%m, %p, %i, %i, %i, %i, %i) {smem_rows = 8 : i64} : (!gather, !llvm.ptr<3>, i32, i32, i32, i32, i32) -> ()
  // expected-error @below {{'kv.tma_store' op takes the coordinates page, slot, head, column of a tiled descriptor of rank 4, got 1}}
  "kv.tma_store"(%m2, %p, %i) {smem_rows = 16 : i64} : (!pages, !llvm.ptr<3>, i32) -> ()
  // expected-error @below {{'kv.tma_wait_stores' op pending must not be negative, got -1 : i64}}
  "kv.tma_wait_stores"() {pending = -1 : i64, read = true} : () -> ()
  // expected-error @below {{'kv.tma_wait_stores' op read must be a bool, got 1 : i64}}
  "kv.tma_wait_stores"() {pending = 0 : i64, read = 1 : i64} : () -> ()
  // expected-error @below {{'kv.tma_prefetch' op map must be a TMA descriptor: expected a !kv.tma type, got i32}}
  "kv.tma_prefetch"(%i) : (i32) -> ()
  // expected-error @below {{'kv.tma_init_barrier' op arrivals must be from 1 to 1048575, got 0 : i64}}
  "kv.tma_init_barrier"(%q) {arrivals = 0 : i64} : (!llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.tma_wait' op tile and barrier must be in shared memory (!llvm.ptr<3>), got i32}}
  "kv.tma_wait"(%i, %i) : (i32, i32) -> ()
  return
}

func.func @tma_expect_and_scf_if(%m: !pages, %i: i32, %q: !llvm.ptr<3>, %n: !pages, %yes: i1) {
  // expected-error @below {{'kv.tma_expect' op arrive must be a bool, got 1 : i64}}
  "kv.tma_expect"(%m, %q, %i) {arrive = 1 : i64} : (!pages, !llvm.ptr<3>, i32) -> ()
  // expected-error @below {{'scf.if' op cannot give a tma (result #0): it must be a function argument or the result of a kv op}}
  %r = scf.if %yes -> !pages {
    scf.yield %m : !pages
  } else {
    scf.yield %n : !pages
  }
  "kv.tma_prefetch"(%r) : (!pages) -> ()
  return
}

func.func @tensor_map(%c: !pool, %i: i32, %c2: !cache, %c3: !mla, %c4: !narrow) {
  // expected-error @below {{'kv.tensor_map' op takes a layer with a collection, and none with a cache or an operand, got 0 of !kv.collection<}}
  "kv.tensor_map"(%c) {half = "key"} : (!pool) -> !pages
  // expected-error @below {{'kv.tensor_map' op takes a layer with a collection, and none with a cache or an operand, got 1 of !kv.cache<}}
  "kv.tensor_map"(%c2, %i) {half = "key"} : (!cache, i32) -> !pages
  // expected-error @below {{'kv.tensor_map' op with half = value needs a collection with values, got !kv.cache<}}
  "kv.tensor_map"(%c2) {half = "value"} : (!cache) -> !pages
  // expected-error @below {{'kv.tensor_map' op with half = value needs a collection with values, got !kv.collection<}}
  "kv.tensor_map"(%c3, %i) {half = "value"} : (!mla, i32) -> !pages
  // expected-error @below {{'kv.tensor_map' op half must be one of key, value, got "rope"}}
  "kv.tensor_map"(%c, %i) {half = "rope"} : (!pool, i32) -> !pages
  // expected-error @below {{'kv.tensor_map' op map must be a TMA descriptor: expected a !kv.tma type, got i32}}
  "kv.tensor_map"(%c, %i) {half = "key"} : (!pool, i32) -> i32
  // expected-error @below {{'kv.tensor_map' op result must be !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>, got !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>}}
  "kv.tensor_map"(%c, %i) {half = "key"} : (!pool, i32) -> !rows
  // expected-error @below {{'kv.tensor_map' op result must be !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>, got !kv.tma<"tiled", f32}}
  "kv.tensor_map"(%c, %i) {half = "key"} : (!pool, i32) -> !f32_map
  // expected-error @below {{'kv.tensor_map' op cannot describe the tile of !kv.tma<"tiled", bf16, array<i64: 1, 32, 1, 64>, array<i64: 32, 1, 128>, 128 : i64>: a box must not cross a page of 16 tokens: its rows must divide it, got 32}}
  "kv.tensor_map"(%c, %i) {half = "key"} : (!pool, i32) -> !wide
  // expected-error @below {{'kv.tensor_map' op cannot describe the tile of !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 64>, 128 : i64>: the elements of a head must be a multiple of 16 bytes, as all strides of a TMA descriptor, got 20 of bf16}}
  "kv.tensor_map"(%c4) {half = "key"} : (!narrow) -> !one
  return
}

func.func @tma_load_box(%m: !pages, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<1>) {
  // expected-error @below {{'kv.tma_load_box' op takes the coordinates page, slot, head, column of a tiled descriptor of rank 4, got 3}}
  "kv.tma_load_box"(map = %m, destination = %p, barrier = %p, coordinates = [%i, %i, %i]) {cta_group = 1 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32) -> ()
  // expected-error @below {{'kv.tma_load_box' op tile and barrier must be in shared memory (!llvm.ptr<3>), got !llvm.ptr<1>}}
  "kv.tma_load_box"(map = %m, destination = %q, barrier = %p, coordinates = [%i, %i, %i, %i]) {cta_group = 1 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<1>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  // expected-error @below {{'kv.tma_load_box' op cta_group must be 1 or 2, got 0 : i64}}
  "kv.tma_load_box"(map = %m, destination = %p, barrier = %p, coordinates = [%i, %i, %i, %i]) {cta_group = 0 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
gpu.module @kernels {
  gpu.func @rule(%c: !cache) kernel {
    // expected-error @below {{'kv.tensor_map' op must be outside kernels (gpu.func): the host makes a descriptor at launch, pass it on}}
    %0 = "kv.tensor_map"(%c) {half = "key"} : (!cache) -> !pages
    gpu.return
  }
}

// RUN: kv-opt %s --split-input-file --verify-diagnostics

// Copies by the tensor memory accelerator that their verifiers refuse. One chunk a rule.

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: a load takes a descriptor.
func.func @rule(%m: !cache, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load' op map must be a TMA descriptor: expected a !kv.tma type, got !kv.cache<}}
  "kv.tma_load"(%m, %p, %q, %i, %i, %i, %i) {smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!cache, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  return
}

// -----

!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: a tile lies in shared memory.
func.func @rule(%m: !pages, %i: i32, %p: !llvm.ptr<1>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load' op tile and barrier must be in shared memory (!llvm.ptr<3>), got !llvm.ptr<1>}}
  "kv.tma_load"(%m, %p, %q, %i, %i, %i, %i) {smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<1>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  return
}

// -----

!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: a load takes the coordinates of its descriptor's form.
func.func @rule(%m: !pages, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load' op takes the coordinates page, slot, head, column of a tiled descriptor of rank 4, got 3}}
  "kv.tma_load"(%m, %p, %q, %i, %i, %i) {smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32) -> ()
  return
}

// -----

!gather = !kv.tma<"gather4", bf16, array<i64: 1, 64>, array<i64: 8, 128>, 128 : i64>
// Rule: a gather takes four rows and a column.
func.func @rule(%m: !gather, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load' op takes the coordinates row0, row1, row2, row3, column of a gather4 descriptor of rank 2, got 4}}
  "kv.tma_load"(%m, %p, %q, %i, %i, %i, %i) {smem_rows = 8 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!gather, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  return
}

// -----

!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: the tile holds the box.
func.func @rule(%m: !pages, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load' op smem_rows must be at least the box's 16 rows, got 8 : i64}}
  "kv.tma_load"(%m, %p, %q, %i, %i, %i, %i) {smem_rows = 8 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  return
}

// -----

!eight = !kv.tma<"tiled", bf16, array<i64: 8, 1, 8>, array<i64: 8, 1, 16>, 16 : i64>
// Rule: chunks start where copies may.
func.func @rule(%m: !eight, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load' op chunks must start at multiples of 128 bytes, got chunks of 9 rows of 16 bytes}}
  "kv.tma_load"(%m, %p, %q, %i, %i, %i) {smem_rows = 9 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!eight, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32) -> ()
  return
}

// -----

!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: a group has one CTA or two.
func.func @rule(%m: !pages, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load' op cta_group must be 1 or 2, got 3 : i64}}
  "kv.tma_load"(%m, %p, %q, %i, %i, %i, %i) {smem_rows = 16 : i64, cta_group = 3 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  return
}

// -----

!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: a multicast has 16 CTAs at most.
func.func @rule(%m: !pages, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load' op multicast must be a mask of 16 bits, 0 for none, got 65536 : i64}}
  "kv.tma_load"(%m, %p, %q, %i, %i, %i, %i) {smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 65536 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!gather = !kv.tma<"gather4", bf16, array<i64: 1, 64>, array<i64: 8, 128>, 128 : i64>
// Rule: tiles of tokens are not gathered.
func.func @rule(%m: !gather, %c: !cache, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load_tile' op takes a descriptor of the form tiled or rope, got gather4: use kv.tma_load}}
  "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!gather, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// -----

!rows = !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!fa3 = !kv.cache<"fa3", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: fa3 caches have no rows.
func.func @rule(%m: !rows, %c: !fa3, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load_tile' op a TMA tile needs a paged or continuous cache, or a dense or ragged operand, got fa3: a cache of that kind has no rows}}
  "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!rows, !fa3, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// -----

!rope = !kv.tma<"rope", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 64>, 128 : i64>
!cont = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: continuous caches have no rope part.
func.func @rule(%m: !rope, %c: !cont, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load_tile' op a rope TMA tile needs a paged cache, got continuous}}
  "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!rope, !cont, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rope = !kv.tma<"rope", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 64>, 128 : i64>
// Rule: rope parts are of 8-bit caches.
func.func @rule(%m: !rope, %c: !cache, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load_tile' op a rope part behind the content needs an 8-bit cache, got bf16}}
  "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!rope, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// -----

!rows = !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!scales = !kv.operand<"scales", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 128 : i64>
// Rule: scales are read one by one.
func.func @rule(%m: !rows, %c: !scales, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load_tile' op a TMA tile needs a paged or continuous cache, or a dense or ragged operand, got scales: scales are read one by one}}
  "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!rows, !scales, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// -----

!rope = !kv.tma<"rope", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 64>, 128 : i64>
!ragged = !kv.operand<"ragged", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: buffers have no rope part.
func.func @rule(%m: !rope, %c: !ragged, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load_tile' op a rope TMA tile needs a paged cache, got ragged}}
  "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!rope, !ragged, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// -----

!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!ragged = !kv.operand<"ragged", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
// Rule: sequences of different lengths have no pages.
func.func @rule(%m: !pages, %c: !ragged, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load_tile' op coordinates of page and slot need sequences of one length, got a ragged operand}}
  "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!pages, !ragged, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!f32 = !kv.tma<"tiled", f32, array<i64: 16, 1, 32>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: the descriptor has the cache's dtype.
func.func @rule(%m: !f32, %c: !cache, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load_tile' op the descriptor must have the cache's dtype bf16, got f32}}
  "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!f32, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: a tile is whole boxes.
func.func @rule(%m: !pages, %c: !cache, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load_tile' op tile_rows must be a multiple of the box's 16 rows, got 24}}
  "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 24 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!pages, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!wide = !kv.tma<"tiled", bf16, array<i64: 1, 32, 1, 64>, array<i64: 32, 1, 128>, 128 : i64>
// Rule: a box does not cross a page.
func.func @rule(%m: !wide, %c: !cache, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load_tile' op the box's rows must divide the page size 16, got 32}}
  "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!wide, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: the tile in shared memory holds the tile.
func.func @rule(%m: !pages, %c: !cache, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load_tile' op smem_rows must be at least the tile's 64, got 32}}
  "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 32 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!pages, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!four = !kv.tma<"tiled", bf16, array<i64: 4, 1, 8>, array<i64: 4, 1, 8>, 16 : i64>
// Rule: boxes start where copies may.
func.func @rule(%m: !four, %c: !cache, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load_tile' op each copy must start at a multiple of 128 bytes of shared memory, got boxes of 4 and chunks of 64 rows of 16 bytes}}
  "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!four, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: beyond is zero or skip.
func.func @rule(%m: !pages, %c: !cache, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_load_tile' op beyond must be one of zero, skip, got "wrap"}}
  "kv.tma_load_tile"(%m, %c, %i, %i, %i, %i, %i, %p, %q) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "wrap"} : (!pages, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// -----

!gather = !kv.tma<"gather4", bf16, array<i64: 1, 64>, array<i64: 8, 128>, 128 : i64>
// Rule: gathers are not stored.
func.func @rule(%m: !gather, %i: i32, %p: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_store' op takes a descriptor of the form tiled or ragged, got gather4}}
  "kv.tma_store"(%m, %p, %i, %i, %i, %i, %i) {smem_rows = 8 : i64} : (!gather, !llvm.ptr<3>, i32, i32, i32, i32, i32) -> ()
  return
}

// -----

!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: a store takes the coordinates of its descriptor's form.
func.func @rule(%m: !pages, %i: i32, %p: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_store' op takes the coordinates page, slot, head, column of a tiled descriptor of rank 4, got 1}}
  "kv.tma_store"(%m, %p, %i) {smem_rows = 16 : i64} : (!pages, !llvm.ptr<3>, i32) -> ()
  return
}

// -----

// Rule: pending is a count.
func.func @rule(%i: i32) {
  // expected-error @below {{'kv.tma_wait_stores' op pending must not be negative, got -1 : i64}}
  "kv.tma_wait_stores"() {pending = -1 : i64, read = true} : () -> ()
  return
}

// -----

// Rule: read is a bool.
func.func @rule(%i: i32) {
  // expected-error @below {{'kv.tma_wait_stores' op read must be a bool, got 1 : i64}}
  "kv.tma_wait_stores"() {pending = 0 : i64, read = 1 : i64} : () -> ()
  return
}

// -----

// Rule: a descriptor is prefetched.
func.func @rule(%i: i32) {
  // expected-error @below {{'kv.tma_prefetch' op map must be a TMA descriptor: expected a !kv.tma type, got i32}}
  "kv.tma_prefetch"(%i) : (i32) -> ()
  return
}

// -----

// Rule: a barrier counts arrivals.
func.func @rule(%i: i32, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_init_barrier' op arrivals must be from 1 to 1048575, got 0 : i64}}
  "kv.tma_init_barrier"(%q) {arrivals = 0 : i64} : (!llvm.ptr<3>) -> ()
  return
}

// -----

// Rule: a barrier lies in shared memory.
func.func @rule(%i: i32) {
  // expected-error @below {{'kv.tma_wait' op tile and barrier must be in shared memory (!llvm.ptr<3>), got i32}}
  "kv.tma_wait"(%i, %i) : (i32, i32) -> ()
  return
}

// -----

!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: arrive is a bool.
func.func @rule(%m: !pages, %i: i32, %q: !llvm.ptr<3>) {
  // expected-error @below {{'kv.tma_expect' op arrive must be a bool, got 1 : i64}}
  "kv.tma_expect"(%m, %q, %i) {arrive = 1 : i64} : (!pages, !llvm.ptr<3>, i32) -> ()
  return
}

// -----

!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: a descriptor is an argument of a function.
func.func @rule(%m: !pages, %n: !pages, %yes: i1) {
  // expected-error @below {{'scf.if' op cannot give a tma (result #0): it must be a function argument or the result of a kv op}}
  %r = scf.if %yes -> !pages {
    scf.yield %m : !pages
  } else {
    scf.yield %n : !pages
  }
  "kv.tma_prefetch"(%r) : (!pages) -> ()
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: a descriptor of a collection is of a layer.
func.func @rule(%c: !pool, %i: i32) {
  // expected-error @below {{'kv.tensor_map' op takes a layer with a collection, and none with a cache or an operand, got 0 of !kv.collection<}}
  %0 = "kv.tensor_map"(%c) {half = "key"} : (!pool) -> !pages
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: a cache is a layer.
func.func @rule(%c: !cache, %i: i32) {
  // expected-error @below {{'kv.tensor_map' op takes a layer with a collection, and none with a cache or an operand, got 1 of !kv.cache<}}
  %0 = "kv.tensor_map"(%c, %i) {half = "key"} : (!cache, i32) -> !pages
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: a cache has no halves.
func.func @rule(%c: !cache) {
  // expected-error @below {{'kv.tensor_map' op with half = value needs a collection with values, got !kv.cache<}}
  %0 = "kv.tensor_map"(%c) {half = "value"} : (!cache) -> !pages
  return
}

// -----

!mla = !kv.collection<"paged", bf16, 1 : i64, 128 : i64, true, 16 : i64, none, 1 : i64>
!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: a latent collection has no values.
func.func @rule(%c: !mla, %i: i32) {
  // expected-error @below {{'kv.tensor_map' op with half = value needs a collection with values, got !kv.collection<}}
  %0 = "kv.tensor_map"(%c, %i) {half = "value"} : (!mla, i32) -> !pages
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: a half is key or value.
func.func @rule(%c: !pool, %i: i32) {
  // expected-error @below {{'kv.tensor_map' op half must be one of key, value, got "rope"}}
  %0 = "kv.tensor_map"(%c, %i) {half = "rope"} : (!pool, i32) -> !pages
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
// Rule: it gives a descriptor.
func.func @rule(%c: !pool, %i: i32) {
  // expected-error @below {{'kv.tensor_map' op map must be a TMA descriptor: expected a !kv.tma type, got i32}}
  %0 = "kv.tensor_map"(%c, %i) {half = "key"} : (!pool, i32) -> i32
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rows = !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: the tile has pages and slots where there are.
func.func @rule(%c: !pool, %i: i32) {
  // expected-error @below {{'kv.tensor_map' op result must be !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>, got !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>}}
  %0 = "kv.tensor_map"(%c, %i) {half = "key"} : (!pool, i32) -> !rows
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!f32 = !kv.tma<"tiled", f32, array<i64: 1, 16, 1, 32>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: the tile has the pool's element.
func.func @rule(%c: !pool, %i: i32) {
  // expected-error @below {{'kv.tensor_map' op result must be !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>, got !kv.tma<"tiled", f32}}
  %0 = "kv.tensor_map"(%c, %i) {half = "key"} : (!pool, i32) -> !f32
  return
}

// -----

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!wide = !kv.tma<"tiled", bf16, array<i64: 1, 32, 1, 64>, array<i64: 32, 1, 128>, 128 : i64>
// Rule: a box does not cross a page.
func.func @rule(%c: !pool, %i: i32) {
  // expected-error @below {{'kv.tensor_map' op cannot describe the tile of !kv.tma<"tiled", bf16, array<i64: 1, 32, 1, 64>, array<i64: 32, 1, 128>, 128 : i64>: a box must not cross a page of 16 tokens: its rows must divide it, got 32}}
  %0 = "kv.tensor_map"(%c, %i) {half = "key"} : (!pool, i32) -> !wide
  return
}

// -----

!narrow = !kv.cache<"paged", bf16, 8 : i64, 20 : i64, false, 16 : i64, none, 1 : i64>
!one = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 64>, 128 : i64>
// Rule: strides are multiples of 16 bytes.
func.func @rule(%c: !narrow) {
  // expected-error @below {{'kv.tensor_map' op cannot describe the tile of !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 64>, 128 : i64>: the elements of a head must be a multiple of 16 bytes, as all strides of a TMA descriptor, got 20 of bf16}}
  %0 = "kv.tensor_map"(%c) {half = "key"} : (!narrow) -> !one
  return
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: the host makes descriptors.
gpu.module @kernels {
  gpu.func @rule(%c: !cache) kernel {
    // expected-error @below {{'kv.tensor_map' op must be outside kernels (gpu.func): the host makes a descriptor at launch, pass it on}}
    %0 = "kv.tensor_map"(%c) {half = "key"} : (!cache) -> !pages
    gpu.return
  }
}

// -----

!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: a box takes the coordinates of its descriptor.
func.func @rule(%m: !pages, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<1>) {
  // expected-error @below {{'kv.tma_load_box' op takes the coordinates page, slot, head, column of a tiled descriptor of rank 4, got 3}}
  "kv.tma_load_box"(map = %m, destination = %p, barrier = %p, coordinates = [%i, %i, %i]) {cta_group = 1 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32) -> ()
  return
}

// -----

!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: a box goes to shared memory.
func.func @rule(%m: !pages, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<1>) {
  // expected-error @below {{'kv.tma_load_box' op tile and barrier must be in shared memory (!llvm.ptr<3>), got !llvm.ptr<1>}}
  "kv.tma_load_box"(map = %m, destination = %q, barrier = %p, coordinates = [%i, %i, %i, %i]) {cta_group = 1 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<1>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  return
}

// -----

!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
// Rule: a box is of one block, or of a pair.
func.func @rule(%m: !pages, %i: i32, %p: !llvm.ptr<3>, %q: !llvm.ptr<1>) {
  // expected-error @below {{'kv.tma_load_box' op cta_group must be 1 or 2, got 0 : i64}}
  "kv.tma_load_box"(map = %m, destination = %p, barrier = %p, coordinates = [%i, %i, %i, %i]) {cta_group = 0 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  return
}

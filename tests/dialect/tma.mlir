// RUN: kv-opt %s --verify-roundtrip --verify-kv --named-operands | FileCheck %s
// RUN: kv-opt %s | kv-opt --named-operands | FileCheck %s
// RUN: kv-opt %s --emit-bytecode | kv-opt --named-operands | FileCheck %s

// Copies by the tensor memory accelerator: every op, and every form of descriptor that a load takes.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!layers = !kv.collection<"fa3", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!rowwise = !kv.operand<"ragged", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!dense = !kv.operand<"dense", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>
!mla = !kv.cache<"paged", f8E4M3FN, 1 : i64, 640 : i64, true, 64 : i64, f32, 640 : i64>
!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!rows = !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!ragged = !kv.tma<"ragged", bf16, array<i64: 1, 1, 16, 64>, array<i64: 16, 128>, 128 : i64>
!rope = !kv.tma<"rope", bf16, array<i64: 1, 64, 1, 64>, array<i64: 64, 1, 64>, 128 : i64>
!gather = !kv.tma<"gather4", i64, array<i64: 1, 72>, array<i64: 8, 72>, 16 : i64>
!scales = !kv.tma<"scale", f32, array<i64: 1, 64>, array<i64: 1, 64>, 16 : i64>

// CHECK-LABEL: func.func @tensor_map
// CHECK:         "kv.tensor_map"(%{{.*}}, %{{.*}}) {half = "key"} : (!kv.collection<"paged", {{.*}}, i32) -> !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>,
// CHECK:         "kv.tensor_map"(%{{.*}}, %{{.*}}) {half = "value"} : (!kv.collection<"fa3", {{.*}}, i32) -> !kv.tma<
// CHECK:         "kv.tensor_map"(%{{.*}}) {half = "key"} : (!kv.cache<
// CHECK:         "kv.tensor_map"(%{{.*}}) {half = "key"} : (!kv.operand<"dense",
// CHECK:         "kv.tensor_map"(%{{.*}}) {half = "key"} : (!kv.operand<"ragged", {{.*}} -> !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>,
func.func @tensor_map(%p: !pool, %l: !layers, %c: !cache, %d: !dense, %r: !rowwise, %i: i32) {
  %0 = "kv.tensor_map"(%p, %i) {half = "key"} : (!pool, i32) -> !pages
  %1 = "kv.tensor_map"(%l, %i) {half = "value"} : (!layers, i32) -> !pages
  %2 = "kv.tensor_map"(%c) {half = "key"} : (!cache) -> !pages
  %3 = "kv.tensor_map"(%d) {half = "key"} : (!dense) -> !pages
  %4 = "kv.tensor_map"(%r) {half = "key"} : (!rowwise) -> !rows
  return
}

// CHECK-LABEL: func.func @load_box
// CHECK:         "kv.tma_load_box"({{.*}}, barrier = %{{[^,]*}}, coordinates = [%{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}]) {cta_group = 1 : i64, multicast = 0 : i64}
// CHECK:         "kv.tma_load_box"({{.*}}, barrier = %{{[^,]*}}, policy = %{{[^,]*}}, coordinates = [{{[^]]*}}]) {cta_group = 1 : i64, multicast = 3 : i64} : ({{.*}}, !llvm.ptr<3>, !llvm.ptr<3>, i64, i32, i32, i32, i32)
func.func @load_box(%p: !pages, %i: i32, %policy: i64, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) {
  "kv.tma_load_box"(map = %p, destination = %tile, barrier = %bar, coordinates = [%i, %i, %i, %i]) {cta_group = 1 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  "kv.tma_load_box"(map = %p, destination = %tile, barrier = %bar, policy = %policy, coordinates = [%i, %i, %i, %i]) {cta_group = 1 : i64, multicast = 3 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i64, i32, i32, i32, i32) -> ()
  return
}

// CHECK-LABEL: func.func @load(
// CHECK:         "kv.tma_load"({{.*}}) {cta_group = 1 : i64, multicast = 0 : i64, smem_rows = 16 : i64} : (!kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>,
// CHECK:         "kv.tma_load"({{.*}}) {{.*}} : (!kv.tma<"tiled", bf16, array<i64: 16, 1, 64>,
// CHECK:         "kv.tma_load"({{.*}}) {{.*}} : (!kv.tma<"ragged",
// CHECK:         "kv.tma_load"({{.*}}) {{.*}} : (!kv.tma<"gather4",
// CHECK:         "kv.tma_load"({{.*}}) {{.*}} : (!kv.tma<"scale",
func.func @load(%p: !pages, %r: !rows, %g: !ragged, %4: !gather, %s: !scales, %i: i32, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) {
  "kv.tma_load"(%p, %tile, %bar, %i, %i, %i, %i) {smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  "kv.tma_load"(%r, %tile, %bar, %i, %i, %i) {smem_rows = 64 : i64, cta_group = 2 : i64, multicast = 0 : i64} : (!rows, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32) -> ()
  "kv.tma_load"(%g, %tile, %bar, %i, %i, %i, %i) {smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 3 : i64} : (!ragged, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  "kv.tma_load"(%4, %tile, %bar, %i, %i, %i, %i, %i) {smem_rows = 8 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!gather, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32, i32) -> ()
  "kv.tma_load"(%s, %tile, %bar, %i, %i) {smem_rows = 1 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!scales, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32) -> ()
  return
}

// CHECK-LABEL: func.func @load_tile
// CHECK:         "kv.tma_load_tile"({{.*}}) {beyond = "zero", cta_group = 1 : i64, multicast = 0 : i64, smem_rows = 64 : i64, tile_rows = 64 : i64}
// CHECK:         "kv.tma_load_tile"({{.*}}) {beyond = "skip",
// CHECK:         "kv.tma_load_tile"({{.*}}) {{.*}} : (!kv.tma<"rope",
func.func @load_tile(%p: !pages, %r: !rows, %o: !rope, %c: !cache, %d: !dense, %m: !mla, %i: i32, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) {
  "kv.tma_load_tile"(%p, %c, %i, %i, %i, %i, %i, %tile, %bar) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "zero"} : (!pages, !cache, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  "kv.tma_load_tile"(%r, %d, %i, %i, %i, %i, %i, %tile, %bar) {tile_rows = 64 : i64, smem_rows = 64 : i64, cta_group = 1 : i64, multicast = 0 : i64, beyond = "skip"} : (!rows, !dense, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  "kv.tma_load_tile"(%o, %m, %i, %i, %i, %i, %i, %tile, %bar) {tile_rows = 64 : i64, smem_rows = 128 : i64, cta_group = 2 : i64, multicast = 0 : i64, beyond = "zero"} : (!rope, !mla, i32, i32, i32, i32, i32, !llvm.ptr<3>, !llvm.ptr<3>) -> ()
  return
}

// CHECK-LABEL: func.func @store
// CHECK:         "kv.tma_store"({{.*}}) {smem_rows = 16 : i64}
// CHECK:         "kv.tma_wait_stores"() {pending = 0 : i64, read = true}
func.func @store(%g: !ragged, %i: i32, %tile: !llvm.ptr<3>) {
  "kv.tma_store"(%g, %tile, %i, %i, %i, %i) {smem_rows = 16 : i64} : (!ragged, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  "kv.tma_wait_stores"() {pending = 0 : i64, read = true} : () -> ()
  return
}

// CHECK-LABEL: func.func @barriers
// CHECK:         "kv.tma_prefetch"(%{{.*}})
// CHECK:         "kv.tma_init_barrier"(%{{.*}}) {arrivals = 1 : i64}
// CHECK:         "kv.tma_expect"(%{{.*}}) {arrive = false}
// CHECK:         "kv.tma_expect"(%{{.*}}) {arrive = true}
// CHECK:         "kv.tma_wait"(%{{.*}})
func.func @barriers(%p: !pages, %i: i32, %bar: !llvm.ptr<3>) {
  "kv.tma_prefetch"(%p) : (!pages) -> ()
  "kv.tma_init_barrier"(%bar) {arrivals = 1 : i64} : (!llvm.ptr<3>) -> ()
  "kv.tma_expect"(%p, %bar, %i) {arrive = false} : (!pages, !llvm.ptr<3>, i32) -> ()
  "kv.tma_expect"(%p, %bar, %i) {arrive = true} : (!pages, !llvm.ptr<3>, i32) -> ()
  "kv.tma_wait"(%bar, %i) : (!llvm.ptr<3>, i32) -> ()
  return
}

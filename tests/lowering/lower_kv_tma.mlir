// RUN: kv-opt %s --lower-kv-tma | FileCheck %s
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=lower-kv-tma --check-semantics-of=lower-kv-tma --lengths=edges -o /dev/null %}

!pages = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!rows = !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 64>, 128 : i64>
!ragged = !kv.tma<"ragged", bf16, array<i64: 1, 1, 16, 64>, array<i64: 16, 64>, 128 : i64>
!gather = !kv.tma<"gather4", bf16, array<i64: 1, 64>, array<i64: 8, 128>, 128 : i64>
!scales = !kv.tma<"scale", f32, array<i64: 1, 64>, array<i64: 1, 64>, 16 : i64>

gpu.module @kernels {
  // One copy a column chunk, coordinates fast to slow; the second chunk lies 32 rows of 128 bytes further.
  // CHECK-LABEL: gpu.func @pages(
  // CHECK-SAME:    %{{.*}}, %[[PAGE:.*]]: i32, %[[SLOT:.*]]: i32, %[[HEAD:.*]]: i32, %[[COL:.*]]: i32,
  // CHECK:         %[[MAP:.*]] = "kv.field"(%{{.*}}) {field = "value"} : ({{.*}}) -> !llvm.ptr
  // CHECK:         llvm.inline_asm has_side_effects "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3, $4, $5}], [$6];", "r,l,r,r,r,r,r,~{memory}" %{{.*}}, %[[MAP]], %[[COL]], %[[HEAD]], %[[SLOT]], %[[PAGE]], %{{.*}} :
  // CHECK:         llvm.getelementptr %{{.*}}[4096]
  // CHECK:         %[[C64:.*]] = arith.constant 64 : i32
  // CHECK:         %[[NEXT:.*]] = arith.addi %[[COL]], %[[C64]]
  // CHECK:         llvm.inline_asm {{.*}} %[[MAP]], %[[NEXT]], %[[HEAD]], %[[SLOT]], %[[PAGE]],
  // CHECK-NOT:     kv.tma
  gpu.func @pages(%m: !pages, %page: i32, %slot: i32, %head: i32, %column: i32, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) kernel {
    "kv.tma_load"(%m, %tile, %bar, %page, %slot, %head, %column) {smem_rows = 32 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
    gpu.return
  }

  // One copy to the address given, whatever the descriptor's tile, with the policy of the L2 last.
  // CHECK-LABEL: gpu.func @box(
  // CHECK-SAME:    %[[POLICY:[^ ]*]]: i64
  // CHECK-COUNT-1: "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [$0], [$1, {$2, $3, $4, $5}], [$6], $7;", "r,l,r,r,r,r,r,l,~{memory}" {{.*}}, %[[POLICY]] :
  // CHECK-COUNT-1: "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3, $4, $5}], [$6];"
  // CHECK-NOT:     llvm.inline_asm
  // CHECK:         gpu.return
  gpu.func @box(%m: !pages, %i: i32, %policy: i64, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) kernel {
    "kv.tma_load_box"(map = %m, destination = %tile, barrier = %bar, policy = %policy, coordinates = [%i, %i, %i, %i]) {cta_group = 1 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i64, i32, i32, i32, i32) -> ()
    "kv.tma_load_box"(map = %m, destination = %tile, barrier = %bar, coordinates = [%i, %i, %i, %i]) {cta_group = 1 : i64, multicast = 0 : i64} : (!pages, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
    gpu.return
  }

  // The barrier of a pair is that of its first CTA: one bit of the address is cleared.
  // CHECK-LABEL: gpu.func @pair
  // CHECK:         %[[FIRST:.*]] = arith.constant -16777217 : i32
  // CHECK:         %[[BAR:.*]] = arith.andi %{{.*}}, %[[FIRST]]
  // CHECK:         llvm.inline_asm has_side_effects "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2 [$0], [$1, {$2, $3, $4}], [$5];", {{.*}}, %[[BAR]] :
  gpu.func @pair(%m: !rows, %i: i32, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) kernel {
    "kv.tma_load"(%m, %tile, %bar, %i, %i, %i) {smem_rows = 16 : i64, cta_group = 2 : i64, multicast = 0 : i64} : (!rows, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32) -> ()
    gpu.return
  }

  // CHECK-LABEL: gpu.func @multicast
  // CHECK:         %[[MASK:.*]] = arith.constant 3 : i16
  // CHECK:         llvm.inline_asm has_side_effects "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.cta_group::2 [$0], [$1, {$2, $3, $4}], [$5], $6;", "r,l,r,r,r,r,h,~{memory}" {{.*}}, %[[MASK]] :
  gpu.func @multicast(%m: !rows, %i: i32, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) kernel {
    "kv.tma_load"(%m, %tile, %bar, %i, %i, %i) {smem_rows = 16 : i64, cta_group = 2 : i64, multicast = 3 : i64} : (!rows, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32) -> ()
    gpu.return
  }

  // The first n of 16 rows: (column, 16 - n, head, row + n).
  // CHECK-LABEL: gpu.func @ragged(
  // CHECK-SAME:    %{{.*}}, %[[ROW:.*]]: i32, %[[VALID:.*]]: i32, %[[HEAD:.*]]: i32, %[[COL:.*]]: i32,
  // CHECK:         %[[C16:.*]] = arith.constant 16 : i32
  // CHECK:         %[[LEFT:.*]] = arith.subi %[[C16]], %[[VALID]]
  // CHECK:         %[[END:.*]] = arith.addi %[[ROW]], %[[VALID]]
  // CHECK:         llvm.inline_asm {{.*}}tensor.4d{{.*}}, %[[COL]], %[[LEFT]], %[[HEAD]], %[[END]],
  gpu.func @ragged(%m: !ragged, %row: i32, %valid: i32, %head: i32, %column: i32, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) kernel {
    "kv.tma_load"(%m, %tile, %bar, %row, %valid, %head, %column) {smem_rows = 16 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!ragged, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
    gpu.return
  }

  // Four rows, in two column chunks.
  // CHECK-LABEL: gpu.func @gather(
  // CHECK-SAME:    %{{.*}}, %[[R0:.*]]: i32, %[[R1:.*]]: i32, %[[R2:.*]]: i32, %[[R3:.*]]: i32, %[[COL:.*]]: i32,
  // CHECK:         llvm.inline_asm has_side_effects "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3, $4, $5, $6}], [$7];", {{.*}}, %[[COL]], %[[R0]], %[[R1]], %[[R2]], %[[R3]],
  // CHECK:         llvm.getelementptr %{{.*}}[1024]
  // CHECK:         tile::gather4
  gpu.func @gather(%m: !gather, %r0: i32, %r1: i32, %r2: i32, %r3: i32, %column: i32, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) kernel {
    "kv.tma_load"(%m, %tile, %bar, %r0, %r1, %r2, %r3, %column) {smem_rows = 8 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!gather, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32, i32) -> ()
    gpu.return
  }

  // CHECK-LABEL: gpu.func @scales(
  // CHECK-SAME:    %{{.*}}, %[[LINE:.*]]: i32, %[[FIRST:.*]]: i32,
  // CHECK:         llvm.inline_asm {{.*}}tensor.2d{{.*}}, %[[FIRST]], %[[LINE]],
  gpu.func @scales(%m: !scales, %line: i32, %first: i32, %tile: !llvm.ptr<3>, %bar: !llvm.ptr<3>) kernel {
    "kv.tma_load"(%m, %tile, %bar, %line, %first) {smem_rows = 1 : i64, cta_group = 1 : i64, multicast = 0 : i64} : (!scales, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32) -> ()
    gpu.return
  }

  // A store is a group of its own, which can be waited for.
  // CHECK-LABEL: gpu.func @store
  // CHECK:         llvm.inline_asm has_side_effects "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [$0, {$1, $2, $3, $4}], [$5];", "l,r,r,r,r,r,~{memory}"
  // CHECK:         llvm.inline_asm has_side_effects "cp.async.bulk.commit_group;"
  // CHECK:         llvm.inline_asm has_side_effects "cp.async.bulk.wait_group.read 1;"
  // CHECK:         llvm.inline_asm has_side_effects "cp.async.bulk.wait_group 0;"
  gpu.func @store(%m: !ragged, %i: i32, %tile: !llvm.ptr<3>) kernel {
    "kv.tma_store"(%m, %tile, %i, %i, %i, %i) {smem_rows = 16 : i64} : (!ragged, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
    "kv.tma_wait_stores"() {pending = 1 : i64, read = true} : () -> ()
    "kv.tma_wait_stores"() {pending = 0 : i64, read = false} : () -> ()
    gpu.return
  }

  // What a barrier expects is exact: 16 rows of 128 columns of 2 bytes a load.
  // CHECK-LABEL: gpu.func @barriers
  // CHECK:         prefetch.tensormap
  // CHECK:         mbarrier.init.shared.b64
  // CHECK:         nvvm.fence.mbarrier.init
  // CHECK:         arith.shli %{{.*}}, %c12_i32
  // CHECK:         mbarrier.expect_tx.relaxed.cta.shared::cta.b64
  // CHECK:         arith.shli %{{.*}}, %c12_i32
  // CHECK:         mbarrier.arrive.expect_tx.shared.b64
  // CHECK:         scf.while
  // CHECK:           mbarrier.try_wait.parity.shared.b64
  gpu.func @barriers(%m: !pages, %loads: i32, %bar: !llvm.ptr<3>) kernel {
    "kv.tma_prefetch"(%m) : (!pages) -> ()
    "kv.tma_init_barrier"(%bar) {arrivals = 1 : i64} : (!llvm.ptr<3>) -> ()
    "kv.tma_expect"(%m, %bar, %loads) {arrive = false} : (!pages, !llvm.ptr<3>, i32) -> ()
    "kv.tma_expect"(%m, %bar, %loads) {arrive = true} : (!pages, !llvm.ptr<3>, i32) -> ()
    "kv.tma_wait"(%bar, %loads) : (!llvm.ptr<3>, i32) -> ()
    gpu.return
  }
}

// RUN: kv-opt %s --vectorize-kv-lookups | FileCheck %s
// RUN: kv-opt %s --vectorize-kv-lookups='max-chunk=1' | FileCheck %s --check-prefix=SCALAR
// RUN: kv-opt %{kernels}/rows.mlir --kv-pipeline --target=sm_90a --stop-after=vectorize-kv-lookups --check-semantics-of=vectorize-kv-lookups --grid=3x2 --arg=found=3x128 --lengths=edges --model=%S/Inputs/models.py:rows -o /dev/null

!p16 = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!p128 = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 128 : i64, none, 1 : i64>
!p256 = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 256 : i64, none, 1 : i64>
!flat = !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>

gpu.module @kernels {
  // 8 pages: one load of 8 entries.
  // CHECK-LABEL: gpu.func @eight_pages
  // CHECK:         %[[P:.*]] = "kv.load_pages"{{.*}} {count = 8 : i64}
  // CHECK-NOT:     kv.load_pages
  // CHECK:         arith.muli %[[P]]
  // CHECK:         "kv.make_rows"
  // SCALAR-LABEL: gpu.func @eight_pages
  // SCALAR-COUNT-8: {count = 1 : i64}
  gpu.func @eight_pages(%c: !p16, %b: i32, %base: i32) kernel {
    %r = "kv.populate"(%c, %b, %base) {tile_rows = 128 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true} : (!p16, i32, i32) -> !kv.rows<128 : i64, 16 : i64>
    gpu.return
  }

  // 12 pages: three loads of lowbit(12) = 4.
  // CHECK-LABEL: gpu.func @twelve_pages
  // CHECK-COUNT-3: {count = 4 : i64}
  // CHECK-NOT:     kv.load_pages
  gpu.func @twelve_pages(%c: !p16, %b: i32, %base: i32) kernel {
    %r = "kv.populate"(%c, %b, %base) {tile_rows = 192 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true} : (!p16, i32, i32) -> !kv.rows<192 : i64, 16 : i64>
    gpu.return
  }

  // A base that is only page-aligned allows single entries.
  // CHECK-LABEL: gpu.func @page_aligned_base
  // CHECK-COUNT-8: {count = 1 : i64}
  gpu.func @page_aligned_base(%c: !p16, %b: i32, %base: i32) kernel {
    %r = "kv.populate"(%c, %b, %base) {tile_rows = 128 : i64, base_alignment = 16 : i64, pair_cta = false, is_leader = true} : (!p16, i32, i32) -> !kv.rows<128 : i64, 16 : i64>
    gpu.return
  }

  // One whole page: an entry times S, no slot.
  // CHECK-LABEL: gpu.func @one_page
  // CHECK:         %[[E:.*]] = "kv.page"
  // CHECK-NOT:     kv.row_index
  // CHECK:         arith.muli %[[E]]
  gpu.func @one_page(%c: !p128, %b: i32, %base: i32) kernel {
    %r = "kv.populate"(%c, %b, %base) {tile_rows = 128 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true} : (!p128, i32, i32) -> !kv.rows<128 : i64, 128 : i64>
    gpu.return
  }

  // Part of a page, or a region: the row index itself.
  // CHECK-LABEL: gpu.func @inside_a_page
  // CHECK:         "kv.row_index"
  // CHECK:         "kv.row_index"
  gpu.func @inside_a_page(%c: !p256, %d: !flat, %b: i32, %base: i32) kernel {
    %r = "kv.populate"(%c, %b, %base) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true} : (!p256, i32, i32) -> !kv.rows<64 : i64, 256 : i64>
    %s = "kv.populate"(%d, %b, %base) {tile_rows = 64 : i64, base_alignment = 0 : i64, pair_cta = false, is_leader = true} : (!flat, i32, i32) -> !kv.rows<64 : i64, 0 : i64>
    gpu.return
  }
}

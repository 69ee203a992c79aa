// RUN: kv-opt %s --lower-kv-tiles-to-linalg | FileCheck %s
// RUN: %if alone %{ sed 's/, schedule = {.*}}/}/' %S/Inputs/attention.mlir | kv-opt - --kv-pipeline --target=host --stop-after=lower-kv-tiles-to-linalg --check-semantics-of=lower-kv-tiles-to-linalg --lengths=edges:16 --new=3 --model=%S/Inputs/models.py:attention -o /dev/null %}

!paged = !kv.cache<"paged", bf16, 2 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>
!odd = !kv.cache<"paged", f32, 2 : i64, 20 : i64, false, 24 : i64, none, 1 : i64>
!rows = memref<?x?xf32, strided<[?, 1]>, 1>

gpu.module @kernels {
  // Positions, broadcasts and masks: what elementwise fusion takes.
  // CHECK-LABEL: gpu.func @values
  // CHECK:         linalg.index 0
  // CHECK:         linalg.generic {indexing_maps = [#{{.*}}, #{{.*}}], iterator_types = ["parallel", "parallel"]}
  // CHECK:         arith.select %{{.*}}, %{{.*}}, %{{.*}} : tensor<4x32xi1>, tensor<4x32xf32>
  // CHECK-NOT:     kv.tile
  gpu.func @values(%x: !rows) kernel attributes {kv.tiled} {
    %i = "kv.tile_index"() : () -> tensor<4xi32>
    %all = arith.constant dense<true> : tensor<4xi1>
    %t = "kv.tile_load_rows"(%x, %all, %i) : (!rows, tensor<4xi1>, tensor<4xi32>) -> tensor<4x32xf32>
    %j = "kv.tile_index"() : () -> tensor<32xi32>
    %a = "kv.tile_broadcast"(%i) {dimension = 0 : i64} : (tensor<4xi32>) -> tensor<4x32xi32>
    %b = "kv.tile_broadcast"(%j) {dimension = 1 : i64} : (tensor<32xi32>) -> tensor<4x32xi32>
    %m = arith.cmpi sle, %a, %b : tensor<4x32xi32>
    %r = "kv.tile_mask"(%t, %m) : (tensor<4x32xf32>, tensor<4x32xi1>) -> tensor<4x32xf32>
    "kv.tile_store_rows"(%r, %x, %all, %i) : (tensor<4x32xf32>, !rows, tensor<4xi1>, tensor<4xi32>) -> ()
    gpu.return
  }

  // A reduction starts at what does not change it.
  // CHECK-LABEL: gpu.func @reduction
  // CHECK:         arith.constant 0xFF800000 : f32
  // CHECK:         iterator_types = ["parallel", "reduction"]
  // CHECK:         arith.maxnumf
  // CHECK:         iterator_types = ["reduction", "parallel"]
  // CHECK:         arith.addf
  gpu.func @reduction(%x: !rows, %o: memref<?xf32, strided<[1]>, 1>) kernel attributes {kv.tiled} {
    %i = "kv.tile_index"() : () -> tensor<4xi32>
    %all = arith.constant dense<true> : tensor<4xi1>
    %t = "kv.tile_load_rows"(%x, %all, %i) : (!rows, tensor<4xi1>, tensor<4xi32>) -> tensor<4x4xf32>
    %m = "kv.tile_reduce"(%t) {kind = "max", axis = 1 : i64} : (tensor<4x4xf32>) -> tensor<4xf32>
    %s = "kv.tile_reduce"(%t) {kind = "add", axis = 0 : i64} : (tensor<4x4xf32>) -> tensor<4xf32>
    %r = arith.addf %m, %s : tensor<4xf32>
    "kv.tile_scatter"(%r, %o, %all, %i) : (tensor<4xf32>, memref<?xf32, strided<[1]>, 1>, tensor<4xi1>, tensor<4xi32>) -> ()
    gpu.return
  }

  // A page has one look-up; rows past the tokens that exist are zeros. What only a product reads is loaded as f32.
  // CHECK-LABEL: gpu.func @product
  // CHECK:         scf.for
  // CHECK:           "kv.page"
  // CHECK-NEXT:      arith.subi
  // CHECK:           scf.for
  // CHECK-NOT:         kv.page
  // CHECK:             "kv.load"{{.*}} {width = 16 : i64}
  // CHECK:             arith.extf {{.*}} : vector<16xbf16> to vector<16xf32>
  // CHECK:             vector.transfer_write {{.*}} tensor<32x64xf32>
  // CHECK:         scf.for
  // CHECK-NOT:       kv.load
  // CHECK:           vector.transfer_write
  // CHECK:         linalg.matmul indexing_maps = [#{{.*}}, #{{.*}}, #{{.*}}] ins(%{{.*}}, %{{.*}} : tensor<4x64xf32>, tensor<32x64xf32>)
  gpu.func @product(%k: !paged, %q: memref<?x?xbf16, strided<[?, 1]>, 1>, %o: !rows, %b: i32, %h: i32, %first: i32, %count: i32) kernel attributes {kv.tiled} {
    %i = "kv.tile_index"() : () -> tensor<4xi32>
    %all = arith.constant dense<true> : tensor<4xi1>
    %t = "kv.tile_load_rows"(%q, %all, %i) : (memref<?x?xbf16, strided<[?, 1]>, 1>, tensor<4xi1>, tensor<4xi32>) -> tensor<4x64xbf16>
    %zero = arith.constant 0 : i32
    %c = "kv.tile_load"(%k, %b, %h, %first, %zero, %count) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!paged, i32, i32, i32, i32, i32) -> tensor<32x64xbf16>
    %r = "kv.dot"(%t, %c) {transpose_b = true} : (tensor<4x64xbf16>, tensor<32x64xbf16>) -> tensor<4x32xf32>
    "kv.tile_store_rows"(%r, %o, %all, %i) : (tensor<4x32xf32>, !rows, tensor<4xi1>, tensor<4xi32>) -> ()
    gpu.return
  }

  // Pages that no tile begins with are looked up for every row. With tail "any" no zeros are written.
  // CHECK-LABEL: gpu.func @odd_pages
  // CHECK:         scf.for
  // CHECK:           "kv.page"
  // CHECK:             vector.transfer_write {{.*}} vector<16xf32>, tensor<16x20xf32>
  // CHECK:             vector.transfer_write {{.*}} vector<4xf32>, tensor<16x20xf32>
  // CHECK-NOT:     arith.constant dense<0.0{{.*}} : vector
  // CHECK:         gpu.return
  gpu.func @odd_pages(%k: !odd, %o: !rows, %b: i32, %h: i32, %first: i32, %count: i32) kernel attributes {kv.tiled} {
    %i = "kv.tile_index"() : () -> tensor<16xi32>
    %all = arith.constant dense<true> : tensor<16xi1>
    %zero = arith.constant 0 : i32
    %c = "kv.tile_load"(%k, %b, %h, %first, %zero, %count) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!odd, i32, i32, i32, i32, i32) -> tensor<16x20xf32>
    "kv.tile_store_rows"(%c, %o, %all, %i) : (tensor<16x20xf32>, !rows, tensor<16xi1>, tensor<16xi32>) -> ()
    gpu.return
  }

  // What a loop carries is written to where it was.
  // CHECK-LABEL: gpu.func @carried
  // CHECK:         scf.for {{.*}} iter_args(%[[X:.*]] = %{{.*}})
  // CHECK:           bufferization.materialize_in_destination %{{.*}} in %[[X]]
  gpu.func @carried(%o: memref<?xf32, strided<[1]>, 1>, %n: i32) kernel attributes {kv.tiled} {
    %i = "kv.tile_index"() : () -> tensor<4xi32>
    %all = arith.constant dense<true> : tensor<4xi1>
    %x = arith.constant dense<1.0> : tensor<4xf32>
    %zero = arith.constant 0 : i32
    %one = arith.constant 1 : i32
    %r = scf.for %j = %zero to %n step %one iter_args(%y = %x) -> (tensor<4xf32>) : i32 {
      %z = arith.addf %y, %y : tensor<4xf32>
      scf.yield %z : tensor<4xf32>
    }
    "kv.tile_scatter"(%r, %o, %all, %i) : (tensor<4xf32>, memref<?xf32, strided<[1]>, 1>, tensor<4xi1>, tensor<4xi32>) -> ()
    gpu.return
  }

  // Kernels without tiles stay as they are.
  // CHECK-LABEL: gpu.func @scalars
  // CHECK:         tensor.splat
  gpu.func @scalars(%x: f32) kernel {
    %t = tensor.splat %x : tensor<4xf32>
    gpu.return
  }
}

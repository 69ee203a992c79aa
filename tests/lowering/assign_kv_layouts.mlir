// RUN: kv-opt %s --split-input-file --verify-diagnostics --assign-kv-layouts | FileCheck %s
// RUN: sed -e '/@beside(/,/return/ s/instruction = "mma.sync", //' %s | kv-opt --split-input-file --verify-diagnostics --assign-kv-layouts | FileCheck %s --check-prefix=WGMMA
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=assign-kv-layouts --check-semantics-of=assign-kv-layouts --lengths=edges -o /dev/null %}
// RUN: %if alone %{ kv-opt %{kernels}/observed.mlir --kv-pipeline --target=sm_90a --stop-after=assign-kv-layouts --check-semantics-of=assign-kv-layouts --grid=3 --arg=query=3x16x64 --arg=seen=3x256 --lengths=edges:64 --model=%S/Inputs/models.py:observed -o /dev/null %}

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!bytes = !kv.cache<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, f32, 128 : i64>

gpu.module @kernels {
  // Both operands of the first product are loaded and lie in shared memory; A of the second is computed and stays in
  // registers. What is computed from scores lies as they do, vectors of rows and of columns each in their way; a
  // position and a constant are repeated for both.
  // CHECK-LABEL: gpu.func @attention
  // CHECK:         %[[ROWS:.*]] = "kv.tile_index"() : () -> tensor<64xi32, "rows(wgmma)">
  // CHECK:         %[[COLUMNS:.*]] = "kv.tile_index"() : () -> tensor<64xi32, "columns(wgmma:4)">
  // CHECK:         "kv.tile_load_rows"({{.*}} -> tensor<64x128xbf16, "shared">
  // CHECK:         "kv.tile_load"({{.*}} -> tensor<64x128xbf16, "shared">
  // CHECK:         "kv.dot"({{.*}} : (tensor<64x128xbf16, "shared">, tensor<64x128xbf16, "shared">) -> tensor<64x64xf32, "wgmma">
  // CHECK:         "kv.tile_broadcast"(%[[COLUMNS]]) {dimension = 1 : i64} : (tensor<64xi32, "columns(wgmma:4)">) -> tensor<64x64xi32, "wgmma">
  // CHECK:         "kv.tile_broadcast"(%[[ROWS]]) {dimension = 0 : i64} : (tensor<64xi32, "rows(wgmma)">) -> tensor<64x64xi32, "wgmma">
  // CHECK:         arith.cmpi sle, %{{.*}}, %{{.*}} : tensor<64x64xi32, "wgmma">
  // CHECK:         "kv.tile_mask"({{.*}}) : (tensor<64x64xf32, "wgmma">, tensor<64x64xi1, "wgmma">) -> tensor<64x64xf32, "wgmma">
  // CHECK:         "kv.tile_reduce"({{.*}} -> tensor<64xf32, "rows(wgmma)">
  // CHECK:         arith.truncf %{{.*}} : tensor<64x64xf32, "wgmma"> to tensor<64x64xbf16, "wgmma">
  // CHECK:         "kv.dot"({{.*}} : (tensor<64x64xbf16, "wgmma">, tensor<64x128xbf16, "shared">) -> tensor<64x128xf32, "wgmma">
  gpu.func @attention(%c: !cache, %i: i32, %query: memref<?x128xbf16>, %out: memref<?x128xf32>, %every: tensor<64xi1>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %at = "kv.tile_index"() : () -> tensor<64xi32>
    %true = arith.constant dense<true> : tensor<64xi1>
    %q = "kv.tile_load_rows"(%query, %true, %at) : (memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x128xbf16>
    %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
    %s = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<64x128xbf16>, tensor<64x128xbf16>) -> tensor<64x64xf32>
    %ks = "kv.tile_broadcast"(%at) {dimension = 1 : i64} : (tensor<64xi32>) -> tensor<64x64xi32>
    %qs = "kv.tile_broadcast"(%at) {dimension = 0 : i64} : (tensor<64xi32>) -> tensor<64x64xi32>
    %seen = arith.cmpi sle, %ks, %qs : tensor<64x64xi32>
    %x = "kv.tile_mask"(%s, %seen) : (tensor<64x64xf32>, tensor<64x64xi1>) -> tensor<64x64xf32>
    %m = "kv.tile_reduce"(%x) {kind = "max", axis = 1 : i64} : (tensor<64x64xf32>) -> tensor<64xf32>
    %ms = "kv.tile_broadcast"(%m) {dimension = 0 : i64} : (tensor<64xf32>) -> tensor<64x64xf32>
    %y = arith.subf %x, %ms : tensor<64x64xf32>
    %p = arith.truncf %y : tensor<64x64xf32> to tensor<64x64xbf16>
    %o = "kv.dot"(%p, %k) {transpose_b = false} : (tensor<64x64xbf16>, tensor<64x128xbf16>) -> tensor<64x128xf32>
    "kv.tile_store_rows"(%o, %out, %true, %at) : (tensor<64x128xf32>, memref<?x128xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

  // Where so many stacks of warps stand beside one another: scores and sums are spread over the columns too, and A lies in
  // shared memory, where it is loaded and where it is computed.
  // CHECK-LABEL: gpu.func @beside
  // CHECK:         "kv.tile_index"() : () -> tensor<32xi32, "columns(mma:4x2)">
  // CHECK:         "kv.tile_load_rows"({{.*}} -> tensor<64x128xbf16, "shared">
  // CHECK:         "kv.dot"({{.*}} -> tensor<64x32xf32, "mma:4x2">
  // CHECK:         "kv.tile_reduce"({{.*}} -> tensor<64xf32, "rows(mma:4x2)">
  // CHECK:         %[[P:.*]] = arith.truncf %{{.*}} to tensor<64x32xbf16, "mma:4x2">
  // CHECK:         %[[A:.*]] = "kv.tile_share"(%[[P]]) : (tensor<64x32xbf16, "mma:4x2">) -> tensor<64x32xbf16, "shared">
  // CHECK:         "kv.dot"(%[[A]], {{.*}} : (tensor<64x32xbf16, "shared">, tensor<32x128xbf16, "shared">) -> tensor<64x128xf32, "mma:4x2">
  // By wgmma warpgroups stand beside one another.
  // WGMMA-LABEL: gpu.func @beside
  // WGMMA:         "kv.dot"({{.*}} : (tensor<64x128xbf16, "shared">, tensor<32x128xbf16, "shared">) -> tensor<64x32xf32, "wgmma:4x2">
  // WGMMA:         "kv.tile_reduce"({{.*}} -> tensor<64xf32, "rows(wgmma:4x2)">
  // WGMMA:         %[[A:.*]] = "kv.tile_share"(%{{.*}}) : (tensor<64x32xbf16, "wgmma:4x2">) -> tensor<64x32xbf16, "shared">
  // WGMMA:         "kv.dot"(%[[A]], {{.*}} -> tensor<64x128xf32, "wgmma:4x2">
  gpu.func @beside(%c: !cache, %i: i32, %query: memref<?x128xbf16>, %out: memref<?x128xf32>, %n: i32) kernel attributes {kv.tiled, kv.block = array<i32: 256, 1, 1>, kv.schedule = {instruction = "mma.sync", consumers = 2 : i64, across = 2 : i64}} {
    %at = "kv.tile_index"() : () -> tensor<64xi32>
    %keys = "kv.tile_index"() : () -> tensor<32xi32>
    %count = tensor.splat %n : tensor<32xi32>
    %true = arith.constant dense<true> : tensor<64xi1>
    %q = "kv.tile_load_rows"(%query, %true, %at) : (memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x128xbf16>
    %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<32x128xbf16>
    %s = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<64x128xbf16>, tensor<32x128xbf16>) -> tensor<64x32xf32>
    %exist = arith.cmpi slt, %keys, %count : tensor<32xi32>
    %seen = "kv.tile_broadcast"(%exist) {dimension = 1 : i64} : (tensor<32xi1>) -> tensor<64x32xi1>
    %x = "kv.tile_mask"(%s, %seen) : (tensor<64x32xf32>, tensor<64x32xi1>) -> tensor<64x32xf32>
    %m = "kv.tile_reduce"(%x) {kind = "max", axis = 1 : i64} : (tensor<64x32xf32>) -> tensor<64xf32>
    %ms = "kv.tile_broadcast"(%m) {dimension = 0 : i64} : (tensor<64xf32>) -> tensor<64x32xf32>
    %y = arith.subf %x, %ms : tensor<64x32xf32>
    %p = arith.truncf %y : tensor<64x32xf32> to tensor<64x32xbf16>
    %o = "kv.dot"(%p, %k) {transpose_b = false} : (tensor<64x32xbf16>, tensor<32x128xbf16>) -> tensor<64x128xf32>
    "kv.tile_store_rows"(%o, %out, %true, %at) : (tensor<64x128xf32>, memref<?x128xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

  // Fewer rows than warps have of an instruction: the operands are swapped. Rows and weights, which every warp reads, lie
  // in shared memory; tiles and their vectors are transposed, and the schedule says it.
  // CHECK-LABEL: gpu.func @few_rows
  // CHECK-SAME:    kv.schedule = {instruction = "wgmma", swapped = true}
  // CHECK:         "kv.tile_index"() : () -> tensor<16xi32, "rows(transposed(wgmma:4))">
  // CHECK:         "kv.tile_index"() : () -> tensor<64xi32, "columns(transposed(wgmma:4))">
  // CHECK:         "kv.tile_load_rows"({{.*}} -> tensor<16x128xbf16, "shared">
  // CHECK:         "kv.dot"({{.*}} : (tensor<16x128xbf16, "shared">, tensor<64x128xbf16, "shared">) -> tensor<16x64xf32, "transposed(wgmma:4)">
  // CHECK:         "kv.tile_reduce"({{.*}} -> tensor<16xf32, "rows(transposed(wgmma:4))">
  // CHECK:         %[[A:.*]] = "kv.tile_share"({{.*}} : (tensor<16x64xbf16, "transposed(wgmma:4)">) -> tensor<16x64xbf16, "shared">
  // CHECK:         "kv.dot"(%[[A]], {{.*}} -> tensor<16x128xf32, "transposed(wgmma:4)">
  gpu.func @few_rows(%c: !cache, %i: i32, %query: memref<?x128xbf16>, %out: memref<?x128xf32>, %n: i32) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %at = "kv.tile_index"() : () -> tensor<16xi32>
    %keys = "kv.tile_index"() : () -> tensor<64xi32>
    %count = tensor.splat %n : tensor<64xi32>
    %true = arith.constant dense<true> : tensor<16xi1>
    %q = "kv.tile_load_rows"(%query, %true, %at) : (memref<?x128xbf16>, tensor<16xi1>, tensor<16xi32>) -> tensor<16x128xbf16>
    %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
    %s = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<16x128xbf16>, tensor<64x128xbf16>) -> tensor<16x64xf32>
    %exist = arith.cmpi slt, %keys, %count : tensor<64xi32>
    %seen = "kv.tile_broadcast"(%exist) {dimension = 1 : i64} : (tensor<64xi1>) -> tensor<16x64xi1>
    %x = "kv.tile_mask"(%s, %seen) : (tensor<16x64xf32>, tensor<16x64xi1>) -> tensor<16x64xf32>
    %m = "kv.tile_reduce"(%x) {kind = "max", axis = 1 : i64} : (tensor<16x64xf32>) -> tensor<16xf32>
    %ms = "kv.tile_broadcast"(%m) {dimension = 0 : i64} : (tensor<16xf32>) -> tensor<16x64xf32>
    %y = arith.subf %x, %ms : tensor<16x64xf32>
    %p = arith.truncf %y : tensor<16x64xf32> to tensor<16x64xbf16>
    %o = "kv.dot"(%p, %k) {transpose_b = false} : (tensor<16x64xbf16>, tensor<64x128xbf16>) -> tensor<16x128xf32>
    "kv.tile_store_rows"(%o, %out, %true, %at) : (tensor<16x128xf32>, memref<?x128xf32>, tensor<16xi1>, tensor<16xi32>) -> ()
    gpu.return
  }

  // A computed operand that a loop does not change is copied to shared memory before the loop.
  // CHECK-LABEL: gpu.func @shared_once
  // CHECK:         %[[A:.*]] = "kv.tile_share"
  // CHECK:         scf.for
  // CHECK-NOT:       kv.tile_share
  // CHECK:           "kv.dot"(%[[A]],
  gpu.func @shared_once(%c: !cache, %i: i32, %query: memref<?x?xbf16>, %out: memref<?x64xf32>, %n: i32) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {swapped = true}} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %at = "kv.tile_index"() : () -> tensor<16xi32>
    %column = "kv.tile_index"() : () -> tensor<128xi32>
    %rows = "kv.tile_broadcast"(%at) {dimension = 0 : i64} : (tensor<16xi32>) -> tensor<16x128xi32>
    %columns = "kv.tile_broadcast"(%column) {dimension = 1 : i64} : (tensor<128xi32>) -> tensor<16x128xi32>
    %true = arith.constant dense<true> : tensor<16xi1>
    %all = arith.constant dense<true> : tensor<16x128xi1>
    %q = "kv.tile_gather"(%query, %all, %rows, %columns) : (memref<?x?xbf16>, tensor<16x128xi1>, tensor<16x128xi32>, tensor<16x128xi32>) -> tensor<16x128xbf16>
    scf.for %j = %c0 to %n step %c1 : i32 {
      %k = "kv.tile_load"(%c, %i, %i, %j, %i, %n) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
      %s = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<16x128xbf16>, tensor<64x128xbf16>) -> tensor<16x64xf32>
      "kv.tile_store_rows"(%s, %out, %true, %at) : (tensor<16x64xf32>, memref<?x64xf32>, tensor<16xi1>, tensor<16xi32>) -> ()
    }
    gpu.return
  }

  // The same by mma.sync, and of as many rows as warps have where the schedule says so.
  // CHECK-LABEL: gpu.func @swapped
  // CHECK:         "kv.dot"({{.*}} : (tensor<64x128xbf16, "shared">, tensor<64x128xbf16, "shared">) -> tensor<64x64xf32, "transposed(mma:4)">
  gpu.func @swapped(%c: !cache, %i: i32, %query: memref<?x128xbf16>, %out: memref<?x128xf32>, %n: i32) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {instruction = "mma.sync", swapped = true}} {
    %at = "kv.tile_index"() : () -> tensor<64xi32>
    %keys = "kv.tile_index"() : () -> tensor<64xi32>
    %count = tensor.splat %n : tensor<64xi32>
    %true = arith.constant dense<true> : tensor<64xi1>
    %q = "kv.tile_load_rows"(%query, %true, %at) : (memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x128xbf16>
    %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
    %s = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<64x128xbf16>, tensor<64x128xbf16>) -> tensor<64x64xf32>
    %exist = arith.cmpi slt, %keys, %count : tensor<64xi32>
    %seen = "kv.tile_broadcast"(%exist) {dimension = 1 : i64} : (tensor<64xi1>) -> tensor<64x64xi1>
    %x = "kv.tile_mask"(%s, %seen) : (tensor<64x64xf32>, tensor<64x64xi1>) -> tensor<64x64xf32>
    %m = "kv.tile_reduce"(%x) {kind = "max", axis = 1 : i64} : (tensor<64x64xf32>) -> tensor<64xf32>
    %ms = "kv.tile_broadcast"(%m) {dimension = 0 : i64} : (tensor<64xf32>) -> tensor<64x64xf32>
    %y = arith.subf %x, %ms : tensor<64x64xf32>
    %p = arith.truncf %y : tensor<64x64xf32> to tensor<64x64xbf16>
    %o = "kv.dot"(%p, %k) {transpose_b = false} : (tensor<64x64xbf16>, tensor<64x128xbf16>) -> tensor<64x128xf32>
    "kv.tile_store_rows"(%o, %out, %true, %at) : (tensor<64x128xf32>, memref<?x128xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

  // What loops and branches hand on keeps its layout: carried vectors of rows, and a loaded tile whose sign may change.
  // CHECK-LABEL: gpu.func @handed_on
  // CHECK:         scf.if %{{.*}} -> (tensor<64x128xbf16, "shared">)
  // CHECK:           arith.negf %{{.*}} : tensor<64x128xbf16, "shared">
  // CHECK:         scf.for {{.*}} -> (tensor<64xf32, "rows(wgmma)">, tensor<64x128xf32, "wgmma">)
  // CHECK:           arith.mulf %{{.*}}, %{{.*}} : tensor<64xf32, "rows(wgmma)">
  gpu.func @handed_on(%c: !cache, %i: i32, %sign: i1, %out: memref<?x128xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %zeros = arith.constant dense<0.0> : tensor<64x128xf32>
    %ones = arith.constant dense<1.0> : tensor<64xf32>
    %q = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
    %signed = scf.if %sign -> (tensor<64x128xbf16>) {
      %n = arith.negf %q : tensor<64x128xbf16>
      scf.yield %n : tensor<64x128xbf16>
    } else {
      scf.yield %q : tensor<64x128xbf16>
    }
    %r:2 = scf.for %j = %c0 to %i step %c1 iter_args(%l = %ones, %o = %zeros) -> (tensor<64xf32>, tensor<64x128xf32>) : i32 {
      %v = "kv.tile_load"(%c, %i, %i, %j, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<128x128xbf16>
      %ls = "kv.tile_broadcast"(%l) {dimension = 0 : i64} : (tensor<64xf32>) -> tensor<64x128xf32>
      %scaled = arith.mulf %o, %ls : tensor<64x128xf32>
      %sum = "kv.dot"(%signed, %v, %scaled) {transpose_b = false} : (tensor<64x128xbf16>, tensor<128x128xbf16>, tensor<64x128xf32>) -> tensor<64x128xf32>
      %l2 = arith.mulf %l, %ones : tensor<64xf32>
      scf.yield %l2, %sum : tensor<64xf32>, tensor<64x128xf32>
    }
    %at = "kv.tile_index"() : () -> tensor<64xi32>
    %true = arith.constant dense<true> : tensor<64xi1>
    "kv.tile_store_rows"(%r#1, %out, %true, %at) : (tensor<64x128xf32>, memref<?x128xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

  // Elements of 8 bits that only A takes stay what they are in shared memory, and threads convert them; scales, one of a
  // row, multiply the product before it is added.
  // CHECK-LABEL: gpu.func @stored
  // CHECK:         %[[S:.*]] = "kv.tile_scales"({{.*}} -> tensor<64xf32, "rows(wgmma)">
  // CHECK:         %[[K:.*]] = "kv.tile_load"({{.*}} -> tensor<64x128xi8, "shared">
  // CHECK:         %[[A:.*]] = "kv.tile_fragments"(%[[K]]) : (tensor<64x128xi8, "shared">) -> tensor<64x128xbf16, "wgmma">
  // CHECK:         %[[P:.*]] = "kv.dot"(%[[A]], %{{.*}}) {transpose_b = true} : (tensor<64x128xbf16, "wgmma">, tensor<16x128xbf16, "shared">) -> tensor<64x16xf32, "wgmma">
  // CHECK:         %[[F:.*]] = "kv.tile_broadcast"(%[[S]]) {dimension = 0 : i64} : (tensor<64xf32, "rows(wgmma)">) -> tensor<64x16xf32, "wgmma">
  // CHECK:         %[[M:.*]] = arith.mulf %[[P]], %[[F]]
  // CHECK:         arith.addf %{{.*}}, %[[M]]
  gpu.func @stored(%c: !bytes, %i: i32, %query: memref<?x128xbf16>, %out: memref<?x16xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %few = "kv.tile_index"() : () -> tensor<16xi32>
    %some = arith.constant dense<true> : tensor<16xi1>
    %at = "kv.tile_index"() : () -> tensor<64xi32>
    %true = arith.constant dense<true> : tensor<64xi1>
    %zeros = arith.constant dense<0.0> : tensor<64x16xf32>
    %q = "kv.tile_load_rows"(%query, %some, %few) : (memref<?x128xbf16>, tensor<16xi1>, tensor<16xi32>) -> tensor<16x128xbf16>
    %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!bytes, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
    %s = "kv.dot"(%k, %q, %zeros) {transpose_b = true} : (tensor<64x128xbf16>, tensor<16x128xbf16>, tensor<64x16xf32>) -> tensor<64x16xf32>
    "kv.tile_store_rows"(%s, %out, %true, %at) : (tensor<64x16xf32>, memref<?x16xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

  // A vector is computed once for each dimension that it is asked for along: a cast, what it is made of, and elements of
  // memory. The mask and the rows of a load are of rows, whatever else they are used for.
  // CHECK-LABEL: gpu.func @both
  // CHECK-DAG:     arith.sitofp %{{.*}} : tensor<64xi32, "rows(wgmma)"> to tensor<64xf32, "rows(wgmma)">
  // CHECK-DAG:     arith.sitofp %{{.*}} : tensor<64xi32, "columns(wgmma:4)"> to tensor<64xf32, "columns(wgmma:4)">
  // CHECK-DAG:     "kv.tile_gather"({{.*}} -> tensor<64xf32, "rows(wgmma)">
  // CHECK-DAG:     "kv.tile_gather"({{.*}} -> tensor<64xf32, "columns(wgmma:4)">
  // CHECK-NOT:     arith.sitofp
  // CHECK-NOT:     "kv.tile_gather"
  // CHECK:         "kv.tile_load_rows"(%{{.*}}, %{{.*}}, %{{.*}}) : (memref<?x64xbf16>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> tensor<64x64xbf16, "shared">
  // CHECK:         "kv.tile_broadcast"(%{{.*}}) {dimension = 1 : i64} : (tensor<64xi1, "columns(wgmma:4)">) -> tensor<64x64xi1, "wgmma">
  gpu.func @both(%a: memref<?x64xbf16>, %gates: memref<?xf32>, %n: i32, %out: memref<?x64xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %at = "kv.tile_index"() : () -> tensor<64xi32>
    %count = tensor.splat %n : tensor<64xi32>
    %exists = arith.cmpi slt, %at, %count : tensor<64xi32>
    %t = arith.sitofp %at : tensor<64xi32> to tensor<64xf32>
    %g = "kv.tile_gather"(%gates, %exists, %at) : (memref<?xf32>, tensor<64xi1>, tensor<64xi32>) -> tensor<64xf32>
    %x = "kv.tile_load_rows"(%a, %exists, %at) : (memref<?x64xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x64xbf16>
    %s = "kv.dot"(%x, %x) {transpose_b = true} : (tensor<64x64xbf16>, tensor<64x64xbf16>) -> tensor<64x64xf32>
    %sum = arith.addf %t, %g : tensor<64xf32>
    %rows = "kv.tile_broadcast"(%sum) {dimension = 0 : i64} : (tensor<64xf32>) -> tensor<64x64xf32>
    %columns = "kv.tile_broadcast"(%sum) {dimension = 1 : i64} : (tensor<64xf32>) -> tensor<64x64xf32>
    %distance = arith.subf %rows, %columns : tensor<64x64xf32>
    %seen = "kv.tile_broadcast"(%exists) {dimension = 1 : i64} : (tensor<64xi1>) -> tensor<64x64xi1>
    %y = arith.mulf %s, %distance : tensor<64x64xf32>
    %z = "kv.tile_mask"(%y, %seen) : (tensor<64x64xf32>, tensor<64x64xi1>) -> tensor<64x64xf32>
    "kv.tile_store_rows"(%z, %out, %exists, %at) : (tensor<64x64xf32>, memref<?x64xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

  // Products by mma.sync: B in shared memory, rows of a buffer that a product takes as A in registers, in which they may
  // change their sign; and A of more columns than warps hold, or of a cache, in shared memory.
  // CHECK-LABEL: gpu.func @mma
  // CHECK:         %[[Q:.*]] = "kv.tile_load_rows"({{.*}} -> tensor<64x128xbf16, "mma">
  // CHECK:         "kv.tile_load_rows"({{.*}} -> tensor<64x256xbf16, "shared">
  // CHECK:         %[[N:.*]] = arith.negf %[[Q]] : tensor<64x128xbf16, "mma">
  // CHECK:         %[[K:.*]] = "kv.tile_load"({{.*}} -> tensor<64x128xbf16, "shared">
  // CHECK:         "kv.dot"(%[[N]], %[[K]]) {{.*}} -> tensor<64x64xf32, "mma">
  // CHECK:         "kv.dot"(%[[K]], %[[K]], %{{.*}} -> tensor<64x64xf32, "mma">
  // CHECK:         "kv.dot"({{.*}}tensor<64x256xbf16, "shared">, tensor<64x256xbf16, "shared">, tensor<64x64xf32, "mma">) -> tensor<64x64xf32, "mma">
  // CHECK:         "kv.tile_reduce"({{.*}} -> tensor<64xf32, "rows(mma)">
  gpu.func @mma(%c: !cache, %wide: !kv.cache<"paged", bf16, 8 : i64, 256 : i64, false, 16 : i64, none, 1 : i64>, %i: i32, %query: memref<?x128xbf16>, %query2: memref<?x256xbf16>, %out: memref<?xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {instruction = "mma.sync"}} {
    %at = "kv.tile_index"() : () -> tensor<64xi32>
    %true = arith.constant dense<true> : tensor<64xi1>
    %q = "kv.tile_load_rows"(%query, %true, %at) : (memref<?x128xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x128xbf16>
    %q2 = "kv.tile_load_rows"(%query2, %true, %at) : (memref<?x256xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x256xbf16>
    %n = arith.negf %q : tensor<64x128xbf16>
    %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
    %k2 = "kv.tile_load"(%wide, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!kv.cache<"paged", bf16, 8 : i64, 256 : i64, false, 16 : i64, none, 1 : i64>, i32, i32, i32, i32, i32) -> tensor<64x256xbf16>
    %s = "kv.dot"(%n, %k) {transpose_b = true} : (tensor<64x128xbf16>, tensor<64x128xbf16>) -> tensor<64x64xf32>
    %t = "kv.dot"(%k, %k, %s) {transpose_b = true} : (tensor<64x128xbf16>, tensor<64x128xbf16>, tensor<64x64xf32>) -> tensor<64x64xf32>
    %u = "kv.dot"(%q2, %k2, %t) {transpose_b = true} : (tensor<64x256xbf16>, tensor<64x256xbf16>, tensor<64x64xf32>) -> tensor<64x64xf32>
    %m = "kv.tile_reduce"(%u) {kind = "max", axis = 1 : i64} : (tensor<64x64xf32>) -> tensor<64xf32>
    "kv.tile_scatter"(%m, %out, %true, %at) : (tensor<64xf32>, memref<?xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

  // Left alone: a kernel that is not marked as one over tiles.
  // CHECK-LABEL: gpu.func @plain
  // CHECK:         "kv.tile_index"() : () -> tensor<64xi32>
  gpu.func @plain() kernel {
    %at = "kv.tile_index"() : () -> tensor<64xi32>
    gpu.return
  }
}

// -----

!cache = !kv.cache<"paged", f32, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
gpu.module @kernels {
  // Products of f32 are mma.sync's, in parts of tf32.
  // CHECK-LABEL: gpu.func @f32
  // CHECK-SAME:    kv.schedule = {instruction = "mma.sync"}
  // CHECK:         "kv.dot"({{.*}} : (tensor<64x128xf32, "shared">, tensor<64x128xf32, "shared">) -> tensor<64x64xf32, "mma">
  gpu.func @f32(%c: !cache, %i: i32) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xf32>
    %s = "kv.dot"(%k, %k) {transpose_b = true} : (tensor<64x128xf32>, tensor<64x128xf32>) -> tensor<64x64xf32>
    gpu.return
  }
}

// -----

!cache = !kv.cache<"paged", f32, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
gpu.module @kernels {
  gpu.func @elements(%c: !cache, %i: i32) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {instruction = "wgmma"}} {
    %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xf32>
    // expected-error @below {{'kv.dot' op has no instruction on this target: operands must be bf16, f16 or f8E4M3FN, got f32}}
    %s = "kv.dot"(%k, %k) {transpose_b = true} : (tensor<64x128xf32>, tensor<64x128xf32>) -> tensor<64x64xf32>
    gpu.return
  }
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
gpu.module @kernels {
  gpu.func @rows(%c: !cache, %i: i32) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64, producer = true}} {
    %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<192x128xbf16>
    // expected-error @below {{'kv.dot' op has no instruction on this target: the tile must have 64 rows for each of the 2 consumer warpgroups, got 192}}
    %s = "kv.dot"(%k, %k) {transpose_b = true} : (tensor<192x128xbf16>, tensor<192x128xbf16>) -> tensor<192x192xf32>
    gpu.return
  }
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
gpu.module @kernels {
  gpu.func @few_rows(%c: !cache, %i: i32, %q: tensor<12x128xbf16>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
    // expected-error @below {{'kv.dot' op has no instruction on this target with swapped operands: the tile's rows must be a multiple of 8 up to 256, got 12}}
    %s = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<12x128xbf16>, tensor<64x128xbf16>) -> tensor<12x64xf32>
    gpu.return
  }
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
gpu.module @kernels {
  gpu.func @few_keys(%c: !cache, %i: i32, %q: tensor<16x128xbf16>) kernel attributes {kv.tiled, kv.block = array<i32: 256, 1, 1>} {
    %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xbf16>
    // expected-error @below {{'kv.dot' op has no instruction on this target with swapped operands: the tile must have 16 columns for each of the 8 warps, time after time, got 64}}
    %s = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<16x128xbf16>, tensor<64x128xbf16>) -> tensor<16x64xf32>
    gpu.return
  }
}

// -----

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
gpu.module @kernels {
  gpu.func @extents(%c: !cache, %i: i32) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x40xbf16>
    // expected-error @below {{'kv.dot' op has no instruction on this target: K must be a multiple of 16 and N one of 8 up to 256, got 40 and 64}}
    %s = "kv.dot"(%k, %k) {transpose_b = true} : (tensor<64x40xbf16>, tensor<64x40xbf16>) -> tensor<64x64xf32>
    gpu.return
  }
}

// -----

// Products of 8-bit elements read keys as they are stored and values with tokens as columns; weights are converted.
!cache = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
gpu.module @kernels {
  // CHECK-LABEL: gpu.func @narrow
  // CHECK:         "kv.tile_load"({{.*}} -> tensor<64x128xf8E4M3FN, "shared">
  // CHECK:         "kv.tile_load"({{.*}} -> tensor<64x128xf8E4M3FN, "shared(transposed)">
  // CHECK:         "kv.cast"({{.*}} : (tensor<64x64xf32, "wgmma">) -> tensor<64x64xf8E4M3FN, "wgmma">
  // CHECK:         "kv.dot"({{.*}} : (tensor<64x64xf8E4M3FN, "wgmma">, tensor<64x128xf8E4M3FN, "shared(transposed)">) -> tensor<64x128xf32, "wgmma">
  gpu.func @narrow(%c: !cache, %i: i32, %query: memref<?x128xf8E4M3FN>, %every: tensor<64xi1>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %at = "kv.tile_index"() : () -> tensor<64xi32>
    %true = arith.constant dense<true> : tensor<64xi1>
    %q = "kv.tile_load_rows"(%query, %true, %at) : (memref<?x128xf8E4M3FN>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x128xf8E4M3FN>
    %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xf8E4M3FN>
    %v = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "zero"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x128xf8E4M3FN>
    %s = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<64x128xf8E4M3FN>, tensor<64x128xf8E4M3FN>) -> tensor<64x64xf32>
    %p = "kv.cast"(%s) : (tensor<64x64xf32>) -> tensor<64x64xf8E4M3FN>
    %o = "kv.dot"(%p, %v) {transpose_b = false} : (tensor<64x64xf8E4M3FN>, tensor<64x128xf8E4M3FN>) -> tensor<64x128xf32>
    gpu.return
  }
}

// -----

!cache = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
gpu.module @kernels {
  gpu.func @both_ways_of_one(%c: !cache, %i: i32) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x64xf8E4M3FN>
    %s = "kv.dot"(%k, %k) {transpose_b = true} : (tensor<64x64xf8E4M3FN>, tensor<64x64xf8E4M3FN>) -> tensor<64x64xf32>
    // expected-error @below {{'kv.dot' op reads a tile of 8-bit elements along its rows and along its columns: load it once for each}}
    %t = "kv.dot"(%k, %k) {transpose_b = false} : (tensor<64x64xf8E4M3FN>, tensor<64x64xf8E4M3FN>) -> tensor<64x64xf32>
    gpu.return
  }
}

// -----

gpu.module @kernels {
  // Rows that arithmetic reads come back from shared memory; a computed second operand goes there, and a transposed first
  // operand is read there by columns.
  // CHECK-LABEL: gpu.func @computed
  // CHECK:         %[[K:.*]] = "kv.tile_load_rows"({{.*}} -> tensor<64x64xbf16, "shared">
  // CHECK:         %[[R:.*]] = "kv.tile_unshare"(%[[K]]) : (tensor<64x64xbf16, "shared">) -> tensor<64x64xbf16, "wgmma">
  // CHECK:         %[[E:.*]] = arith.extf %[[R]]
  // CHECK:         %[[P:.*]] = arith.truncf
  // CHECK:         %[[B:.*]] = "kv.tile_share"(%[[P]]) : (tensor<64x64xbf16, "wgmma">) -> tensor<64x64xbf16, "shared">
  // CHECK:         "kv.dot"(%[[K]], %[[B]]) {{.*}} -> tensor<64x64xf32, "wgmma">
  // CHECK:         %[[T:.*]] = "kv.tile_transpose"(%[[B]]) : (tensor<64x64xbf16, "shared">) -> tensor<64x64xbf16, "shared(transposed)">
  // CHECK:         "kv.dot"(%[[T]], %[[K]]) {{.*}} -> tensor<64x64xf32, "wgmma">
  gpu.func @computed(%keys: memref<?x64xbf16>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %at = "kv.tile_index"() : () -> tensor<64xi32>
    %true = arith.constant dense<true> : tensor<64xi1>
    %k = "kv.tile_load_rows"(%keys, %true, %at) : (memref<?x64xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x64xbf16>
    %e = arith.extf %k : tensor<64x64xbf16> to tensor<64x64xf32>
    %d = arith.addf %e, %e : tensor<64x64xf32>
    %p = arith.truncf %d : tensor<64x64xf32> to tensor<64x64xbf16>
    %s = "kv.dot"(%k, %p) {transpose_b = true} : (tensor<64x64xbf16>, tensor<64x64xbf16>) -> tensor<64x64xf32>
    %t = "kv.tile_transpose"(%p) : (tensor<64x64xbf16>) -> tensor<64x64xbf16>
    %o = "kv.dot"(%t, %k) {transpose_b = false} : (tensor<64x64xbf16>, tensor<64x64xbf16>) -> tensor<64x64xf32>
    gpu.return
  }
}

// -----

gpu.module @kernels {
  gpu.func @computed_bytes(%a: tensor<64x64xf8E4M3FN>, %p: tensor<64x64xf8E4M3FN>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    // expected-error @below {{'kv.dot' op takes a second operand computed by arithmetic, which must be one of bf16, f16, f32, i8, got f8E4M3FN: convert it, as in kv.bf16(x)}}
    %s = "kv.dot"(%a, %p) {transpose_b = true} : (tensor<64x64xf8E4M3FN>, tensor<64x64xf8E4M3FN>) -> tensor<64x64xf32>
    gpu.return
  }
}

// -----

gpu.module @kernels {
  // Vectors of rows that are columns too are converted where they are not cheap to compute: reductions and running sums.
  // CHECK-LABEL: gpu.func @converted
  // CHECK:         %[[M:.*]] = "kv.tile_reduce"({{.*}} -> tensor<64xf32, "rows(wgmma)">
  // CHECK:         %[[C:.*]] = "kv.convert_layout"(%[[M]]) : (tensor<64xf32, "rows(wgmma)">) -> tensor<64xf32, "columns(wgmma:4)">
  // CHECK:         %[[S:.*]] = "kv.tile_scan"(%[[M]])
  // CHECK-SAME:      -> tensor<64xf32, "rows(wgmma)">
  // CHECK:         %[[D:.*]] = "kv.convert_layout"(%[[S]]) : (tensor<64xf32, "rows(wgmma)">) -> tensor<64xf32, "columns(wgmma:4)">
  // CHECK:         "kv.tile_broadcast"(%[[C]]) {dimension = 1 : i64}
  // CHECK:         "kv.tile_broadcast"(%[[S]]) {dimension = 0 : i64}
  // CHECK:         "kv.tile_broadcast"(%[[D]]) {dimension = 1 : i64}
  gpu.func @converted(%x: tensor<64x64xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %m = "kv.tile_reduce"(%x) {kind = "max", axis = 1 : i64} : (tensor<64x64xf32>) -> tensor<64xf32>
    %s = "kv.tile_scan"(%m) {kind = "add", axis = 0 : i64} : (tensor<64xf32>) -> tensor<64xf32>
    %y = "kv.tile_broadcast"(%m) {dimension = 1 : i64} : (tensor<64xf32>) -> tensor<64x64xf32>
    %r = "kv.tile_broadcast"(%s) {dimension = 0 : i64} : (tensor<64xf32>) -> tensor<64x64xf32>
    %c = "kv.tile_broadcast"(%s) {dimension = 1 : i64} : (tensor<64xf32>) -> tensor<64x64xf32>
    gpu.return
  }
}

// -----

gpu.module @kernels {
  gpu.func @both_ways(%x: tensor<64x64xf16>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %m = "kv.tile_reduce"(%x) {kind = "max", axis = 1 : i64} : (tensor<64x64xf16>) -> tensor<64xf16>
    // expected-error @below {{'kv.tile_broadcast' op combines a vector along rows with one along columns: compute it once for each dimension}}
    %y = "kv.tile_broadcast"(%m) {dimension = 1 : i64} : (tensor<64xf16>) -> tensor<64x64xf16>
    gpu.return
  }
}

// -----

gpu.module @kernels {
  gpu.func @extents_of_no_warps(%x: f32) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    // expected-error @below {{'tensor.splat' op makes a tile of 32 x 64 that the kernel's warps cannot share: rows must be a positive multiple of the 64 that the threads cover at a time, got 32}}
    %t = tensor.splat %x : tensor<32x64xf32>
    gpu.return
  }
}

// -----

gpu.module @kernels {
  // expected-error @below {{instruction must be one of wgmma, mma.sync, got 'fma'}}
  gpu.func @unknown() kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {instruction = "fma"}} {
    gpu.return
  }
}

// -----

!cache = !kv.cache<"paged", f8E5M2, 8 : i64, 80 : i64, false, 16 : i64, none, 1 : i64>
gpu.module @kernels {
  // Rows of a query become two terms where they lie, with a number a row; keys of 8 bits are what is multiplied.
  // CHECK-LABEL: gpu.func @terms
  // CHECK:         "kv.tile_load_rows"({{.*}} -> tensor<64x80xbf16, "shared">
  // CHECK:         "kv.tile_terms"({{.*}} -> (tensor<64x192xf8E4M3FN, "shared">, tensor<64xf32, "rows(wgmma)">)
  // CHECK:         "kv.dot"({{.*}} : (tensor<64x192xf8E4M3FN, "shared">, tensor<64x96xf8E5M2, "shared">) -> tensor<64x64xf32, "wgmma">
  gpu.func @terms(%c: !cache, %i: i32, %query: memref<?x80xbf16>, %out: memref<?x64xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %at = "kv.tile_index"() : () -> tensor<64xi32>
    %true = arith.constant dense<true> : tensor<64xi1>
    %q = "kv.tile_load_rows"(%query, %true, %at) : (memref<?x80xbf16>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x80xbf16>
    %t, %u = "kv.tile_terms"(%q) {operandSegmentSizes = array<i32: 1, 0>} : (tensor<64x80xbf16>) -> (tensor<64x192xf8E4M3FN>, tensor<64xf32>)
    %k = "kv.tile_load"(%c, %i, %i, %i, %i, %i) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>, tail = "any"} : (!cache, i32, i32, i32, i32, i32) -> tensor<64x96xf8E5M2>
    %s = "kv.dot"(%t, %k) {transpose_b = true} : (tensor<64x192xf8E4M3FN>, tensor<64x96xf8E5M2>) -> tensor<64x64xf32>
    %us = "kv.tile_broadcast"(%u) {dimension = 0 : i64} : (tensor<64xf32>) -> tensor<64x64xf32>
    %x = arith.mulf %s, %us : tensor<64x64xf32>
    "kv.tile_store_rows"(%x, %out, %true, %at) : (tensor<64x64xf32>, memref<?x64xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }
}

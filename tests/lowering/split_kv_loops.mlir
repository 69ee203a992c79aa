// RUN: kv-opt %s --split-kv-loops --canonicalize | FileCheck %s
// RUN: kv-opt %s --split-kv-loops='skip=false' --canonicalize | FileCheck %s --check-prefix=UNMASK
// RUN: kv-opt %s --split-kv-loops='unmask=false' --canonicalize | FileCheck %s --check-prefix=SKIP
// RUN: sed -e '/@causal(/,/gpu.return/ s/cmpi sle/cmpi eq/' %s | kv-opt --split-kv-loops --canonicalize | FileCheck %s --check-prefix=ALONE
// RUN: sed -e '/@causal(/,/gpu.return/ s/cmpi sle/cmpi ule/' %s | kv-opt --split-kv-loops --canonicalize | FileCheck %s --check-prefix=ALONE
// RUN: sed -e '/@causal(/,/gpu.return/ s/kv.tiled, //' %s | kv-opt --split-kv-loops --canonicalize | FileCheck %s --check-prefix=ALONE
// RUN: sed -e '/@causal(/,/gpu.return/ s/arith.cmpi sle.*/arith.cmpf ogt, %x, %o : !tile/' %s | kv-opt --split-kv-loops --canonicalize | FileCheck %s --check-prefix=ALONE
// RUN: sed -e '/@causal(/,/gpu.return/ s/%m =/%minus = arith.constant dense<-2> : tensor<64x32xi32> %half = arith.floordivsi %qs, %minus : tensor<64x32xi32> &/' -e '/@causal(/,/gpu.return/ s/%qs : tensor<64x32xi32>$/%half : tensor<64x32xi32>/' %s | kv-opt --split-kv-loops --canonicalize | FileCheck %s --check-prefix=ALONE
// RUN: sed -e '/@causal(/,/gpu.return/ s/%out: memref/%list: memref<?xi32>, &/' -e '/@causal(/,/gpu.return/ s/%qs =/%found = "kv.tile_gather"(%list, %every, %q) : (memref<?xi32>, tensor<64xi1>, tensor<64xi32>) -> tensor<64xi32> &/' -e '/@causal(/,/gpu.return/ s/broadcast"(%q)/broadcast"(%found)/' %s | kv-opt --split-kv-loops --canonicalize | FileCheck %s --check-prefix=ALONE
// RUN: sed -e '/@causal(/,/return/ s/%r =/%c2 = arith.constant 2 : i32 &/' -e '/@causal(/,/return/ s/step %c1/step %c2/' %s | kv-opt --split-kv-loops --canonicalize | FileCheck %s --check-prefix=EVEN
// RUN: sed -e '/@causal(/,/return/ s/%m = .*/%a = arith.cmpi sle, %ks, %qs : tensor<64x32xi32> \
// RUN:     %window = arith.constant dense<100> : tensor<64x32xi32> \
// RUN:     %from = arith.subi %qs, %window : tensor<64x32xi32> \
// RUN:     %b = arith.cmpi sgt, %ks, %from : tensor<64x32xi32> \
// RUN:     %m = arith.andi %a, %b : tensor<64x32xi1>/' %s \
// RUN:   | kv-opt --split-kv-loops --canonicalize | FileCheck %s --check-prefix=WINDOW
// RUN: sed -e '/@causal(/,/return/ s/%m = .*/%chunk = arith.constant dense<48> : tensor<64x32xi32> \
// RUN:     %number = arith.floordivsi %qs, %chunk : tensor<64x32xi32> \
// RUN:     %from = arith.muli %number, %chunk : tensor<64x32xi32> \
// RUN:     %m = arith.cmpi sge, %ks, %from : tensor<64x32xi32>/' %s \
// RUN:   | kv-opt --split-kv-loops --canonicalize | FileCheck %s --check-prefix=CHUNKS
// RUN: sed -e '/@causal(/,/return/ s/%m = .*/%a = arith.cmpi sle, %ks, %qs : tensor<64x32xi32> \
// RUN:     %b = arith.cmpi sgt, %ks, %qs : tensor<64x32xi32> \
// RUN:     %m = arith.ori %a, %b : tensor<64x32xi1>/' %s \
// RUN:   | kv-opt --split-kv-loops --canonicalize | FileCheck %s --check-prefix=EITHER
// RUN: sed -e '/@causal(/,/return/ s/%m = .*/%distance = arith.subi %qs, %ks : tensor<64x32xi32> \
// RUN:     %window = arith.constant dense<2147483647> : tensor<64x32xi32> \
// RUN:     %m = arith.cmpi slt, %distance, %window : tensor<64x32xi32>/' %s \
// RUN:   | kv-opt --split-kv-loops --canonicalize | FileCheck %s --check-prefix=LARGEST
// RUN: sed -e '/@causal(/,/return/ s/%at: tensor/%asked: i1, &/' \
// RUN:   -e '/@causal(/,/return/ s/%y = .*/%y = scf.if %asked -> (!tile) { \
// RUN:     %masked = "kv.tile_mask"(%x, %m) : (!tile, tensor<64x32xi1>) -> !tile \
// RUN:     scf.yield %masked : !tile \
// RUN:     } else { scf.yield %x : !tile }/' %s \
// RUN:   | kv-opt --split-kv-loops --canonicalize | FileCheck %s --check-prefix=BRANCH
// RUN: sed -e '/@causal(/,/return/ s/%m = .*/%count = tensor.splat %first : tensor<32xi32> \
// RUN:     %exists = arith.cmpi slt, %k, %count : tensor<32xi32> \
// RUN:     %m = "kv.tile_broadcast"(%exists) {dimension = 1 : i64} : (tensor<32xi1>) -> tensor<64x32xi1>/' %s \
// RUN:   | kv-opt --split-kv-loops --canonicalize | FileCheck %s --check-prefix=EXIST
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=split-kv-loops --check-semantics-of=split-kv-loops --lengths=edges -o /dev/null %}
// RUN: sed 's/"causal"/"null"/' %S/Inputs/attention.mlir | kv-opt - --kv-pipeline --target=sm_90a --stop-after=split-kv-loops --check-semantics-of=split-kv-loops --lengths=edges -o /dev/null

!tile = tensor<64x32xf32>

gpu.module @kernels {
  // Causal, 64 rows from %first on: the last key that any of them sees is %first + 63. A tile whose last key is at most
  // %first is seen whole.
  // CHECK-LABEL: gpu.func @causal(
  // CHECK-SAME:    %[[FIRST:[a-z0-9]+]]: i32, %[[N:[a-z0-9]+]]: i32, %[[X:[a-z0-9]+]]: tensor<64x32xf32>, %
  // CHECK:         %[[LAST:.*]] = arith.addi %[[FIRST]], %c95_i32
  // CHECK:         %[[SOME:.*]] = arith.maxsi %[[LAST]], %c0_i32
  // CHECK:         %[[TILES:.*]] = arith.divui %[[SOME]], %c32_i32
  // CHECK:         %[[END:.*]] = arith.minsi %[[N]], %[[TILES]]
  // CHECK:         scf.for %[[J:.*]] = %c0_i32 to %[[END]] step %c1_i32
  // CHECK:           %[[KEYS:.*]] = arith.muli %[[J]], %c-32_i32
  // CHECK:           %[[REST:.*]] = arith.addi %[[KEYS]], %
  // CHECK:           %[[WHOLE:.*]] = arith.cmpi sge, %[[REST]], %c0_i32
  // CHECK:           scf.if %[[WHOLE]] -> (tensor<64x32xf32>) {
  // CHECK-NEXT:        scf.yield %[[X]] : tensor<64x32xf32>
  // CHECK-NEXT:      } else {
  // CHECK:             "kv.tile_index"
  // CHECK:             arith.cmpi sle, %{{.*}} : tensor<64x32xi32>
  // CHECK:             "kv.tile_mask"(%[[X]]
  // CHECK-NOT:       kv.tile_index
  // CHECK:         gpu.return
  // UNMASK-LABEL: gpu.func @causal(
  // UNMASK-SAME:    i32, %[[N:[a-z0-9]+]]: i32,
  // UNMASK:         scf.for %{{.*}} = %c0_i32 to %[[N]] step
  // UNMASK:           scf.if
  // SKIP-LABEL:   gpu.func @causal(
  // SKIP:           %[[END:.*]] = arith.minsi
  // SKIP:           scf.for %{{.*}} = %c0_i32 to %[[END]] step
  // SKIP-NOT:       scf.if
  // SKIP:           "kv.tile_mask"
  // Left alone: equality, which bounds nothing here; unsigned comparisons, of positions that may be negative; a kernel that
  // is not marked as one over tiles; a mask that depends on the scores; a quotient by a negative number, which turns the
  // order round; positions that come from memory, as a user's mask may have them.
  // ALONE-LABEL: gpu.func @causal(
  // ALONE-SAME:    i32, %[[N:[a-z0-9]+]]: i32,
  // ALONE:         scf.for %{{.*}} = %c0_i32 to %[[N]] step
  // ALONE-NOT:       scf.if
  // ALONE:           "kv.tile_mask"
  // A loop of another step keeps its range.
  // EVEN-LABEL: gpu.func @causal(
  // EVEN-SAME:    i32, %[[N:[a-z0-9]+]]: i32,
  // EVEN:         scf.for %{{.*}} = %c0_i32 to %[[N]] step %c2_i32
  // EVEN:           scf.if
  // A sliding window: the first key that any row sees bounds the loop from below, the last from above; a tile is seen
  // whole where both comparisons hold for all of it.
  // WINDOW-LABEL: gpu.func @causal(
  // WINDOW:         %[[HIGH:.*]] = arith.minsi %{{.*}}, %{{.*}} : i32
  // WINDOW:         arith.maxsi
  // WINDOW:         arith.divui
  // WINDOW:         %[[LOW:.*]] = arith.maxsi %{{.*}}, %c0_i32
  // WINDOW:         scf.for %{{.*}} = %[[LOW]] to %[[HIGH]] step
  // WINDOW:           %[[A:.*]] = arith.cmpi sge
  // WINDOW:           %[[B:.*]] = arith.cmpi sge
  // WINDOW:           %[[BOTH:.*]] = arith.andi %[[A]], %[[B]] : i1
  // WINDOW:           scf.if %[[BOTH]]
  // Chunks: a quotient by a positive number keeps order, so both its bounds are known.
  // CHUNKS-LABEL: gpu.func @causal(
  // CHUNKS:         arith.floordivsi
  // CHUNKS:         arith.floordivsi
  // CHUNKS:         arith.maxsi
  // CHUNKS:         scf.for
  // CHUNKS:           scf.if
  // A mask that holds where either of two comparisons does: every tile is visited, and seen whole where one of them
  // holds for all of it.
  // EITHER-LABEL: gpu.func @causal(
  // EITHER:         scf.for
  // EITHER:           %[[A:.*]] = arith.cmpi sge
  // EITHER:           %[[B:.*]] = arith.cmpi sge
  // EITHER:           %[[ANY:.*]] = arith.ori %[[A]], %[[B]] : i1
  // EITHER:           scf.if %[[ANY]]
  // A window that stands for no bound: sums with its size are held to 32 bits, in which they would turn negative.
  // LARGEST-LABEL: gpu.func @causal(
  // LARGEST:         arith.extsi
  // LARGEST:         arith.minsi %{{.*}}, %c2147483647_i64
  // LARGEST:         arith.maxsi %{{.*}}, %c-2147483648_i64
  // LARGEST:         arith.trunci
  // LARGEST:         scf.for
  // LARGEST:           scf.if
  // A mask in a branch bounds no iterations: where the branch leaves it out, all of a tile is seen.
  // BRANCH-LABEL: gpu.func @causal(
  // BRANCH-SAME:    i32, %[[N:[a-z0-9]+]]: i32,
  // BRANCH:         scf.for %{{.*}} = %c0_i32 to %[[N]] step
  // BRANCH:           "kv.tile_mask"
  // The bound of a vector, broadcast after it was compared: of n keys the tiles before ceil(n / 32). A tile is whole
  // where its last key is less than n, n - 31 - 32 j >= 1.
  // EXIST-LABEL: gpu.func @causal(
  // EXIST-SAME:    %[[KEYS:[a-z0-9]+]]: i32, %[[N:[a-z0-9]+]]: i32,
  // EXIST:         %[[UP:.*]] = arith.addi %[[KEYS]], %c31_i32
  // EXIST:         %[[SOME:.*]] = arith.maxsi %[[UP]], %c0_i32
  // EXIST:         %[[TILES:.*]] = arith.divui %[[SOME]], %c32_i32
  // EXIST:         %[[END:.*]] = arith.minsi %[[N]], %[[TILES]]
  // EXIST:         scf.for %[[J:.*]] = %c0_i32 to %[[END]] step %c1_i32
  // EXIST-DAG:       %[[LAST:.*]] = arith.subi %[[KEYS]], %c31_i32
  // EXIST-DAG:       %[[BEGIN:.*]] = arith.muli %[[J]], %c-32_i32
  // EXIST:           %[[LEFT:.*]] = arith.addi %[[BEGIN]], %[[LAST]]
  // EXIST:           %[[WHOLE:.*]] = arith.cmpi sge, %[[LEFT]], %c1_i32
  // EXIST:           scf.if %[[WHOLE]]
  gpu.func @causal(%first: i32, %n: i32, %x: !tile, %init: !tile, %out: memref<?x32xf32>, %every: tensor<64xi1>, %at: tensor<64xi32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c32 = arith.constant 32 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %init) -> (!tile) : i32 {
      %base = arith.muli %j, %c32 : i32
      %kb = tensor.splat %base : tensor<32xi32>
      %ki = "kv.tile_index"() : () -> tensor<32xi32>
      %k = arith.addi %kb, %ki : tensor<32xi32>
      %ks = "kv.tile_broadcast"(%k) {dimension = 1 : i64} : (tensor<32xi32>) -> tensor<64x32xi32>
      %qb = tensor.splat %first : tensor<64xi32>
      %qi = "kv.tile_index"() : () -> tensor<64xi32>
      %q = arith.addi %qb, %qi : tensor<64xi32>
      %qs = "kv.tile_broadcast"(%q) {dimension = 0 : i64} : (tensor<64xi32>) -> tensor<64x32xi32>
      %m = arith.cmpi sle, %ks, %qs : tensor<64x32xi32>
      %y = "kv.tile_mask"(%x, %m) : (!tile, tensor<64x32xi1>) -> !tile
      %z = arith.addf %o, %y : !tile
      scf.yield %z : !tile
    }
    "kv.tile_store_rows"(%r, %out, %every, %at) : (!tile, memref<?x32xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

  // Left alone: a mask in no loop.
  // CHECK-LABEL: gpu.func @no_loop(
  // CHECK-NOT:     scf.if
  // CHECK:         "kv.tile_mask"
  gpu.func @no_loop(%x: !tile, %n: i32, %out: memref<?x32xf32>, %every: tensor<64xi1>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %i = "kv.tile_index"() : () -> tensor<64xi32>
    %limit = tensor.splat %n : tensor<64xi32>
    %rows = arith.cmpi slt, %i, %limit : tensor<64xi32>
    %m = "kv.tile_broadcast"(%rows) {dimension = 0 : i64} : (tensor<64xi1>) -> tensor<64x32xi1>
    %y = "kv.tile_mask"(%x, %m) : (!tile, tensor<64x32xi1>) -> !tile
    "kv.tile_store_rows"(%y, %out, %every, %i) : (!tile, memref<?x32xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

  // Left alone: a loop over indices, which positions are not.
  // CHECK-LABEL: gpu.func @index_loop(
  // CHECK:         scf.for %{{.*}} = %c0 to %{{.*}} step %c1
  // CHECK-NOT:       scf.if
  // CHECK:           "kv.tile_mask"
  gpu.func @index_loop(%n: index, %x: !tile, %init: !tile, %out: memref<?x32xf32>, %every: tensor<64xi1>, %rows: tensor<64xi32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>} {
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %init) -> (!tile) {
      %jj = arith.index_cast %j : index to i32
      %from = tensor.splat %jj : tensor<32xi32>
      %i = "kv.tile_index"() : () -> tensor<32xi32>
      %below = arith.cmpi sle, %from, %i : tensor<32xi32>
      %m = "kv.tile_broadcast"(%below) {dimension = 1 : i64} : (tensor<32xi1>) -> tensor<64x32xi1>
      %y = "kv.tile_mask"(%x, %m) : (!tile, tensor<64x32xi1>) -> !tile
      %z = arith.addf %o, %y : !tile
      scf.yield %z : !tile
    }
    "kv.tile_store_rows"(%r, %out, %every, %rows) : (!tile, memref<?x32xf32>, tensor<64xi1>, tensor<64xi32>) -> ()
    gpu.return
  }

}

// RUN: kv-opt %s --start-kv-work='reads=true' | FileCheck %s
// RUN: kv-opt %s --start-kv-work | FileCheck %s --check-prefix=DEFAULT
// RUN: kv-opt %s --start-kv-work='most=100' | FileCheck %s --check-prefix=NEITHER
// RUN: kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=simplify-kv-tiles | kv-opt - --start-kv-work=most=0 --target=sm_90a --check-semantics-of=start-kv-work --lengths=edges:64 -o /dev/null

!row = tensor<64xf32, "rows(wgmma)">
!places = tensor<64xi32, "rows(wgmma)">
!mask = tensor<64xi1, "rows(wgmma)">
!rows = tensor<64x64xbf16, "shared">
!terms = tensor<64x128xf8E4M3FN, "shared">
!keys = tensor<64x64xf8E4M3FN, "shared">
!tile = tensor<64x64xf32, "wgmma">

gpu.module @kernels {
  // What a list says is read beside the search, since it needs the number of the work item alone; the bias of far keys, which
  // needs what the search finds, behind that. Rows are waited for when all is under way, and what needs them stays.
  // CHECK-LABEL: gpu.func @reads
  // CHECK:         ^bb0(%[[ROUND:.*]]: i32, %[[USE:.*]]: i32):
  // CHECK:           %[[PLACE:.*]] = arith.index_cast %[[ROUND]]
  // CHECK-NEXT:      %[[COUNT:.*]] = memref.load %{{.*}}[%[[PLACE]]]
  // CHECK:           %[[FOUND:.*]] = scf.while
  // CHECK:           %[[AT:.*]] = tensor.splat %[[FOUND]]
  // CHECK-NEXT:      "kv.tile_gather"(%{{.*}}, %{{.*}}, %[[AT]])
  // CHECK:           %[[Q:.*]] = "kv.consumer_wait"
  // CHECK-NEXT:      arith.negf %[[Q]]
  // CHECK-NEXT:      scf.for {{.*}} to %[[COUNT]]
  //
  // By default kernels stay as they are that do not split their rows into terms.
  // DEFAULT-LABEL: gpu.func @reads
  // DEFAULT:         "kv.consumer_wait"
  // DEFAULT:         memref.load
  // DEFAULT:         "kv.tile_gather"
  gpu.func @reads(%counter: memref<?xi8>, %first: i32, %n: i32, %list: memref<?xi32>, %bias: memref<?xf32>, %every: !mask, %out: memref<?xf32>) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %queue = "kv.make_queue"(%counter) {readers = 8 : i64} : (memref<?xi8>) -> !kv.queue
    %queries = "kv.make_stages"() {buffer_name = "rows", copy = "cp_async", stages = 2 : i64, tile = !rows} : () -> !kv.stages
    %r:2 = scf.while (%t = %first, %use = %c0) : (i32, i32) -> (i32, i32) {
      %more = arith.cmpi slt, %t, %n : i32
      scf.condition(%more) %t, %use : i32, i32
    } do {
    ^bb0(%t: i32, %use: i32):
      %b = scf.while (%x = %t) : (i32) -> (i32) {
        %big = arith.cmpi sgt, %x, %c1 : i32
        scf.condition(%big) %x : i32
      } do {
      ^bb0(%x: i32):
        %half = arith.shrsi %x, %c1 : i32
        scf.yield %half : i32
      }
      %q = "kv.consumer_wait"(%queries, %use) : (!kv.stages, i32) -> !rows
      %minus = arith.negf %q : !rows
      %place = arith.index_cast %t : i32 to index
      %count = memref.load %list[%place] : memref<?xi32>
      %at = tensor.splat %b : !places
      %far = "kv.tile_gather"(%bias, %every, %at) : (memref<?xf32>, !mask, !places) -> !row
      scf.for %j = %c0 to %count step %c1 : i32 {
        %s = "kv.dot"(%minus, %minus) {transpose_b = true} : (!rows, !rows) -> !tile
        "kv.tile_scatter"(%far, %out, %every, %at) : (!row, memref<?xf32>, !mask, !places) -> ()
      }
      %next = "kv.queue_next"(%queue, %use) : (!kv.queue, i32) -> i32
      %later = arith.addi %use, %c1 : i32
      scf.yield %next, %later : i32, i32
    }
    gpu.return
  }

  // Of five numbers of arguments each part of an iteration computes those that it uses: before its loop over keys, in it, and
  // behind it, where two of them are asked for again. LLVM takes none for another.
  // CHECK-LABEL: gpu.func @numbers
  // CHECK:         ^bb0(%[[ROUND:.*]]: i32, %[[USE:.*]]: i32):
  // CHECK:           %[[DIM:.*]] = memref.dim %[[LIST:.*]], %c0
  // CHECK-NEXT:      %[[EXTENT:.*]] = arith.index_cast %[[DIM]]
  // CHECK-NEXT:      %[[HIDDEN:.*]] = llvm.inline_asm has_side_effects "mov.b32 $0, $1;", "=r,r" %[[EXTENT]]
  // CHECK-NEXT:      %[[LAST:.*]] = arith.subi %[[HIDDEN]], %c1
  // CHECK-NEXT:      arith.minsi %[[ROUND]], %[[LAST]]
  // CHECK:           "mov.b32 $0, $1;", "=f,f" %[[SCALE:.*]] : (f32)
  // CHECK:           arith.cmpf olt
  // CHECK:           "mov.b32 $0, $1;", "=r,r" %[[HEADS:.*]] : (i32)
  // CHECK:           "mov.b32 $0, $1;", "=r,r" %[[HEADS]] : (i32)
  // CHECK:           scf.for
  // CHECK:           %[[AGAIN:.*]] = llvm.inline_asm has_side_effects "mov.b32 $0, $1;", "=r,r"
  // CHECK-NEXT:      arith.subi %[[AGAIN]], %c1
  // CHECK:           "kv.queue_next"
  //
  // NEITHER-LABEL: gpu.func @numbers
  // NEITHER-NOT:     llvm.inline_asm
  // NEITHER:         gpu.return
  gpu.func @numbers(%counter: memref<?xi8>, %first: i32, %n: i32, %list: memref<?xi32>, %scale: f32, %heads: i32, %out: memref<?xi32>) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c2 = arith.constant 2 : i32
    %c3 = arith.constant 3 : i32
    %i0 = arith.constant 0 : index
    %zero = arith.constant 0.0 : f32
    %dim = memref.dim %list, %i0 : memref<?xi32>
    %extent = arith.index_cast %dim : index to i32
    %last = arith.subi %extent, %c1 : i32
    %negative = arith.cmpf olt, %scale, %zero : f32
    %a = arith.subi %heads, %c1 : i32
    %b = arith.subi %heads, %c2 : i32
    %c = arith.subi %heads, %c3 : i32
    %queue = "kv.make_queue"(%counter) {readers = 8 : i64} : (memref<?xi8>) -> !kv.queue
    %r:2 = scf.while (%t = %first, %use = %c0) : (i32, i32) -> (i32, i32) {
      %more = arith.cmpi slt, %t, %n : i32
      scf.condition(%more) %t, %use : i32, i32
    } do {
    ^bb0(%t: i32, %use: i32):
      %held = arith.minsi %t, %last : i32
      %sign = arith.select %negative, %a, %b : i32
      %sum = arith.addi %held, %sign : i32
      scf.for %j = %c0 to %sum step %c1 : i32 {
        %other = arith.minsi %j, %c : i32
        %at = arith.index_cast %other : i32 to index
        memref.store %j, %out[%at] : memref<?xi32>
      }
      %behind = arith.minsi %t, %last : i32
      %place = arith.index_cast %behind : i32 to index
      memref.store %behind, %out[%place] : memref<?xi32>
      %next = "kv.queue_next"(%queue, %use) : (!kv.queue, i32) -> i32
      %later = arith.addi %use, %c1 : i32
      scf.yield %next, %later : i32, i32
    }
    gpu.return
  }

  // Of split rows a work item that uses five numbers of arguments reads before it waits; one that uses few does not.
  // DEFAULT-LABEL: gpu.func @terms
  // DEFAULT:         ^bb0
  // DEFAULT:           memref.load
  // DEFAULT:           "kv.consumer_wait"
  // DEFAULT-NOT:       memref.load
  // DEFAULT:           "kv.queue_next"
  //
  // NEITHER-LABEL: gpu.func @terms
  // NEITHER:         ^bb0
  // NEITHER:           "kv.tile_terms"
  // NEITHER:           memref.load
  gpu.func @terms(%counter: memref<?xi8>, %first: i32, %n: i32, %list: memref<?xi32>, %keys: !keys, %heads: i32) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %a = arith.subi %n, %heads : i32
    %b = arith.addi %n, %heads : i32
    %c = arith.subi %n, %c1 : i32
    %d = arith.addi %n, %c1 : i32
    %e = arith.addi %heads, %c1 : i32
    %queue = "kv.make_queue"(%counter) {readers = 8 : i64} : (memref<?xi8>) -> !kv.queue
    %queries = "kv.make_stages"() {buffer_name = "rows", copy = "cp_async", stages = 2 : i64, tile = !rows} : () -> !kv.stages
    %r:2 = scf.while (%t = %first, %use = %c0) : (i32, i32) -> (i32, i32) {
      %more = arith.cmpi slt, %t, %n : i32
      scf.condition(%more) %t, %use : i32, i32
    } do {
    ^bb0(%t: i32, %use: i32):
      %ab = arith.minsi %a, %b : i32
      %cd = arith.minsi %c, %d : i32
      %abcd = arith.minsi %ab, %cd : i32
      %all = arith.minsi %abcd, %e : i32
      %q = "kv.consumer_wait"(%queries, %use) : (!kv.stages, i32) -> !rows
      %terms:2 = "kv.tile_terms"(%q) : (!rows) -> (!terms, !row)
      %place = arith.index_cast %t : i32 to index
      %count = memref.load %list[%place] : memref<?xi32>
      scf.for %j = %all to %count step %c1 : i32 {
        %s = "kv.dot"(%terms#0, %keys) {transpose_b = true} : (!terms, !keys) -> !tile
      }
      %next = "kv.queue_next"(%queue, %use) : (!kv.queue, i32) -> i32
      %later = arith.addi %use, %c1 : i32
      scf.yield %next, %later : i32, i32
    }
    gpu.return
  }

  // Loops whose items are no queue's stay as they are.
  // CHECK-LABEL: gpu.func @turns
  // CHECK-NOT:     llvm.inline_asm
  // CHECK:         gpu.return
  gpu.func @turns(%first: i32, %n: i32, %heads: i32, %out: memref<?xi32>) kernel attributes {kv.tiled} {
    %c1 = arith.constant 1 : i32
    %c2 = arith.constant 2 : i32
    %a = arith.subi %heads, %c1 : i32
    scf.for %t = %first to %n step %c2 : i32 {
      %at = arith.minsi %t, %a : i32
      %place = arith.index_cast %at : i32 to index
      memref.store %t, %out[%place] : memref<?xi32>
    }
    gpu.return
  }
}

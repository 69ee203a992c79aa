// RUN: kv-opt %s --split-input-file --verify-diagnostics --distribute-kv-tiles | FileCheck %s
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=distribute-kv-tiles --check-semantics-of=distribute-kv-tiles --lengths=edges -o /dev/null %}
// RUN: %if alone %{ kv-opt %{kernels}/observed.mlir --kv-pipeline --target=sm_90a --stop-after=distribute-kv-tiles --check-semantics-of=distribute-kv-tiles --grid=3 --arg=query=3x16x64 --arg=seen=3x256 --lengths=edges:64 --model=%S/Inputs/models.py:observed -o /dev/null %}
// RUN: kv-opt %{kernels}/observed.mlir --kv-pipeline --target=sm_80 --stop-after=distribute-kv-tiles --check-semantics-of=distribute-kv-tiles --grid=3 --arg=query=3x16x64 --arg=seen=3x256 --lengths=edges:64 --model=%S/Inputs/models.py:observed -o /dev/null

!tile = tensor<64x64xf32, "wgmma">
!cache = !kv.cache<"paged", bf16, 8 : i64, 32 : i64, false, 16 : i64, none, 1 : i64>
!wide = !kv.cache<"paged", bf16, 8 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 64>, 128 : i64>
!row = tensor<64xf32, "rows(wgmma)">

gpu.module @kernels {
  // Rows of f32 go from registers to memory: of each of a thread's two rows pairs of neighbours, where its mask holds.
  // CHECK-LABEL: gpu.func @rows_of_f32
  // CHECK:         %[[FIRST:.*]] = arith.cmpi slt
  // CHECK:         %[[SECOND:.*]] = arith.cmpi slt
  // CHECK:         scf.if %[[FIRST]] {
  // CHECK-COUNT-8:   vector.store {{.*}} : memref<?x64xf32>, vector<2xf32>
  // CHECK-NOT:       vector.store
  // CHECK:         scf.if %[[SECOND]] {
  // CHECK-COUNT-8:   vector.store {{.*}} : memref<?x64xf32>, vector<2xf32>
  // CHECK-NOT:       vector.store
  // CHECK:         gpu.return
  gpu.func @rows_of_f32(%n: i32, %out: memref<?x64xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %at = "kv.tile_index"() : () -> tensor<64xi32, "rows(wgmma)">
    %limit = tensor.splat %n : tensor<64xi32, "rows(wgmma)">
    %exists = arith.cmpi slt, %at, %limit : tensor<64xi32, "rows(wgmma)">
    %x = arith.constant dense<2.0> : !tile
    "kv.tile_store_rows"(%x, %out, %exists, %at) : (!tile, memref<?x64xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // Warps beside one another: a fold of rows goes through shared memory, which all wait for, and of the two numbers of a
  // row each takes both. A tile that is shared is written to shared memory by all, 16 columns of every 32 a warp. Each
  // waits for the other's memory to have been read, and where both stand in a loop that is what the other waits for.
  // CHECK-LABEL: gpu.func @beside
  // CHECK-DAG:     %[[FOLDED:.*]] = "kv.alloc_shared"() {alignment = 8 : i64, bytes = 512 : i64}
  // CHECK-DAG:     %[[SHARED:.*]] = "kv.alloc_shared"() {alignment = 1024 : i64, bytes = 8192 : i64}
  // CHECK:         scf.for
  // CHECK-NOT:       nvvm.barrier
  // CHECK:           gpu.shuffle  xor
  // CHECK:           llvm.store
  // CHECK:           nvvm.barrier
  // CHECK:           llvm.load {{.*}} -> vector<2xf32>
  // CHECK:           arith.maxnumf
  // CHECK-COUNT-4:   llvm.store {{.*}} : i32, !llvm.ptr<3>
  // CHECK:           nvvm.barrier
  // CHECK-NOT:       nvvm.barrier
  // CHECK:         gpu.return
  gpu.func @beside(%n: i32, %scale: f32) kernel attributes {kv.tiled, kv.block = array<i32: 256, 1, 1>, kv.schedule = {instruction = "mma.sync", consumers = 2 : i64, across = 2 : i64}} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    scf.for %i = %c0 to %n step %c1 : i32 {
      %x = tensor.splat %scale : tensor<64x32xf32, "mma:4x2">
      %m = "kv.tile_reduce"(%x) {kind = "max", axis = 1 : i64} : (tensor<64x32xf32, "mma:4x2">) -> tensor<64xf32, "rows(mma:4x2)">
      %ms = "kv.tile_broadcast"(%m) {dimension = 0 : i64} : (tensor<64xf32, "rows(mma:4x2)">) -> tensor<64x32xf32, "mma:4x2">
      %p = arith.truncf %ms : tensor<64x32xf32, "mma:4x2"> to tensor<64x32xbf16, "mma:4x2">
      %a = "kv.tile_share"(%p) : (tensor<64x32xbf16, "mma:4x2">) -> tensor<64x32xbf16, "shared">
    }
    gpu.return
  }

  // Arithmetic keeps its ops, on what a thread holds: 32 elements of an accumulator, 2 of a vector of rows. Positions are
  // constants plus where the thread stands; a broadcast takes registers of the vector; rows are folded in registers,
  // then over the four lanes that have the others of a row; the mark of a kernel over tiles goes.
  // CHECK-LABEL: gpu.func @arithmetic
  // CHECK-SAME:    passthrough = {{\[\[}}"denormal-fp-math-f32", "preserve-sign,preserve-sign"{{\]\]}}
  // CHECK-NOT:     kv.tiled
  // CHECK:         %[[OFFSETS:.*]] = arith.constant dense<[0, 8]> : vector<2xi32>
  // CHECK:         %[[ROWS:.*]] = arith.addi %{{.*}}, %[[OFFSETS]] : vector<2xi32>
  // CHECK:         arith.cmpi slt, %[[ROWS]], %{{.*}} : vector<2xi32>
  // CHECK:         %[[Y:.*]] = arith.mulf %{{.*}}, %{{.*}} : vector<32xf32>
  // CHECK:         vector.shuffle %[[Y]], %[[Y]] [0, 1, 4, 5, 8, 9,
  // CHECK:         arith.maxnumf %{{.*}}, %{{.*}} : vector<8xf32>
  // CHECK:         %[[LANES:.*]], %{{.*}} = gpu.shuffle  xor
  // CHECK:         arith.maxnumf
  // CHECK:         gpu.shuffle  xor
  // CHECK:         %[[M:.*]] = vector.from_elements %{{.*}}, %{{.*}} : vector<2xf32>
  // CHECK:         vector.shuffle %[[M]], %[[M]] [0, 0, 1, 1, 0, 0, 1, 1,
  // CHECK-NOT:     tensor<
  // CHECK:         gpu.return
  gpu.func @arithmetic(%n: i32, %scale: f32, %out: memref<?xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %at = "kv.tile_index"() : () -> tensor<64xi32, "rows(wgmma)">
    %limit = tensor.splat %n : tensor<64xi32, "rows(wgmma)">
    %exists = arith.cmpi slt, %at, %limit : tensor<64xi32, "rows(wgmma)">
    %x = arith.constant dense<2.0> : !tile
    %f = tensor.splat %scale : !tile
    %y = arith.mulf %x, %f : !tile
    %m = "kv.tile_reduce"(%y) {kind = "max", axis = 1 : i64} : (!tile) -> !row
    %ms = "kv.tile_broadcast"(%m) {dimension = 0 : i64} : (!row) -> !tile
    %z = arith.subf %y, %ms : !tile
    %l = "kv.tile_reduce"(%z) {kind = "add", axis = 1 : i64} : (!tile) -> !row
    "kv.tile_scatter"(%l, %out, %exists, %at) : (!row, memref<?xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // A partial reduction stops at the thread's own registers, and is folded over lanes where that is asked for.
  // CHECK-LABEL: gpu.func @partial
  // CHECK:         vector.from_elements
  // CHECK:         scf.for
  // CHECK-NOT:       gpu.shuffle
  // CHECK:           scf.yield
  // CHECK:         gpu.shuffle  xor
  gpu.func @partial(%n: i32, %out: memref<?xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %true = arith.constant dense<true> : tensor<64xi1, "rows(wgmma)">
    %at = "kv.tile_index"() : () -> tensor<64xi32, "rows(wgmma)">
    %x = arith.constant dense<2.0> : !tile
    %first = "kv.tile_reduce"(%x) {kind = "add", axis = 1 : i64, kv.partial} : (!tile) -> !row
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%l = %first) -> (!row) : i32 {
      %s = "kv.tile_reduce"(%x) {kind = "add", axis = 1 : i64, kv.partial} : (!tile) -> !row
      %l2 = arith.addf %l, %s : !row
      scf.yield %l2 : !row
    }
    %whole = "kv.tile_reduce_lanes"(%r) {kind = "add"} : (!row) -> !row
    "kv.tile_scatter"(%whole, %out, %true, %at) : (!row, memref<?xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // A cast of what one thread has is no cast of a tile.
  // CHECK-LABEL: gpu.func @cast_of_a_vector
  // CHECK:         "kv.cast"(%{{.*}}) : (vector<8xf32>) -> vector<8xf8E4M3FN>
  gpu.func @cast_of_a_vector(%x: vector<8xf32>, %out: !llvm.ptr<1>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %y = "kv.cast"(%x) : (vector<8xf32>) -> vector<8xf8E4M3FN>
    llvm.store %x, %out : vector<8xf32>, !llvm.ptr<1>
    gpu.return
  }

  // Columns are folded in registers, over the eight lanes and over the four warps that have other rows of them. Each
  // shuffle leaves a lane half of its columns: 8, 4 and 2 of 16 go. Two are stored, and every thread takes those it has.
  // CHECK-LABEL: gpu.func @columns
  // CHECK:         %[[FOLDED:.*]] = "kv.alloc_shared"() {alignment = 16 : i64, bytes = 1024 : i64}
  // CHECK-COUNT-14: gpu.shuffle  xor
  // CHECK-NOT:     gpu.shuffle
  // CHECK:         nvvm.barrier
  // CHECK-COUNT-2: llvm.store %{{.*}} : f32, !llvm.ptr<3>
  // CHECK-NOT:     llvm.store
  // CHECK:         nvvm.barrier
  // CHECK-COUNT-16: llvm.load %{{.*}} : !llvm.ptr<3> -> vector<4xf32>
  // CHECK-COUNT-16: memref.store
  // CHECK:         gpu.return
  gpu.func @columns(%scale: f32, %out: memref<?xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %every = arith.constant dense<true> : tensor<64xi1, "columns(wgmma:4)">
    %at = "kv.tile_index"() : () -> tensor<64xi32, "columns(wgmma:4)">
    %x = tensor.splat %scale : tensor<64x64xf32, "wgmma">
    %m = "kv.tile_reduce"(%x) {kind = "max", axis = 0 : i64} : (tensor<64x64xf32, "wgmma">) -> tensor<64xf32, "columns(wgmma:4)">
    "kv.tile_scatter"(%m, %out, %every, %at) : (tensor<64xf32, "columns(wgmma:4)">, memref<?xf32>, tensor<64xi1, "columns(wgmma:4)">, tensor<64xi32, "columns(wgmma:4)">) -> ()
    gpu.return
  }

  // Swapped operands: keys are the instruction's rows, the 8 rows its columns. The largest of a row is folded over lanes
  // and warps, the sum of a column over two lane bits alone. Weights go to shared memory with their rows as rows, for a
  // product that reads the keys' columns as its rows; the result by the same way to memory.
  // CHECK-LABEL: gpu.func @swapped
  // CHECK:         wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {$0, $1, $2, $3}, a, b, no, 1, 1, 0, 0;
  // CHECK:         arith.maxnumf
  // CHECK-COUNT-3: gpu.shuffle  xor
  // CHECK-NOT:     gpu.shuffle
  // CHECK:         nvvm.barrier
  // CHECK-COUNT-2: llvm.load %{{.*}} : !llvm.ptr<3> -> vector<4xf32>
  // CHECK:         arith.subf
  // CHECK-COUNT-4: gpu.shuffle  xor
  // CHECK-NOT:     nvvm.barrier
  // CHECK-COUNT-2: memref.store
  // CHECK:         stmatrix.sync.aligned.m8n8.x2.trans
  // CHECK-NEXT:    nvvm.fence.proxy
  // CHECK:         nvvm.barrier
  // CHECK:         wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {$0, $1, $2, $3}, a, b, no, 1, 1, 1, 0;
  // CHECK:         nvvm.barrier
  // CHECK:         stmatrix.sync.aligned.m8n8.x2.trans
  // CHECK:         nvvm.barrier
  // CHECK:         scf.for
  // CHECK:           vector.store {{.*}} : memref<?x64xbf16>, vector<8xbf16>
  gpu.func @swapped(%scale: f32, %n: i32, %query: memref<?x64xbf16>, %out: memref<?x64xbf16>, %sums: memref<?xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {instruction = "wgmma", consumers = 1 : i64, swapped = true}} {
    %c0 = arith.constant 0 : i32
    %stages = "kv.make_stages"() {buffer_name = "keys", copy = "convert", stages = 2 : i64, tile = tensor<64x64xbf16, "shared">} : () -> !kv.stages
    %every = arith.constant dense<true> : tensor<8xi1, "rows(transposed(wgmma:4))">
    %at = "kv.tile_index"() : () -> tensor<8xi32, "rows(transposed(wgmma:4))">
    %tokens = arith.constant dense<true> : tensor<64xi1, "columns(transposed(wgmma:4))">
    %token = "kv.tile_index"() : () -> tensor<64xi32, "columns(transposed(wgmma:4))">
    %q = "kv.tile_load_rows"(%query, %every, %at) : (memref<?x64xbf16>, tensor<8xi1, "rows(transposed(wgmma:4))">, tensor<8xi32, "rows(transposed(wgmma:4))">) -> tensor<8x64xbf16, "shared">
    %k = "kv.consumer_wait"(%stages, %c0) : (!kv.stages, i32) -> tensor<64x64xbf16, "shared">
    %s = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<8x64xbf16, "shared">, tensor<64x64xbf16, "shared">) -> tensor<8x64xf32, "transposed(wgmma:4)">
    %m = "kv.tile_reduce"(%s) {kind = "max", axis = 1 : i64} : (tensor<8x64xf32, "transposed(wgmma:4)">) -> tensor<8xf32, "rows(transposed(wgmma:4))">
    %ms = "kv.tile_broadcast"(%m) {dimension = 0 : i64} : (tensor<8xf32, "rows(transposed(wgmma:4))">) -> tensor<8x64xf32, "transposed(wgmma:4)">
    %y = arith.subf %s, %ms : tensor<8x64xf32, "transposed(wgmma:4)">
    %t = "kv.tile_reduce"(%y) {kind = "add", axis = 0 : i64} : (tensor<8x64xf32, "transposed(wgmma:4)">) -> tensor<64xf32, "columns(transposed(wgmma:4))">
    "kv.tile_scatter"(%t, %sums, %tokens, %token) : (tensor<64xf32, "columns(transposed(wgmma:4))">, memref<?xf32>, tensor<64xi1, "columns(transposed(wgmma:4))">, tensor<64xi32, "columns(transposed(wgmma:4))">) -> ()
    %p = arith.truncf %y : tensor<8x64xf32, "transposed(wgmma:4)"> to tensor<8x64xbf16, "transposed(wgmma:4)">
    %a = "kv.tile_share"(%p) : (tensor<8x64xbf16, "transposed(wgmma:4)">) -> tensor<8x64xbf16, "shared">
    %o = "kv.dot"(%a, %k) {transpose_b = false} : (tensor<8x64xbf16, "shared">, tensor<64x64xbf16, "shared">) -> tensor<8x64xf32, "transposed(wgmma:4)">
    %r = arith.truncf %o : tensor<8x64xf32, "transposed(wgmma:4)"> to tensor<8x64xbf16, "transposed(wgmma:4)">
    "kv.tile_store_rows"(%r, %out, %every, %at) : (tensor<8x64xbf16, "transposed(wgmma:4)">, memref<?x64xbf16>, tensor<8xi1, "rows(transposed(wgmma:4))">, tensor<8xi32, "rows(transposed(wgmma:4))">) -> ()
    gpu.return
  }

  // A wait for a tile at an mbarrier makes no warp wait for the others: all have read what the fold before left when they
  // have waited for one another.
  // CHECK-LABEL: gpu.func @fold_beside_copies
  // CHECK:         scf.for
  // CHECK:           kv.barrier = "full_keys"
  // CHECK:           nvvm.barrier
  // CHECK:           llvm.store %{{.*}} : f32, !llvm.ptr<3>
  // CHECK:           nvvm.barrier
  // CHECK:           llvm.load %{{.*}} : !llvm.ptr<3> -> vector<4xf32>
  gpu.func @fold_beside_copies(%scale: f32, %n: i32) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {instruction = "wgmma", consumers = 1 : i64, swapped = true}} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %stages = "kv.make_stages"() {buffer_name = "keys", copy = "convert", stages = 2 : i64, tile = tensor<64x64xbf16, "shared">} : () -> !kv.stages
    scf.for %i = %c0 to %n step %c1 : i32 {
      %k = "kv.consumer_wait"(%stages, %i) : (!kv.stages, i32) -> tensor<64x64xbf16, "shared">
      %x = tensor.splat %scale : tensor<8x64xf32, "transposed(wgmma:4)">
      %m = "kv.tile_reduce"(%x) {kind = "max", axis = 1 : i64} : (tensor<8x64xf32, "transposed(wgmma:4)">) -> tensor<8xf32, "rows(transposed(wgmma:4))">
      "kv.consumer_release"(%stages, %i) : (!kv.stages, i32) -> ()
    }
    gpu.return
  }

  // The same as above by mma.sync: of 8 rows a fragment is two matrices; weights are transposed by movmatrix.
  // CHECK-LABEL: gpu.func @swapped_mma
  // CHECK:         nvvm.ldmatrix {{.*}}layout = #nvvm.mma_layout<row>, num = 4
  // CHECK:         nvvm.ldmatrix {{.*}}layout = #nvvm.mma_layout<row>, num = 2
  // CHECK:         nvvm.mma.sync
  // CHECK-COUNT-2: movmatrix.sync.aligned.m8n8.trans.b16
  // CHECK:         nvvm.barrier
  // CHECK:         nvvm.ldmatrix {{.*}}layout = #nvvm.mma_layout<col>, num = 4
  // CHECK:         nvvm.ldmatrix {{.*}}layout = #nvvm.mma_layout<row>, num = 2
  // CHECK:         nvvm.mma.sync
  gpu.func @swapped_mma(%scale: f32, %n: i32, %query: memref<?x64xbf16>, %out: memref<?x64xbf16>, %sums: memref<?xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {instruction = "mma.sync", consumers = 1 : i64, swapped = true}} {
    %c0 = arith.constant 0 : i32
    %stages = "kv.make_stages"() {buffer_name = "keys", copy = "convert", stages = 2 : i64, tile = tensor<64x64xbf16, "shared">} : () -> !kv.stages
    %every = arith.constant dense<true> : tensor<8xi1, "rows(transposed(mma:4))">
    %at = "kv.tile_index"() : () -> tensor<8xi32, "rows(transposed(mma:4))">
    %tokens = arith.constant dense<true> : tensor<64xi1, "columns(transposed(mma:4))">
    %token = "kv.tile_index"() : () -> tensor<64xi32, "columns(transposed(mma:4))">
    %q = "kv.tile_load_rows"(%query, %every, %at) : (memref<?x64xbf16>, tensor<8xi1, "rows(transposed(mma:4))">, tensor<8xi32, "rows(transposed(mma:4))">) -> tensor<8x64xbf16, "shared">
    %k = "kv.consumer_wait"(%stages, %c0) : (!kv.stages, i32) -> tensor<64x64xbf16, "shared">
    %s = "kv.dot"(%q, %k) {transpose_b = true} : (tensor<8x64xbf16, "shared">, tensor<64x64xbf16, "shared">) -> tensor<8x64xf32, "transposed(mma:4)">
    %m = "kv.tile_reduce"(%s) {kind = "max", axis = 1 : i64} : (tensor<8x64xf32, "transposed(mma:4)">) -> tensor<8xf32, "rows(transposed(mma:4))">
    %ms = "kv.tile_broadcast"(%m) {dimension = 0 : i64} : (tensor<8xf32, "rows(transposed(mma:4))">) -> tensor<8x64xf32, "transposed(mma:4)">
    %y = arith.subf %s, %ms : tensor<8x64xf32, "transposed(mma:4)">
    %t = "kv.tile_reduce"(%y) {kind = "add", axis = 0 : i64} : (tensor<8x64xf32, "transposed(mma:4)">) -> tensor<64xf32, "columns(transposed(mma:4))">
    "kv.tile_scatter"(%t, %sums, %tokens, %token) : (tensor<64xf32, "columns(transposed(mma:4))">, memref<?xf32>, tensor<64xi1, "columns(transposed(mma:4))">, tensor<64xi32, "columns(transposed(mma:4))">) -> ()
    %p = arith.truncf %y : tensor<8x64xf32, "transposed(mma:4)"> to tensor<8x64xbf16, "transposed(mma:4)">
    %a = "kv.tile_share"(%p) : (tensor<8x64xbf16, "transposed(mma:4)">) -> tensor<8x64xbf16, "shared">
    %o = "kv.dot"(%a, %k) {transpose_b = false} : (tensor<8x64xbf16, "shared">, tensor<64x64xbf16, "shared">) -> tensor<8x64xf32, "transposed(mma:4)">
    %r = arith.truncf %o : tensor<8x64xf32, "transposed(mma:4)"> to tensor<8x64xbf16, "transposed(mma:4)">
    "kv.tile_store_rows"(%r, %out, %every, %at) : (tensor<8x64xbf16, "transposed(mma:4)">, memref<?x64xbf16>, tensor<8xi1, "rows(transposed(mma:4))">, tensor<8xi32, "rows(transposed(mma:4))">) -> ()
    gpu.return
  }

  // Columns are staged by stmatrix, each half in its turn in the same memory, which a warp has to itself.
  // CHECK-LABEL: gpu.func @staged
  // CHECK:         %[[P:.*]] = "kv.alloc_shared"() {alignment = 1024 : i64, bytes = 8192 : i64}
  // CHECK-NOT:     kv.alloc_shared
  // CHECK:         nvvm.bar.warp.sync
  // CHECK-COUNT-4: stmatrix.sync.aligned
  // CHECK:         nvvm.bar.warp.sync
  // CHECK:         llvm.load %[[P]]
  // CHECK:         nvvm.bar.warp.sync
  // CHECK-COUNT-4: stmatrix.sync.aligned
  gpu.func @staged(%out: !llvm.ptr<1>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %x = arith.constant dense<1.0> : tensor<64x128xbf16, "wgmma">
    %p = "kv.tile_stage"(%x) {first_column = 0 : i64, columns = 64 : i64} : (tensor<64x128xbf16, "wgmma">) -> !llvm.ptr<3>
    %a = llvm.load %p : !llvm.ptr<3> -> i32
    llvm.store %a, %out : i32, !llvm.ptr<1>
    %q = "kv.tile_stage"(%x) {first_column = 64 : i64, columns = 64 : i64} : (tensor<64x128xbf16, "wgmma">) -> !llvm.ptr<3>
    %b = llvm.load %q : !llvm.ptr<3> -> i32
    llvm.store %b, %out : i32, !llvm.ptr<1>
    gpu.return
  }

  // A table goes to shared memory twice, the second time one element later, so that a row's elements are read by pairs
  // wherever its window begins; what was there has been read by then.
  // CHECK-LABEL: gpu.func @tables
  // CHECK:         "kv.alloc_shared"() {alignment = 16 : i64, bytes = 2064 : i64}
  // CHECK-NOT:     kv.alloc_shared
  // CHECK:         nvvm.barrier
  // CHECK-COUNT-4: llvm.store %{{.*}} : f32, !llvm.ptr<3>
  // CHECK:         nvvm.barrier
  // CHECK-COUNT-2: arith.andi %{{.*}}, %c1_i32
  // CHECK-COUNT-16: llvm.load %{{.*}} : !llvm.ptr<3> -> vector<2xf32>
  // CHECK-NOT:     llvm.load
  // CHECK:         gpu.return
  gpu.func @tables(%n: i32, %out: memref<?xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %t = "kv.make_table"() {length = 256 : i64} : () -> !llvm.ptr<3>
    %true = arith.constant dense<true> : tensor<64xi1, "rows(wgmma)">
    %at = "kv.tile_index"() : () -> tensor<64xi32, "rows(wgmma)">
    %i = "kv.tile_index"() : () -> tensor<256xi32, "spread:4">
    %x = arith.sitofp %i : tensor<256xi32, "spread:4"> to tensor<256xf32, "spread:4">
    "kv.table_store"(%x, %t) {length = 256 : i64, pitch = 256 : i64, span = 256 : i64} : (tensor<256xf32, "spread:4">, !llvm.ptr<3>) -> ()
    %w = "kv.tile_windows"(%t, %at) {length = 256 : i64} : (!llvm.ptr<3>, tensor<64xi32, "rows(wgmma)">) -> !tile
    %m = "kv.tile_reduce"(%w) {kind = "max", axis = 1 : i64} : (!tile) -> !row
    "kv.tile_scatter"(%m, %out, %true, %at) : (!row, memref<?xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // Of spans that are longer than what a table has of each, the rest goes nowhere: of 128 elements the first 72.
  // CHECK-LABEL: gpu.func @spans
  // CHECK:         nvvm.barrier
  // CHECK-COUNT-2: arith.cmpi slt, %{{.*}}, %c72_i32
  // CHECK:         nvvm.barrier
  gpu.func @spans() kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %t = "kv.make_table"() {length = 256 : i64} : () -> !llvm.ptr<3>
    %i = "kv.tile_index"() : () -> tensor<256xi32, "spread:4">
    %x = arith.sitofp %i : tensor<256xi32, "spread:4"> to tensor<256xf32, "spread:4">
    "kv.table_store"(%x, %t) {length = 256 : i64, pitch = 72 : i64, span = 128 : i64} : (tensor<256xf32, "spread:4">, !llvm.ptr<3>) -> ()
    gpu.return
  }

  // Of a ramp a thread multiplies its steps by numbers that are known, and adds what the lane's first column has.
  // CHECK-LABEL: gpu.func @ramps
  // CHECK:         %[[FIRST:.*]] = arith.sitofp %{{.*}} : i32 to f32
  // CHECK:         %[[LANE:.*]] = vector.broadcast %[[FIRST]] : f32 to vector<2xf32>
  // CHECK:         %[[OWN:.*]] = arith.mulf %{{.*}}, %[[LANE]] fastmath<contract> : vector<2xf32>
  // CHECK:         %[[START:.*]] = arith.addf %[[OWN]], %{{.*}} fastmath<contract> : vector<2xf32>
  // CHECK:         %[[COLUMNS:.*]] = arith.constant dense<[0.000000e+00, 1.000000e+00, 0.000000e+00, 1.000000e+00, 8.000000e+00, 9.000000e+00, 8.000000e+00, 9.000000e+00, 1.600000e+01,
  // CHECK:         %[[STARTS:.*]] = vector.shuffle %[[START]]
  // CHECK:         %[[PRODUCT:.*]] = arith.mulf %{{.*}}, %[[COLUMNS]] fastmath<contract> : vector<32xf32>
  // CHECK:         arith.addf %[[PRODUCT]], %[[STARTS]] fastmath<contract> : vector<32xf32>
  gpu.func @ramps(%out: memref<?xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %at = "kv.tile_index"() : () -> tensor<64xi32, "rows(wgmma)">
    %start = arith.sitofp %at : tensor<64xi32, "rows(wgmma)"> to !row
    %step = arith.constant dense<0.5> : !row
    %every = arith.constant dense<true> : tensor<64xi1, "rows(wgmma)">
    %x = "kv.tile_ramp"(%start, %step) : (!row, !row) -> !tile
    %m = "kv.tile_reduce"(%x) {kind = "max", axis = 1 : i64} : (!tile) -> !row
    "kv.tile_scatter"(%m, %out, %every, %at) : (!row, memref<?xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // Masks are selects; a question of a warp is a ballot of what its threads hold.
  // CHECK-LABEL: gpu.func @masks
  // CHECK:         %[[LOWEST:.*]] = arith.constant dense<0xFF800000> : vector<32xf32>
  // CHECK:         arith.select %{{.*}}, %{{.*}}, %[[LOWEST]] : vector<32xi1>, vector<32xf32>
  // CHECK:         arith.ori
  // CHECK:         nvvm.vote.sync  ballot
  // CHECK:         scf.if
  gpu.func @masks(%n: i32, %out: memref<?xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %at = "kv.tile_index"() : () -> tensor<64xi32, "rows(wgmma)">
    %limit = tensor.splat %n : tensor<64xi32, "rows(wgmma)">
    %exists = arith.cmpi slt, %at, %limit : tensor<64xi32, "rows(wgmma)">
    %seen = "kv.tile_broadcast"(%exists) {dimension = 0 : i64} : (tensor<64xi1, "rows(wgmma)">) -> tensor<64x64xi1, "wgmma">
    %x = arith.constant dense<2.0> : !tile
    %y = "kv.tile_mask"(%x, %seen) : (!tile, tensor<64x64xi1, "wgmma">) -> !tile
    %m = "kv.tile_reduce"(%y) {kind = "min", axis = 1 : i64} : (!tile) -> !row
    %any = "kv.warp_any"(%exists) : (tensor<64xi1, "rows(wgmma)">) -> i1
    scf.if %any {
      "kv.tile_scatter"(%m, %out, %exists, %at) : (!row, memref<?xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    }
    gpu.return
  }

  // A buffer is shared memory with two barriers a stage. A product is fence, products, commit: its wait ties the
  // accumulators, so that nothing reads them before. Two in flight, of which the older is waited for.
  // CHECK-LABEL: gpu.func @products
  // CHECK:         "kv.alloc_shared"() {alignment = 1024 : i64, bytes = 32768 : i64}
  // CHECK:         "kv.alloc_shared"() {alignment = 8 : i64, bytes = 32 : i64}
  // CHECK-COUNT-4: mbarrier.init
  // CHECK-NEXT:    nvvm.fence.mbarrier.init
  // CHECK:         gpu.barrier
  // CHECK:         mbarrier.try_wait
  // CHECK:         wgmma.fence.sync.aligned;{{.*}}wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16{{.*}}wgmma.commit_group.sync.aligned;
  // CHECK:         wgmma.fence.sync.aligned;
  // CHECK:         wgmma.wait_group.sync.aligned 1;{{.*}}"=f,
  // CHECK:         wgmma.wait_group.sync.aligned 0;
  // CHECK:         mbarrier.arrive
  gpu.func @products(%n: i32, %out: memref<?xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %b = "kv.make_stages"() {buffer_name = "keys", copy = "convert", stages = 2 : i64, tile = tensor<64x128xbf16, "shared">} : () -> !kv.stages
    %k = "kv.consumer_wait"(%b, %n) : (!kv.stages, i32) -> tensor<64x128xbf16, "shared">
    %s = "kv.dot_start"(%k, %k) {transpose_b = true} : (tensor<64x128xbf16, "shared">, tensor<64x128xbf16, "shared">) -> !tile
    %t = "kv.dot_start"(%k, %k) {transpose_b = true} : (tensor<64x128xbf16, "shared">, tensor<64x128xbf16, "shared">) -> !tile
    %w:2 = "kv.dot_wait"(%s, %t) {pending = 1 : i64} : (!tile, !tile) -> (!tile, !tile)
    %d = "kv.dot_wait"(%w#1) {pending = 0 : i64} : (!tile) -> !tile
    "kv.consumer_release"(%b, %n) : (!kv.stages, i32) -> ()
    %y = arith.addf %w#0, %d : !tile
    %m = "kv.tile_reduce"(%y) {kind = "max", axis = 1 : i64} : (!tile) -> !row
    %at = "kv.tile_index"() : () -> tensor<64xi32, "rows(wgmma)">
    %true = arith.constant dense<true> : tensor<64xi1, "rows(wgmma)">
    "kv.tile_scatter"(%m, %out, %true, %at) : (!row, memref<?xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // Two terms of a row stand in the row's place: its lanes have all read before one writes, and products see it. Of each
  // term a product takes the same steps of B.
  // CHECK-LABEL: gpu.func @terms
  // CHECK:         %[[UNITS:.*]] = "kv.alloc_shared"() {alignment = 16 : i64, bytes = 256 : i64}
  // CHECK:         scf.for
  // CHECK-COUNT-2:   llvm.load {{.*}} -> vector<4xi32>
  // CHECK:           cvt.rn.satfinite.e4m3x2.f16x2
  // CHECK:           nvvm.bar.warp.sync
  // CHECK-COUNT-2:   llvm.store {{.*}} : vector<4xi32>, !llvm.ptr<3>
  // CHECK:           llvm.store {{.*}} : f32, !llvm.ptr<3>
  // CHECK:         nvvm.fence.proxy
  // CHECK:         wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3
  // CHECK:         wgmma.wait_group
  gpu.func @terms(%n: i32, %query: memref<?x64xbf16>, %out: memref<?xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %at = "kv.tile_index"() : () -> tensor<64xi32, "rows(wgmma)">
    %true = arith.constant dense<true> : tensor<64xi1, "rows(wgmma)">
    %b = "kv.make_stages"() {buffer_name = "keys", copy = "convert", stages = 2 : i64, tile = tensor<64x64xf8E4M3FN, "shared">} : () -> !kv.stages
    %q = "kv.tile_load_rows"(%query, %true, %at) : (memref<?x64xbf16>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> tensor<64x64xbf16, "shared">
    %t, %u = "kv.tile_terms"(%q) {operandSegmentSizes = array<i32: 1, 0>} : (tensor<64x64xbf16, "shared">) -> (tensor<64x128xf8E4M3FN, "shared">, !row)
    %k = "kv.consumer_wait"(%b, %n) : (!kv.stages, i32) -> tensor<64x64xf8E4M3FN, "shared">
    %s = "kv.dot"(%t, %k) {transpose_b = true} : (tensor<64x128xf8E4M3FN, "shared">, tensor<64x64xf8E4M3FN, "shared">) -> !tile
    %m = "kv.tile_reduce"(%s) {kind = "max", axis = 1 : i64} : (!tile) -> !row
    %y = arith.mulf %m, %u : !row
    "kv.tile_scatter"(%y, %out, %true, %at) : (!row, memref<?xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // A product whose sums are added outside of the tensor cores: 32 columns go to fresh accumulators (zeros before the
  // first step), are waited for and added to a thread's first 16 sums, then the other 32. Columns of B are its rows.
  // CHECK-LABEL: gpu.func @promoted
  // CHECK:         wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {$0, {{[^}]*}}}, a, b, no, 1, 1;
  // CHECK:          wgmma.wait_group.sync.aligned 0;
  // CHECK-COUNT-16: arith.addf %{{.*}} : f32
  // CHECK-NOT:      arith.addf
  // CHECK:          getelementptr %{{.*}}[4096]
  // CHECK:          wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {$0, {{[^}]*}}}, a, b, no, 1, 1;
  // CHECK:          wgmma.wait_group.sync.aligned 0;
  // CHECK-COUNT-16: arith.addf %{{.*}} : f32
  // CHECK-NOT:      arith.addf
  // CHECK:          arith.maxnumf
  gpu.func @promoted(%n: i32, %out: memref<?xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %b = "kv.make_stages"() {buffer_name = "keys", copy = "convert", stages = 2 : i64, tile = tensor<64x64xf8E4M3FN, "shared">} : () -> !kv.stages
    %k = "kv.consumer_wait"(%b, %n) : (!kv.stages, i32) -> tensor<64x64xf8E4M3FN, "shared">
    %c = arith.constant dense<1.0> : !tile
    %y = "kv.dot"(%k, %k, %c) {kv.promoted = 32 : i64, transpose_b = true} : (tensor<64x64xf8E4M3FN, "shared">, tensor<64x64xf8E4M3FN, "shared">, !tile) -> !tile
    %m = "kv.tile_reduce"(%y) {kind = "max", axis = 1 : i64} : (!tile) -> !row
    %at = "kv.tile_index"() : () -> tensor<64xi32, "rows(wgmma)">
    %true = arith.constant dense<true> : tensor<64xi1, "rows(wgmma)">
    "kv.tile_scatter"(%m, %out, %true, %at) : (!row, memref<?xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // A tile of ones is filled by all threads of the block, before the barrier behind which buffers are used. Bytes of e4m3
  // that are 448, or a NaN, carry into the sign of theirs when 2 is added: one test of all words of a row.
  // CHECK-LABEL: gpu.func @weights
  // CHECK:         arith.constant 943208504 : i32
  // CHECK:         vector<4xi32>
  // CHECK:         nvvm.fence.proxy {kind = #nvvm.proxy_kind<async.shared>
  // CHECK:         gpu.barrier
  // CHECK:         arith.constant 33686018 : i32
  // CHECK:         arith.constant -2139062144 : i32
  // CHECK-COUNT-4: arith.addi %{{.*}} : i32
  // CHECK:         arith.andi
  // CHECK:         arith.cmpi ne
  // Products that are joined are one group: the sums of rows, and what the weights multiply.
  // CHECK:         m64n64k32.f32.e4m3.e4m3
  // CHECK-NOT:     commit_group
  // CHECK:         m64n8k32.f32.e4m3.e4m3
  // CHECK-SAME:    commit_group
  // CHECK:         wgmma.wait_group.sync.aligned 0;
  gpu.func @weights(%n: i32, %out: memref<?xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %ones = "kv.tile_ones"() : () -> tensor<8x64xf8E4M3FN, "shared">
    %b = "kv.make_stages"() {buffer_name = "keys", copy = "convert", stages = 2 : i64, tile = tensor<64x64xf8E4M3FN, "shared">} : () -> !kv.stages
    %k = "kv.consumer_wait"(%b, %n) : (!kv.stages, i32) -> tensor<64x64xf8E4M3FN, "shared">
    %y = "kv.dot"(%k, %k) {transpose_b = true} : (tensor<64x64xf8E4M3FN, "shared">, tensor<64x64xf8E4M3FN, "shared">) -> !tile
    %w = "kv.cast"(%y) : (!tile) -> tensor<64x64xf8E4M3FN, "wgmma">
    %large = "kv.tile_saturated"(%w) : (tensor<64x64xf8E4M3FN, "wgmma">) -> tensor<64xi1, "rows(wgmma)">
    %o = "kv.dot_start"(%w, %k) {kv.joined, transpose_b = true} : (tensor<64x64xf8E4M3FN, "wgmma">, tensor<64x64xf8E4M3FN, "shared">) -> !tile
    %s = "kv.dot_start"(%w, %ones) {transpose_b = true} : (tensor<64x64xf8E4M3FN, "wgmma">, tensor<8x64xf8E4M3FN, "shared">) -> tensor<64x8xf32, "wgmma">
    %d:2 = "kv.dot_wait"(%o, %s) {pending = 0 : i64} : (!tile, tensor<64x8xf32, "wgmma">) -> (!tile, tensor<64x8xf32, "wgmma">)
    %l = "kv.tile_reduce"(%d#1) {kind = "max", axis = 1 : i64, kv.partial} : (tensor<64x8xf32, "wgmma">) -> !row
    %t = "kv.tile_reduce"(%d#0) {kind = "max", axis = 1 : i64} : (!tile) -> !row
    %m = arith.addf %l, %t : !row
    %at = "kv.tile_index"() : () -> tensor<64xi32, "rows(wgmma)">
    "kv.tile_scatter"(%m, %out, %large, %at) : (!row, memref<?xf32>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // Products by mma.sync: rows of a buffer become a warp's fragments of A by ldmatrix, B comes by ldmatrix fragment by
  // fragment, transposed where its rows are the product's; the accumulator's registers are A of the next product. A tile
  // is waited for by groups of cp.async and the whole block; there are no barriers in shared memory, no proxies and no
  // stmatrix, which older targets lack.
  // CHECK-LABEL: gpu.func @mma
  // CHECK-NOT:     mbarrier
  // CHECK:         gpu.barrier
  // CHECK:         nvvm.cp.async.shared.global
  // CHECK:         nvvm.cp.async.commit.group
  // CHECK-NEXT:    nvvm.cp.async.wait.group 0
  // CHECK:         nvvm.bar.warp.sync
  // CHECK-NEXT:    gpu.barrier
  // CHECK-NOT:     fence.proxy
  // CHECK-COUNT-2: nvvm.ldmatrix {{.*}}layout = #nvvm.mma_layout<row>, num = 4
  // CHECK:         arith.negf %{{.*}} : vector<16xbf16>
  // CHECK:         nvvm.ldmatrix {{.*}}layout = #nvvm.mma_layout<row>
  // CHECK-COUNT-2: nvvm.mma.sync
  // CHECK:         arith.truncf %{{.*}} : vector<8xf32> to vector<8xbf16>
  // CHECK:         nvvm.ldmatrix {{.*}}layout = #nvvm.mma_layout<col>
  // CHECK-COUNT-2: nvvm.mma.sync
  // CHECK-NOT:     stmatrix
  // CHECK-COUNT-8: llvm.store %{{.*}} : i32, !llvm.ptr<3>
  gpu.func @mma(%c: !cache, %i: i32, %query: memref<?x32xbf16>, %out: memref<?x32xbf16>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64, instruction = "mma.sync"}} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "cp_async", stages = 1 : i64, tile = tensor<16x32xbf16, "shared">} : () -> !kv.stages
    %at = "kv.tile_index"() : () -> tensor<64xi32, "rows(mma)">
    %true = arith.constant dense<true> : tensor<64xi1, "rows(mma)">
    %p = "kv.tile_row_pages"(%c, %i, %i, %i) {rows = 16 : i64} : (!cache, i32, i32, i32) -> i32
    "kv.producer_acquire"(%keys, %i) : (!kv.stages, i32) -> ()
    "kv.copy_start"(%keys, %i, %c, %i, %i, %i, %i, %p) {first_column = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0>} : (!kv.stages, i32, !cache, i32, i32, i32, i32, i32) -> ()
    %k = "kv.consumer_wait"(%keys, %i) : (!kv.stages, i32) -> tensor<16x32xbf16, "shared">
    %q = "kv.tile_load_rows"(%query, %true, %at) : (memref<?x32xbf16>, tensor<64xi1, "rows(mma)">, tensor<64xi32, "rows(mma)">) -> tensor<64x32xbf16, "mma">
    %n = arith.negf %q : tensor<64x32xbf16, "mma">
    %s = "kv.dot"(%n, %k) {transpose_b = true} : (tensor<64x32xbf16, "mma">, tensor<16x32xbf16, "shared">) -> tensor<64x16xf32, "mma">
    %w = arith.truncf %s : tensor<64x16xf32, "mma"> to tensor<64x16xbf16, "mma">
    %o = "kv.dot"(%w, %k) {transpose_b = false} : (tensor<64x16xbf16, "mma">, tensor<16x32xbf16, "shared">) -> tensor<64x32xf32, "mma">
    %x = arith.truncf %o : tensor<64x32xf32, "mma"> to tensor<64x32xbf16, "mma">
    "kv.tile_store_rows"(%x, %out, %true, %at) : (tensor<64x32xbf16, "mma">, memref<?x32xbf16>, tensor<64xi1, "rows(mma)">, tensor<64xi32, "rows(mma)">) -> ()
    gpu.return
  }

  // Roles are numbers of warps and warpgroups, the same for all threads of a warp; registers are an instruction.
  // CHECK-LABEL: gpu.func @roles
  // CHECK:         nvvm.setmaxregister  decrease 24
  // CHECK:         nvvm.setmaxregister  increase 240
  gpu.func @roles() kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64, producer = true}} {
    %p = "kv.is_role"() {role = "producer"} : () -> i1
    scf.if %p {
      "kv.set_registers"() {action = "decrease", count = 24 : i64} : () -> ()
    } else {
      "kv.set_registers"() {action = "increase", count = 240 : i64} : () -> ()
    } {kv.roles}
    gpu.return
  }

  // Of boxes that exist only those with a token are copied, and their bytes expected.
  // CHECK-LABEL: gpu.func @existing
  // CHECK:         kv.barrier = "empty_tile"
  // CHECK:         %[[BOXES:.*]] = arith.maxsi %{{.*}}, %{{.*}}
  // CHECK:         %[[BYTES:.*]] = arith.muli %[[BOXES]],
  // CHECK:         mbarrier.arrive.expect_tx{{.*}} %{{.*}}, %[[BYTES]]
  // CHECK:         %[[MINE:.*]] = arith.cmpi slt, %{{.*}}, %[[BOXES]]
  // CHECK-NEXT:    scf.if %[[MINE]]
  // CHECK:           "kv.tma_load_box"
  gpu.func @existing(%c: !wide, %n: i32, %m: !map) kernel attributes {kv.tiled, kv.block = array<i32: 256, 1, 1>, kv.schedule = {consumers = 1 : i64, producer = true}} {
    %stages = "kv.make_stages"() {buffer_name = "tile", copy = "tma", stages = 2 : i64, tile = tensor<32x64xbf16, "shared">} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %p = "kv.is_role"() {role = "producer_warp_0"} : () -> i1
    scf.if %p {
      %pages = "kv.tile_pages"(%c, %c0, %c0, %n) {rows = 32 : i64, step = 16 : i64} : (!wide, i32, i32, i32) -> i32
      "kv.producer_acquire"(%stages, %n) : (!kv.stages, i32) -> ()
      "kv.copy_start"(buffer = %stages, n = %n, cache = %c, batch = %c0, head = %c0, first = %c0, count = %n,
          descriptor = %m, pages = %pages) {existing, first_column = 0 : i64} : (!kv.stages, i32, !wide, i32, i32, i32, i32, !map, i32) -> ()
    } else {
      %tile = "kv.consumer_wait"(%stages, %n) : (!kv.stages, i32) -> tensor<32x64xbf16, "shared">
      "kv.consumer_release"(%stages, %n) : (!kv.stages, i32) -> ()
    } {kv.roles}
    gpu.return
  }

  // A box that is all of a tile is started by an elected thread: under a condition on the lane ptxas makes a loop of it.
  // CHECK-LABEL: gpu.func @one_box
  // CHECK:         kv.barrier = "empty_tile"
  // CHECK:         %[[PAGE:.*]], %{{.*}} = gpu.shuffle idx
  // CHECK:         %[[CHOSEN:.*]] = nvvm.elect.sync
  // CHECK-NEXT:    scf.if %[[CHOSEN]]
  // CHECK:           "kv.tma_load_box"(%{{.*}}, %{{.*}}, %[[PAGE]],
  gpu.func @one_box(%c: !wide, %n: i32, %m: !map) kernel attributes {kv.tiled, kv.block = array<i32: 256, 1, 1>, kv.schedule = {consumers = 1 : i64, producer = true}} {
    %stages = "kv.make_stages"() {buffer_name = "tile", copy = "tma", stages = 2 : i64, tile = tensor<16x64xbf16, "shared">} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %p = "kv.is_role"() {role = "producer_warp_0"} : () -> i1
    scf.if %p {
      %pages = "kv.tile_pages"(%c, %c0, %c0, %n) {rows = 16 : i64, step = 16 : i64} : (!wide, i32, i32, i32) -> i32
      "kv.producer_acquire"(%stages, %n) : (!kv.stages, i32) -> ()
      "kv.copy_start"(buffer = %stages, n = %n, cache = %c, batch = %c0, head = %c0, first = %c0, count = %n,
          descriptor = %m, pages = %pages) {first_column = 0 : i64} : (!kv.stages, i32, !wide, i32, i32, i32, i32, !map, i32) -> ()
    } else {
      %tile = "kv.consumer_wait"(%stages, %n) : (!kv.stages, i32) -> tensor<16x64xbf16, "shared">
      "kv.consumer_release"(%stages, %n) : (!kv.stages, i32) -> ()
    } {kv.roles}
    gpu.return
  }

  // Left alone: a kernel that is not over tiles.
  // CHECK-LABEL: gpu.func @plain
  // CHECK:         "kv.tile_index"
  gpu.func @plain() kernel {
    %at = "kv.tile_index"() : () -> tensor<64xi32>
    gpu.return
  }
}

// -----

gpu.module @kernels {
  gpu.func @integers(%out: memref<?xf32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %x = arith.constant dense<2> : tensor<64x64xi16, "wgmma">
    // expected-error @below {{'kv.tile_reduce' op reduces elements that are neither f32 nor i32, which GPUs do not do here: reduce kv.f32(x)}}
    %m = "kv.tile_reduce"(%x) {kind = "max", axis = 1 : i64} : (tensor<64x64xi16, "wgmma">) -> tensor<64xi16, "rows(wgmma)">
    gpu.return
  }
}

// -----

gpu.module @kernels {
  gpu.func @rows_in_registers(%b: memref<?x64xf32>, %every: tensor<64xi1>, %at: tensor<64xi32>) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    // expected-error @below {{'kv.tile_load_rows' op loads rows that no product reads from shared memory: load them as elements, with gather}}
    %x = "kv.tile_load_rows"(%b, %every, %at) : (memref<?x64xf32>, tensor<64xi1>, tensor<64xi32>) -> tensor<64x64xf32, "wgmma">
    gpu.return
  }
}

// -----

gpu.module @kernels {
  gpu.func @unknown(%n: i32) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %c0 = arith.constant 0 : index
    %x = arith.constant dense<2.0> : tensor<64xf32, "rows(wgmma)">
    // expected-error @below {{'tensor.extract' op takes a tile, and has no rule that distributes it over threads}}
    %y = tensor.extract %x[%c0] : tensor<64xf32, "rows(wgmma)">
    gpu.return
  }
}

// -----

gpu.module @kernels {
  gpu.func @carried(%b: memref<?x64xbf16>, %n: i32, %every: tensor<64xi1, "rows(wgmma)">, %start: tensor<64xi32, "rows(wgmma)">) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    // expected-error @below {{'scf.for' op hands on a tile that cannot be computed for one element: an index or mask of rows must come from positions and scalars}}
    %end = scf.for %i = %c0 to %n step %c1 iter_args(%at = %start) -> (tensor<64xi32, "rows(wgmma)">) : i32 {
      %x = "kv.tile_load_rows"(%b, %every, %at) : (memref<?x64xbf16>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> tensor<64x64xbf16, "shared">
      %next = arith.addi %at, %at : tensor<64xi32, "rows(wgmma)">
      scf.yield %next : tensor<64xi32, "rows(wgmma)">
    }
    gpu.return
  }
}

// -----

gpu.module @kernels {
  // What a while loop carries and hands on are vectors too.
  // CHECK-LABEL: gpu.func @while
  // CHECK:         scf.while (%[[X:.*]] = %{{.*}}, %{{.*}}) : (vector<32xf32>, i32) -> (vector<32xf32>, i32)
  // CHECK:           scf.condition(%{{.*}}) %[[X]], %{{.*}} : vector<32xf32>, i32
  // CHECK:         ^bb0(%{{.*}}: vector<32xf32>, %{{.*}}: i32):
  // CHECK:           scf.yield %{{.*}}, %{{.*}} : vector<32xf32>, i32
  gpu.func @while(%n: i32) kernel attributes {kv.tiled, kv.block = array<i32: 128, 1, 1>, kv.schedule = {consumers = 1 : i64}} {
    %start = arith.constant dense<2.0> : tensor<64x64xf32, "wgmma">
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %r:2 = scf.while (%x = %start, %i = %c0) : (tensor<64x64xf32, "wgmma">, i32) -> (tensor<64x64xf32, "wgmma">, i32) {
      %more = arith.cmpi slt, %i, %n : i32
      scf.condition(%more) %x, %i : tensor<64x64xf32, "wgmma">, i32
    } do {
    ^bb0(%x: tensor<64x64xf32, "wgmma">, %i: i32):
      %y = arith.addf %x, %x : tensor<64x64xf32, "wgmma">
      %j = arith.addi %i, %c1 : i32
      scf.yield %y, %j : tensor<64x64xf32, "wgmma">, i32
    }
    gpu.return
  }
}

// RUN: kv-opt %s --skip-kv-maxima --fold-kv-scores | FileCheck %s
// RUN: sed -e '/@late(/,/return/ s/splat %%positive/splat %%scale/' %s | kv-opt --skip-kv-maxima --fold-kv-scores | FileCheck %s --check-prefix=SIGN
// RUN: kv-opt %S/Inputs/attention_alibi.mlir --kv-pipeline --target=sm_90a --arg=alibi_slopes=2 --stop-after=fold-kv-scores --check-semantics-of=fold-kv-scores --arg=scale=8 --lengths=edges -o /dev/null
// A large scale: later tiles have scores so much larger that weights by the maximum before them are infinite.

!tile = tensor<64x64xf32, "wgmma">
!row = tensor<64xf32, "rows(wgmma)">
!keys = tensor<64xf32, "columns(wgmma:8)">
!weights = tensor<64x64xbf16, "wgmma">
!masks = tensor<64x64xi1, "wgmma">

gpu.module @kernels {
  // A bias of the row costs what the scale does: its sum with the maximum is one number a row. The branch has powers in
  // place of scores; of a row whose maximum is large, or that has none, they are scores, and it takes the branch.
  // CHECK-LABEL: gpu.func @bias
  // CHECK-SAME:    (%[[S:[^:]*]]: tensor<64x64xf32, "wgmma">, %[[SCALE:[^:]*]]: f32, %[[BIAS:[^:]*]]: tensor<64xf32
  // CHECK:         scf.for %{{.*}} iter_args(%[[M:.*]] = %{{.*}}, %[[L:.*]] = %{{.*}}, %[[O:.*]] = %{{.*}}, %{{.*}} = %{{.*}})
  // CHECK:           %[[SIZE:.*]] = math.absf %[[M]]
  // CHECK:           %[[LARGE:.*]] = arith.cmpf ogt, %[[SIZE]]
  // CHECK:           %[[LESS:.*]] = arith.select %[[LARGE]], %{{.*}}, %[[M]]
  // CHECK:           %[[OF_ROW:.*]] = arith.mulf %[[BIAS]], %{{.*}} fastmath<contract>
  // CHECK:           %[[HELD_ROW:.*]] = arith.select %{{.*}}, %{{.*}}, %[[OF_ROW]]
  // CHECK:           %[[ROW:.*]] = arith.subf %[[HELD_ROW]], %[[LESS]] fastmath<contract>
  // CHECK:           %[[ROWS:.*]] = "kv.tile_broadcast"(%[[ROW]]) {dimension = 0 : i64}
  // CHECK:           %[[UNIT:.*]] = arith.mulf %[[SCALE]], %{{.*}} : f32
  // CHECK:           %[[UNITS:.*]] = tensor.splat %[[UNIT]]
  // CHECK:           %[[PRODUCT:.*]] = arith.mulf %[[S]], %[[UNITS]] fastmath<contract>
  // CHECK:           %[[Y:.*]] = arith.addf %[[PRODUCT]], %[[ROWS]] fastmath<contract>
  // CHECK-NOT:       arith.{{.*}}64x64xf32
  // CHECK:           %[[P:.*]] = math.exp2 %[[Y]] : tensor<64x64xf32
  // CHECK:           %[[GROWN:.*]] = arith.cmpf ogt
  // CHECK:           %[[ASK:.*]] = arith.ori %[[GROWN]], %[[LARGE]]
  // CHECK:           %[[ANY:.*]] = "kv.warp_any"(%[[ASK]])
  // CHECK:           scf.if %[[ANY]]
  // CHECK:             %[[MOST:.*]] = "kv.tile_reduce"(%[[Y]]) {{.*}}kind = "max"
  // CHECK:             %[[MOVES:.*]] = arith.ori %{{.*}}, %[[LARGE]]
  // CHECK:             %[[SUM:.*]] = arith.addf %[[MOST]], %[[LESS]]
  // CHECK:             %[[HELD:.*]] = arith.minnumf %[[SUM]]
  // CHECK:             %[[TOP:.*]] = arith.maxnumf %[[HELD]], %[[M]]
  // CHECK:             %[[M2:.*]] = arith.select %[[MOVES]], %[[TOP]], %[[M]]
  // CHECK:             %[[MOVED:.*]] = arith.subf %[[M2]], %[[LESS]]
  // CHECK:             %[[OF_LARGE:.*]] = arith.select %{{.*}}, %[[MOST]], %[[MOVED]]
  // CHECK:             %[[LESS2:.*]] = arith.select %[[LARGE]], %[[M2]], %[[OF_LARGE]]
  // CHECK:             %[[SPREAD:.*]] = "kv.tile_broadcast"(%[[LESS2]])
  // CHECK:             %[[POWER:.*]] = arith.subf %[[Y]], %[[SPREAD]]
  // CHECK:             math.exp2 %[[POWER]]
  gpu.func @bias(%s: !tile, %scale: f32, %bias: !row, %start: !row, %zero: !row, %none: !tile, %first: !weights, %n: i32, %out: memref<?x64xbf16>, %every: tensor<64xi1, "rows(wgmma)">, %at: tensor<64xi32, "rows(wgmma)">) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %slack = arith.constant dense<8.0> : !row
    %of_rows = arith.constant dense<1.5> : !row
    %of_tile = arith.constant dense<1.5> : !tile
    %scales = tensor.splat %scale : !tile
    %r:4 = scf.for %j = %c0 to %n step %c1 iter_args(%m = %start, %l = %zero, %o = %none, %p = %first) -> (!row, !row, !tile, !weights) : i32 {
      %product = arith.mulf %s, %scales fastmath<contract> : !tile
      %biases = "kv.tile_broadcast"(%bias) {dimension = 0 : i64} : (!row) -> !tile
      %x = arith.addf %product, %biases fastmath<contract> : !tile
      %max = "kv.tile_reduce"(%x) {axis = 1 : i64, kind = "max"} : (!tile) -> !row
      %top = arith.mulf %max, %of_rows : !row
      %bound = arith.addf %m, %slack : !row
      %above = arith.cmpf ogt, %top, %bound : !row
      %m2 = arith.select %above, %top, %m : tensor<64xi1, "rows(wgmma)">, !row
      %moved = arith.subf %m, %m2 : !row
      %alpha = math.exp2 %moved : !row
      %scaled = arith.mulf %x, %of_tile : !tile
      %spread = "kv.tile_broadcast"(%m2) {dimension = 0 : i64} : (!row) -> !tile
      %power = arith.subf %scaled, %spread : !tile
      %w = math.exp2 %power : !tile
      %kept = arith.mulf %l, %alpha : !row
      %sum = "kv.tile_reduce"(%w) {axis = 1 : i64, kind = "add", kv.partial} : (!tile) -> !row
      %l2 = arith.addf %kept, %sum : !row
      %narrow = arith.truncf %w : !tile to !weights
      %factors = "kv.tile_broadcast"(%alpha) {dimension = 0 : i64} : (!row) -> !tile
      %o2 = arith.mulf %o, %factors : !tile
      scf.yield %m2, %l2, %o2, %narrow : !row, !row, !tile, !weights
    }
    "kv.tile_store_rows"(%r#3, %out, %every, %at) : (!weights, memref<?x64xbf16>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // What is linear in a difference of positions is a ramp: its start has the rest of the row, its step the slope. Branches
  // and masks choose among powers as they chose among scores.
  // CHECK-LABEL: gpu.func @slopes
  // CHECK-SAME:    (%[[S:[^:]*]]: tensor<64x64xf32, "wgmma">, %[[SLOPE:[^:]*]]: tensor<64xf32
  // CHECK:         scf.for
  // CHECK:           %[[STEP:.*]] = arith.mulf %[[SLOPE]], %{{.*}} fastmath<contract>
  // CHECK:           %[[RAMP:.*]] = "kv.tile_ramp"(%{{.*}}, %{{.*}})
  // CHECK:           %[[PRODUCT:.*]] = arith.mulf %[[S]], %{{.*}} fastmath<contract> : tensor<64x64xf32
  // CHECK:           %[[Y:.*]] = arith.addf %[[PRODUCT]], %[[RAMP]] fastmath<contract>
  // CHECK:           %[[CHOSEN:.*]] = scf.if
  // CHECK:             scf.yield %[[Y]]
  // CHECK:             %[[MASKED:.*]] = "kv.tile_mask"(%[[Y]],
  // CHECK:             scf.yield %[[MASKED]]
  // CHECK:           math.exp2 %[[CHOSEN]]
  gpu.func @slopes(%s: !tile, %slope: !row, %queries: tensor<64xi32, "rows(wgmma)">, %base: i32, %whole: i1, %seen: !masks, %start: !row, %zero: !row, %first: !weights, %n: i32, %out: memref<?x64xbf16>, %every: tensor<64xi1, "rows(wgmma)">, %at: tensor<64xi32, "rows(wgmma)">) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c64 = arith.constant 64 : i32
    %slack = arith.constant dense<8.0> : !row
    %of_rows = arith.constant dense<1.5> : !row
    %of_tile = arith.constant dense<1.5> : !tile
    %r:3 = scf.for %j = %c0 to %n step %c1 iter_args(%m = %start, %l = %zero, %p = %first) -> (!row, !row, !weights) : i32 {
      %begin = arith.muli %j, %c64 : i32
      %begins = tensor.splat %begin : tensor<64xi32, "columns(wgmma:8)">
      %numbers = "kv.tile_index"() : () -> tensor<64xi32, "columns(wgmma:8)">
      %keys = arith.addi %begins, %numbers : tensor<64xi32, "columns(wgmma:8)">
      %bases = tensor.splat %base : tensor<64xi32, "columns(wgmma:8)">
      %of_keys = arith.subi %keys, %bases : tensor<64xi32, "columns(wgmma:8)">
      %k = arith.sitofp %of_keys : tensor<64xi32, "columns(wgmma:8)"> to !keys
      %rows = tensor.splat %base : tensor<64xi32, "rows(wgmma)">
      %of_queries = arith.subi %queries, %rows : tensor<64xi32, "rows(wgmma)">
      %q = arith.sitofp %of_queries : tensor<64xi32, "rows(wgmma)"> to !row
      %ks = "kv.tile_broadcast"(%k) {dimension = 1 : i64} : (!keys) -> !tile
      %qs = "kv.tile_broadcast"(%q) {dimension = 0 : i64} : (!row) -> !tile
      %distance = arith.subf %ks, %qs : !tile
      %slopes = "kv.tile_broadcast"(%slope) {dimension = 0 : i64} : (!row) -> !tile
      %biases = arith.mulf %slopes, %distance fastmath<contract> : !tile
      %biased = arith.addf %s, %biases fastmath<contract> : !tile
      %x = scf.if %whole -> (!tile) {
        scf.yield %biased : !tile
      } else {
        %masked = "kv.tile_mask"(%biased, %seen) : (!tile, !masks) -> !tile
        scf.yield %masked : !tile
      }
      %max = "kv.tile_reduce"(%x) {axis = 1 : i64, kind = "max"} : (!tile) -> !row
      %top = arith.mulf %max, %of_rows : !row
      %bound = arith.addf %m, %slack : !row
      %above = arith.cmpf ogt, %top, %bound : !row
      %m2 = arith.select %above, %top, %m : tensor<64xi1, "rows(wgmma)">, !row
      %moved = arith.subf %m, %m2 : !row
      %alpha = math.exp2 %moved : !row
      %scaled = arith.mulf %x, %of_tile : !tile
      %spread = "kv.tile_broadcast"(%m2) {dimension = 0 : i64} : (!row) -> !tile
      %power = arith.subf %scaled, %spread : !tile
      %w = math.exp2 %power : !tile
      %kept = arith.mulf %l, %alpha : !row
      %sum = "kv.tile_reduce"(%w) {axis = 1 : i64, kind = "add", kv.partial} : (!tile) -> !row
      %l2 = arith.addf %kept, %sum : !row
      %narrow = arith.truncf %w : !tile to !weights
      scf.yield %m2, %l2, %narrow : !row, !row, !weights
    }
    "kv.tile_store_rows"(%r#2, %out, %every, %at) : (!weights, memref<?x64xbf16>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // Left alone: a bias of every element takes an addition in either form.
  // CHECK-LABEL: gpu.func @of_elements
  // CHECK-SAME:    (%[[S:[^:]*]]: tensor<64x64xf32, "wgmma">, %[[B:[^:]*]]: tensor<64x64xf32
  // CHECK:         %[[X:.*]] = arith.addf %[[S]], %[[B]]
  // CHECK:         arith.mulf %[[X]]
  // CHECK-NOT:     arith.ori
  // CHECK:         gpu.return
  gpu.func @of_elements(%s: !tile, %b: !tile, %start: !row, %zero: !row, %first: !weights, %n: i32, %out: memref<?x64xbf16>, %every: tensor<64xi1, "rows(wgmma)">, %at: tensor<64xi32, "rows(wgmma)">) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %slack = arith.constant dense<8.0> : !row
    %of_rows = arith.constant dense<1.5> : !row
    %of_tile = arith.constant dense<1.5> : !tile
    %r:3 = scf.for %j = %c0 to %n step %c1 iter_args(%m = %start, %l = %zero, %p = %first) -> (!row, !row, !weights) : i32 {
      %x = arith.addf %s, %b fastmath<contract> : !tile
      %max = "kv.tile_reduce"(%x) {axis = 1 : i64, kind = "max"} : (!tile) -> !row
      %top = arith.mulf %max, %of_rows : !row
      %bound = arith.addf %m, %slack : !row
      %above = arith.cmpf ogt, %top, %bound : !row
      %m2 = arith.select %above, %top, %m : tensor<64xi1, "rows(wgmma)">, !row
      %moved = arith.subf %m, %m2 : !row
      %alpha = math.exp2 %moved : !row
      %scaled = arith.mulf %x, %of_tile : !tile
      %spread = "kv.tile_broadcast"(%m2) {dimension = 0 : i64} : (!row) -> !tile
      %power = arith.subf %scaled, %spread : !tile
      %w = math.exp2 %power : !tile
      %kept = arith.mulf %l, %alpha : !row
      %sum = "kv.tile_reduce"(%w) {axis = 1 : i64, kind = "add", kv.partial} : (!tile) -> !row
      %l2 = arith.addf %kept, %sum : !row
      %narrow = arith.truncf %w : !tile to !weights
      scf.yield %m2, %l2, %narrow : !row, !row, !weights
    }
    "kv.tile_store_rows"(%r#2, %out, %every, %at) : (!weights, memref<?x64xbf16>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // What multiplies scores, and is added to them, can wait until branches have chosen: far tiles are then as they are, and
  // the number of the row comes with the tile. A table has what it would be multiplied by. Masks come before, where the
  // number is known to be positive.
  // CHECK-LABEL: gpu.func @late
  // CHECK-SAME:    (%[[S:[^:]*]]: tensor<64x64xf32, "wgmma">, %{{[^:]*}}: f32, %[[BIAS:[^:]*]]: tensor<64xf32, "rows(wgmma)">, %[[D:[^:]*]]: tensor<256xf32
  // CHECK:         %[[UNITS:.*]] = arith.mulf %[[D]], %{{.*}} fastmath<contract>
  // CHECK:         "kv.table_store"(%[[UNITS]],
  // CHECK:         scf.for
  // CHECK:           %[[LESS:.*]] = arith.select
  // CHECK:           %[[CHOSEN:.*]]:3 = scf.if %{{.*}} -> (tensor<64x64xf32, "wgmma">, f32, tensor<64xf32, "rows(wgmma)">)
  // CHECK:             %[[OF_ROW:.*]] = arith.mulf %[[BIAS]],
  // CHECK:             %[[HELD:.*]] = arith.select %{{.*}}, %{{.*}}, %[[OF_ROW]]
  // CHECK:             %[[ROW:.*]] = arith.subf %[[HELD]], %[[LESS]]
  // CHECK:             scf.yield %[[S]], %{{.*}}, %[[ROW]]
  // CHECK:           } else {
  // CHECK:             %[[B:.*]] = "kv.tile_windows"
  // CHECK:             %[[SCALED:.*]] = arith.mulf %[[S]],
  // CHECK:             %[[NEAR:.*]] = arith.addf %[[SCALED]], %[[B]]
  // CHECK:             scf.yield %[[NEAR]],
  // CHECK:           %[[SEEN:.*]] = scf.if %{{.*}} -> (tensor<64x64xf32, "wgmma">) {
  // CHECK-NEXT:        scf.yield %[[CHOSEN]]#0
  // CHECK:             %[[MASKED:.*]] = "kv.tile_mask"(%[[CHOSEN]]#0,
  // CHECK-NEXT:        scf.yield %[[MASKED]]
  // CHECK:           %[[ROWS:.*]] = "kv.tile_broadcast"(%[[CHOSEN]]#2)
  // CHECK:           %[[FACTOR:.*]] = tensor.splat %[[CHOSEN]]#1
  // CHECK:           %[[PRODUCT:.*]] = arith.mulf %[[SEEN]], %[[FACTOR]]
  // CHECK:           %[[Y:.*]] = arith.addf %[[PRODUCT]], %[[ROWS]]
  // CHECK:           math.exp2 %[[Y]]
  // Of a number that may be negative, or zero, masks hide the product: minus infinity would not stay what it is.
  // SIGN-LABEL: gpu.func @late
  // SIGN:           %[[CHOSEN:.*]]:3 = scf.if
  // SIGN:           %[[SEEN:.*]]:3 = scf.if
  // SIGN-NEXT:        scf.yield %[[CHOSEN]]#0, %[[CHOSEN]]#1, %[[CHOSEN]]#2
  // SIGN:             %[[Y:.*]] = arith.addf %{{.*}}, %{{.*}} fastmath<contract> : tensor<64x64xf32
  // SIGN:             %[[MASKED:.*]] = "kv.tile_mask"(%[[Y]],
  // SIGN:             scf.yield %[[MASKED]],
  gpu.func @late(%s: !tile, %scale: f32, %bias: !row, %distances: tensor<256xf32, "spread:8">, %places: tensor<64xi32, "rows(wgmma)">, %far: i1, %whole: i1, %seen: !masks, %start: !row, %zero: !row, %first: !weights, %n: i32, %out: memref<?x64xbf16>, %every: tensor<64xi1, "rows(wgmma)">) kernel attributes {kv.tiled} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %slack = arith.constant dense<8.0> : !row
    %of_rows = arith.constant dense<1.5> : !row
    %of_tile = arith.constant dense<1.5> : !tile
    %t = "kv.make_table"() {length = 256 : i64} : () -> !llvm.ptr<3>
    "kv.table_store"(%distances, %t) {length = 256 : i64, pitch = 256 : i64, span = 256 : i64} : (tensor<256xf32, "spread:8">, !llvm.ptr<3>) -> ()
    %size = math.absf %scale : f32
    %least = arith.constant 1.0e-30 : f32
    %positive = arith.maxnumf %size, %least : f32
    %scales = tensor.splat %positive : !tile
    %r:3 = scf.for %j = %c0 to %n step %c1 iter_args(%m = %start, %l = %zero, %p = %first) -> (!row, !row, !weights) : i32 {
      %biased = scf.if %far -> (!tile) {
        %product = arith.mulf %s, %scales fastmath<contract> : !tile
        %biases = "kv.tile_broadcast"(%bias) {dimension = 0 : i64} : (!row) -> !tile
        %x = arith.addf %product, %biases fastmath<contract> : !tile
        scf.yield %x : !tile
      } else {
        %product = arith.mulf %s, %scales fastmath<contract> : !tile
        %b = "kv.tile_windows"(%t, %places) {length = 256 : i64} : (!llvm.ptr<3>, tensor<64xi32, "rows(wgmma)">) -> !tile
        %x = arith.addf %product, %b fastmath<contract> : !tile
        scf.yield %x : !tile
      }
      %x = scf.if %whole -> (!tile) {
        scf.yield %biased : !tile
      } else {
        %masked = "kv.tile_mask"(%biased, %seen) : (!tile, !masks) -> !tile
        scf.yield %masked : !tile
      }
      %max = "kv.tile_reduce"(%x) {axis = 1 : i64, kind = "max"} : (!tile) -> !row
      %top = arith.mulf %max, %of_rows : !row
      %bound = arith.addf %m, %slack : !row
      %above = arith.cmpf ogt, %top, %bound : !row
      %m2 = arith.select %above, %top, %m : tensor<64xi1, "rows(wgmma)">, !row
      %moved = arith.subf %m, %m2 : !row
      %alpha = math.exp2 %moved : !row
      %scaled = arith.mulf %x, %of_tile : !tile
      %spread = "kv.tile_broadcast"(%m2) {dimension = 0 : i64} : (!row) -> !tile
      %power = arith.subf %scaled, %spread : !tile
      %w = math.exp2 %power : !tile
      %kept = arith.mulf %l, %alpha : !row
      %sum = "kv.tile_reduce"(%w) {axis = 1 : i64, kind = "add", kv.partial} : (!tile) -> !row
      %l2 = arith.addf %kept, %sum : !row
      %narrow = arith.truncf %w : !tile to !weights
      scf.yield %m2, %l2, %narrow : !row, !row, !weights
    }
    "kv.tile_store_rows"(%r#2, %out, %every, %places) : (!weights, memref<?x64xbf16>, tensor<64xi1, "rows(wgmma)">, tensor<64xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

}

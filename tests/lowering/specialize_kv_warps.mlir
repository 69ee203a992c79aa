// RUN: kv-opt %s --specialize-kv-warps | FileCheck %s
// RUN: sed 's/occupancy = 2/occupancy = 3/' %s | kv-opt --specialize-kv-warps | FileCheck %s --check-prefix=THREE
// RUN: sed 's/512, 1, 1>, kv.schedule = {consumers = 3 : i64, producer = true}/256, 1, 1>, kv.schedule = {consumers = 1 : i64, producer = true}/' %s | kv-opt --specialize-kv-warps | FileCheck %s --check-prefix=STAY
// RUN: sed 's/512, 1, 1>, kv.schedule = {consumers = 3 : i64, producer = true}/512, 1, 1>, kv.schedule = {consumers = 3 : i64, producer = true, registers = false}/' %s | kv-opt --specialize-kv-warps | FileCheck %s --check-prefix=STAY
// RUN: sed 's/512, 1, 1>, kv.schedule = {consumers = 3 : i64, producer = true}/384, 1, 1>, kv.schedule = {consumers = 2 : i64, producer = false}/' %s | kv-opt --specialize-kv-warps | FileCheck %s --check-prefix=ALONE
// RUN: sed -e '/@carried(/,/return/ s/%first = .*/%less = arith.cmpi slt, %j, %n : i32 \
// RUN:     %first = scf.if %less -> (i32) { scf.yield %at : i32 } else { scf.yield %c0 : i32 }/' %s \
// RUN:   | kv-opt --specialize-kv-warps | FileCheck %s --check-prefix=BRANCH
// RUN: sed -e '/@carried(/,/return/ s/%first = .*/%first = scf.for %i = %c0 to %n step %c1 iter_args(%f = %at) -> (i32) : i32 { \
// RUN:     %g = arith.addi %f, %c64 : i32 \
// RUN:     scf.yield %g : i32 }/' %s \
// RUN:   | kv-opt --specialize-kv-warps | FileCheck %s --check-prefix=LOOP
// RUN: %if alone %{ kv-opt %S/Inputs/attention.mlir --kv-pipeline --target=sm_90a --stop-after=specialize-kv-warps --check-semantics-of=specialize-kv-warps --lengths=edges -o /dev/null %}

!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!eight = !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!bytes = !kv.tma<"tiled", f8E4M3FN, array<i64: 1, 16, 1, 128>, array<i64: 16, 1, 128>, 128 : i64>
!map = !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>
!tile = tensor<64x128xbf16, "shared">
!acc = tensor<128x64xf32, "wgmma">
!q = tensor<128x128xbf16, "shared">

gpu.module @kernels {
  // By TMA: one warp of the producer starts the copies, in a loop that carries nothing; the consumers keep the rest.
  // Registers go from the producer to the consumers.
  // CHECK-LABEL: gpu.func @tma
  // CHECK:         %[[KEYS:.*]] = "kv.make_stages"
  // CHECK:         %[[PRODUCER:.*]] = "kv.is_role"() {role = "producer"}
  // CHECK:         scf.if %[[PRODUCER]] {
  // CHECK-NEXT:      "kv.set_registers"() {action = "decrease", count = 40 : i64}
  // CHECK-NEXT:      %[[WARP:.*]] = "kv.is_role"() {role = "producer_warp_0"}
  // CHECK-NEXT:      scf.if %[[WARP]] {
  // CHECK-NEXT:        scf.for %[[J:.*]] = %{{.*}} to %{{.*}} step %{{.*}} : i32 {
  // CHECK-NEXT:          %[[FIRST:.*]] = arith.muli %[[J]],
  // CHECK-NEXT:          "kv.producer_acquire"(%[[KEYS]], %[[J]])
  // CHECK-NEXT:          "kv.copy_start"(%[[KEYS]], %[[J]], {{.*}}, %[[FIRST]],
  // CHECK:         } else {
  // CHECK-NEXT:      "kv.set_registers"() {action = "increase", count = 232 : i64}
  // CHECK-NEXT:      scf.for {{.*}} iter_args
  // CHECK-NOT:         kv.copy_start
  // CHECK:             "kv.consumer_wait"(%[[KEYS]]
  // CHECK:             "kv.consumer_release"(%[[KEYS]]
  // CHECK:         } {kv.roles}
  gpu.func @tma(%c: !cache, %n: i32, %q: !q, %start: !acc, %m: !map) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64, producer = true}} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c64 = arith.constant 64 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %start) -> (!acc) : i32 {
      %first = arith.muli %j, %c64 : i32
      "kv.producer_acquire"(%keys, %j) : (!kv.stages, i32) -> ()
      "kv.copy_start"(buffer = %keys, n = %j, cache = %c, batch = %c0, head = %c0, first = %first, count = %n,
          descriptor = %m) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, !map) -> ()
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !tile
      %s = "kv.dot"(%q, %k, %o) {transpose_b = true} : (!q, !tile, !acc) -> !acc
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      scf.yield %s : !acc
    }
    gpu.return
  }

  // A warp whose copies are all of constant tiles does not wait for the kernels ahead; everybody else does, where it begins.
  // CHECK-LABEL: gpu.func @ahead
  // CHECK-NOT:     nvvm.griddepcontrol
  // CHECK:         scf.if %{{.*}} {
  // CHECK:           %[[FIRST:.*]] = "kv.is_role"() {role = "producer_warp_0"}
  // CHECK-NEXT:      scf.if %[[FIRST]] {
  // CHECK-NEXT:        scf.for
  // CHECK:           %[[SECOND:.*]] = "kv.is_role"() {role = "producer_warp_1"}
  // CHECK-NEXT:      scf.if %[[SECOND]] {
  // CHECK-NEXT:        nvvm.griddepcontrol wait
  // CHECK-NEXT:        nvvm.griddepcontrol launch_dependents
  // CHECK-NEXT:        scf.for
  // CHECK:         } else {
  // CHECK-NEXT:      "kv.set_registers"
  // CHECK-NEXT:      nvvm.griddepcontrol wait
  // CHECK-NEXT:      nvvm.griddepcontrol launch_dependents
  // CHECK-NEXT:      scf.for
  // CHECK-NOT:     nvvm.griddepcontrol
  // CHECK:         gpu.return
  gpu.func @ahead(%c: !cache, %n: i32, %start: !acc, %m: !map) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64, producer = true}} {
    %weights = "kv.make_stages"() {buffer_name = "weights", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %rows = "kv.make_stages"() {buffer_name = "rows", copy = "tma", stages = 2 : i64, tile = !q} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    nvvm.griddepcontrol wait
    nvvm.griddepcontrol launch_dependents
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %start) -> (!acc) : i32 {
      "kv.producer_acquire"(%weights, %j) : (!kv.stages, i32) -> ()
      "kv.copy_start"(buffer = %weights, n = %j, cache = %c, batch = %c0, head = %c0, first = %j, count = %n,
          descriptor = %m) {constant, first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, !map) -> ()
      %w = "kv.consumer_wait"(%weights, %j) : (!kv.stages, i32) -> !tile
      "kv.producer_acquire"(%rows, %j) : (!kv.stages, i32) -> ()
      "kv.copy_start"(buffer = %rows, n = %j, cache = %c, batch = %c0, head = %c0, first = %j, count = %n,
          descriptor = %m) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, !map) -> ()
      %x = "kv.consumer_wait"(%rows, %j) : (!kv.stages, i32) -> !q
      %s = "kv.dot"(%x, %w, %o) {transpose_b = true} : (!q, !tile, !acc) -> !acc
      "kv.consumer_release"(%weights, %j) : (!kv.stages, i32) -> ()
      "kv.consumer_release"(%rows, %j) : (!kv.stages, i32) -> ()
      scf.yield %s : !acc
    }
    gpu.return
  }

  // Tiles that are made before the loop, and what comes behind it, are the consumers'; scalars are everybody's.
  // CHECK-LABEL: gpu.func @around
  // CHECK:         %[[FIRST:.*]] = arith.muli
  // CHECK-NEXT:    kv.is_role
  // CHECK-NOT:     tensor.splat
  // CHECK:         } else {
  // CHECK:           tensor.splat
  // CHECK-NEXT:      %[[SUMS:.*]] = scf.for
  // CHECK:           "kv.tile_store_rows"(%[[SUMS]],
  // CHECK-NEXT:    } {kv.roles}
  gpu.func @around(%c: !cache, %n: i32, %q: !q, %x: f32, %m: !map, %out: memref<?x64xf32>, %every: tensor<128xi1, "rows(wgmma)">, %rows: tensor<128xi32, "rows(wgmma)">) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64, producer = true}} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c64 = arith.constant 64 : i32
    %start = tensor.splat %x : !acc
    %last = arith.muli %n, %c64 : i32
    %r = scf.for %j = %c0 to %last step %c1 iter_args(%o = %start) -> (!acc) : i32 {
      "kv.producer_acquire"(%keys, %j) : (!kv.stages, i32) -> ()
      "kv.copy_start"(buffer = %keys, n = %j, cache = %c, batch = %c0, head = %c0, first = %j, count = %n,
          descriptor = %m) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, !map) -> ()
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !tile
      %s = "kv.dot"(%q, %k, %o) {transpose_b = true} : (!q, !tile, !acc) -> !acc
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      scf.yield %s : !acc
    }
    "kv.tile_store_rows"(%r, %out, %every, %rows) : (!acc, memref<?x64xf32>, tensor<128xi1, "rows(wgmma)">, tensor<128xi32, "rows(wgmma)">) -> ()
    gpu.return
  }

  // Other copies are of all the producer's threads, which need registers for addresses.
  // CHECK-LABEL: gpu.func @cp_async
  // CHECK:         "kv.set_registers"() {action = "decrease", count = 56 : i64}
  // CHECK-NOT:     producer_warp
  // CHECK:         "kv.copy_start"
  // CHECK:         } else {
  // CHECK-NEXT:      "kv.set_registers"() {action = "increase", count = 224 : i64}
  gpu.func @cp_async(%c: !cache, %n: i32, %q: tensor<128x128xbf16, "shared">, %start: tensor<128x64xf32, "wgmma">, %m: !map) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64, producer = true}} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "cp_async", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c64 = arith.constant 64 : i32
    %r:2 = scf.for %j = %c0 to %n step %c1 iter_args(%o = %start, %at = %c0) -> (tensor<128x64xf32, "wgmma">, i32) : i32 {
      %first = arith.muli %j, %c64 : i32
      "kv.producer_acquire"(%keys, %j) : (!kv.stages, i32) -> ()
      "kv.copy_start"(buffer = %keys, n = %j, cache = %c, batch = %c0, head = %c0, first = %first, count = %n) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32) -> ()
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !tile
      %s = "kv.dot"(%q, %k, %o) {transpose_b = true} : (tensor<128x128xbf16, "shared">, !tile, tensor<128x64xf32, "wgmma">) -> tensor<128x64xf32, "wgmma">
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      %next = arith.addi %at, %c64 : i32
      scf.yield %s, %next : tensor<128x64xf32, "wgmma">, i32
    }
    gpu.return
  }

  // Of two warpgroups that convert what boxes bring each has a buffer.
  // CHECK-LABEL: gpu.func @two_buffers
  // CHECK:         %[[KEYS:.*]] = "kv.make_stages"() {buffer_name = "keys"
  // CHECK:         %[[VALUES:.*]] = "kv.make_stages"() {buffer_name = "values"
  // CHECK:         %[[FIRST:.*]] = "kv.is_role"() {role = "producer_group_0"}
  // CHECK-NEXT:    scf.if %[[FIRST]] {
  // CHECK-NOT:       %[[VALUES]]
  // CHECK:           "kv.copy_start"(%[[KEYS]],
  // CHECK:         %[[SECOND:.*]] = "kv.is_role"() {role = "producer_group_1"}
  // CHECK-NEXT:    scf.if %[[SECOND]] {
  // CHECK-NOT:       %[[KEYS]]
  // CHECK:           "kv.copy_start"(%[[VALUES]],
  // CHECK:         } else {
  gpu.func @two_buffers(%c: !eight, %n: i32, %q: tensor<64x128xbf16, "shared">, %start: tensor<64x64xf32, "wgmma">, %m: !bytes) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 1 : i64, producer = true, producers = 2 : i64}} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "staged", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %values = "kv.make_stages"() {buffer_name = "values", copy = "staged", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c64 = arith.constant 64 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %start) -> (tensor<64x64xf32, "wgmma">) : i32 {
      %first = arith.muli %j, %c64 : i32
      "kv.producer_acquire"(%keys, %j) : (!kv.stages, i32) -> ()
      "kv.copy_start"(buffer = %keys, n = %j, cache = %c, batch = %c0, head = %c0, first = %first, count = %n,
          descriptor = %m, pages = %c0) {first_column = 0 : i64} : (!kv.stages, i32, !eight, i32, i32, i32, i32, !bytes, i32) -> ()
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !tile
      %s = "kv.dot"(%q, %k, %o) {transpose_b = true} : (tensor<64x128xbf16, "shared">, !tile, tensor<64x64xf32, "wgmma">) -> tensor<64x64xf32, "wgmma">
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      "kv.producer_acquire"(%values, %j) : (!kv.stages, i32) -> ()
      "kv.copy_start"(buffer = %values, n = %j, cache = %c, batch = %c0, head = %c0, first = %first, count = %n,
          descriptor = %m, pages = %c0) {first_column = 0 : i64} : (!kv.stages, i32, !eight, i32, i32, i32, i32, !bytes, i32) -> ()
      %v = "kv.consumer_wait"(%values, %j) : (!kv.stages, i32) -> !tile
      %t = "kv.dot"(%q, %v, %s) {transpose_b = true} : (tensor<64x128xbf16, "shared">, !tile, tensor<64x64xf32, "wgmma">) -> tensor<64x64xf32, "wgmma">
      "kv.consumer_release"(%values, %j) : (!kv.stages, i32) -> ()
      scf.yield %t : tensor<64x64xf32, "wgmma">
    }
    gpu.return
  }

  // Two blocks that share a multiprocessor have half of its registers each, three a third.
  // CHECK-LABEL: gpu.func @two_blocks
  // CHECK:         "kv.set_registers"() {action = "decrease", count = 80 : i64}
  // CHECK:         "kv.set_registers"() {action = "increase", count = 176 : i64}
  // THREE-LABEL: gpu.func @two_blocks
  // THREE:         "kv.set_registers"() {action = "decrease", count = 40 : i64}
  // THREE:         "kv.set_registers"() {action = "increase", count = 120 : i64}
  gpu.func @two_blocks(%c: !eight, %n: i32, %q: tensor<64x128xbf16, "shared">, %start: tensor<64x64xf32, "wgmma">, %m: !bytes) kernel attributes {kv.tiled, kv.block = array<i32: 256, 1, 1>, kv.schedule = {consumers = 1 : i64, producer = true, occupancy = 2 : i64}} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "staged", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c64 = arith.constant 64 : i32
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%o = %start) -> (tensor<64x64xf32, "wgmma">) : i32 {
      %first = arith.muli %j, %c64 : i32
      "kv.producer_acquire"(%keys, %j) : (!kv.stages, i32) -> ()
      "kv.copy_start"(buffer = %keys, n = %j, cache = %c, batch = %c0, head = %c0, first = %first, count = %n,
          descriptor = %m, pages = %c0) {first_column = 0 : i64} : (!kv.stages, i32, !eight, i32, i32, i32, i32, !bytes, i32) -> ()
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !tile
      %s = "kv.dot"(%q, %k, %o) {transpose_b = true} : (tensor<64x128xbf16, "shared">, !tile, tensor<64x64xf32, "wgmma">) -> tensor<64x64xf32, "wgmma">
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      scf.yield %s : tensor<64x64xf32, "wgmma">
    }
    gpu.return
  }

  // With one consumer every thread has the most registers that there are from the start, and a schedule may leave them as
  // they are, for other blocks. Left alone: a schedule without a producer.
  // CHECK-LABEL: gpu.func @three_consumers
  // CHECK:         "kv.set_registers"() {action = "decrease", count = 32 : i64}
  // CHECK:         "kv.set_registers"() {action = "increase", count = 160 : i64}
  // STAY-LABEL:  gpu.func @three_consumers
  // STAY:          kv.is_role
  // STAY-NOT:      kv.set_registers
  // STAY:          gpu.return
  // ALONE-LABEL: gpu.func @three_consumers
  // ALONE-NOT:     kv.is_role
  // ALONE-NOT:     kv.set_registers
  // ALONE:         gpu.return
  gpu.func @three_consumers(%c: !cache, %n: i32, %q: tensor<192x128xbf16, "shared">, %start: tensor<192x64xf32, "wgmma">, %m: !map) kernel attributes {kv.tiled, kv.block = array<i32: 512, 1, 1>, kv.schedule = {consumers = 3 : i64, producer = true}} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c64 = arith.constant 64 : i32
    %r:2 = scf.for %j = %c0 to %n step %c1 iter_args(%o = %start, %at = %c0) -> (tensor<192x64xf32, "wgmma">, i32) : i32 {
      %first = arith.muli %j, %c64 : i32
      "kv.producer_acquire"(%keys, %j) : (!kv.stages, i32) -> ()
      "kv.copy_start"(buffer = %keys, n = %j, cache = %c, batch = %c0, head = %c0, first = %first, count = %n,
          descriptor = %m) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, !map) -> ()
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !tile
      %s = "kv.dot"(%q, %k, %o) {transpose_b = true} : (tensor<192x128xbf16, "shared">, !tile, tensor<192x64xf32, "wgmma">) -> tensor<192x64xf32, "wgmma">
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      %next = arith.addi %at, %c64 : i32
      scf.yield %s, %next : tensor<192x64xf32, "wgmma">, i32
    }
    gpu.return
  }

  // A number that the loop carries and a copy needs is carried by the producer's loop too, and nothing else is.
  // CHECK-LABEL: gpu.func @carried
  // CHECK:         "kv.is_role"() {role = "producer_warp_0"}
  // CHECK:         scf.for {{.*}} iter_args(%[[AT:.*]] = %{{.*}}) -> (i32) : i32 {
  // CHECK:           %[[FIRST:.*]] = arith.addi %[[AT]],
  // CHECK:           "kv.copy_start"({{.*}}, %[[FIRST]],
  // CHECK:           %[[NEXT:.*]] = arith.addi %[[AT]],
  // CHECK:           scf.yield %[[NEXT]] : i32
  // A branch that only computes numbers is the producer's too.
  // BRANCH-LABEL: gpu.func @carried
  // BRANCH:         "kv.is_role"() {role = "producer"}
  // BRANCH:           scf.for %{{.*}} iter_args(%[[AT:.*]] = %c0_i32) -> (i32)
  // BRANCH:             %[[FIRST:.*]] = scf.if %{{.*}} -> (i32) {
  // BRANCH-NEXT:          scf.yield %[[AT]] : i32
  // BRANCH:             "kv.copy_start"({{.*}}, %[[FIRST]], %{{[^,]*}}, %{{[^,]*}}) {
  // Left alone: a copy whose address is a result of another loop.
  // LOOP-LABEL: gpu.func @carried
  // LOOP-NOT:     kv.is_role
  // LOOP-NOT:     kv.set_registers
  // LOOP:         gpu.return
  gpu.func @carried(%c: !cache, %n: i32, %q: tensor<128x128xbf16, "shared">, %start: tensor<128x64xf32, "wgmma">, %m: !map) kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64, producer = true}} {
    %keys = "kv.make_stages"() {buffer_name = "keys", copy = "tma", stages = 2 : i64, tile = !tile} : () -> !kv.stages
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c64 = arith.constant 64 : i32
    %r:2 = scf.for %j = %c0 to %n step %c1 iter_args(%o = %start, %at = %c0) -> (tensor<128x64xf32, "wgmma">, i32) : i32 {
      %first = arith.addi %at, %c64 : i32
      "kv.producer_acquire"(%keys, %j) : (!kv.stages, i32) -> ()
      "kv.copy_start"(buffer = %keys, n = %j, cache = %c, batch = %c0, head = %c0, first = %first, count = %n,
          descriptor = %m) {first_column = 0 : i64} : (!kv.stages, i32, !cache, i32, i32, i32, i32, !map) -> ()
      %k = "kv.consumer_wait"(%keys, %j) : (!kv.stages, i32) -> !tile
      %s = "kv.dot"(%q, %k, %o) {transpose_b = true} : (tensor<128x128xbf16, "shared">, !tile, tensor<128x64xf32, "wgmma">) -> tensor<128x64xf32, "wgmma">
      "kv.consumer_release"(%keys, %j) : (!kv.stages, i32) -> ()
      %next = arith.addi %at, %c64 : i32
      scf.yield %s, %next : tensor<128x64xf32, "wgmma">, i32
    }
    gpu.return
  }

  // Left alone: a kernel that copies nothing.
  // CHECK-LABEL: gpu.func @no_copies
  // CHECK-NOT:     kv.is_role
  // CHECK:         gpu.return
  gpu.func @no_copies() kernel attributes {kv.tiled, kv.block = array<i32: 384, 1, 1>, kv.schedule = {consumers = 2 : i64, producer = true}} {
    gpu.return
  }
}

// RUN: kv-opt %s --extend=%S/Inputs/pick_op.py --verify-roundtrip | FileCheck %s
// RUN: kv-opt %s --extend=%S/Inputs/pick_op.py --named-operands | FileCheck %s --check-prefix=NAMED
// RUN: kv-opt %s --extend=%S/Inputs/pick_op.py --named-operands | kv-opt --extend=%S/Inputs/pick_op.py | FileCheck %s
// RUN: kv-opt %s --extend=%S/Inputs/pick_op.py --mlir-print-debuginfo | FileCheck %s --check-prefix=LINES

// Operands by name: their places and operandSegmentSizes follow from the declaration of the operation.

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!latent = !kv.collection<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>
!rows = memref<?x8x128xbf16>

// An optional operand that is not there is left out; the printed form has names where sizes would have to be counted.
// CHECK-LABEL: func.func @optional(
// CHECK-SAME:    %[[L:.*]]: !kv.collection<{{.*}}>, %[[C:.*]]: !kv.collection<{{.*}}>, %[[I:.*]]: i32, %[[R:.*]]: memref<?x1x576xbf16>, %[[K:.*]]: memref<?x8x128xbf16>, %[[V:.*]]: memref<?x8x128xbf16>, %[[O:.*]]: memref<?xi32>)
// CHECK:         "kv.append"(%[[L]], %[[I]], %[[R]], %[[O]]) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 0, 0, 0, 0>} : (!kv.collection{{.*}}, i32, memref<?x1x576xbf16>, memref<?xi32>) -> ()
// CHECK:         "kv.append"(%[[C]], %[[I]], %[[K]], %[[O]], %[[V]]) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 0, 0, 0>} : (!kv.collection{{.*}}, i32, memref<?x8x128xbf16>, memref<?xi32>, memref<?x8x128xbf16>) -> ()
// NAMED-LABEL: func.func @optional(
// NAMED:         "kv.append"(collection = %{{.*}}, layer = %[[I:.*]], key = %{{.*}}, row_offsets = %[[O:[^ ]*]]) : (
// NAMED:         "kv.append"(collection = %{{.*}}, layer = %[[I]], key = %{{.*}}, row_offsets = %[[O]], value = %{{[^ ]*}}) : (
func.func @optional(%l: !latent, %c: !pool, %i: i32, %r: memref<?x1x576xbf16>, %k: !rows, %v: !rows, %o: memref<?xi32>) {
  "kv.append"(collection = %l, layer = %i, key = %r, row_offsets = %o) : (!latent, i32, memref<?x1x576xbf16>, memref<?xi32>) -> ()
  "kv.append"(collection = %c, layer = %i, key = %k, row_offsets = %o, value = %v)
    : (!pool, i32, !rows, memref<?xi32>, !rows) -> ()
  return
}

// Names stand in any order, and types as the names do; comments and lines are anywhere.
// CHECK-LABEL: func.func @any_order(
// CHECK-SAME:    %[[C:.*]]: !kv.collection<{{.*}}>, %[[I:.*]]: i32, %[[K:.*]]: memref<?x8x128xbf16>, %[[V:.*]]: memref<?x8x128xbf16>, %[[O:.*]]: memref<?xi32>)
// CHECK:         "kv.append"(%[[C]], %[[I]], %[[K]], %[[O]], %[[V]]) {mark = "key = %x, // {", operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 0, 0, 0>} : (!kv.collection{{.*}}, i32, memref<?x8x128xbf16>, memref<?xi32>, memref<?x8x128xbf16>) -> ()
// Locations are those of the text.
// LINES:         "kv.append"{{.*}} {mark = {{.*}} loc(#[[APPEND:.*]])
// LINES:         #[[APPEND]] = loc("{{.*}}named_operands.mlir":[[#@LINE+2]]:3)
func.func @any_order(%c: !pool, %i: i32, %k: !rows, %v: !rows, %o: memref<?xi32>) {
  "kv.append"( // "kv.append"(nothing = %here)
      row_offsets = %o, value = %v,
      key // the keys, of
        = %k, collection = %c,
      layer = %i // the layer
  ) {mark = "key = %x, // {"} : (memref<?xi32>, !rows, !rows, // the rows
       !pool, i32) -> ()
  return
}

// A list has brackets; without values it is empty, or left out. The list of one may be the first operand.
// CHECK-LABEL: func.func @lists
// CHECK:         "kv.tma_load_box"(%[[M:.*]], %[[D:.*]], %[[B:.*]], %[[X:.*]], %[[Y:.*]], %[[X]], %[[Y]]) {cta_group = 1 : i64, multicast = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 0, 4>}
// CHECK-COUNT-3: "kv.pick"(%[[X]]) {operandSegmentSizes = array<i32: 1, 0, 0>} : (i32) -> i32
// CHECK:         "kv.pick"(%[[X]], %{{.*}}) {operandSegmentSizes = array<i32: 1, 0, 1>} : (i32, f32) -> i32
// NAMED-LABEL: func.func @lists
// NAMED:         "kv.tma_load_box"({{.*}}, coordinates = [%[[X:.*]], %[[Y:.*]], %[[X]], %[[Y]]]) {cta_group = 1 : i64, multicast = 0 : i64} :
// NAMED-COUNT-3: "kv.pick"(number = %[[X]]) : (i32) -> i32
// NAMED:         "kv.pick"(number = %[[X]], otherwise = %{{.*}}) : (i32, f32) -> i32
func.func @lists(%m: !kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>, %d: !llvm.ptr<3>, %x: i32, %y: i32, %z: f32) {
  "kv.tma_load_box"(map = %m, destination = %d, barrier = %d, coordinates = [%x, %y, %x, %y]) {cta_group = 1 : i64, multicast = 0 : i64}
    : (!kv.tma<"tiled", bf16, array<i64: 1, 16, 1, 64>, array<i64: 16, 1, 128>, 128 : i64>, !llvm.ptr<3>, !llvm.ptr<3>, i32, i32, i32, i32) -> ()
  %0 = "kv.pick"(number = %x) : (i32) -> i32
  %1 = "kv.pick"(choices = [ ], number = %x) {} : (i32) -> i32
  %2 = "kv.pick"(number = %x, choices = []) : (i32) -> i32
  %3 = "kv.pick"(number = %x, choices = [], otherwise = %z) : (i32, f32) -> i32
  return
}

// Operations whose number of operands says it all may have names too, and never carry sizes.
// CHECK-LABEL: func.func @without_sizes
// CHECK:         "kv.load"(%[[C:.*]], %[[B:[^,]*]], %[[B]], %[[T:[^,]*]], %[[B]]) {width = 8 : i64} :
// CHECK:         "kv.load"(%[[C]], %[[B]], %[[B]], %[[T]], %[[B]], %[[P:.*]]) {width = 8 : i64} :
// NAMED-LABEL: func.func @without_sizes
// NAMED:         "kv.load"(%{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}) {
func.func @without_sizes(%c: !cache, %b: i32, %t: i32, %p: i32) -> (vector<8xbf16>, vector<8xbf16>) {
  %0 = "kv.load"(cache = %c, batch = %b, head = %b, token = %t, dim = %b) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
  %1 = "kv.load"(page = %p, cache = %c, batch = %b, head = %b, token = %t, dim = %b) {width = 8 : i64} : (i32, !cache, i32, i32, i32, i32) -> vector<8xbf16>
  return %0, %1 : vector<8xbf16>, vector<8xbf16>
}

// Operations of extensions, and results among several.
// CHECK-LABEL: func.func @of_an_extension
// CHECK:         %[[R:.*]]:2 = call @pair
// CHECK:         "kv.pick"(%{{[^,]*}}, %[[R]]#1, %[[R]]#0, %{{[^,]*}}) {operandSegmentSizes = array<i32: 1, 2, 1>} : (i32, i32, i32, f32) -> i32
// NAMED-LABEL: func.func @of_an_extension
// NAMED:         "kv.pick"(number = %{{[^,]*}}, choices = [%{{.*}}#1, %{{.*}}#0], otherwise = %{{.*}}) : (i32, i32, i32, f32) -> i32
func.func private @pair() -> (i32, i32)
func.func @of_an_extension(%n: i32, %x: f32) -> i32 {
  %r:2 = func.call @pair() : () -> (i32, i32)
  %0 = "kv.pick"(otherwise = %x, choices = [%r#1, %r#0], number = %n) : (f32, i32, i32, i32) -> i32
  return %0 : i32
}

// RUN: kv-opt %s --verify-roundtrip --verify-kv --named-operands | FileCheck %s

// CHECK-LABEL: func.func @tables
// CHECK:         %[[T:.*]] = "kv.make_table"() {length = 256 : i64} : () -> !llvm.ptr<3>
// CHECK:         "kv.table_store"(%{{.*}}, %[[T]]) {{.*}} : (tensor<256xf32, "spread:8">, !llvm.ptr<3>) -> ()
// CHECK:         "kv.tile_windows"(%[[T]], %{{.*}}) {length = 256 : i64} : (!llvm.ptr<3>, tensor<128xi32, "rows(wgmma)">) -> tensor<128x128xf32, "wgmma">
func.func @tables(%x: tensor<256xf32, "spread:8">, %i: tensor<128xi32, "rows(wgmma)">) {
  %t = "kv.make_table"() {length = 256 : i64} : () -> !llvm.ptr<3>
  "kv.table_store"(%x, %t) {length = 256 : i64, pitch = 256 : i64, span = 256 : i64} : (tensor<256xf32, "spread:8">, !llvm.ptr<3>) -> ()
  %w = "kv.tile_windows"(%t, %i) {length = 256 : i64} : (!llvm.ptr<3>, tensor<128xi32, "rows(wgmma)">) -> tensor<128x128xf32, "wgmma">
  return
}

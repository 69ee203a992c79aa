// RUN: kv-opt %s --verify-diagnostics

func.func @make_table() {
  // expected-error @below {{'kv.make_table' op length must be a positive multiple of 128, got 100 : i64}}
  "kv.make_table"() {length = 100 : i64} : () -> !llvm.ptr<3>
  return
}

func.func @table_store(%x: tensor<256xf16>, %t: !llvm.ptr<3>, %x2: tensor<256xf32>, %t2: !llvm.ptr<1>) {
  // expected-error @below {{'kv.table_store' op the operand must be a vector of f32, got tensor<256xf16>}}
  "kv.table_store"(%x, %t) {length = 256 : i64, pitch = 256 : i64, span = 256 : i64} : (tensor<256xf16>, !llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.table_store' op pitch must be 1 to span, span divide the operand's elements, and the table have pitch elements of each, got span = 128, pitch = 72, 256 elements and length = 128}}
  "kv.table_store"(%x2, %t) {length = 128 : i64, pitch = 72 : i64, span = 128 : i64} : (tensor<256xf32>, !llvm.ptr<3>) -> ()
  // expected-error @below {{'kv.table_store' op place must be !llvm.ptr<3>, got !llvm.ptr<1>}}
  "kv.table_store"(%x2, %t2) {length = 256 : i64, pitch = 256 : i64, span = 256 : i64} : (tensor<256xf32>, !llvm.ptr<1>) -> ()
  return
}

func.func @tile_windows(%t: !llvm.ptr<3>, %i: tensor<64xi32>, %i2: tensor<32xi32>) {
  // expected-error @below {{'kv.tile_windows' op the result must be a tile of rank 2 of f32, got tensor<64x128xf16>}}
  "kv.tile_windows"(%t, %i) {length = 256 : i64} : (!llvm.ptr<3>, tensor<64xi32>) -> tensor<64x128xf16>
  // expected-error @below {{'kv.tile_windows' op the starts must be 64xi32, got tensor<32xi32>}}
  "kv.tile_windows"(%t, %i2) {length = 256 : i64} : (!llvm.ptr<3>, tensor<32xi32>) -> tensor<64x128xf32>
  // expected-error @below {{'kv.tile_windows' op length must be at least a row's 192 elements, got 128}}
  "kv.tile_windows"(%t, %i) {length = 128 : i64} : (!llvm.ptr<3>, tensor<64xi32>) -> tensor<64x192xf32>
  return
}

func.func @tile_index() {
  // expected-error @below {{'kv.tile_index' op the result has no layout that is known: columns must be a positive multiple of the 128}}
  "kv.tile_index"() : () -> tensor<100xi32, "spread:4">
  return
}

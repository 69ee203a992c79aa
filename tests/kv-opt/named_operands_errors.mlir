// RUN: kv-opt %s --split-input-file --verify-diagnostics

// What is said of names that do not fit the declaration of an operation. They are found before MLIR's parser, so no function is around.

// expected-error @below {{'kv.append' op has no operand 'keys'; its operands are collection, layer, key, row_offsets, value (optional), key_scale (optional), value_scale (optional)}}
"kv.append"(collection = %c, layer = %i, keys = %i) : (i32, i32, i32) -> ()

// -----

// expected-error @below {{'kv.append' op needs 'collection', 'row_offsets'; its operands are collection, layer, }}
"kv.append"(layer = %i, key = %i) : (i32, i32) -> ()

// -----

// expected-error @below {{'kv.append' op has operand 'layer' twice}}
"kv.append"(layer = %i, layer = %i) : (i32, i32) -> ()

// -----

// expected-error @below {{'kv.append' op must have as many types as operands, 4, got 3}}
"kv.append"(collection = %c, layer = %i, key = %i, row_offsets = %i) : (i32, memref<?x8xi32, strided<[?, 1]>>, i32) -> ()

// -----

// expected-error @below {{'kv.key_cache' op must have as many types as operands, 2, got 3}}
%0 = "kv.key_cache"(collection = %c, layer = %i) : (!kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>, i32, i32) -> i32

// -----

// expected-error @below {{'kv.tile_store_direct' op takes a list for 'masks': write masks = [%i]}}
"kv.tile_store_direct"(source = %i, buffer = %i, masks = %i) : (i32, i32, i32) -> ()

// -----

// expected-error @below {{'kv.append' op takes one value for 'layer': write layer = %value, without brackets}}
"kv.append"(collection = %i, layer = [%i]) : (i32, i32) -> ()

// -----

// expected-error @below {{expected the name of an operand: all operands have names, or none}}
"kv.append"(%i, layer = %i) : (i32, i32) -> ()

// -----

// expected-error @below {{expected the name of an operand: all operands have names, or none}}
"kv.append"(layer = %i, %i) : (i32, i32) -> ()

// -----

// expected-error @below {{operands of 'kv.append' have names, which say the sizes: leave out operandSegmentSizes}}
"kv.append"(collection = %i, layer = %i, key = %i, row_offsets = %i) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 0, 0, 0>} : (i32, i32, i32, i32) -> ()

// -----

// expected-error @below {{operands have names in operations of kv, and 'arith.addi' is none}}
%0 = "arith.addi"(lhs = %i, rhs = %i) : (i32, i32) -> i32

// -----

// expected-error @below {{operands have names in operations of kv, and 'kv.apend' is none; did you mean 'kv.append'?}}
"kv.apend"(layer = %i) : (i32) -> ()

// -----

// expected-error @below {{expected a value (%name), or values in brackets}}
"kv.append"(layer = 3) : (i32) -> ()

// -----

// expected-error @below {{expected ',' or ')' behind an operand}}
"kv.append"(layer = %i key = %i) : (i32) -> ()

// -----

// expected-error @+3 {{expected attributes or ':' behind the operands of 'kv.append'}}
"kv.append"(collection = %i, layer = %i, key = %i, row_offsets = %i)

// -----

// What MLIR finds after that has the line of the text.
func.func @lines(%c: !kv.collection<"paged", bf16, 1 : i64, 64 : i64, true, 16 : i64, none, 1 : i64>, %i: i32) {
  "kv.append"(row_offsets = %i, collection = %c,
    // expected-error @below {{use of undeclared SSA value name}}
    key = %nothing,
    layer = %i) : (i32, !kv.collection<"paged", bf16, 1 : i64, 64 : i64, true, 16 : i64, none, 1 : i64>, i32, i32) -> ()
  return
}

// RUN: kv-opt %s --split-input-file --verify-diagnostics

// Types whose parameters do not fit together, and names that the dialect does not have. One chunk a rule.

// expected-error @below {{'func.func' op argument #0 has a malformed type: kind must be one of paged, continuous, fa3, got 'pagd'; got !kv.cache<"pagd", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
func.func private @type(!kv.cache<"pagd", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>)

// -----

// expected-error @below {{'func.func' op argument #0 has a malformed type: num_heads * head_size, page_size and granularity must be below 2^31, got 65536 * 65536, 16 and 1}}
func.func private @type(!kv.cache<"paged", bf16, 65536 : i64, 65536 : i64, false, 16 : i64, none, 1 : i64>)

// -----

// expected-error @below {{'func.func' op argument #0 has a malformed type: num_heads and head_size must be positive, got 0 and 128; got !kv.cache<"paged", bf16, 0 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
func.func private @type(!kv.cache<"paged", bf16, 0 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>)

// -----

// expected-error @below {{'func.func' op argument #0 has a malformed type: page_size of a paged cache must be positive, got 0; got !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>}}
func.func private @type(!kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>)

// -----

// expected-error @below {{'func.func' op argument #0 has a malformed type: page_size of a continuous cache must be 0, got 16; got !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
func.func private @type(!kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>)

// -----

// expected-error @below {{'func.func' op argument #0 has a malformed type: num_heads of an MLA cache must be 1, got 8; got !kv.cache<"paged", bf16, 8 : i64, 128 : i64, true, 16 : i64, none, 1 : i64>}}
func.func private @type(!kv.cache<"paged", bf16, 8 : i64, 128 : i64, true, 16 : i64, none, 1 : i64>)

// -----

// expected-error @below {{'func.func' op argument #0 has a malformed type: is_mla must be false for an fa3 cache, whose blocks always hold K and V; got !kv.cache<"fa3", bf16, 1 : i64, 128 : i64, true, 16 : i64, none, 1 : i64>}}
func.func private @type(!kv.cache<"fa3", bf16, 1 : i64, 128 : i64, true, 16 : i64, none, 1 : i64>)

// -----

// expected-error @below {{'func.func' op argument #0 has a malformed type: scales need a paged cache, got a continuous one; got !kv.cache<"continuous", i8, 8 : i64, 128 : i64, false, 0 : i64, f32, 32 : i64>}}
func.func private @type(!kv.cache<"continuous", i8, 8 : i64, 128 : i64, false, 0 : i64, f32, 32 : i64>)

// -----

// expected-error @below {{'func.func' op argument #0 has a malformed type: scale dtype must be one of f32, f16, bf16, f8e8m0, got i32; got !kv.cache<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, i32, 32 : i64>}}
func.func private @type(!kv.cache<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, i32, 32 : i64>)

// -----

// expected-error @below {{'func.func' op argument #0 has a malformed type: a quantized cache must store an 8-bit type, got bf16; got !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>}}
func.func private @type(!kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>)

// -----

// expected-error @below {{'func.func' op argument #0 has a malformed type: granularity must be positive, got 0; got !kv.cache<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, f32, 0 : i64>}}
func.func private @type(!kv.cache<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, f32, 0 : i64>)

// -----

// expected-error @below {{'func.func' op argument #0 has a malformed type: cache dtype must be f32, f16, bf16, f8e4m3, f8e5m2, i8, i16 or i32, got i64; got !kv.cache<"paged", i64, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
func.func private @type(!kv.cache<"paged", i64, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>)

// -----

// expected-error @below {{'func.func' op argument #0 has a malformed type: is_mla must be true or false, got 3 : i64; got !kv.cache<"paged", bf16, 8 : i64, 128 : i64, 3 : i64, 16 : i64, none, 1 : i64>}}
func.func private @type(!kv.cache<"paged", bf16, 8 : i64, 128 : i64, 3 : i64, 16 : i64, none, 1 : i64>)

// -----

// expected-error @below {{'func.func' op argument #0 has a malformed type: expected an i64 parameter, got 8 : i32; got !kv.cache<"paged", bf16, 8 : i32, 128 : i64, false, 16 : i64, none, 1 : i64>}}
func.func private @type(!kv.cache<"paged", bf16, 8 : i32, 128 : i64, false, 16 : i64, none, 1 : i64>)

// -----

// expected-error @below {{'func.func' op argument #0 has a malformed type: expected a string parameter, got 16 : i64; got !kv.cache<16 : i64, bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
func.func private @type(!kv.cache<16 : i64, bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>)

// -----

// expected-error @below {{'func.func' op argument #0 has a malformed type: tile rows and page size must divide one another, got 24 and 16; got !kv.rows<24 : i64, 16 : i64>}}
func.func private @type(!kv.rows<24 : i64, 16 : i64>)

// -----

// expected-error @below {{'func.func' op argument #0 has a malformed type: form must be one of tiled, ragged, rope, gather4, rope_gather4, scale, got slanted; got !kv.tma<"slanted", bf16, array<i64: 64>, 128 : i64>}}
func.func private @type(!kv.tma<"slanted", bf16, array<i64: 64>, 128 : i64>)

// -----

// expected-error @below {{'func.func' op argument #0 has a malformed type: swizzle must be one of 16, 32, 64, 128, got 48; got !kv.tma<"tiled", bf16, array<i64: 64>, 48 : i64>}}
func.func private @type(!kv.tma<"tiled", bf16, array<i64: 64>, 48 : i64>)

// -----

// expected-error @below {{expected 8 type arguments, but had 1}}
func.func private @type(!kv.cache<bf16>)

// -----

func.func @op() {
  // expected-error @below {{unregistered operation 'kv.lode' found in dialect ('kv') that does not allow unknown operations}}
  "kv.lode"() : () -> ()
  return
}

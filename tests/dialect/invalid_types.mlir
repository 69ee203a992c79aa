// RUN: kv-opt %s --split-input-file --verify-diagnostics

// Types whose parameters do not fit together, and names that the dialect does not have.

// expected-error @below {{'func.func' op argument #0 has a malformed type: kind must be one of paged, continuous, fa3, got 'pagd'; got !kv.cache<"pagd", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
func.func private @kind(!kv.cache<"pagd", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: num_heads * head_size, page_size and granularity must be below 2^31, got 65536 * 65536, 16 and 1}}
func.func private @num_heads_head_size_page_size_granularity(!kv.cache<"paged", bf16, 65536 : i64, 65536 : i64, false, 16 : i64, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: num_heads and head_size must be positive, got 0 and 128; got !kv.cache<"paged", bf16, 0 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
func.func private @num_heads_head_size(!kv.cache<"paged", bf16, 0 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: page_size of a paged cache must be positive, got 0; got !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>}}
func.func private @page_size_paged_cache(!kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 0 : i64, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: page_size of a continuous cache must be 0, got 16; got !kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
func.func private @page_size_continuous_cache(!kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: num_heads of an MLA cache must be 1, got 8; got !kv.cache<"paged", bf16, 8 : i64, 128 : i64, true, 16 : i64, none, 1 : i64>}}
func.func private @num_heads_mla_cache(!kv.cache<"paged", bf16, 8 : i64, 128 : i64, true, 16 : i64, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: is_mla must be false for an fa3 cache, whose blocks always contain K and V; got !kv.cache<"fa3", bf16, 1 : i64, 128 : i64, true, 16 : i64, none, 1 : i64>}}
func.func private @is_mla(!kv.cache<"fa3", bf16, 1 : i64, 128 : i64, true, 16 : i64, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: scales need a paged cache, got a continuous one; got !kv.cache<"continuous", i8, 8 : i64, 128 : i64, false, 0 : i64, f32, 32 : i64>}}
func.func private @scales(!kv.cache<"continuous", i8, 8 : i64, 128 : i64, false, 0 : i64, f32, 32 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: scale dtype must be one of f32, f16, bf16, f8e8m0, f8e4m3, got i32; got !kv.cache<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, i32, 32 : i64>}}
func.func private @scale_dtype(!kv.cache<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, i32, 32 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: a quantized cache must store an 8-bit type, got bf16; got !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>}}
func.func private @quantized_cache(!kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: granularity must be positive, got 0; got !kv.operand<"ragged", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 0 : i64>}}
func.func private @granularity_without_scales(!kv.operand<"ragged", f16, 8 : i64, 128 : i64, false, 0 : i64, none, 0 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: granularity must be positive, got 0; got !kv.cache<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, f32, 0 : i64>}}
func.func private @granularity(!kv.cache<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, f32, 0 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: cache dtype must be f32, f16, bf16, f8e4m3, f8e5m2, i8, i16 or i32, got i64; got !kv.cache<"paged", i64, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
func.func private @cache_dtype(!kv.cache<"paged", i64, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: elements of u4, and no others, have zeros, with scales of f16, got u4 with scales of f16 without zeros; got !kv.cache<"paged", ui4, 8 : i64, 128 : i64, false, 16 : i64, f16, 128 : i64>}}
func.func private @packed_without_zeros(!kv.cache<"paged", ui4, 8 : i64, 128 : i64, false, 16 : i64, f16, 128 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: elements of u4, and no others, have zeros, with scales of f16, got i8 with scales of f16 and zeros; got !kv.cache<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, vector<2xf16>, 128 : i64>}}
func.func private @zeros_of_bytes(!kv.cache<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, vector<2xf16>, 128 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: groups of u4 must divide the head, got groups of 96 in a head of 128; got !kv.cache<"paged", ui4, 8 : i64, 128 : i64, false, 16 : i64, vector<2xf16>, 96 : i64>}}
func.func private @groups_of_a_part(!kv.cache<"paged", ui4, 8 : i64, 128 : i64, false, 16 : i64, vector<2xf16>, 96 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: elements of u4 need a paged cache of keys and values with packed heads, got latent rows; got !kv.cache<"paged", ui4, 1 : i64, 128 : i64, true, 16 : i64, vector<2xf16>, 128 : i64>}}
func.func private @latent_rows(!kv.cache<"paged", ui4, 1 : i64, 128 : i64, true, 16 : i64, vector<2xf16>, 128 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: granularity must be a number, or an array of it and the elements of a block, got array<i64: 128>; got !kv.cache<"paged", ui4, 8 : i64, 128 : i64, false, 16 : i64, vector<2xf16>, array<i64: 128>>}}
func.func private @blocks(!kv.cache<"paged", ui4, 8 : i64, 128 : i64, false, 16 : i64, vector<2xf16>, array<i64: 128>>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: a rotation needs elements of u4, f4e2m1 or a codebook, and blocks of a power of two that divides the group, got 64 in groups of 96 of u4; got !kv.cache<"paged", ui4, 8 : i64, 96 : i64, false, 16 : i64, vector<2xf16>, array<i64: 96, 64>>}}
func.func private @blocks_across_groups(!kv.cache<"paged", ui4, 8 : i64, 96 : i64, false, 16 : i64, vector<2xf16>, array<i64: 96, 64>>)
// expected-error @below {{a malformed type: elements of f4e2m1 need scales, got none}}
func.func private @no_scales(!kv.cache<"paged", f4E2M1FN, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>)
// expected-error @below {{a malformed type: a codebook must have 16 ascending numbers that f16 tells apart, got (1.0, 0.0)}}
func.func private @numbers(!kv.cache<"paged", !kv.codebook<array<f32: 1.0, 0.0>>, 8 : i64, 128 : i64, false, 16 : i64, f16, 32 : i64>)
// expected-error @below {{a malformed type: a code must have 2 to 7 bits and a positive largest number, got 9 and 2.0}}
func.func private @bits(!kv.cache<"paged", !kv.code<"a@0", 9 : i64, "2.0">, 8 : i64, 128 : i64, false, 16 : i64, f16, 32 : i64>)
// expected-error @below {{a malformed type: a codebook is the element type of a cache, and no value has it}}
func.func private @value(!kv.codebook<array<f32: 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0>>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: is_mla must be true or false, got 3 : i64; got !kv.cache<"paged", bf16, 8 : i64, 128 : i64, 3 : i64, 16 : i64, none, 1 : i64>}}
func.func private @is_mla_2(!kv.cache<"paged", bf16, 8 : i64, 128 : i64, 3 : i64, 16 : i64, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: expected an i64 parameter, got 8 : i32; got !kv.cache<"paged", bf16, 8 : i32, 128 : i64, false, 16 : i64, none, 1 : i64>}}
func.func private @i64_parameter(!kv.cache<"paged", bf16, 8 : i32, 128 : i64, false, 16 : i64, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: expected a string parameter, got 16 : i64; got !kv.cache<16 : i64, bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>}}
func.func private @string_parameter(!kv.cache<16 : i64, bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: tile rows and page size must divide one another, got 24 and 16; got !kv.rows<24 : i64, 16 : i64>}}
func.func private @tile_rows_page_size(!kv.rows<24 : i64, 16 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: form must be one of tiled, token, ragged, rope, gather4, rope_gather4, scale, got slanted; got !kv.tma<"slanted", bf16, array<i64: 64>, array<i64: 64>, 128 : i64>}}
func.func private @form(!kv.tma<"slanted", bf16, array<i64: 64>, array<i64: 64>, 128 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: swizzle must be one of 16, 32, 64, 128, got 48; got !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 64>, 48 : i64>}}
func.func private @swizzle(!kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 64>, 48 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: box must be a non-empty array of i64, got array<i64>; got !kv.tma<"tiled", bf16, array<i64>, array<i64: 64>, 128 : i64>}}
func.func private @box(!kv.tma<"tiled", bf16, array<i64>, array<i64: 64>, 128 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: box of the form tiled must have rank 4 or 3, got (16, 64); got !kv.tma<"tiled", bf16, array<i64: 16, 64>, array<i64: 16, 64>, 128 : i64>}}
func.func private @box_form_tiled(!kv.tma<"tiled", bf16, array<i64: 16, 64>, array<i64: 16, 64>, 128 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: box of the form ragged must have rank 4, got (64, 1, 64); got !kv.tma<"ragged", bf16, array<i64: 64, 1, 64>, array<i64: 64, 64>, 128 : i64>}}
func.func private @box_form_ragged(!kv.tma<"ragged", bf16, array<i64: 64, 1, 64>, array<i64: 64, 64>, 128 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: box of the form gather4 must be 1 in all dimensions but rows and columns, got (4, 64); got !kv.tma<"gather4", bf16, array<i64: 4, 64>, array<i64: 4, 64>, 128 : i64>}}
func.func private @box_form_gather4(!kv.tma<"gather4", bf16, array<i64: 4, 64>, array<i64: 4, 64>, 128 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: box of the form tiled must be 1 in all dimensions but rows and columns, got (2, 16, 1, 64); got !kv.tma<"tiled", bf16, array<i64: 2, 16, 1, 64>, array<i64: 32, 1, 64>, 128 : i64>}}
func.func private @box_form_tiled_2(!kv.tma<"tiled", bf16, array<i64: 2, 16, 1, 64>, array<i64: 32, 1, 64>, 128 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: box must be 1 to 256 in each dimension, got (512, 1, 64); got !kv.tma<"tiled", bf16, array<i64: 512, 1, 64>, array<i64: 512, 1, 64>, 128 : i64>}}
func.func private @box_2(!kv.tma<"tiled", bf16, array<i64: 512, 1, 64>, array<i64: 512, 1, 64>, 128 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: the box's last dimension must be a multiple of 16 bytes, got 12 x 2 bytes; got !kv.tma<"tiled", bf16, array<i64: 16, 1, 12>, array<i64: 16, 1, 12>, 16 : i64>}}
func.func private @box_s_last_dimension(!kv.tma<"tiled", bf16, array<i64: 16, 1, 12>, array<i64: 16, 1, 12>, 16 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: the box's last dimension must be at most the 64 bytes of swizzle 64B, got 128; got !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 64>, 64 : i64>}}
func.func private @box_s_last_dimension_2(!kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 64>, 64 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: a box's row must be the 128 bytes of swizzle 128B, got 64; got !kv.tma<"tiled", bf16, array<i64: 16, 1, 32>, array<i64: 16, 1, 64>, 128 : i64>}}
func.func private @box_s_row(!kv.tma<"tiled", bf16, array<i64: 16, 1, 32>, array<i64: 16, 1, 64>, 128 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: the tile's columns must be whole boxes of 64, got 96; got !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 96>, 128 : i64>}}
func.func private @tile_s_columns(!kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 16, 1, 96>, 128 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: the tile's rows must be those of the box, got a tile (32, 1, 64) of boxes (16, 1, 64); got !kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 32, 1, 64>, 128 : i64>}}
func.func private @tile_s_rows(!kv.tma<"tiled", bf16, array<i64: 16, 1, 64>, array<i64: 32, 1, 64>, 128 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: the tile's rows must be a multiple of 4, got a tile (6, 64) of boxes (1, 64); got !kv.tma<"gather4", bf16, array<i64: 1, 64>, array<i64: 6, 64>, 128 : i64>}}
func.func private @tile_s_rows_2(!kv.tma<"gather4", bf16, array<i64: 1, 64>, array<i64: 6, 64>, 128 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: chunks of a tile must be multiples of 128 bytes, got 4 rows of 16; got !kv.tma<"tiled", bf16, array<i64: 4, 1, 8>, array<i64: 4, 1, 64>, 16 : i64>}}
func.func private @chunks_tile(!kv.tma<"tiled", bf16, array<i64: 4, 1, 8>, array<i64: 4, 1, 64>, 16 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: dtype must be one of f32, f16, bf16, f64, i32, i64, u32, u64, i16, u16, i8, u8, f8e4m3, f8e5m2, f8e8m0, got bool; got !kv.tma<"tiled", i1, array<i64: 16, 1, 64>, array<i64: 16, 1, 64>, 16 : i64>}}
func.func private @dtype(!kv.tma<"tiled", i1, array<i64: 16, 1, 64>, array<i64: 16, 1, 64>, 16 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: page must be the page size, or an array of it, the token and the head stride, got array<i64: 16, 128>}}
func.func private @page(!kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, array<i64: 16, 128>, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: page must be written 16 : i64 where tokens and heads are packed, got array<i64: 16, 1024, 128>}}
func.func private @page_2(!kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, array<i64: 16, 1024, 128>, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: strides must be multiples of 8 elements (heads of 128 are read as vectors), got (130, 2080)}}
func.func private @strides(!kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, array<i64: 16, 130, 2080>, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: heads of a page must not overlap: a stride must be at least 2048, got (128, 1920)}}
func.func private @heads_page(!kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, array<i64: 16, 128, 1920>, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: strides must be two, of tokens and heads, from 1 to 2^31 - 1, got (0, 128)}}
func.func private @strides_2(!kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, array<i64: 16, 0, 128>, none, 1 : i64>)
// expected-error @below {{'func.func' op argument #0 has a malformed type: strides need a paged cache, got a continuous one, whose tokens are packed}}
func.func private @strides_3(!kv.cache<"continuous", bf16, 8 : i64, 128 : i64, false, array<i64: 0, 128, 2048>, none, 1 : i64>)

// -----

// expected-error @below {{expected 8 type arguments, but had 1}}
func.func private @type(!kv.cache<bf16>)

// -----

func.func @op() {
  // expected-error @below {{unregistered operation 'kv.lode' found in dialect ('kv') that does not allow unknown operations}}
  "kv.lode"() : () -> ()
  return
}

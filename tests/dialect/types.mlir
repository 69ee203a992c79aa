// RUN: kv-opt %s --verify-roundtrip -o %t.text
// RUN: kv-opt %s --emit-bytecode | kv-opt | diff %t.text -
// RUN: FileCheck %s < %t.text

// What an alias stands for is printed.
// CHECK-LABEL: func.func @alias(
// CHECK-SAME:    %{{.*}}: !kv.cache<"paged", i8, 2 : i64, 32 : i64, false, 8 : i64, none, 1 : i64>)

// Parameters: kind, element, heads, head size, is_mla, page (its size), scale type or none, granularity.

func.func private @paged(
    !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>,
    !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>,
    !kv.operand<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>)

func.func private @continuous(!kv.cache<"continuous", f32, 4 : i64, 64 : i64, false, 0 : i64, none, 1 : i64>)

func.func private @fa3(!kv.cache<"fa3", f16, 4 : i64, 64 : i64, false, 128 : i64, none, 1 : i64>)

func.func private @mla(!kv.cache<"paged", bf16, 1 : i64, 576 : i64, true, 64 : i64, none, 1 : i64>)

// Strides of tokens and heads in the place of the page size: heads before tokens, keys and values in one row.
func.func private @strided(
    !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, array<i64: 16, 128, 2048>, none, 1 : i64>,
    !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, array<i64: 16, 256, 4096>, f32, 64 : i64>,
    !kv.operand<"scales", f8E4M3FN, 8 : i64, 128 : i64, false, array<i64: 16, 256, 4096>, f32, 64 : i64>)

// Every pairing of storage and scale types that a quantized cache may have.
func.func private @quantized(
    !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f32, 32 : i64>,
    !kv.cache<"paged", f8E5M2, 8 : i64, 128 : i64, false, 16 : i64, f16, 128 : i64>,
    !kv.cache<"paged", i8, 8 : i64, 128 : i64, false, 16 : i64, bf16, 100 : i64>,
    !kv.cache<"paged", f8E4M3FN, 8 : i64, 128 : i64, false, 16 : i64, f8E8M0FNU, 32 : i64>)

// Sixteen numbers by their indices, and elements of six bits that functions of a user's own say.
func.func private @tables(
    !kv.cache<"paged", !kv.codebook<array<f32: -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0>>, 8 : i64, 128 : i64, false, 16 : i64, f16, 32 : i64>,
    !kv.cache<"paged", !kv.code<"e2m3@0", 6 : i64, "7.5">, 8 : i64, 128 : i64, false, 16 : i64, f16, 32 : i64>)

// Two elements per byte, with a scale and a zero per granule; blocks of 64 are rotated.
func.func private @packed(
    !kv.collection<"paged", ui4, 8 : i64, 128 : i64, false, 16 : i64, vector<2xf16>, 128 : i64>,
    !kv.cache<"paged", ui4, 8 : i64, 96 : i64, false, 16 : i64, vector<2xf16>, 32 : i64>,
    !kv.cache<"paged", ui4, 8 : i64, 128 : i64, false, 16 : i64, vector<2xf16>, array<i64: 128, 64>>)

func.func private @rows(!kv.rows<128 : i64, 16 : i64>, !kv.rows<64 : i64, 0 : i64>)

// Parameters of descriptors: form, element, box, tile, bytes of the swizzle.
func.func private @tma(
    !kv.tma<"tiled", bf16, array<i64: 1, 128, 1, 64>, array<i64: 128, 1, 128>, 128 : i64>,
    !kv.tma<"tiled", bf16, array<i64: 128, 1, 8>, array<i64: 128, 1, 128>, 16 : i64>,
    !kv.tma<"ragged", f16, array<i64: 1, 1, 64, 32>, array<i64: 64, 128>, 64 : i64>,
    !kv.tma<"rope", bf16, array<i64: 1, 64, 1, 64>, array<i64: 64, 1, 64>, 128 : i64>,
    !kv.tma<"gather4", i64, array<i64: 1, 72>, array<i64: 8, 72>, 16 : i64>,
    !kv.tma<"rope_gather4", bf16, array<i64: 1, 64>, array<i64: 64, 64>, 128 : i64>,
    !kv.tma<"scale", f32, array<i64: 1, 64>, array<i64: 1, 64>, 16 : i64>)

// A type alias stands for a kv type as for any other.
!cache = !kv.cache<"paged", i8, 2 : i64, 32 : i64, false, 8 : i64, none, 1 : i64>
func.func @alias(%cache: !cache) {
  return
}

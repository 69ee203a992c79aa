// RUN: kv-opt %s --lower-kv-casts='hardware=true' | FileCheck %s --check-prefix=HARD
// RUN: kv-opt %s --lower-kv-casts | FileCheck %s --check-prefix=SOFT
// RUN: %if alone %{ kv-opt %{kernels}/rescale.mlir --kv-pipeline --target=sm_90a --stop-after=lower-kv-casts --check-semantics-of=lower-kv-casts --grid=3x2 --arg=factors=2 --arg=sums=3x16 --lengths=edges --model=%S/Inputs/models.py:rescale -o /dev/null %}
// RUN: kv-opt %{kernels}/rescale.mlir --kv-pipeline --target=sm_80 --stop-after=lower-kv-casts --check-semantics-of=lower-kv-casts --grid=3x2 --arg=factors=2 --arg=sums=3x16 --lengths=edges --model=%S/Inputs/models.py:rescale -o /dev/null

// HARD-LABEL: func.func @widen
// HARD-COUNT-4: cvt.rn.f16x2.e4m3x2 $0, $1;
// HARD:         arith.extf {{.*}} : vector<8xf16> to vector<8xf32>
// SOFT-LABEL: func.func @widen
// SOFT-NOT:     llvm.inline_asm
// SOFT:         arith.mulf {{.*}} : vector<8xf16>
func.func @widen(%x: vector<8xf8E4M3FN>) -> vector<8xf32> {
  %y = "kv.cast"(%x) : (vector<8xf8E4M3FN>) -> vector<8xf32>
  return %y : vector<8xf32>
}

// HARD-LABEL: func.func @narrow
// HARD-COUNT-2: cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;
// SOFT-LABEL: func.func @narrow
// SOFT-NOT:     llvm.inline_asm
// SOFT:         arith.bitcast {{.*}} : vector<4xi8> to vector<4xf8E5M2>
func.func @narrow(%x: vector<4xf32>) -> vector<4xf8E5M2> {
  %y = "kv.cast"(%x) : (vector<4xf32>) -> vector<4xf8E5M2>
  return %y : vector<4xf8E5M2>
}

// Between two 8-bit types the way leads through f32.
// HARD-LABEL: func.func @between
// HARD:         cvt.rn.f16x2.e4m3x2
// HARD:         cvt.rn.satfinite.e5m2x2.f32
func.func @between(%x: f8E4M3FN) -> f8E5M2 {
  %y = "kv.cast"(%x) : (f8E4M3FN) -> f8E5M2
  return %y : f8E5M2
}

// A power-of-two scale is f32's exponent; on the way back it is rounded up.
// SOFT-LABEL: func.func @scale
// SOFT:         arith.shli
// SOFT:         arith.shrui
func.func @scale(%x: f8E8M0FNU) -> f8E8M0FNU {
  %y = "kv.cast"(%x) : (f8E8M0FNU) -> f32
  %z = "kv.cast"(%y) : (f32) -> f8E8M0FNU
  return %z : f8E8M0FNU
}

// SOFT-LABEL: func.func @integer
// SOFT:         arith.sitofp
// SOFT:         math.roundeven
// SOFT:         arith.fptosi
func.func @integer(%x: i8) -> i8 {
  %y = "kv.cast"(%x) : (i8) -> f32
  %z = "kv.cast"(%y) : (f32) -> i8
  return %z : i8
}

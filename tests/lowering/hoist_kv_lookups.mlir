// RUN: kv-opt %s --hoist-kv-lookups --split-input-file | FileCheck %s
// RUN: kv-opt %s --hoist-kv-lookups='hoist=false' --split-input-file | FileCheck %s --check-prefix=STAY
// RUN: kv-opt %s --hoist-kv-lookups='merge=false' --split-input-file | FileCheck %s --check-prefix=APART
// RUN: %if alone %{ kv-opt %{kernels}/rescale.mlir --kv-pipeline --target=sm_90a --stop-after=hoist-kv-lookups --check-semantics-of=hoist-kv-lookups --grid=3x2 --arg=factors=2 --arg=sums=3x16 --lengths=edges --model=%S/Inputs/models.py:rescale -o /dev/null %}

!pool = !kv.collection<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!cache = !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>

gpu.module @kernels {
  // K and V of one collection share their table: one look-up serves both, before the loop over heads.
  // CHECK-LABEL: gpu.func @both_halves
  // CHECK:         %[[PAGE:.*]] = "kv.page"
  // CHECK:         scf.for
  // CHECK-NOT:     kv.page
  // CHECK:           "kv.load"({{.*}}, %[[PAGE]]) {width = 8 : i64}
  // CHECK:           "kv.load"({{.*}}, %[[PAGE]]) {width = 8 : i64}
  // STAY-LABEL:  gpu.func @both_halves
  // STAY:          scf.for
  // STAY-NEXT:       "kv.page"
  // APART-LABEL: gpu.func @both_halves
  // APART-COUNT-2: "kv.page"
  gpu.func @both_halves(%pool: !pool, %b: i32, %t: i32) kernel {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c8 = arith.constant 8 : i32
    %k = "kv.key_cache"(%pool, %c0) : (!pool, i32) -> !cache
    %v = "kv.value_cache"(%pool, %c0) : (!pool, i32) -> !cache
    scf.for %h = %c0 to %c8 step %c1 : i32 {
      %x = "kv.load"(%k, %b, %h, %t, %c0) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
      %y = "kv.load"(%v, %b, %h, %t, %c0) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
    }
    gpu.return
  }

  // A look-up leaves branches on its way out of a loop: it is clamped, so it may run when they would not.
  // CHECK-LABEL: gpu.func @through_a_branch
  // CHECK:         "kv.page"
  // CHECK-NEXT:    scf.for
  gpu.func @through_a_branch(%k: !cache, %b: i32, %t: i32, %p: i1) kernel {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c8 = arith.constant 8 : i32
    scf.for %h = %c0 to %c8 step %c1 : i32 {
      scf.if %p {
        %x = "kv.load"(%k, %b, %h, %t, %c0) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
      }
    }
    gpu.return
  }

  // A look-up of the loop's own token stays in the loop.
  // CHECK-LABEL: gpu.func @own_token
  // CHECK:         scf.for
  // CHECK-NEXT:      "kv.page"
  gpu.func @own_token(%k: !cache, %b: i32) kernel {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c8 = arith.constant 8 : i32
    scf.for %t = %c0 to %c8 step %c1 : i32 {
      %x = "kv.load"(%k, %b, %c0, %t, %c0) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
    }
    gpu.return
  }

  // Different tables are not merged; a store looks at the raw entry, a load at the clamped page.
  // CHECK-LABEL: gpu.func @copy
  // CHECK:         %[[FROM:.*]] = "kv.page"(%arg0
  // CHECK:         "kv.load"(%arg0{{.*}}, %[[FROM]])
  // CHECK:         %[[TO:.*]] = "kv.raw_page"(%arg1
  // CHECK:         "kv.store"(%arg1{{.*}}, %[[TO]])
  gpu.func @copy(%from: !cache, %to: !cache, %b: i32, %t: i32) kernel {
    %c0 = arith.constant 0 : i32
    %x = "kv.load"(%from, %b, %c0, %t, %c0) {width = 8 : i64} : (!cache, i32, i32, i32, i32) -> vector<8xbf16>
    "kv.store"(%to, %b, %c0, %t, %c0, %x) {oob = "drop"} : (!cache, i32, i32, i32, i32, vector<8xbf16>) -> ()
    gpu.return
  }
}

// -----

!fa3 = !kv.collection<"fa3", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
!fa3_cache = !kv.cache<"fa3", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>
gpu.module @kernels {
  // Layers of an fa3 collection have tables of their own.
  // CHECK-LABEL: gpu.func @layers_of_fa3
  // CHECK-COUNT-2: "kv.page"
  gpu.func @layers_of_fa3(%pool: !fa3, %b: i32, %t: i32) kernel {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %k0 = "kv.key_cache"(%pool, %c0) : (!fa3, i32) -> !fa3_cache
    %k1 = "kv.key_cache"(%pool, %c1) : (!fa3, i32) -> !fa3_cache
    %x = "kv.load"(%k0, %b, %c0, %t, %c0) {width = 8 : i64} : (!fa3_cache, i32, i32, i32, i32) -> vector<8xbf16>
    %y = "kv.load"(%k1, %b, %c0, %t, %c0) {width = 8 : i64} : (!fa3_cache, i32, i32, i32, i32) -> vector<8xbf16>
    gpu.return
  }
}

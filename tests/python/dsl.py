# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# RUN: %python %s | FileCheck %s
"""The IR that Python becomes: one construct a kernel, the CHECK lines under it."""

import kvarn as kv
from kvarn.dialect.layout import CacheSpec

PAGED = CacheSpec("paged", kv.bf16, 8, 128, 16)
B = kv.Buffer[kv.i32, 1]


def show(*specs, **options):
    def run(function):
        print(kv.kernel(**options)(function).trace(specs))

    return run


@show(PAGED, kv.f32, block=16)
def signature(cache: kv.PagedKVCache, alpha: kv.f32):
    if kv.thread_id.x < cache.cache_length(0):
        cache.store(0, 0, 0, 0, kv.bf16(alpha))


# CHECK-LABEL: gpu.func @signature(
# CHECK-SAME:    %[[CACHE:.*]]: !kv.cache<"paged", bf16, 8 : i64, 128 : i64, false, 16 : i64, none, 1 : i64>,
# CHECK-SAME:    %[[ALPHA:.*]]: f32) kernel
# CHECK-SAME:    kv.args = [{kind = "cache", name = "cache"}, {dtype = "f32", kind = "scalar", name = "alpha"}]
# CHECK-SAME:    kv.block = array<i32: 16, 1, 1>
# CHECK:         "kv.cache_length"(%[[CACHE]]
# CHECK:         scf.if
# CHECK:           arith.truncf %[[ALPHA]] : f32 to bf16
# CHECK:           "kv.store"(%[[CACHE]]


@show(B)
def branch(x):
    v = x[0]
    kept = 3
    if v > 3:
        w, kept = v, 3
    else:
        w, kept = 1, 3
    x[kept] = w


# CHECK-LABEL: gpu.func @branch(
# CHECK:         %[[C:.*]] = arith.cmpi sgt
# CHECK:         %[[W:.*]] = scf.if %[[C]] -> (i32)
# CHECK:           scf.yield
# CHECK:         } else {
# CHECK:           scf.yield
# CHECK-NOT:     scf.if
# CHECK:         %[[I:.*]] = arith.constant 3 : index
# CHECK:         memref.store %[[W]], %{{.*}}[%[[I]]]


@show(B)
def loop(x):
    total, acc = 0, [0.0, 1.0]
    for i in range(x.shape[0]):
        total += x[i]
        acc[1] += 2.0
    x[0] = total + kv.i32(acc[0] + acc[1])


# CHECK-LABEL: gpu.func @loop(
# CHECK:         %[[R:.*]]:3 = scf.for
# CHECK-SAME:      iter_args(%[[T:.*]] = %{{.*}}, %[[A:.*]] = %{{.*}}, %[[B:.*]] = %{{.*}}) -> (i32, f32, f32) : i32
# CHECK:           %[[T1:.*]] = arith.addi %[[T]]
# CHECK:           %[[B1:.*]] = arith.addf %[[B]]
# CHECK:           scf.yield %[[T1]], %[[A]], %[[B1]] : i32, f32, f32
# CHECK:         arith.addf %[[R]]#1, %[[R]]#2


@show(B)
def unrolled(x):
    for i in kv.static(range(3)):
        x[i] = i


# CHECK-LABEL: gpu.func @unrolled(
# CHECK-NOT:     scf.for
# CHECK-COUNT-3: memref.store
# CHECK-NOT:     memref.store


@show(B)
def while_loop(x):
    n = x[0]
    while n > 1:
        n = n // 2
    x[0] = n


# CHECK-LABEL: gpu.func @while_loop(
# CHECK:         %[[R:.*]] = scf.while (%[[N:.*]] = %{{.*}}) : (i32) -> i32 {
# CHECK:           %[[C:.*]] = arith.cmpi sgt, %[[N]]
# CHECK:           scf.condition(%[[C]]) %[[N]]
# CHECK:         ^bb0(%[[M:.*]]: i32):
# CHECK:           %[[H:.*]] = arith.shrsi %[[M]]
# CHECK:           scf.yield %[[H]]


@show(B)
def leaves_a_loop(x):
    for i in range(10):
        if x[i] > 5:
            break
        x[i] = 0


# CHECK-LABEL: gpu.func @leaves_a_loop(
# CHECK-NOT:     scf.for
# CHECK:         scf.while
# CHECK:           scf.if
# CHECK:           } else {
# CHECK:             memref.store


@show(B)
def guard(x):
    if x[0] > 5:
        return
    x[1] = 0


# CHECK-LABEL: gpu.func @guard(
# CHECK:         scf.if
# CHECK:         } else {
# CHECK:           memref.store
# CHECK:         gpu.return


@show(B)
def short_circuit(x):
    i = kv.thread_id.x
    if i > 0 and x[i - 1] > 0:  # a load is not speculated
        x[i] = 1
    if i > 2 and i < 8:  # a comparison is
        x[i] = 2


# CHECK-LABEL: gpu.func @short_circuit(
# CHECK:         scf.if %{{.*}} -> (i1) {
# CHECK:           memref.load
# CHECK:           scf.yield
# CHECK:         scf.if
# CHECK:           memref.store
# CHECK:         arith.select %{{.*}} : i1
# CHECK-NEXT:    scf.if
# CHECK-NOT:     -> (i1)


@show(B, kv.Buffer[kv.u32, 1])
def division(x, u):
    t = kv.thread_id.x
    x[0] = x[1] // 8  # CHECK-LABEL: gpu.func @division(
    x[1] = x[2] % 8  # CHECK: arith.shrsi
    x[2] = t // 12  # CHECK: arith.andi
    x[3] = x[4] // 12  # CHECK: arith.divui
    u[0] = u[1] // 12  # CHECK: arith.floordivsi
    u[1] = u[2] >> 2  # CHECK: arith.divui
    # CHECK: arith.shrui


@show(kv.Buffer[kv.bf16, 2])
def vectors(x):
    v = x.load(0, 8, width=8)
    x.store(1, 8, value=kv.bf16(kv.f32(v) * 0.5))


# CHECK-LABEL: gpu.func @vectors(
# CHECK-SAME:    memref<?x?xbf16, strided<[?, 1]>, 1>
# CHECK:         vector.load %{{.*}} {alignment = 16 : i64} : memref<?x?xbf16, strided<[?, 1]>, 1>, vector<8xbf16>
# CHECK:         arith.extf %{{.*}} : vector<8xbf16> to vector<8xf32>
# CHECK:         arith.mulf %{{.*}} fastmath<contract> : vector<8xf32>
# CHECK:         vector.store %{{.*}} {alignment = 16 : i64}


@show(B)
def shared_memory(x):
    s = kv.shared((4, 8), kv.f32, alignment=128)
    s[kv.thread_id.x, 2] = 1.0
    kv.barrier()
    x[0] = kv.i32(s.load(1, 4, width=4).reduce("max"))


# CHECK-LABEL: gpu.func @shared_memory(
# CHECK:         %[[S:.*]] = "kv.alloc_shared"() {alignment = 128 : i64, bytes = 128 : i64} : () -> !llvm.ptr<3>
# CHECK:         %[[P:.*]] = llvm.getelementptr %[[S]][%{{.*}}] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8
# CHECK:         %[[Q:.*]] = llvm.getelementptr %[[P]][8]
# CHECK:         llvm.store %{{.*}}, %[[Q]] {alignment = 4 : i64} : f32, !llvm.ptr<3>
# CHECK:         gpu.barrier
# CHECK:         llvm.load %{{.*}} {alignment = 16 : i64} : !llvm.ptr<3> -> vector<4xf32>
# CHECK-COUNT-3: arith.maxnumf

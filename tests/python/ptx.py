# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# RUN: %python %s | FileCheck %s
"""PTX intrinsics: the instruction of each beside it; kernels of all of them assemble."""

import kvarn as kv
from kvarn.runtime import assemble

BF, F, U, W = kv.Buffer[kv.bf16, 2], kv.Buffer[kv.f32, 2], kv.Buffer[kv.u32, 1], kv.Buffer[kv.i32, 1]


def show(*specs, target, **options):
    def run(function):
        made = kv.compile(kv.kernel(**options)(function), *specs, target=target)
        print(made.asm["ptx"])
        if assemble.nvjitlink() is not None:
            assert len(made.asm["cubin"]) > 1000

    return run


# CHECK-LABEL: .entry ampere(
@show(BF, F, U, kv.i32, target="sm_80", block=128)
def ampere(a: BF, o: F, c: U, n: kv.i32):
    s = kv.shared((4, 16, 64), kv.bf16, alignment=128)
    lane, warp = kv.lane_id, kv.warp_id
    p = s.ptr(warp, lane >> 1, (lane & 1) * 32)
    # CHECK-DAG: cp.async.cg.shared.global [{{[^]]*}}], [{{[^]]*}}], 16;
    kv.cp_async(p, a.address(0, 0) + lane * 16)
    # CHECK-DAG: cp.async.cg.shared.global [{{[^]]*}}], [{{[^]]*}}], 16, %r{{[0-9]+}};
    kv.cp_async(p + 16, a.address(0, 0) + lane * 16, zero_fill_size=n)
    # CHECK-DAG: cp.async.ca.shared.global [{{[^]]*}}], [{{[^]]*}}], 4;
    kv.cp_async(p + 32, a.address(0, 0) + kv.i64(lane) * 4, bytes=4)
    # CHECK-DAG: createpolicy.fractional.L2::evict_first.b64 %rd
    once = kv.l2_policy("evict_first")
    # CHECK-DAG: cp.async.cg.shared.global.L2::cache_hint [to], [{{[^]]*}}], 16, %rd{{[0-9]+}};
    kv.cp_async(p + 48, a.address(0, 0) + lane * 16, l2_policy=once)
    # CHECK-DAG: cp.async.cg.shared.global.L2::cache_hint.L2::128B [to], [{{[^]]*}}], 16, %r{{[0-9]+}}, %rd{{[0-9]+}};
    kv.cp_async(p + 64, a.address(0, 0) + lane * 16, zero_fill_size=n, l2_prefetch=128, l2_policy=once)
    kv.cp_async_commit()  # CHECK-DAG: cp.async.commit_group
    kv.cp_async_wait(2)  # CHECK-DAG: cp.async.wait_group{{[[:space:]]+}}2
    kv.syncwarp()  # CHECK-DAG: bar.warp.sync
    # CHECK-DAG: ldmatrix.sync.aligned.m8n8.x4.shared.b16
    # CHECK-DAG: ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16
    x, y = kv.ldmatrix(p, 4), kv.ldmatrix(p, 2, trans=True)
    z = kv.ldmatrix(p, 1)[0]  # CHECK-DAG: ldmatrix.sync.aligned.m8n8.x1.shared.b16
    acc = [0.0] * 4
    acc = kv.mma_m16n8k16(x, y, acc, kv.bf16)  # CHECK-DAG: mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    acc = kv.mma_m16n8k16(x, y, acc, kv.f16)  # CHECK-DAG: mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
    # CHECK-DAG: cvt.rn.bf16x2.f32
    # CHECK-DAG: movmatrix.sync.aligned.m8n8.trans.b16
    z = kv.movmatrix(kv.pack_bf16x2(acc[0], acc[1])) ^ z
    # CHECK-DAG: cvt.rn.f16x2.f32
    # CHECK-DAG: prmt.b32 %r{{[0-9]+}}, %r{{[0-9]+}}, %r{{[0-9]+}}, 0x3120
    z = kv.prmt(z, kv.pack_f16x2(acc[2], acc[3]), 0x3120)
    w = kv.bitcast(z, kv.f16)
    # CHECK-DAG: ex2.approx.ftz.f32
    # CHECK-DAG: rcp.approx.ftz.f32
    # CHECK-DAG: tanh.approx.f32
    v = kv.ex2(acc[2]) + kv.f32(w[0]) + kv.rcp(acc[3]) + kv.tanh_approx(acc[1])
    if kv.shuffle_xor(v > 1.0, 1):  # CHECK-DAG: shfl.sync.bfly.b32
        v += 1.0
    o.store(1, lane * 4, value=kv.bitcast(kv.load_nc(a.address(1, 0)), kv.f32))  # CHECK-DAG: ld.global.nc.v4.b32
    counter = c.address(0)
    # CHECK-DAG: fence.acq_rel.gpu
    # CHECK-DAG: fence.acq_rel.gpu
    old = counter.atomic("add", kv.u32(1), order="acq_rel")  # CHECK-DAG: atom.global.add.u32
    kv.atomic_add(o, (0, 0), v)  # CHECK-DAG: atom.global.add.f32
    kv.atomic_add(c, 1, 1)  # CHECK-DAG: atom.global.add.u32
    r = counter.load(kv.u32, order="acquire")  # CHECK-DAG: ld.acquire.gpu.global.b32
    counter.store(r + old, order="release")  # CHECK-DAG: st.release.gpu.global.b32
    counter.atomic("inc", r)  # CHECK-DAG: atom.global.inc.u32
    kv.fence("block")  # CHECK-DAG: fence.acq_rel.cta
    kv.named_barrier(1, 64)  # CHECK-DAG: bar.sync{{[[:space:]]+}}1, 64
    kv.barrier()  # CHECK-DAG: bar.sync{{[[:space:]]+}}0
    if kv.ballot(v > 0.0) != 0:  # CHECK-DAG: vote.sync.ballot.b32
        o[kv.block_id.x, kv.thread_id.x] = v + kv.f32(s[1, 2, lane])


# CHECK-LABEL: .entry hopper(
@show(BF, W, target="sm_90a", block=128, cluster=2)
def hopper(a: BF, c: W):
    s = kv.shared((4, 16, 64), kv.bf16, alignment=128)
    bar = kv.shared(2, kv.i64, alignment=16)
    kv.cp_async_bulk_prefetch(a.address(0, 0), 64)  # CHECK-DAG: cp.async.bulk.prefetch.L2.global
    kv.griddepcontrol_wait()  # CHECK-DAG: griddepcontrol.wait
    if kv.thread_id.x == 0:
        kv.mbarrier_init(bar.ptr(0), 1)  # CHECK-DAG: mbarrier.init.shared.b64
        kv.fence_mbarrier_init()  # CHECK-DAG: fence.mbarrier_init
    kv.barrier()
    if kv.elect():  # CHECK-DAG: elect.sync
        kv.mbarrier_arrive_expect_tx(bar.ptr(0), 1024)  # CHECK-DAG: mbarrier.arrive.expect_tx.shared.b64
        # CHECK-DAG: cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        kv.cp_async_bulk(s.ptr(), a.address(0, 0), 1024, bar.ptr(0))
    kv.mbarrier_wait(bar.ptr(0), 0)  # CHECK-DAG: mbarrier.try_wait.parity.shared.b64
    # CHECK-DAG: cvt.rn.f16x2.e4m3x2
    # CHECK-DAG: cvt.rn.f16x2.e4m3x2
    # CHECK-DAG: cvt.rn.f16x2.e5m2x2
    # CHECK-DAG: cvt.rn.f16x2.e5m2x2
    words = kv.cvt_e4m3x4_to_f16x4(c[0]) + kv.cvt_e5m2x4_to_f16x4(c[1])
    # CHECK-DAG: cvt.rn.f16x2.e4m3x2
    # CHECK-DAG: cvt.rn.f16x2.e5m2x2
    words = [kv.cvt_e4m3x2_to_f16x2(words[0]), kv.cvt_e5m2x2_to_f16x2(words[1]), *words[2:]]
    kv.stmatrix(s.ptr(0, kv.lane_id & 15, 0), words)  # CHECK-DAG: stmatrix.sync.aligned.m8n8.x4.shared.b16
    kv.fence_proxy_async()  # CHECK-DAG: fence.proxy.async.shared::cta
    kv.mbarrier_arrive(bar.ptr(1))  # CHECK-DAG: mbarrier.arrive.shared.b64
    # CHECK-DAG: barrier.cluster.arrive.aligned
    # CHECK-DAG: barrier.cluster.wait.aligned
    kv.cluster_barrier()
    c[2] = kv.cluster_rank()  # CHECK-DAG: mov.u32 %r{{[0-9]+}}, %cluster_ctarank
    began = kv.globaltimer()  # CHECK-DAG: mov.u64 %rd{{[0-9]+}}, %globaltimer
    kv.nanosleep(500)  # CHECK-DAG: nanosleep.u32 500
    c[3] = kv.i32(kv.globaltimer() - began)  # CHECK-DAG: mov.u64 %rd{{[0-9]+}}, %globaltimer
    c[4] = kv.smid()  # CHECK-DAG: mov.u32 %r{{[0-9]+}}, %smid
    kv.griddepcontrol_launch_dependents()  # CHECK-DAG: griddepcontrol.launch_dependents


# LLVM must not copy a barrier into both branches: threads of a warp would wait at different ones.
# CHECK-LABEL:   .entry conditions(
# CHECK-COUNT-1: barrier.cluster.arrive
# CHECK-NOT:     barrier.cluster.arrive
# CHECK:         bar.sync
# CHECK-NOT:     bar.sync
# CHECK:         bar.arrive
# CHECK-NOT:     bar.arrive
@show(W, target="sm_90a", block=64, cluster=2)
def conditions(out: W):
    if kv.thread_id.x == 0:
        out[0] = kv.cluster_rank()
    kv.cluster_barrier()
    if kv.thread_id.x == 0:
        out[1] = kv.cluster_rank()
    kv.named_barrier(1, 64)
    if kv.thread_id.x == 0:
        out[2] = 1
    kv.named_barrier_arrive(2, 128)
    if kv.thread_id.x == 0:
        out[3] = 1

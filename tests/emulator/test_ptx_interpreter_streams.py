# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels that start before those ahead of them have ended, in the PTX interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.emulator import grid as ptx
from kvarn.emulator.memory import Field
from kvarn.emulator.stream import Stream

WAIT, START = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
WARP0, WARP1 = "@%low bra other;\n{}\nother:", "@!%low bra other;\n{}\nother:"
READ = "ld.global.b32 %w, [%{}];".format
WRITE = "st.global.b32 [%{}], %tid;".format
COPY = "cp.async.ca.shared.global [%slot], [%{}], 4;\ncp.async.commit_group;\n{}\ncp.async.wait_group 0;\n".format
BULK = f"""
@%first mbarrier.init.shared.b64 [bars], 1;
@%first fence.mbarrier_init.release.cluster;
bar.sync 0;
@!%first bra done;
mbarrier.arrive.expect_tx.shared.b64 %state, [bars], 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [%base], 256, [bars];
{WAIT}
done:
"""
BULK_STORE = f"""
@!%first bra done;
cp.async.bulk.global.shared::cta.bulk_group [%base], [tile], 256;
{WAIT}
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
done:
"""
TOLD = f"""
@%first mbarrier.init.shared.b64 [bars], 32;
bar.sync 0;
@%low bra reader;
{WAIT}
mbarrier.arrive.shared.b64 %state, [bars];
bra end;
reader:
poll: mbarrier.try_wait.parity.shared.b64 %over, [bars], 0;
@!%over bra poll;
ld.global.b32 %w, [%a];
end:
"""


def run(*kernels: tuple[str, bool] | str, order=None, blocks: int = 1) -> None:
    """Run kernels of a stream, which have three buffers; a pair says whether its launch is programmatic."""
    stream, buffers = Stream(), [np.zeros(64, np.uint32) for _ in "abc"]
    for n, kernel in enumerate(kernels):
        body, programmatic = (kernel, True) if isinstance(kernel, str) else kernel
        text = f"""
.version 8.0
.target sm_90a
.address_size 64
.shared .align 8 .b8 bars[64];
.shared .align 128 .b8 tile[256];
.visible .entry k{n}(.param .u64 a, .param .u64 b, .param .u64 c)
.reqntid 64, 1, 1
{{
  mov.u32 %tid, %tid.x;
  mov.u32 %block, %ctaid.x;
  shl.b32 %to, %tid, 2;
  cvt.u64.u32 %at, %to;
  add.s32 %slot, %to, tile;
  setp.eq.u32 %first, %tid, 0;
  setp.lt.u32 %low, %tid, 32;
  setp.eq.u32 %zero, %block, 0;
  ld.param.u64 %base, [a];
  add.s64 %a, %base, %at;
  ld.param.u64 %b, [b];
  add.s64 %b, %b, %at;
  ld.param.u64 %c, [c];
  add.s64 %c, %c, %at;
{body}
  ret;
}}
"""
        fields = [Field(n, *np.lib.array_utils.byte_bounds(x)) for n, x in zip("abc", buffers, strict=True)]
        ptx.launch(
            text, f"k{n}", (blocks, 1, 1), (64, 1, 1), [x.ctypes.data for x in buffers], buffers, 0, order,
            around=ptx.Around(
                fields=fields,
                launched=lambda memory, n=n, early=programmatic: stream.launch(f"k{n}", early, memory, buffers),
            ),
        )  # fmt: skip


A, B, C = READ("a"), READ("b"), READ("c")
WRITES_A = WRITE("a")
CLEAN = {
    "reads after the wait": (WRITES_A, WAIT + A),
    "reads before it what the kernel ahead only reads": (WRITES_A + B, B + WAIT + A),
    "reads before it what the kernel ahead leaves alone": (WRITES_A, C + WAIT + A),
    "writes before it what the kernel ahead leaves alone": (WRITES_A + B, WRITE("c") + WAIT + A),
    "is launched as usual": (WRITES_A + START, (A + WRITES_A, False)),
    "has nothing ahead": (A + WRITES_A,),
    "hears of the wait at the block's barrier": (WRITES_A, WARP0.format(WAIT) + "bar.sync 0;" + A),
    "hears of the wait at a named barrier": (WRITES_A, WARP0.format(WAIT) + "bar.sync 1, 64;" + A),
    "hears of the wait at an mbarrier": (WRITES_A, TOLD),
    "the one ahead waited before it let this one start": (WRITES_A, WAIT + START + WRITE("b"), A + WAIT + B),
    "the one ahead waited and did not let this one start": (WRITES_A, WAIT, A),
    "the one ahead let this one start, waited, and is waited for": (WRITES_A, START + WAIT, WAIT + A),
    "one thread of the one ahead waited": (WRITES_A, f"@%first {WAIT}", WAIT + A),
    "the one ahead has no predecessor": ((WRITES_A, False), (WRITE("b") + START, False), A + WAIT + B),
}
FAULTY = {
    "reads without a wait": (WRITES_A, A),
    "reads before the wait": (WRITES_A, A + WAIT),
    "writes before the wait": (WRITES_A, WRITES_A + WAIT),
    "writes what the kernel ahead reads": (A, WRITES_A + WAIT),
    "adds to what the kernel ahead writes": (WRITES_A, "atom.global.add.u32 %w, [%a], %tid;" + WAIT),
    "starts a copy of a thread": (WRITES_A, COPY("a", WAIT)),
    "starts a bulk copy": (WRITES_A, BULK),
    "starts a bulk store": (WRITES_A, BULK_STORE),
    "another warp waits": (WRITES_A, WARP0.format(WAIT) + A),
    "another warp waits later": (WRITES_A, WARP0.format("bar.arrive 1, 64;" + WAIT) + WARP1.replace("other", "third")
        .format("bar.sync 1, 64;") + A),
    "another block waits": (WRITES_A, f"@%zero {WAIT}\n{A}"),
    "a wait does not reach the kernel before one that does not wait": (WRITES_A, WRITE("b"), WAIT + A),
    "the one ahead let this one start before it waited": (WRITES_A, START + WAIT, A + WAIT),
    "one block ahead let this one start before it waited": (WRITES_A, f"@!%zero {START}\n{WAIT}{START}", A + WAIT),
    "a warp ahead let this one start before the other waited": (
        WRITES_A, WARP1.format(WAIT) + WARP0.replace("other", "third").format(START), A + WAIT),
}  # fmt: skip
ORDERS = pytest.mark.parametrize("order", [*ptx.ORDERS, *ptx.RANDOM], ids=str)


@ORDERS
@pytest.mark.parametrize("kernels", CLEAN.values(), ids=CLEAN)
def test_what_the_kernels_ahead_are_done_with_may_be_used(kernels, order):
    run(*kernels, order=order, blocks=2)


@ORDERS
@pytest.mark.parametrize("kernels", FAULTY.values(), ids=FAULTY)
def test_what_a_kernel_ahead_may_still_use_is_not_touched_before_a_wait(kernels, order):
    last = len(kernels) - 1
    message = rf"kernel k{last} (reads|writes) a at 0x\w+, which kernel k0 before it (reads|writes) and may still run"
    with pytest.raises(ptx.EmulationError, match=message):
        run(*kernels, order=order, blocks=2)

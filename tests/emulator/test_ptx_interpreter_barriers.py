# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Barriers, clusters, copies that report to a barrier and registers that warps hand over, in the PTX interpreter.

Each rule with a kernel in PTX that keeps it, under every order, and one that breaks it, which is reported.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvarn.emulator import grid as ptx

ORDERS = pytest.mark.parametrize("order", [*ptx.ORDERS, *ptx.RANDOM], ids=str)


def run(body: str, threads: int = 64, cluster: int = 1, order=None, words: int = 64, directives: str = "", x=None):
    """The words that a kernel wrote to its buffer ``out``; ``x`` is one that it reads."""
    x = np.arange(words, dtype=np.uint32) if x is None else x
    out = np.full(words * cluster, 0xDEAD, np.uint32)
    text = f"""
.version 8.0
.target sm_90a
.address_size 64
.shared .align 8 .b8 bars[64];
.shared .align 1024 .b8 tile[1024];
.visible .entry k(.param .u64 x, .param .u64 out)
.reqntid {threads}, 1, 1
{directives}
{{
  mov.u32 %tid, %tid.x;
  shr.u32 %warp, %tid, 5;
  ld.param.u64 %x, [x];
  ld.param.u64 %out, [out];
  shl.b32 %to, %tid, 2;
  cvt.u64.u32 %at, %to;
  add.s64 %from, %x, %at;
  add.s64 %mine, %out, %at;
  add.s32 %slot, %to, tile;
  setp.eq.u32 %first, %tid, 0;
  setp.lt.u32 %low, %tid, 32;
  setp.eq.u32 %yes, 0, 0;
  mov.u32 %rank, %cluster_ctarank;
{body}
  ret;
}}
"""
    grid, shape = (cluster, 1, 1), (cluster, 1, 1)
    ptx.launch(text, "k", grid, (threads, 1, 1), [x.ctypes.data, out.ctypes.data], [x, out], 0, order, shape)
    return out


def refuse(body: str, message: str, **options) -> None:
    with pytest.raises(ptx.EmulationError, match=message):
        run(body, **options)


def wait(address: str, phase: int | str, name: str) -> str:
    return f"""
{name}:
  mbarrier.try_wait.parity.shared.b64 %over, [{address}], {phase};
  @!%over bra {name};"""


INIT = "@%first mbarrier.init.shared.b64 [bars], COUNT;\nbar.sync 0;"
SHOWN = INIT.replace("bar.sync", "@%first fence.mbarrier_init.release.cluster;\nbar.sync")

# --- barriers of some threads ------------------------------------------------------------------------

# The second warp writes, and only arrives; the first waits for it, and reads what it wrote.
ARRIVE = """
@%low bra reader;
st.shared.b32 [%slot], %tid;
bar.arrive 3, 64;
bra end;
reader:
bar.sync 3, 64;
ld.shared.b32 %w, [%slot+128];
st.global.b32 [%mine], %w;
end:
"""


@ORDERS
@pytest.mark.parametrize("spelling", ["bar", "barrier.cta"])
def test_threads_may_arrive_without_a_wait(order, spelling):
    found = run(ARRIVE.replace("bar.", f"{spelling}."), order=order)
    assert found[:32].tolist() == list(range(32, 64))


def test_threads_that_do_not_arrive_are_a_hang_that_says_where():
    message = (
        r"no warp can continue:\n  block \(0, 0, 0\) warp 0: waits at barrier 3 turn_0: 32 of 64 threads came; "
        r"bar.sync 3, 64 \(PTX line \d+, kernel.py:7\)"
    )
    body = ARRIVE.replace("bar.arrive 3, 64;", "").replace("bar.sync 3, 64;", "bar.sync 3, 64; // kv.barrier turn_0")
    refuse('.file 1 "/a/b/kernel.py"\n.loc 1 7 3\n' + body, message)


@ORDERS
def test_a_warp_stands_at_a_named_barrier_when_all_of_its_branches_have_ended(order):
    """The barrier comes before a branch to it in the text: compilers lay rarely run blocks behind the others."""
    out = run(
        """
  and.b32 %lane, %tid, 31;
  mov.b32 %v, 7;
  setp.lt.u32 %p, %lane, 16;
  @%p bra FEW;
JOINED:
  bar.sync 1, 64;
  st.global.u32 [%mine], %v;
  bra END;
FEW:
  mov.b32 %v, 9;
  bra JOINED;
END:
""", order=order,
    )  # fmt: skip
    np.testing.assert_array_equal(out, np.where(np.arange(64) % 32 < 16, 9, 7))


@pytest.mark.parametrize("how", ["sync", "arrive"])
def test_a_warp_whose_lanes_stand_at_two_copies_of_a_named_barrier_hangs(how):
    refuse(
        f"""
  and.b32 %lane, %tid, 31;
  setp.lt.u32 %p, %lane, 16;
  @%p bra FEW;
  bar.{how} 1, 64;
  bra END;
FEW:
  bar.{how} 1, 64;
END:
""", r"bar\.",
    )  # fmt: skip


def test_a_barrier_is_of_one_number_of_threads():
    refuse(ARRIVE.replace("bar.sync 3, 64", "bar.sync 3, 32"), "barrier 3 is used with (64|32) threads elsewhere")
    crowd = "setp.lt.u32 %few, %tid, 64;\n@%few bar.arrive 1, 32;"  # two warps, at once and one after another
    refuse(crowd, "more threads than that arrive here", threads=96)
    refuse("bar.sync 16, 64;", "numbered 0 to 15, got 16")
    refuse("bar.sync 1, 48;", "threads must be a multiple of 32")


# --- mbarriers ---------------------------------------------------------------------------------------


@ORDERS
def test_a_phase_is_over_when_all_have_arrived(order):
    body = f"""
{INIT.replace("COUNT", "32")}
@%low bra reader;
st.shared.b32 [%slot], %tid;
mbarrier.arrive.shared.b64 %state, [bars];
bra end;
reader: {wait("bars", 0, "poll")}
ld.shared.b32 %w, [%slot+128];
st.global.b32 [%mine], %w;
end:
"""
    assert run(body, order=order)[:32].tolist() == list(range(32, 64))


def test_a_hang_names_the_mbarrier_its_phase_and_what_is_missing():
    init = "// kv.barrier full_k\n@%first mbarrier.init.shared.b64 [bars+8], 2;\nbar.sync 0;"
    arrive = "mbarrier.arrive.expect_tx.shared.b64 %state, [bars+8], 96;"
    message = (
        r"warps 0, 1: waits at full_k \(at bars\+8\) for the end of its phase 0: waits for 96 bytes and 1 arrivals "
        r"that never come, of 2; mbarrier.try_wait.parity.shared.b64 %over, \[bars\+8\], 0 \(PTX line \d+\)"
    )
    refuse(f"{init}\n@%first {arrive}\n{wait('bars+8', 0, 'poll')}", message)
    refuse(f"{init}\n{arrive}", "more than 2 arrivals at full_k")
    refuse(
        f"{init}\n@%first {arrive}", r"full_k \(at bars\+8\) still waits for 96 bytes and 1 of 2 arrivals at the end"
    )
    refuse(f"{init}\n@%first mbarrier.arrive.shared.b64 %state, [bars+8];", "0 bytes and 1 of 2 arrivals at the end")
    refuse(wait("bars+16", 0, "poll"), r"no barrier was initialised at bars\+16")


@ORDERS
def test_a_wait_that_ends_without_success_lets_its_threads_do_something_else(order):
    """As a wait's time limit does: here the waiting warp arrives itself."""
    body = f"""
{INIT.replace("COUNT", "1")}
mbarrier.try_wait.parity.shared.b64 %over, [bars], 0;
@%first mbarrier.arrive.shared.b64 %state, [bars];
{wait("bars", 0, "poll")}
"""
    run(body, order=order, threads=32)


# --- copies that report to a barrier -----------------------------------------------------------------

COPIES = f"""
{INIT.replace("COUNT", "64")}
cp.async.ca.shared.global [%slot], [%from], 4;
cp.async.mbarrier.arrive.noinc.shared.b64 [bars];
WAIT
xor.b32 %other, %slot, 128;
ld.shared.b32 %w, [%other];
st.global.b32 [%mine], %w;
"""


@ORDERS
def test_a_barrier_counts_copies_of_threads(order):
    found = run(COPIES.replace("WAIT", wait("bars", 0, "poll")), order=order)
    assert found.tolist() == [*range(32, 64), *range(32)]
    counted = COPIES.replace(".noinc", "").replace("bars], 64", "bars], 65")  # 64 that cancel out, and one
    counted = counted.replace("WAIT", "@%first mbarrier.arrive.shared.b64 %state, [bars];\nWAIT")
    refuse(counted.replace("WAIT", wait("bars", 0, "poll")), "64 arrivals that never come", order=order)


def test_copies_that_nothing_waits_for_are_not_there():
    late = run(COPIES.replace("WAIT", "bar.sync 0;"), order=ptx.Order("together", "late"))
    assert (late == 0xFFFFFFFF).all()


@ORDERS
def test_a_bulk_copy_counts_bytes(order):
    body = f"""
{SHOWN.replace("COUNT", "1")}
@!%first bra expected;
mbarrier.arrive.expect_tx.shared.b64 %state, [bars], 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [%x], 256, [bars];
expected: {wait("bars", 0, "poll")}
ld.shared.b32 %w, [%slot];
add.s32 %w, %w, 1;
st.shared.b32 [%slot], %w;
FENCE
bar.sync 0;
@!%first bra end;
cp.async.bulk.global.shared::cta.bulk_group [%out], [tile], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
end:
"""
    assert run(body.replace("FENCE", "fence.proxy.async;"), order=order).tolist() == list(range(1, 65))
    refuse(body.replace("FENCE", ""), r"reads tile.* wrote by an ordinary store without a fence", order=order)


# --- clusters ----------------------------------------------------------------------------------------

MEET = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"

# Every block reads what the other has in its shared memory.
REMOTE = f"""
mad.lo.s32 %w, %rank, 1000, %tid;
st.shared.b32 [%slot], %w;
{MEET}
xor.b32 %other, %rank, 1;
mapa.shared::cluster.u32 %there, %slot, %other;
ld.shared::cluster.b32 %w, [%there];
mul.wide.u32 %skip, %rank, 256;
add.s64 %mine, %mine, %skip;
st.global.b32 [%mine], %w;
LAST
"""


@ORDERS
def test_blocks_of_a_cluster_read_each_others_shared_memory(order):
    found = run(REMOTE.replace("LAST", MEET), cluster=2, order=order)
    assert found.tolist() == [*range(1000, 1064), *range(64)]


def test_a_block_must_not_end_while_others_read_it():
    for order in (ptx.Order("forward"), ptx.Order("backward")):
        refuse(REMOTE.replace("LAST", ""), "of the cluster has ended, and its shared memory", cluster=2, order=order)
    refuse(REMOTE.replace("LAST", MEET).replace("ld.shared::cluster", "ld.shared"), "outside the .* bytes", cluster=2)


# Block 1 tells block 0's barrier that it has written there.
TELL = f"""
{INIT.replace("COUNT", "ARRIVALS")}
{MEET}
setp.eq.u32 %leads, %rank, 0;
@%leads bra reader;
mapa.shared::cluster.u32 %there, %slot, 0;
st.shared::cluster.b32 [%there], %tid;
mapa.shared::cluster.u32 %bar, bars, 0;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%bar];
bra end;
reader: {wait("bars", 0, "poll")}
ld.shared.b32 %w, [%slot];
st.global.b32 [%mine], %w;
end:
{MEET}
"""


@ORDERS
def test_a_thread_arrives_at_the_barrier_of_another_block(order):
    body = TELL.replace("ARRIVALS;", "64; // kv.barrier empty")
    assert run(body, cluster=2, order=order)[:64].tolist() == list(range(64))
    lost = body.replace("mapa.shared::cluster.u32 %bar, bars, 0", "mapa.shared::cluster.u32 %bar, bars, 1")
    message = (
        r"block \(0, 0, 0\) warps 0, 1: waits at empty \(at bars of block 0\).*64 arrivals(.|\n)*waits for all threads"
    )
    refuse(lost, message, cluster=2, order=order)


@ORDERS
def test_a_store_to_another_block_reports_to_its_barrier(order):
    store = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%there], %tid, [%bar];"
    expect = "@%first mbarrier.arrive.expect_tx.shared.b64 %state, [bars], 256;"
    body = TELL.replace("ARRIVALS", "1").replace("st.shared::cluster.b32 [%there], %tid;", "")
    body = body.replace("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%bar];", store)
    body = body.replace("reader:", f"reader: {expect}")
    assert run(body, cluster=2, order=order)[:64].tolist() == list(range(64))


# --- who sees that an mbarrier was set up ------------------------------------------------------------

RELAXED = MEET.replace("arrive", "arrive.relaxed")
FENCE = "@%first fence.mbarrier_init.release.cluster;"
SHOWS = {
    "fence": f"SETUP\n{FENCE}\n{RELAXED}",
    "fence of the proxy": f"SETUP\n@%first fence.proxy.async.shared::cta;\n{RELAXED}",
    "barrier that releases": f"SETUP\n{MEET}",
    "relaxed barrier": f"SETUP\n{RELAXED}",
    "fence too early": f"{FENCE}\nSETUP\n{RELAXED}",
    "fence of another thread": f"setp.eq.u32 %next, %tid, 1;\nSETUP\n@%next {FENCE.split(' ', 1)[1]}\n{RELAXED}",
}
FENCES, BARRIERS = ("fence", "fence of the proxy"), ("fence", "fence of the proxy", "barrier that releases")
EXPECT = "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%bar],"
USES = {  # of block 0's barrier by thread 0 of block 1, but where it is named here
    "its own block arrives": (tuple(SHOWS), "0", "mbarrier.arrive.shared.b64 %state, [bars];"),
    "its own block copies": (FENCES, "0", "mbarrier.arrive.expect_tx.shared.b64 %state, [bars], 256;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [%x], 256, [bars];"),
    "another block arrives": (BARRIERS, "1", "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%bar];"),
    "another block copies": (FENCES, "1", f"{EXPECT} 256;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%there], [%x], 256, [%bar];"),
    "another block stores": (BARRIERS, "1", f"{EXPECT} 4;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%there], %tid, [%bar];"),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("shown", SHOWS)
def test_copies_and_other_blocks_use_an_mbarrier_that_was_shown_to_them(shown, use):
    enough, rank, instructions = USES[use]
    body = f"""
{SHOWS[shown].replace("SETUP", "@%first mbarrier.init.shared.b64 [bars], 1;")}
setp.eq.u32 %uses, %rank, {rank};
and.pred %uses, %uses, %first;
mapa.shared::cluster.u32 %bar, bars, 0;
mapa.shared::cluster.u32 %there, tile, 0;
@!%uses bra used;
{instructions}
used:
setp.ne.u32 %other, %rank, 0;
@%other bra end;
{wait("bars", 0, "poll")}
end:
{MEET.replace(".aligned", "")}
"""
    if shown in enough:
        run(body, cluster=2)
    else:
        refuse(body, "was initialised by thread 0 without a later fence.mbarrier_init", cluster=2)


# --- registers ---------------------------------------------------------------------------------------

# Four warps give up what the other eight claim.
HAND_OVER = """
setp.lt.u32 %gives, %warp, 4;
@%gives bra give;
setmaxnreg.inc.sync.aligned.u32 240;
bra end;
give:
setmaxnreg.dec.sync.aligned.u32 24;
end:
st.global.b32 [%mine], %tid;
"""


@ORDERS
def test_warpgroups_hand_registers_over(order):
    given = {"threads": 384, "words": 384, "directives": ".minnctapersm 1"}  # 168 a thread
    assert run(HAND_OVER, order=order, **given).tolist() == list(range(384))
    short = HAND_OVER.replace("u32 24;", "u32 144;")
    refuse(short, "warps? .*: waits for registers: .* are free; setmaxnreg.inc", order=order, **given)


def test_setmaxnreg_is_of_whole_warpgroups_and_goes_one_way():
    given = {"threads": 384, "words": 384, "directives": ".maxnreg 168"}
    refuse(HAND_OVER.replace("inc", "dec"), "setmaxnreg.dec.* 240: warp 4 has 168 registers, which is less", **given)
    refuse(HAND_OVER.replace("dec", "inc"), "setmaxnreg.inc.* 24: warp 0 has 168 registers, which is more", **given)
    refuse(HAND_OVER.replace("240", "250"), "must be a multiple of 8 from 24 to 256, got 250", **given)
    some = HAND_OVER.replace("%gives, %warp, 4", "%gives, %warp, 3").replace("240", "168")
    refuse(some, "warps 0 to 3 are a warpgroup, but did not run the same", **given)


# --- what warps do together --------------------------------------------------------------------------


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_are_stored_as_they_are_loaded(count, trans):
    registers = [f"%w{k}" for k in range(count)]
    fill = "\n".join(f"mad.lo.s32 {r}, %tid, 65537, {100 * k}00;" for k, r in enumerate(registers))
    listed = "{" + ", ".join(registers) + "}"
    back = "{" + ", ".join(r.replace("w", "v") for r in registers) + "}"
    body = f"""
{fill}
shl.b32 %row, %tid, 4;
add.s32 %row, %row, tile;
stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%row], {listed};
bar.warp.sync -1;
ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {back}, [%row];
""" + "\n".join(f"xor.b32 %d{k}, %w{k}, %v{k};\nst.global.b32 [%mine+{128 * k}], %d{k};" for k in range(count))
    assert not run(body, threads=32, words=128)[: 32 * count].any()
    # The first word of each matrix row, at 16 bytes a row: of row r and column 0 and 1.
    lines = f"{fill}\nshl.b32 %row, %tid, 4;\nadd.s32 %row, %row, tile;\n"
    lines += f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%row], {listed};\nbar.warp.sync -1;\n"
    lines += "ld.shared.b32 %w, [%row];\nst.global.b32 [%mine], %w;"
    found = run(lines, threads=32, words=128)[: 8 * count].view(np.uint16).reshape(count, 8, 2)
    lane = np.arange(32, dtype=np.uint32)
    for k in range(count):
        matrix = (lane * 65537 + 10000 * k).astype(np.uint32).view(np.uint16).reshape(8, 8)
        np.testing.assert_array_equal(found[k], (matrix.T if trans else matrix)[:, :2])


def test_one_lane_is_elected():
    body = "mov.u32 %w, 7;\nelect.sync %who|%me, -1;\n@%me mov.u32 %w, 9;\nst.global.b32 [%mine], %w;"
    found = run("griddepcontrol.wait;\n" + body + "\ngriddepcontrol.launch_dependents;")
    assert found.reshape(2, 32).tolist() == [[9] + [7] * 31] * 2


@ORDERS
def test_a_label_in_braces_is_known_there_only(order):
    """As an asm statement with a loop of its own, twice."""
    loop = "{ .reg .pred p;\nAGAIN: add.s32 %w, %w, 1;\nsetp.lt.s32 p, %w, LIMIT;\n@p bra AGAIN; }\n"
    body = "mov.u32 %w, 0;\n" + loop.replace("LIMIT", "5") + loop.replace("LIMIT", "3") + "st.global.b32 [%mine], %w;"
    assert set(run(body, order=order).tolist()) == {6}

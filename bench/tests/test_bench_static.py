# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Figures of the compiled code that must not get worse, for sm_90a, and the counting behind them.

A bound is what the code has now with a little room. Whoever makes one better lowers the bound; whoever must raise one
says in the commit what was bought with it.
"""

import importlib
import re
import sys
from pathlib import Path

import pytest

import kvarn as kv
from kvarn.dialect import layout
from kvarn.runtime import assemble

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
static = importlib.import_module("bench.static")
cases = importlib.import_module("bench.cases")

ROWS = {row.name: row for row in cases.TABLE}
DECODES = ["b64_c4k", "b64_c4k_fp8", "b64_c4k_p1", "b64_c4k_p1_fp8", "b16_c8k", "b16_c8k_fp8", "b1_c32k", "b1_c32k_fp8"]


def _has_assembler():
    try:
        assemble.assemble(".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry f() { ret; }\n", "sm_80")
    except assemble.MissingToolError:
        return False
    return True


needs_assembler = pytest.mark.skipif(not _has_assembler(), reason=f"no assembler: {assemble.INSTALL_ASSEMBLER}")


def figures(name, **options):
    return static.figures(ROWS[name], **options)["kernels"]


def total(mix, prefix, but=""):
    """How many instructions of the classes that begin with a text."""
    return sum(count for name, count in mix.items() if name.startswith(prefix) and not (but and but in name))


def no_local_memory(kernel):
    assert kernel["spills"] == 0
    assert kernel["stack"] == 0
    assert total(kernel["ptx"], "load local") + total(kernel["ptx"], "store local") == 0
    assert kernel["sass"].get("LDL", 0) + kernel["sass"].get("STL", 0) == 0


@needs_assembler
@pytest.mark.parametrize(("dtype", "head_size", "invariant"), [("f8e4m3", 128, True), ("bf16", 512, False)])
def test_decode_spills_nothing_batch_invariant_or_of_heads_of_512(dtype, head_size, invariant):
    row = cases.Row("one", "", cases.Decode(64, 4096, size=head_size), dtype)
    for kernel in static.figures(row, schedule={"batch_invariant": invariant})["kernels"].values():
        no_local_memory(kernel)


@needs_assembler
@pytest.mark.parametrize("name", DECODES)
def test_decode_reads_the_cache_16_bytes_at_a_time_and_spills_nothing(name):
    kernels = figures(name)
    decode = kernels["attention_decode"]
    for kernel in kernels.values():
        no_local_memory(kernel)
    # One copy of the code for a range's first tiles, and two, with checks and without, for those that follow: each
    # copies K and V of 16 tokens, or of 32, in 16 bytes per lane.
    assert decode["ptx"]["cp.async"] in (24, 48)
    # What is read otherwise: page ids, lengths, offsets, the query, counters; partial results in 16 bytes.
    assert total(decode["ptx"], "load global", but=" 16 B") <= 44
    assert decode["registers"] <= 255
    assert decode["ptx"]["all"] <= 2600


@needs_assembler
def test_prefill_multiplies_by_warpgroups_and_spills_nothing():
    kernel = figures("pf_b8_s4k")["attention"]
    no_local_memory(kernel)
    text = static.compiled(static.specialisation(ROWS["pf_b8_s4k"])).asm["ptx"]
    # Scores of 128 keys in 8 steps of the head size; 128 elements of values in 8 steps of keys. The loop is rotated:
    # the first scores and the last values are beside it.
    assert len(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n128k16", text)) == 32
    assert "mma.sync" not in text


@needs_assembler
def test_prefill_without_the_pass_for_roles_has_no_warpgroup_that_copies():
    """Left out, the pass leaves nothing undone: ptxas would serialize the products of 384 threads with one role."""
    kernel = figures("pf_b8_s4k", disable=["specialize-kv-warps"])["attention"]
    no_local_memory(kernel)
    assert kernel["registers"] > 65536 // 384
    assert kernel["ptx"]["all"] < figures("pf_b8_s4k")["attention"]["ptx"]["all"]


@needs_assembler
@pytest.mark.parametrize("name", ["b64_c4k", "b64_c4k_fp8"])
def test_every_copy_of_decode_is_of_16_bytes(name):
    text = static.compiled(static.specialisation(ROWS[name])).asm["ptx"]
    copies = re.findall(r"cp\.async\.[^;]*;", text)
    copies = [c for c in copies if "commit" not in c and "wait" not in c]
    assert copies
    form = r"cp\.async\.cg\.shared\.global\.L2::cache_hint \[[^]]*\], \[[^]]*\], 16(?:, %r\d+)?, %rd\d+;"
    assert all(re.fullmatch(form, c) for c in copies)


@needs_assembler
@pytest.mark.parametrize("name", ["b64_c4k", "b64_c4k_fp8"])
def test_decode_fits_three_blocks_a_multiprocessor_when_asked_to(name):
    decode = figures(name, schedule={"stages": 2, "blocks": 3, "tile": 16})["attention_decode"]
    assert decode["registers"] <= 168
    assert decode["spills"] <= 64  # bytes; two blocks, the schedule that is chosen, spill nothing
    assert decode["blocks"] >= 3


@needs_assembler
def test_8_bit_decode_converts_no_element_twice():
    # 16 tokens of K and of V, 128 elements each, two an instruction: of one lane, 64; and what the results take.
    mix = figures("b64_c4k_fp8")["attention_decode"]["ptx"]
    assert 64 <= mix["convert"] <= 64 + 76
    assert mix["mma"] == 16


@needs_assembler
@pytest.mark.parametrize(("name", "registers"), [("app_n256_decode", 40), ("gather_b64_c2k", 64)])
def test_copies_move_vectors_of_16_bytes_and_nothing_narrower(name, registers):
    (kernel,) = figures(name).values()
    no_local_memory(kernel)
    assert total(kernel["ptx"], "load global 16 B") == kernel["ptx"]["store global 16 B"] > 0
    assert total(kernel["ptx"], "store global", but=" 16 B") == 0
    assert kernel["registers"] <= registers


@needs_assembler
def test_an_8_bit_append_writes_8_bytes_for_16_that_it_reads():
    (kernel,) = figures("app_n8192_prefill_fp8").values()
    no_local_memory(kernel)
    loads = total(kernel["ptx"], "load global 16 B")
    assert loads > 0
    assert total(kernel["ptx"], "store global") == kernel["ptx"]["store global 8 B"] == loads


@needs_assembler
@pytest.mark.parametrize(("name", "registers"), [("app_n8192_prefill_rope", 64), ("app_n8192_prefill_fp8_rope", 72)])
def test_rope_append_stays_out_of_local_memory(name, registers):
    (kernel,) = figures(name).values()
    no_local_memory(kernel)
    assert kernel["registers"] <= registers
    assert total(kernel["ptx"], "load global", but=" 16 B") <= 9
    # Eight cosines and sines, once for all of a thread's heads; two units of the query, one of the key, a vector.
    assert kernel["ptx"]["load global 16 B nc"] == 4
    assert kernel["ptx"]["load global 16 B"] == 7


@needs_assembler
def test_a_kernel_of_eight_lanes_reads_and_writes_16_bytes():
    @kv.kernel
    def scale_keys(cache: kv.KVCache, alpha: kv.f32):
        b, t = kv.block_id.x, kv.block_id.y
        if t < cache.cache_length(b):
            for h in range(cache.num_heads):
                d = kv.thread_id.x * 8
                cache.store(b, h, t, d, cache.dtype(cache.load(b, h, t, d, width=8, dtype=kv.f32) * alpha))

    spec = layout.spec_of("paged", "bf16", 8, 128, page_size=16)
    made = kv.compile(scale_keys, spec, kv.f32, target="sm_90a")
    mix = static.instruction_mix(made.asm["ptx"])["scale_keys"]
    assert mix["load global 16 B"] == mix["store global 16 B"] in (1, 8)  # 8: the loop over heads is unrolled
    # The length and the page, looked up once for all heads.
    assert total(mix, "load global", but=" 16 B") <= 2
    assert made.stats["registers"] <= 32
    assert made.stats["spills"] == 0


PTX = """
.visible .entry first(
	.param .u64 p
)
{
	.reg .b32 	%r<9>;
	ld.param.b64 	%rd1, [p];  // ld.global.b32 in a comment
	ld.global.nc.v4.b32 	{%r1, %r2, %r3, %r4}, [%rd1];
	@%p1 ld.global.b16 	%rs1, [%rd1+2];
	st.global.v2.b64 	[%rd1], {%rd2, %rd3};
	cp.async.cg.shared.global [%r1], [%rd1], 16;
	cp.async.commit_group;
	cvt.u64.u32 	%rd4, %r1;
	{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %r1; cvt.rn.f16x2.e4m3x2 %r2, lo; cvt.rn.f16x2.e4m3x2 %r3, hi; }
	div.s32 	%r4, %r1, %r2;
	div.rn.f32 	%f1, %f2, %f3;
	@%p1 bra 	$L__BB0_2;
	ret;

}
.visible .entry second()
{
	st.local.b32 	[%rd1], %r1;
	ret;

}
"""


def test_instructions_are_counted_by_class_and_width():
    assert static.instruction_mix(PTX) == {
        "first": {
            "load global 16 B nc": 1, "load global 2 B": 1, "store global 16 B": 1, "cp.async": 1, "convert": 2,
            "divide integers": 1, "branch": 1, "all": 14,
        },
        "second": {"store local": 1, "all": 2},
    }  # fmt: skip


def test_machine_instructions_are_counted_by_kernel():
    sass = """
	.section	.text.f,"ax",@progbits
.text.f:
        /*0000*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0010*/              @!P0 STL [R1], R4 ;
        /*0020*/                   IMAD R0, R1, R2, R3 ;
	.section	.text.g,"ax",@progbits
        /*0000*/                   EXIT ;
"""
    assert static.machine_mix(sass) == {"f": {"LDG.128": 1, "STL": 1, "all": 3}, "g": {"all": 1}}


@pytest.mark.parametrize(
    ("name", "bytes_", "sectors"),
    [
        ("b64_c4k", 4096.25, 128),
        ("b64_c4k_fp8", 2048.25, 64),
        ("b64_c4k_p1", 4100, 128),
        ("mla_b64_c4k_h128", 1152 + 1 / 16, 36),
    ],
)
def test_the_traffic_of_a_token_follows_from_the_layout(name, bytes_, sectors):
    found = static.traffic(ROWS[name])
    assert found["bytes"] == pytest.approx(bytes_)
    assert found["sectors"] == pytest.approx(sectors, abs=0.2)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks"),
    [(128, 168, 0, 3), (128, 128, 0, 4), (128, 32, 100 * 1024, 2), (256, 32, 0, 8), (1024, 64, 0, 1), (32, 16, 0, 32)],
)
def test_blocks_of_a_multiprocessor(threads, registers, shared, blocks):
    assert static.occupancy("sm_90a", threads, registers, shared).blocks == blocks

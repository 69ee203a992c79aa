# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""PTX to machine code with whatever tools are here, and the messages where they are not."""

import pytest

from kvarn.artifact import Artifact, Entry, Step
from kvarn.env import env
from kvarn.runtime import assemble, assembler_log, device

PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry add_one(.param .u64 x)
{
  .reg .b32 %r<3>; .reg .b64 %rd<5>; .reg .f32 %f<3>;
  .shared .align 4 .b8 scratch[512];
  ld.param.u64 %rd1, [x];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, scratch;
  st.shared.u32 [%r2], %r1;
  cvta.to.global.u64 %rd2, %rd1;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd2, %rd3;
  ld.global.f32 %f1, [%rd4];
  add.f32 %f2, %f1, 0f3F800000;
  st.global.f32 [%rd4], %f2;
  ret;
}
.visible .entry nothing()
{
  ret;
}
"""

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attention' for 'sm_90a'
ptxas info    : Function properties for attention
    64 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 64 bytes cumulative stack size, 49152 bytes smem
ptxas info    : Compile time = 36.194 ms
ptxas info    : Function properties for helper
    8 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
ptxas info    : Compiling entry function 'append' for 'sm_90a'
ptxas info    : Function properties for append
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""


@pytest.fixture(params=["nvjitlink", "ptxas"])
def tool(request, monkeypatch):
    """Assemble with one tool or the other, where it is."""
    if request.param == "nvjitlink":
        if assemble.nvjitlink() is None:
            pytest.skip("nvJitLink is not installed: pip install nvidia-nvjitlink")
    else:
        if assemble.find_tool("ptxas") is None:
            pytest.skip("there is no ptxas on PATH")
        monkeypatch.setattr(assemble, "nvjitlink", lambda: None)
    return request.param


def test_cubin_and_figures(tool):
    made = assemble.assemble(PTX, "sm_80")
    assert made.cubin[:4] == b"\x7fELF"
    assert tool.lower() in made.tool.lower()
    assert set(made.kernels) == {"add_one", "nothing"}
    assert made.kernels["add_one"].shared_bytes == made.shared_bytes == 512
    assert 4 <= made.kernels["add_one"].registers == made.registers <= 32
    assert (made.spill_stores, made.spill_loads, made.stack_bytes) == (0, 0, 0)


def test_options_reach_the_assembler(tool):
    many = "".join(f"ld.global.f32 %f{i}, [%rd4+{4 * i}];" for i in range(3, 64))
    many += "".join(f"st.global.f32 [%rd4+{4 * i + 512}], %f{i};" for i in range(3, 64))
    ptx = PTX.replace(".reg .f32 %f<3>", ".reg .f32 %f<64>").replace("ret;", many + " ret;", 1)
    free, bound = assemble.assemble(ptx, "sm_80"), assemble.assemble(ptx, "sm_80", ["--maxrregcount=24"])
    assert free.registers > 24 >= bound.registers


def test_mistakes_quote_the_ptx_or_name_the_chip(tool):
    wrong = [
        (PTX.replace("add.f32", "add.fxx"), "sm_80", r"(?s)for sm_80:.*Unknown modifier.*\n  17: add.fxx %f2"),
        (PTX.replace(".target sm_80", ".target sm_90"), "sm_80", "does not assemble for sm_80"),
        (PTX, "sm_11", "sm_11"),
    ]
    for ptx, chip, message in wrong:
        with pytest.raises(assemble.AssemblyError, match=message):
            assemble.assemble(ptx, chip)
    for chip in ("sm_80; rm -rf", "compute_80", ""):
        with pytest.raises(ValueError, match="chip must be named like sm_90a"):
            assemble.assemble(PTX, chip)


def test_figures_are_read_a_kernel():
    found = assemble.figures(LOG)
    assert found == {"attention": assemble.Figures(168, 24, 32, 64, 49152), "append": assemble.Figures(32, 0, 0, 0, 0)}


def test_sass_has_the_kernels():
    if assemble.nvjitlink() is None and assemble.find_tool("ptxas") is None:
        pytest.skip("there is no assembler")
    if assemble.find_tool("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    text = assemble.disassemble(assemble.assemble(PTX, "sm_80").cubin)
    assert ".text.add_one" in text
    assert "FADD" in text
    with pytest.raises(ValueError, match="must be an ELF file"):
        assemble.disassemble(b"no cubin")
    with pytest.raises(ValueError, match="cannot read the cubin"):
        assemble.disassemble(b"\x7fELF and nothing else")


def test_missing_tools_say_what_to_install(monkeypatch):
    monkeypatch.setattr(assemble, "nvjitlink", lambda: None)
    monkeypatch.setattr(assemble, "find_tool", lambda name, override="": None)
    with pytest.raises(assemble.MissingToolError, match="pip install nvidia-nvjitlink"):
        assemble.assemble(PTX, "sm_80")
    with pytest.raises(assemble.MissingToolError, match="pip install nvidia-cuda-nvdisasm"):
        assemble.disassemble(b"\x7fELF")
    with pytest.raises(assemble.MissingToolError, match=r"with wgmma or setmaxnreg need: pip install nvidia-cuda-nvcc"):
        assemble.assemble(KEPT, "sm_90a")
    monkeypatch.undo()
    with env.override(ptxas="/nowhere/ptxas"), pytest.raises(assemble.MissingToolError, match="KVARN_PTXAS names it"):
        assemble.assemble(PTX, "sm_80")


def test_artifacts_get_machine_code_for_several_chips(tool):
    entries = [Entry("add_one", [], []), Entry("nothing", [], [])]
    steps = [Step("nothing", (1, 1, 1), (1, 1, 1))]
    a = Artifact("k", "sm_80", "8.0", {"ptx": PTX}, entries, steps=steps)
    made = assemble.with_cubins(a, ("sm_80", "sm_86", "sm_90"))
    assert set(made.code) == {"ptx", "cubin", "cubin.sm_86", "cubin.sm_90"}
    assert made.cubin("sm_86") != made.cubin("sm_80")
    assert device.choose_image(made, (8, 9), None, "here")[0] == "cubin.sm_86"
    assert device.choose_image(made, (10, 0), None, "here")[0] == "ptx"
    assert set(assemble.with_cubins(a).code) == {"ptx", "cubin"}
    for target, chip in (("sm_80", "sm_75"), ("sm_90a", "sm_90"), ("sm_90a", "sm_100a")):
        with pytest.raises(ValueError, match=f"chip {chip} cannot run PTX for {target}"):
            assemble.with_cubins(a.replace(target=target), (chip,))
    with pytest.raises(ValueError, match="must have PTX"):
        assemble.with_cubins(a.replace(code={}))


# --- products and register counts ------------------------------------------------------------------

PRODUCT = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry plain() { ret; }
.visible .entry product(.param .u64 out, .param .u64 a)
.reqntid 128, 1, 1
.maxnreg 168
{
  .reg .f32 %f<9>; .reg .b64 %rd<6>; .reg .b32 %r<2>; .reg .pred %p;
  ld.param.u64 %rd1, [out];
  ld.param.u64 %rd2, [a];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd3, %r1, 16;
  add.s64 %rd4, %rd1, %rd3;
  setp.ne.u32 %p, 0, 0;
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd2, %rd2, %p, 1, 1, 0, 0;
  wgmma.commit_group.sync.aligned;
  WHILE
  wgmma.wait_group.sync.aligned 0;
  st.global.v4.f32 [%rd4], {%f1, %f2, %f3, %f4};
  ret;
}
"""
KEPT = PRODUCT.replace("WHILE", "setmaxnreg.inc.sync.aligned.u32 240;")
# An accumulator is read while its product is under way; no register count is known for setmaxnreg.
SPOILT = [(PRODUCT.replace("WHILE", "add.f32 %f1, %f1, %f1;"), "C7517"), (KEPT.replace(".maxnreg 168", ""), "C7508")]


def _has_ptxas():
    return assemble.find_tool("ptxas") is not None


needs_ptxas = pytest.mark.skipif(not _has_ptxas(), reason=assemble.INSTALL_PTXAS)


@needs_ptxas
def test_products_are_assembled_by_ptxas_only(monkeypatch):
    made = assemble.assemble(KEPT, "sm_90a")
    assert made.tool.startswith("ptxas")
    assert (made.kernels["product"].registers, made.spill_stores) == (168, 0)
    assert "Compiling entry function 'product'" in made.log
    if assemble.nvjitlink() is not None:
        assert assemble.assemble(PTX, "sm_80").tool.startswith("nvJitLink")
    monkeypatch.setattr(assemble, "nvjitlink", lambda: None)
    assert assemble.assemble(PTX, "sm_80").tool.startswith("ptxas")


@needs_ptxas
@pytest.mark.parametrize(("ptx", "code"), SPOILT, ids=[code for _, code in SPOILT])
def test_what_an_assembler_gives_up_fails_the_build(ptx, code):
    message = rf"(?s)of kernel product must be kept, but ptxas .*{code}.*KVARN_ALLOW_SERIALIZED=1"
    with pytest.raises(assemble.AssemblyError, match=message):
        assemble.assemble(ptx, "sm_90a")
    entries = [Entry("plain", [], []), Entry("product", [], [])]
    artifact = Artifact("k", "sm_90a", "8.0", {"ptx": ptx}, entries, steps=[Step("plain", (1, 1, 1), (1, 1, 1))])
    with pytest.raises(assemble.AssemblyError, match=code):
        assemble.with_cubins(artifact)
    with env.override(allow_serialized=True), pytest.warns(RuntimeWarning, match=code):
        made = assemble.assemble(ptx, "sm_90a")
    assert made.cubin[:4] == b"\x7fELF"
    assert code in made.log


def test_products_of_a_kernel_with_assertions_may_wait_for_its_calls():
    """Checks were asked for; what else is given up fails as ever."""
    text = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    call = text + "wgmma pipeline crossing function boundary at a function call in the function 'product'"
    other = text + "insufficient register resources for the wgmma pipeline in the function 'product'"
    asserts = ".extern .func __assertfail();\n" + PRODUCT
    assembler_log.refuse_losses(call, asserts, "ptxas")
    for log, ptx in ((call, PRODUCT), (other, asserts)):
        with pytest.raises(assemble.AssemblyError, match="must be kept"):
            assembler_log.refuse_losses(log, ptx, "ptxas")


def test_losses_are_read_from_a_log():
    """As ptxas and nvJitLink of CUDA 13 write them."""
    lost = [
        "ptxas info    : (C7504) Potential Performance Loss: 'setmaxnreg' ignored to maintain compatibility.",
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x",
        "ptxas info    : (C7519) warpgroup.arrive is injected in around line 17 by compiler to allow use of registers",
    ]
    assert assembler_log.losses("\n".join([*LOG.splitlines(), *lost, lost[1]])) == lost
    assert assembler_log.losses(LOG) == []

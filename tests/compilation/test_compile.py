# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``kv.compile`` and what it returns: stages, figures, saving, checks on the device, threads."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

import kvarn as kv
from kvarn.compilation import driver as compiler
from kvarn.env import env
from kvarn.errors import KernelError
from kvarn.runtime import assemble
from kvarn.runtime.host import HostKernelError

SPEC = kv.CacheSpec("paged", kv.f32, 2, 64, 16)


@kv.kernel
def scale_keys(cache: kv.KVCache, alpha: kv.f32):
    b, t = kv.block_id.x, kv.block_id.y
    if t < cache.cache_length(b):
        for h in range(cache.num_heads):
            d = kv.thread_id.x * 8
            cache.store(b, h, t, d, cache.load(b, h, t, d, width=8) * alpha)


@kv.kernel
def scale_one(cache: kv.KVCache, b: kv.i32, h: kv.i32, t: kv.i32):
    d = kv.thread_id.x * 8
    cache.store(b, h, t, d, cache.load(b, h, t, d, width=8) * 2.0)


def pool(table=((2, 1), (3, 0))):
    blocks = np.ones((5, 2, 1, 16, 2, 64), np.float32)
    return kv.PagedKVCacheCollection(blocks, np.array([20, 9], np.uint32), np.array(table, np.uint32), 1, 21)


def compiled(target="sm_90a", **options):
    return kv.compile(scale_keys, SPEC, kv.f32, target=target, **options)


needs_assembler = pytest.mark.skipif(
    assemble.nvjitlink() is None and assemble.find_tool("ptxas") is None,
    reason=f"needs one: {assemble.INSTALL_ASSEMBLER}",
)


# --- stages --------------------------------------------------------------------------------------


def test_the_stages_are_the_pipeline_in_order():
    stages = list(compiled().stages)
    assert stages[0] == "input"
    assert stages.index("plan-kv-access") < stages.index("lower-kv-access") < stages.index("check-kv-lowered")
    assert stages[-2:] == ["convert-to-nvvm", "mark-kv-grid-constants"]
    marks = {
        "kv": '"kv.load"',
        "gpu": "gpu.block_id",
        "nvvm": "llvm.load",
        "llvm": "define ptx_kernel void @scale_keys",
    }
    assert all(mark in compiled().asm[stage] for stage, mark in marks.items())


def test_a_stage_that_there_is_not():
    with pytest.raises(
        KeyError, match=r"stages of a kernel for sm_90a are kv, gpu, nvvm, llvm, ptx, cubin, sass; got 'spirv'"
    ):
        compiled().asm["spirv"]
    host = compiled("host")
    assert list(host.asm) == ["kv", "gpu", "nvvm", "llvm"]
    assert "define void @scale_keys" in host.asm["llvm"]
    with pytest.raises(ValueError, match="compile for a GPU target, got host"):
        _ = host.stats


WRONG = [
    (lambda: kv.compile(3), TypeError, "must be a @kv.kernel function, an MLIR module or MLIR text, got int"),
    (lambda: compiled("sm_12"), ValueError, r"target must be one of .*sm_90a.* got 'sm_12'"),
    (lambda: kv.compile(scale_keys, kv.PagedKVCache, kv.f32), TypeError, "must be the spec of a KVCache, got <class '"),
    (lambda: kv.compile(scale_keys, pool(), kv.f32), TypeError, "of a KVCache, got the spec of a paged collection"),
    (lambda: kv.compile(scale_keys, SPEC), TypeError, r"scale_keys\(cache, alpha\) takes 2 arguments, got 1"),
    (lambda: kv.CacheSpec("paged", "bf16", 8, 128, 16), TypeError, r"must be a dtype such as kv\.bf16, got 'bf16'"),
    (lambda: compiled("host")(pool(), 0.5), TypeError, r"launch it over a grid, scale_keys\[grid, block\]"),
    (lambda: compiled("host")[1], TypeError, r"launch with scale_keys\[grid, block\]"),
    (
        lambda: compiled("host").save("x", chips=("sm_80",)),
        ValueError,
        "sm_80 needs a kernel for a GPU target, got host",
    ),
]


@pytest.mark.whole
@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[message[:30] for *_, message in WRONG])
def test_what_cannot_be_meant_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- saving and loading --------------------------------------------------------------------------


def test_a_saved_host_kernel_runs(tmp_path):
    compiled("host").save(tmp_path / "scale.kvb")
    collection = pool()
    kv.load(tmp_path / "scale.kvb")[(2, 20), 8](collection.get_key_cache(0), 0.5)
    assert collection.blocks[1, 0, 0, :4].max() == 0.5
    assert collection.blocks[:, 1].min() == 1


def test_saving_without_an_assembler_keeps_the_ptx_and_one_that_fails_is_told(tmp_path, monkeypatch):
    def raises(error):
        def assembler(*_):
            raise error("no PTX")

        monkeypatch.setattr(assemble, "assemble", assembler)

    kernel = compiled("sm_80")
    raises(assemble.MissingToolError)
    kernel.save(tmp_path / "ptx")
    assert set(kv.load(tmp_path / "ptx").artifact.code) == {"ptx"}
    with pytest.raises(assemble.MissingToolError):
        kernel.save(tmp_path / "chips", chips=("sm_80",))
    raises(assemble.AssemblyError)
    with pytest.raises(assemble.AssemblyError):
        kernel.save(tmp_path / "wrong")


WITHOUT_MLIR = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mlir":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
import numpy as np
import kvarn as kv

gpu, host = sys.argv[1:]
kernel = kv.load(gpu)
print(kernel, [a.name for a in kernel.artifact.args], sorted(kernel.artifact.code), kernel.asm["ptx"].count(".entry"))
blocks = np.ones((5, 2, 1, 16, 2, 64), np.float32)
pool = kv.PagedKVCacheCollection(blocks, np.array([20], np.uint32), np.array([[2, 1]], np.uint32), 1, 21)
for what in (
    lambda: kernel[1, 8](pool.get_key_cache(0), 0.5),
    lambda: kernel.stages,
    lambda: kv.load(host)[1, 8](pool.get_key_cache(0), 0.5),
    lambda: kv.compile,
):
    try:
        what()
    except Exception as error:
        print(type(error).__name__, error)
assert not any(name.partition(".")[0] == "mlir" for name in sys.modules)
"""


def test_a_saved_kernel_is_loaded_where_mlir_is_not_installed(tmp_path):
    compiled("sm_80").save(tmp_path / "gpu")
    compiled("host").save(tmp_path / "host")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MLIR, tmp_path / "gpu", tmp_path / "host"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    facts, launch, stages, host, compile_ = done.stdout.splitlines()
    assert facts.startswith("<kvarn kernel scale_keys for sm_80> ['cache', 'alpha'] [")
    assert facts.endswith(" 1")
    # Whatever is missing to run it is said; where there is a GPU, it is that the cache lies in host memory.
    assert "must be on a GPU" in launch or "host" in launch or "cpu" in launch.lower(), launch
    assert stages.startswith("ValueError stages need the kernel's IR")
    assert "No module named 'mlir" in host
    assert "No module named 'mlir" in compile_


# --- kernels and operations ----------------------------------------------------------------------

APPEND = """
!k = !kv.collection<"paged", f32, 2 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>
!b = memref<?x2x64xf32, strided<[?, ?, 1]>, 1>
!i = memref<?xi32, strided<[1]>, 1>
func.func @append(%c: !k, %layer: i32, %key: !b, %offsets: !i, %value: !b) {
  "kv.append"(collection = %c, layer = %layer, key = %key, row_offsets = %offsets, value = %value)
    : (!k, i32, !b, !i, !b) -> ()
  return
}
"""


def test_text_with_an_operation_compiles_to_a_program():
    program = kv.compile(APPEND, target="host")
    collection = pool()
    key = np.full((3, 2, 64), 7, np.float32)
    program(collection, 0, key, np.array([0, 1, 3], np.uint32), -key)
    assert collection.blocks[1, 0, 0, 4].min() == 7  # token 20 of sequence 0
    assert collection.blocks[3, 1, 0, 9:11].max() == -7  # tokens 9 and 10 of sequence 1
    with pytest.raises(
        TypeError, match=r"append is an operation that chooses its own grids: call it, append\(\.\.\.\)"
    ):
        program.launch(1, 1, collection, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("func.func @f() { return", r"(?s)-:1:.*error"),
        ('"kv."() : () -> ()', r"-:1:1: error: operation name must have a part after the dialect's"),
        (
            "gpu.module @m { gpu.func @k(%p: !llvm.ptr<1>) kernel { gpu.return } }",
            r"-:1:17: error: 'func\.func' op must have arguments that can be passed to it: .*got !llvm\.ptr<1>",
        ),
        ("module {" * 5000, r"-:1:2408: error: brackets must be nested at most 300 deep"),
        ("func.func private @f(" + "()->(" * 20000, r"-:1:\d+: error: brackets must be nested at most 300 deep"),
        ("module attributes {x = " + "[" * 20000 + "]" * 20000 + "} {}", r"brackets must be nested at most 300 deep"),
        ("// " + "{" * 400 + '\nmodule @"' + "{" * 400 + '" {}', r"the module must have a kernel"),
        (
            "func.func @f(%p: !llvm.ptr<-1>) { return }",
            r"-:1:28: error: address space must be in \[0, 16777216\), got -1",
        ),
        ("func.func @f(%p: memref<?xf32, strided<[1]>, 16777216>) { return }", r"address space .*, got 16777216"),
        ("module {}", r"the module must have a kernel \(a gpu.func with the kernel attribute\), got one without"),
    ],
    ids=lambda text: text[:30],
)
def test_text_that_cannot_be_compiled(text, message):
    with pytest.raises(ValueError, match=message):
        kv.compile(text, target="host")


def test_hand_written_ir_is_checked_before_llvm_gets_it():
    """LLVM ends the process on a cast that no verifier looks at."""
    stages = kv.compile(scale_keys, SPEC, kv.f32, target="host").stages
    text = list(stages.values())[-1]
    from kvarn.lowering import emit
    from kvarn.lowering.pass_base import PassFailure

    emit.check_translatable(compiler.parse(text))
    plain = "llvm.func @f(%a: i32) -> i64 {\n  %0 = llvm.trunc %a : i32 to i64\n  llvm.return %0 : i64\n}"
    with pytest.raises(PassFailure, match=r"'llvm.trunc' op cannot cast i32 to i64"):
        emit.check_translatable(compiler.parse(plain))
    with pytest.raises(KernelError, match=r"-:2:8: error: 'llvm.trunc' op cannot cast i32 to i64"):
        kv.compile(plain + "\ngpu.module @m { gpu.func @k() kernel { gpu.return } }", target="host")


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ('llvm.inline_asm "x", "=r,r" %a, %a : (i32, i32) -> i32', "must be of 1 outputs and 2 inputs, got 1 and 1"),
        ('llvm.inline_asm "x", "r,~{memory}" %a : (i32) -> i32', "must be of 1 outputs and 1 inputs, got 0 and 1"),
        ('llvm.inline_asm "x", "r,=r" %a : (i32) -> i32', "must be outputs, inputs and clobbers, in this order"),
        ('llvm.inline_asm "x", "=r,?" %a : (i32) -> i32', "must be outputs, inputs and clobbers, in this order"),
        ('llvm.inline_asm "x", "=r,1" %a : (i32) -> i32', "constraints that are numbers must name different outputs"),
        ('llvm.inline_asm "x", "=r,r" %a : (i32) -> !llvm.struct<(i32)>', "must give one result itself"),
        ('llvm.inline_asm "$2", "=r,r" %a : (i32) -> i32', "its text must name one of 2 operands, got '$2'"),
        ("llvm.getelementptr %p[1] : (!llvm.ptr) -> !llvm.ptr, vector<2x2xf32>", "speaks of type vector<2x2xf32>"),
        ("llvm.shufflevector %v, %v [0, 8] : vector<4xf32>", "mask must have numbers in [-1, 8), the lanes of both"),
    ],
)  # fmt: skip
def test_operations_of_llvm_are_checked_before_llvm_gets_them(op, message):
    from kvarn.lowering import emit
    from kvarn.lowering.pass_base import PassFailure

    text = f"llvm.func @f(%a: i32, %v: vector<4xf32>, %p: !llvm.ptr) {{\n  %0 = {op}\n  llvm.return\n}}"
    with pytest.raises(PassFailure, match=re.escape(message)):
        emit.check_translatable(compiler.parse(text))


@pytest.mark.parametrize(
    "given",
    [
        'passthrough = [["denormal-fp-math-f32", "builtin.module"]]',
        'passthrough = [["target-features", "x"]]',
        'passthrough = ["alwaysinline"]',
        'denormal_fp_math_f32 = "x"',
    ],
)
def test_attributes_that_llvm_verifies_are_checked_before_llvm_gets_them(given):
    from kvarn.lowering import emit
    from kvarn.lowering.pass_base import PassFailure

    own = 'passthrough = [["denormal-fp-math-f32", "preserve-sign,preserve-sign"]]'
    text = "llvm.func @f() attributes {%s} {\n  llvm.return\n}"
    emit.check_translatable(compiler.parse(text % own))
    with pytest.raises(PassFailure, match="a function passes through denormal-fp-math and denormal-fp-math-f32 with"):
        emit.check_translatable(compiler.parse(text % given))


# --- checks on the device ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ((0, 2, 0), "kv.load: the head must be in [0, 2)"),
        ((2, 0, 0), "kv.load: the sequence must be in the batch"),
        ((0, 0, 32), "kv.load: the token must be in the lookup table"),
        ((1, 1, 17), "kv.load: the token's page must be in the pool"),
    ],
)
def test_an_access_outside_the_cache_is_named(place, sentence):
    collection = pool(((2, 1), (3, 99)))
    keys = collection.get_key_cache(0)
    kernel = kv.compile(scale_one, keys, kv.i32, kv.i32, kv.i32, target="host", check=True)
    kernel[1, 8](keys, 0, 1, 3)  # a good one says nothing
    assert collection.blocks[2, 0, 0, 3, 1].min() == 2
    line = scale_one.location.line + 3
    with pytest.raises(HostKernelError) as caught:
        kernel[1, 8](keys, *place)
    assert f"{__file__}:{line}:29: {sentence}" in str(caught.value)


def test_checks_are_off_by_default_and_the_variable_turns_them_on():
    assert "cf.assert" not in compiled("host").stages["extract-kv-program"]
    assert "check-kv-access" not in compiled("host").stages
    with env.override(check=True):
        assert "cf.assert" in compiled("host").stages["check-kv-access"]
        ptx = compiled("sm_90a").asm["ptx"]
        with pytest.raises(HostKernelError, match=r"kv\.store: the token's page must be in the pool"):
            kv.ops.append(
                pool(((9, 9), (9, 9))), 0, *[np.ones((2, 2, 64), np.float32)] * 2, np.array([0, 1, 2], np.uint32)
            )
    assert "__assertfail" in ptx
    assert "__assertfail" not in compiled("sm_90a").asm["ptx"]


# --- threads -------------------------------------------------------------------------------------


def test_threads_compile_at_once_each_in_its_context():
    specs = [SPEC, kv.CacheSpec("continuous", kv.f32, 3, 32)]
    jobs = [(spec, target) for spec in specs for target in ("host", "sm_90a", "sm_80")]
    with env.override(always_compile=True):
        expected = [dict(kv.compile(scale_keys, s, kv.f32, target=t).artifact.code) for s, t in jobs]
        found: dict[int, dict] = {}
        errors: list[BaseException] = []
        contexts = set()
        start = threading.Barrier(3)

        def work(first: int) -> None:
            try:
                contexts.add(id(compiler.context()))
                start.wait()
                for i in range(first, len(jobs), 3):
                    spec, target = jobs[i]
                    with pytest.raises(KernelError) if i % 2 else contextlib.nullcontext():
                        kv.compile(wrong if i % 2 else scale_keys, spec, kv.f32, target=target)
                    found[i] = dict(kv.compile(scale_keys, spec, kv.f32, target=target).artifact.code)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not errors
    assert len(contexts) == 3
    assert [found[i] for i in range(len(jobs))] == expected


@kv.kernel
def wrong(cache: kv.KVCache, alpha: kv.f32):
    cache.store(0, 0, 0, 0, alpha + kv.thread_id.x)

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""LLVM's back end by its C API: what it is given, what it gives, and that its errors do not end the process."""

import threading

import pytest
from mlir import ir

from kvarn.compilation import driver as compiler
from kvarn.lowering import nvptx
from kvarn.lowering.pass_base import PassFailure

SQUARES = """module {
  llvm.func @squares(%n: i32, %out: !llvm.ptr<1>) attributes {nvvm.kernel} {
    %c0 = llvm.mlir.constant(0 : i32) : i32
    %c1 = llvm.mlir.constant(1 : i32) : i32
    llvm.br ^head(%c0 : i32)
  ^head(%i: i32):
    %more = llvm.icmp "slt" %i, %n : i32
    llvm.cond_br %more, ^body, ^end
  ^body:
    %x = llvm.mul %i, %i : i32
    %y = llvm.mul %i, %i : i32
    %z = llvm.add %x, %y : i32
    llvm.store volatile %z, %out : i32, !llvm.ptr<1>
    %next = llvm.add %i, %c1 : i32
    llvm.br ^head(%next : i32)
  ^end:
    llvm.return
  }
}"""
CALLS = """module {
  llvm.func @__nv_log2f(f32) -> f32
  llvm.func @__nv_powf(f32, f32) -> f32
  llvm.func @logarithm(%x: f32, %out: !llvm.ptr<1>) attributes {nvvm.kernel} {
    %y = llvm.call @__nv_log2f(%x) : (f32) -> f32
    llvm.store %y, %out : f32, !llvm.ptr<1>
    llvm.return
  }
}"""
ASSEMBLY = """module {
  llvm.func @k(%x: i64) attributes {nvvm.kernel} {
    llvm.inline_asm has_side_effects "mov.b32 r, $0;", "w" %x : (i64) -> ()
    llvm.return
  }
}"""


def made(text, passes=nvptx.PASSES):
    with compiler.context():
        return nvptx.ptx(ir.Module.parse(text), "sm_90a", "+ptx80", passes)


def test_an_error_of_the_code_generator_is_an_exception():
    with pytest.raises(PassFailure, match=r"LLVM makes no PTX: .*constraint"):
        made(ASSEMBLY)


def test_passes_that_llvm_does_not_know_are_named():
    with pytest.raises(ValueError, match="early-cse2"):
        made(SQUARES, "early-cse2")


def test_threads_generate_code_side_by_side():
    found, want = [], made(CALLS)

    def work():
        found.extend(made(CALLS) == want for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 20

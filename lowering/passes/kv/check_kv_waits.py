# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Check at run time that no wait on an mbarrier lasts forever.

A kernel whose copy never arrives, or whose stage is never released, hangs without a message. Under ``KVARN_CHECK`` a
wait of several seconds ends the kernel instead, with the name of the barrier and the line of the kernel. The time is
read only after a failed test of the barrier.

Before:  scf.while { scf.condition(<mbarrier.try_wait>) } do { scf.yield } attributes {kv.barrier = "full_keys"}
After:   %start = <globaltimer>
         scf.while ... do { cf.assert <globaltimer> - %start < 10 s, "k.py:9:5: waited 10 s for full_keys" ; scf.yield }
"""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, cf

from kvarn.dsl import ptx
from kvarn.errors import source_locations
from kvarn.lowering.pass_base import kv_pass
from kvarn.lowering.rewrite import kernels, ops_named

BARRIER = "kv.barrier"  # attribute of a waiting loop: the barrier's name


@dataclass(frozen=True)
class Options:
    """seconds: the longest wait."""

    seconds: int = 10


@kv_pass(Options)
def run(module: ir.Module, options: Options) -> None:
    for kernel in kernels(module):
        for loop in ops_named(kernel, "scf.while"):
            if BARRIER not in loop.attributes:
                continue
            places = source_locations(loop.location)
            place = f"{places[0]}: " if places else ""
            name = ir.StringAttr(loop.attributes[BARRIER]).value
            with ir.InsertionPoint(loop), loop.location:
                start = ptx.globaltimer()
            with ir.InsertionPoint.at_block_begin(loop.regions[1].blocks[0]), loop.location:
                most = arith.constant(ir.IntegerType.get_signless(64), options.seconds * 10**9)
                lasted = (ptx.globaltimer() - start).ir
                in_time = arith.cmpi(arith.CmpIPredicate.ult, lasted, most)
                cf.AssertOp(in_time, f"{place}waited {options.seconds} s for {name}")


__all__ = ["BARRIER"]

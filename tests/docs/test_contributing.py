# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""CONTRIBUTING's list of files is whole: a toy of each kind is added to a copy of the sources, in those files alone.

What is edited is what the list names, no more and no less, and what was added works: an operation of either tier, a
pass of the pipeline, a kind of cache.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = {"dialect": ROOT / "dialect", "lowering": ROOT / "lowering"}  # of python/kvarn

# By what is added: for each file that is touched (as an edit), what is put before some text of it; "" is its end. A
# file that there is not is made.
ADDED: dict[str, dict[str, tuple[str, str]]] = {
    "an operation of tier 2": {
        "dialect/ops/metadata.py": (
            "",
            '''
            class SlotsOp(Kv.Operation, name="slots", traits=[Pure]):
                """Token slots of all pages, the null page counted."""

                cache: Operand[Any]
                number: Result[I32] = infer_result()

                def verify_invariants(self) -> bool:
                    return verify.handle(self, self.operation.operands[0]) is not None


            def slots(cache: ir.Value) -> ir.Value:
                return SlotsOp(cache).number
            ''',
        ),
        "dialect/ops/__init__.py": ("from .metadata import (", "from .metadata import slots\n"),
        "lowering/passes/kv/lower_kv_access.py": (
            '@RULES.lowers("kv.is_empty")',
            """
            @RULES.lowers("kv.slots")
            def lower_slots(op: Any, options: Options) -> ir.Value:
                return arith.muli(ops.field(op.cache, "num_blocks"), ops.field(op.cache, "capacity"))


            """,
        ),
        "python/kvarn/dsl/handles.py": (
            "    def max_context_length(self)",
            "    def slots(self) -> Value:\n        return Value(ops.slots(self.ir), i32, nonneg=True)\n\n",
        ),
    },
    "an operation of tier 1": {
        "dialect/ops/operations.py": (
            "",
            '''
            class ResetCacheLengthsOp(Kv.Operation, name="reset_cache_lengths", traits=[TierOne, UpdatesMemory]):
                """cache_lengths[b] = 0."""

                cache_lengths: Operand[Any]

                def verify_invariants(self) -> bool:
                    return offsets(self, self.cache_lengths, "cache_lengths")
            ''',
        ),
        "lowering/kernels/tables/reset.py": (
            "",
            '''
            # SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
            """kv.reset_cache_lengths."""

            from kvarn import dsl as kv

            from .. import expands


            @kv.kernel
            def reset(lengths):
                lengths[kv.block_id.x] = 0


            @expands("kv.reset_cache_lengths")
            def expand_reset(op, at):
                at.launch(reset, [op.cache_lengths], (at.dim(op.cache_lengths, 0), 1, 1), (1, 1, 1))
            ''',
        ),
        "lowering/kernels/__init__.py": (
            '    "kv.radd": "append.updates",',
            '    "kv.reset_cache_lengths": "tables.reset",\n',
        ),
        "python/kvarn/ops/updates.py": (
            "",
            """
            _RESET = Operation("kv.reset_cache_lengths", written=("cache_lengths",))


            def reset_cache_lengths(cache_lengths):
                _RESET((cache_lengths,))
            """,
        ),
        "python/kvarn/ops/__init__.py": ("from .writes import", "from .updates import reset_cache_lengths\n"),
    },
    "a pass": {
        "lowering/passes/kv/count_kv_loads.py": (
            "",
            '''
            # SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
            """Count the loads of a module."""

            from mlir import ir

            from kvarn.lowering.pass_base import kv_pass
            from kvarn.lowering.rewrite import ops_named


            @kv_pass()
            def run(module, options):
                count = len(ops_named(module, "kv.load"))
                with module.context:
                    i64 = ir.IntegerType.get_signless(64)
                    module.operation.attributes["kv.loads"] = ir.IntegerAttr.get(i64, count)
            ''',
        ),
        "lowering/registry.py": ('    "plan-kv-access",', '    "count-kv-loads",\n'),
        "lowering/pipeline.py": (
            '        _kv("plan-kv-access"',
            '        _kv("count-kv-loads", "while loads are ops", True),\n',
        ),
    },
    "a kind of cache": {
        "dialect/layout.py": (
            "# Kernels count tokens in 32 bits.",
            '''
            MIRRORED = "mirrored"
            CacheSpec.kinds = KINDS = (*KINDS, MIRRORED)
            _in_order = page_and_slot


            def page_and_slot(spec, token):
                """As of pages, the slots of a page from its end."""
                column, slot = _in_order(spec, token)
                return (column, slot * -1 + (spec.page_size - 1)) if spec.kind == MIRRORED else (column, slot)


            ''',
        ),
        "python/kvarn/caches/views.py": (
            "class ContinuousBatchingKVCache(KVCache):",
            '''
            class MirroredKVCache(PagedKVCache):
                """Pages whose tokens lie in them from the end."""

                __slots__ = ()
                kind = "mirrored"

                def _bind(self, spec, views, at):
                    import dataclasses

                    super()._bind(dataclasses.replace(spec, kind=self.kind), views, at)


            ''',
        ),
        "python/kvarn/caches/__init__.py": ("from .views import", "from .views import MirroredKVCache\n"),
        "python/kvarn/__init__.py": ('        "KVCacheStaticParams",', '        "MirroredKVCache",\n'),
        "python/kvarn/dsl/handles.py": (
            '    "PagedKVCache": ("cache"',
            '    "MirroredKVCache": ("cache", ("mirrored",)),\n',
        ),
    },
}

# What must work then, as a program.
USED = {
    "an operation of tier 2": """
        @kv.kernel
        def slots(cache: kv.KVCache, out: kv.Buffer[kv.i32, 1]):
            out[0] = cache.slots()


        slots[1, 1](pages(kv.PagedKVCache), out := np.zeros(1, np.int32))
        assert out[0] == 3 * 4
        """,
    "an operation of tier 1": """
        kv.ops.reset_cache_lengths(lengths := np.array([3, 7], np.uint32))
        assert not lengths.any()
        """,
    "a pass": """
        @kv.kernel
        def one(cache: kv.KVCache, out: kv.Buffer[kv.f32, 1]):
            out[0] = cache.load(0, 0, 0, 0)


        made = kv.compile(one, pages(kv.PagedKVCache), kv.Buffer[kv.f32, 1], target="sm_80")
        assert "kv.loads = 1" in made.stages["count-kv-loads"]
        assert "count-kv-loads" not in kv.compile(
            one, pages(kv.PagedKVCache), kv.Buffer[kv.f32, 1], target="sm_80", disable=["count-kv-loads"]
        ).stages
        """,
    "a kind of cache": """
        @kv.kernel
        def write(cache: kv.MirroredKVCache):
            t = kv.block_id.x
            for d in kv.static(range(8)):
                cache.store(0, 0, t, d, kv.f32(8 * t + d))


        cache = pages(kv.MirroredKVCache)
        write[7, 1](cache)
        want = np.arange(56, dtype=np.float32).reshape(7, 8)
        np.testing.assert_array_equal(blocks[2, ::-1, 0], want[:4])
        np.testing.assert_array_equal(blocks[1, :0:-1, 0], want[4:])
        assert cache.load(0, 0, 5, 2) == want[5, 2]
        assert '"mirrored"' in kv.compile(write, cache, target="sm_80").asm["kv"]
        """,
}
BEGINNING = """
import sys
from pathlib import Path

sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, str(Path(__file__).parent))
import numpy as np

import kvarn as kv

assert Path(kv.__file__).is_relative_to(Path(__file__).parent), kv.__file__
blocks = np.zeros((3, 4, 1, 8), np.float32)


def pages(cls):
    return cls(blocks, np.array([7], np.uint32), np.array([[2, 1]], np.uint32), 4, 8)


"""


def listed(what: str) -> set[str]:
    """The files of the sources that CONTRIBUTING lists for something, names of new ones as patterns."""
    rows = dict(re.findall(r"^\| (an? [^|]*?) \| ([^|]*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M))
    return set(re.findall(r"`((?:dialect|lowering|python)/[^`]*\.py)`", rows[what]))


@pytest.mark.parametrize("what", ADDED)
def test_the_files_that_contributing_lists_are_those_that_are_touched(what, tmp_path):
    patterns = {re.compile(re.sub(r"<\w+>", r"\\w+", name.replace(".", r"\."))): name for name in listed(what)}
    found = {name: [of for pattern, of in patterns.items() if pattern.fullmatch(name)] for name in ADDED[what]}
    missing = sorted(name for name, of in found.items() if not of)
    assert not missing, f"CONTRIBUTING does not list {', '.join(missing)} for {what}"
    idle = sorted(set(patterns.values()) - {of for every in found.values() for of in every})
    assert not idle, f"CONTRIBUTING lists files for {what} that need not be touched: {', '.join(idle)}"

    package, ignored = tmp_path / "kvarn", shutil.ignore_patterns("__pycache__", "*.so", *LINKS)
    shutil.copytree(ROOT / "python" / "kvarn", package, ignore=ignored)
    for name, folder in LINKS.items():
        shutil.copytree(folder, package / name, ignore=ignored)
    for name, (before, added) in ADDED[what].items():
        file = package / name.removeprefix("python/kvarn/")
        code = file.read_text() if file.exists() else ""
        at = code.index(before) if before else len(code)
        made = textwrap.dedent(added)[1:] if added.startswith("\n") else added
        file.write_text(code[:at] + made + code[at:])
    program = tmp_path / "uses.py"
    program.write_text(BEGINNING + textwrap.dedent(USED[what]))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

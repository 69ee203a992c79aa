# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The names of modules that documentation, examples and extensions imported before they moved: they still work."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
import warnings

import pytest

from kvarn import moved
from kvarn.artifact import Artifact, Entry
from kvarn.compilation.kernel import Kernel

OLD = """
    kvarn.bundle kvarn.cache kvarn.compiled kvarn.compiler kvarn.drafts kvarn.emulator.ptx kvarn.emulator.text
    kvarn.extensions kvarn.hybrid kvarn.manager kvarn.ownership kvarn.page_pool kvarn.prefixes kvarn.specialisation
    kvarn.stage_files kvarn.step_inputs kvarn.timeline_drawing kvarn.timelines kvarn.tools.arrays
    kvarn.tools.attention_problem kvarn.tools.explain kvarn.tools.passport kvarn.tools.passport.describe
    kvarn.tools.passport.facts kvarn.tools.passport.figures kvarn.tools.passport.machine kvarn.tools.passport.page
    kvarn.tools.passport.places kvarn.tools.passport.shared kvarn.tools.passport.stages kvarn.tools.passport.work
    kvarn.tools.rest kvarn.tools.spaces kvarn.tools.timing kvarn.tools.timing_log kvarn.tools.tune
    kvarn.lowering.distribute_kv_tiles kvarn.lowering.expand kvarn.lowering.expand.attention_common
    kvarn.lowering.expand.attention_tiles kvarn.lowering.expand.base kvarn.lowering.lower_kv_access
    kvarn.lowering.lower_kv_casts kvarn.lowering.lower_kv_tma kvarn.lowering.rewrites kvarn.lowering.tile_ir
""".split()


@pytest.mark.parametrize("name", OLD)
def test_an_old_name_imports_the_module_of_the_new_one_with_a_warning(name):
    sys.modules.pop(name, None)
    with warnings.catch_warnings(record=True) as said:  # of the packages above it too
        warnings.simplefilter("always")
        found = importlib.import_module(name)
    assert f"{name} is {moved.MOVED[name]} now" in str(said[-1].message)
    assert found is importlib.import_module(moved.MOVED[name])
    assert found.__spec__.name == moved.MOVED[name]


def test_every_old_name_is_tested():
    assert sorted(OLD) == sorted(moved.MOVED)


def test_a_name_of_the_old_folder_that_nothing_keeps_is_no_second_module():
    sys.modules.pop("kvarn.lowering.expand", None)
    with pytest.warns(DeprecationWarning, match="expand is"):
        importlib.import_module("kvarn.lowering.expand")
    with pytest.raises(ModuleNotFoundError, match=r"kvarn\.lowering\.expand is kvarn\.lowering\.kernels now"):
        importlib.import_module("kvarn.lowering.expand.common")


def test_an_old_name_of_a_class_is_the_class_with_a_warning():
    from kvarn import inspect

    with pytest.warns(DeprecationWarning, match=r"kvarn\.inspect\.Passport is KernelReport now"):
        assert inspect.Passport is inspect.KernelReport
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        inspect.Other  # noqa: B018


def test_the_old_name_of_the_ir_with_locations_works_with_a_warning():
    kernel = Kernel(Artifact("k", "sm_90a", entries=(Entry("k", ()),)), located="module {}")
    with pytest.warns(DeprecationWarning, match="the attribute of a kernel 'placed' is 'located' now"):
        assert kernel.placed == "module {}"


def test_the_warning_names_the_line_that_imports():
    code = """
        import warnings

        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            from kvarn.lowering import lower_kv_access
            from kvarn.lowering.rewrites import performs
        assert [w.filename for w in found] == ["<string>"] * 2, [w.filename for w in found]
        from kvarn.lowering.passes.kv import lower_kv_access as new

        assert lower_kv_access is new
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

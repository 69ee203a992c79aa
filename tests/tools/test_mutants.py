# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The planted faults fit the sources, and ``make mutants`` tells those that tests catch from those that they do not."""

from __future__ import annotations

import ast
from collections import Counter

from mutants.__main__ import with_fault, without_faults
from mutants.copies import Copy
from mutants.faults import AREAS, ROOT, Fault, faults

FAULTS = faults()
TEST = "tests/tools/test_mutants_toy.py::test_two_is_even"
TOY = """
from kvarn.dialect.layout import cdiv


def test_two_is_even():
    assert cdiv(3, 2) == 2
"""


def test_every_fault_fits_its_symbol():
    """Code that moves takes the symbol's line along: nothing else of a fault says where it is."""
    wrong = []
    for fault in FAULTS:
        try:
            path, text = fault.planted()
            if path.endswith(".py"):
                ast.parse(text)
        except (ValueError, SyntaxError) as error:
            wrong.append(f"{fault.name}: {error}")
    assert wrong == []


def test_every_area_has_at_least_four_faults_of_at_least_40():
    counts = Counter(fault.name.partition("/")[0] for fault in FAULTS)
    assert counts.keys() == set(AREAS)
    assert all(count >= 4 for count in counts.values()), counts
    assert counts.total() >= 40


def test_every_fault_names_tests_that_exist():
    missing = []
    for fault in FAULTS:
        assert fault.caught_by, fault.name
        for name in fault.caught_by:
            file, _, test = name.partition("[")[0].partition("::")
            tree = ast.parse((ROOT / file).read_text()) if test and (ROOT / file).is_file() else ast.Module([], [])
            defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            if not (ROOT / file).is_file() or (test and test not in defined):
                missing.append(f"{fault.name}: {name}")
    assert missing == []


def test_a_fault_is_caught_or_survives_and_one_that_does_not_import_says_nothing(tmp_path):
    def planted(new, test=TEST):
        return Fault("toy", "kvarn.dialect.layout:cdiv", "(a + (b - 1)) // b", new, (test,))

    copy = Copy(tmp_path)
    (copy.root / "tests/tools/test_mutants_toy.py").write_text(TOY)
    assert with_fault(copy, planted("a // b")) == ("caught", f"by {TEST}")
    assert with_fault(copy, planted("-(-a // b)"))[0] == "SURVIVED"
    assert with_fault(copy, planted("(a + (c - 1)) // b"))[0] == "BROKEN"
    assert with_fault(copy, planted("(a + (b - 1)) /// b"))[0] == "BROKEN"
    assert without_faults(copy, [planted("a // b")]) == {}
    (copy.root / "tests/tools/test_mutants_toy.py").write_text(TOY.replace("== 2", "== 3"))
    gone = TEST + "_and_more"
    assert without_faults(copy, [planted("b"), planted("b", gone)]) == {
        TEST: "fails without the fault too",
        gone: "does not run in make check",
    }

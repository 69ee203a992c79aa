# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operands by name: the generic form and back, for every declared operation, and text that is wrong."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

import kvarn as kv
from kvarn.dialect import kv as dialect, named_operands
from kvarn.dialect.base import Kv
from kvarn.dialect.ext import is_segmented, operand_fields
from kvarn.dialect.reading import TextError, parse

TYPES = (
    "i32",
    'tensor<64x128xbf16, "shared, (1)">',
    "memref<?xi32, strided<[1], offset: ?>>",
    "(i32) -> i1",
    "!kv.x<a, b>",
)
ATTRIBUTES = ("", "width = 8 : i64", 'a = "}, {", b = array<i64: 1, 2>', "f = affine_map<(i, j) -> (i, j)>")
SEGMENTED = [c for c in Kv.operations if is_segmented(operand_fields(c))]


class Written:
    """An operation with random operands and types, in both forms."""

    def __init__(self, op_class: Any, rng: random.Random) -> None:
        self.fields, self.name, self.rng = operand_fields(op_class), op_class.OPERATION_NAME, rng
        counts = [rng.randrange(4) if f.variadic else rng.randrange(2) if f.optional else 1 for f in self.fields]
        names = [f"%{rng.choice('abc')}{n}{rng.choice(('', '#1'))}" for n in range(sum(counts))]
        self.values = [[(names.pop(0), rng.choice(TYPES)) for _ in range(n)] for n in counts]
        self.attributes = rng.choice(ATTRIBUTES)

    def generic(self) -> str:
        sizes = ", ".join(str(len(v)) for v in self.values)
        entry = f"operandSegmentSizes = array<i32: {sizes}>" if is_segmented(self.fields) else ""
        return self._text([v for values in self.values for v, _ in values], self.values, entry)

    def named(self, *, shuffled: bool = False, lists: bool = False) -> str:
        """``shuffled``: in some order; ``lists``: those without values too."""
        groups = [(f, v) for f, v in zip(self.fields, self.values, strict=True) if v or (f.variadic and lists)]
        if shuffled:
            self.rng.shuffle(groups)
        written = []
        for f, group in groups:
            names = ", ".join(v for v, _ in group)
            written.append(f"{f.name} = [{names}]" if f.variadic else f"{f.name} = {names}")
        return self._text(written, [v for _, v in groups], "")

    def _text(self, operands: list[str], values: list[list[tuple[str, str]]], entry: str) -> str:
        attributes = ", ".join(filter(None, (entry, self.attributes)))
        types = ", ".join(t for group in values for _, t in group)
        braces = f" {{{attributes}}}" if attributes else ""
        return f'%r = "{self.name}"({", ".join(operands)}){braces} : ({types}) -> i32\n'


def compact(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("op_class", SEGMENTED, ids=lambda c: c.OPERATION_NAME)
def test_names_and_places_are_two_forms_of_one_operation(op_class: Any) -> None:
    rng = random.Random(op_class.OPERATION_NAME)
    for _ in range(20):
        op = Written(op_class, rng)
        generic, named = op.generic(), op.named()
        assert named_operands.named(generic) == named
        for text in (named, op.named(lists=True), op.named(shuffled=True, lists=True)):
            if "=" in text.partition(")")[0].partition("(")[2]:  # an operation without operands has no names either
                assert compact(named_operands.positional(text)) == compact(generic)
                assert named_operands.positional(text).count("\n") == text.count("\n")


def test_operations_without_sizes_take_names_and_print_none() -> None:
    rng = random.Random(0)
    for op_class in Kv.operations:
        if op_class not in SEGMENTED and operand_fields(op_class):
            op = Written(op_class, rng)
            assert named_operands.named(op.generic()) == op.generic()
            if any(op.values):
                assert compact(named_operands.positional(op.named(shuffled=True))) == compact(op.generic())


def test_text_in_generic_form_is_left_alone() -> None:
    text = '// "kv.append"(key = %x)\n"kv.append"(%a) {note = "\\"kv.append\\"(key = %x)"} : (i32) -> ()'
    assert named_operands.positional(text) is text


def test_mutated_text_is_read_or_refused() -> None:
    """Of texts that are cut, doubled and mixed, none raises anything but what says where it is wrong."""
    rng = random.Random(1)
    seeds = [Written(rng.choice(SEGMENTED), rng).named(shuffled=True, lists=True) for _ in range(40)]
    for _ in range(2000):
        text = rng.choice(seeds)
        for _ in range(rng.randrange(1, 4)):
            i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
            put = rng.choice(("", text[i:j] * 2, rng.choice('(){}[]<>,=%":#\\\n/'), rng.choice(seeds)))
            text = text[:i] + put + text[j:]
        named_operands.named(text)
        with contextlib.suppress(named_operands.Mistake):
            named_operands.positional(text)


PAGES = '!c = !kv.cache<"paged", f32, 1 : i64, 64 : i64, false, 16 : i64, none, 1 : i64>'


def test_a_mistake_has_its_line_and_column() -> None:
    text = f'{PAGES}\nfunc.func @f(%c: !c) {{ // ä\n  "kv.page"(cache = %c,\n   bach = %c) : (!c) -> ()\n  return\n}}\n'
    with pytest.raises(TextError, match="has no operand 'bach'; its operands are cache, ") as caught:
        parse(text.encode(), dialect.make_context())
    assert caught.value.problem[:2] == (4, 4)
    with pytest.raises(kv.KernelError, match="has no operand 'bach'") as kernel:
        kv.compile(text, target="host")
    place = kernel.value.location
    assert place is not None
    assert (place.line, place.column) == (4, 4)

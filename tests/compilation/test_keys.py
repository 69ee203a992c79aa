# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What each setting, property of an argument and piece of other packages' code changes of the keys of compiled code.

There are three. ``compile`` is the disk cache's; ``program`` is that of a program or kernel in memory; ``launch`` is a
call's signature, under which its checks and its program are remembered (what the native part keeps is compared with
that in tests/runtime/fake_cuda/warm.py). A row has two states, and says which keys
differ between them; the others are equal. The keys are those that calls look up: nothing is compiled.

The tables are whole: a field of a setting or of an argument, a variable of the environment, or a part of the compile
cache's key without a row fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlir import ir
from reference.keys import (
    ALL,
    CALLS,
    COMPILE,
    LAUNCH,
    NONE,
    OFFSETS,
    OUT,
    POOL,
    PROGRAM,
    QUERY,
    Change,
    Row,
    State,
    beside,
    call_attention,
    call_kernel,
    check,
    keys_in,
    looked_up,
    pool,
    read,
)  # fmt: skip

import kvarn as kv
from kvarn import dispatch, pipelines, settings
from kvarn.compilation import driver as compiler, extensions
from kvarn.compilation.specialisation import BufferType, HandleType, ScalarType, Specialisation, build
from kvarn.dialect import dtypes, layout, native, page_orders, schedules
from kvarn.dialect.base import Kv
from kvarn.env import env
from kvarn.lowering import index, kernels, pipeline, runner
from kvarn.lowering.kernels import expands
from kvarn.lowering.passes.kv import lower_kv_access
from kvarn.lowering.schedules import tuned
from kvarn.lowering.target import by_name
from kvarn.runtime import buffers, signatures


def nothing(module: ir.Module) -> None:
    """A pass."""


def something(module: ir.Module) -> None:
    """Another pass."""
    str(module)


def holding(value: Any) -> Callable[[ir.Module], None]:
    def keep(module: ir.Module) -> None:
        assert value is not None

    return keep


# --- what compilations are made with ----------------------------------------------------------------

PLAN = "plan-kv-access"
SETTINGS = [
    Row("disable", beside(lambda: kv.pipeline(disable=[PLAN])), ALL),
    Row("options", lambda: (kv.pipeline(options={PLAN: "read-only=false"}),
                            kv.pipeline(options={PLAN: "read-only=true"})), ALL),
    Row("check", beside(lambda: kv.pipeline(check=True)), ALL),
    Row("check", lambda: (kv.pipeline(check=True), kv.pipeline(check="ownership")), ALL),
    Row("inserted", beside(lambda: kv.pipeline({f"after:{PLAN}": nothing})), ALL),
    # Two with passes have both no key of the cache on disk.
    Row("inserted", lambda: (kv.pipeline({f"after:{PLAN}": nothing}), kv.pipeline({f"after:{PLAN}": something})),
        {PROGRAM, LAUNCH}),
    Row("inserted", lambda: (kv.pipeline({f"after:{PLAN}": nothing}), kv.pipeline({f"before:{PLAN}": nothing})),
        {PROGRAM, LAUNCH}),
    Row("inserted", lambda: (kv.pipeline({f"after:{PLAN}": holding(1)}), kv.pipeline({f"after:{PLAN}": holding(2)})),
        {PROGRAM, LAUNCH}),
    Row("inserted", lambda: (kv.pipeline({f"after:{PLAN}": holding(1)}), kv.pipeline({f"after:{PLAN}": holding(1)})),
        NONE),
    Row("inserted", lambda: (kv.pipeline({f"after:{PLAN}": "cse"}), kv.pipeline({f"after:{PLAN}": "cse,cse"})),
        {PROGRAM, LAUNCH}),
    Row("trace", lambda: (pipelines.tracing(8), pipelines.tracing(16)), ALL),
]  # fmt: skip
THREAD = [
    Row("emulation", beside(kv.emulated), ALL),
    Row("emulation", lambda: (kv.emulated("sm_80"), kv.emulated("sm_90a")), ALL),
    Row("emulation", lambda: (kv.emulated(order="forward"), kv.emulated(order="backward")), NONE),
    Row("settings", beside(lambda: kv.pipeline(disable=[PLAN])), ALL),
    Row("check", beside(lambda: kv.pipeline(check=True)), ALL),
    Row("trace", beside(lambda: pipelines.tracing(8)), ALL),
    Row("token", beside(kv.pipeline), {PROGRAM, LAUNCH}),  # the same code, kept twice while a context is open
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("row", SETTINGS + THREAD, ids=lambda row: row.name)
def test_settings_are_part_of_the_keys(row):
    for name in row.calls:
        check(row.change, CALLS[name], row.differ)


TEXT = """module attributes {gpu.container_module} { gpu.module @kernels {
  gpu.func @f(%x: memref<?xf32, strided<[1]>, 1>) kernel { gpu.return } } }"""
SPECS = (POOL.get_key_cache(0).spec, kv.Buffer[kv.f32, 1])
OTHER = kv.CacheSpec("paged", kv.f32, 2, 16, 32)
# Of kv.compile: two calls that differ in one argument, and whether their keys do.
ARGUMENTS: list[tuple[str, tuple[Any, ...], dict[str, Any], tuple[Any, ...], dict[str, Any], bool]] = [
    ("kernel", (TEXT,), {}, (TEXT.replace("@f", "@g"),), {}, True),
    ("specs", (read, *SPECS), {}, (read, OTHER, SPECS[1]), {}, True),
    ("target", (TEXT,), {"target": "sm_80"}, (TEXT,), {"target": "sm_90a"}, True),
    ("passes", (TEXT,), {}, (TEXT,), {"passes": {f"after:{PLAN}": "cse"}}, True),
    ("disable", (TEXT,), {}, (TEXT,), {"disable": [PLAN]}, True),
    ("options", (TEXT,), {}, (TEXT,), {"options": {PLAN: "read-only=false"}}, True),
    ("check", (TEXT,), {}, (TEXT,), {"check": True}, True),
    ("reproducer", (TEXT,), {}, (TEXT,), {"reproducer": "failed.mlir"}, False),
    ("lineinfo", (read, *SPECS), {}, (read, *SPECS), {"lineinfo": True}, True),
    ("start_after", (TEXT,), {}, (TEXT,), {"start_after": PLAN}, True),
    ("start_after", (TEXT,), {"start_after": "verify-kv"}, (TEXT,), {"start_after": PLAN}, True),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "args", "options", "others", "other_options", "differ"), ARGUMENTS)
def test_arguments_of_compile_are_part_of_its_key(name, args, options, others, other_options, differ):
    def key(args: Any, options: Any) -> Any:
        return keys_in(nullcontext(), lambda: kv.compile(*args, **{"target": "host"} | options))[COMPILE]

    assert (key(args, options) != key(others, other_options)) == differ
    assert key(args, options) == key(args, options)


def test_every_setting_has_a_row():
    of_compile = {name for name, *_ in ARGUMENTS}
    assert of_compile == set(inspect.signature(kv.compile).parameters)
    # That of kv.compile alone is kept nowhere in memory.
    assert {row.name for row in SETTINGS} | {"start_after"} == {f.name for f in dataclasses.fields(pipeline.Settings)}
    assert {row.name for row in THREAD} == set(settings._Local.__annotations__)


# --- the environment --------------------------------------------------------------------------------


def of_variable(name: str, first: Any, second: Any) -> Change:
    return lambda: (env.override(**{name: first}), env.override(**{name: second}))


# What changes how code is found, shown, assembled or loaded is in no key: what is in memory stays as it is.
ENVIRONMENT = [
    Row("check", of_variable("check", False, True), ALL),
    Row("check", of_variable("check", True, "ownership"), ALL),
    Row("target", of_variable("target", "sm_80", "sm_90a"), {PROGRAM}, ("kernel",)),  # also of arguments on a GPU
    Row("target", of_variable("target", "sm_80", "sm_90a"), NONE, ("operation",)),  # which runs where its operands lie
    Row("dump_to", of_variable("dump_to", "", "-"), NONE),
    Row("cache_dir", of_variable("cache_dir", Path("a"), Path("b")), NONE),
    Row("cache_size", of_variable("cache_size", 1 << 20, 1 << 21), NONE),
    Row("always_compile", of_variable("always_compile", False, True), NONE),
    Row("override_dir", of_variable("override_dir", "", "stages"), NONE),
    Row("reproducer", of_variable("reproducer", "", "failed.mlir"), NONE),
    Row("extensions", of_variable("extensions", True, False), NONE),  # read once; what they declare counts
    Row("host_opt", of_variable("host_opt", 0, 3), NONE),
    Row("emulator_steps", of_variable("emulator_steps", 1000, 2000), NONE),
    Row("debug", of_variable("debug", False, True), NONE),
    Row("ptxas", of_variable("ptxas", "", "/bin/ptxas"), NONE),
    Row("allow_serialized", of_variable("allow_serialized", False, True), NONE),
    Row("nvdisasm", of_variable("nvdisasm", "", "/bin/nvdisasm"), NONE),
    Row("tune", lambda: (nullcontext(), table_of("{}")), {COMPILE}, ("operation",)),
    Row("tune", lambda: (table_of("{}"), table_of("[]")), {COMPILE}, ("operation",)),
    Row("tune", lambda: (nullcontext(), table_of("{}")), NONE, ("kernel",)),
]


@contextlib.contextmanager
def table_of(text: str) -> Iterator[None]:
    """A table of measured schedules with some content; the names of its file say nothing."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tune.json")
        file.write_text(text)
        with env.override(tune=file):
            yield


@pytest.mark.sampled(1)
@pytest.mark.parametrize("row", ENVIRONMENT, ids=lambda row: row.name)
def test_variables_of_the_environment_are_part_of_the_keys(row):
    for name in row.calls:
        check(row.change, CALLS[name], row.differ)


def test_every_variable_has_a_row():
    assert {row.name for row in ENVIRONMENT} == {v.attribute for v in env.variables()}


# --- the table of measured schedules ----------------------------------------------------------------


def test_the_table_counts_for_the_operations_that_are_declared_to_be_tuned_and_for_no_other():
    """Wherever the name stands in the IR: as a specialisation, as text, in a module."""
    sm90, plain = by_name("sm_90a"), pipeline.Settings()
    assert schedules.TUNED == {"kv.attention", "kv.attention_padded", "kv.operand_attention"}
    for name in schedules.OPERATIONS:
        keys = set()
        for text in ("{}", "[]"):
            with table_of(text):
                keys.add(compiler.key_of("operation", name, sm90, plain, [name]))
        assert len(keys) == 1 + (name in schedules.TUNED), name


@pytest.mark.parametrize("name", ["attention", "attention_padded", "operand_attention"])
def test_a_kernel_in_text_with_a_tuned_operation_depends_on_the_table(name):
    text = str(build(tuned_operation(name), compiler.context()))
    keys = []
    for content in ("{}", "[]"):
        with table_of(content):
            keys.append(keys_in(nullcontext(), lambda: kv.compile(text, target="sm_90a"))[COMPILE])
    assert keys[0] != keys[1]


def tuned_operation(name: str, schedule: tuple[tuple[str, Any], ...] = ()) -> Specialisation:
    """A call of an attention whose prompts have a schedule of kind tile."""
    spec = layout.spec_of("paged", "bf16", 8, 128, page_size=16)
    rows = BufferType(dtypes.bf16, (*[None] * (2 if name == "attention_padded" else 1), 32, 128))
    extents = "valid_lengths" if name == "attention_padded" else "row_offsets"
    of_operands = {n: HandleType("operand", spec) for n in ("keys", "values")}
    of_pool = {"collection": HandleType("collection", spec), "layer": ScalarType(dtypes.i32)}
    operands = {
        **(of_operands if name == "operand_attention" else of_pool), "query": rows,
        extents: BufferType(dtypes.i32, (None,)), "scale": ScalarType(dtypes.f32), "out": rows,
    }  # fmt: skip
    attributes = (("mask", "causal"), ("span", 0), ("softcap", 0.0))
    return Specialisation(f"kv.{name}", tuple(operands.items()), attributes, schedule, "sm_90a")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("schedule", [(), (("max_batch", 64), ("max_queries", 1))], ids=["tile", "decode"])
@pytest.mark.parametrize("name", ["attention", "attention_padded", "operand_attention"])
def test_who_reads_the_table_is_who_is_declared_to(name, schedule, declared, monkeypatch):
    """Not to read it without the declaration is what keeps an operation from a key without it."""
    what, asked = tuned_operation(name, schedule), []
    load = tuned.load
    monkeypatch.setattr(tuned, "load", lambda path: asked.append(path) or load(path))
    if not declared:
        monkeypatch.setattr(schedules, "TUNED", schedules.TUNED - {what.name})
    module = build(what, compiler.context())
    with compiler.diagnosed(module.context):
        runner.run(module, pipeline.steps("sm_90a"), stop_after="expand-kv-operations")
    assert bool(asked) == declared


# --- what a program is specialised for --------------------------------------------------------------

SPEC = layout.spec_of("paged", "i8", 2, 16, page_size=16, scale_dtype="f32", granularity=16)
WHAT = Specialisation(
    "kv.append", (("collection", HandleType("collection", SPEC)), ("key", BufferType(dtypes.f32, (None, 2, 16)))),
)  # fmt: skip
SPECIALISATION = {
    "name": ["kv.rope_append"],
    "operands": [
        WHAT.operands[:1],
        (("collection", HandleType("cache", SPEC)), WHAT.operands[1]),
        (WHAT.operands[0], ("value", WHAT.operands[1][1])),
        (WHAT.operands[0], ("key", ScalarType(dtypes.f32))),
        (WHAT.operands[0], ("key", BufferType(dtypes.f16, (None, 2, 16)))),
        (WHAT.operands[0], ("key", BufferType(dtypes.f32, (None, 2, 32)))),
        (WHAT.operands[0], ("key", BufferType(dtypes.f32, (None, None, 2, 16)))),
    ],
    "attributes": [(("mask", "causal"),), (("mask", "null"),), (("interleaved", True),)],
    "schedule": [(("threads", 64),), (("threads", 128),)],
    "target": ["sm_80", "sm_90a"],
    "alignment": [8, 4],
}
CACHES = {
    "kind": ["fa3"], "dtype": [dtypes.f8e4m3], "num_heads": [4], "head_size": [32], "page_size": [32],
    "is_mla": [True], "scale_dtype": [dtypes.f16], "granularity": [8], "strides": [(16, 256)],
    "zero": [True], "rotation": [64, 128],
}  # fmt: skip
# Elements that share bytes always have zeros, and may be rotated.
PACKED = {"dtype": dtypes.u4, "head_size": 128, "scale_dtype": dtypes.f16, "granularity": 128, "zero": True}


def same_but(spec: layout.CacheSpec, field: str, value: Any) -> layout.CacheSpec:
    """A spec with another value of a field, of a kind that takes both."""
    of_kind = {"num_heads": 1} if field == "is_mla" else {}
    unscaled = {"dtype": dtypes.f32, "scale_dtype": None, "granularity": 1} if field == "kind" else {}
    packed = PACKED if field in ("zero", "rotation") else {}
    return replace(spec, **{**of_kind, **unscaled, **packed, field: value})


def keys_of(what: Specialisation) -> dict[str, Any]:
    return keys_in(nullcontext(), lambda: dispatch.program(what))


def test_everything_that_a_program_is_specialised_for_is_part_of_both_keys():
    assert set(SPECIALISATION) == {f.name for f in dataclasses.fields(Specialisation)}
    assert set(CACHES) == {f.name for f in dataclasses.fields(layout.CacheSpec)}
    variants = [replace(WHAT, **{name: value}) for name, values in SPECIALISATION.items() for value in values]
    for field, values in CACHES.items():
        base = SPEC if field != "kind" else replace(SPEC, dtype=dtypes.f32, scale_dtype=None, granularity=1)
        base = replace(base, num_heads=1) if field == "is_mla" else base
        base = replace(base, **PACKED) if field == "rotation" else base
        specs = [base, *(same_but(SPEC, field, value) for value in values)]
        made = [replace(WHAT, operands=(("cache", HandleType("cache", spec)),)) for spec in specs]
        for a, b in itertools.combinations(made, 2):
            assert keys_of(a)[COMPILE] != keys_of(b)[COMPILE], field
            assert keys_of(a)[PROGRAM] != keys_of(b)[PROGRAM], field
    found = [keys_of(what) for what in (WHAT, *variants)]
    for a, b in itertools.combinations(found, 2):
        assert a[COMPILE] != b[COMPILE]
        assert a[PROGRAM] != b[PROGRAM]


@pytest.mark.parametrize("lines", [False, True])
def test_lines_are_part_of_an_operations_key(lines):
    found = keys_in(nullcontext(), lambda: dispatch.artifact(WHAT, lineinfo=lines))
    assert (found[COMPILE] == keys_of(WHAT)[COMPILE]) != lines


# --- arguments --------------------------------------------------------------------------------------

VIEW = buffers.BufferView(1 << 20, (2, 3, 4), (12, 4, 1), dtypes.f32, ("cpu", 0), False, None)
# Of a buffer: other values, and whether a call with them is another.
VIEWS = {
    "data": [((1 << 20) + 4, True), ((1 << 20) + 8, True), ((1 << 20) + 16, False)],  # its alignment up to 16 bytes
    "shape": [((2, 3, 3), True), ((1, 3, 4), True), ((2, 3, 4, 1), True)],
    "strides": [((16, 4, 1), True), ((12, 4, 2), True)],
    "dtype": [(dtypes.i32, True), (dtypes.f16, True)],
    "device": [(("cuda", 0), True), (("cuda", 1), True)],
    "readonly": [(True, True)],
    "owner": [(object(), False)],
    "keepalive": [(object(), False)],
}


def signature(*args: Any) -> Any:
    return signatures.signed(args, None)[0]


def test_a_buffers_properties_are_part_of_a_calls_signature():
    assert set(VIEWS) == set(buffers.BufferView._fields)
    for field, values in VIEWS.items():
        for value, differs in values:
            assert (signature(VIEW._replace(**{field: value})) != signature(VIEW)) == differs, (field, value)


class Tensor:
    """A tensor as torch has it."""

    __module__ = "torch"

    def __init__(self, **given: Any) -> None:
        strides = given.pop("strides", (12, 4, 1))
        given = {"shape": (2, 3, 4), "dtype": "torch.float32", "device": "cuda:0", "address": 1 << 20,
                 "ordinal": 0, "negated": False} | given  # fmt: skip
        self.shape, self.dtype, self.device = given["shape"], given["dtype"], given["device"]
        self.data_ptr, self.get_device = (lambda: given["address"]), (lambda: given["ordinal"])
        self.is_neg, self.stride = (lambda: given["negated"]), (lambda: strides)
        self.is_contiguous = lambda: strides == (12, 4, 1)


# A negated tensor holds the other sign; the device of an empty one is no ordinal.
TENSORS = [
    ({"shape": (3, 2, 4)}, True), ({"strides": (16, 4, 1)}, True), ({"dtype": "torch.int32"}, True),
    ({"ordinal": 1}, True), ({"address": (1 << 20) + 8}, True), ({"address": (1 << 20) + 32}, False),
    ({"negated": True}, True),
]  # fmt: skip


@pytest.mark.parametrize("way", ["by its signer", "by a plan"])
def test_a_tensors_properties_are_part_of_a_calls_signature(way):
    def key(**given: Any) -> Any:
        return signature(Tensor(**given)) if way == "by a plan" else signatures._sign_torch(Tensor(**given), [])

    assert signatures.find_key(Tensor) is signatures._sign_torch
    for given, differs in TENSORS:
        assert (key(**given) != key()) == differs, given
    assert key(address=0) != key(address=0, device="meta")


# Of a cache or a collection: the addresses and the sizes of pools are values, and no part of a signature.
HANDLES = [({"dtype": np.float16}, True), ({"batch": 2}, True), ({"readonly": True}, True), ({"pages": 5}, False)]


class Elsewhere:
    """A handle or an operand as it is, on another device."""

    def __init__(self, of: Any, ordinal: int) -> None:
        self.of, self.spec, self.device, self.readonly = of, of.spec, ("cuda", ordinal), True

    def fields(self) -> Any:
        return self.of.fields()


class ElsewhereOperand(Elsewhere):
    capacity, batch_size = 9, 2


@pytest.mark.parametrize("of", [lambda c: c, lambda c: c.get_key_cache(0)], ids=["collection", "cache"])
def test_a_handles_properties_are_part_of_a_calls_signature(of):
    base = of(pool())
    for given, differs in HANDLES:
        assert (signature(of(pool(**given))) != signature(base)) == differs, given
    assert signatures.find_key(Elsewhere) is signatures.find_key(type(base)) is signatures.sign_handle
    assert signature(Elsewhere(base, 0)) != signature(Elsewhere(base, 1))
    assert signatures.sign_handle(Elsewhere(base, 0), []) != signatures.sign_handle(Elsewhere(base, 1), [])


def test_an_operands_properties_are_part_of_a_calls_signature():
    def operand(batch: int = 2, tokens: int = 9, dtype: Any = np.float32) -> Any:
        return kv.LayoutTensorMHAOperand(np.zeros((batch, tokens, 2, 16), dtype))

    assert signature(operand()) == signature(operand())
    for given in ({"batch": 3}, {"tokens": 10}, {"dtype": np.float16}):
        assert signature(operand(**given)) != signature(operand()), given
    assert signatures.find_key(ElsewhereOperand) is signatures.find_key(type(operand()))
    assert signature(ElsewhereOperand(operand(), 0)) != signature(ElsewhereOperand(operand(), 1))


@pytest.mark.parametrize("way", ["by its signer", "by a plan"])
def test_of_numbers_only_the_class_is_part_of_a_calls_signature_but_for_zeros(way):
    def key(number: Any) -> Any:
        return signature(number) if way == "by a plan" else signatures._sign_number(number, [])

    for a, b in itertools.combinations([2, 2.0, 0, 0.0, -0.0], 2):
        assert key(a) != key(b), (a, b)
    assert key(2) == key(3)
    assert key(2.5) == key(3.5)


def test_what_a_call_is_given_beside_operands_is_part_of_its_signature():
    """Attributes and the schedule; True and 1 are equal, and no schedule has both."""

    def key(**given: Any) -> Any:
        with looked_up() as found:
            kv.ops.attention(POOL, 0, QUERY, OFFSETS, out=OUT, **given)
        return found[LAUNCH]

    other = [{"mask": "null"}, {"window": 4}, {"softcap": 3.0}, {"schedule": {"batch_invariant": True}},
             {"schedule": {"batch_invariant": False}}, {"schedule": {"batch_invariant": 1}},
             {"schedule": {"max_queries": 2}}, {"schedule": {"max_queries": 3}}]  # fmt: skip
    for a, b in itertools.combinations([{}, *other], 2):
        assert key(**a) != key(**b), (a, b)


# --- code of other packages -------------------------------------------------------------------------


@contextlib.contextmanager
def declared(table: Any, declare: Callable[[], Any]) -> Iterator[None]:
    """What is declared in a table for a while."""
    before = dict(table)
    declare()
    try:
        yield
    finally:
        table.clear()
        table.update(before)


def rule_of(value: int) -> State:
    def rule(op: Any, options: Any) -> Any:
        return index.const(value)

    table = lower_kv_access.RULES
    return declared(table.table, lambda: table.lowers("kv.max_context_length")(rule))


def expansion_of(value: int) -> State:
    def expansion(op: Any, at: Any) -> None:
        raise ValueError(value)

    return declared(kernels._found, lambda: expands("kv.append")(expansion))


def kind_of(value: int) -> State:
    def element(*given: Any) -> Any:
        return value

    order = page_orders.PageOrder("of_a_test", element, element)
    return declared(page_orders.added, lambda: page_orders.add_kind(order))


@contextlib.contextmanager
def operation_of(value: int) -> Iterator[None]:
    """As where an operation is declared, which a context keeps for good."""

    class OfATest:
        OPERATION_NAME, field = "kv.of_a_test", value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kv, "operations", [*Kv.operations, OfATest])
        for tell in Kv.listeners:
            tell(OfATest)
        yield


@contextlib.contextmanager
def patched(value: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "const", lambda number, bits=value: number)
        yield


# What is put in the place of kvarn's functions is no declaration: what is in memory stays as it is.
EXTENSIONS = [
    Row("rule", beside(lambda: rule_of(1)), ALL),
    Row("rule", lambda: (rule_of(1), rule_of(2)), ALL),
    Row("expansion", beside(lambda: expansion_of(1)), ALL),
    Row("expansion", lambda: (expansion_of(1), expansion_of(2)), ALL),
    Row("kind of caches", beside(lambda: kind_of(1)), ALL),
    Row("kind of caches", lambda: (kind_of(1), kind_of(2)), ALL),
    Row("operation", beside(lambda: operation_of(1)), ALL),
    Row("operation", lambda: (operation_of(1), operation_of(2)), ALL),
    Row("patch", beside(lambda: patched(1)), {COMPILE}),
    Row("patch", lambda: (patched(1), patched(2)), {COMPILE}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("row", EXTENSIONS, ids=lambda row: row.name)
def test_code_of_other_packages_is_part_of_the_keys(row):
    for name in row.calls:
        check(row.change, CALLS[name], row.differ)


def test_what_has_no_digest_is_kept_in_memory_alone():
    """And there told from others by what it is."""
    extensions.warn_undigestible.cache_clear()  # says it once
    with pytest.warns(RuntimeWarning, match="the compile cache is not used, since a .* has no digest"):
        one, two = (keys_in(kv.pipeline({f"after:{PLAN}": holding(object())}), call_kernel) for _ in range(2))
    assert one[COMPILE] is two[COMPILE] is None
    assert one[PROGRAM] != two[PROGRAM]


def test_where_code_of_other_packages_takes_part_the_table_of_schedules_counts():
    """It may make operations that are tuned."""
    keys = []
    for content in ("{}", "[]"):
        with table_of(content):
            keys.append(keys_in(rule_of(1), call_kernel)[COMPILE])
    assert keys[0] != keys[1]


# --- kvarn itself -----------------------------------------------------------------------------------


@contextlib.contextmanager
def sources_with(module: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, value)
        patch.setattr(compiler, "sources_digest", compiler.sources_digest.__wrapped__)
        yield


def test_kvarns_sources_mlirs_version_and_the_native_part_are_part_of_the_key(tmp_path):
    state = partial(sources_with, compiler, "sources")
    (tmp_path / "a.py").write_text("a = 1")
    (tmp_path / "b.py").write_text("a = 2")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.py").write_text("a = 1")
    files = [[], [tmp_path / "a.py"], [tmp_path / "b.py"], [tmp_path / "other" / "a.py"]]
    for a, b in itertools.combinations(files, 2):
        assert check(lambda a=a, b=b: (state(lambda: a), state(lambda: b)), call_attention, {COMPILE}) == {"sources"}
    for module, name, value in (
        (metadata, "version", lambda name: "0"), (metadata, "version", nobody_knows), (native, "available", str),
    ):  # fmt: skip
        check(beside(lambda m=module, n=name, v=value: sources_with(m, n, v)), call_kernel, {COMPILE})


def nobody_knows(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_the_sources_are_those_that_code_is_compiled_by():
    package = Path(compiler.__file__).parents[1]
    folders = ("artifact", "compilation", "dialect", "dsl", "lowering")
    code = {path for folder in folders for end in ("py", "json") for path in (package / folder).glob(f"**/*.{end}")}
    assert code | set(package.glob("*.py")) == set(compiler.sources())


def test_every_part_of_the_compile_caches_key_is_changed_by_a_row():
    changed = {"kind", "what", "target", "after", "sources"}  # by the arguments of kv.compile, and by kvarn's sources
    for row in (*SETTINGS, *ENVIRONMENT, *EXTENSIONS):
        for name in row.calls:
            changed |= check(row.change, CALLS[name], row.differ)
    assert changed == keys_in(nullcontext(), call_attention)["parts"].keys()

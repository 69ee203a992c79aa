# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The user's table of schedules, and the search that fills it, with times made up."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import kvarn as kv
from kvarn import dispatch
from kvarn.compilation import driver as compiler
from kvarn.dialect import dtypes, schedules
from kvarn.dispatch import BufferType, HandleType, ScalarType, Specialisation
from kvarn.env import env
from kvarn.lowering import pipeline, runner
from kvarn.lowering.schedules import attention as tile_schedule, decode_table, tuned
from kvarn.lowering.target import by_name
from kvarn.measure import tune
from kvarn.measure.arrays import NumPyArrays
from kvarn.ops import reads
from kvarn.tools import cli

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench


SM90 = by_name("sm_90a")
CASE = tune.Case("bf16", 64, 4096, 32, 8, 128, 16)


def key_of(case=CASE, target="sm_90a"):
    return tuned.Key.of(target, case.config())


def attention(case=CASE):
    """The operation of a case, as a call of it would be specialised."""
    rows = BufferType(case.query, (None, case.query_heads, case.size))
    operands = {
        "collection": HandleType("collection", case.spec), "layer": ScalarType(dtypes.i32), "query": rows,
        "row_offsets": BufferType(dtypes.i32, (None,)), "scale": ScalarType(dtypes.f32), "out": rows,
    }  # fmt: skip
    bounds = reads._bounds(case.new, case.batch) if case.new <= 16 else {}
    schedule = tuple(sorted(bounds.items()))
    attributes = (("mask", "causal"), ("span", 0), ("softcap", 0.0))
    return Specialisation("kv.attention", tuple(operands.items()), attributes, schedule, "sm_90a")


def chosen(case=CASE):
    """The text of the schedule that the pass gives a case."""
    module = dispatch.build(attention(case), compiler.context())
    with compiler.diagnosed(module.context):
        runner.run(module, pipeline.steps(SM90), stop_after="select-kv-schedule")
    return next(line for line in str(module).splitlines() if "kv.attention" in line)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "tune.json"
    with env.override(tune=path):
        yield path


# --- the table -----------------------------------------------------------------------------------


def test_a_case_of_the_table_gets_its_schedule(table):
    assert "stages = 2" in chosen()
    tuned.save(table, [(key_of(), {"stages": 4, "blocks": 2}, 250.0)])
    assert "blocks = 2" in chosen()
    assert "stages = 4" in chosen()


@pytest.mark.parametrize(
    "more",
    [{"dtype": "f16"}, {"batch": 16}, {"query_heads": 64}, {"query_heads": 16, "heads": 4}, {"size": 64}, {"page": 32}],
)
def test_an_entry_counts_for_its_case_only(table, more):
    other = dataclasses.replace(CASE, **more)
    before = chosen(other)
    tuned.save(table, [(key_of(), {"stages": 5}, 250.0)])
    assert chosen(other) == before
    assert "stages = 5" in chosen()


def test_saving_keeps_other_entries_and_replaces_the_same_case(table):
    other = key_of(target="sm_80")
    tuned.save(table, [(key_of(), {"stages": 2}, 10.0), (other, {"stages": 3}, 11.0)])
    tuned.save(table, [(key_of(), {"stages": 4}, 9.0)])
    assert tuned.load(table) == {key_of(): {"stages": 4}, other: {"stages": 3}}
    tuned.save(table, [(other, {}, None)])
    assert list(tuned.load(table)) == [key_of()]
    assert [p.name for p in table.parent.iterdir()] == ["tune.json"]


GOOD = {"case": {"target": "sm_90a", "dtype": "bf16", "heads": 8, "size": 128, "page": 16, "rows": 4, "batch": 128}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be JSON"),
        ("[]", 'must be an object with "version": 1'),
        ('{"version": 2, "decode": []}', 'must be an object with "version": 1'),
        ({"schedule": {"stages": 2}}, 'entry 0 must have objects "case" and "schedule"'),
        (GOOD | {"schedule": {"depth": 2}}, "schedule must have integers warps, stages"),
        (GOOD | {"schedule": {"max_batch": 2}}, "schedule must have integers warps, stages"),
        (GOOD | {"schedule": {"stages": True}}, "got stages = True"),
        (GOOD | {"schedule": {"stages": -1}}, "got stages = -1"),
        ({"case": {"target": "sm_90a"}, "schedule": {}}, "case must have target, dtype, heads, size, page, rows, b"),
        ({"case": GOOD["case"] | {"heads": "8"}, "schedule": {}}, "case must have"),
    ],
)
def test_a_file_that_is_no_table_is_refused_with_what_to_do(table, content, message):
    table.write_text(content if isinstance(content, str) else json.dumps({"version": 1, "decode": [content]}))
    with pytest.raises(ValueError, match=message) as caught:
        tuned.load(table)
    assert str(table) in str(caught.value)
    assert "kvarn tune" in str(caught.value)
    with pytest.raises(ValueError, match=message):
        chosen()


# --- the search ----------------------------------------------------------------------------------


def test_the_search_finds_the_best_schedule_step_by_step():
    best = {"stages": 4, "blocks": 1, "warps": 2, "tile": 32}

    def measure(schedule):
        return 300.0 - sum(10.0 for name, value in best.items() if schedule[name] == value)

    found = tune.search(CASE, SM90, measure)
    assert {name: found.schedule[name] for name in best} == best
    assert found.us == 260.0
    assert found.builtin_us == measure({"min_tiles": 4, **decode_table.entries(SM90, CASE.config())})
    assert found.better


def test_schedules_that_fail_or_are_wrong_are_passed_over():
    def measure(schedule):
        return None if schedule["stages"] == 3 or schedule["combine"] else 100.0 - schedule["blocks"]

    found = tune.search(CASE, SM90, measure)
    assert found.schedule["stages"] != 3
    assert found.us < 99


def test_a_built_in_schedule_that_is_wrong_is_an_error():
    with pytest.raises(RuntimeError, match="gives no right result"):
        tune.search(CASE, SM90, lambda schedule: None)


class _Bench:
    def __init__(self, case, log=None):
        self.case = case

    def measure(self, schedule):
        return 100.0 - (self.case.dtype == "bf16") * 10 * (schedule["stages"] == 4)


def test_what_is_better_is_written_and_what_is_not_is_taken_out(table, capsys):
    cases = [CASE, tune.Case("f8e4m3", 64, 4096, 32, 8, 128, 16)]
    tuned.save(table, [(key_of(cases[1]), {"stages": 7}, 1.0)])
    outcomes = tune.run(cases, SM90, _Bench, table, 60)
    assert [found.better for _, found in outcomes] == [True, False]
    assert set(tuned.load(table)) == {key_of()}
    assert tuned.load(table)[key_of()]["stages"] == 4
    assert "stages = 4" in chosen()
    assert "bf16 64 × 4096" in capsys.readouterr().out


# --- tiles ---------------------------------------------------------------------------------------

PROMPTS = tune.Case("bf16", 8, 4096, 32, 8, 128, 16, 4096, kind="tile")
CHUNK = tune.Case("bf16", 1, 100_000, 32, 8, 128, 16, 16, kind="tile")


def test_a_case_of_tiles_gets_its_measured_schedule(table):
    assert "keys = 128" in chosen(PROMPTS)
    key = PROMPTS.space.key(SM90)
    tuned.save(table, [(key, {"keys": 80, "stages": 3, "ping_pong": True}, 1700.0)])
    assert "keys = 80" in chosen(PROMPTS)
    assert "ping_pong = true" in chosen(PROMPTS)
    assert "keys = 128" in chosen(CHUNK), "that of another bound of new tokens"
    assert tuned.load(table) == {key: {"keys": 80, "stages": 3, "ping_pong": True}}


def test_a_table_says_nothing_of_a_batch_invariant_schedules_splits(table):
    tuned.save(table, [(PROMPTS.space.key(SM90), {"keys": 64, "splits": 8}, 9.0)])
    case = PROMPTS.space.case
    assert tile_schedule.chosen(case, SM90, {}, by_user=True).splits == 8
    kept = tile_schedule.chosen(case, SM90, {"batch_invariant": True}, by_user=True)
    assert (kept.keys, kept.splits) == (64, 1)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [({"keys": 20}, "tile entry 0: keys must be"), ({"warps": 4}, "tile entry 0: schedule must have rows, keys")],
)
def test_an_entry_of_tiles_that_is_not_legal_is_refused(table, schedule, message):
    case = {"target": "sm_90a", "dtype": "bf16", "query": "bf16", "heads": 8, "size": 128, "page": 16, "group": 4}
    table.write_text(json.dumps({"version": 1, "tile": [{"case": {**case, "queries": 0}, "schedule": schedule}]}))
    with pytest.raises(ValueError, match=message):
        tuned.load(table)


def test_a_table_with_old_names_is_read_and_written_with_new_ones(table):
    case = {"target": "sm_90a", "dtype": "i8", "query": "bf16", "heads": 8, "size": 128, "page": 16, "group": 4}
    record = {"case": {**case, "queries": 0}, "schedule": {"keys": 64, "slots": 4}, "us": 3.0}
    table.write_text(json.dumps({"version": 1, "tile": [record]}))
    with pytest.warns(DeprecationWarning, match="the schedule entry 'slots' is 'staging_stages' now"):
        assert list(tuned.load(table).values()) == [{"keys": 64, "staging_stages": 4}]
    with pytest.warns(DeprecationWarning, match="'staging_stages' now"):
        tuned.save(table, [(PROMPTS.space.key(SM90), {"keys": 80}, 9.0)])
    assert [r["schedule"] for r in json.loads(table.read_text())["tile"]] == [
        {"keys": 64, "staging_stages": 4}, {"keys": 80},
    ]  # fmt: skip


NARROW = tune.Case("f8e4m3", 1, 4096, 8, 8, 64, 16, 512, kind="tile")


@pytest.mark.parametrize("case", [PROMPTS, CHUNK, NARROW], ids=str)
def test_the_search_over_tiles_measures_legal_schedules_once(case):
    """Every entry of the kind is varied, and what the compiler would refuse is not tried."""
    seen, best = [], {"rows": 128, "keys": 64, "overlap": False, "splits": 4}

    def measure(schedule):
        assert tile_schedule.chosen(case.space.case, SM90, schedule).entries() == schedule
        seen.append(schedule)
        return 300.0 - sum(10.0 for name, value in best.items() if schedule[name] == value)

    found = tune.search(case, SM90, measure)
    assert {name: found.schedule[name] for name in best} == best
    assert found.builtin_us == measure(case.space.start(SM90))
    assert found.measured == len(seen) - 1 == len({tuple(sorted(s.items())) for s in seen})
    for name in schedules.TILED.names:
        converts = tile_schedule.TileConfig(case.space.case).converts
        of_bytes, as_stored = ("producers", "staging_stages", "stored_keys"), ("split_columns", "parts")
        assert len({s[name] for s in seen}) > 1 or name in (as_stored if converts else of_bytes), name


@pytest.mark.parametrize(("new", "few"), [(1, True), (8, True), (9, False)])
def test_tiles_of_few_rows_are_tried_where_sequences_have_few(new, few):
    space = tune.Case("bf16", 8, 4096, 32, 8, 128, 16, new, kind="tile").space
    rows = {found["rows"] for found in space.variations(space.start(SM90), 0) if space.fits(found, SM90)}
    assert (rows & {8, 16, 32} == {8, 16, 32}) == few
    assert few or not rows & {8, 16, 32}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (tune.Case("bf16", 1, 64, 32, 5, 128, 16), "query heads must be a multiple of the 5 KV heads, got 32"),
        (tune.Case("bf16", 1, 64, 256, 8, 128, 16), "there is nothing to tune"),
        (tune.Case("bf16", 1, 64, 32, 8, 520, 16, 16, kind="tile"), "attention over tiles needs a head size"),
        (tune.Case("bf16", 1, 64, 32, 8, 64, 16, 128, kind="tile"), "must be 128 or more, got 64"),
    ],
)
def test_a_case_that_the_kernels_do_not_take_is_refused(case, message):
    with pytest.raises(ValueError, match=message):
        case.check(SM90)


def test_the_command_says_that_it_needs_a_gpu(monkeypatch, capsys):
    from kvarn.runtime import driver

    monkeypatch.setattr(driver, "status", lambda: driver.Status(False, "there is none", None))
    assert cli.main(["tune"]) == 1
    assert "kvarn tune: error: tuning needs a GPU: there is none" in capsys.readouterr().err


# --- measuring -----------------------------------------------------------------------------------


class _OnHost(tune.Bench):
    """A bench whose schedules run on the host; ``wrong`` ones leave half of the output unwritten."""

    def run(self, layer, schedule):
        p = self.problem
        out = np.empty_like(p.out) if schedule.get("wrong") else p.out
        kv.ops.attention(self._pool, layer, p.query, p.offsets, scale=p.scale, out=out)
        p.out[: len(out) // 2] = out[: len(out) // 2]


@pytest.mark.parametrize(("dtype", "new", "ragged"), [("bf16", 1, False), ("f8e4m3", 3, True)])
def test_a_schedule_counts_when_its_result_is_that_of_the_reference(dtype, new, ragged, capsys):
    case = tune.Case(dtype, 3, 40, 4, 2, 16, 8, new, ragged=ragged)
    bench = _OnHost(case, NumPyArrays())
    assert bench.measure({"stages": 2}) > 0
    assert bench.measure({"wrong": 1}) is None
    assert "wrong=1: wrong by nan" in capsys.readouterr().err

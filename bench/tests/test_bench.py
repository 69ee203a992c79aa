# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The measurements on small shapes on the CPU: what is checked, what a failure costs, what the report says."""

import contextlib
import importlib
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
bench = importlib.import_module("bench.__main__")
ablation = importlib.import_module("bench.ablation")
arrays = importlib.import_module("kvarn.measure.arrays")
cases = importlib.import_module("bench.cases")
chains = importlib.import_module("bench.chains")
roofline = importlib.import_module("bench.roofline")
kvarn_rows = importlib.import_module("bench.kvarn_rows")
peers = importlib.import_module("bench.peers")
problems = importlib.import_module("bench.problems")
report = importlib.import_module("bench.report")
suites = importlib.import_module("bench.suites")
versions = importlib.import_module("bench.versions")
worker = importlib.import_module("bench.worker")

SMALL = {row.name: row for row in cases.SMALL}
TABLE = {row.name: row for row in cases.TABLE}


@pytest.fixture(scope="module")
def library():
    return arrays.arrays("numpy")


# --- rows ----------------------------------------------------------------------------------------


def test_rows_have_names_of_their_own():
    names = [row.name for row in (*cases.TABLE, *cases.RANGE, *cases.SMALL)]
    assert len(names) == len(set(names))
    assert set(cases.QUICK) <= set(TABLE)
    assert all(row.goal is not None for row in cases.TABLE)
    assert set(bench.SHARES) == {"ceilings", "kvarn", *peers.GROUPS}


def test_rows_are_chosen_by_parts_of_names_by_kinds_and_by_names():
    assert {row.kind for row in cases.select("gather,mla", cases.TABLE)} == {"gather", "mla"}
    assert [row.name for row in cases.select("=b64_c4k", cases.TABLE)] == ["b64_c4k"]
    for row in (*cases.TABLE, *cases.RANGE):
        assert cases.select(row.title, (*cases.TABLE, *cases.RANGE)) == (row,), "titles are what the tables print"
    titles = ",".join(row.title for row in cases.TABLE[:-1])
    assert cases.select(titles, cases.TABLE) == cases.TABLE[:-1]
    assert cases.select("", cases.TABLE) == cases.TABLE
    with pytest.raises(ValueError, match="got 'nothing'"):
        cases.select("b64,nothing", cases.TABLE)


@pytest.mark.parametrize("name", SMALL)
def test_a_check_sees_what_was_not_written(name, library):
    """An empty call leaves the poison; the check must not take it for a result."""
    p = problems.problem(library, SMALL[name], split=False)
    p.poison()
    error = p.error()
    assert error != error or error > kvarn_rows.TOLERANCE[p.row.dtype]


@pytest.mark.parametrize("name", ["small_decode", "small_append_rope", "small_gather", "small_mla", "small_mla_scaled"])
def test_a_check_sees_one_wrong_element(name, library):
    p = problems.problem(library, SMALL[name], split=False)
    offer, *options = kvarn_rows.offers(p)
    assert [o.who for o in options] == (list(kvarn_rows.OPTIONS) if p.row.kind == "decode" else [])
    call = offer.make()
    p.poison()
    call(0)
    assert p.error() <= offer.tolerance
    if name == "small_append_rope":
        p.query_out[0].reshape(-1)[:4] = 9.0
    else:
        p.out.reshape(-1)[:4] = 9.0
    assert p.error() > offer.tolerance


def test_a_check_sees_a_token_that_was_written_where_none_belongs(library):
    p = problems.problem(library, SMALL["small_append"], split=False)
    call = kvarn_rows.call_of(p)
    p.poison()
    call(0)
    assert p.error() == 0
    p.cached.blocks[-1, 0, 0, 3, 1, 5] = 0.0
    assert p.error() != p.error()


def test_bytes_of_a_row_are_those_that_it_must_move(library):
    p = problems.problem(library, SMALL["small_decode"], split=False)
    cached = int(p.lengths.sum()) * 2 * 64 * 2 * 2
    assert p.bytes == cached + 2 * 2 * 3 * 8 * 64 + 4 * p.cached.pages.total
    assert p.lengths.max() == 96
    assert len(set(p.lengths)) > 1


# --- processes -----------------------------------------------------------------------------------


def test_the_whole_measurement_on_small_shapes(tmp_path, capsys):
    path = tmp_path / "results.json"
    arguments = ["--device", "numpy", "--rows", "small_decode,small_append,small_gather", "--json", str(path)]
    assert bench.main(arguments) == 0
    document = json.loads(path.read_text())
    ours = [r for r in document["records"] if r.get("who") == "kvarn"]
    assert len(ours) == len(cases.select("small_decode,small_append,small_gather", cases.SMALL))
    assert all(r["ok"] and r["us"] > 0 for r in ours)
    assert {r["case"] for r in document["records"] if r.get("kind") == "ceiling"} == {"read", "copy", "matmul"}
    assert "goals reached: 4 of 4" in capsys.readouterr().out


FAKE = """
import os, pathlib
seen = pathlib.Path(__file__).with_name("seen")
times = len(seen.read_text()) if seen.exists() else 0
seen.write_text("x" * (times + 1))
if times == 1:
    os._exit(7)
raise ImportError(f"time {times}")
"""


def test_a_peer_that_fails_or_dies_costs_its_measurement_only(tmp_path, monkeypatch):
    """Imported for each row: the first fails, the second ends the process, which is started again for the third."""
    (tmp_path / "flashinfer.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    rows = [SMALL[name] for name in ("small_append", "small_decode", "small_append_step")]
    found = bench.run_group("flashinfer", rows, "numpy", 60, tmp_path, quiet=True)
    assert {r["case"]: r["note"] for r in found} == {
        "small_append": "ImportError: time 0",
        "small_decode": "ended the process (status 7)",
        "small_append_step": "ImportError: time 2",
    }
    assert {r["kind"] for r in found} == {"append", "decode"}


def test_of_what_began_when_a_process_died_the_innermost_is_to_blame():
    right = {"kind": "decode", "case": "a", "who": "x", "ok": True}
    lines = [
        {"mark": ["peers", "a"]}, {"mark": ["peers", "a", "x"]}, right, {"mark": ["peers", "a", "y"]}, {"died": -11},
        {"done": ["peers", "a"]}, {"mark": ["peers", "b"]}, {"died": 3}, {"mark": ["peers", "c"]},
        {"done": ["peers", "c"]}, {"died": 1},
    ]  # fmt: skip
    found = bench.outcome(lines, {"a": "decode", "b": "append"})
    assert [(r["kind"], r["case"], r["who"], r.get("note")) for r in found] == [
        ("decode", "a", "x", None),
        ("decode", "a", "y", "ended the process (status -11)"),
        ("append", "b", "peers", "ended the process (status 3)"),
    ]


def test_a_group_that_cannot_start_leaves_a_record(tmp_path, monkeypatch):
    # The process starts in a folder whose bench is empty; that of the checkout may be on the path.
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/__init__.py").touch()
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (record,) = bench.run_group("kvarn", [SMALL["small_gather"]], "numpy", 30, tmp_path, quiet=True)
    assert not record["ok"]
    assert "No module named" in record["note"] or "ModuleNotFoundError" in record["note"]


def test_a_restarted_group_leaves_out_what_began(tmp_path):
    path = tmp_path / "kvarn.jsonl"
    begun = [{"mark": ["kvarn", "a"]}, {"mark": ["kvarn", "a", "x"]}, {"mark": ["kvarn", "b"]}]
    lines = [*begun, {"done": ["kvarn", "c"]}]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"mark": ["kv')
    with contextlib.closing(worker.Sink(path)) as sink:
        assert not sink.begin("kvarn", "a", "x")
        assert sink.begin("kvarn", "a", "y")
        assert [sink.wants("kvarn", row) for row in "abcd"] == [True, False, False, True]


def test_a_lost_context_ends_the_process_after_its_record(tmp_path):
    path = tmp_path / "kvarn.jsonl"
    with contextlib.closing(worker.Sink(path)) as sink, pytest.raises(worker.ContextLostError):
        sink.put({"kind": "decode", "ok": False, "note": "gone", "lost": True})
    assert worker.read_records(path) == [{"kind": "decode", "ok": False, "note": "gone"}]


def test_rows_past_the_deadline_say_so(tmp_path, library):
    with contextlib.closing(worker.Sink(tmp_path / "x.jsonl")) as sink:
        worker.run_rows("kvarn", [SMALL["small_gather"]], library, sink, 0.0)
    assert worker.read_records(tmp_path / "x.jsonl")[0]["note"] == "no time left"


def test_rows_that_a_group_has_nothing_for_are_not_offered_once_and_are_no_failures(tmp_path, library):
    for _ in range(2):  # as when the group's process is started again
        with contextlib.closing(worker.Sink(tmp_path / "x.jsonl")) as sink:
            worker.run_rows("fa3", [SMALL["small_gather"]], library, sink, 0.0)
    records = [r for r in worker.read_records(tmp_path / "x.jsonl") if "who" in r]
    assert [r["note"] for r in records] == ["not offered"]
    results = report.Results(records)
    assert not report.failures(results)
    assert report.not_offered(results) == ["fa3: small_gather"]


def test_a_wrong_result_is_no_measurement(library):
    p = problems.problem(library, SMALL["small_gather"], split=False)
    record = worker.measure(kvarn_rows.Offer("nobody", lambda: lambda layer: None, 0.5), p, library)
    assert not record["ok"]
    assert record["note"] == "the result is wrong"


def test_results_that_go_wrong_after_the_first_call_are_seen(library):
    p = problems.problem(library, SMALL["small_gather"], split=False)
    calls = []

    def make():
        right = kvarn_rows.call_of(p)
        return lambda layer: right(layer) if len(calls) < 1 and not calls.append(0) else None

    assert not worker.measure(kvarn_rows.Offer("once", make, 0.5), p, library)["ok"]


# --- the report ----------------------------------------------------------------------------------


def record(case, who, us, ok=True, **more):
    row = TABLE[case]
    work = {"error": 0.001, "bytes": 1e9, "flops": 1e12}
    return {"kind": row.kind, "case": case, "who": who, "us": us, "ok": ok, **work, **more}


CEILINGS = [
    {"kind": "ceiling", "case": "read", "who": "a", "ok": True, "us": 1.0, "rate": 4.0},
    {"kind": "ceiling", "case": "read", "who": "wrong", "ok": False, "us": 1.0, "rate": 9.0},
    {"kind": "ceiling", "case": "copy", "who": "a", "ok": True, "us": 1.0, "rate": 5.0},
    {"kind": "ceiling", "case": "launch", "who": "a", "ok": True, "us": 1.0, "rate": 0.0},
]


def test_ceilings_are_the_best_right_rates():
    assert report.Ceilings.of(CEILINGS) == report.Ceilings(4.0, 5.0, None)


@pytest.mark.parametrize(
    ("case", "us", "expected"),
    [
        ("b64_c4k", 257.0, True),  # 1e9 bytes in 257 µs are 3.89 TB/s: 97.3% of 4
        ("b64_c4k", 260.0, False),
        ("b1_c1k", 6.5, True),
        ("b1_c1k", 6.6, False),
        ("pf_b8_s4k", 1500.0, True),
        ("pf_b8_s4k", 1600.0, False),
        ("mla_b64_c4k_h128", 100.0, None),  # no matrix products were measured
    ],
)
def test_goals(case, us, expected):
    row = TABLE[case]
    assert report.reached(record(case, "kvarn", us), row.goal, report.Ceilings.of(CEILINGS)) is expected


def test_the_best_peer_is_the_fastest_that_is_right():
    results = report.Results([
        *CEILINGS,
        record("b64_c4k", "kvarn", 250.0), record("b64_c4k", "slow", 280.0), record("b64_c4k", "fast", 260.0),
        record("b64_c4k", "wrong", 100.0, ok=False, note="the result is wrong"),
        record("b16_c8k", "kvarn", 130.0), record("b16_c8k", "fast", 125.0),
    ])  # fmt: skip
    assert [r["who"] for r in results.peers(TABLE["b64_c4k"])] == ["fast", "slow"]
    mean, count = results.mean_ratio("decode bf16")
    assert count == 2
    assert mean == pytest.approx((250 / 260 * 130 / 125) ** 0.5)
    assert results.mean_ratio("append") is None
    text = report.text(results)
    assert "slower than the best peer: decode bf16 16 × 8k (1.04×, fast)" in text
    assert "b64_c4k: wrong: the result is wrong" in text
    assert "0.962" in text
    assert "100.0% of read" in text


def test_options_of_a_schedule_are_no_peers_and_have_a_table_of_their_own():
    results = report.Results([
        *CEILINGS, record("b64_c4k", "kvarn", 250.0), record("b64_c4k", "kvarn, early", 240.0),
        record("b64_c4k", "kvarn, batch-invariant", 260.0), record("b16_c8k", "kvarn", 130.0),
    ])  # fmt: skip
    assert results.peers(TABLE["b64_c4k"]) == []
    assert "240.00 (0.960×)  260.00 (1.040×)" in report.options_table(results)
    assert "16 × 8k" not in report.options_table(results)


def test_a_row_that_failed_stands_in_the_table():
    failed = {"kind": "gather", "case": "gather_b64_c2k", "who": "kvarn", "ok": False, "note": "it broke"}
    text = report.text(report.Results([*CEILINGS, failed]))
    assert "gather 64 × 2k" in text
    assert "gather_b64_c2k: kvarn: it broke" in text


def test_the_tables_go_between_the_marks(tmp_path):
    path = tmp_path / "R.md"
    path.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    machine = {"kind": "machine", "device": "a GPU", "multiprocessors": 132}
    results = report.Results([machine, *CEILINGS, record("b64_c4k", "kvarn", 250.0)])
    report.write(results, "2026-01-02", path)
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "Measured on 2026-01-02: a GPU (132 SMs)." in text
    assert "| decode bf16 64 × 4k | 250.00 |" in text
    path.write_text("no marks")
    with pytest.raises(ValueError, match="must have the lines"):
        report.write(results, "2026-01-02", path)
    assert report.BEGIN in report.RESULTS.read_text()
    assert report.END in report.RESULTS.read_text()


# --- suites --------------------------------------------------------------------------------------


def test_every_row_is_in_one_suite():
    rows = [row.name for name in suites.NAMES for row in suites.rows_of(name)]
    assert sorted(rows) == sorted(row.name for row in (*cases.TABLE, *cases.RANGE))
    assert suites.suite_of(TABLE["gather_b64_c2k"]) == "append"


def test_a_suite_is_written_with_its_commit_clocks_and_failures(tmp_path):
    machine = {"kind": "machine", "device": "a GPU", "sm_mhz": 1980, "memory_mhz": 3201}
    failed = {"kind": "gather", "case": "gather_b64_c2k", "who": "vLLM", "ok": False, "note": "it broke"}
    records = [machine, *CEILINGS, record("b64_c4k", "kvarn", 250.0), failed]
    document = {**bench.document(records), "commit": "0123456789ab+"}
    text = suites.write("decode", document, tmp_path).read_text()
    assert (
        "`python -m bench --suite decode`, commit 0123456789ab+, clocks after warming up: multiprocessors 1980 MHz"
        in text
    )
    assert "| decode bf16 64 × 4k | 250.00 |" in text
    assert "- gather_b64_c2k: vLLM: it broke" in text
    assert json.loads((tmp_path / "decode.json").read_text()) == document
    assert re.fullmatch(r"([0-9a-f]{12}\+?)?", suites.commit()), "of this checkout; empty outside of one"


def test_results_and_readme_are_made_of_the_files_of_suites(tmp_path):
    """Of two runs: the tables, the commits, the best ceilings and the number of rows; without a run, of nothing."""
    results, readme = tmp_path / "RESULTS.md", tmp_path / "README.md"
    results.write_text(f"# Results\n{report.BEGIN}\nold\n{report.END}\nmore\n")
    readme.write_text(f"# kvarn\n{suites.BEGIN}\nold\n{suites.END}\nmore\n")
    folder = tmp_path / "results"
    assert suites.regenerated(folder, results, readme) == {}
    machine = {"kind": "machine", "device": "a GPU", "sm_mhz": 1980}
    better = {"kind": "ceiling", "case": "read", "who": "a", "ok": True, "us": 0.8, "rate": 5.0}
    decode = [machine, *CEILINGS, record("b64_c4k_fp8", "kvarn", 100.0), record("b64_c4k_fp8", "FA3", 200.0)]
    prefill = [machine, better, record("pf_b8_s4k", "kvarn", 30.0), record("pf_b8_s4k", "FA3", 20.0)]
    prefill.append(record("pf_b8_s4k", "wrong", 1.0, ok=False))
    for name, records in (("decode", decode), ("prefill", prefill)):
        suites.write(name, {**bench.document(records), "date": "2026-01-02", "commit": f"{name}0000"}, folder)
    texts = suites.regenerated(folder, results, readme)
    assert sorted(path.name for path in texts) == ["README.md", "RESULTS.md", "decode.md", "prefill.md"]
    assert all(path.read_text() == text for path, text in texts.items() if path.parent == folder)
    assert texts[readme] == (
        f"# kvarn\n{suites.BEGIN}\n\n| row | kvarn | fastest other | library | suite |\n|---|---|---|---|---|\n"
        "| decode fp8 64 × 4k | 100.00 | 200.00 | FA3 | decode |\n"
        "| prefill 8 × 4096 causal | 30.00 | 20.00 | FA3 | prefill |\n\n"
        "kvarn is the fastest in 1 of 2 rows of [the results](bench/RESULTS.md). "
        f"The others are: prefill 8 × 4096 causal.\n\n{suites.END}\nmore\n"
    )
    shown = texts[results]
    assert "- `python -m bench --suite decode`: 2026-01-02, commit decode0000, clocks after warming up" in shown
    assert "fastest other library: decode over fp8 caches 0.500." in shown
    assert shown.count("| read | a |") == 1
    assert "| read | a | 0.80 | 5.000 TB/s |" in shown
    assert shown.endswith(f"{report.END}\nmore\n")
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="must have the lines"):
        suites.regenerated(folder, results, readme)


@pytest.mark.parametrize("device", ["numpy", "host"])
def test_a_suite_is_refused_without_a_gpu(device, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--suite", "decode", "--device", device])
    assert "--suite needs a GPU" in capsys.readouterr().err


# --- chains --------------------------------------------------------------------------------------


def test_a_decode_is_timed_alone_and_after_an_append(capsys):
    assert chains.main(["--device", "numpy", "--rows", "=small_decode"]) == 0
    head, alone, after = capsys.readouterr().out.splitlines()
    assert head.split() == ["case", "chain", "µs", "decode", "µs", "error", "checked"]
    assert "append" not in alone
    assert "append, decode" in after


def test_a_chain_whose_result_is_wrong_is_not_timed(library, monkeypatch):
    monkeypatch.setattr(chains, "call_of", lambda p: lambda layer: None)
    with pytest.raises(RuntimeError, match=r"the error must be at most 0\.02, got nan"):
        list(chains.lines(library, SMALL["small_decode"]))


# --- ablation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", roofline.SMALL, ids=str)
def test_a_case_of_the_sweep_is_checked_against_the_sequences_alone(case, library):
    """Slots of no sequence are NaN; a call that writes nothing and one that writes something else are seen."""
    assert (found := roofline.timed(library, case))["ok"], found
    problem = roofline.CaseProblem(library, case)
    problem.poison()
    assert problem.error() != problem.error()
    problem.run(0)
    right = problem.error()
    problem.out[-1] *= 2
    assert right < roofline.TOLERANCE[case.query] < problem.error()


def test_cases_of_the_sweep_are_listed_by_what_they_reach():
    made = [
        {"case": vars(case), "kind": "decode", "ok": True, "us": 20.0, "launch": False} for case in roofline.SMALL[:3]
    ]
    made = [{**m, "given": 20 * share, "share": share} for m, share in zip(made, (0.4, 0.9, 0.3), strict=True)]
    made.append({"case": vars(roofline.SMALL[3]), "kind": "decode", "ok": False, "note": "refused"})
    listed = list(roofline.lines(made, roofline.ENOUGH))
    assert ["refused" in line for line in listed] == [True, False, False]
    assert listed[1].startswith("    30%")
    assert str(roofline.SMALL[2]) in listed[1]
    assert "40%" in listed[2]


def test_every_pass_can_be_left_out_and_the_results_stay_right(capsys):
    assert ablation.main(["--device", "numpy", "--rows", "negate,first_rows,small_append_fp8,small_decode_p1"]) == 0
    out = capsys.readouterr().out
    assert out.count("plan-kv-access") == 5
    assert "WRONG" not in out


def test_without_a_gpu_the_code_is_counted(capsys):
    assert ablation.main(["--device", "none", "--rows", "first_rows", "--passes", "vectorize-kv-lookups"]) == 0
    _, whole, without = [line.split() for line in capsys.readouterr().out.splitlines()]
    wide = -4  # wide loads, narrow loads, wide stores, narrow stores
    assert int(whole[wide]) == 2
    assert int(without[wide]) == 0
    assert int(without[wide + 1]) == 8


# --- what is chosen ------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "lines"), [("pages", 8), ("indexer", 3)])
def test_what_is_chosen_is_checked_before_it_is_timed(name, lines, capsys):
    assert importlib.import_module(f"bench.{name}").main(["--device", "numpy"]) == 0
    out = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[-1] for line in out] == ["ok"] * lines


def test_two_versions_are_checked_and_measured_by_turns(tmp_path, capsys):
    path = tmp_path / "versions.json"
    tree = Path(bench.__file__).parent.parent
    options = ["--device=host", "--rows==small_append_step", "--rounds=2", f"--json={path}"]
    assert versions.main([f"--before={tree}", *options]) == 0
    (found,) = json.loads(path.read_text())
    assert found["ok"]
    assert found["ratio"] == found["now"] / found["before"]
    assert "now / before" in capsys.readouterr().out


def test_rows_are_compared_with_the_first_interleaved(tmp_path, capsys):
    path, interleaved = tmp_path / "times.json", importlib.import_module("bench.interleaved")
    options = ["--device=host", "--rows==small_t5,=small_documents", "--across", f"--json={path}"]
    assert interleaved.main(options) == 0
    found = json.loads(path.read_text())
    assert [line["ok"] for line in found] == [True, True]
    assert [line["ratio"] for line in found] == [line["us"] / found[0]["us"] for line in found]
    assert "of the first" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        interleaved.main([*options, "--peers=torch"])
    assert "--peers must be left out" in capsys.readouterr().err


def test_a_version_before_must_be_a_checkout(tmp_path, capsys):
    with pytest.raises(SystemExit):
        versions.main([f"--before={tmp_path}"])
    assert "must name a checkout" in capsys.readouterr().err

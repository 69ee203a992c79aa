# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kv-opt's parts in process: pipeline texts, the command line, splitting, the driver. The flags have lit tests."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from mlir import ir

from kvarn.dialect import kv, text
from kvarn.lowering import emit, pipeline_parser
from kvarn.lowering.pass_base import fail
from kvarn.lowering.target import by_name
from kvarn.tools import opt_args
from kvarn.tools.opt_diagnostics import Source, split
from kvarn.tools.opt_run import Driver, Settings

DIALECT = Path(__file__).resolve().parents[1] / "dialect"
MODULE = b"func.func @f(%a: i32) -> i32 {\n  %0 = arith.addi %a, %a : i32\n  return %a : i32\n}\n"


@pytest.fixture(scope="module")
def context() -> ir.Context:
    return kv.make_context()


def driver(context: ir.Context, steps: str = "", **changes: object) -> tuple[Driver, io.StringIO]:
    err = io.StringIO()
    made = Driver(Settings(**changes), err, context)  # type: ignore[arg-type]
    with context, ir.Location.unknown():
        made.steps = pipeline_parser.parse(steps)
    return made, err


# --- coverage of the dialect's lit tests ---------------------------------------------------------------


def _round_tripped() -> str:
    """The lit files that read back what they print."""
    texts = [path.read_text() for path in sorted(DIALECT.glob("*.mlir")) if not path.name.startswith("invalid")]
    return "".join(text for text in texts if "--verify-roundtrip" in text or "| kv-opt" in text)


def test_every_op_round_trips_in_a_lit_file() -> None:
    held, names = _round_tripped(), [c.OPERATION_NAME for c in kv.Kv.operations]
    assert [name for name in names if re.search(rf'"{name}"\((?:%|\)|\w+ = )', held) is None] == []


def test_every_type_round_trips_in_a_lit_file() -> None:
    held, names = _round_tripped(), [t.TYPE_NAME for t in kv.Kv.types]
    assert [name for name in names if re.search(rf"!kv\.{name}\b", held) is None] == []


def test_every_verifier_sentence_has_a_refused_case() -> None:
    """The constant beginnings of the sentences in the op files, against the invalid_*.mlir files."""
    held = "".join(p.read_text() for p in DIALECT.glob("invalid*.mlir"))
    sentences = []
    for path in sorted((Path(kv.__file__).parent / "ops").glob("*.py")):
        for found in re.findall(r'fail\(\s*(?:self|op),\s*f?"([^"{]{6,})', path.read_text()):
            sentences.append(found)
    assert len(sentences) > 40
    assert [s for s in sentences if s not in held] == []


# --- pipeline texts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ("", []),
        ("builtin.module()", []),
        ("cse", ["cse"]),
        ("builtin.module(cse)", ["cse"]),
        (" cse , verify-kv ", ["cse", "verify-kv"]),
        ("builtin.module(gpu.module(cse,symbol-dce),cse)", ["gpu.module(cse)", "gpu.module(symbol-dce)", "cse"]),
        ("gpu.module(gpu.func(cse))", ["gpu.module(gpu.func(cse))"]),
        ("any(cse)", ["cse"]),
        ("plan-kv-access{read-only=false}", ["plan-kv-access{read-only=false max-alignment=16}"]),
        ("plan-kv-access{ read_only=0  max-alignment=4 }", ["plan-kv-access{read-only=false max-alignment=4}"]),
    ],
)
def test_pipeline_becomes_steps(context: ir.Context, given: str, steps: list[str]) -> None:
    with context:
        assert [s.text for s in pipeline_parser.parse(given)] == steps


def test_pipeline_text_reads_back(context: ir.Context) -> None:
    with context:
        steps = pipeline_parser.parse(
            "verify-kv,gpu.module(cse),canonicalize{top-down=false},plan-kv-access{max-alignment=8}"
        )
        assert pipeline_parser.parse(pipeline_parser.text(steps)) == steps


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="cse,(){}=\"' ab-.\n", max_size=30))
def test_any_pipeline_text_is_parsed_or_refused(given: str) -> None:
    assert _message(given) != ""


def _message(given: str) -> str | None:
    with _shared():
        try:
            pipeline_parser.parse(given)
        except pipeline_parser.PipelineError as error:
            return str(error)


_contexts: list[ir.Context] = []


def _shared() -> ir.Context:
    if not _contexts:
        _contexts.append(kv.make_context())
    return _contexts[0]


def test_options_split() -> None:
    options = pipeline_parser.split_options("""a=1 b="x y" c='z' flag d={e=f} g=""")
    assert options == {"a": "1", "b": "x y", "c": "z", "flag": "true", "d": "{e=f}", "g": ""}


# --- the command line ----------------------------------------------------------------------------------


def test_passes_keep_their_order_among_other_options() -> None:
    options, flags = opt_args.parse(["-cse", "in.mlir", "--mlir-timing", "--verify-kv", "-o", "out", "--cse=a=b"])
    assert flags == [("cse", ""), ("verify-kv", ""), ("cse", "a=b")]
    assert (options.input, options.output, options.mlir_timing) == (["in.mlir"], "out", True)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [(["--verify-each"], True), (["--verify-each=false"], False), (["-verify-each=0"], False), ([], True)],
)
def test_switches_take_a_value(arguments: list[str], value: bool) -> None:
    assert opt_args.parse(arguments)[0].verify_each is value


def test_options_with_an_optional_value_do_not_eat_the_next_argument() -> None:
    options, _ = opt_args.parse(["--split-input-file", "in.mlir"])
    assert (options.split_input_file, options.input) == ("// -----", ["in.mlir"])
    options, _ = opt_args.parse(["--split-input-file=// CUT", "in.mlir"])
    assert options.split_input_file == "// CUT"


@pytest.mark.parametrize(
    "arguments", [["--verify-each=maybe"], ["--verify-diagnostics=some"], ["--pass-pipeline"], ["-ofile"]]
)
def test_bad_command_lines_are_usage_errors(arguments: list[str]) -> None:
    with pytest.raises(opt_args.UsageError):
        opt_args.parse(arguments)


def test_usage_errors_do_not_import_mlir() -> None:
    code = "import sys; from kvarn.tools import kv_opt; kv_opt.main(['a', 'b']); sys.exit('mlir' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=False).returncode == 0


# --- splitting -----------------------------------------------------------------------------------------


def test_chunks_keep_their_line_numbers() -> None:
    chunks = split(Source("a", b"one\n// -----\ntwo\n// -----   \nthree"), "// -----")
    assert [c.data for c in chunks] == [b"one\n", b"\n\ntwo\n", b"\n\n\n\nthree"]


@pytest.mark.parametrize("data", [b"// ----- x\n", b"x // -----\n", b"//-----\n", b"// ------\n", b""])
def test_only_a_line_of_its_own_splits(data: bytes) -> None:
    assert [c.data for c in split(Source("a", data), "// -----")] == [data]


def test_windows_line_ends() -> None:
    chunks = split(Source("a", b"one\r\n// -----\r\ntwo\r\n"), "// -----")
    assert [c.data for c in chunks] == [b"one\r\n", b"\n\ntwo\r\n"]


# --- the driver ----------------------------------------------------------------------------------------


def test_driver_processes_many_sources(context: ir.Context) -> None:
    d, err = driver(context)
    assert [d.process(Source("a", s)).ok for s in (MODULE, b"zork", MODULE, b"func.func @f(", MODULE)] == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert err.getvalue().count(": error: ") == 2


def test_invalid_bytes_are_a_diagnostic(context: ir.Context) -> None:
    d, err = driver(context)
    assert not d.process(Source("a", b"func.func @f() \xff\xfe {return}")).ok
    assert "a:1:16: error: unexpected character" in err.getvalue()


def test_broken_bytecode_is_a_diagnostic(context: ir.Context) -> None:
    d, err = driver(context, emit="bytecode")
    code = d.process(Source("a", MODULE)).output
    assert isinstance(code, bytes)
    assert code.startswith(b"ML\xefR")
    for cut in (5, len(code) // 2, len(code) - 1):
        assert not d.process(Source("a", code[:cut])).ok
    assert err.getvalue().count(": error: ") >= 3
    assert d.process(Source("a", code)).ok


DENORMALS = b"""module { gpu.module @m {
  llvm.func @k() attributes {gpu.kernel, passthrough = [["denormal-fp-math-f32", "%s"]]} { llvm.return }
} }"""


@pytest.mark.parametrize("emitted", ["llvm", "ptx"])
def test_what_ends_llvm_is_a_diagnostic(context: ir.Context, emitted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit, "check_translatable", lambda module: None)  # which would refuse it
    d, err = driver(context, emit=emitted, target=by_name("sm_90a"))
    assert not d.process(Source("a", DENORMALS % b"zork")).ok
    said = {
        "llvm": "op ends LLVM, by SIGSEGV, which said: invalid value for 'denormal-fp-math-f32' attribute: zork",
        "ptx": "op cannot be compiled: LLVM's verifier refuses its translation",
    }
    assert f"error: 'builtin.module' {said[emitted]}" in err.getvalue()
    assert d.process(Source("a", DENORMALS % b"ieee")).ok


def test_an_error_while_code_is_generated_is_that_of_this_process(context: ir.Context, monkeypatch) -> None:
    def refuses(module: ir.Module, _: object) -> str:
        fail(module.operation, "is refused late")

    monkeypatch.setattr(emit, "ptx", refuses)
    d, err = driver(context, emit="ptx", target=by_name("sm_90a"))
    assert not d.process(Source("a", DENORMALS % b"ieee")).ok
    assert err.getvalue().count("is refused late") == 1


# --- text that must not reach the parser -----------------------------------------------------------------


@pytest.mark.parametrize("given", ['"kv."()', ' "func." ( )', '\n  %0 = "a_b."(%x)'])
def test_nameless_ops_are_found(given: str) -> None:
    found = text.problem(given)
    assert found is not None
    assert given.splitlines()[found.line - 1][found.column - 1] == '"'


@pytest.mark.parametrize("element", ["index", "f8E4M3FN", "f16", "i128"])
def test_arrays_that_python_cannot_read_are_found(element: str) -> None:
    message = "array attribute must have an element type of i1, i8, i16, i32, i64, f32, f64, got"
    given = f"!n = {element}\nmodule attributes {{kv.a = array<!n: 1>}}"
    assert text.problem(given) == (2, 27, f"{message} !n")
    assert text.problem(f"  array < {element} >") == (1, 3, f"{message} {element}")


@pytest.mark.parametrize("given", ["llvm.extractvalue %s[0, 2147483648] : x", "{position = array<i64: -1>}"])
def test_positions_that_do_not_fit_32_bits_are_found(given: str) -> None:
    found = text.problem(given)
    assert found is not None
    assert found.message.startswith("position must be in [0, 2147483648), got ")


@pytest.mark.parametrize(
    "given",
    [
        "llvm.insertvalue %v, %s[0, 2147483647] : x",
        '"kv.load"()',
        '// "kv."()',
        '{a = "kv."}',
        '"kv.."()',
        "",
        '"kv',
        "array<i64: 1>",
        "!llvm.array<4 x i8>",
        "!n = i64 {a = array<!n>}",
        "!llvm.ptr<00000008>",
    ],
)
def test_other_text_is_left_alone(given: str) -> None:
    assert text.problem(given) is None


# --- the page ------------------------------------------------------------------------------------------


OF_PASSES = ("--index-kv-loops", "--lower-affine")  # flags of passes, which the page speaks of


def test_every_flag_is_documented() -> None:
    docs = DIALECT.parents[1] / "docs"
    page, reference = (docs / "kv-opt.md").read_text(), (docs / "reference" / "commands.md").read_text()
    reference = reference.partition("## kv-opt\n")[2].partition("\n## ")[0]
    flags = {s for a in opt_args.build_parser()._actions for s in a.option_strings if s.startswith("--")}
    assert [f for f in sorted(flags) if not re.search(re.escape(f) + r"(?![\w-])", reference)] == ["--help"]
    named = set(re.findall(r"`(--[a-z][\w-]*)", page)) - {"--convert-gpu-to-nvvm"}
    assert sorted(named - flags - set(OF_PASSES)) == []

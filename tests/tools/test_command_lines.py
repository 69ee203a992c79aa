# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Command lines that cannot be meant: one line says why, and the status is 0, 1 or 2.

Files of users that cannot be run, names that are empty, outputs that take nothing, numbers that no machine holds. Each
call is a child of this process, so that what ends a process is seen.
"""

from __future__ import annotations

import contextlib
import io
import json
import os

import pytest

from kvarn.tools import cli, kv_opt, reduce
from kvarn.tools.apart import apart

MAINS = {"kvarn": cli.main, "kv-opt": kv_opt.main, "kv-reduce": reduce.main}
KERNEL = """
import kvarn as kv

@kv.kernel
def scale(x: kv.Buffer[kv.f32, 1]):
    x[kv.thread_id.x] = x[kv.thread_id.x] * 2.0

@kv.kernel
def endless(x: kv.Buffer[kv.f32, 1]):
    while x[0] < 1.0:
        x[1] = x[1] + 1.0

@kv.kernel
def read(c: kv.KVCache, x: kv.Buffer[kv.f32, 1]):
    x[0] = c.load(0, 0, 0, 0, dtype=kv.f32)
"""
FILES = {
    "syntax.py": (b"def f(:\n", "SyntaxError: "),
    "nul.py": (b"x = 1\0\n", "null bytes"),
    "bytes.py": (b'x = "\xff"\n', "utf-8"),
    "leaves.py": (b"import sys\nsys.exit(3)\n", "sys.exit(3)"),
    "key.py": (b'\n{}["x"]\n', "KeyError: 'x' (key.py:2)"),
    "asserts.py": (b'assert False, "no"\n', "AssertionError: no (asserts.py:1)"),
    "imports.py": (b"import nothing_of_this_name\n", "ModuleNotFoundError: No module named"),
}
WAYS = ["compile", "explain", "ablate", "bisect", "trace", "--load-pass", "--extend", "--model", "--op"]
RUN = ["--grid", "1", "--block", "8", "--arg", "x=8"]
CACHE = ["--spec", "c=paged(bf16, num_heads=2, head_size=64, page_size=16)"]
GPU = ["--target", "sm_90a"]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "k.py").write_text(KERNEL)
    for name, (text, _) in FILES.items():
        (tmp_path / name).write_bytes(text)
    (tmp_path / "bad.mlir").write_bytes(b"\xff\xfe")
    (tmp_path / "ok.mlir").write_text("func.func @f() { return }\n")
    (tmp_path / "prog.py").write_text("print('hello')\n")


def called(command: str, *arguments: str) -> tuple[int, str]:
    """The status and stderr of a command."""

    def work() -> tuple[int, str]:
        out, told = io.TextIOWrapper(io.BytesIO()), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
            try:
                status = MAINS[command](arguments)
            except SystemExit as end:  # argparse
                status = end.code
        return status, told.getvalue()

    return tuple(apart(work))


def refused(command: str, *arguments: str) -> str:
    """The one line that a command says, whose status is 1 or 2; the usage of a parser may stand above it."""
    status, told = called(command, *arguments)
    assert status in (1, 2), f"status {status}: {told}"
    lines = told.splitlines()
    line = lines.pop()
    assert ": error: " in line, told
    assert all(above.startswith(("usage: ", " ")) for above in lines), told
    assert "internal error" not in line
    return line


# --- files that are run ------------------------------------------------------------------------------


# Every way with one of the files, and every file.
@pytest.mark.parametrize(
    ("how", "name"), [("trace", "leaves.py"), *((how, list(FILES)[at % len(FILES)]) for at, how in enumerate(WAYS))]
)
def test_a_file_that_cannot_be_run_is_told_in_one_line(how, name):
    given = {
        "trace": ["trace", name],
        "--load-pass": ["compile", "k.py:scale", "--load-pass", name],
        "--extend": ["compile", "k.py:scale", "--extend", name],
        "--model": ["bisect", "k.py:scale", *RUN, "--model", f"{name}:f"],
        "--op": ["compile", "--op", f"{name}:f"],
    }.get(how, [how, f"{name}:scale"])
    line = refused("kvarn", *given)
    assert name in line
    expected = FILES[name][1]
    assert ("ended with 3" if (how, name) == ("trace", "leaves.py") else expected) in line


@pytest.mark.parametrize(
    ("command", "option", "message"),
    [
        ("kv-opt", "--load-pass=leaves.py", "by sys.exit(3)"),
        ("kv-opt", "--extend=leaves.py", "by sys.exit(3)"),
        ("kv-reduce", "--extend=leaves.py", "by sys.exit(3)"),
        ("kv-opt", "--remarks-filter=(", "must be a regular expression"),
        *(("kv-reduce", f"--timeout={n}", "--timeout") for n in ("-1", "0", "nan", "x")),
    ],
)
def test_the_other_commands_refuse_alike(command, option, message):
    rest = ["--interesting=true"] if command == "kv-reduce" else []
    assert message in refused(command, "ok.mlir", option, *rest)


# --- names and numbers -------------------------------------------------------------------------------


EMPTY = [
    *(("compile", option) for option in ("--save", "-o", "--op", "--target", "--extend", "--load-pass", "--disable")),
    *(("explain", option) for option in ("--html", "--pass", "--diff")),
    *(("ablate", option) for option in ("--passes", "--json", "--plot")),
    *(("bisect", option) for option in ("--save", "--reduce", "--trusted", "--model")),
    *(("trace", option) for option in ("--svg", "-o", "--emulate")),
    ("tune", "--output"),
]


@pytest.mark.parametrize(("command", "option"), EMPTY)
def test_an_empty_name_is_none(command, option):
    given = {"trace": ["prog.py"], "tune": []}.get(command, ["k.py:scale"])
    assert "must be a name, got nothing" in refused("kvarn", command, option, "", *given)


@pytest.mark.parametrize(
    "option", ["-o", "--dump-dir", "--remarks-output", "--irdl-file", "--mlir-generate-reproducer"]
)
def test_an_empty_name_is_none_to_kv_opt(option):
    assert "must be a name, got nothing" in refused("kv-opt", "ok.mlir", f"{option}=")


BISECT = ["bisect", "k.py:scale", "--grid=1", "--block=8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*BISECT, "--arg", "nothing=3"], "there is no argument 'nothing'"),
        ([*BISECT, "--arg", "x=4x4"], "argument 'x' has 1 dimensions, got 4x4"),
        (BISECT, "argument 'x' must be given: x=SHAPE"),
        ([*BISECT, "--arg", "x=8", "--lengths", "x"], "must be counts such as"),
        ([*BISECT, "--arg", "x=8", "--trusted", "nowhere"], "trusted must be a folder with the package kvarn"),
        (["compile", "k\0.py:scale"], "without NUL bytes"),
        (["compile", "bad.mlir"], "must be text in UTF-8"),
        (["compile", "/tmp:scale"], "there is no file"),
        (["explain", "k.py:scale", "--remarks-filter", "("], "must be a regular expression"),
        (["bisect", "k.py:scale", *RUN, "--seed", "-1"], "not negative"),
        (["bisect", "k.py:scale", *RUN[2:], "--grid", "99999999999"], "takes more than 5000000 steps"),
        (["explain", "k.py:scale", "--emulate", *GPU, *RUN[:4], "--arg", "x=99999999999"], "not enough memory"),
        (["bisect", "k.py:read", *CACHE, *RUN, "--lengths", "99999999999"], "not enough memory"),
        (["ablate", "k.py:scale", "--time", *GPU, *RUN], "--time needs a GPU"),
        *(
            (["explain", "k.py:scale", option, "3"], "must be used with --emulate")
            for option in ("--grid", "--lengths", "--new")
        ),
        (["explain", "k.py:scale", "--arg", "x=3"], "must be used with --emulate"),
    ],
    ids=lambda x: " ".join(x).replace("\0", "NUL") if isinstance(x, list) else "",
)
def test_what_cannot_be_meant_is_told(arguments, message, request):
    if "--time" in arguments and not request.getfixturevalue("no_gpu"):
        pytest.skip("there is a GPU")
    assert message in refused("kvarn", *arguments)


@pytest.fixture
def no_gpu() -> bool:
    from kvarn.runtime import driver

    return not driver.status().usable


@pytest.mark.parametrize("text", [b"\xff", b"[" * 100_000, b"nonsense"])
def test_a_table_of_schedules_that_is_none_is_told(tmp_path, monkeypatch, text):
    (tmp_path / "tune.json").write_bytes(text)
    monkeypatch.setenv("KVARN_TUNE", str(tmp_path / "tune.json"))
    specs = ["--spec", "collection=paged(bf16, num_heads=1, head_size=64, page_size=16)"]
    specs += ["--spec", "query=buffer(bf16, (none, 4, 64))"]
    specs += ["--static", "schedule={'kind': 'decode', 'max_queries': 1}"]
    line = refused("kvarn", "compile", "--op", "attention", *specs, *GPU)
    assert f"the table of schedules {tmp_path / 'tune.json'} must be" in line


# --- outputs -----------------------------------------------------------------------------------------


OUTPUTS = {
    "compile -o": ("kvarn", ["compile", "k.py:scale", *GPU, "-o"]),
    "compile --save": ("kvarn", ["compile", "k.py:scale", *GPU, "--save"]),
    "explain --html": ("kvarn", ["explain", "k.py:scale", *GPU, "--html"]),
    "trace -o": ("kvarn", ["trace", "--emulate", "sm_90a", "-o"]),
    "kv-reduce -o": ("kv-reduce", ["ok.mlir", "--interesting=true", "--quiet", "-o"]),
    "kv-opt -o": ("kv-opt", ["ok.mlir", "-o"]),
    "kv-opt --remarks-output": ("kv-opt", ["ok.mlir", "--cse", "--remarks-output"]),
    "kv-opt --mlir-generate-reproducer": ("kv-opt", ["ok.mlir", "--cse", "--mlir-generate-reproducer"]),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_is_written_whole_into_folders_that_are_made_or_is_refused_in_one_line(tmp_path, name):
    command, arguments = OUTPUTS[name]
    last = ["prog.py"] if "trace" in arguments else []
    made = tmp_path / "a" / "b" / "made.out"
    status, told = called(command, *arguments, str(made), *last)
    assert status == 0, told
    assert [path.name for path in made.parent.iterdir()] == ["made.out"]
    before = made.read_bytes()
    for wrong in (f"{made}/x", str(tmp_path)):
        assert wrong in refused(command, *arguments, wrong, *last)
    assert made.read_bytes() == before
    fifo = tmp_path / "device"
    os.mkfifo(fifo)  # what stands for a device: nothing may take its place
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    assert called(command, *arguments, str(fifo), *last)[0] == 0
    assert not fifo.is_file()
    os.close(reader)


def test_a_device_that_takes_nothing_is_told():
    line = refused("kv-opt", "ok.mlir", "-o", "/dev/full")
    assert "/dev/full cannot be written: No space left on device" in line
    assert not os.path.isfile("/dev/full")


# --- kernels that do not end -------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["explain", "--emulate"], ["bisect"]])
def test_a_kernel_that_does_not_end_is_told(monkeypatch, command):
    monkeypatch.setenv("KVARN_EMULATOR_STEPS", "300")
    status, told = called("kvarn", *command[:1], "k.py:endless", *command[1:], *GPU, *RUN[:4], "--arg", "x=0,0")
    assert status == 1
    assert "the kernel does not end within 300 steps" in told
    assert json.dumps("KVARN_EMULATOR_STEPS")[1:-1] in told

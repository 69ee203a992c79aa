# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The packages of integrations/ build, and their wheels have what the engine looks for."""

import configparser
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

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
    assert "# kvarn in vLLM" in metadata.get_payload()
    points = configparser.ConfigParser()
    points.read_string(text["entry_points.txt"])
    assert dict(points["vllm.general_plugins"]) == {"kvarn": "kvarn_vllm:register"}

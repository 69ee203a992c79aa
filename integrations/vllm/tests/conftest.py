# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Engines of the tests run in this process, on a GPU if there is one, else on the CPU platform of cpu_platform.py."""

import importlib
import os
import sys
import tempfile
from pathlib import Path

import torch

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

# vLLM finds a platform by the metadata of an installed package.
_here = Path(tempfile.mkdtemp(prefix="kvarn-vllm-"))
_package = _here / "kvarn_vllm_tests-0.dist-info"
_package.mkdir()
(_package / "METADATA").write_text("Metadata-Version: 2.1\nName: kvarn-vllm-tests\nVersion: 0\n")
if not torch.cuda.is_available():
    (_package / "entry_points.txt").write_text("[vllm.platform_plugins]\nkvarn_tests = conftest:platform\n")

# Structured output, which no test asks for: vLLM's versions import different versions of its library.
(_here / "xgrammar").mkdir()
for _part in ("__init__", "structural_tag", "openai_tool_call_schema"):
    (_here / "xgrammar" / f"{_part}.py").write_text(
        "from unittest.mock import MagicMock\n"
        "def __getattr__(name):\n"
        "    if name.startswith('__'):\n"
        "        raise AttributeError(name)\n"
        "    return MagicMock()\n"
    )

sys.path[:0] = [str(_here), str(Path(__file__).parent)]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2] + [x for x in [os.environ.get("PYTHONPATH")] if x])
importlib.invalidate_caches()


def platform() -> str:
    return "cpu_platform.TestPlatform"

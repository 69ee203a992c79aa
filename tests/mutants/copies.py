# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies of the tree, in which tests import what was copied in the place of what is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .faults import ROOT

SECONDS = 300  # that the tests of a fault may take
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "Output", ".pytest_cache", ".hypothesis")
# Found by every Python that is started with the copy's PYTHONPATH, after the hook of an editable installation is there.
_CUSTOMIZE = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, {!r})
"""


@dataclass(frozen=True)
class Outcome:
    """What came of a test."""

    test: str
    outcome: str  # passed, failed, skipped; broken: it says nothing about what it tests
    error: str


class Copy:
    """A copy of the tree in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "tree"
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=_LEFT_OUT)
        for name in ("dialect", "lowering"):
            link = self.root / "python" / "kvarn" / name
            if not link.exists():
                link.symlink_to(Path("../..") / name)
        installed = Path(sysconfig.get_path("purelib")) / "kvarn"
        for library in installed.rglob("*.so"):
            shutil.copy2(library, self.root / "python" / "kvarn" / library.relative_to(installed))
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(_CUSTOMIZE.format(str(self.root / "python")))

    def run(self, names: tuple[str, ...], all_of_them: bool = False, seconds: float = SECONDS) -> list[Outcome]:
        """Run tests, up to the first that fails unless all; TimeoutError and ValueError when they do not end."""
        found = self.folder / "found"
        found.write_text("")
        files = dict.fromkeys(name.partition("::")[0] for name in names)
        environment = os.environ | {
            "PYTHONPATH": f"{self.folder / 'site'}{os.pathsep}{self.root / 'tests'}",
            "KVARN_MUTANTS_PICKED": json.dumps(names),
            "KVARN_MUTANTS_FOUND": str(found),
            "KVARN_CACHE_DIR": str(self.folder / "cache"),  # of what tests start; their own is below basetemp
        }
        environment.pop("KVARN_TEST_ALL", None)  # make check takes a sample of the cases
        options = ["-q", "--tb=short", "-p", "mutants.picked", "-p", "no:xdist", "-p", "no:cacheprovider"]
        options += [f"--basetemp={self.folder / 'tmp'}", *(() if all_of_them else ("-x",))]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *files],
                cwd=self.root,
                env=environment,
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"no end after {seconds:.0f} s") from None
        if done.returncode not in (0, 1):
            raise ValueError((done.stdout + done.stderr)[-2000:])
        return [Outcome(*json.loads(line)) for line in found.read_text().splitlines()]

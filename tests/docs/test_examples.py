# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a new user does: the README's program, the examples, the pages of docs/.

The code of the pages is taken from the pages themselves. A page's blocks marked ``python`` make one program, run with
the page's line numbers; those marked ``python sketch`` are parts of something and are only compiled.
"""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from reference.pages import FENCE, PAGES, ROOT, blocks, name_of, program

PRINTED = {"docs/tutorial/5-a-bug.md": "look-ahead is the first pass"}
EXAMPLES = ("scale_keys", "copy_convert", "rms_norm_keys", "observed_tokens")


def run_text(text: str, tmp_path: Path, title: str) -> None:
    """Run a program from a file: kernels are read from their source."""
    file = tmp_path / f"{re.sub(r'[^A-Za-z]', '_', title)}.py"
    file.write_text(text, encoding="utf-8")
    runpy.run_path(str(file), run_name="documentation")


# --- the README ------------------------------------------------------------------------------------


def test_the_readme_has_a_short_program_that_runs(tmp_path, capsys):
    found = [code for _, info, code in blocks(ROOT / "README.md") if info == "python"]
    assert len(found) == 1
    assert len(found[0].strip().splitlines()) <= 24
    run_text(found[0], tmp_path, "readme")
    assert ".visible .entry scale_keys" in capsys.readouterr().out


# --- examples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_agrees_with_numpy_and_gives_ptx(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ptx = module.main()
    assert ".target sm_90a" in ptx
    assert f".visible .entry {name}(" in ptx


def test_patterns_of_mlir_rewrite_kv_ops():
    module = runpy.run_path(str(ROOT / "examples" / "rewrites.py"), run_name="examples")
    assert ".visible .entry norms(" in module["main"]()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["harmless", "pages", "scales", "invariant", "graph"])
def test_a_promise_is_kept_by_gpu_code(name):
    spec = importlib.util.spec_from_file_location("promises", ROOT / "examples" / "promises.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert name in module.PROMISES
    module.main(name)
    assert f"`python examples/promises.py {name}`" in (ROOT / "README.md").read_text()


# --- pages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [p for p in PAGES if program(p) and p.name != "README.md"], ids=name_of)
def test_a_page_runs(path, tmp_path, capsys):
    if "import torch" in program(path) or "import kvarn.torch" in program(path):
        pytest.importorskip("torch", reason="PyTorch is not installed: make check-torch runs this page")
    if "(Kv.Operation" in program(path):  # what it declares stays declared: in a process of its own
        (tmp_path / "page.py").write_text(program(path), encoding="utf-8")
        done = subprocess.run([sys.executable, tmp_path / "page.py"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return
    run_text(program(path), tmp_path, name_of(path))
    if name_of(path) in PRINTED:  # what the program prints is shown on the page
        shown = re.search(rf"(?:^    .*\n)*^    {PRINTED[name_of(path)]}.*\n(?:    .*\n)*", path.read_text(), re.M)[0]
        printed = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert [line for line in shown.splitlines() if line.split() not in printed] == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_sketches_are_python(path):
    for first, info, code in blocks(path):
        assert info in ("", "python", "python sketch", "mlir", "toml"), f"{name_of(path)}:{first}: what is {info!r}?"
        if info == "python sketch":
            compile(code, f"{name_of(path)}:{first}", "exec")


@pytest.mark.parametrize(("page", "example"), [("parallel", "parallel/*")])
def test_a_page_shows_an_example_as_it_is(page, example):
    shown = [code for _, info, code in blocks(ROOT / "docs" / f"{page}.md") if info == "python sketch"]
    files = [path.read_text() for path in (ROOT / "examples").glob(f"{example}.py")]
    assert sum(any(code in text for text in files) for code in shown) == {"parallel": 2, "writing-passes": 1}[page]


@pytest.mark.whole
def test_commands_print_what_the_page_shows():
    """Lines that begin with ``$``, in the folder of the page's files; registers are those of the assembler at hand."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8"))
    found = re.findall(r"^    \$ kvarn (.*)\n((?:    (?!\$).*\n)+)", text, re.M)
    assert [command.split()[0] for command, _ in found] == ["explain", "ablate", "bisect"]
    for command, shown in found:
        run = [
            sys.executable,
            "-c",
            "import sys; from kvarn.tools import cli; sys.exit(cli.main())",
            *shlex.split(command),
        ]
        done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT / "examples" / "debugging")
        printed = [line.split() for line in done.stdout.splitlines()]
        for line in shown.splitlines():
            words = line.split() if "[ptxas]" not in line else []
            if command.startswith("ablate"):
                words = words[: 6 if "." in line else 4]  # without registers
            assert any(one[: len(words)] == words for one in printed), line


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path):
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", path.read_text(encoding="utf-8")))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{name_of(path)} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{name_of(path)} links to {target}, which has {sorted(anchors(found))}"


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    assert sorted(p for p in pages if f"]({p})" not in index) == []


def test_the_reference_is_what_the_docstrings_say():
    done = subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_notebooks_are_the_pages():
    """Their cells of code, one after another, are the program that `test_a_page_runs` runs."""
    done = subprocess.run([sys.executable, ROOT / "docs" / "notebooks.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
    assert len(pages) == 5
    for page in pages:
        cells = json.loads(page.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
        code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        assert code.split() == program(page).split()

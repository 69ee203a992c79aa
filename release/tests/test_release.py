# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What make site and make wheels stand on: the navigation has every page, broken links and wrong wheels are refused."""

import importlib.util
import re
import shlex
import sys
import zipfile
from pathlib import Path

import pytest

from bench import suites

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "release").is_dir():
    pytest.skip("release/ is of the repository, not of the package", allow_module_level=True)


def loaded(path):
    spec = importlib.util.spec_from_file_location(f"release_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


conf, check_site, wheels = (loaded(ROOT / p) for p in ("docs/conf.py", "release/check_site.py", "release/wheels.py"))


# --- the site


def test_every_page_is_reached_from_the_navigation():
    index = (ROOT / "docs" / "index.md").read_text()
    reached = [document for documents in conf.sections(index).values() for document in documents]
    pages = {p.relative_to(ROOT).with_suffix("").as_posix() for p in (ROOT / "docs").rglob("*.md")} - {conf.INDEX}
    pages |= {p.stem for p in ROOT.glob("*.md")} | {"bench/RESULTS"}
    assert sorted(reached) == sorted(pages)  # each once
    assert "" not in conf.sections(index)  # which is the caption that Sphinx shows


def test_the_navigation_follows_the_index():
    index = "# t\n\n## First\n\n[a](a.md), [b](reference/b.md#x)\n\n## Second\n\n[a](a.md) [c](../C.md) [o](https://x.y/z)\n"
    assert conf.sections(index) == {"First": ["docs/a", "docs/reference/b"], "Second": ["C"]}
    assert ":caption: Second\n\n/C\n```" in conf.toctrees(index)


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">b</a><a href="#top">t</a><p id="top"></p><a href="https://example.org">x</a>'
    )
    (tmp_path / "b.html").write_text('<h1 id="here"></h1><img src="data:,x"><link rel="canonical" href="https://x.y">')
    assert list(check_site.problems(tmp_path)) == []
    (tmp_path / "b.html").write_text(
        '<h1 id="there"></h1><a href="c.html">c</a><script src="https://cdn.example/x.js"></script>'
    )
    assert list(check_site.problems(tmp_path)) == [
        "a.html links to b.html#here, which has no such anchor",
        "b.html links to c.html, which is not there",
        "b.html fetches https://cdn.example/x.js",
    ]
    assert check_site.main(str(tmp_path)) == 1
    assert check_site.main(str(tmp_path / "none")) == 1


# --- the wheel


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("kvarn-0.1.0-py3-none-manylinux_2_24_x86_64.whl", ""),
        ("kvarn-0.1.0-py3-none-manylinux_2_17_x86_64.manylinux_2_31_x86_64.whl", ""),
        ("kvarn-0.1.0-py3-none-manylinux_2_31_x86_64.whl", "must be for manylinux_2_28 or older"),
        ("kvarn-0.1.0-py3-none-linux_x86_64.whl", "must be for manylinux_2_28 or older"),
        ("kvarn-0.1.0-cp311-cp311-manylinux_2_24_x86_64.whl", "must be for every Python"),
    ],
)
def test_a_wheel_that_some_users_cannot_install_is_refused(name, problem):
    if not problem:
        wheels.check_tag(name)
        return
    with pytest.raises(wheels.Refused, match=problem):
        wheels.check_tag(name)


def test_a_wheel_without_the_native_part_is_refused(tmp_path, monkeypatch, capsys):
    def without_native(*command, env=None):
        assert "build" in command
        zipfile.ZipFile(tmp_path / "kvarn-0.1.0-py3-none-any.whl", "w").close()

    monkeypatch.setattr(wheels, "run", without_native)
    with pytest.raises(wheels.Refused, match=r"no native part \(kvarn/dialect/native/lib.*, kvarn/runtime/_launches"):
        wheels.build(tmp_path)


def test_a_python_that_is_missing_is_named_and_fails(monkeypatch, capsys, tmp_path):
    wheel = tmp_path / "kvarn.whl"
    wheel.touch()
    mine = "{}.{}".format(*sys.version_info)
    assert wheels.interpreter(mine)
    assert wheels.interpreter("3.99") is None
    monkeypatch.setattr(wheels, "interpreter", lambda version: None if version == "3.12" else sys.executable)
    monkeypatch.setattr(wheels, "try_out", lambda *arguments: "")
    assert wheels.main(["--wheel", str(wheel)]) == 1
    out = capsys.readouterr().out
    assert "Python 3.12: no Python 3.12 is here: put python3.12 on PATH" in out
    assert out.count(": works") == 3
    assert wheels.main(["--wheel", str(wheel), "--python", "3.10"]) == 0


def test_the_metadata_names_the_pythons_that_are_tried():
    text = (ROOT / "pyproject.toml").read_text()
    assert tuple(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)) == wheels.VERSIONS
    first, last = (tuple(map(int, v.split("."))) for v in (wheels.VERSIONS[0], wheels.VERSIONS[-1]))
    assert f'requires-python = ">={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"' in text


# --- what README says


def table(text, title):
    """The rows of the first table under a heading, each as a dictionary by column."""
    lines = text.partition(f"## {title}\n")[2].partition("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def test_the_figures_are_those_of_the_suites():
    """RESULTS.md, README and the pages are what ``python -m bench.suites`` makes of ``bench/results``."""
    for path, text in suites.regenerated().items():
        assert path.read_text() == text, f"{path.name}: python -m bench.suites writes it again"


def test_the_figures_of_readme_are_those_of_the_results():
    """A new measurement changes README with it: what it shows, and of how many rows kvarn is the fastest."""
    readme, results = ((ROOT / name).read_text() for name in ("README.md", "bench/RESULTS.md"))
    rows = {row["case"]: row for row in table(results, "Rows")}
    shown = table(readme, "How fast")
    assert shown[0]["row"].startswith("decode fp8")
    for row in shown:
        of = rows[row["row"]]
        found = [row["kvarn"], row["fastest other"], row["library"]]
        assert found == [of["kvarn µs"], of["µs"], of["best peer"]], row["row"]
        assert row["row"] in {found.title for found in suites.rows_of(row["suite"])}
    compared = {name: row for name, row in rows.items() if row["µs"] and row["kvarn µs"] != "failed"}
    slower = [name for name, row in compared.items() if float(row["kvarn µs"]) > float(row["µs"])]
    text = f"the fastest in {len(compared) - len(slower)} of {len(compared)} rows of [the results](bench/RESULTS.md)."
    assert text + (f" The others are: {'; '.join(slower)}." if slower else "") in readme
    means = dict(re.findall(r"^- (\w+(?: \w+)?): geometric mean of time over the best peer's ([\d.]+)", results, re.M))
    assert means
    for group, mean in means.items():
        assert f"{suites.WORDS[group]} {mean}" in results.partition("Measured on")[0]


def test_measured_figures_are_in_the_results_alone():
    """Pages derive what the hardware allows in a section Arithmetic; what was measured is on one page, by its suite."""
    for path in (ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "tutorial").glob("*.md")):
        section = ""
        for line in path.read_text().splitlines():
            section = line.lstrip("# ") if line.startswith("#") else section
            figure = re.search(r"\d ?(?:µs|[TG]B/s|TFLOP)", line)
            assert figure is None or section.startswith("Arithmetic"), f"{path.name}: {line}"


def test_what_is_written_by_hand_stays_short():
    """A reader of everything has a day: what a page gains, another loses. Generated pages and tables have no cap."""
    pages = {p: p.read_text() for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "reference"}
    readme, results = ((ROOT / name).read_text() for name in ("README.md", "bench/RESULTS.md"))
    measured = results.partition("<!-- measured: begin -->")[2].partition("<!-- measured: end -->")[0]
    assert readme.count("\n") <= 120
    assert results.count("\n") <= 250
    made = measured + readme.partition(suites.BEGIN)[2].partition(suites.END)[0]
    assert sum(text.count("\n") for text in (*pages.values(), readme, results)) - made.count("\n") <= 4500


def test_a_program_of_bench_that_a_page_names_is_there():
    pages = [*ROOT.glob("*.md"), ROOT / "bench" / "RESULTS.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"python -m bench\.(\w+)", page.read_text())}
    named |= {name for page in pages for name in re.findall(r"bench/(\w+)\.py", page.read_text())}
    assert len(named) > 5
    assert sorted(name for name in named if not (ROOT / "bench" / f"{name}.py").is_file()) == []


def test_the_command_of_the_first_screen_gives_ptx(capsysbinary):
    from kvarn.tools import cli

    command = re.search(r"^    kvarn (compile --op (?:.*\\\n)*.*)$", (ROOT / "README.md").read_text(), re.M)[1]
    assert cli.main(shlex.split(command.replace("\\\n", " "))) == 0
    assert b".target sm_90a" in capsysbinary.readouterr().out

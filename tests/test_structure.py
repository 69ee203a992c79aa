# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The rules of the tree: who may import whom, which files belong together, what every file carries."""

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvarn.dialect import dtypes

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    "kvarn.chat": ROOT / "examples" / "chat",
    "kvarn.dialect": ROOT / "dialect",
    "kvarn.lowering": ROOT / "lowering",
    "kvarn": ROOT / "python" / "kvarn",
}
FOLDERS = ("dialect", "lowering", "python", "tests", "bench", "examples")
SPDX = "SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception"
MOST_LINES, MOST_PARAMETERS = 1000, 10


@functools.cache
def _tree(path: Path) -> ast.Module:
    """The syntax tree of a file, which many rules look at."""
    return ast.parse(path.read_text())


MLIR = {"mlir"}
NUMERIC = {"numpy", "ml_dtypes"}
CUDA = {"cuda"}
PURE_DIALECT = {
    f"kvarn.dialect.{name}"
    for name in (
        "chips",
        "codes",
        "contents",
        "deprecated",
        "dtypes",
        "layout",
        "members",
        "page_orders",
        "records",
        "ownership_layout",
        "register_layout",
        "schedules",
        "shared_layout",
        "tile_layout",
        "tma_layout",
        "trace_layout",
    )
}
BASE = {"kvarn.errors", "kvarn.env", "kvarn.files", "kvarn.forks", "kvarn.moved", "kvarn.settings", "kvarn._version"}
RUNTIME_SIDE = {
    "kvarn.artifact",
    "kvarn.artifact.bundle",
    "kvarn.compilation.disk_cache",
    "kvarn.caches",
    "kvarn.paging.hybrid",
    "kvarn.paging.manager",
    "kvarn.sanitizer.ownership",
    "kvarn.paging.drafts",
    "kvarn.timeline.drawing",
    "kvarn.timeline.recording",
    "kvarn.paging.page_pool",
    "kvarn.paging.prefixes",
    "kvarn.paging.step_inputs",
    "kvarn.runtime",
}
EVERYTHING = {"kvarn", *MLIR, *NUMERIC}

# What docs/architecture.md allows, by the longest prefix that fits the importing module. The standard library and a
# package's own modules are always allowed. "lazy" may be imported inside functions only.
ALLOWED = {
    "kvarn": {"now": {*BASE, *PURE_DIALECT}, "lazy": EVERYTHING},
    "kvarn.errors": {"now": set(), "lazy": {"kvarn.env", *MLIR}},
    "kvarn.env": {"now": set(), "lazy": set()},
    "kvarn.settings": {"now": {"kvarn.env"}, "lazy": {"kvarn.lowering"}},
    "kvarn.pipelines": {"now": EVERYTHING, "lazy": set()},
    "kvarn.files": {"now": {"kvarn.env"}, "lazy": set()},
    "kvarn.forks": {"now": set(), "lazy": set()},
    "kvarn.moved": {"now": set(), "lazy": set()},
    "kvarn.dialect": {"now": MLIR, "lazy": set()},
    "kvarn.dialect.dtypes": {"now": set(), "lazy": NUMERIC},
    "kvarn.dialect.layout": {
        "now": {"kvarn.dialect.dtypes", "kvarn.dialect.page_orders", "kvarn.dialect.records"},
        "lazy": set(),
    },
    "kvarn.dialect.members": {"now": {"kvarn.dialect.dtypes", "kvarn.dialect.layout"}, "lazy": set()},
    "kvarn.dialect.page_orders": {"now": set(), "lazy": set()},
    "kvarn.dialect.records": {"now": {"kvarn.dialect.dtypes"}, "lazy": set()},
    "kvarn.dialect.chips": {"now": set(), "lazy": set()},
    "kvarn.dialect.contents": {"now": set(), "lazy": set()},
    "kvarn.dialect.installed": {"now": {"kvarn.env"}, "lazy": set()},
    "kvarn.dialect.deprecated": {"now": set(), "lazy": set()},
    "kvarn.dialect.schedules": {"now": {"kvarn.dialect.deprecated"}, "lazy": set()},
    **{
        f"kvarn.dialect.{name}_layout": {"now": PURE_DIALECT, "lazy": set()}
        for name in ("register", "shared", "tile", "tma")
    },
    "kvarn.lowering": {"now": {"kvarn.dialect", "kvarn.dsl", *BASE, *MLIR}, "lazy": set()},
    "kvarn.dsl": {"now": {"kvarn.dialect", *BASE, *MLIR}, "lazy": {"numpy"}},
    **{name: {"now": {*RUNTIME_SIDE, *PURE_DIALECT, *BASE, *NUMERIC}, "lazy": CUDA} for name in RUNTIME_SIDE},
    "kvarn.weights": {"now": {"numpy"}, "lazy": set()},
    "kvarn.testing": {"now": {"kvarn.measure"}, "lazy": {"torch"}},
    "kvarn.paging.prefixes": {"now": {*RUNTIME_SIDE, *NUMERIC}, "lazy": set()},
    "kvarn.paging.drafts": {"now": {*RUNTIME_SIDE, *PURE_DIALECT, *BASE, *NUMERIC}, "lazy": {"kvarn.ops"}},
    "kvarn.runtime.host": {"now": {*RUNTIME_SIDE, *PURE_DIALECT, *BASE, *NUMERIC}, "lazy": {"kvarn.dialect", *MLIR}},
    "kvarn.compilation.driver": {"now": EVERYTHING, "lazy": CUDA},
    "kvarn.emulator": {"now": {*RUNTIME_SIDE, *PURE_DIALECT, *BASE, *NUMERIC}, "lazy": {"kvarn.lowering.target"}},
    "kvarn.compilation.kernel": {"now": {*RUNTIME_SIDE, *PURE_DIALECT, *BASE}, "lazy": {*CUDA, "kvarn.emulator"}},
    "kvarn.compilation.extensions": {"now": EVERYTHING, "lazy": set()},
    "kvarn.compilation.stage_files": {"now": EVERYTHING, "lazy": set()},
    "kvarn.dispatch": {"now": EVERYTHING, "lazy": CUDA},
    "kvarn.compilation.specialisation": {"now": EVERYTHING, "lazy": set()},
    "kvarn.ops": {"now": EVERYTHING, "lazy": CUDA},
    "kvarn.torch": {"now": {*EVERYTHING, "torch"}, "lazy": CUDA},  # imported by those who have torch
    "kvarn.torch.huggingface": {"now": {*EVERYTHING, "torch", "transformers"}, "lazy": CUDA},
    "kvarn.parallel": {"now": {*EVERYTHING, "torch"}, "lazy": CUDA},  # likewise, by name
    "kvarn.tools": {"now": EVERYTHING, "lazy": {*CUDA, "torch"}},
    "kvarn.inspect": {"now": EVERYTHING, "lazy": CUDA},
    "kvarn.measure": {"now": EVERYTHING, "lazy": {*CUDA, "torch"}},
    "kvarn.chat": {"now": {*EVERYTHING, "gguf", "tokenizers"}, "lazy": {"torch"}},
}


def _listed() -> list[Path]:
    """The tree's files: what git tracks or would track; without git, what lies in the folders."""
    git = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        names = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split("\0")
        found = [ROOT / name for name in names if name]
    except (OSError, subprocess.CalledProcessError):
        found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
        found += [path for path in ROOT.iterdir() if path.is_file()]
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


FILES = _listed()
PYTHON = [path for path in FILES if path.suffix == ".py"]
LIT_ONLY = (".mlir", ".test")
CODE = [path for path in FILES if path.suffix in (".py", ".cpp", ".h", *LIT_ONLY)]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _module(path: Path) -> str | None:
    """The dotted name under which a file of the package is imported; None outside it."""
    for package, folder in SOURCES.items():
        if path.is_relative_to(folder):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return None


MODULES = {name: path for path in PYTHON if (name := _module(path)) is not None}


def _within(name: str, prefixes: set[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _imports(name: str, path: Path) -> list[tuple[str, bool, int]]:
    """(imported module, whether inside a function, line); what only type checkers read is left out."""
    found: list[tuple[str, bool, int]] = []
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]

    def visit(node: ast.AST, lazy: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if _type_checking(child):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, lazy, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                stem = ".".join([*base, *([child.module] if child.module else [])])
                for alias in child.names:
                    full = f"{stem}.{alias.name}"
                    found.append((full if full in MODULES or stem == "kvarn" else stem, lazy, child.lineno))
            visit(child, lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    visit(_tree(path), False)
    return found


def _named(path: Path) -> list[str]:
    """Modules of the package that a file imports by a name: import_module("kvarn...")."""
    calls = (node for node in ast.walk(_tree(path)) if isinstance(node, ast.Call) and node.args)
    named = (ast.literal_eval(c.args[0]) for c in calls if isinstance(c.args[0], ast.Constant)
             and ast.unparse(c.func).endswith("import_module"))  # fmt: skip
    return [name for name in named if isinstance(name, str) and name.partition(".")[0] == "kvarn"]


# The library and bench. kvarn/__init__.py alone has tables of what a name imports: methods that do what a layer above
# theirs does (`kernel.save`, `artifact.load`) go through it.
GRAPH_FILES = MODULES | {
    f"bench.{path.stem}": path for path in PYTHON if path.parent == ROOT / "bench" and path.name != "__init__.py"
}


@functools.cache
def _graph() -> dict[str, set[str]]:
    """Each module's imports of others, those inside functions and by name included; not those for type checkers."""
    graph = {}
    for name, path in GRAPH_FILES.items():
        found = [imported for imported, _, _ in _imports(name, path)]
        if name != "kvarn":
            found += _named(path)
        found = [full if full in GRAPH_FILES else full.rpartition(".")[0] for full in found]
        graph[name] = {full for full in found if full in GRAPH_FILES and full != name}
    return graph


def _circles(graph: dict[str, set[str]]) -> list[str]:
    """A shortest way round for each module that can be reached from itself, one per set of modules."""
    found, seen = [], set()
    for start in graph:
        before, queue = {}, [start]
        for module in queue:
            for imported in sorted(graph[module] - before.keys()):
                before[imported] = module
                queue.append(imported)
        if start in before and start not in seen:
            way = [start]
            while way[-1] != start or len(way) == 1:
                way.append(before[way[-1]])
            seen.update(way)
            found.append(" <- ".join(way))
    return found


def test_no_file_imports_itself_through_others():
    circles = _circles(_graph())
    assert not circles, "circles of imports:\n" + "\n".join(circles)


def test_circles_are_found():
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b <- c <- b"]


def _rule(name: str) -> tuple[str, dict[str, set[str]]]:
    key = max((key for key in ALLOWED if _within(name, {key})), key=len)
    return key, ALLOWED[key]


def test_a_file_imports_only_what_its_folder_may():
    wrong = []
    for name, path in MODULES.items():
        key, rule = _rule(name)
        own = set() if key in {"kvarn", *PURE_DIALECT} else {key}
        for imported, lazy, line in _imports(name, path):
            if imported.partition(".")[0] in sys.stdlib_module_names or _within(imported, own | rule["now"]):
                continue
            if lazy and _within(imported, rule["lazy"]):
                continue
            if imported == "kvarn" and not name.startswith("kvarn.dialect."):
                continue  # import kvarn as kv: kernels of lowering/kernels; and methods that do what a layer above does
            when = "inside functions only" if _within(imported, rule["lazy"]) else "never"
            wrong.append(f"{_name(path)}:{line}: {key} may import {imported} {when}")
    assert not wrong, "\n".join(dict.fromkeys(wrong))


def test_importing_kvarn_is_cheap():
    code = "import sys, kvarn; print(*sorted({m.partition('.')[0] for m in sys.modules} & {'mlir', 'cuda', 'torch'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    "module",
    [
        f"kvarn.{name}"
        for name in ("artifact", "caches", "compilation.disk_cache", "compilation.kernel", "emulator", "runtime")
    ],
)
def test_the_runtime_runs_without_mlir(module):
    """An artifact must run on a machine that has no mlir."""
    if module not in MODULES:
        pytest.skip(f"{module} does not exist")
    code = f"import sys; sys.modules['mlir'] = None; import {module}; assert 'kvarn.lowering' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _passes() -> list[Path]:
    """The files of lowering/ that define a pass."""

    def is_pass(node: ast.AST) -> bool:
        return isinstance(node, ast.FunctionDef) and any("kv_pass" in ast.unparse(d) for d in node.decorator_list)

    files = (p for p in PYTHON if p.is_relative_to(ROOT / "lowering") and "kv_pass" in p.read_text(encoding="utf-8"))
    return [path for path in files if any(is_pass(node) for node in _tree(path).body)]


PASSES = _passes()


def test_there_are_passes():
    assert PASSES


def test_the_folders_of_passes_hold_passes_and_nothing_else():
    folder = ROOT / "lowering" / "passes"
    files = [path for path in PYTHON if path.is_relative_to(folder) and path.name != "__init__.py"]
    assert files == PASSES
    assert len({path.stem for path in files}) == len(files)
    empty = [path for path in PYTHON if path.is_relative_to(folder) and path.name == "__init__.py"]
    assert all(len(_tree(path).body) == 1 for path in empty), "a folder of passes has code"


def test_no_schedule_or_kernel_imports_a_pass():
    """What is legal is in schedules/limits.py, and what passes over tiles share in tiles/: these run before passes."""
    folders = {f"kvarn.lowering.{name}" for name in ("schedules", "kernels", "tiles")}
    wrong = [
        f"{name} imports {imported}"
        for name, found in _graph().items()
        for imported in sorted(found)
        if _within(name, folders) and _within(imported, {"kvarn.lowering.passes"})
    ]
    assert not wrong, "\n".join(wrong)


_BARRIERS = {"barrier", "named_barrier", "named_barrier_arrive", "cluster_barrier"}
_BARRIER_OPS = ("gpu.barrier", "nvvm.barrier", "llvm.nvvm.barrier")


def _barriers_of(source: str) -> list[str]:
    """The barriers that a Python file emits, by function or by op."""
    names = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute | ast.Name | ast.Constant)]
    words = [n.attr if isinstance(n, ast.Attribute) else n.id if isinstance(n, ast.Name) else n.value for n in names]
    return [w for w in words if w in _BARRIERS or (isinstance(w, str) and w.startswith(_BARRIER_OPS) and " " not in w)]


# The reader and the writer of what a cache stores: other kernels call them, or ask the record.
READER_AND_WRITER = ("elements.py", "append/quantize.py")
# Kernels that say which stored elements an instruction takes: they convert nothing.
INSTRUCTIONS_TAKE = {"mla/stored.py": 1, "select/indexer.py": 2}
OPERANDS = {"x", "query", "out"}  # fields with the type of an operand that is no cache


def branches_on_storage(source: str) -> list[int]:
    """Lines that compare a cache's type with one of at most 8 bits, or its bits, or look up by such a type."""
    narrow = {d.name for d in vars(dtypes).values() if isinstance(d, dtypes.DType) and d.bits <= 8}

    def last(node: ast.expr) -> str:
        return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""

    def of_operand(node: ast.expr) -> bool:
        of = node.value if isinstance(node, ast.Attribute) and node.attr == "bits" else node
        return last(of) in OPERANDS

    found = []
    for node in ast.walk(ast.parse(source)):
        sides = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            sides = [x for side in sides for x in (side.elts if isinstance(side, (ast.Tuple, ast.Set)) else [side])]
        elif isinstance(node, ast.Dict):
            sides = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        named = any(last(x) in narrow or (isinstance(x, ast.Attribute) and x.attr == "bits") for x in sides)
        if named and not any(of_operand(x) for x in sides):
            found.append(sides[0].lineno)
    return found


def test_no_kernel_besides_the_reader_and_the_writer_branches_on_a_storage_type():
    kernels, found = ROOT / "lowering" / "kernels", {}
    for path in sorted(kernels.rglob("*.py")):
        name = path.relative_to(kernels).as_posix()
        lines = branches_on_storage(path.read_text())
        if lines and name not in READER_AND_WRITER:
            found[name] = lines
    assert {name: len(lines) for name, lines in found.items()} == INSTRUCTIONS_TAKE, found
    assert all(branches_on_storage((kernels / name).read_text()) for name in READER_AND_WRITER[:1])


@pytest.mark.parametrize(
    "source",
    [
        "if spec.dtype is f8e4m3: pass", "x = 1 if kv.i8 == c.spec.dtype else 2", "spec.dtype in (bf16, u4)",
        "if c.spec.dtype.bits == 8: pass", "{f8e5m2: 1}[dtype]", "match dtype.name:\n case dtypes.i8: pass",
    ],
)  # fmt: skip
def test_branches_on_storage_are_found(source):
    assert branches_on_storage(source)
    assert not branches_on_storage("if case.x is f8e4m3 and case.query.bits == 8 and spec.zero: pass")


def test_code_over_tiles_emits_its_barriers_in_one_file():
    """There a warp whose lanes left a branch at different times is made whole first."""
    folders = [SOURCES["kvarn.lowering"] / "tiles", SOURCES["kvarn.lowering"] / "passes" / "tiles"]
    found = {path.name for folder in folders for path in folder.glob("*.py") if _barriers_of(path.read_text())}
    assert found == {"barriers.py"}


@pytest.mark.parametrize("source", ["kv_gpu.barrier()", "ptx.named_barrier(1, 2)", 'emit("nvvm.barrier.arrive")'])
def test_barriers_are_found(source):
    assert _barriers_of(source)


def test_files_of_users_are_run_in_one_place():
    """There whatever they do is told in one line."""
    runs = ("spec_from_file_location", "exec_module", "compile(path.read")
    library = [p for p in PYTHON if any(p.is_relative_to(folder) for folder in SOURCES.values())]
    found = {_name(p) for p in library if any(word in p.read_text(encoding="utf-8") for word in runs)}
    assert found == {"python/kvarn/files.py", "python/kvarn/moved.py"}  # the second runs modules of kvarn


@pytest.mark.parametrize("stem", [path.stem for path in PASSES])
def test_a_pass_has_a_lit_test_of_its_name(stem):
    test = ROOT / "tests" / "lowering" / f"{stem}.mlir"
    assert test.is_file(), f"{_name(test)} is missing"
    option = "--" + stem.replace("_", "-")
    assert re.search(rf"RUN:.*{option}|RUN:.*pass-pipeline=.*{option[2:]}", test.read_text()), (
        f"no RUN line has {option}"
    )


# Passes whose tests run no kernel: they change none.
NO_ANSWER = {"verify-kv": "it verifies", "check-kv-lowered": "it verifies"}


@pytest.mark.parametrize("stem", [path.stem for path in PASSES])
def test_a_pass_is_tested_by_what_it_leaves_and_by_what_that_computes(stem):
    """Two RUN lines: IR for FileCheck, and a kernel that is run before and after, which the pass must change."""
    name = stem.replace("_", "-")
    text = (ROOT / "tests" / "lowering" / f"{stem}.mlir").read_text()
    runs = [line for line in text.splitlines() if line.startswith("// RUN:")]
    answers = [line for line in runs if f"--check-semantics-of={name} " in line]
    assert len(runs) > len(answers), "no RUN line is for FileCheck"
    assert bool(answers) != (name in NO_ANSWER), f"a RUN line with --check-semantics-of={name}, or a reason"
    for line in answers:
        assert "--lengths=edges" in line, f"not over the edges: {line}"


def test_what_a_pass_leaves_to_the_run_of_many_is_run_there():
    """A line ``alone`` has no option but where it stops and what it writes that ``answers.test`` has not."""
    folder = ROOT / "tests" / "lowering"
    together = re.sub(r" \\\nRUN: *", " ", (folder / "answers.test").read_text()).splitlines()
    runs = [set(re.split(r"[ |]+", line)) for line in together if line.startswith("RUN:")]
    alone = [
        (path.name, set(re.split(r"[ |]+", found)))
        for path in sorted(folder.glob("*.mlir"))
        for found in re.findall(r"// RUN: %if alone %\{ (.*) %\}", path.read_text())
    ]
    assert alone
    wrong = [
        f"{name}: {sorted(words)}"
        for name, words in alone
        if not any({word for word in words if not word.startswith("--stop-after=")} <= run for run in runs)
    ]
    assert not wrong, "\n".join(wrong)


def _expanded(name: str) -> list[str]:
    """``a/{b,c}`` as a shell reads it."""
    head, brace, rest = name.partition("{")
    inner, _, tail = rest.partition("}")
    return [head + part + tail for part in inner.split(",")] if brace else [name]


def _folders_of_tests() -> dict[str, list[str]]:
    """The folders of the library in CONTRIBUTING.md's table, and the tests of each."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, table = text.partition("| files | tests |\n|---|---|\n")
    rows = [row.split("|") for row in table.partition("\n\n")[0].splitlines()]
    return {
        folder: re.findall(r"`(tests/[^`]+)`", tests)
        for _, files, tests, _ in rows
        for name in re.findall(r"`([^`]+)`", files)
        for folder in _expanded(name)
    }


def test_a_stranger_finds_the_tests_of_a_file():
    """Every folder of the library is in CONTRIBUTING.md's table, or below one that is, and what this names is there."""
    found = _folders_of_tests()
    missing = [f"no folder {folder}" for folder in found if not (ROOT / folder).is_dir()]
    missing += [
        f"{folder}: no {tests}"
        for folder, named in found.items()
        for tests in named
        if not any(ROOT.glob(tests.replace("<stem>", "*")))
    ]
    packages = {
        path.parent.relative_to(ROOT) for path in PYTHON if _name(path).startswith(("dialect", "lowering", "python"))
    }
    tops = {"dialect", "lowering", "python/kvarn"}  # of whose own files a row speaks, not of packages in them
    missing += [
        f"no row is of {package.as_posix()}"
        for package in sorted(packages)
        if package.as_posix() not in found and not {p.as_posix() for p in package.parents} & ({*found} - tops)
    ]
    assert not missing, "\n".join(missing)


BY_HAND = {"index-kv-loops"}  # for pipelines of one's own


@pytest.mark.parametrize("stem", [path.stem for path in PASSES])
def test_a_pass_is_in_a_pipeline_and_in_the_registry(stem):
    name = stem.replace("_", "-")
    pipeline = importlib.import_module("kvarn.lowering.pipeline")
    steps = {s.name for target in ("sm_90a", "host") for s in pipeline.default_steps(target, "ownership", 1)}
    assert (name in steps) != (name in BY_HAND), f"no pipeline of lowering/pipeline.py has {name}"
    assert name in importlib.import_module("kvarn.lowering").NAMES


@pytest.mark.parametrize("path", PASSES, ids=lambda path: path.stem)
def test_a_pass_shows_its_before_and_after(path):
    doc = ast.get_docstring(_tree(path)) or ""
    if path.stem.startswith(("verify_", "check_")):
        assert doc
        return
    assert re.search(r"^Before\b", doc, re.M), "the module docstring has no Before"
    assert re.search(r"^After\b", doc, re.M), "the module docstring has no After"


def test_the_registry_names_no_pass_without_a_file():
    names = importlib.import_module("kvarn.lowering").NAMES
    assert sorted(names) == sorted(path.stem.replace("_", "-") for path in PASSES)


def test_every_lowering_test_belongs_to_a_pass():
    tests = {path.stem for path in FILES if path.parent == ROOT / "tests" / "lowering" and path.suffix == ".mlir"}
    assert tests <= {path.stem for path in PASSES}


def test_every_operation_has_a_docstring():
    dialect = importlib.import_module("kvarn.dialect.base").Kv
    importlib.import_module("kvarn.dialect.kv")
    assert dialect.operations
    missing = [op.__name__ for op in dialect.operations if not (op.__dict__.get("__doc__") or "").strip()]
    assert not missing, f"without a docstring: {', '.join(missing)}"


def test_a_source_file_starts_with_the_licence():
    sources = [path for path in CODE if path.suffix not in LIT_ONLY]
    wrong = [_name(path) for path in sources if not any(SPDX in line for line in _lines(path)[:2])]
    assert not wrong, f"the first line must say {SPDX}:\n" + "\n".join(wrong)


def test_a_file_is_not_too_long():
    wrong = [f"{_name(path)}: {len(_lines(path))} lines" for path in CODE if len(_lines(path)) > MOST_LINES]
    assert not wrong, f"more than {MOST_LINES} lines, split it:\n" + "\n".join(wrong)


# What a caller of kvarn passes by name: package and function.
WIDE_PUBLIC = {
    "kvarn": ("PagedKVCacheManager.__init__",),
    "kvarn.dsl": ("CacheReads.load_tile", "CacheReads.tile", "load_tile", "multiply"),
    "kvarn.ops": (
        "attention", "block_mask", "mla_attention", "mla_prefill", "mla_prefill_chunk", "project_append", "qk_norm",
        "rope", "rope_append", "select_pages",
    ),
    "kvarn.parallel": ("migrate",),
}  # fmt: skip


def _functions(path: Path) -> list[tuple[str, ast.FunctionDef]]:
    """The functions of a file by their qualified names, those inside others included."""
    found: list[tuple[str, ast.FunctionDef]] = []

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
                if isinstance(child, ast.FunctionDef):
                    found.append((".".join([*names, child.name]), child))
                visit(child, (*names, child.name))
            else:
                visit(child, names)

    visit(_tree(path), ())
    return found


def _wide() -> dict[tuple[str, str], str]:
    """The functions of the library and of bench with more than MOST_PARAMETERS, by module and name: where they are."""
    wide = {}
    for module, path in GRAPH_FILES.items():
        for name, node in _functions(path):
            a = node.args
            if len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs) > MOST_PARAMETERS:
                wide[module, name] = f"{_name(path)}:{node.lineno}: {name}"
    return wide


def test_a_function_has_few_parameters():
    listed = [(package, name) for package, names in WIDE_PUBLIC.items() for name in names]
    wide = _wide()
    allowed = {key for key in wide for package, name in listed if key[1] == name and _within(key[0], {package})}
    wrong = [where for key, where in wide.items() if key not in allowed]
    assert not wrong, f"more than {MOST_PARAMETERS} parameters, make an object of some:\n" + "\n".join(wrong)
    gone = [f"{p}: {n}" for p, n in listed if not any(key[1] == n and _within(key[0], {p}) for key in wide)]
    assert not gone, "no more wide, take them from the lists:\n" + "\n".join(gone)


def test_lowering_names_its_parameters():
    """No ``**``, behind which anything may be passed on; a remark alone has values of any names."""
    files = {path for module, path in MODULES.items() if _within(module, {"kvarn.lowering"})}
    found = [f"{_name(path)}:{n.lineno}: {name}" for path in files for name, n in _functions(path) if n.args.kwarg]
    assert [where.rpartition(" ")[2] for where in found] == ["remark"], "\n".join(sorted(found))


def test_a_python_file_says_what_it_is():
    wrong = [_name(path) for path in PYTHON if not ast.get_docstring(_tree(path))]
    assert not wrong, "the module docstring is missing:\n" + "\n".join(wrong)


def test_a_python_file_imports_no_stars():
    package = ROOT / "python" / "kvarn"
    sums = (ROOT / "dialect" / "kv.py", package / "__init__.py", package / "dsl" / "__init__.py")  # of modules' names
    files = (path for path in PYTHON if path not in sums)
    wrong = [_name(path) for path in files if any(map(_is_star, ast.walk(_tree(path))))]
    assert not wrong, "import * in:\n" + "\n".join(wrong)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _is_star(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)


# A home or a workspace folder of whoever wrote the file; documentation writes ~ or a relative path.
MACHINE_PATH = re.compile(r"(?<![\w.$}~-])/(?:home|root|Users|work|workspace)/[\w.]")


def test_no_file_names_a_path_of_one_machine():
    wrong = []
    for path in FILES:
        if path.suffix in (".png", ".svg", ".gguf", ".so", ".cubin"):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line):
                wrong.append(f"{_name(path)}:{number}: {line.strip()[:100]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os, mlir.ir", [("os", False), ("mlir.ir", False)]),
        ("from . import layout", [("kvarn.dialect.layout", False)]),
        ("from ..dialect.layout import x", [("kvarn.dialect.layout", False)]),
        ("def f():\n    import cuda.core", [("cuda.core", True)]),
        ("if TYPE_CHECKING:\n    import mlir", []),
    ],
)
def test_the_import_reader_reads_imports(tmp_path, source, expected):
    path = tmp_path / "probe.py"
    path.write_text(source)
    assert [found[:2] for found in _imports("kvarn.dialect.probe", path)] == expected


def test_the_kernel_language_has_every_ptx_intrinsic():
    language, ptx = (importlib.import_module(f"kvarn.{name}") for name in ("dsl", "dsl.ptx"))
    assert set(ptx.__all__) <= set(language.__all__)
    assert len(language.__all__) == len(set(language.__all__)), "two modules of the language give one name"
    defined = {n for n, x in vars(ptx).items() if inspect.isfunction(x) and x.__module__ == ptx.__name__}
    inner = {"fma_rm", "inline_asm", "instruction", "intrinsic", "lg2", "stay_rolled", "unknown"}  # for passes
    assert {n for n in defined if not n.startswith("_")} - inner == set(ptx.__all__)


def test_a_place_and_a_stored_problem_are_made_in_one_way():
    """Suites that run on the host, in the interpreter and on a GPU share a fixture; problems come from one function."""
    alike = [path for path in PYTHON if path.is_relative_to(ROOT / "tests")]
    tests = {_name(p): p.read_text() for p in alike if p.parent.name not in ("reference", "gpu", "pytorch", "tests")}
    made = [name for name, text in tests.items() if re.search(r"^def (place|stored_problem)\(", text, re.M)]
    alone = [f"tests/{name}.py" for name in ("caches/test_tma_copies", "ops/test_bounds", "runtime/test_launch_maps")]
    assert made == alone, "the others take the fixture of tests/conftest.py"
    filled = [
        name for name, text in tests.items() if re.search(r"= random_problem\(.*\n +fill_cached\(rng, problem, ", text)
    ]
    assert not filled, "use reference.random_caches.stored_problem"


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))], ids=_name)
def test_a_file_that_a_page_names_is_there(page):
    named = set(re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|mlir|md|cpp))`", page.read_text()))
    folders = [ROOT, ROOT / "python", ROOT / "python" / "kvarn", ROOT / "lowering", ROOT / "docs"]
    folders += [ROOT / "lowering" / "kernels", ROOT / "lowering" / "kernels" / "attention"]
    missing = sorted(name for name in named if not any((folder / name).is_file() for folder in folders))
    assert not missing, f"{_name(page)} names files that there are not: {', '.join(missing)}"

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Write docs/reference from the docstrings: make docs, or python docs/generate.py [--check]

Every page is made from what the code says of itself, so that it cannot say otherwise. ``--check`` writes nothing and
fails when a page is not what it would write.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

FOLDER = Path(__file__).resolve().parent / "reference"
NOTE = "<!-- Written by docs/generate.py: edit the docstrings, then make docs. -->\n"


def paragraph(text: str) -> str:
    """A docstring's first paragraph as one line."""
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())


def prose(text: str) -> str:
    """Docstring text as Markdown: code and names that docstrings link are code, angle brackets stay what they are."""
    text = inspect.cleandoc(text or "").replace("``", "`")
    return re.sub(r":(?:func|class|meth|mod|attr|data):`~?([^`]+)`", r"`\1`", text)


def fenced(text: str, language: str = "") -> str:
    return f"```{language}\n{text}\n```\n"


def signature(function: Callable[..., Any], name: str) -> str:
    """``name(a, b, *, c=1)`` without annotations, broken before it is too long."""
    parts, star = [], False
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            star = True
            parts.append("*")
        star = star or p.kind is p.VAR_POSITIONAL
        prefix = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        parts.append(prefix + p.name + ("" if p.default is p.empty else f"={p.default!r}"))
    lines, line = [], f"{name}("
    for i, part in enumerate(parts):
        text = part + (", " if i < len(parts) - 1 else "")
        if len(line) + len(text) > 110:
            lines.append(line.rstrip())
            line = " " * (len(name) + 1)
        line += text
    return "\n".join([*lines, line + ")"])


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]] | list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


# --- pages -----------------------------------------------------------------------------------------


def operations() -> str:
    """kv.ops."""
    from kvarn import ops

    out = ["# Operations: `kv.ops`\n", prose(ops.__doc__ or "") + "\n"]
    functions = [(n, getattr(ops, n)) for n in ops.__all__ if inspect.isfunction(getattr(ops, n))]
    out.append(table(("operation", ""), [(f"[`{n}`](#{n})", prose(paragraph(f.__doc__))) for n, f in functions]))
    for name, function in functions:
        out += [f"## {name}\n", fenced(signature(function, f"kv.ops.{name}")), fenced(prose(function.__doc__))]
    return "\n".join(out)


# The modules of the kernel language, in the order in which a reader needs them.
LANGUAGE = (
    ("handles", "Caches, collections and operands"),
    ("values", "Values"),
    ("tiles", "Tiles"),
    ("staging", "Rows of tiles in shared memory"),
    ("math", "Mathematical functions: `kv.math`"),
    ("memory", "Buffers, shared memory and pointers"),
    ("gpu", "The grid: indices, barriers, shuffles, messages"),
    ("tracing", "Phases, for timelines"),
    ("calls", "Compile time"),
    ("functional", "Control flow as functions"),
    ("masks", "Masks of attention: `kv.masks`"),
    ("scores", "Scores of attention: `kv.scores`"),
    ("ptx", "Instructions of NVIDIA GPUs"),
    ("wgmma", "Products of a warpgroup"),
    ("tma", "Tiles by TMA: `kv.tma`"),
    ("kernel", "Kernels"),
    ("structs", "Structs of arguments"),
)


def language() -> str:
    """The kernel language."""
    import importlib

    from kvarn import dsl

    pages = "[Writing kernels](../kernels.md) explains the language,\n[its page](../dsl.md) has the rules."
    out = ["# Functions of the kernel language\n", f"What a kernel can call. {pages}\n"]
    for name, title in LANGUAGE:
        module = importlib.import_module(f"kvarn.dsl.{name}")
        own = name in ("math", "masks", "scores", "tma")  # modules that kernels call through their names
        prefix = f"kv.{name}." if own else "kv."
        names = module.__all__ if own else [n for n in dsl.__all__ if _home(dsl, n) == module.__name__]
        out += [f"## {title}\n", prose(module.__doc__ or "") + "\n"]
        functions = [n for n in names if inspect.isfunction(getattr(module, n, None))]
        if functions:
            rows = [
                (f"`{_short(getattr(module, n), prefix + n)}`", prose(paragraph(getattr(module, n).__doc__)))
                for n in functions
            ]
            out.append(table(("function", ""), rows))
        for n in names:
            if inspect.isclass(getattr(module, n, None)):
                out.append(_class(n, getattr(module, n)))
    return "\n".join(out)


def _home(package: Any, name: str) -> str:
    found = getattr(package, name)
    return getattr(found, "__module__", "") if inspect.isclass(found) or inspect.isfunction(found) else ""


def _short(function: Any, name: str) -> str:
    try:
        return signature(function, name).replace("\n", " ").replace("  ", "")
    except (TypeError, ValueError):
        return name


def _class(name: str, cls: type) -> str:
    """A class and its public methods, those of its bases in the language included."""
    methods: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("kvarn."):
            methods.update({k: v for k, v in vars(base).items() if not k.startswith("_") and inspect.isfunction(v)})
    rows = [(f"`.{_method(m, n)}`", prose(paragraph(m.__doc__))) for n, m in methods.items() if m.__doc__]
    text = f"### `{name}`\n\n{prose(cls.__doc__ or '')}\n"
    text = re.sub(r"\nAttributes\n-+\n(.*?)(?=\n\n|\Z)", lambda m: "\n" + fenced(m[1].strip()), text, flags=re.S)
    return text + ("\n" + table(("method", ""), rows) if rows else "")


def _method(function: Any, name: str) -> str:
    return _short(function, name).replace("(self, ", "(").replace("(self)", "()")


def dialect() -> str:
    """The ops and types of the dialect."""
    import importlib

    from kvarn.dialect import types
    from kvarn.dialect.base import Kv

    out = ["# The `kv` dialect\n"]
    out.append(
        'Operations in generic form: `"kv.load"(%cache, ...) {width = 8 : i64} : (...) -> ...`. Optional operands\n'
        "are marked with a question mark; an op with several of them carries `operandSegmentSizes`, or has its\n"
        "operands [by name](../kv-opt.md#operands-by-name).\n"
    )
    out += ["## Types\n", prose(types.__doc__ or "") + "\n"]
    titles = {
        "operations": "Cache operations", "rotary": "Rotation and normalisation", "attention": "Attention",
        "mla": "Latent rows (MLA)", "ragged": "Ragged batches", "pages": "Chosen pages", "drafts": "Drafts",
        "metadata": "Handles and their fields", "addressing": "Addresses", "access": "Accesses",
        "shared": "Tiles and shared memory", "tile": "Tile values", "staging": "Asynchrony of tile kernels",
        "sharing": "Tiles that warps share", "fragments": "Operand A of 8-bit elements",
        "tables": "Tables of functions", "tma": "Copies by TMA",
        "weights": "Weights of 8 bits", "trace": "Marks in time",
    }  # fmt: skip
    for stem, title in titles.items():
        module = importlib.import_module(f"kvarn.dialect.ops.{stem}")
        out += [f"## {title}\n", prose(module.__doc__ or "") + "\n"]
        for op in Kv.operations:
            if op.__module__ != module.__name__:
                continue
            rows = []
            for f in op.FIELDS:
                mark = "?" if f.optional else "..." if f.variadic else ""
                rows.append((f"`{f.name}{mark}`", f.kind, _constraint(f.constraint)))
            out += [
                f"### `{op.OPERATION_NAME}`\n",
                prose(op.__doc__ or "") + "\n",
                table(("field", "kind", "type"), rows),
            ]
    return "\n".join(out)


def _constraint(constraint: Any) -> str:
    if constraint is Any:
        return ""
    origin, args = typing.get_origin(constraint), typing.get_args(constraint)
    if origin is not None and args and isinstance(args[0], int):
        return f"`i{args[0]}`"
    name = getattr(origin or constraint, "__name__", str(constraint))
    return f"`{_TYPES.get(name, name)}`"


# Attribute classes by what a reader calls them.
_TYPES = {"F32Type": "f32", "IntegerAttr": "integer", "StringAttr": "string", "BoolAttr": "bool", "FloatAttr": "float"}


def passes() -> str:
    """The passes and pipelines."""
    import dataclasses
    import importlib

    from kvarn.lowering import pipeline, registry as lowering

    out = [
        "# Passes\n",
        "`kv-opt --list-passes` lists them; [writing passes](../writing-passes.md) says how to add one.\n",
    ]
    out.append("## The pipelines\n")
    out.append(
        "Names in italics are several upstream passes; `--stop-after` takes them too. `--disable` takes what is marked "
        "optional.\n"
    )
    for target in ("sm_90a", "host"):
        rows = [
            (
                str(i),
                f"*{step.name}*" if step.upstream else f"[`{step.name}`](#{step.name})",
                step.reason,
                "optional" if step.optional else "",
            )
            for i, step in enumerate(pipeline.default_steps(target, True), 1)
        ]
        out += [f"For {target}, with `KVARN_CHECK=1`:\n", table(("", "pass", "why it stands there", ""), rows)]
    out += [WORTH, worth()]
    for name in lowering.NAMES:
        found = lowering.find(name)
        assert found is not None
        module = importlib.import_module(lowering.module_of(name))
        text = prose(module.__doc__ or "")
        text = re.sub(r"^(Before: .*)\Z", lambda m: fenced(m[1]), text, flags=re.S | re.M)
        out += [f"## {name}\n", text.rstrip() + "\n"]
        fields = dataclasses.fields(found.options_class)
        options = [(f"`{f.name.replace('_', '-')}`", _plain(f.default)) for f in fields]
        if options:
            out += [prose(found.options_class.__doc__ or "") + "\n", table(("option", "default"), options)]
    return "\n".join(out)


def worth() -> str:
    """The table of what each optional pass changes: passes by programs."""
    found = json.loads((FOLDER.parents[1] / "bench" / "pass_worth.json").read_text(encoding="utf-8"))

    def cell(record: dict[str, Any], name: str) -> str:
        without, whole = record["without"].get(name), record["instructions"]
        return "" if without is None else f"{100 * (without - whole) / whole:+.1f}"

    names = list(dict.fromkeys(name for record in found.values() for name in record["without"]))
    rows = [(f"`{name}`", *(cell(record, name) for record in found.values())) for name in sorted(names)]
    return table(("without", *found), rows)


def _plain(value: Any) -> str:
    """A value as a pipeline writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def environment() -> str:
    """Environment variables."""
    from kvarn.env import Environment

    rows = []
    for v in Environment.variables():
        default = v.default
        if isinstance(default, Path):
            default = str(default).replace(str(Path.home()), "~")
        elif isinstance(default, bool):
            default = int(default)
        rows.append((f"`{v.name}`", v.__doc__ or "", f"`{default}`" if default != "" else ""))
    note = "An empty variable counts as unset. `kvarn doctor` shows those that are set, and misspelt ones.\n"
    return "\n".join(["# Environment variables\n", note, table(("variable", "", "default"), rows)])


def schedules() -> str:
    """What a schedule may say: a section for operations that share entries."""
    from kvarn.dialect import schedules

    sections: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, operation in schedules.OPERATIONS.items():
        shared = operation.entries if operation.choice else operation.kinds
        sections.setdefault(shared, {})[f"`{name.removeprefix('kv.')}`"] = operation
    out = ["# Schedules\n", SCHEDULES]
    for members in sections.values():
        kinds = dict.fromkeys(kind for operation in members.values() for kind in operation.kinds)
        first = next(iter(members.values()))
        out.append(f"## {', '.join(members)}\n")
        if first.choice:
            of = {kind: ", ".join(n for n, o in members.items() if kind in o.kinds) for kind in kinds}
            rows = [(f"`{k.name}`", k.doc, "the host" if k.on_host else "GPUs", of[k]) for k in kinds]
            out.append(table(("`kind`", "", "on", "of"), rows))
        entries = [(entry, "all" if first.choice else "") for entry in first.entries]
        entries += [(entry, f"`{kind.name}`") for kind in kinds for entry in kind.entries]
        cells = [(f"`{e.name}`", of_kind, e.doc, e.legal, e.default) for e, of_kind in entries]
        if first.choice:
            out.append(table(("entry", "of kind", "", "legal", "default"), cells))
        elif cells:
            out.append(table(("entry", "", "legal", "default"), [(c[0], *c[2:]) for c in cells]))
        else:
            out.append("No entries.\n")
        of_kinds = [e for kind in kinds for e in kind.entries if e.old_name]
        old = [(e.old_name, e.name if e.old_unit == 1 else f"{e.name} / {e.old_unit}") for e in of_kinds]
        old += [(f'kind = "{kind.old_name}"', f'kind = "{kind.name}"') for kind in kinds if kind.old_name]
        if old:
            renamed = ", ".join(f"`{was}` is `{name}`" for was, name in dict(old).items())
            out.append(f"Old names, accepted with a warning until the next release: {renamed}.\n")
        for kind in kinds:
            if kind.decided:
                names = ", ".join(f"`{entry.name}`" for entry in kind.decided)
                out.append(f"For kind `{kind.name}`, only `select-kv-schedule` may write: {names}.\n")
    return "\n".join(out)


def formats() -> str:
    """What records cost in quality, as ``python -m bench.formats`` has measured it."""
    import json

    found = json.loads((FOLDER.parents[1] / "bench" / "formats.json").read_text(encoding="utf-8"))
    names = list(found["rows"][0]["errors"])
    rows = [
        (
            row["format"], f"{row['bits']:g}", f"{row['perplexity']:.3f}", f"{100 * row['greedy']:.1f}%",
            *(f"{100 * row['errors'][n]:.2f}%" for n in names),
        )
        for row in found["rows"]
    ]  # fmt: skip
    about = FORMATS.format(**found)
    head = ("format", "bits", "perplexity", "greedy tokens agreed", *(f"error, {n}" for n in names))
    return "\n".join(["# Formats: what records cost in quality\n", about, table(head, rows)])


FORMATS = """\
Of [records](../records.md), with {model}, whose {head_size}-wide heads are hard to quantize: `python -m bench.formats
--tokens {tokens} --windows {windows}` over {windows} windows of {tokens} tokens of `{text}` (Python {python}, tokens
{digest}). Bits are per element, with scales and zeros. Greedy tokens agreed: positions of the text where the model over
this cache would choose the token that it chooses over bf16. Error: root mean square of attention's output less that in
float64, over the latter's; over normal keys and values, over heavy-tailed ones (Student's t of 3 degrees, channels of
outliers), and over those of five layers of the model. Kernels quantize as the NumPy model does that this is measured
with, to the bit.
"""


WORTH = """\
## What each pass changes

How many percent more instructions the PTX of some programs for sm_90a has without an optional pass; an empty cell means
the same PTX. Instructions say that a pass does something, not what it is worth: `python -m bench.ablation` measures
that. `python -m bench.pass_worth --write` writes the figures.
"""


SCHEDULES = """\
`schedule={"entry": value}` of an operation in `kv.ops`, or the `schedule` attribute of its op, says how its work is
divided. What is not given is chosen by [`select-kv-schedule`](passes.md#select-kv-schedule). An entry that is unknown,
or that the kernel does not have, is an error; so is a value that is not legal, in general or for a case: what `warps`
may be follows from the heads, what `tile` may be from the page size, and a block must fit the target's shared memory.
"""


class _Captured(Exception):
    """A command has built its parser."""


def _parser(main: Callable[[list[str]], Any]) -> argparse.ArgumentParser:
    """The parser that a command builds."""

    def captured(parser: argparse.ArgumentParser, *arguments: Any, **options: Any) -> NoReturn:
        raise _Captured(parser)

    names = "parse_args", "parse_intermixed_args"
    originals = [getattr(argparse.ArgumentParser, name) for name in names]
    for name in names:
        setattr(argparse.ArgumentParser, name, captured)
    try:
        main([])
    except _Captured as found:
        return found.args[0]
    finally:
        for name, original in zip(names, originals, strict=True):
            setattr(argparse.ArgumentParser, name, original)
    raise AssertionError(f"{main.__module__} parses no command line")


def _option(action: argparse.Action, parser: argparse.ArgumentParser) -> tuple[str, str]:
    """An option as one writes it, and its help."""
    value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    if action.choices and not action.metavar:
        value = "|".join(map(str, action.choices))
    value = " ".join(value) if isinstance(value, tuple) else value
    spellings = action.option_strings or [value.strip("{}")]
    if action.option_strings and action.nargs != 0:
        # A value that may be left out is one of a switch; true and false go without saying.
        optional = "" if value == "true|false" else f"[={value}]"
        spellings = [f"{name}{optional if action.nargs == '?' else ' ' + value}" for name in spellings]
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return ", ".join(f"`{name}`" for name in spellings), text


def commands() -> str:
    """The commands and their options."""
    from kvarn.tools import cli, opt_args, reduce

    parsers = [opt_args.build_parser(), _parser(reduce.main)]
    for name, (place, _) in cli.COMMANDS.items():
        module, _, function = place.partition(":")
        module = "kvarn.chat.cli" if name == "demo" else module
        parsers.append(_parser(getattr(importlib.import_module(module), function or "main")))
    out = ["# Commands\n", COMMANDS]
    for parser in parsers:
        out.append(f"## {parser.prog}\n")
        out.append(prose((parser.description or "").strip().partition("\n\n")[0]) + "\n")
        groups: dict[str, list[argparse.Action]] = {}
        for group in parser._action_groups:
            title = group.title or ""
            # argparse's own two groups are one table.
            title = "" if title in ("positional arguments", "options") else title
            groups.setdefault(title, []).extend(a for a in group._group_actions if a.dest != "help")
        for title, actions in groups.items():
            out += [f"### {parser.prog}: {title}\n"] * bool(title)
            out.append(table(("argument", ""), [_option(action, parser) for action in actions]))
    return "\n".join(out)


COMMANDS = """\
What `--help` of each command prints. Commands end with status 0 when all went well, 1 after an error in what they were
given to work on, and 2 for a wrong command line; `kv-opt` with 1 for either. A switch of `kv-opt` may be `=false`.
"""


def tiles() -> str:
    """What tiles can say, by target."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import tile_constructs

    return tile_constructs.page()


PAGES: dict[str, Callable[[], str]] = {
    "operations.md": operations, "language.md": language, "dialect.md": dialect, "passes.md": passes,
    "schedules.md": schedules, "environment.md": environment, "commands.md": commands, "tiles.md": tiles,
    "formats.md": formats,
}  # fmt: skip
RUN = ("tiles.md",)  # pages that run kernels: a test of their own checks each line


def page(name: str) -> str:
    """The text of a page."""
    text = NOTE + "\n" + PAGES[name]()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.splitlines())).rstrip("\n") + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail when a page is out of date; write nothing")
    options = parser.parse_args(argv)
    # The defaults of some variables follow from others.
    for name in [n for n in os.environ if n.startswith("KVARN_") or n == "XDG_CACHE_HOME"]:
        del os.environ[name]
    FOLDER.mkdir(exist_ok=True)
    old = []
    for name in (n for n in PAGES if not (options.check and n in RUN)):
        text, path = page(name), FOLDER / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        old.append(name)
        if not options.check:
            path.write_text(text, encoding="utf-8")
            print(f"wrote docs/reference/{name}")
    if options.check and old:
        print(f"out of date: {', '.join(old)}: run make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

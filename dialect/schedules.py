# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a schedule may say: for every operation its kinds of kernels, and for every kind its entries.

The verifier, ``select-kv-schedule``, ``kv.ops``, ``kvarn tune`` and the documentation ask :func:`why_unsupported` or
read the declarations. The more the caller knows (the target, the kind, the case that a kernel is compiled for), the
more is checked. A sentence continues "the schedule's": "tile must be 16, 32, 64 or 128, got 24".

A new kind of kernel is a :class:`Kind` here, and its name in the operations that have it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

MOST = (1 << 31) - 1  # of an integer in a kernel
Values = Mapping[str, Any]
# (case, target, entries) -> what is wrong, or None. The case is what the kind's kernel is specialised for.
Rule = Callable[[Any, Any, Values], "str | None"]


@dataclass(frozen=True)
class Entry:
    """One entry of a schedule.

    Attributes
    ----------
    name : str
    doc : str
        One sentence for who sets it.
    default : str
        What holds without it, in words.
    type : type
        int, bool (0 and 1 are taken too) or str.
    least, most, step : int
        Bounds of an integer, and what it is a multiple of.
    choices : tuple
        The legal values, where they are few.
    limit : callable, optional
        ``limit(case)``: (the values that a case allows besides, why these); None where all are.
    carried_out_by : str
        The pass without which a true entry has no meaning: where it is left out, false is chosen.
    """

    name: str
    doc: str
    default: str
    type: type = int
    least: int = 1
    most: int = MOST
    step: int = 1
    choices: tuple[Any, ...] = ()
    limit: Callable[[Any], tuple[tuple[int, ...], str] | None] | None = None
    carried_out_by: str = ""

    @property
    def legal(self) -> str:
        """The legal values in words."""
        if self.type is bool:
            return "true or false"
        if self.choices:
            return _one_of(self.choices)
        if self.step > 1:
            return f"a multiple of {self.step} from {self.least} to {self.most}"
        return f"an integer of {self.least} or more" if self.most == MOST else f"in [{self.least}, {self.most}]"

    def why_not(self, value: Any) -> str | None:
        """Why a value is not legal in any case; None when it is in some."""
        if self.type is bool:
            right = isinstance(value, int) and value in (0, 1)
        elif self.choices:
            right = type(value) is self.type and value in self.choices
        else:
            right = type(value) is int and self.least <= value <= self.most and value % self.step == 0
        return None if right else f"{self.name} must be {self.legal}, got {value!r}"

    def why_not_here(self, value: Any, case: Any) -> str | None:
        """Why a value that is legal in some case is not in this one; None when it is."""
        limits = self.limit(case) if self.limit is not None else None
        if limits is None or value in limits[0]:
            return None
        return f"{self.name} must be {_one_of(limits[0])}{limits[1]}, got {value!r}"


@dataclass(frozen=True)
class Kind:
    """One kind of kernel.

    Attributes
    ----------
    name : str
        The schedule's ``kind``.
    doc : str
        What the kernel does, in one clause.
    entries : tuple of Entry
        Those that this kind has besides the operation's.
    decided : tuple of Entry
        Those that ``select-kv-schedule`` writes for the expansion to read, and that nobody sets.
    on_host : bool
        Whether it runs on the host target, and there only.
    rules : tuple of callable
        ``rule(entries)``: what is wrong with entries together, in any case; None for nothing.
    fits : callable, optional
        What is wrong with the entries together in one case.
    """

    name: str
    doc: str
    entries: tuple[Entry, ...] = ()
    decided: tuple[Entry, ...] = ()
    on_host: bool = False
    rules: tuple[Callable[[Values], str | None], ...] = ()
    fits: Rule | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries)

    def left_out(self, passes: Collection[str]) -> dict[str, Any]:
        """The entries that have no meaning where some passes do not run."""
        return {entry.name: False for entry in self.entries if entry.carried_out_by and entry.carried_out_by in passes}


@dataclass(frozen=True)
class Operation:
    """The kinds of kernels of an operation, and the entries that all of them have.

    ``choice`` says whether ``kind`` is an entry of its own; ``tuned``, whether the table of ``kvarn tune`` counts.
    """

    kinds: tuple[Kind, ...]
    entries: tuple[Entry, ...] = ()
    choice: bool = True
    tuned: bool = False

    def kind(self, name: str) -> Kind:
        return next(kind for kind in self.kinds if kind.name == name)

    def names(self, kind: Kind) -> tuple[str, ...]:
        """Names of all entries that a schedule of a kind may have."""
        return (*(("kind",) if self.choice else ()), *(entry.name for entry in self.entries), *kind.names)

    def entries_of(self, kind: Kind) -> dict[str, Entry]:
        return {entry.name: entry for entry in (*self.entries, *kind.entries)}


# --- the one question ------------------------------------------------------------------------------


def why_unsupported(
    operation: str, schedule: Any, target: Any = None, kind: str | None = None, case: Any = None, decided: bool = False
) -> str | None:
    """Why a schedule of an operation is not legal, a sentence that continues "the schedule's"; None when it is.

    Parameters
    ----------
    operation : str
        Such as ``"kv.attention"``.
    schedule : mapping
        Entries as Python values.
    target : Target, optional
        Without it, what some target takes is legal.
    kind : str, optional
        The kind of kernel that was chosen. Without it, what some kind takes is legal.
    case : optional
        What the kernel is specialised for, as the kind's rules read it (decode: its ``Config``); with kind and target.
    decided : bool
        Whether a schedule that says its kind may have what ``select-kv-schedule`` writes besides: that of an op may.
    """
    if operation not in OPERATIONS:  # of another package: its expansion says what it takes
        return None
    declared = OPERATIONS[operation]
    if not isinstance(schedule, Mapping):
        return f"entries must be given as a mapping from names to values, got {type(schedule).__name__}"
    for name in schedule:
        if not isinstance(name, str):
            return f"entries must be named by strings, got {name!r}"
    here = [k for k in declared.kinds if target is None or k.on_host == target.is_host]
    if declared.choice and "kind" in schedule:
        problem = _why_not_kind(declared, schedule["kind"], target, here)
        if problem is not None:
            return problem
        kind = kind or schedule["kind"]
        if decided:
            written = {entry.name: entry for entry in declared.kind(schedule["kind"]).decided}
            problems = [written[name].why_not(value) for name, value in schedule.items() if name in written]
            problem = next((problem for problem in problems if problem is not None), None)
            if problem is not None:
                return problem
            schedule = {name: value for name, value in schedule.items() if name not in written}
    wanted = [declared.kind(kind)] if kind is not None else here
    known = dict.fromkeys(name for k in declared.kinds for name in declared.names(k))
    for name in schedule:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            return f"entry {name!r} is unknown: {_what_has(declared, wanted)}{hint}"
    problems = [_why_not_of(declared, k, schedule) for k in wanted]
    if None not in problems:
        # The kind that has most of the entries is the one that was meant.
        shared = [sum(name in declared.names(k) for name in schedule) for k in wanted]
        return problems[shared.index(max(shared))]
    if case is None:
        return None
    found = declared.kind(kind or wanted[0].name)
    entries = declared.entries_of(found)
    for name, value in schedule.items():
        problem = entries[name].why_not_here(value, case) if name in entries else None
        if problem is not None:
            return problem
    return found.fits(case, target, schedule) if found.fits is not None else None


def written(schedule: Values, names: Collection[str]) -> dict[str, Any]:
    """Some entries of a schedule that ``select-kv-schedule`` has written.

    Raises
    ------
    ValueError
        If an entry is missing.
    """
    missing = [name for name in names if name not in schedule]
    if missing:
        raise ValueError(
            f"the schedule must have {', '.join(missing)}, which select-kv-schedule chooses: run it before"
        )
    return {name: schedule[name] for name in names}


def is_of_gpus(operation: str, schedule: Any) -> bool:
    """Whether a schedule says a kind of kernel that only GPUs have, and is legal there: it says nothing of the host."""
    kinds = OPERATIONS[operation].kinds if operation in OPERATIONS else ()
    of_gpus = [k.name for k in kinds if not k.on_host]
    return schedule.get("kind") in of_gpus and why_unsupported(operation, schedule) is None


def _why_not_kind(declared: Operation, name: Any, target: Any, here: list[Kind]) -> str | None:
    if name in [k.name for k in here]:
        return None
    if target is not None and any(name == k.name for o in OPERATIONS.values() for k in o.kinds):
        return f"kind must be {_one_of([k.name for k in here])} on {target.name}, got {name!r}"
    return f"kind must be one of {', '.join(k.name for k in declared.kinds)}, got {name!r}"


def _why_not_of(declared: Operation, kind: Kind, schedule: Values) -> str | None:
    """Why entries are not those of a kind, whatever the case."""
    names, entries = declared.names(kind), declared.entries_of(kind)
    for name in schedule:
        if name not in names:
            others = _one_of(k.name for k in declared.kinds if name in k.names)
            return f"entry {name!r} is of kernels of kind {others}: {_what_has(declared, [kind])}"
    for name, value in schedule.items():
        problem = entries[name].why_not(value) if name in entries else None
        if problem is not None:
            return problem
    return next((problem for rule in kind.rules if (problem := rule(schedule)) is not None), None)


def _what_has(declared: Operation, kinds: list[Kind]) -> str:
    """Which entries are legal for one of some kinds."""
    names = dict.fromkeys(name for kind in kinds for name in declared.names(kind))
    who = f"a {kinds[0].name} kernel of this operation has" if len(kinds) == 1 else "kernels of this operation have"
    return f"{who} {', '.join(names) if names else 'none'}"


def _one_of(values: Iterable[Any]) -> str:
    """``"1, 2 or 4"``."""
    *most, last = [str(v) for v in values]
    return f"{', '.join(most)} or {last}" if most else last


# --- entries ---------------------------------------------------------------------------------------

NARROW_HEAD = 96  # elements up to which three warpgroups multiply the tiles of many rows, or two those of few
ROW_CLASSES = (64, 512)  # that tiles of 64 rows hold, and of which tiles of 192 would leave too many empty


def row_class(rows: int, head_size: int) -> int | None:
    """The class of so many query rows of a sequence and KV head, the most that it has; None of many.

    Tiles of attention depend on it, and so few classes keep programs few.
    """
    classes = ROW_CLASSES if head_size <= NARROW_HEAD else ROW_CLASSES[:1]
    return next((most for most in classes if rows <= most), None)


# What the caller knows of its batches, and promises: every kernel takes it.
MAX_QUERIES = Entry(
    "max_queries",
    "No sequence has more new tokens: promised by the caller. Few of them are a decode.",
    "the collection's `max_seq_length`, rounded up, when it is 16 or less; else no bound",
)
MAX_TOKENS = Entry(
    "max_tokens",
    "There are no more rows of tokens: promised by the caller.",
    "those of x on a GPU, rounded up to 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768 or 1024, where they are no "
    "more; else no bound",
)
MAX_BATCH = Entry(
    "max_batch", "There are no more sequences.", "those of the collection, rounded up, on a GPU; else 1024"
)
EXPECTED_ROWS = Entry(
    "expected_rows",
    "Query rows (new tokens times the group) that a sequence and KV head has at most, as far as the caller knows, who "
    "promises nothing: tiles are those that are best for so many.",
    "of more than 16 new tokens on a GPU, the collection's `max_seq_length` times the group, rounded up to 64, or to "
    "512 for heads of up to 96; without a bound where they are more, and with `batch_invariant`",
)
BATCH_INVARIANT = Entry(
    "batch_invariant",
    "A sequence's result does not depend, bit for bit, on what else is in the batch: kept by the kernel, or refused.",
    "false",
    bool,
)
EARLY = Entry(
    "early",
    "The kernel before writes no cached token, no length and no table: promised by the caller. A decode on a "
    "target with programmatic launches may then read those while that kernel ends; nothing else changes.",
    "false",
    bool,
)
EARLY_WEIGHT = Entry(
    "early",
    "The kernel before does not write the weight: promised by the caller. On a target with programmatic launches it is "
    "then read while that kernel ends; nothing else changes.",
    "false",
    bool,
)
THREADS = Entry("threads", "Threads of a block.", "256; 128 for `gather`", least=32, most=1024, step=32)


def _warps_of(case: Any) -> tuple[tuple[int, ...], str]:
    """A warp has up to 16 query rows of a KV head, or of some of its columns; blocks of a range share all evenly."""
    total, together = case.row_groups, case.slices
    most = min(total, WARPS.most, 15 * together if together > 1 else total)  # they have a named barrier
    legal = tuple(n for n in range(together, most + 1, together) if total % n == 0)
    multiple = f" and a multiple of the {together} that share a head's columns" if together > 1 else ""
    return legal, f", a divisor of the {total} warps that have a token's query rows{multiple}"


def _tiles_of(case: Any) -> tuple[tuple[int, ...], str] | None:
    """The lanes of a warp look up a tile's pages, one each."""
    if not case.spec.paged:
        return None
    most = 32 * case.spec.page_size
    return tuple(n for n in TILE.choices if n <= most), f", at most 32 pages of {case.spec.page_size} tokens"


WARPS = Entry(
    "warps",
    "Warps of a block, each with up to 16 query rows of a KV head; 2 or 4 of them share the columns of a wide one.",
    "the most of 4, 3, 2 and 1 that divide the warps of a token's query rows",
    most=32,
    limit=_warps_of,
)
STAGES = Entry(
    "stages", "Tiles that a warp has in shared memory, all but one of them in flight.", "2", least=2, most=16
)
TILE = Entry(
    "tile",
    "Tokens that a warp takes at a time.",
    "what 4 KiB of keys are, from 16 tokens to 64; 128 of heads of up to 16 bytes",
    choices=(16, 32, 64, 128),
    limit=_tiles_of,
)
BLOCKS = Entry(
    "blocks", "Blocks of a multiprocessor for which the batch is cut.", "what keeps 4 or 8 warps busy", most=32
)
MIN_TILES = Entry("min_tiles", "Tiles that a partition of the keys has at least.", "4; 2 for one sequence")
COMBINE = Entry(
    "combine",
    "Warps of a block of the kernel that combines partial results; 0: the last decode block to arrive combines them.",
    "16 for up to 4 sequences, else 0",
    least=0,
    most=32,
)
SPLIT = Entry(
    "split",
    "Tokens of a sequence's splits, at least, where it has more than 32 of up to 64; its own length alone decides. "
    "0: the batch is cut evenly.",
    "0; 64 with `batch_invariant`, of 8 bits 128, two tiles where these are more",
    least=0,
)
ROWS = Entry(
    "rows",
    "Query rows (tokens times the group) of a block: 64 for each warpgroup that multiplies, or fewer, which one has as "
    "the second operand of its products.",
    "128; 192 for heads of up to 96 that TMA copies, but of 8 bits or over 64 for no few rows; 64 where no sequence "
    "has more",
    choices=(8, 16, 32, 64, 128, 192, 256),
)
KEYS = Entry("keys", "Keys of a tile.", "the most up to 128 that fit", least=16, most=256, step=16)
TILE_STAGES = Entry("stages", "Tiles of keys, and of values, in shared memory.", "2; 3 for heads of up to 64", most=8)
QUERY_STAGES = Entry(
    "query_stages",
    "Tiles of query rows in shared memory: with two the producer loads the next one ahead.",
    "2 where they fit",
    most=2,
)
INSTRUCTION = Entry(
    "instruction",
    "Of products: `wgmma` (sm_90a), or `mma.sync` (every GPU, f32 too), which nothing runs beside.",
    "`wgmma` where the target has it, of queries that are not f32",
    str,
    choices=("wgmma", "mma.sync"),
)
PRODUCER = Entry(
    "producer",
    "Whether a warpgroup of its own copies (`specialize-kv-warps`).",
    "true",
    bool,
    carried_out_by="specialize-kv-warps",
)
PRODUCERS = Entry(
    "producers",
    "Warpgroups of the producer; more than one where they convert what they copy.",
    "1; 2 where 8-bit keys are converted, by 64 rows or of heads over 64; 3 where loaded, by 64 rows",
    most=3,
)
SLOTS = Entry(
    "slots",
    "Tiles of 8-bit elements in shared memory that are still to be converted, of keys and of values.",
    "2",
    choices=(2, 4),
)
OVERLAP = Entry(
    "overlap",
    "Whether the products of one tile are under way during the softmax of the next (`pipeline-kv-loops`).",
    "true",
    bool,
)
PING_PONG = Entry(
    "ping_pong",
    "Whether the warpgroups that multiply start their products by turns.",
    "false; true of two for 8-bit queries, and for heads over 128, or up to 64 without scales, in 8-bit caches",
    bool,
)
ONE_WAIT = Entry(
    "one_wait",
    "Whether both products of an iteration are waited for before the softmax, whose weights then take half "
    "the registers (`pipeline-kv-loops`); else that of the values is under way during it.",
    "false; true of 8-bit queries, and of caches that no TMA boxes copy as they are",
    bool,
)
STORED_KEYS = Entry(
    "stored_keys",
    "Whether keys of f8e4m3 and f8e5m2 are multiplied as they are stored, by a query of bf16 that is "
    "split in two of f8e4m3; else they are converted.",
    "true where TMA copies such keys, without scales, to products by wgmma",
    bool,
)
SPLIT_COLUMNS = Entry(
    "split_columns",
    "Whether two warpgroups share 64 query rows, each with half of the columns of scores and of sums, by wgmma.",
    "false; true of latent rows with more than 256 values",
    bool,
)
PARTS = Entry(
    "parts",
    "Parts of the columns of a tile of keys that TMA copies: scores start when the first is there.",
    "1; of latent rows 3",
    most=9,
)
OCCUPANCY = Entry(
    "occupancy",
    "Blocks that share a multiprocessor, of which one works while another waits; by mma.sync as many as "
    "registers and shared memory allow.",
    "1; of many sequences, 64 rows and heads of up to 64 over 8-bit caches by TMA, no scales: 2, with stored keys 3",
    most=3,
)
PERSISTENT = Entry(
    "persistent",
    "Whether there is a block a multiprocessor that takes tile after tile, or a block a tile.",
    "true",
    bool,
)
SPLITS = Entry(
    "splits",
    "Partial results of a tile of query rows: blocks that share its keys; with up to 32 rows on sm_90a, pairs of them. "
    "By mma.sync at most, up to 32, of 128 keys or more each.",
    "what fills the device, up to 64 (16 by mma.sync)",
    most=64,
)

KEY_SPLITS = Entry(
    "splits",
    "Blocks that share the keys of a tile of query rows, at most; 1024 keys or more each. Their partial results are "
    "combined by a second kernel.",
    "0: what the shapes ask for, up to 16, 1 where tiles of rows fill the device; 1 with `batch_invariant`",
    least=0,
    most=32,
)


def _invariant_splits(schedule: Values) -> str | None:
    if schedule.get("batch_invariant") and schedule.get("split", 1) < 1:
        return "batch_invariant needs fixed splits of at least one token, got split = 0"
    return None


def _invariant_key_splits(schedule: Values) -> str | None:
    if schedule.get("batch_invariant") and schedule.get("splits", 1) == 0:
        return "batch_invariant needs splits that no batch chooses: give their number, or 1, got splits = 0"
    return None


def _invariant_latent(schedule: Values) -> str | None:
    if schedule.get("batch_invariant") and "splits" not in schedule:
        return (
            "batch_invariant cannot be kept by a latent kernel whose number of splits follows the batch: give splits, "
            "or kind simt"
        )
    return None


def _decode_fits(case: Any, target: Any, schedule: Values) -> str | None:
    """Whether some choice of the entries that are not given fits the target's shared memory."""
    least, what = case.least_bytes(schedule)
    if least <= target.shared_bytes:
        return None
    return (
        f"{what} must fit {target.shared_bytes} bytes of shared memory, got {least}: choose fewer stages, a smaller "
        "tile or fewer warps"
    )


# --- kinds -----------------------------------------------------------------------------------------

HOST = Kind("host", "tiles of up to 16 query rows as vector loops, on the host", on_host=True)
ROWS_HOST = Kind("host", "one thread a query row and head, on the host", on_host=True)
SIMT = Kind("simt", "a warp a query row and head; takes every case, on every GPU")
TILED = Kind(
    "tile",
    "tiles by wgmma and TMA, overlapped by passes; by mma.sync and cp.async where there is no wgmma",
    (
        ROWS,
        KEYS,
        TILE_STAGES,
        QUERY_STAGES,
        PRODUCER,
        PRODUCERS,
        SLOTS,
        OVERLAP,
        ONE_WAIT,
        PING_PONG,
        OCCUPANCY,
        PERSISTENT,
        KEY_SPLITS,
        STORED_KEYS,
        INSTRUCTION,
        SPLIT_COLUMNS,
        PARTS,
    ),
    rules=(_invariant_key_splits,),
)
DECODE = Kind(
    "decode",
    "few query rows a sequence, at the rate of the memory",
    (WARPS, STAGES, TILE, BLOCKS, MIN_TILES, COMBINE, SPLIT),
    rules=(_invariant_splits,),
    fits=_decode_fits,
)
# Of a batch of any numbers of new tokens, a kernel of kind decode computes the sequences of few, beside that of tiles.
# Its entries have this before their names.
PREFIX_OF_FEW = "few_"
FEW = Entry(
    "few",
    "New tokens up to which a sequence is computed by a kernel of kind decode, beside that of the others; 0: none is.",
    "over caches of 8 bits as many as are a decode, in batches whose sequences have less than a fourth of the longest "
    "one's tokens on average; else 0, and where the kind or `max_queries` is given, with `batch_invariant`, and of one "
    "sequence",
    least=0,
    most=8,
)
DIVIDED = replace(
    TILED,
    entries=(*TILED.entries, FEW),
    decided=(
        Entry("uneven", "Only a batch of uneven sequences is divided.", "where few is not given", bool),
        *(replace(entry, name=PREFIX_OF_FEW + entry.name) for entry in (*DECODE.entries, MAX_BATCH)),
    ),
)
LATENT = Kind(
    "latent",
    "64 query rows of latent keys a block on the tensor cores, or up to 32; by mma.sync where there is no wgmma",
    (SPLITS,),
    decided=(
        *(entry for entry in TILED.entries if entry not in (ROWS, KEY_SPLITS)),
        Entry("rows", "Query rows of a block.", "64; those of a sequence where few", least=8, most=64, step=8),
        Entry("tiles", "Blocks of query rows of every sequence; 0: row offsets say how many.", "0", least=0, most=16),
        Entry("box_rows", "Rows that TMA copies at a time; 0: threads copy, row by row.", "64", least=0, most=64),
    ),
    rules=(_invariant_latent,),
)
PROJECTED_HOST = Kind("host", "tiles of 16 tokens as vector loops, on the host", on_host=True)
PROJECTED_SIMT = Kind("simt", "a warp a column of 8 tokens; takes every case, on every GPU")
PROJECTED = Kind(
    "tile",
    "tiles of up to 128 tokens by wgmma and TMA, written to the cache as they are done; by mma.sync, through memory, "
    "where there is no wgmma",
    (
        Entry("rows", "Tokens of a tile: 64 for each warpgroup.", "128; 64 of few tokens", choices=(64, 128)),
        Entry(
            "columns",
            "Columns of a tile: rows of the weight.",
            "256, or fewer for whole heads and for few tokens",
            least=48,
            most=256,
            step=16,
        ),
        Entry("fused", "Heads are written as tiles are done, not by another kernel.", "of more than 1024 tokens", bool),
        Entry("stages", "Steps of K in shared memory.", "as many as fit, up to 12", least=2, most=12),
    ),
)
PROJECTED_FEW = Kind(
    "few",
    "up to 256 tokens, at the rate at which memory gives the weight: by wgmma, or by mma.sync, converted in registers, "
    "where there is none or the weight has scales by groups",
    (
        Entry("rows", "By wgmma, rows of the weight of a tile: 64 for each warpgroup.", "128", choices=(64, 128)),
        Entry("stages", "By wgmma, steps of K in shared memory.", "as many as fit, up to 10", least=2, most=12),
        Entry("atoms", "By wgmma, runs of 128 bytes of a row that are read at a time.", "1", choices=(1, 2, 4)),
    ),
    decided=(INSTRUCTION,),
)
PROJECTED_WHOLE = Kind(
    "whole",
    "one kernel whose blocks have all of K of their columns, and write them: by mma.sync up to 16 tokens of bf16 or "
    "f16, else by wgmma; without norms, scales of caches and scales by groups",
    (
        Entry("units", "Columns of a tile, by 16.", "as many as give all multiprocessors evenly", least=1, most=16),
        Entry(
            "rows",
            "By wgmma, tokens of a tile.",
            "128; of more, also 192 and 256 of 16 bits",
            choices=(64, 128, 192, 256),
        ),
        Entry(
            "atoms",
            "By wgmma, runs of 128 bytes of a row that are read at a time.",
            "2 of few tokens, else 1",
            choices=(1, 2, 4),
        ),
        Entry("stages", "By wgmma, steps of K in shared memory.", "as many as fit, up to 12", least=2, most=12),
    ),
    decided=(
        Entry("runs", "By mma.sync, accesses of 16 bytes of a row that a thread has under way.", "2", most=2),
        Entry("warps", "By mma.sync, warps that multiply.", "16", most=16),
    ),
)
PLAIN_HOST = Kind("host", "one thread a token", on_host=True)
PLAIN = Kind("simt", "the threads of a block share tokens", (THREADS,))
FIXED = Kind("simt", "a division of the work that nothing changes")

# --- operations ------------------------------------------------------------------------------------

_PROMISES = (MAX_QUERIES, MAX_BATCH, BATCH_INVARIANT, EARLY)
_OF_ROWS = (*_PROMISES, EXPECTED_ROWS)
_THREADED = Operation((PLAIN_HOST, PLAIN), choice=False)
_FIXED = Operation((PLAIN_HOST, FIXED), choice=False)

OPERATIONS: dict[str, Operation] = {
    **dict.fromkeys(
        ("kv.attention", "kv.attention_padded"), Operation((HOST, SIMT, DIVIDED, DECODE), _OF_ROWS, tuned=True)
    ),
    "kv.operand_attention": Operation((HOST, SIMT, TILED), _OF_ROWS, tuned=True),
    "kv.mla_attention": Operation((HOST, SIMT, LATENT, TILED), _PROMISES),
    "kv.mla_prefill_chunk": Operation((ROWS_HOST, SIMT, TILED), _PROMISES),
    **dict.fromkeys(
        ("kv.project_append", "kv.project_append_padded"),
        Operation(
            (PROJECTED_HOST, PROJECTED_SIMT, PROJECTED, PROJECTED_FEW, PROJECTED_WHOLE), (MAX_TOKENS, EARLY_WEIGHT)
        ),
    ),
    **dict.fromkeys(
        (
            "kv.append", "kv.store_ragged", "kv.store_padded",
            "kv.rope_append", "kv.rope", "kv.rope_padded", "kv.qk_norm", "kv.rms_norm", "kv.gather", "kv.convert",
            "kv.radd", "kv.iadd_2m", "kv.sliced_add", "kv.merge_ragged", "kv.merge_attention",
        ),
        _THREADED,
    ),
    **dict.fromkeys(
        (
            "kv.copy_pages", "kv.transfer_pages", "kv.cache_row_offsets", "kv.increment_cache_lengths",
            "kv.split_prefixes",
            "kv.remap_sparse_indices", "kv.mla_prefill_plan", "kv.mla_decompress", "kv.shift_tokens",
            "kv.summarize_pages", "kv.select_pages", "kv.index_scores", "kv.select_tokens", "kv.commit",
            "kv.block_mask",
        ),
        _FIXED,
    ),
}  # fmt: skip

# The passes without which some entry has no meaning.
CARRYING = {e.carried_out_by for o in OPERATIONS.values() for k in o.kinds for e in k.entries if e.carried_out_by}
# The operations that read the user's table of schedules: it is part of the key under which their code is kept.
TUNED = {name for name, found in OPERATIONS.items() if found.tuned}

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The legal schedules: the kinds of kernels of every operation, and the entries of every kind.

The verifier, ``select-kv-schedule``, ``kv.ops``, ``kvarn tune`` and the documentation call :func:`why_unsupported` or
read the declarations. The more the caller knows (target, kind, the case that a kernel is specialised for), the more is
checked. A message continues "the schedule's": "tile must be 16, 32, 64 or 128, got 24".

To add a kind of kernel, add a :class:`Kind` here, and add it to the operations that have it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .deprecated import warn_renamed

WARPGROUP = 128  # threads
MOST = (1 << 31) - 1  # largest integer entry: kernels have 32-bit integers
Values = Mapping[str, Any]
# (case, target, entries) -> what is wrong, or None. The case is what the kernel of this kind is specialised for.
Rule = Callable[[Any, Any, Values], "str | None"]


@dataclass(frozen=True)
class Entry:
    """One entry of a schedule.

    Attributes
    ----------
    name : str
    doc : str
        One sentence on what the entry does, for the user who sets it.
    default : str
        The value without it: a rule in one line.
    type : type
        int, bool (0 and 1 are taken too) or str.
    least, most, step : int
        Bounds of an integer, and the number that it must be a multiple of.
    choices : tuple
        The legal values, where there are few.
    limit : callable, optional
        ``limit(case)``: (the values that a case allows, the reason as a clause); None where all values are legal.
    carried_out_by : str
        The pass that implements a true entry: in a pipeline without this pass the entry becomes false.
    old_name : str
        The name in the release before (:func:`current`).
    old_unit : int
        What 1 under the old name is under the new one.
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
    old_name: str = ""
    old_unit: int = 1

    @property
    def legal(self) -> str:
        """The legal values, as text."""
        if self.type is bool:
            return "true or false"
        if self.choices:
            return _one_of(self.choices)
        if self.step > 1:
            return f"a multiple of {self.step} from {self.least} to {self.most}"
        return f"an integer of {self.least} or more" if self.most == MOST else f"in [{self.least}, {self.most}]"

    def why_not(self, value: Any) -> str | None:
        """Why a value is illegal in every case; None when some case allows it."""
        if self.type is bool:
            right = isinstance(value, int) and value in (0, 1)
        elif self.choices:
            right = type(value) is self.type and value in self.choices
        else:
            right = type(value) is int and self.least <= value <= self.most and value % self.step == 0
        return None if right else f"{self.name} must be {self.legal}, got {value!r}"

    def why_not_here(self, value: Any, case: Any) -> str | None:
        """Why a value that some case allows is illegal in this case; None when it is legal."""
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
        What the kernel does, as one clause.
    entries : tuple of Entry
        The entries of this kind, besides those of the operation.
    decided : tuple of Entry
        Entries that ``select-kv-schedule`` writes for the expansion, and that users cannot set.
    on_host : bool
        Whether it runs on the host target, and only there.
    rules : tuple of callable
        ``rule(entries)``: why entries are illegal together, in any case; None when they are legal.
    fits : callable, optional
        Why entries are illegal together in one case.
    old_name : str
        The name in the release before (:func:`current`).
    """

    name: str
    doc: str
    entries: tuple[Entry, ...] = ()
    decided: tuple[Entry, ...] = ()
    on_host: bool = False
    rules: tuple[Callable[[Values], str | None], ...] = ()
    fits: Rule | None = None
    old_name: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries)

    def left_out(self, passes: Collection[str]) -> dict[str, Any]:
        """The entries that have no effect without certain passes, with the value false."""
        return {entry.name: False for entry in self.entries if entry.carried_out_by and entry.carried_out_by in passes}


@dataclass(frozen=True)
class Operation:
    """The kinds of kernels of an operation, and the entries that all of its kinds share.

    ``choice`` says whether ``kind`` is itself an entry; ``tuned``, whether the table of ``kvarn tune`` applies.
    """

    kinds: tuple[Kind, ...]
    entries: tuple[Entry, ...] = ()
    choice: bool = True
    tuned: bool = False

    def kind(self, name: str) -> Kind:
        return next(kind for kind in self.kinds if kind.name == name)

    def names(self, kind: Kind) -> tuple[str, ...]:
        """Names of all entries that a schedule of this kind may have."""
        return (*(("kind",) if self.choice else ()), *(entry.name for entry in self.entries), *kind.names)

    def entries_of(self, kind: Kind) -> dict[str, Entry]:
        return {entry.name: entry for entry in (*self.entries, *kind.entries)}


# --- old names -------------------------------------------------------------------------------------


def current(operation: str, schedule: Any, warn: bool = True) -> Any:
    """A schedule of an operation with this release's names of entries and kinds.

    Old names are accepted for one release, with a DeprecationWarning if ``warn``. An old name of an entry whose new
    name is given too is left, and is then unknown. Whatever is not a mapping is returned as it is.
    """
    entries, kinds = _OLD.get(operation, ({}, {}))
    if not isinstance(schedule, Mapping) or not (entries or kinds):
        return schedule
    kind = schedule.get("kind")
    new_kind = kinds.get(kind) if isinstance(kind, str) else None
    old = [name for name in schedule if name in entries and entries[name].name not in schedule]
    if not old and new_kind is None:
        return schedule
    found = {}
    for name, value in schedule.items():
        entry = entries[name] if name in old else None
        if entry is None:
            found[name] = value
            continue
        found[entry.name] = value * entry.old_unit if type(value) is int else value
        if warn:
            warn_renamed("the schedule entry", name, entry.name)
    if new_kind is not None:
        found["kind"] = new_kind
        if warn:
            warn_renamed("the schedule kind", kind, new_kind)
    return found


# --- whether a schedule is legal -------------------------------------------------------------------


def why_unsupported(
    operation: str, schedule: Any, target: Any = None, kind: str | None = None, case: Any = None, decided: bool = False
) -> str | None:
    """Why a schedule of an operation is illegal, as a clause that continues "the schedule's"; None when it is legal.

    Parameters
    ----------
    operation : str
        Such as ``"kv.attention"``.
    schedule : mapping
        Entries as Python values.
    target : Target, optional
        Without it, a schedule is legal that some target allows.
    kind : str, optional
        The kind of kernel that was chosen. Without it, a schedule is legal that some kind allows.
    case : optional
        What the rules of the kind read (decode: its ``Config``); needs target and kind.
    decided : bool
        Whether a schedule with a kind may have the entries that only ``select-kv-schedule`` writes: an op's may.
    """
    if operation not in OPERATIONS:  # of another package, whose expansion checks it
        return None
    declared, schedule = OPERATIONS[operation], current(operation, schedule, warn=False)
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
        # The kind that shares most entries with the schedule is probably the one that was meant.
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
    """The values of named entries of a schedule that ``select-kv-schedule`` has completed.

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


def producers_of(schedule: Values) -> int:
    """The number of producer warpgroups in a schedule of tiles; 0 if consumers copy."""
    return schedule.get("producers", 1) if schedule.get("producer") else 0


def of_own_kernel(schedule: Values, threads: int) -> dict[str, Any]:
    """A schedule of ``@kv.kernel``, with the warpgroups of a block of ``threads`` threads that compute: ``consumers``.

    Raises
    ------
    TypeError
        If it is not a mapping.
    ValueError
        For an entry that such kernels do not have, a value that is not legal, or a block without consumers.
    """
    if not isinstance(schedule, Mapping):
        raise TypeError(f"schedule must be a dict of entries, got {type(schedule).__name__}")
    declared = {entry.name: entry for entry in OWN.entries}
    for name, value in schedule.items():
        if name not in declared:
            raise ValueError(f"schedule of a kernel has the entries {', '.join(declared)}, got {name!r}")
        problem = declared[name].why_not(value)
        if problem is not None:
            raise ValueError(f"schedule: {problem}")
    copying = producers_of(schedule)
    if threads % WARPGROUP or threads // WARPGROUP <= copying:
        least = WARPGROUP * (copying + 1)
        raise ValueError(
            f"schedule: block must have a multiple of {WARPGROUP} threads, at least {least}, got {threads}"
        )
    return {**schedule, "consumers": threads // WARPGROUP - copying}


def is_of_gpus(operation: str, schedule: Any) -> bool:
    """Whether a schedule names a kind that only GPUs have and is legal there; the host ignores such a schedule."""
    kinds = OPERATIONS[operation].kinds if operation in OPERATIONS else ()
    of_gpus, schedule = [k.name for k in kinds if not k.on_host], current(operation, schedule, warn=False)
    return schedule.get("kind") in of_gpus and why_unsupported(operation, schedule) is None


def _why_not_kind(declared: Operation, name: Any, target: Any, here: list[Kind]) -> str | None:
    if name in [k.name for k in here]:
        return None
    if target is not None and any(name == k.name for o in OPERATIONS.values() for k in o.kinds):
        return f"kind must be {_one_of([k.name for k in here])} on {target.name}, got {name!r}"
    return f"kind must be one of {', '.join(k.name for k in declared.kinds)}, got {name!r}"


def _why_not_of(declared: Operation, kind: Kind, schedule: Values) -> str | None:
    """Why the entries do not belong to a kind, whatever the case."""
    names, entries = declared.names(kind), declared.entries_of(kind)
    for name in schedule:
        if name not in names:
            others = _one_of(k.name for k in declared.kinds if name in k.names)
            return f"entry {name!r} is only for kernels of kind {others}: {_what_has(declared, [kind])}"
    for name, value in schedule.items():
        problem = entries[name].why_not(value) if name in entries else None
        if problem is not None:
            return problem
    return next((problem for rule in kind.rules if (problem := rule(schedule)) is not None), None)


def _what_has(declared: Operation, kinds: list[Kind]) -> str:
    """The names of the legal entries of a kind, or of several kinds, as text."""
    names = dict.fromkeys(name for kind in kinds for name in declared.names(kind))
    who = f"a {kinds[0].name} kernel of this operation has" if len(kinds) == 1 else "kernels of this operation have"
    return f"{who} {', '.join(names) if names else 'none'}"


def _one_of(values: Iterable[Any]) -> str:
    """``"1, 2 or 4"``."""
    *most, last = [str(v) for v in values]
    return f"{', '.join(most)} or {last}" if most else last


# --- entries ---------------------------------------------------------------------------------------

NARROW_HEAD = 96  # head size up to which three warpgroups share a tile of many query rows, and two one of few
ROW_CLASSES = (64, 512)  # rows that fit one tile of 64, and rows that would leave too much of 192-row tiles empty


def row_class(rows: int, head_size: int) -> int | None:
    """The upper bound of the class that a count of query rows per sequence and KV head is in; None above all classes.

    Tile sizes of attention depend on the class, so that few classes keep the number of compiled programs small.
    """
    classes = ROW_CLASSES if head_size <= NARROW_HEAD else ROW_CLASSES[:1]
    return next((most for most in classes if rows <= most), None)


# What the caller knows of its batches and promises: every kernel accepts these entries.
MAX_QUERIES = Entry(
    "max_queries",
    "The most new tokens of any sequence, which the caller promises. Few query rows are read by the decode kernel.",
    "the collection's `max_seq_length`, rounded up, if it is 16 or less; otherwise no bound",
)
MAX_TOKENS = Entry(
    "max_tokens",
    "The most tokens (rows of x), which the caller promises.",
    "on a GPU, the rows of x rounded up to 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768 or 1024; otherwise no bound",
)
MAX_BATCH = Entry(
    "max_batch", "The most sequences: a promise.", "on a GPU, the collection's sequences, rounded up; otherwise 1024"
)
EXPECTED_ROWS = Entry(
    "expected_rows",
    "The most query rows (new tokens times the group) to expect per sequence and KV head. It selects tile sizes and is "
    "not a promise: more rows are computed correctly.",
    "on a GPU with more than 16 new tokens, the collection's `max_seq_length` times the group, rounded up to 64, or to "
    "512 for heads of up to 96; otherwise, and with `batch_invariant`, no bound",
)
BATCH_INVARIANT = Entry(
    "batch_invariant",
    "Whether a sequence's result must not depend, in any bit, on the rest of the batch. A kernel that cannot guarantee "
    "it is refused.",
    "false",
    bool,
)
EARLY = Entry(
    "early",
    "The caller promises that the kernel before writes no cached tokens, lengths or tables. With programmatic "
    "dependent launch (PDL), a decode then reads them before that kernel has ended.",
    "false",
    bool,
)
EARLY_WEIGHT = Entry(
    "early",
    "The caller promises that the kernel before does not write the weight. With programmatic dependent launch (PDL), "
    "the weight is then read before that kernel has ended.",
    "false",
    bool,
)
THREADS = Entry("threads", "Threads per block.", "256; 128 for `gather`", least=32, most=1024, step=32)


def _warps_of(case: Any) -> tuple[tuple[int, ...], str]:
    """A warp has up to 16 query rows of a KV head, or some of its columns; a work item's blocks share them evenly."""
    total, together = case.row_groups, case.slices
    most = min(total, WARPS.most, 15 * together if together > 1 else total)  # each group has a named barrier
    legal = tuple(n for n in range(together, most + 1, together) if total % n == 0)
    multiple = f" and a multiple of the {together} warps that share a head's columns" if together > 1 else ""
    return legal, f", a divisor of the {total} warps that a token's query rows need{multiple}"


def _tiles_of(case: Any) -> tuple[tuple[int, ...], str] | None:
    """Each lane of a warp looks up one page of a tile."""
    if not case.spec.paged:
        return None
    most = 32 * case.spec.page_size
    return tuple(n for n in TILE.choices if n <= most), f", at most 32 pages of {case.spec.page_size} tokens"


WARPS = Entry(
    "warps",
    "Warps per block. Each has up to 16 query rows of a KV head; 2 or 4 warps share the columns of a wide head.",
    "the largest of 4, 3, 2 and 1 that divides the number of warps that a token's query rows need",
    most=32,
    limit=_warps_of,
)
STAGES = Entry(
    "stages", "Stages of a warp's circular buffer: one is read while the others are copied.", "2", least=2, most=16
)
TILE = Entry(
    "tile",
    "Tokens per tile, which a warp multiplies at a time.",
    "the tokens in 4 KiB of keys, but 16 to 64; 128 for heads of up to 16 bytes",
    choices=(16, 32, 64, 128),
    limit=_tiles_of,
)
BLOCKS = Entry(
    "blocks",
    "Blocks per multiprocessor, among which the split-KV scheduler divides the batch.",
    "chosen by the model: 4 to 12 warps per multiprocessor",
    most=32,
)
MIN_TILES = Entry("min_tiles", "The fewest tiles of keys in a work item.", "4; 2 for one sequence")
COMBINE = Entry(
    "combine",
    "Warps per block of the kernel that combines partial results; 0: a sequence's last decode block combines them.",
    "16 for up to 4 sequences, 4 for up to 16, otherwise 0",
    least=0,
    most=32,
)
SPLIT = Entry(
    "split_size",
    "Tokens per fixed split, whose bounds depend on the sequence's own length alone: fewer where the sequence has less "
    "than half of the most splits (up to 64), more where it would exceed them. 0: the batch is divided evenly.",
    "0; with `batch_invariant` 64, or 128 for 8-bit caches, but at least two tiles",
    least=0,
    old_name="split",
)
ROWS = Entry(
    "rows",
    "Query rows (tokens times the group) per block: 64 for each consumer warpgroup, or fewer, which are then operand B "
    "of the products.",
    "chosen by the model: 64 if no sequence has more, 192 or 256 for small heads, otherwise 128",
    choices=(8, 16, 32, 64, 128, 192, 256),
)
KEYS = Entry("keys", "Keys per tile.", "the most that fit, up to 128; fewer by `mma.sync`", least=16, most=256, step=16)
TILE_STAGES = Entry(
    "stages", "Stages of the circular buffers of keys and of values.", "by the model: 2, or 1 or 3", most=8
)
QUERY_STAGES = Entry(
    "query_stages",
    "Stages of query rows in shared memory. With two, the producer loads the next tile of rows ahead.",
    "2 if they fit",
    most=2,
)
INSTRUCTION = Entry(
    "instruction",
    "The instruction of both products: asynchronous `wgmma` (sm_90a), or synchronous `mma.sync` (every GPU, also f32).",
    "`wgmma` if the target has it and the query is not f32",
    str,
    choices=("wgmma", "mma.sync"),
)
PRODUCER = Entry(
    "producer",
    "Whether a producer warpgroup makes the copies (`specialize-kv-warps`).",
    "true",
    bool,
    carried_out_by="specialize-kv-warps",
)
PRODUCERS = Entry(
    "producers",
    "Producer warpgroups; more than one only if they convert 8-bit elements or copy ragged rows.",
    "chosen by the model: 1, or 2 or 3 where 8-bit elements are converted",
    most=3,
)
STAGING_STAGES = Entry(
    "staging_stages",
    "Stages of staging memory, in which 8-bit keys, and 8-bit values, wait for their conversion.",
    "2",
    choices=(2, 4),
    old_name="slots",
)
OVERLAP = Entry(
    "overlap",
    "Whether the products of one tile run during the softmax of the next (`pipeline-kv-loops`).",
    "true",
    bool,
)
PING_PONG = Entry(
    "ping_pong",
    "Whether consumer warpgroups alternate: one starts its products while another computes its softmax.",
    "chosen by the model: true for small heads, 8-bit queries and some 8-bit caches",
    bool,
)
ONE_WAIT = Entry(
    "one_wait",
    "Whether the softmax waits for both products of an iteration, which halves the registers of its weights; otherwise "
    "the product of the values runs during the softmax (`pipeline-kv-loops`).",
    "true for 8-bit queries, small heads, and caches that TMA boxes do not copy unconverted; otherwise false",
    bool,
)
STORED_KEYS = Entry(
    "stored_keys",
    "Whether f8e4m3 and f8e5m2 keys are multiplied unconverted, by a bf16 query that is split into two f8e4m3 terms.",
    "true if TMA copies such keys, they have no scales, and the instruction is `wgmma`",
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
    "Blocks per multiprocessor, which hide each other's latencies. By `mma.sync` registers and shared memory decide.",
    "1; 2 or 3 for 64 rows of many sequences and heads of up to 64 over 8-bit caches that TMA copies",
    most=3,
)
PERSISTENT = Entry(
    "persistent",
    "Whether the kernel is persistent, with blocks that take one tile after another, or has one block per tile.",
    "true by `wgmma`, false by `mma.sync`",
    bool,
)
SPLITS = Entry(
    "splits",
    "Splits of the keys of a tile of query rows, with one partial result each. A split has one block; two on sm_90a "
    "with up to 32 rows. By `mma.sync` this is an upper bound of at most 32, with 128 or more keys per split.",
    "as many as fill the device, up to 64 (16 by `mma.sync`)",
    most=64,
)

KEY_SPLITS = Entry(
    "splits",
    "The most splits of the keys of a tile of query rows, with 1024 or more keys each. A second kernel combines their "
    "partial results. 0: the number follows from the shapes of the launch.",
    "0: up to 16, and 1 if the tiles of rows fill the device; 1 with `batch_invariant`",
    least=0,
    most=32,
)


def _invariant_splits(schedule: Values) -> str | None:
    if schedule.get("batch_invariant") and schedule.get("split_size", 1) < 1:
        return "batch_invariant needs fixed splits of at least one token, got split_size = 0"
    return None


def _invariant_key_splits(schedule: Values) -> str | None:
    if schedule.get("batch_invariant") and schedule.get("splits", 1) == 0:
        return "batch_invariant needs splits that do not depend on the batch: give their number, or 1, got splits = 0"
    return None


def _invariant_latent(schedule: Values) -> str | None:
    if schedule.get("batch_invariant") and "splits" not in schedule:
        return "batch_invariant needs splits that do not depend on the batch, got none: give splits, or kind simt"
    return None


def _decode_fits(case: Any, target: Any, schedule: Values) -> str | None:
    """Why no choice of the missing entries fits the target's shared memory; None when one does."""
    least, what = case.least_bytes(schedule)
    if least <= target.shared_bytes:
        return None
    return (
        f"{what} must fit {target.shared_bytes} bytes of shared memory, got {least}: choose fewer stages, a smaller "
        "tile or fewer warps"
    )


# --- kinds -----------------------------------------------------------------------------------------

HOST = Kind("host", "tiles of up to 16 query rows as vector loops, on the host", on_host=True)
ROWS_HOST = Kind("host", "one thread per query row and head, on the host", on_host=True)
SIMT = Kind("simt", "one warp per query row and head; supports every case, on every GPU")
TILED = Kind(
    "tile",
    "tiles by wgmma and TMA, which passes overlap; by mma.sync and cp.async on targets without wgmma",
    (
        ROWS,
        KEYS,
        TILE_STAGES,
        QUERY_STAGES,
        PRODUCER,
        PRODUCERS,
        STAGING_STAGES,
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
OWN = Kind(
    "tile",
    "tiles of a kernel of one's own, whose extents are in its code",
    (TILE_STAGES, PRODUCER, PRODUCERS, STAGING_STAGES, OVERLAP, ONE_WAIT, PING_PONG, OCCUPANCY, INSTRUCTION),
)
DECODE = Kind(
    "decode",
    "few query rows per sequence, limited by memory bandwidth",
    (WARPS, STAGES, TILE, BLOCKS, MIN_TILES, COMBINE, SPLIT),
    rules=(_invariant_splits,),
    fits=_decode_fits,
)
# In a mixed batch of prefills and decodes, kind tile launches a second kernel, of kind decode, for the sequences with
# few new tokens. The names of that kernel's entries have this prefix.
PREFIX_OF_DECODE = "decode_"
DECODE_THRESHOLD = Entry(
    "decode_threshold",
    "The most new tokens of sequences that a second kernel, of kind decode, computes; 0: one kernel computes all.",
    "0 with one sequence, `kind` or `max_queries`; otherwise as many as have 8 query rows per KV head, or 1, for "
    "batches whose sequences have on average less than a fourth of the longest one's new tokens, or `batch_invariant`",
    least=0,
    most=8,
    old_name="few",
)
DECODE_SHARE = Entry(
    "decode_share",
    "Sixteenths of the multiprocessors on which the decode kernel of a divided batch runs; tiles start on the others.",
    "7 for 16-bit caches, 10 for 8-bit ones; 16 where the KV heads are too few for one block per multiprocessor",
    most=16,
)
DIVIDED = replace(
    TILED,
    entries=(*TILED.entries, DECODE_THRESHOLD, DECODE_SHARE),
    decided=(
        Entry("uneven", "Only a batch of uneven sequences is divided.", "where decode_threshold is not given", bool),
        *(
            replace(e, name=PREFIX_OF_DECODE + e.name, old_name="few_" + (e.old_name or e.name))
            for e in (*DECODE.entries, MAX_BATCH)
        ),
    ),
)
LATENT = Kind(
    "latent",
    "64 query rows per block over latent keys, or 8 to 32; by mma.sync on targets without wgmma",
    (SPLITS,),
    decided=(
        *(entry for entry in TILED.entries if entry not in (ROWS, KEY_SPLITS)),
        Entry("rows", "Query rows per block.", "64; fewer if a sequence has few", least=8, most=64, step=8),
        Entry("tiles", "Tiles of query rows per sequence; 0: from the row offsets.", "0", least=0, most=16),
        Entry("box_rows", "Rows per TMA box; 0: threads copy row by row.", "64", least=0, most=64),
    ),
    rules=(_invariant_latent,),
)
PROJECTED_HOST = Kind("host", "tiles of 16 tokens as vector loops, on the host", on_host=True)
PROJECTED_SIMT = Kind("simt", "one warp per column of 8 tokens; supports every case, on every GPU")
PROJECTED = Kind(
    "tile",
    "tiles of up to 128 tokens by wgmma and TMA, whose epilogue writes the cache; without wgmma, by mma.sync, and a "
    "second kernel writes the cache",
    (
        Entry("rows", "Tokens per tile: 64 for each warpgroup.", "128; 64 for few tokens", choices=(64, 128)),
        Entry(
            "columns",
            "Columns per tile, which are rows of the weight.",
            "256; fewer to have whole heads, and for few tokens",
            least=48,
            most=256,
            step=16,
        ),
        Entry("fused", "Whether the epilogue writes the cache, not a second kernel.", "true over 1024 tokens", bool),
        Entry("stages", "Stages of k-steps in shared memory.", "as many as fit, up to 12", least=2, most=12),
    ),
)
PROJECTED_STREAM_K = Kind(
    "stream_k",
    "stream-K, for up to 256 tokens, limited by reading the weight; a second kernel adds the partial results: by "
    "wgmma; by mma.sync with conversion in registers on targets without wgmma and for weights with group scales",
    (
        Entry("rows", "By wgmma, rows of the weight per tile: 64 for each warpgroup.", "128", choices=(64, 128)),
        Entry("stages", "By wgmma, stages of k-steps in shared memory.", "as many as fit, up to 10", least=2, most=12),
        Entry("atoms", "By wgmma, swizzle atoms (128 bytes) of a row per k-step.", "1", choices=(1, 2, 4)),
    ),
    decided=(INSTRUCTION,),
    old_name="few",
)
PROJECTED_FULL_K = Kind(
    "full_k",
    "one kernel whose blocks multiply all of K and write the cache: by mma.sync for up to 16 tokens of bf16 or f16, "
    "otherwise by wgmma; no norms, cache scales or group scales",
    (
        Entry(
            "tile_columns",
            "Columns per tile, which are rows of the weight.",
            "chosen by the model: an even share of the columns per multiprocessor",
            least=16,
            most=256,
            step=16,
            old_name="units",
            old_unit=16,
        ),
        Entry(
            "rows",
            "By wgmma, tokens per tile.",
            "128; for more tokens of 16 bits also 192 and 256",
            choices=(64, 128, 192, 256),
        ),
        Entry(
            "atoms",
            "By wgmma, swizzle atoms (128 bytes) of a row per k-step.",
            "2 for few tokens, otherwise 1",
            choices=(1, 2, 4),
        ),
        Entry("stages", "By wgmma, stages of k-steps in shared memory.", "as many as fit, up to 12", least=2, most=12),
    ),
    decided=(
        Entry("runs", "By mma.sync, 16-byte loads of a row that a thread has in flight.", "2", most=2),
        Entry("warps", "By mma.sync, warps that multiply.", "16", most=16),
    ),
    old_name="whole",
)
PLAIN_HOST = Kind("host", "one thread per token", on_host=True)
PLAIN = Kind("simt", "the threads of a block share tokens", (THREADS,))
FIXED = Kind("simt", "a fixed division of the work")

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
            (PROJECTED_HOST, PROJECTED_SIMT, PROJECTED, PROJECTED_STREAM_K, PROJECTED_FULL_K),
            (MAX_TOKENS, EARLY_WEIGHT),
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

# Old names by operation: (new entry by old name, new kind by old name).
_OLD: dict[str, tuple[dict[str, Entry], dict[str, str]]] = {
    name: (
        {e.old_name: e for k in found.kinds for e in (*found.entries, *k.entries, *k.decided) if e.old_name},
        {k.old_name: k.name for k in found.kinds if k.old_name},
    )
    for name, found in OPERATIONS.items()
}

# The passes without which some entry has no effect.
CARRYING = {e.carried_out_by for o in OPERATIONS.values() for k in o.kinds for e in k.entries if e.carried_out_by}
# The operations that read the user's tuning table, which is therefore part of their key in the compile cache.
TUNED = {name for name, found in OPERATIONS.items() if found.tuned}

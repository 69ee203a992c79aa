# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Migration of sequences between groups of ranks that share caches in different ways.

A prefill on eight GPUs by heads and a decode on two by keys store the same tokens in different places. Each pair of a
source and a destination rank exchanges the positions and heads that both have, bit for bit, with scales. Page sizes may
differ. Data are sent by torch.distributed, or as files in a shared folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from kvarn.caches import ContinuousBatchingKVCacheCollection, PagedKVCacheCollection

from .ranks import RankError, Ranks

_POLL = 0.005  # seconds between checks for a file


@dataclass(frozen=True)
class Shards:
    """How ranks share caches: by heads, and ranks with the same heads by keys.

    Parameters
    ----------
    ranks : tuple of int
        Global ranks; rank ``ranks[h * context + c]`` has part h of the heads (:class:`HeadParallel`) and part c of the
        keys (:class:`ContextParallel`).
    context : int
        Number of ranks that share the keys of the same heads.
    """

    ranks: tuple[int, ...]
    context: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if not self.ranks or len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"ranks must be different ranks, at least one, got {self.ranks}")
        if self.context < 1 or len(self.ranks) % self.context:
            raise ValueError(f"context must divide the {len(self.ranks)} ranks, got {self.context}")

    @property
    def heads(self) -> int:
        """Number of parts of the heads."""
        return len(self.ranks) // self.context

    def part(self, rank: int) -> tuple[int, int]:
        """(part of the heads, part of the keys) of a global rank."""
        return divmod(self.ranks.index(rank), self.context)


def migrate(
    source: Any,
    destination: Any,
    of: Shards,
    to: Shards,
    lengths: Sequence[int],
    *,
    source_sequences: Sequence[int] | None = None,
    destination_sequences: Sequence[int] | None = None,
    group: Any = None,
    folder: str | os.PathLike[str] | None = None,
    rank: int | None = None,
    timeout: float = 60.0,
) -> None:
    """Copy the cached tokens of sequences from the ranks of ``of`` to those of ``to``, all layers.

    Every rank of either calls it with equal shards and lengths. It writes the tokens in the destination's pages; the
    caller sets lengths and tables.

    Parameters
    ----------
    source, destination : PagedKVCacheCollection or ContinuousBatchingKVCacheCollection, or None
        Over torch tensors: this rank's collections, None for a rank that is not in these shards. With equal element
        types, scale types and granularities.
    of, to : Shards
        A rank may be in both.
    lengths : sequence of int
        Tokens of each sequence on all ranks.
    source_sequences, destination_sequences : sequence of int, optional
        Indices of the sequences in this rank's collection. Default: 0, 1, ...
    group : torch.distributed.ProcessGroup, optional
        Transports the data if there is no folder. Default: all ranks.
    folder : path, optional
        A folder visible to both sides and used by this migration only: the data are written there as files, which the
        receivers remove. torch.distributed is then not needed.
    rank : int, optional
        This rank's number in the shards. Default: that of torch.distributed.
    timeout : float
        Seconds that a rank waits for another.

    Raises
    ------
    RankError
        If a rank does not send or receive in time; names it.
    TypeError, ValueError
        If collections are not as above.
    """
    rank = dist.get_rank() if rank is None else rank
    sending, receiving = rank in of.ranks, rank in to.ranks
    mine = _Part(source, "source", of, rank, source_sequences, lengths) if sending else None
    theirs = _Part(destination, "destination", to, rank, destination_sequences, lengths) if receiving else None
    if mine is None and theirs is None:
        return
    known = mine or theirs
    assert known is not None
    if mine is not None and theirs is not None:
        mine.must_match(theirs)
    total = known.total_heads
    for shards, name in ((of, "of"), (to, "to")):
        if total % shards.heads:
            raise ValueError(f"the {total} heads must be a multiple of the {shards.heads} parts of {name}")
    carrier = _Group(group, timeout, f"{of} {to}") if folder is None else _Folder(Path(folder), timeout)
    for number, length in enumerate(lengths):
        for a in of.ranks if receiving else (rank,):
            for b in to.ranks if sending else (rank,):
                if rank not in (a, b):
                    continue
                what = _Common(of, to, a, b, total, length)
                if not what.count:
                    continue
                if a == b:
                    assert mine is not None
                    assert theirs is not None
                    theirs.write(number, what, mine.read(number, what))
                elif rank == a:
                    assert mine is not None
                    carrier.send(mine.read(number, what), b, f"{number}-{a}-{b}")
                else:
                    assert theirs is not None
                    carrier.receive(theirs, number, what, a, f"{number}-{a}-{b}")
        carrier.flush(f"sequence {number} of kv.parallel.migrate")
    carrier.leave()


class _Common:
    """The positions and heads of a sequence that rank a of one division and rank b of another have in common."""

    def __init__(self, of: Shards, to: Shards, a: int, b: int, heads: int, length: int) -> None:
        (ha, ca), (hb, cb) = of.part(a), to.part(b)
        self.low = max(ha * heads // of.heads, hb * heads // to.heads)
        self.high = min((ha + 1) * heads // of.heads, (hb + 1) * heads // to.heads)
        p = np.arange(ca, max(length, 0), of.context)
        self.positions = p[p % to.context == cb]

    @property
    def count(self) -> int:
        return max(self.high - self.low, 0) * len(self.positions)


class _Part:
    """A collection of one rank, as elements by (sequence, position in the sequence, head)."""

    def __init__(
        self, collection: Any, name: str, shards: Shards, rank: int, sequences: Sequence[int] | None, lengths: Any
    ) -> None:
        title = f"kv.parallel.migrate: {name}"
        if not isinstance(collection, (PagedKVCacheCollection, ContinuousBatchingKVCacheCollection)):
            raise TypeError(f"{title} must be a paged or continuous collection on rank {rank}, got {collection!r}")
        if not isinstance(collection.blocks, torch.Tensor):
            raise TypeError(f"{title} must be over torch tensors, got {type(collection.blocks).__name__}")
        self._heads, self._context = shards.part(rank)
        self._of, self.total_heads = shards, collection.num_heads * shards.heads
        self._spec = collection.cache_spec
        self._sequences = list(range(len(lengths))) if sequences is None else [int(b) for b in sequences]
        if len(self._sequences) != len(lengths) or not all(0 <= b < collection.batch_size for b in self._sequences):
            raise ValueError(
                f"{title}'s sequences must be {len(lengths)} numbers below {collection.batch_size}, "
                f"got {self._sequences}"
            )
        self._page_size = collection.blocks.shape[3]
        table = torch.as_tensor(collection.lookup_table).to("cpu", torch.int64)
        self._table = table.view(collection.batch_size, -1)[self._sequences]
        self._pools = [x.view(torch.uint8) for x in (collection.blocks, collection.scales) if x is not None]
        self._size, self._pages = self._table.shape[1] * self._page_size, collection.blocks.shape[0]
        local = [-(-(int(n) - self._context) // shards.context) for n in lengths]
        if max(local, default=0) > self._size:
            raise ValueError(f"{title}'s table must have room for {max(local)} tokens of a sequence, got {self._size}")

    def must_match(self, other: _Part) -> None:
        a, b = (
            (s.dtype, s.scale_dtype, s.granularity, s.zero, s.head_size, s.is_mla) for s in (self._spec, other._spec)
        )
        if a != b or self.total_heads != other.total_heads:
            raise ValueError(
                f"kv.parallel.migrate: source and destination must have the same elements, scales and heads, got {a} "
                f"of {self.total_heads} heads and {b} of {other.total_heads}"
            )

    def _views(self, number: int, what: _Common) -> Iterator[tuple[torch.Tensor, Any]]:
        """Each pool and the index of the common elements in it, as [tokens, 2, layers, heads, bytes]."""
        local = torch.from_numpy(what.positions // self._of.context)
        page = self._table[number][local // self._page_size]
        bad = page[(page < 0) | (page >= self._pages)]
        if len(bad):
            raise ValueError(
                f"kv.parallel.migrate: sequence {self._sequences[number]} must have a page for each of its tokens, "
                f"got page {int(bad[0])} of a pool of {self._pages}"
            )
        first = self._heads * self.total_heads // self._of.heads
        heads = slice(what.low - first, what.high - first)
        for pool in self._pools:
            at = page.to(pool.device), (local % self._page_size).to(pool.device)
            yield pool, (at[0], slice(None), slice(None), at[1], heads)

    def read(self, number: int, what: _Common) -> torch.Tensor:
        return torch.cat([pool[at].reshape(-1) for pool, at in self._views(number, what)])

    def write(self, number: int, what: _Common, data: torch.Tensor) -> None:
        for pool, at in self._views(number, what):
            shape = (len(what.positions), *pool.shape[1:3], what.high - what.low, pool.shape[5])
            count = int(np.prod(shape))
            pool[at], data = data[:count].view(shape).to(pool.device), data[count:]

    def room(self, what: _Common) -> torch.Tensor:
        """A buffer for the result of another rank's :meth:`read`."""
        size = sum(p.shape[1] * p.shape[2] * p.shape[5] for p in self._pools) * what.count
        return torch.empty(size, dtype=torch.uint8, device=self._pools[0].device)


class _Group:
    """Transport by torch.distributed, one sequence at a time."""

    def __init__(self, group: Any, timeout: float, title: str) -> None:
        self._ranks = Ranks(group, timeout, title)
        self._operations: list[dist.P2POp] = []
        self._received: list[tuple[_Part, int, _Common, torch.Tensor]] = []

    def send(self, data: torch.Tensor, to: int, name: str) -> None:
        self._operations.append(dist.P2POp(dist.isend, data, to, self._ranks.group))

    def receive(self, part: _Part, number: int, what: _Common, of: int, name: str) -> None:
        data = part.room(what)
        self._operations.append(dist.P2POp(dist.irecv, data, of, self._ranks.group))
        self._received.append((part, number, what, data))

    def flush(self, what: str) -> None:
        self._ranks.exchange(self._operations, what)
        for part, number, common, data in self._received:
            part.write(number, common, data)
        self._operations, self._received = [], []

    def leave(self) -> None:
        self._ranks.leave()


class _Folder:
    """Transport by files, which appear atomically."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self._folder, self._timeout = folder, timeout
        self._expected: list[tuple[_Part, int, _Common, int, Path]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def send(self, data: torch.Tensor, to: int, name: str) -> None:
        path = self._folder / f"{name}.npy"
        if path.exists():
            raise ValueError(f"kv.parallel.migrate: the folder must be new, but {path} exists")
        partial = path.with_suffix(f".{os.getpid()}")
        with open(partial, "wb") as file:
            np.save(file, data.cpu().numpy())
        partial.replace(path)

    def receive(self, part: _Part, number: int, what: _Common, of: int, name: str) -> None:
        self._expected.append((part, number, what, of, self._folder / f"{name}.npy"))

    def flush(self, what: str) -> None:
        """Wait for files, after this rank's own have been written."""
        deadline = time.monotonic() + self._timeout
        for part, number, common, of, path in self._expected:
            while not path.exists():
                if time.monotonic() > deadline:
                    late = f"{what}: rank {of} did not write {path} within {self._timeout:g} s: dead, or late"
                    raise RankError(late, (of,))
                time.sleep(_POLL)
            data, size = torch.from_numpy(np.load(path)), part.room(common).numel()
            if len(data) != size:
                raise ValueError(f"{what}: {path} must have {size} bytes, got {len(data)}: the pools differ")
            part.write(number, common, data)
            path.unlink()
        self._expected = []

    def leave(self) -> None:
        """Nothing to do: no rank waits for one that has written everything."""


__all__ = ["Shards", "migrate"]

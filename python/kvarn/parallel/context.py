# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ranks that share the keys of every sequence, for contexts that one device cannot hold.

Keys lie in turn: the key at position p is on rank ``p % world``, at the local position ``p // world``, so that all
ranks have equally many whatever the lengths are, and equally much to do under a causal mask. A rank attends over its
keys with all queries; the partial results (output and log-sum-exp) of all ranks are combined in the order of the ranks.
They travel as they are and are added up by the receiver, not on the way: the sum does not depend on how NCCL cuts a
message, which is what makes a sequence's result the same bits in any batch, where that is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvarn import ops
from kvarn.dialect.layout import align_up

from .combine import combined
from .ranks import Ranks
from .turns import Turns, decode_turns, prefill_turns

_OPTIONS = ("scale", "softcap", "sinks", "window", "schedule")
_LATENT_OPTIONS = ("value_size", "scale", "sinks", "window", "schedule")
_ALIGNMENT = 16  # bytes: of where log-sum-exps begin behind the outputs of a message


def _seen(b: Any, h: Any, q: Any, k: Any, later: Any, turn: Any) -> Any:
    """Whether a query sees a key of this rank, by positions in the sequence: ``turn`` is (rank, world)."""
    return k * turn[1] + turn[0] <= q + later[b]


class Pending:
    """Attention whose partial results are on their way."""

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        self._finish, self._found = finish, None

    def result(self) -> torch.Tensor:
        """The result, once everybody's part is there. On a GPU the current stream waits, and not the caller.

        Raises
        ------
        RankError
            On the CPU, if a rank does not come; on a GPU ``synchronize`` does.
        """
        if self._found is None:
            self._found = self._finish()
        return self._found


class ContextParallel:
    """One rank's part of the keys.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        Default: all ranks.
    timeout : float
        Seconds that a collective may take before it is an error that names who is missing.
    result : {"all", "heads"}
        What attention gives to a rank: the rows of all query heads, by an all-gather of partial results; or those of
        its ``Hq / world`` heads, ``rank * Hq / world`` and on, by an all-to-all of a part as large. That is
        what a projection takes whose rows lie on the ranks by heads.

    Notes
    -----
    A rank's collection has ``local(lengths)`` as its ``cache_lengths``, where ``lengths`` are the tokens of each
    sequence on all ranks, and pages for as many. Queries, new keys and values are the same on all ranks. All ranks
    make the same calls in the same order.
    """

    def __init__(self, group: Any = None, *, timeout: float = 60.0, result: str = "all") -> None:
        if result not in ("all", "heads"):
            raise ValueError(f'result must be "all" or "heads", got {result!r}')
        self.ranks, self._result = Ranks(group, timeout, "ContextParallel"), result
        self.rank, self.world = self.ranks.rank, self.ranks.world
        self._turns: dict[torch.device, torch.Tensor] = {}  # made outside of captures: they come from the host

    def local(self, lengths: torch.Tensor) -> torch.Tensor:
        """How many of the first ``lengths`` tokens of each sequence this rank has, int32 [B]."""
        return ((lengths + (self.world - 1 - self.rank)) // self.world).to(torch.int32)

    def _turn(self, device: torch.device) -> torch.Tensor:
        found = self._turns.get(device)
        if found is None:
            found = self._turns[device] = torch.tensor([self.rank, self.world], dtype=torch.int32, device=device)
        return found

    def step(self, lengths: torch.Tensor, row_offsets: torch.Tensor | None = None, rows: int = 0) -> ContextStep:
        """What the layers of a step share, computed on the device.

        Parameters
        ----------
        lengths : int32 Tensor [B]
            Tokens of each sequence cached before the step, on all ranks.
        row_offsets : int32 Tensor [B + 1], optional
            Rows of the new tokens of each sequence, of any count. Default: one token a sequence, a decode.
        rows : int
            T, when ``row_offsets`` are given: rows of keys, values and queries.
        """
        return ContextStep(self, lengths, row_offsets, rows)

    def synchronize(self) -> None:
        """Wait for the current stream, at most ``timeout`` seconds.

        On a GPU, and with CUDA graphs, a missing rank is found out here: call it once a step. On the CPU collectives
        say so themselves, and nothing is waited for.

        Raises
        ------
        RankError
            Naming the ranks that did not come.
        """
        self.ranks.synchronize("ContextParallel.synchronize")


class ContextStep:
    """One step of a batch on the ranks that share its keys: made by :meth:`ContextParallel.step`.

    A CUDA graph may hold it together with the layers: it reads lengths and offsets when it is replayed.

    Attributes
    ----------
    lengths, row_offsets : int32 Tensor
        As given.
    kv_offsets : int32 Tensor [B + 1]
        Offsets of the new tokens that are this rank's.
    """

    def __init__(
        self, parallel: ContextParallel, lengths: torch.Tensor, row_offsets: torch.Tensor | None, rows: int
    ) -> None:
        self.parallel, self.lengths = parallel, lengths
        self._decode = row_offsets is None
        batch, rank, world = lengths.shape[0], parallel.rank, parallel.world
        device = lengths.device
        if row_offsets is None:
            rows, row_offsets = batch, torch.arange(batch + 1, dtype=torch.int32, device=device)
        elif rows < 1:
            raise ValueError(f"rows must be the rows of the step's keys, given with row_offsets, got {rows}")
        self.row_offsets, self.rows = row_offsets, rows
        self._turns: Turns | None = None
        self._views: dict[int, tuple[Any, Any]] = {}  # of collections, by identity: they, and how turns see them
        new = row_offsets.diff()
        cached = parallel.local(lengths)
        self.kv_offsets = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        torch.cumsum(parallel.local(lengths + new) - cached, 0, dtype=torch.int32, out=self.kv_offsets[1:])
        if not self._decode:
            self._later = (lengths - cached).to(torch.int32)
            self._turn = parallel._turn(device)
        self._order = None
        if batch > 1 or not self._decode:
            # The rows of this rank's tokens, sequence after sequence, in a buffer for as many as there can be.
            most = min(rows, rows // world + batch)
            slot = torch.arange(most, dtype=torch.int32, device=device)
            b = torch.searchsorted(self.kv_offsets[1:], slot, right=True).clamp_(max=batch - 1)
            first = (rank - lengths) % world  # of a sequence's new tokens, the first that is this rank's
            order = row_offsets[b] + first[b] + (slot - self.kv_offsets[b]) * world
            self._order = order.clamp_(0, rows - 1).to(torch.int64)

    def append(
        self, collection: Any, layer: int, key: torch.Tensor, value: torch.Tensor | None, **options: Any
    ) -> None:
        """Store the step's keys and values that are this rank's.

        Parameters
        ----------
        collection : KV cache collection
        layer : int
        key, value : Tensor [T, H, D]
            The same on all ranks; types as of ``kv.ops.append``. ``value`` is None for an MLA collection.
        **options
            ``schedule`` of ``kv.ops.append``.
        """
        if self._order is not None:
            key = key.index_select(0, self._order)
            value = None if value is None else value.index_select(0, self._order)
        ops.append(collection, layer, key, value, self.kv_offsets, **options)

    def attention(self, collection: Any, layer: int, query: torch.Tensor, **options: Any) -> torch.Tensor:
        """Causal attention of the step's queries over the keys of all ranks.

        Parameters
        ----------
        collection : KV cache collection
        layer : int
        query : Tensor [T, Hq, D]
            The same on all ranks.
        **options
            ``scale``, ``softcap``, ``sinks``, ``window`` and ``schedule`` of ``kv.ops.attention``;
            ``schedule={"batch_invariant": True}`` makes a sequence's result the same bits in any batch. A window is
            a multiple of the ranks, over a paged collection. There are no chunks, slopes and functions: positions on a
            rank are not those of the sequence.

        Returns
        -------
        Tensor [T, Hq, D]
            Or, with ``result="heads"``, [T, Hq / world, D].

        Raises
        ------
        RankError
            On the CPU, if a rank does not come in time; on a GPU ``synchronize`` does.
        """
        return self._start(ops.attention, _OPTIONS, collection, layer, query, False, options).result()

    def attention_start(self, collection: Any, layer: int, query: torch.Tensor, **options: Any) -> Pending:
        """:meth:`attention` whose partial results travel while the caller goes on: :meth:`Pending.result` has the end.

        It pays where there is other work: the other half of a batch.
        """
        return self._start(ops.attention, _OPTIONS, collection, layer, query, True, options)

    def mla_attention(self, collection: Any, layer: int, query: torch.Tensor, **options: Any) -> torch.Tensor:
        """Causal attention of the step's queries over the latent rows of all ranks.

        Parameters
        ----------
        collection : PagedKVCacheCollection
            An MLA one.
        layer : int
        query : Tensor [T, Hq, D]
            The same on all ranks.
        **options
            ``value_size``, ``scale``, ``sinks``, ``window`` and ``schedule`` of ``kv.ops.mla_attention``; a window is a
            multiple of the ranks.

        Returns
        -------
        Tensor [T, Hq, value_size]
            Or, with ``result="heads"``, [T, Hq / world, value_size].

        Raises
        ------
        RankError
            As of :meth:`attention`.
        """
        return self._start(ops.mla_attention, _LATENT_OPTIONS, collection, layer, query, False, options).result()

    def mla_attention_start(self, collection: Any, layer: int, query: torch.Tensor, **options: Any) -> Pending:
        """As :meth:`attention_start`, of :meth:`mla_attention`."""
        return self._start(ops.mla_attention, _LATENT_OPTIONS, collection, layer, query, True, options)

    def _start(
        self,
        attend: Callable[..., Any],
        known: tuple[str, ...],
        collection: Any,
        layer: int,
        query: torch.Tensor,
        async_op: bool,
        options: dict[str, Any],
    ) -> Pending:
        title = f"ContextStep.{attend.__name__}"
        for name in options.keys() - set(known):
            raise TypeError(f"{title} takes {', '.join(known)}, got {name}")
        parallel, (rows, heads, size) = self.parallel, query.shape
        latent = attend is ops.mla_attention
        if latent:
            size = options.setdefault("value_size", 512)
        if parallel.rank:
            options.pop("sinks", None)  # one more logit, counted once
        if rows != self.rows:
            raise ValueError(f"query must have the {self.rows} rows of the step, got {rows}")
        if parallel._result == "heads" and heads % parallel.world:
            raise ValueError(f'query must have a multiple of {parallel.world} heads for result="heads", got {heads}')
        whole = Message(parallel.world, rows, heads, size, query)
        out, lse = whole.outputs[parallel.rank], whole.sums[parallel.rank]
        if latent or options.get("window") is not None:
            self._by_turns(attend, collection, layer, query, out, lse, options, title)
        else:
            mask: Any = "null" if self._decode else (_seen, self._later, self._turn)
            ops.attention(
                collection, layer, query, self.row_offsets, mask=mask, kv_offsets=self.kv_offsets, out=out,
                return_lse=True, lse=lse, **options,
            )  # fmt: skip
        if parallel._result == "all" or parallel.world == 1:
            wait = parallel.ranks.all_gather(whole.bytes, whole.bytes[parallel.rank], title, async_op)
            received = whole
        else:
            world, own = parallel.world, heads // parallel.world
            sent, received = (Message(world, rows, own, size, query) for _ in range(2))
            sent.outputs.copy_(out.view(rows, world, own, size).transpose(0, 1))
            sent.sums.copy_(lse.view(rows, world, own).transpose(0, 1))
            wait = parallel.ranks.all_to_all(received.bytes, sent.bytes, title, async_op)

        def finish() -> torch.Tensor:
            wait()
            return combined(received.outputs, received.sums)

        return Pending(finish)

    def _by_turns(
        self,
        attend: Callable[..., Any],
        collection: Any,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        options: dict[str, Any],
        title: str,
    ) -> None:
        """The rank's partial results under masks by name, see :mod:`turns`."""
        parallel, window = self.parallel, options.get("window")
        if window is not None:
            if not isinstance(window, int) or window < 1 or window % parallel.world:
                raise ValueError(f"{title}: window must be a multiple of the {parallel.world} ranks, got {window!r}")
            options = {**options, "window": window // parallel.world}
        if self._turns is None:
            args = self.lengths, self.row_offsets
            self._turns = (
                decode_turns(parallel.local(self.lengths + 1), self.row_offsets, parallel.rank)
                if self._decode
                else prefill_turns(parallel, *args, self.rows)
            )
        turns = self._turns
        kept = self._views.get(id(collection))
        if kept is None:
            kept = self._views[id(collection)] = collection, turns.collection(collection, title)
        if turns.order is None:
            attend(kept[1], layer, query, turns.row_offsets, out=out, return_lse=True, lse=lse, **options)
        else:
            ordered, sums = torch.empty_like(out), torch.empty_like(lse)
            of_turns = query.index_select(0, turns.order)
            attend(kept[1], layer, of_turns, turns.row_offsets, out=ordered, return_lse=True, lse=sums, **options)
            out.index_copy_(0, turns.order, ordered)
            lse.index_copy_(0, turns.order, sums)
        if turns.blind is not None:
            lse.masked_fill_(turns.blind, float("-inf"))


class Message:
    """Partial results of all ranks, each in one run of bytes: outputs, then log-sum-exps, read and written in place.

    Attributes
    ----------
    bytes : uint8 Tensor [world, n]
    outputs : Tensor [world, T, Hq, D]
        A view of them, like ``sums``.
    sums : f32 Tensor [world, T, Hq]
    """

    def __init__(self, world: int, rows: int, heads: int, size: int, like: torch.Tensor) -> None:
        outputs = rows * heads * size * like.element_size()
        sums = align_up(outputs, _ALIGNMENT)
        count = align_up(sums + 4 * rows * heads, _ALIGNMENT)
        self.bytes = torch.empty(world, count, dtype=torch.uint8, device=like.device)
        self.outputs = self.bytes[:, :outputs].view(like.dtype).view(world, rows, heads, size)
        self.sums = self.bytes[:, sums : sums + 4 * rows * heads].view(torch.float32).view(world, rows, heads)


__all__ = ["ContextParallel", "ContextStep", "Pending"]

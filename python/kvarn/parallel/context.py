# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Context parallelism: ranks share the keys of every sequence, for contexts beyond one device's memory.

Keys are distributed round-robin: the key at position p is on rank ``p % world``, at the local position ``p // world``,
which balances memory for any lengths, and work under a causal mask. A rank attends to its keys with all queries; the
partial results (output and log-sum-exp) of all ranks are combined in the order of the ranks. They are sent unreduced
and combined by the receiver, so the result does not depend on how NCCL splits a message, and batch invariance is
possible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvarn import ops
from kvarn.dialect.layout import align_up

from .combine import combined
from .ranks import Ranks
from .strided import StridedQueries, decode_queries, prefill_queries

_OPTIONS = ("scale", "softcap", "sinks", "window", "schedule")
_LATENT_OPTIONS = ("value_size", "scale", "sinks", "window", "schedule")
_ALIGNMENT = 16  # bytes; alignment of the log-sum-exps after the outputs in a message


def _seen(b: Any, h: Any, q: Any, k: Any, later: Any, place: Any) -> Any:
    """Whether a query sees a key of this rank, by global positions: ``place`` is (rank, world)."""
    return k * place[1] + place[0] <= q + later[b]


class Pending:
    """Attention whose partial results are being exchanged."""

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        self._finish, self._found = finish, None

    def result(self) -> torch.Tensor:
        """The result, once all parts have arrived. On a GPU the current stream waits rather than the caller.

        Raises
        ------
        RankError
            On the CPU, if a rank is missing; on a GPU ``synchronize`` raises it.
        """
        if self._found is None:
            self._found = self._finish()
        return self._found


class ContextParallel:
    """Context parallelism on one rank.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        Default: all ranks.
    timeout : float
        Seconds after which a collective raises an error that names the missing ranks.
    result : {"all", "heads"}
        The output of a rank: the rows of all query heads, by an all-gather of partial results; or those of its
        ``Hq / world`` heads, from ``rank * Hq / world`` on, by an all-to-all of the same size, as a projection needs
        whose rows are distributed over ranks by heads.

    Notes
    -----
    A rank's collection has ``local(lengths)`` as its ``cache_lengths``, where ``lengths`` are the tokens of each
    sequence on all ranks, and pages for as many. Queries, new keys and values are equal on all ranks. All ranks make
    the same calls in the same order.
    """

    def __init__(self, group: Any = None, *, timeout: float = 60.0, result: str = "all") -> None:
        if result not in ("all", "heads"):
            raise ValueError(f'result must be "all" or "heads", got {result!r}')
        self.ranks, self._result = Ranks(group, timeout, "ContextParallel"), result
        self.rank, self.world = self.ranks.rank, self.ranks.world
        self._places: dict[torch.device, torch.Tensor] = {}  # copied from the host outside of captures

    def local(self, lengths: torch.Tensor) -> torch.Tensor:
        """How many of the first ``lengths`` tokens of each sequence are on this rank, int32 [B]."""
        return ((lengths + (self.world - 1 - self.rank)) // self.world).to(torch.int32)

    def place(self, device: torch.device) -> torch.Tensor:
        """(rank, world) on a device, int32 [2]."""
        found = self._places.get(device)
        if found is None:
            found = self._places[device] = torch.tensor([self.rank, self.world], dtype=torch.int32, device=device)
        return found

    def step(self, lengths: torch.Tensor, row_offsets: torch.Tensor | None = None, rows: int = 0) -> ContextStep:
        """The data that the layers of a step share, computed on the device.

        Parameters
        ----------
        lengths : int32 Tensor [B]
            Tokens of each sequence cached before the step, on all ranks.
        row_offsets : int32 Tensor [B + 1], optional
            Rows of the new tokens of each sequence. Default: one token per sequence, a decode step.
        rows : int
            T, the rows of keys, values and queries; required with ``row_offsets``.
        """
        return ContextStep(self, lengths, row_offsets, rows)

    def synchronize(self) -> None:
        """Wait for the current stream, at most ``timeout`` seconds.

        On a GPU, and with CUDA graphs, this detects missing ranks: call it once per step. On the CPU collectives detect
        them, and this returns at once.

        Raises
        ------
        RankError
            With the missing ranks.
        """
        self.ranks.synchronize("ContextParallel.synchronize")


class ContextStep:
    """One step of a batch on ranks that share its keys: made by :meth:`ContextParallel.step`.

    A CUDA graph can capture it together with the layers: a replay reads the current lengths and offsets.

    Attributes
    ----------
    lengths, row_offsets : int32 Tensor
        As given.
    kv_offsets : int32 Tensor [B + 1]
        Offsets of this rank's new tokens.
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
        self._strided: StridedQueries | None = None
        self._views: dict[int, tuple[Any, Any]] = {}  # by id of a collection: the collection, and its its view
        new = row_offsets.diff()
        cached = parallel.local(lengths)
        self.kv_offsets = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        torch.cumsum(parallel.local(lengths + new) - cached, 0, dtype=torch.int32, out=self.kv_offsets[1:])
        if not self._decode:
            self._later = (lengths - cached).to(torch.int32)
            self._place = parallel.place(device)
        self._order = None
        if batch > 1 or not self._decode:
            # The rows of this rank's tokens, sequence after sequence, in a buffer of the largest possible size.
            most = min(rows, rows // world + batch)
            slot = torch.arange(most, dtype=torch.int32, device=device)
            b = torch.searchsorted(self.kv_offsets[1:], slot, right=True).clamp_(max=batch - 1)
            first = (rank - lengths) % world  # the first of a sequence's new tokens on this rank
            order = row_offsets[b] + first[b] + (slot - self.kv_offsets[b]) * world
            self._order = order.clamp_(0, rows - 1).to(torch.int64)

    def append(
        self, collection: Any, layer: int, key: torch.Tensor, value: torch.Tensor | None, **options: Any
    ) -> None:
        """Store the step's keys and values of this rank.

        Parameters
        ----------
        collection : KV cache collection
        layer : int
        key, value : Tensor [T, H, D]
            Equal on all ranks; types as in ``kv.ops.append``. ``value`` is None for an MLA collection.
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
            Equal on all ranks.
        **options
            ``scale``, ``softcap``, ``sinks``, ``window`` and ``schedule`` of ``kv.ops.attention``;
            ``schedule={"batch_invariant": True}`` makes a sequence's result bitwise independent of the batch. A window
            must be a multiple of the number of ranks, over a paged collection. Chunks, slopes and functions are not
            supported, since positions on a rank are not those of the sequence.

        Returns
        -------
        Tensor [T, Hq, D]
            Or, with ``result="heads"``, [T, Hq / world, D].

        Raises
        ------
        RankError
            On the CPU, if a rank is late; on a GPU ``synchronize`` raises it.
        """
        return self._start(ops.attention, _OPTIONS, collection, layer, query, False, options).result()

    def attention_start(self, collection: Any, layer: int, query: torch.Tensor, **options: Any) -> Pending:
        """:meth:`attention` with an asynchronous exchange: :meth:`Pending.result` completes it.

        Useful if there is other work meanwhile, such as the other half of a batch.
        """
        return self._start(ops.attention, _OPTIONS, collection, layer, query, True, options)

    def mla_attention(self, collection: Any, layer: int, query: torch.Tensor, **options: Any) -> torch.Tensor:
        """Causal attention of the step's queries over the MLA latents of all ranks.

        Parameters
        ----------
        collection : PagedKVCacheCollection
            An MLA collection.
        layer : int
        query : Tensor [T, Hq, D]
            Equal on all ranks.
        **options
            ``value_size``, ``scale``, ``sinks``, ``window`` and ``schedule`` of ``kv.ops.mla_attention``; a window must
            be a multiple of the number of ranks.

        Returns
        -------
        Tensor [T, Hq, value_size]
            Or, with ``result="heads"``, [T, Hq / world, value_size].

        Raises
        ------
        RankError
            As in :meth:`attention`.
        """
        return self._start(ops.mla_attention, _LATENT_OPTIONS, collection, layer, query, False, options).result()

    def mla_attention_start(self, collection: Any, layer: int, query: torch.Tensor, **options: Any) -> Pending:
        """:meth:`mla_attention` with an asynchronous exchange, like :meth:`attention_start`."""
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
            options.pop("sinks", None)  # one more logit, which one rank counts
        if rows != self.rows:
            raise ValueError(f"query must have the {self.rows} rows of the step, got {rows}")
        if parallel._result == "heads" and heads % parallel.world:
            raise ValueError(f'query must have a multiple of {parallel.world} heads for result="heads", got {heads}')
        whole = Message(parallel.world, rows, heads, size, query)
        out, lse = whole.outputs[parallel.rank], whole.sums[parallel.rank]
        if latent or options.get("window") is not None:
            self._by_strides(attend, collection, layer, query, out, lse, options, title)
        else:
            mask: Any = "null" if self._decode else (_seen, self._later, self._place)
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

    def _by_strides(
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
        """The rank's partial results under named masks, see :mod:`strided`."""
        parallel, window = self.parallel, options.get("window")
        if window is not None:
            if not isinstance(window, int) or window < 1 or window % parallel.world:
                raise ValueError(f"{title}: window must be a multiple of the {parallel.world} ranks, got {window!r}")
            options = {**options, "window": window // parallel.world}
        if self._strided is None:
            args = self.lengths, self.row_offsets
            self._strided = (
                decode_queries(parallel.local(self.lengths + 1), self.row_offsets, parallel.rank)
                if self._decode
                else prefill_queries(parallel, *args, self.rows)
            )
        strided = self._strided
        kept = self._views.get(id(collection))
        if kept is None:
            kept = self._views[id(collection)] = collection, strided.collection(collection, title)
        if strided.order is None:
            attend(kept[1], layer, query, strided.row_offsets, out=out, return_lse=True, lse=lse, **options)
        else:
            ordered, sums = torch.empty_like(out), torch.empty_like(lse)
            of_groups = query.index_select(0, strided.order)
            attend(kept[1], layer, of_groups, strided.row_offsets, out=ordered, return_lse=True, lse=sums, **options)
            out.index_copy_(0, strided.order, ordered)
            lse.index_copy_(0, strided.order, sums)
        if strided.sees_no_key is not None:
            lse.masked_fill_(strided.sees_no_key, float("-inf"))


class Message:
    """Partial results of all ranks, each as contiguous bytes: outputs, then log-sum-exps, accessed in place.

    Attributes
    ----------
    bytes : uint8 Tensor [world, n]
    outputs : Tensor [world, T, Hq, D]
        A view of the bytes, like ``sums``.
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

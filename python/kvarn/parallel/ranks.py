# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Collectives with a time-out whose error names the missing ranks, on all ranks.

torch.distributed reports that a collective failed or timed out, but not which rank caused it. Here a rank that has
waited for a while writes to the group's store which collective it has reached. At the time-out, ranks that have not
written are late or dead; the first rank to detect it writes the verdict, which all others read, including a late one
when it arrives. There is no cost while collectives, and the time between them, take less than :data:`_PATIENCE`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

_PATIENCE = 1.0  # seconds after which a waiting rank writes its position, at most; a tenth of a short time-out
_POLL = 0.02  # seconds between polls
_LAST = 1 << 62  # a number above those of all collectives
_made: dict[str, itertools.count[int]] = {}  # objects per group and title, which all ranks make in the same order


class RankError(RuntimeError):
    """Ranks did not reach a collective in time.

    Attributes
    ----------
    ranks : tuple of int
        Their global numbers; empty if all ranks arrived and the collective failed for another reason.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class Ranks:
    """A group of ranks, from the view of one of them.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        Default: all ranks.
    timeout : float
        Seconds that a collective may take.
    title : str
        Its purpose. Ranks that make objects with a title make equally many, in the same order, by which they find each
        other in the store. Its exchanges do not wait for ranks of the group that make none.
    """

    def __init__(self, group: Any = None, timeout: float = 60.0, title: str = "") -> None:
        if not dist.is_initialized():
            raise RuntimeError("kv.parallel needs torch.distributed.init_process_group(...), which has not been called")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive seconds, got {timeout!r}")
        if group is not None and dist.get_rank(group) < 0:
            raise ValueError(f"this rank must be one of the group's, {dist.get_process_group_ranks(group)}")
        self.group = group or dist.group.WORLD
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = float(timeout)
        self._global = dist.get_process_group_ranks(self.group)
        name = f"kvarn/{self.group.group_name}/{title}"
        number = next(_made.setdefault(name, itertools.count()))
        self._store = dist.PrefixStore(f"{name}/{number}", dist.distributed_c10d._get_default_store())
        self._count = 0
        self._patience = min(_PATIENCE, self.timeout / 10)
        self._last = time.monotonic()  # time of this rank's last collective

    # --- collectives -------------------------------------------------------------------------------

    def all_gather(
        self, out: torch.Tensor, mine: torch.Tensor, what: str, async_op: bool = False
    ) -> Callable[[], None]:
        """Start gathering every rank's ``mine`` into ``out`` [world, ...]; returns the function that waits for it.

        ``async_op`` as in torch.distributed, for other work in the meantime.
        """
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13
        return self._start(gather, out, mine, what, async_op)

    def all_to_all(
        self, out: torch.Tensor, mine: torch.Tensor, what: str, async_op: bool = False
    ) -> Callable[[], None]:
        """Start sending ``mine[r]`` to rank r and receiving its part into ``out[r]``; see :meth:`all_gather`."""
        return self._start(dist.all_to_all_single, out, mine, what, async_op)

    def exchange(self, operations: list[dist.P2POp], what: str) -> None:
        """Send to and receive from ranks, and wait. Every rank of the group counts an exchange, even one of nothing."""
        peers = sorted({dist.get_group_rank(self.group, op.peer) for op in operations})
        works = self._launched(lambda: dist.batch_isend_irecv(operations) if operations else [], what, peers)
        for wait in [self._waiting(work, what, peers) for work in works]:
            wait()
        if works:
            self.synchronize(what, peers)

    def leave(self) -> None:
        """Announce that this rank takes no part in later exchanges, so that it is not missing there."""
        self._say(_LAST)

    def _start(
        self, collective: Callable[..., Any], out: torch.Tensor, mine: torch.Tensor, what: str, async_op: bool
    ) -> Callable[[], None]:
        """Launch a collective; the result waits for it: on the CPU the caller, on a GPU the current stream."""
        # Without other work NCCL may use the current stream itself, so that no stream waits for another.
        options: dict[str, Any] = {"group": self.group, "async_op": async_op or not self._by_nccl}
        work = self._launched(lambda: collective(out.view(-1), mine.view(-1), **options), what)
        return self._waiting(work, what) if options["async_op"] else lambda: None

    def _launched(self, launch: Callable[[], Any], what: str, among: Sequence[int] | None = None) -> Any:
        self._count += 1
        now = time.monotonic()
        if now - self._last > self._patience:  # a late rank may find the data of ranks that have given up
            self._raise_verdict(what)
        self._last = now
        try:
            return launch()
        except RuntimeError as error:
            self._blame(what, time.monotonic() + self.timeout, error, among)

    def _waiting(self, work: Any, what: str, among: Sequence[int] | None = None) -> Callable[[], None]:
        deadline = time.monotonic() + self.timeout

        def wait() -> None:
            if self._by_nccl:
                work.wait()  # the stream waits; synchronize() detects a wait that is too long
            else:
                self._until(deadline, what, lambda seconds: self._waited(work, seconds), among)

        return wait

    @property
    def _by_nccl(self) -> bool:
        return "gloo" not in dist.get_backend(self.group)

    @staticmethod
    def _waited(work: Any, seconds: float) -> bool:
        try:
            work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise
            return False
        return True

    def synchronize(self, what: str, among: Sequence[int] | None = None) -> None:
        """Wait until the work on the current stream is done, at most ``timeout`` seconds; no rank is missing then.

        Nothing is pending on the CPU. For a GPU this detects dead or late ranks, since collectives and CUDA graphs with
        collectives wait on the device: call it once per step, for example before reading the step's tokens back.
        """
        if not self._by_nccl:
            return
        event = torch.cuda.Event()
        event.record()

        def done(seconds: float) -> bool:
            end = time.monotonic() + seconds
            while not event.query():
                if time.monotonic() > end:
                    return False
                time.sleep(2e-5)
            return True

        self._until(time.monotonic() + self.timeout, what, done, among)

    # --- missing ranks -----------------------------------------------------------------------------

    def _until(
        self, deadline: float, what: str, waited: Callable[[float], bool], among: Sequence[int] | None = None
    ) -> None:
        """Wait for ranks of the group, at first silently: for the ranks ``among``, or all."""
        try:
            if waited(self._patience):
                return
            self._say(self._count)
            while time.monotonic() < deadline:
                if waited(min(_PATIENCE, deadline - time.monotonic())):
                    return
                self._raise_verdict(what)
            error = None
        except RankError:
            raise
        except RuntimeError as failure:
            error = failure
        self._blame(what, deadline, error, among)

    def _blame(
        self, what: str, deadline: float, error: Exception | None, among: Sequence[int] | None = None
    ) -> NoReturn:
        """Raise the verdict: the ranks that have not arrived by the deadline."""
        self._say(self._count)
        missing = [r for r in (range(self.world) if among is None else among) if r != self.rank]
        while missing:
            self._raise_verdict(what, error)
            missing = [r for r in missing if self._place(r) < self._count]
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL)
        text = ",".join(str(self._global[r]) for r in missing) or "none"
        self._asked(lambda: self._store.compare_set("verdict", "", text))
        self._raise_verdict(what, error)
        raise AssertionError("a verdict was written and is missing")

    def _say(self, place: int) -> None:
        self._asked(lambda: self._store.set(f"at/{self.rank}", str(place)))

    def _place(self, rank: int) -> int:
        """The last collective that a rank has written; -1 if it has written none."""
        key = f"at/{rank}"
        return self._asked(lambda: int(self._store.get(key)) if self._store.check([key]) else -1)

    def _raise_verdict(self, what: str, error: Exception | None = None) -> None:
        if not self._asked(lambda: self._store.check(["verdict"])):
            return
        text = self._asked(lambda: self._store.get("verdict")).decode()
        late = tuple(int(r) for r in text.split(",")) if text != "none" else ()
        if not late:
            raise RankError(f"{what} failed on rank {self._global[self.rank]}: {error}", ()) from error
        names = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))} of {self._global}"
        raise RankError(f"{what}: {names} did not come within {self.timeout:g} s: dead, or late", late) from error

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except RuntimeError as error:  # such as DistNetworkError
            by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            keeper = "the agent of torchrun" if by_agent else "rank 0"
            raise RankError(
                f"the store of torch.distributed, which {keeper} keeps, does not answer: {keeper} is dead",
                () if by_agent else (0,),
            ) from error


__all__ = ["RankError", "Ranks"]

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Acceptance of draft tokens by a page manager: one path of each request's tree is kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvarn.caches.checks import count
from kvarn.paging.page_pool import Request
from kvarn.paging.step_inputs import RuntimeInputs


class CommitsDrafts:
    """The method of managers that runs :func:`kv.ops.commit`."""

    _upload: Callable[[np.ndarray], Any] | None
    _batch: Callable[[Iterable[Hashable]], tuple[list[Hashable], list[Request]]]
    _accepted: Callable[[list[Hashable], list[Request], Any], list[int]]
    step: Callable[..., None]

    def commit(
        self, inputs: RuntimeInputs, requests: Iterable[Hashable], paths: Mapping[Hashable, Iterable[int]]
    ) -> None:
        """Keep one path of each request's drafts: :func:`kv.ops.commit` over all layers, then :meth:`step`.

        Parameters
        ----------
        inputs : RuntimeInputs
            The inputs of the step, with a collection.
        requests : iterable of hashable
            The requests of the step, as passed to ``runtime_inputs``.
        paths : mapping
            For each request the indices of its accepted tokens among its new tokens, ascending, starting with all
            tokens that ``alloc`` planned, which are not drafts. Accepted drafts must have been added with ``extend``. A
            request without a path keeps the planned tokens only.

        Raises
        ------
        ValueError
            If a path is not ascending within the step, does not start with the planned tokens, or belongs to no request
            of the step; or as in ``step``. Nothing has been moved in that case.
        """
        from kvarn import ops

        names, batch = self._batch(requests)
        paths = {name: list(path) for name, path in paths.items()}
        for name in paths.keys() - set(names):
            raise ValueError(f"paths must belong to requests of the step, got a path of {name!r}")
        accepted = {n: len(paths[n]) if n in paths else r.planned for n, r in zip(names, batch, strict=True)}
        lists = path_lists(names, [paths.get(n, range(accepted[n])) for n in names], inputs)
        for name, request in zip(names, batch, strict=True):
            own = paths.get(name, [*range(request.planned)])
            if own[: request.planned] != [*range(request.planned)] or (own and not request.planned):
                raise ValueError(
                    f"the path of request {name!r} must start with the {request.planned} tokens that were allocated, "
                    f"which are no drafts, got {own}"
                )
        self._accepted(names, batch, accepted)
        if inputs.collection is None or self._upload is None:
            raise ValueError("committing needs inputs with a collection: give the manager an upload for its pool")
        ops.commit(inputs.collection, None, self._upload(lists), inputs.uploaded_row_offsets)
        self.step(names, accepted)


def path_lists(names: Sequence[Hashable], paths: Sequence[Sequence[int]], inputs: RuntimeInputs) -> np.ndarray:
    """Paths of accepted drafts as :func:`kv.ops.commit` takes them: int32 [B, M], padded with -1."""
    new = np.diff(inputs.row_offsets.astype(np.int64))
    if len(names) != len(new):
        raise ValueError(f"requests must be the {len(new)} of the step, got {len(names)}")
    found = np.full((len(names), max(map(len, paths), default=0)), -1, np.int32)
    for row, name, path, most in zip(found, names, paths, new, strict=True):
        numbers = np.array([count(n, "path") for n in path], np.int64)
        if (np.diff(numbers) <= 0).any() or (numbers >= most).any():
            raise ValueError(f"the path of request {name!r} must ascend within its {most} new tokens, got {list(path)}")
        row[: len(path)] = numbers
    return found

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Operations where torch records: every one is an operator whose graphs give what the call gives."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch)")

from reference.torch_samples import SAMPLES, Data  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import kvarn.torch  # noqa: E402, F401
from kvarn.torch import library  # noqa: E402


class Calls(TorchDispatchMode):
    """The operators of kvarn that are called, with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "kvarn":
            copies = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, args)
            self.calls.append((func, copies))
        return func(*args, **(kwargs or {}))


def same(found: Any, expected: Any) -> None:
    flat = torch.utils._pytree.tree_leaves
    assert len(flat(found)) == len(flat(expected))
    for a, b in zip(flat(found), flat(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_every_operation_has_a_sample():
    assert set(SAMPLES) == set(library.operations())


@pytest.mark.parametrize("name", SAMPLES)
def test_operators_keep_their_contract(name):
    tensors = Data().tensors()
    with Calls() as seen:
        SAMPLES[name](tensors)
    mine = [(func, args) for func, args in seen.calls if func._opname == name]
    assert mine, "the call was recorded"
    for func, args in mine:
        torch.library.opcheck(func, args)


@pytest.mark.parametrize("name", SAMPLES)
def test_graphs_of_make_fx_do_what_a_call_does(name):
    expected = SAMPLES[name](Data().tensors())
    for mode in ("real", "symbolic"):
        graph = make_fx(SAMPLES[name], tracing_mode=mode)(Data().tensors())
        assert any(name in str(node.target) for node in graph.graph.nodes)
        same(graph(Data().tensors()), expected)


# Two pools that are made inside a graph of dynamic shapes cannot be compared with each other there.
@pytest.mark.parametrize(
    ("name", "dynamic"), [(n, d) for n in SAMPLES for d in (False, True) if (n, d) != ("transfer_pages", True)]
)
def test_compiled_functions_are_one_graph_and_do_what_a_call_does(name, dynamic):
    torch._dynamo.reset()
    expected = SAMPLES[name](Data().tensors())
    compiled = torch.compile(SAMPLES[name], fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for _ in range(2):
        same(compiled(Data().tensors()), expected)

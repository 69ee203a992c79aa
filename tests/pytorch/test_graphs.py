# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Steps of a model as torch compiles, captures and casts them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch)")

from reference.torch_samples import NEW, PAGE, SAMPLES, Data, _pool  # noqa: E402

import kvarn as kv  # noqa: E402
import kvarn.torch  # noqa: E402
from kvarn import masks  # noqa: E402
from kvarn.runtime import buffers  # noqa: E402


def near(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def exact(t: dict[str, Any], layer: int, query: torch.Tensor) -> torch.Tensor:
    """Causal attention of a step in float64, from what the pages hold."""
    rows, first = [], 0
    for b, (cached, new) in enumerate(zip(t["lengths"].tolist(), NEW, strict=True)):
        at = [(int(t["table"][b, i // PAGE]), i % PAGE) for i in range(cached + new)]
        k, v = (torch.stack([t["blocks"][p, half, layer, s] for p, s in at]).double() for half in (0, 1))
        q = query[first : first + new].double().unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("nhgd,thd->nhgt", q, k) * q.shape[-1] ** -0.5
        seen = (
            torch.arange(cached + new, device=q.device) <= torch.arange(cached, cached + new, device=q.device)[:, None]
        )
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        rows.append(torch.einsum("nhgt,thd->nhgd", scores.softmax(-1), v).flatten(1, 2))
        first += new
    return torch.cat(rows)


def step(pool: Any, t: dict[str, Any]) -> torch.Tensor:
    """Two layers between which torch computes something."""
    x = t["query"]
    for layer in range(2):
        kv.ops.append(pool, layer, t["key"] + layer, t["value"] * 2, t["offsets"])
        x = kv.ops.attention(pool, layer, x * 0.5, t["offsets"]).relu() + x
    kv.ops.increment_cache_lengths(t["lengths"], t["offsets"])
    return x


def test_a_call_is_right(device):
    t = Data(device).tensors()
    kv.ops.append(_pool(t), 1, t["key"], t["value"], t["offsets"])
    near(kv.ops.attention(_pool(t), 1, t["query"], t["offsets"]).double(), exact(t, 1, t["query"]))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_step_over_a_pool_from_outside_is_one_graph(device, backend):
    torch._dynamo.reset()
    t, u = Data(device).tensors(), Data(device).tensors()
    of_t, of_u = _pool(t), _pool(u)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for _ in range(2):
        near(compiled(of_u, u), step(of_t, t))
        t["lengths"].copy_(u["lengths"].clamp_(max=6))
    assert u["blocks"].equal(t["blocks"])


def test_numpy_arrays_seen_before_do_not_keep_a_step_from_being_compiled(monkeypatch):
    """A memo with NumPy's dtypes as keys is one that dynamo cannot read."""
    torch._dynamo.reset()
    monkeypatch.setattr(buffers, "_dtypes", {})
    buffers.view(np.zeros(1, np.float16))
    t, u = Data().tensors(), Data().tensors()
    compiled = torch.compile(lambda t: step(_pool(t), t), fullgraph=True, backend="aot_eager")
    near(compiled(u), step(_pool(t), t))


def test_an_operator_refuses_a_pool_whose_storage_has_become_shorter_than_it():
    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    t = Data().tensors()
    pool, storage = _pool(t), t["blocks"].untyped_storage()
    storage.resize_(storage.nbytes() - 4)
    with Watching(), pytest.raises(ValueError, match="must lie within its storage, got shape"):
        kv.ops.append(pool, 1, t["key"], t["value"], t["offsets"])


def test_another_pool_of_the_same_kind_compiles_nothing_new():
    torch._dynamo.reset()
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda pool, t: step(pool, t), fullgraph=True, backend=count)
    for _ in range(3):
        t = Data().tensors()
        u = copy.deepcopy(t)
        near(compiled(_pool(u), u), step(_pool(t), t))
    assert len(graphs) == 1


@pytest.mark.gpu
def test_a_compiled_step_runs_as_a_cuda_graph():
    torch._dynamo.reset()
    t, u = Data("cuda").tensors(), Data("cuda").tensors()
    of_t, of_u = _pool(t), _pool(u)
    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        near(compiled(of_u, u).clone(), step(of_t, t))
        for x in (t, u):
            x["lengths"].copy_(torch.tensor([3, 0, 9]))
    assert u["blocks"].equal(t["blocks"])


@pytest.mark.gpu
def test_a_captured_step_follows_the_lengths():
    t, u = Data("cuda").tensors(), Data("cuda").tensors()
    of_t, of_u = _pool(t), _pool(u)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(of_u, u)  # compiles, and reserves scratch memory
        u["lengths"].copy_(t["lengths"])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = step(of_u, u)
    for lengths in ([3, 0, 9], [1, 2, 3], [0, 0, 0]):
        for x in (t, u):
            x["lengths"].copy_(torch.tensor(lengths))
            x["blocks"].copy_(Data("cuda").tensors()["blocks"])
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        near(out, step(of_t, t))
        assert u["blocks"].equal(t["blocks"])
        assert u["lengths"].equal(t["lengths"])


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_brings_data_to_the_type_of_the_cache(device, compiled):
    torch._dynamo.reset()
    t = Data(device, torch.bfloat16).tensors()
    wide = {n: x.float() if x.dtype == torch.bfloat16 and n != "blocks" else x for n, x in t.items()}
    pool = _pool(t)

    def attend(w: dict[str, Any]) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            kv.ops.append(pool, 0, w["key"], w["value"], w["offsets"])
            return kv.ops.attention(pool, 0, w["query"], w["offsets"])

    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    found = run(wide)
    assert found.dtype == torch.float32  # that of the query
    torch.testing.assert_close(found.double(), exact(t, 0, wide["query"]), rtol=0, atol=0.03)
    with pytest.raises(TypeError, match="key must have dtype bf16, got f32"):
        kv.ops.append(pool, 0, wide["key"], wide["value"], wide["offsets"])


def test_writes_are_seen_by_autograd_and_inference_mode_is_taken():
    t = Data().tensors()
    compiled = torch.compile(SAMPLES["append"], fullgraph=True, backend="aot_eager")
    before = t["blocks"]._version
    compiled(t)
    assert t["blocks"]._version > before
    with torch.inference_mode():
        inside = Data().tensors()
        compiled(inside)
    assert inside["blocks"].equal(t["blocks"])


def test_functions_of_attention_are_recorded():
    torch._dynamo.reset()
    t = Data().tensors()

    def attend(t: dict[str, Any]) -> torch.Tensor:
        return kv.ops.attention(_pool(t), 0, t["query"], t["offsets"], mask=masks.causal & masks.sliding_window(3))

    expected = kv.ops.attention(_pool(t), 0, t["query"], t["offsets"], window=3)
    graph = torch.fx.experimental.proxy_tensor.make_fx(attend)(t)
    near(graph(t), expected)


@pytest.mark.parametrize("dims", ["N2PHD", "NHPC"])
def test_pools_in_the_layout_of_another_library_are_recorded(dims):
    torch._dynamo.reset()

    def write(t: dict[str, Any]) -> torch.Tensor:
        data = t["blocks"][:, :, 0].contiguous() * 1
        if dims == "NHPC":
            data = data.permute(0, 3, 2, 1, 4).flatten(3)
        pool = kv.ForeignPages(data, t["lengths"], t["table"], dims, max_seq_length=3, max_cache_length=12)
        kv.ops.append(pool, 0, t["key"], t["value"], t["offsets"])
        return data

    expected = write(Data().tensors())
    near(torch.fx.experimental.proxy_tensor.make_fx(write)(Data().tensors())(Data().tensors()), expected)
    near(torch.compile(write, fullgraph=True, backend="aot_eager")(Data().tensors()), expected)


def test_errors_of_a_graph_are_those_of_a_call():
    torch._dynamo.reset()
    t = Data().tensors()
    t["key"] = t["key"][:, :, :8].contiguous()
    compiled = torch.compile(SAMPLES["append"], backend="aot_eager")
    with pytest.raises(ValueError, match=r"kv.ops.append: key must have shape \[T, 2, 64\], got \[6, 2, 8\]"):
        compiled(t)


def test_a_stream_cannot_be_recorded():
    t = Data().tensors()
    with pytest.raises(ValueError, match="stream must be None while torch traces"):
        torch.fx.experimental.proxy_tensor.make_fx(
            lambda t: kv.ops.append(_pool(t), 0, t["key"], t["value"], t["offsets"], stream=7)
        )(t)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAMPLES)
def test_operations_on_a_gpu_do_what_they_do_on_the_host(name):
    found, expected = SAMPLES[name](Data("cuda").tensors()), SAMPLES[name](Data().tensors())
    flat = torch.utils._pytree.tree_leaves
    for a, b in zip(flat(found), flat(expected), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-3, equal_nan=True)
    compiled = torch.compile(SAMPLES[name], fullgraph=True, backend="aot_eager")
    for a, b in zip(flat(compiled(Data("cuda").tensors())), flat(found), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)

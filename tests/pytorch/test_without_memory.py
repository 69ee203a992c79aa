# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tensors without memory of their own are refused by name wherever a tensor enters; none is read at address 0."""

import functools
import json
import os
import subprocess
import sys
import traceback

import pytest

B, N, P, H, D = 2, 3, 4, 2, 8


def freed(make):
    tensor = make()
    tensor.untyped_storage().resize_(0)
    return tensor


def fake(make):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        return mode.from_tensor(make())


def functional(make):
    import torch

    return torch._to_functional_tensor(make())


def wrapper(make):
    import torch
    from torch.testing._internal.two_tensor import TwoTensor

    del torch
    return TwoTensor(make(), make())


def distributed(make):
    """As DTensor is made: a subclass whose tensor is an attribute."""
    import torch

    class Sharded(torch.Tensor):
        @staticmethod
        def __new__(cls, local):
            return torch.Tensor._make_wrapper_subclass(cls, local.shape, dtype=local.dtype, device=local.device)

        @classmethod
        def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
            raise NotImplementedError(str(function))

    return Sharded(make())


def zero(make):
    import torch

    tensor = make()
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype)


def meta(make):
    return make().to("meta")


def sparse(make):
    return make().to_sparse()


def compressed(make):
    return make().flatten(1).to_sparse_csr() if make().dim() > 1 else make().to_sparse()


def mkldnn(make):
    return make().float().to_mkldnn()


def nested(make):
    import torch

    return torch.nested.nested_tensor([make(), make()])


def jagged(make):
    import torch

    return torch.nested.nested_tensor([make(), make()], layout=torch.jagged)


KINDS = {
    f.__name__: f
    for f in (
        freed, fake, functional, wrapper, distributed, zero, meta, sparse, compressed, mkldnn, nested, jagged
    )
}  # fmt: skip


# Kinds of tensors that have memory and are not strided: these are tried at some of the entries.
OTHER = ("meta", "sparse", "compressed", "mkldnn", "nested", "jagged")
SOME = ("query", "query of lse", "freqs", "key", "blocks", "buffer")
LATER = ("freed later", "moved later", "tables later", "operand freed later")


def ok(make):
    return make()


def entries():
    """Where a tensor enters: its name, what makes a good one, and a call with it."""
    import torch

    import kvarn as kv

    tables = torch.tensor([3, 2], dtype=torch.int32), torch.tensor([[0, 2], [1, 2]], dtype=torch.int32)

    def pool(**options):
        return torch.zeros(N, 2, 1, P, H, D, **options)

    good = kv.PagedKVCacheCollection(pool(), *tables, 1, 8)
    query, offsets = torch.ones(B, H, D), torch.tensor([0, 1, 2], dtype=torch.int32)

    @kv.kernel
    def kernel(x: kv.Buffer[kv.f32, 1]):
        x[0] = 1.0

    compiled = kv.compile(kernel, kv.Buffer[kv.f32, 1], target="host")

    def collection(blocks=None, lengths=None, table=None):
        given = (pool() if blocks is None else blocks, tables[0] if lengths is None else lengths)
        return kv.PagedKVCacheCollection(*given, tables[1] if table is None else table, 1, 8)

    def used(made):
        return kv.ops.attention(made, 0, query, offsets)

    def warm(call, make):
        call(make())  # so that the second is like one before
        return call

    spare = torch.zeros(N, P, H, D)
    ints = functools.partial(torch.zeros, dtype=torch.int32)
    attention = functools.partial(kv.ops.attention, good, 0)
    yield "query", lambda: torch.ones(B, H, D), warm(lambda x: attention(x, offsets), lambda: query)
    yield "query of lse", lambda: torch.ones(B, H, D), lambda x: attention(x, offsets, return_lse=True)
    yield "freqs", lambda: torch.ones(8, D), lambda x: kv.ops.rope(good, 0, query, offsets, x)
    yield "offsets", lambda: ints(3), warm(lambda x: attention(query, x), lambda: offsets)
    yield "out", lambda: torch.ones(B, H, D), warm(lambda x: attention(query, offsets, out=x), query.clone)
    yield "key", lambda: torch.ones(B, H, D), warm(lambda x: kv.ops.append(good, 0, x, query, offsets), query.clone)
    yield "value", lambda: torch.ones(B, H, D), warm(lambda x: kv.ops.append(good, 0, query, x, offsets), query.clone)
    bias = lambda s, b, h, q, k, z: s + z[k % 4]  # noqa: E731
    yield (
        "array",
        lambda: torch.ones(4),
        warm(lambda x: attention(query, offsets, score=(bias, x)), lambda: torch.ones(4)),
    )
    yield "blocks", pool, lambda x: used(collection(blocks=x))
    yield "lengths", lambda: ints(B), lambda x: used(collection(lengths=x))
    yield "table", lambda: ints(B, 2), lambda x: used(collection(table=x))
    yield "pages", lambda: torch.zeros(N, 2, P, H, D), lambda x: used(kv.ForeignPages.flashinfer(x, *tables))
    yield "half", lambda: torch.zeros(N, P, H, D), lambda x: used(kv.ForeignPages.flashinfer((x, spare), *tables))
    yield "operand", lambda: torch.zeros(B, 4, H, D), lambda x: kv.LayoutTensorMHAOperand(x)
    yield "buffer", lambda: torch.zeros(4), warm(lambda x: kernel[1, 1](x), lambda: torch.zeros(4))
    yield "compiled", lambda: torch.zeros(4), warm(lambda x: compiled.launch(1, 1, x), lambda: torch.zeros(4))
    yield "prepared", lambda: torch.zeros(4), lambda x: compiled.prepare(1, 1, x)()

    def later(free):
        """A collection and an operand whose memory goes after they were made, and that have been used before."""

        def call(blocks):
            made = collection(blocks=blocks)
            used(made)
            free(blocks)
            used(made)

        return call

    yield "freed later", pool, later(lambda x: x.untyped_storage().resize_(0))
    yield "moved later", pool, later(lambda x: x.untyped_storage().resize_(1 << 20))

    def other_tables(blocks):
        """Tables of other sequences, of a pool that is checked once: its memory went in between."""
        made = kv.ForeignPages.flashinfer(blocks, *tables)
        used(made.with_tables(*tables))
        blocks.untyped_storage().resize_(0)
        used(made.with_tables(*tables))

    yield "tables later", lambda: torch.zeros(N, 2, P, H, D), other_tables

    def operand(buffer):
        keys = kv.LayoutTensorMHAOperand(buffer)
        keys.fields()
        buffer.untyped_storage().resize_(0)
        keys.fields()

    yield "operand freed later", lambda: torch.zeros(B, 4, H, D), operand


def main():
    """Every kind at every entry, each in a process of its own; what became of it, a line each."""
    import torch

    torch.set_num_threads(1)
    for name, make, call in entries():
        for kind, of in {"ok": ok, **KINDS}.items():
            if kind != "ok" and (name in LATER or (kind in OTHER and name not in SOME)):
                continue
            sys.stdout.flush()
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    try:
                        given = of(make)
                    except Exception as error:
                        answer = ["no such tensor", str(error)]
                    else:
                        call(given)
                        answer = ["taken", ""]
                except Exception as error:
                    answer = [type(error).__name__, str(error)]
                    if os.environ.get("SHOW"):
                        traceback.print_exc()
                os.write(writer, json.dumps(answer).encode()[:4000])
                os._exit(0)
            os.close(writer)
            text = b"".join(iter(lambda r=reader: os.read(r, 4096), b""))
            os.close(reader)
            _, status = os.waitpid(child, 0)
            answer = json.loads(text) if text else ["died", str(os.waitstatus_to_exitcode(status))]
            print(json.dumps([name, kind, *answer]))


@functools.cache
def outcomes():
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_tensor_with_memory_is_taken():
    pytest.importorskip("torch")
    wrong = [o for o in outcomes() if o[1] == "ok" and o[2] != "taken" and o[0] not in LATER]
    assert not wrong


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_without_memory_of_its_own_is_refused_by_name(kind):
    pytest.importorskip("torch")
    found = [o for o in outcomes() if o[1] == kind]
    assert sum(o[2] in ("TypeError", "ValueError", "KernelTypeError") for o in found) >= 3
    wrong = [o for o in found if o[2] not in ("TypeError", "ValueError", "no such tensor")]
    assert not wrong


@pytest.mark.parametrize("entry", LATER)
def test_a_collection_whose_memory_has_gone_since_is_refused(entry):
    pytest.importorskip("torch")
    (found,) = [o for o in outcomes() if o[:2] == [entry, "ok"]]
    assert found[2] == "ValueError"
    assert "memory" in found[3]


@pytest.mark.parametrize("name", ["blocks", "scales", "foreign pages", "keys"])
def test_a_pool_that_is_longer_than_its_storage_is_refused(name):
    torch = pytest.importorskip("torch")
    import kvarn as kv

    tables = torch.tensor([3, 2], dtype=torch.int32), torch.tensor([[0, 2], [1, 2]], dtype=torch.int32)

    def short(*shape):
        whole = torch.zeros(*shape)
        whole.untyped_storage().resize_(whole.untyped_storage().nbytes() - 4)
        return whole

    blocks = torch.zeros(N, 2, 1, P, H, D)
    calls = {
        "blocks": lambda: kv.PagedKVCacheCollection(short(N, 2, 1, P, H, D), *tables, 1, 8),
        "scales": lambda: kv.PagedKVCacheCollection(
            blocks.to(torch.int8), *tables, 1, 8, scales=short(N, 2, 1, P, H, 1), quantization_granularity=D
        ),
        "foreign pages": lambda: kv.ForeignPages.flashinfer(short(N, 2, P, H, D), *tables),
        "keys": lambda: kv.ForeignPages.flashinfer((short(N, P, H, D), torch.zeros(N, P, H, D)), *tables),
    }
    with pytest.raises(ValueError, match="must lie within its storage, got shape"):
        calls[name]()


def test_a_function_that_torch_jit_traces_is_refused():
    torch = pytest.importorskip("torch")
    import kvarn as kv

    tables = torch.tensor([3, 2], dtype=torch.int32), torch.tensor([[0, 2], [1, 2]], dtype=torch.int32)
    collection = kv.PagedKVCacheCollection(torch.zeros(N, 2, 1, P, H, D), *tables, 1, 8)
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32)

    def attend(query):
        return kv.ops.attention(collection, 0, query, offsets)

    attend(torch.ones(B, H, D))
    with pytest.raises(NotImplementedError, match=r"torch.jit.trace does not record .* use torch.compile"):
        torch.jit.trace(attend, torch.ones(B, H, D))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The worker of torch inputs: every operation over tensors of which one or two are odd, each call in a process forked.

Some changes keep a tensor's values (strides, offsets, subclasses of one's own): then the results are to be those of
the plain tensors, or the call is refused. The others are to be refused, or change nothing but results.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import sys
import traceback
from collections.abc import Callable, Generator
from typing import Any

from .loop import serve

SECONDS = 30.0  # that a call may take
INNER = ("block_mask",)  # samples that call what is inside of an operation, behind its checks
COMPUTED = (
    "merge_attention", "merge_ragged", "sliced_add", "select_tokens", "index_scores", "select_pages", "transfer_pages",
    "convert",
)  # fmt: skip
POOLS = ("blocks", "latent")
CLEAR = ("TypeError", "ValueError", "BufferError", "NotImplementedError", "KernelError", "OwnershipError", "CacheError")


class Recorded(dict[str, Any]):
    """Tensors by name, and the names that were asked for."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        super().__init__(tensors)
        self.asked: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.asked.append(name)
        return super().__getitem__(name)


def keeping(torch: Any, rng: random.Random) -> dict[str, Callable[[Any], Any]]:
    """Changes after which a tensor has the same values."""

    class Plain(torch.Tensor):
        pass

    def strided(x: Any) -> Any:
        wide = torch.empty((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]

    def shifted(x: Any) -> Any:
        flat = torch.empty(x.numel() + 3, dtype=x.dtype)
        flat[3:] = x.reshape(-1)
        return flat[3:].view(x.shape)

    def turned(x: Any) -> Any:
        order = list(range(x.dim()))
        rng.shuffle(order)
        back = [order.index(i) for i in range(x.dim())]
        return x.permute(order).contiguous().permute(back)

    def padded(x: Any) -> Any:
        axis = rng.randrange(x.dim())
        return torch.cat([x, x, x], axis).narrow(axis, x.shape[axis], x.shape[axis])

    def numpy(x: Any) -> Any:
        return x.numpy() if x.dtype != torch.bfloat16 else x

    return {
        "strided": strided, "shifted": shifted, "turned": turned, "padded": padded, "numpy": numpy,
        "subclass": lambda x: x.as_subclass(Plain), "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
        "shared": lambda x: x.share_memory_(), "pinned": lambda x: x.clone(), "view": lambda x: x.view(x.shape)[...],
        "negated": lambda x: torch._neg_view(-x) if x.is_floating_point() else x,
    }  # fmt: skip


def changing(torch: Any, rng: random.Random) -> dict[str, Callable[[Any], Any]]:
    """Changes after which a tensor is another one, or none that can be read."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def freed(x: Any) -> Any:
        x = x.clone()
        x.untyped_storage().resize_(0)
        return x

    def short(x: Any) -> Any:
        x = x.clone()
        x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)
        return x

    def fake(x: Any) -> Any:
        with FakeTensorMode() as mode:
            return mode.from_tensor(x)

    def wrapper(x: Any) -> Any:
        from torch.testing._internal.two_tensor import TwoTensor

        return TwoTensor(x, x.clone())

    def functional(x: Any) -> Any:
        return torch._to_functional_tensor(x)

    def extended(x: Any) -> Any:
        axis = rng.randrange(x.dim())
        return x.narrow(axis, 0, 1).expand(x.shape)

    def cut(x: Any) -> Any:
        axis = rng.randrange(x.dim())
        return x.narrow(axis, 0, rng.choice([0, x.shape[axis] // 2]))

    def grown(x: Any) -> Any:
        axis = rng.randrange(x.dim())
        return torch.cat([x, x], axis)

    def other_type(x: Any) -> Any:
        names = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
                 "complex64", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64", "qint8")  # fmt: skip
        dtype = getattr(torch, rng.choice(names))
        if dtype is torch.qint8:
            return torch.quantize_per_tensor(x.float(), 0.1, 0, dtype)
        return x.to(dtype)

    def extreme(x: Any) -> Any:
        x = x.clone()
        flat = x.view(-1)
        whole = [0, -1, 2**31 - 1, -(2**31), 1 << 20, 7]
        real = [float("nan"), float("inf"), -float("inf"), 3e38, -1e30, 0.0]
        for _ in range(rng.randint(1, 3)):
            flat[rng.randrange(len(flat))] = rng.choice(real if x.is_floating_point() else whole)
        return x

    return {
        "freed": freed, "short": short, "fake": fake, "wrapper": wrapper, "functional": functional,
        "extended": extended, "cut": cut, "grown": grown, "other type": other_type, "extreme": extreme,
        "meta": lambda x: x.to("meta"), "zero": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
        "sparse": lambda x: x.to_sparse(), "csr": lambda x: x.reshape(-1, x.shape[-1]).to_sparse_csr(),
        "nested": lambda x: torch.nested.nested_tensor(list(x)), "scalar": lambda x: x.reshape(-1)[0],
        "list": lambda x: x.tolist(), "none": lambda x: None, "number": lambda x: rng.choice([0, -1, 1.5, True]),
        "text": lambda x: "x", "flat": lambda x: x.reshape(-1), "deep": lambda x: x[None],
        "last": lambda x: x[..., None],
        "dense": lambda x: x.float().to_mkldnn(), "gradient": lambda x: x.float().requires_grad_(),
        "conjugate": lambda x: torch.conj(x.to(torch.complex64)), "swapped": lambda x: x.transpose(0, -1),
        "reversed": lambda x: x.numpy()[..., ::-1] if x.dtype != torch.bfloat16 else x,
    }  # fmt: skip


def flat(torch: Any, found: Any) -> list[Any]:
    """The tensors of a result."""
    if isinstance(found, (tuple, list)):
        return [x for part in found for x in flat(torch, part)]
    return [torch.as_tensor(found).detach().float()]


def call(seed: int, tell: Callable[[str], Any]) -> str:
    """What came of a seed's call: ``ok``, ``refused``, ``wrong ...`` or ``raised ...``; ``tell`` gets what it is."""
    import torch
    from reference.torch_samples import SAMPLES, Data

    rng = random.Random(seed)
    name = rng.choice([n for n in SAMPLES if n not in INNER])
    asked = Recorded(Data().tensors())
    expected = flat(torch, SAMPLES[name](asked))
    tensors = Data().tensors()
    keep, change = keeping(torch, rng), changing(torch, rng)
    changes, kept = [], True
    for of in rng.sample(sorted(set(asked.asked)), rng.choice([1, 1, 2]) if len(set(asked.asked)) > 1 else 1):
        how = rng.choice([*keep, *change])
        if how in ("freed", "short") and name in COMPUTED:  # torch itself reads it
            return "refused"
        if how == "short" and of not in POOLS:  # the storages of pools alone are looked at, when a collection is made
            return "refused"
        changes.append(f"{of} {how}")
        kept = kept and how in keep
        try:
            tensors[of] = (keep.get(how) or change[how])(tensors[of])
        except Exception:
            return "refused"  # torch has no such tensor
    text = f"{name}: {', '.join(changes)}"
    tell(text)
    try:
        found = SAMPLES[name](tensors)
        if kept:
            for x, y in zip(flat(torch, found), expected, strict=True):
                same = torch.allclose(x, y, rtol=1e-2, atol=1e-2, equal_nan=True)
                if not same:
                    return f"wrong | {text}"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        inside = "kvarn" in frames[-1].filename.split(os.sep) or f"{os.sep}python{os.sep}kvarn" in frames[-1].filename
        if type(error).__name__ in CLEAR or "kv." in str(error) or not inside:
            return f"refused {type(error).__name__}: {error} | {text}"
        return f"raised {type(error).__name__}: {error} at {frames[-1].filename}:{frames[-1].lineno} | {text}"
    return "ok"


def outcomes() -> Generator[str, str, None]:
    """Send a seed, get what came of its call, which is made in a child."""
    import torch
    from reference.torch_samples import SAMPLES, Data

    torch.set_num_threads(1)
    for sample in SAMPLES.values():  # compiles: children find the code
        with contextlib.suppress(Exception):
            sample(Data().tensors())
    said = "ready"
    while True:
        seed = int((yield said).split()[0])
        said = forked(seed)


def forked(seed: int) -> str:
    """What came of a seed's call in a child process."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)

        def say(line: str) -> None:
            os.write(writes, line.replace("\n", " ").encode()[:2000] + b"\n")

        try:
            say(call(seed, say))
        except BaseException as error:
            say(f"raised {type(error).__name__}: {error}")
        os._exit(0)
    os.close(writes)
    lines: list[str] = []
    with open(reads, errors="replace") as answers:
        while select.select([answers], [], [], SECONDS)[0] and (line := answers.readline()):
            lines.append(line.strip())
        hangs = not select.select([answers], [], [], 0)[0]
    if hangs:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if hangs or status:
        return f"{'hung' if hangs else 'died'} with {status}: {lines[:1]}"
    return lines[-1]


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    serve(outcomes())

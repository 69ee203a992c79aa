# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention layers as vLLM calls them: python -m bench.engine [--rows TEXTS] [--jobs N]

A row is a step of an engine: new tokens over contexts. Each backend of vLLM gets a model's layer (``Attention``), its
own metadata builder and pages in the layout that vLLM gives it. Timed are calls of the layer, which appends the step's
keys and values, quantizes queries where the backend wants that, and attends; all backends of a row take turns in one
process, as replays of CUDA graphs over enough layers that the L2 has none of their pages. The host's time to make a
step's metadata is measured beside it. Every result is checked against float32.

Processes prepare rows at the same time, and measure one after another. ``bench/results/engine.json`` and the page
``engine.md`` are written from them. It needs vLLM, kvarn-vllm and a GPU; backends that are not installed are named.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import functools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvarn.measure import timing_log
from kvarn.measure.arrays import arrays
from kvarn.measure.timing import between_events, captured, warm_up

from . import suites
from .engine_rows import PEERS, ROWS, SMALL, Row, page

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = {"kvarn": "CUSTOM", **{name: name for name in PEERS}}
QUERY_HEADS, HEADS, SIZE, BLOCK = 32, 8, 128, 16
LONGEST = 40960  # tokens of a sequence, max_model_len
# Relative error of a backend; of fp8 rows, the larger one where queries are rounded to fp8 too.
TOLERANCES = {("bf16", False): 0.02, ("fp8", False): 0.06, ("fp8", True): 0.12}
ROUNDS, ROUND_US = 9, 4000.0
COLD = 400 << 20  # bytes of pages that a graph's layers read: several times the L2
MOST_LAYERS = 48
SECONDS = 30  # to prepare a backend: what compiles for longer is given up

_late: set[str] = set()  # backends that were given up


@functools.cache
def engine_config(backend: str, dtype: str, on_gpu: bool) -> Any:
    """vLLM's configuration of an engine with one backend, for a model of one shape with dummy weights."""
    from vllm.engine.arg_utils import EngineArgs

    folder = Path(tempfile.gettempdir(), f"kvarn-engine-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    model = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": QUERY_HEADS * SIZE,
        "intermediate_size": 4096, "num_hidden_layers": 1, "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": HEADS, "head_dim": SIZE, "vocab_size": 2048, "max_position_embeddings": 65536,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    written = folder / f"{os.getpid()}.json"
    written.write_text(json.dumps(model))
    written.replace(folder / "config.json")  # processes write the same file
    graphs = "FULL_DECODE_ONLY" if on_gpu else "NONE"
    # Queries are quantized by vLLM's own kernel: in torch's operations it takes four, which compiled models fuse.
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=LONGEST, max_num_seqs=256,
        max_num_batched_tokens=8192, block_size=BLOCK, kv_cache_dtype="auto" if dtype == "bf16" else "fp8",
        attention_config={"backend": backend}, load_format="dummy",
        compilation_config={"mode": 0, "custom_ops": ["none", "+quant_fp8"], "cudagraph_mode": graphs},
    ).create_engine_config()  # fmt: skip


class Step:
    """The tensors that an engine has of a row: tables, lengths, and a layer's queries, keys and values."""

    def __init__(self, library: Any, row: Row) -> None:
        torch, self.row, self.library = library.torch, row, library
        new, total = (np.array(x, np.int32) for x in zip(*row.lengths, strict=True))
        self.new, self.total, self.starts = new, total, np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        pages = -(-total // BLOCK)
        self.pages = int(pages.sum()) + 1  # and one that nobody has, vLLM's null block
        order = 1 + np.random.default_rng(5).permutation(self.pages - 1).astype(np.int32)
        self.table = np.zeros((len(total), LONGEST // BLOCK), np.int32)  # as wide as vLLM's
        for b, at in enumerate(np.cumsum(pages)):
            self.table[b, : pages[b]] = order[at - pages[b] : at]
        positions = [np.arange(t - n, t) for n, t in row.lengths]
        slots = [self.table[b, p // BLOCK].astype(np.int64) * BLOCK + p % BLOCK for b, p in enumerate(positions)]
        self.device_table, self.offsets = library.integers(self.table), library.integers(self.starts)
        self.lengths, self.slots = library.integers(total), library.index(np.concatenate(slots))
        self.query, self.key, self.value = (
            library.normal((int(new.sum()), h * SIZE), "bf16") for h in (QUERY_HEADS, HEADS, HEADS)
        )
        self.stored = torch.float8_e4m3fn if row.dtype == "fp8" else torch.bfloat16
        self.pool = library.normal((self.pages, HEADS, BLOCK, 2 * SIZE), "f8e4m3" if row.dtype == "fp8" else "bf16")

    @property
    def layers(self) -> int:
        read = self.pool.nbytes
        return 2 if not self.library.on_gpu else max(2, min(MOST_LAYERS, -(-COLD // read)))

    def common(self) -> Any:
        """What vLLM hands to every metadata builder."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        torch = self.library.torch
        return CommonAttentionMetadata(
            query_start_loc=self.offsets, query_start_loc_cpu=torch.as_tensor(self.starts), seq_lens=self.lengths,
            num_reqs=len(self.new), num_actual_tokens=int(self.new.sum()), max_query_len=int(self.new.max()),
            max_seq_len=int(self.total.max()), block_table_tensor=self.device_table, slot_mapping=self.slots,
            seq_lens_cpu_upper_bound=torch.as_tensor(self.total),
        )  # fmt: skip

    def error(self, out: Any, pool: Any) -> float:
        """The error of some sequences' last tokens; infinite if a pool lacks the step's keys and values."""
        torch, worst = self.library.torch, 0.0
        rows = [x.view(-1, HEADS, SIZE).to(self.stored) for x in (self.key, self.value)]
        held = pool[self.slots // BLOCK, :, self.slots % BLOCK].view(self.stored)
        if not torch.equal(held.view(torch.uint8), torch.cat(rows, -1).view(torch.uint8)):
            return math.inf
        few = sorted({0, len(self.new) // 2, len(self.new) - 1})
        for b in few:
            length, first, last = int(self.total[b]), int(self.starts[b]), int(self.starts[b + 1])
            table = self.library.index(self.table[b, : -(-length // BLOCK)])
            cached = self.pool[table].transpose(1, 2).reshape(-1, HEADS, 2 * SIZE)[:length].float()
            cached[length - (last - first) :] = torch.cat([x[first:last].float() for x in rows], -1)
            count = min(last - first, 8)
            query = self.query[last - count : last].view(count, HEADS, -1, SIZE).float()
            scores = torch.einsum("qhgd,khd->hgqk", query, cached[..., :SIZE]) / math.sqrt(SIZE)
            at = torch.arange(length, device=scores.device)
            scores.masked_fill_(at > at[length - count :, None], -math.inf)
            wanted = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), cached[..., SIZE:]).reshape(count, -1)
            worst = max(worst, self.library.relative_error(out[last - count : last], wanted))
        return worst


@dataclass
class Contestant:
    """A backend with its layers over a step."""

    who: str
    step: Step
    config: Any
    layers: list[Any]
    builder: Any
    samples: list[float] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    replay: Callable[[], Any] = lambda: None
    out: Any = None

    @staticmethod
    def of(who: str, step: Step, count: int = 0) -> Contestant:
        """A backend with as many layers as the step asks for, or as are given."""
        import vllm.config
        from vllm.model_executor.layers.attention import Attention
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        torch, device = step.library.torch, step.library.device
        config = engine_config(BACKENDS[who], step.row.dtype, step.library.on_gpu)
        backend = AttentionBackendEnum[BACKENDS[who]].get_class()
        config.compilation_config.static_forward_context.clear()  # the layers of the row before
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with vllm.config.set_current_vllm_config(config):
                layers = [
                    Attention(QUERY_HEADS, SIZE, SIZE**-0.5, HEADS, cache_config=config.cache_config,
                              prefix=f"model.layers.{i}.attn", attn_backend=backend).to(device)
                    for i in range(count or step.layers)
                ]  # fmt: skip
                names = [layer.layer_name for layer in layers]
                with _compiling_nothing(who):
                    spec = layers[0].get_kv_cache_spec(config)
                    builder = backend.get_builder_cls()(spec, names, config, torch.device(device))
        finally:
            torch.set_default_dtype(before)
        made = Contestant(who, step, config, layers, builder)
        heads_first = who == "kvarn"  # vLLM's own backends keep a token's heads together
        for layer in layers:
            pool = step.pool.view(torch.uint8) if step.row.dtype == "fp8" else step.pool
            layer.kv_cache = pool.clone() if heads_first else pool.transpose(1, 2).contiguous().transpose(1, 2)
            layer.process_weights_after_loading(torch.bfloat16)
        return made

    def build(self) -> Any:
        return self.builder.build(0, self.step.common())

    def run(self, metadata: Any) -> None:
        """A call of every layer."""
        from vllm.forward_context import set_forward_context

        names = [layer.layer_name for layer in self.layers]
        step, slots = self.step, dict.fromkeys(names, self.step.slots)
        with set_forward_context(dict.fromkeys(names, metadata), self.config, slot_mapping=slots):
            for layer in self.layers:
                self.out = layer(step.query, step.key, step.value)

    def prepare(self) -> None:
        """Check the layers, and capture them."""
        import vllm.config

        library, step, new = self.step.library, self.step, int(self.step.new.sum())
        with vllm.config.set_current_vllm_config(self.config), library.torch.inference_mode():
            metadata = self.build()
            self.run(metadata)
            library.synchronize()
            quantized = getattr(self.layers[0], "query_quant", None) is not None
            error = step.error(self.out[:new], self.layers[-1].kv_cache)
            self.found = {"error": error, "ok": error <= TOLERANCES[step.row.dtype, quantized], "mode": "clock"}
            self.replay = lambda: self.run(metadata)
            if library.on_gpu:
                self.found |= self._host(metadata)
                self.replay, self.found["mode"] = captured(self.replay, library.torch)

    def _host(self, metadata: Any) -> dict[str, float]:
        """Microseconds that the host takes for a step's metadata, and to issue a layer's call."""
        library, builds, calls = self.step.library, [], []
        common = self.step.common()
        for _ in range(60):
            begin = time.perf_counter()
            self.builder.build(0, common)
            builds.append(time.perf_counter() - begin)
        library.synchronize()
        for _ in range(3):
            begin = time.perf_counter()
            self.run(metadata)
            calls.append((time.perf_counter() - begin) / len(self.layers))
            library.synchronize()
        return {"metadata_us": statistics.median(builds) * 1e6, "host_us": statistics.median(calls) * 1e6}

    def sample(self, count: int) -> None:
        torch = self.step.library.torch
        begin, end = between_events(lambda: [self.replay() for _ in range(count)], torch)
        torch.cuda.synchronize()
        self.samples.append(begin.elapsed_time(end) * 1e3 / count / len(self.layers))


@contextlib.contextmanager
def _compiling_nothing(who: str) -> Iterator[None]:
    """kvarn's builder compiles for steps of any size when an engine starts; here a row's own are enough."""
    if who != "kvarn":
        yield
        return
    from kvarn_vllm.backend import KvarnBuilder

    compile_all, KvarnBuilder._compile = KvarnBuilder._compile, lambda *_: None
    try:
        yield
    finally:
        KvarnBuilder._compile = compile_all


@contextlib.contextmanager
def within(seconds: int, who: str) -> Iterator[None]:
    """TimeoutError after some seconds, and at once for a backend that was late before."""

    def late(*_: Any) -> None:
        _late.add(who)
        raise TimeoutError(f"not ready after {seconds} s")

    if who in _late:
        late()

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def measure(library: Any, row: Row, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The records of a row, one of each backend."""
    step, ready = Step(library, row), []
    for who in wanted:
        record = {"kind": "engine", "case": row.name, "who": who, "ok": False}
        try:
            with within(SECONDS, who):
                one = Contestant.of(who, step)
                one.prepare()
            ready.append(one)
        except Exception as error:
            yield {**record, "note": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    if library.on_gpu:
        for one in ready:
            one.sample(1)  # and the first replay uploads the graph
        counts = [max(1, round(ROUND_US / (one.samples.pop() * len(one.layers)))) for one in ready]
        for i in range(ROUNDS):
            for one, count in [*zip(ready, counts, strict=True)][:: 1 - 2 * (i % 2)]:
                one.sample(count)
    for one in ready:
        times = {"us": statistics.median(one.samples), "us_min": min(one.samples)} if one.samples else {}
        yield {"kind": "engine", "case": row.name, "who": one.who, **one.found, **times, "layers": len(one.layers)}


def warm(library: Any, row: Row, wanted: Sequence[str]) -> None:
    """Load and compile what backends need for a row, over sequences that have nothing but the step's tokens."""
    short = Row(row.name, row.title, tuple((new, new) for new, _ in row.lengths), row.dtype)
    step = Step(library, short)
    for who in wanted:
        with contextlib.suppress(Exception), within(SECONDS, who):  # what fails is named when it is measured
            Contestant.of(who, step, 1).prepare()
    library.synchronize()


def worker(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Prepare rows, wait for the other processes, then measure while no other process does."""
    import vllm.plugins

    vllm.plugins.load_general_plugins()
    library, wanted = arrays("cuda" if options.device == "cuda" else "host"), options.backends.split(",")
    if library.on_gpu:
        for row in rows:
            warm(library, row, wanted)
    with options.out.with_suffix(".lock").open("a+") as lock, options.out.open("a") as file:
        lock.write("ready\n")
        lock.flush()
        late = time.monotonic() + 2 * SECONDS
        while options.out.with_suffix(".lock").read_text().count("\n") < options.jobs and time.monotonic() < late:
            time.sleep(0.05)
        fcntl.flock(lock, fcntl.LOCK_EX)
        warm_up(library)
        file.write(json.dumps({"kind": "machine", **timing_log.machine(library), **timing_log.clocks()}) + "\n")
        for row in rows:
            for record in measure(library, row, wanted):
                file.write(json.dumps(record) + "\n")
            file.flush()
            library.free()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="TEXTS", help="rows with one of these texts in their names")
    parser.add_argument("--backends", default=",".join(BACKENDS), help=f"default: {','.join(BACKENDS)}")
    parser.add_argument("--jobs", type=int, default=6, help="processes that prepare rows (default: 6)")
    parser.add_argument("--budget", type=float, default=480, metavar="SECONDS", help="time limit (default: 480)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small steps, to test the code")
    parser.add_argument("--json", type=Path, default=suites.FOLDER / "engine.json", metavar="FILE")
    parser.add_argument("--commit", default="", help="the commit that the files name, in a copy without .git")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # of a process that a run starts
    options = parser.parse_args(argv)
    if unknown := set(options.backends.split(",")) - set(BACKENDS):
        parser.error(f"backends are {', '.join(BACKENDS)}; got {', '.join(sorted(unknown))}")
    texts = [text.strip() for text in options.rows.split(",") if text.strip()]
    known = ROWS if options.device == "cuda" else SMALL
    rows = [row for row in known if not texts or any(text in row.name for text in texts)]
    if not rows:
        parser.error(f"no row has one of these texts in its name: {options.rows}")
    if options.out is not None:
        worker(options, rows)
        return 0
    import vllm

    with tempfile.TemporaryDirectory(prefix="kvarn-engine-") as name:
        parts = [rows[i :: options.jobs] for i in range(min(options.jobs, len(rows)))]
        out, running = Path(name, "records.jsonl"), []
        for part in parts:
            command = [sys.executable, "-m", "bench.engine", "--device", options.device, "--out", str(out)]
            command += ["--jobs", str(len(parts)), "--backends", options.backends]
            command += ["--rows", ",".join(row.name for row in part)]
            running.append(subprocess.Popen(command, cwd=ROOT))
        end, status = time.monotonic() + options.budget, 0
        for process in running:
            try:
                status = max(status, abs(process.wait(max(0.0, end - time.monotonic()))))
            except subprocess.TimeoutExpired:
                print("no time left", file=sys.stderr)
                process.kill()
                status = 1
        records = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    document = {
        "date": datetime.date.today().isoformat(), "commit": options.commit or suites.commit(),
        "vllm": vllm.__version__, "records": records,
    }  # fmt: skip
    text = page(document, suites.clocks_of(next((r for r in records if r["kind"] == "machine"), {})))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    options.json.with_suffix(".md").write_text(text)
    print(text)
    ours = [r for r in records if r.get("who") == "kvarn"]
    return status or int(len(ours) < len(rows) or not all(r["ok"] for r in ours))


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Every causal language model of transformers with kvarn's attention: logits equal to eager attention's, or refused.

``python -m pytorch.architectures [NAME ...] [--write] [--list]``, in tests: prints a row an architecture, and with
``--write`` makes docs/reference/transformers.md of them. The exit status is 1 when logits differ, when an error is none
of kvarn's own, and when a process dies. Models have two layers or a few more, and random weights; each runs in a
process of its own.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import resource
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import kvarn.torch.huggingface as kvhf

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "transformers.md"
CACHES = ("none", "paged", "own", "static")
PADDINGS = ("no", "left", "right")
TOKENS, STEPS, VOCABULARY = 11, 3, 96
LONGEST = TOKENS + STEPS + 5
NEAR = 2e-4  # of the largest logit
EQUAL, REFUSED, WRONG, RAW, DIED = "equal", "refused", "WRONG", "RAW ERROR", "DIED"
NOT_USED = "not kvarn's"  # the model's attention does not go through the setting
NOT_THERE = "not offered"  # eager attention cannot do it either
BAD = (WRONG, RAW, DIED)

# What a configuration has of these is made small; everything else is the default.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim"), 64),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "v_head_dim", "qk_nope_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k"), 2),
    **dict.fromkeys(("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len", "max_target_positions"), 128),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention"), 6),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim"), 32),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id", "forced_eos_token_id"), 2),
    "attention_window": 6, "window_size": 6, "attention_types": [[["global", "local"], 1]],
    "qk_rope_head_dim": 16, "rotary_dim": 8, "is_decoder": True, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "dropout": 0.0, "attention_dropout": 0.0, "rotary_pct": 0.5, "index_n_heads": 4,
    "index_topk": 8, "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "max_cache_len": 64,
    "mamba_d_ssm": 128, "n_shared_experts": 1, "attn_layer_indices": [1],
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY,
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "chunk_size": 8, "mamba_chunk_size": 8,
}  # fmt: skip
# What some models need besides; the first that runs is taken.
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"num_key_value_heads": 4}, {"num_key_value_heads": 4, "head_dim": 32})
WARM = ("LlamaForCausalLM", "GPT2LMHeadModel")
MEMORY = 6 << 30  # what a model may take


# --- models ----------------------------------------------------------------------------------------


def architectures() -> dict[str, tuple[type, type]]:
    """The configuration and the model of each architecture, by the model's name."""
    found = {}
    for config, model in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        for one in model if isinstance(model, tuple) else (model,):
            if not config.sub_configs or one.__name__ not in found:
                found[one.__name__] = (config, one)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def config_of(kind: Any, also: dict[str, Any]) -> Any:
    """A small configuration, with a layer of each kind that the default one has."""
    default = kind()
    parts = {name: getattr(default, name, None) for name in kind.sub_configs}
    made = {
        name: config_of(type(part), also if name in ("text_config", "decoder") else {}).to_dict()
        for name, part in parts.items()
        if isinstance(part, transformers.PreTrainedConfig)
    }
    known = set(default.to_dict())
    given = {name: value for name, value in SMALL.items() if name in known}
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if len(kinds) > 1 and "layer_types" in known:
        layers = (kinds * 2)[: max(len(kinds), 4)]
        given |= {"layer_types": layers, "num_hidden_layers": len(layers)}
    return kind(**{**given, **made, **{name: value for name, value in also.items() if name in known}})


def model_of(name: str) -> Any:
    """A small model that runs."""
    config, model = architectures()[name]
    errors = []
    for also in VARIANTS:
        try:
            made = _made(model, config_of(config, also))
            with torch.no_grad():
                logits = by_hand(made, "none", "no")
            if logits.isfinite().all():
                return made
            errors.append(ValueError("logits are not finite"))
        except Exception as error:
            errors.append(error)
    raise errors[0]


def _made(kind: Any, config: Any) -> Any:
    """A model with random weights, such that attention looks at some keys more than at others."""
    torch.manual_seed(0)
    made = kind(config if kind.config_class is type(config) else config.get_text_config(decoder=True)).eval()
    made.set_attn_implementation("eager")
    for module in made.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding) or type(module).__name__ == "Conv1D":
            assert weight is not None
            torch.nn.init.normal_(weight, std=1.0 if isinstance(module, torch.nn.Embedding) else 2 * 64**-0.5)
    made.generation_config.eos_token_id = made.generation_config.bos_token_id = None
    made.generation_config.pad_token_id = 0
    return made


def prompt(padding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of two sequences and the steps after them, and which of the prompt's there are."""
    ids = torch.randint(3, VOCABULARY, (2, TOKENS + STEPS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[0, :4] = 0
    elif padding == "right":
        mask[0, TOKENS - 4 : TOKENS] = 0
    return ids, mask


# --- what is compared --------------------------------------------------------------------------------


def cache_of(model: Any, cache: str) -> dict[str, Any]:
    config = model.config.get_text_config(decoder=True)
    if cache == "none":
        return {"use_cache": False}
    if cache == "paged":
        return {"past_key_values": kvhf.PagedCache(model.config, 2, LONGEST, page_size=4)}
    if cache == "static":
        return {"past_key_values": transformers.StaticCache(config=config, max_cache_len=LONGEST)}
    return {"use_cache": True}


def by_hand(model: Any, cache: str, padding: str, step: int = TOKENS) -> torch.Tensor:
    """Logits of a prompt in parts of ``step`` tokens, then of one token after the other."""
    ids, mask = prompt(padding)
    options = cache_of(model, cache)
    found = []
    if cache == "none":
        found.append(model(ids, attention_mask=mask, **options).logits)
    else:
        for first in [*range(0, TOKENS, step), *range(TOKENS, TOKENS + STEPS)]:
            end = first + step if first < TOKENS else first + 1
            end = min(end, TOKENS) if first < TOKENS else end
            out = model(ids[:, first:end], attention_mask=mask[:, :end], **options)
            options["past_key_values"] = out.past_key_values
            found.append(out.logits)
    return torch.cat(found, 1)[mask.bool()]


def generated(model: Any, cache: str, padding: str) -> torch.Tensor:
    """Logits of greedy search."""
    ids, mask = prompt(padding)
    options: dict[str, Any] = {"cache_implementation": "static"} if cache == "static" else {}
    options = cache_of(model, cache) if cache == "paged" else options
    found = model.generate(
        ids[:, :TOKENS], attention_mask=mask[:, :TOKENS], max_new_tokens=STEPS + 1, do_sample=False,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return torch.stack(found.logits)


def ways(cache: str, padding: str) -> list[tuple[str, int]]:
    """How a case is run: the padding, and tokens of a part of the prompt, or 0 for greedy search."""
    parts = [(padding, 4), (padding, 0)] if padding == "left" and cache != "none" else []
    return [(padding, TOKENS), *parts]


def run(model: Any, cache: str, way: tuple[str, int]) -> torch.Tensor:
    padding, size = way
    return by_hand(model, cache, padding, size) if size else generated(model, cache, padding)


def case(model: Any, cache: str, padding: str) -> tuple[str, str]:
    """What came of a case, and the message of an error."""
    outcomes = [_one(model, cache, way) for way in ways(cache, padding)]
    order = (*BAD, REFUSED, NOT_USED, EQUAL, NOT_THERE)
    return min(outcomes, key=lambda outcome: order.index(outcome[0]))


def _one(model: Any, cache: str, way: tuple[str, int]) -> tuple[str, str]:
    expected = _expected(model, "own" if cache == "paged" else cache, way)
    if isinstance(expected, str):
        return NOT_THERE, expected
    if not expected.isfinite().all() or not expected.any():
        return NOT_THERE, "logits are not finite, or all 0"
    if cache == "paged" and "past_key_values" not in inspect.signature(model.forward).parameters:
        return NOT_THERE, "the model takes no past_key_values"
    model.set_attn_implementation(kvhf.NAME)
    CALLS.clear()
    try:
        found = run(model, cache, way)
    except Exception as error:
        return (REFUSED if refuses(error) else RAW), f"{type(error).__name__}: {error}"
    off = ((found - expected).abs().max() / expected.abs().max()).item()
    if not off <= NEAR:
        return WRONG, f"{off:.1e}"
    return (EQUAL if CALLS else NOT_USED), ""


def _expected(model: Any, cache: str, way: tuple[str, int]) -> torch.Tensor | str:
    """Logits of eager attention, or its error; once for each."""
    key = cache, *way
    if key not in EXPECTED:
        model.set_attn_implementation("eager")
        try:
            EXPECTED[key] = run(model, cache, way)
        except Exception as error:
            EXPECTED[key] = f"{type(error).__name__}: {error}"
    return EXPECTED[key]


EXPECTED: dict[Any, torch.Tensor | str] = {}
CALLS: list[None] = []


def counted(*args: Any, **kwargs: Any) -> Any:
    CALLS.append(None)
    return kvhf.attention(*args, **kwargs)


def refuses(error: BaseException) -> bool:
    """Whether an error is kvarn's own and says what to do."""
    text = str(error)
    return bool(re.match("kvarn|PagedCache", text)) and bool(re.search(r"\buse\b|\bcall\b|\bmake\b|\bgive\b", text))


def rows(name: str) -> dict[str, Any]:
    """All cases of an architecture."""
    try:
        model = model_of(name)
    except Exception as error:
        return {"not built": f"{type(error).__name__}: {error}"}
    try:
        model.set_attn_implementation(kvhf.NAME)
    except Exception as error:
        return {"not built": f"set_attn_implementation: {type(error).__name__}: {error}"}
    with torch.no_grad():
        return {f"{cache}/{padding}": case(model, cache, padding) for cache in CACHES for padding in PADDINGS}


# --- a process each ----------------------------------------------------------------------------------


def in_process(name: str) -> dict[str, Any]:
    """:func:`rows` in a fork of this process, which has imported what is large."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        status = 1
        try:
            prepare()
            resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY, resource.RLIM_INFINITY))
            with os.fdopen(writer, "w") as out:
                json.dump(rows(name), out)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as given:
        text = given.read()
    _, status = os.waitpid(child, 0)
    if status or not text:
        return {f"{cache}/{padding}": (DIED, f"status {status}") for cache in CACHES for padding in PADDINGS}
    return json.loads(text)


def prepare(names: Iterable[str] = ()) -> None:
    """Set the process up, and run a few architectures: forks then have the kernels that most of the others call."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.AttentionInterface.register(kvhf.NAME, counted)
    for name in names:
        rows(name)
    EXPECTED.clear()


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


# --- the page ------------------------------------------------------------------------------------------


def counts(found: dict[str, dict[str, Any]]) -> Counter[str]:
    return Counter(outcome for row in found.values() if "not built" not in row for outcome, _ in row.values())


def page(found: dict[str, dict[str, Any]]) -> str:
    """docs/reference/transformers.md."""
    built = {name: row for name, row in found.items() if "not built" not in row}
    lines = [
        "<!-- Written by `cd tests && python -m pytorch.architectures --write`. -->",
        "# Models of transformers",
        "",
        f"Causal language models of transformers {transformers.__version__} that take `attn_implementation`, each tiny "
        'and with random weights: logits with `"kvarn"` against those of `"eager"`, float32 on the CPU, over a prompt '
        f"of {TOKENS} tokens and {STEPS} steps of one token; padded on the left also in parts of 4, and by `generate`.",
        "",
        "The first column is without a cache, `paged` with `PagedCache`, `own` with the cache that the model makes "
        'itself, `static` with `StaticCache` and `cache_implementation="static"`. Three marks are for prompts without '
        "padding, padded on the left, and padded on the right.",
        "",
        f"- = equal: at most {NEAR:g} of the largest logit apart.",
        "- r refused, with a message that says what to use instead.",
        "- o the model's attention does not go through `attn_implementation`: nothing of kvarn runs.",
        "- . not offered: eager attention does not do it either.",
        "",
        f"Of {sum(counts(found).values())} cases of {len(built)} architectures "
        + ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts(found).items()))
        + ".",
        "",
        "| model | none | paged | own | static | refused because |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    marks = {EQUAL: "=", REFUSED: "r", NOT_USED: "o", NOT_THERE: "."}
    for name, row in built.items():
        cells = ["".join(marks.get(row[f"{c}/{p}"][0], row[f"{c}/{p}"][0]) for p in PADDINGS) for c in CACHES]
        why = sorted({message for outcome, message in row.values() if outcome == REFUSED})
        lines.append(f"| {name} | {' | '.join(f'`{c}`' for c in cells)} | {'; '.join(short(w) for w in why)} |")
    missing = [name for name, row in found.items() if "not built" in row]
    if missing:
        text = "Not in the table, since no tiny one was made of its configuration by making numbers small: "
        lines += ["", text + ", ".join(missing) + "."]
    later = [name for name in architectures() if name not in found]
    if later:
        lines += ["", f"Not run yet: {', '.join(later)}."]
    return "\n".join(lines) + "\n"


def short(message: str) -> str:
    """The first clause of an error, without its type."""
    text = re.sub(r"^\w+: ", "", message)
    return text.removeprefix("PagedCache: ").split(": ")[0].replace("|", "\\|").replace("\n", " ")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pytorch.architectures", description=__doc__.split("\n\n")[0])
    parser.add_argument("name", nargs="*", help="models, as LlamaForCausalLM; default: all")
    parser.add_argument("--write", action="store_true", help="write docs/reference/transformers.md")
    parser.add_argument("--rows", type=Path, help="a file that keeps the rows; those that it has are not run again")
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    parser.add_argument("--why", action="store_true", help="print the message of every case that is not equal")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(architectures()))
        return 0
    found: dict[str, Any] = {}
    if options.rows and options.rows.is_file():
        found = dict(json.loads(line) for line in options.rows.read_text().splitlines())
    wanted = options.name or list(architectures())
    missing = [name for name in wanted if name not in found]
    prepare(WARM if len(missing) > len(WARM) else ())
    for name in missing:
        found[name] = in_process(name)
        if options.rows:
            with options.rows.open("a") as out:
                out.write(json.dumps((name, found[name])) + "\n")
        show(name, found[name], options.why)
    found = dict(sorted(found.items(), key=lambda item: item[0].lower()))
    print(", ".join(f"{n} {outcome}" for outcome, n in sorted(counts(found).items())))
    if options.write:
        PAGE.write_text(page(found), encoding="utf-8")
    return int(any(counts(found)[bad] for bad in BAD))


def show(name: str, row: dict[str, Any], why: bool) -> None:
    if "not built" in row:
        print(f"{name}: not built: {row['not built'][:300]}", flush=True)
        return
    print(f"{name}:", *(f"{key} {outcome}" for key, (outcome, _) in row.items() if outcome != EQUAL), flush=True)
    for key, (outcome, message) in row.items():
        if outcome in BAD or (why and outcome != EQUAL):
            print(f"    {key} {outcome}: {message[:400]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""kvarn as the attention of a Hugging Face model, over a paged cache.

    import kvarn.torch.huggingface as kvhf
    model.set_attn_implementation("kvarn")
    model.generate(**inputs, past_key_values=kvhf.PagedCache(model.config, batch_size=4, max_length=2048))

The import registers ``"kvarn"`` with transformers' attention and mask interfaces. Keys and values of a
:class:`PagedCache` stay in pages: a layer's ``update`` only records the new ones, and the following attention appends
and reads them. Tokens masked by a 2-D attention mask (padding on either side) are neither stored nor computed. With any
other cache, or none, attention runs over the model's own keys and values. After ``kvhf.use_in_generate_batch(model)``,
``model.generate_batch`` attends by kvarn too, in the pages of continuous batching.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import create_position_bias_mask

import kvarn.torch  # noqa: F401 (operations that torch can trace)

from . import continuous, given, masks
from .continuous import use_in_generate_batch
from .masks import Mask
from .paged import PagedCache, PagedLayer

NAME = "kvarn"


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface.

    Parameters
    ----------
    module : Module
        ``is_causal`` of the module applies if neither ``is_causal`` nor a mask is given.
    query : Tensor [B, Hq, S, D]
    key, value : Tensor [B, H, keys, D]
        All keys and values; for a :class:`PagedCache` those of the step's new tokens.
    attention_mask : Mask, Tensor [B, H, S, keys] or None
        Booleans, or floats that are added to the scores. None: as in transformers' sdpa.
    dropout : float
        Must be 0.
    scaling : float, optional
    **options
        ``is_causal``, ``softcap``, ``s_aux`` (sinks, [Hq]), ``position_bias`` (added to the scores, [B, Hq, S, keys])
        and ``indices`` (the only keys that a query sees, [B, S, K]). ``sliding_window`` is part of the mask; other
        options are ignored, as in sdpa.

    Returns
    -------
    tuple
        Tensor [B, S, Hq, D], undefined for masked tokens; and None.
    """
    layer = getattr(key, "kvarn_layer", None)
    try:
        if dropout or (torch.is_grad_enabled() and query.requires_grad):
            raise RuntimeError("kvarn: attention has no derivative: call the model under torch.no_grad(), in eval mode")
        how: dict[str, Any] = {
            "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
            "softcap": options.get("softcap"),
            "sinks": None if options.get("s_aux") is None else options["s_aux"].float(),
        }
        if isinstance(options.get("cache"), continuous.PagedAttentionCache):
            return continuous.attend(module, query, key, value, how, options), None
        mask, causal, position_bias = attention_mask, options.get("is_causal"), options.get("position_bias")
        if mask is None:
            causal = getattr(module, "is_causal", True) if causal is None else causal
            mask = bool(query.shape[2] > 1 and causal)
        for name in ("block_indices", "sinks"):
            if options.get(name) is not None:
                raise NotImplementedError(f'kvarn: attention takes no {name}: use attn_implementation="eager"')
        if options.get("indices") is not None:
            mask = given.chosen(mask, options["indices"])
        if position_bias is not None:
            tensor = mask.seen() if isinstance(mask, Mask) else None if isinstance(mask, bool) else mask
            mask = create_position_bias_mask(position_bias, tensor, mask is True, query, key)
        if layer is not None:
            return layer.attend(query, key, value, mask, how), None
        return given.attention(query, key, value, mask, how), None
    except BaseException:
        if layer is not None:
            layer.failed()
        raise


for _name in (NAME, continuous.NAME):
    AttentionInterface.register(_name, attention)
    AttentionMaskInterface.register(_name, masks.mask)

__all__ = ["NAME", "Mask", "PagedCache", "PagedLayer", "attention", "use_in_generate_batch"]

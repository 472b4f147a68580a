"""Hugging Face's flex attention, compiled with chosen options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lt_tiled._log import inform_once


def flex_attention(options: Mapping[str, Any] | None) -> str:
    """Register flex attention with options of ``torch.compile``, and return its ``attn_implementation``.

    Hugging Face's function compiles ``flex_attention`` without options, unless it is itself being compiled. So options
    apply to the whole function.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.masking_utils import flex_attention_mask

    inform_once("compile flex attention", "compiles flex attention at its first use, which can take minutes")
    if not options:
        return "flex_attention"
    name = f"lt_tiled_flex_{abs(hash(repr(sorted(options.items()))))}"
    AttentionInterface.register(name, torch.compile(flex_attention_forward, **options))
    AttentionMaskInterface.register(name, flex_attention_mask)
    return name

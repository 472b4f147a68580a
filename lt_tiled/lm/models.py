"""The parts of a Hugging Face causal model: configuration and adapters."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from lt_tiled._log import warn
from lt_tiled.strategies.deepspeed import not_sharded_yet


def require(package: str, install: str) -> None:
    """Raise ``ModuleNotFoundError`` with the remedy if an optional package is not installed."""
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"This needs the package {package}: pip install {install}.") from error


def make_config(fields: Mapping[str, Any]) -> Any:
    """Return the configuration of transformers with these fields."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**fields)
    default = type(config)()
    for key in fields:  # transformers accepts unknown ones
        if hasattr(config, key) and not hasattr(default, key):
            message = f"config: {type(config).__name__} has no key {key!r}: the model may ignore it."
            warn(message, once=message)
    return config


def make_lora_config(fields: Mapping[str, Any]) -> Any:
    """Return peft's configuration of LoRA with these fields."""
    require("peft", "peft")
    from peft import LoraConfig

    return LoraConfig(**{"task_type": "CAUSAL_LM", **fields})


def add_adapters(model: Any, lora_config: Any) -> Any:
    """Return the model with new LoRA adapters, which do not change its outputs yet."""
    from peft import get_peft_model

    with not_sharded_yet(model):  # before peft has set them to zero
        return get_peft_model(model, lora_config)

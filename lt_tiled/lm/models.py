"""The parts of a Hugging Face causal model: configuration and adapters, with checked arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import torch

from lt_tiled._log import warn
from lt_tiled.strategies.deepspeed import not_sharded_yet


def require(package: str, install: str) -> None:
    """Raise ``ModuleNotFoundError`` with the remedy if an optional package is not installed."""
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"This needs the package {package}: pip install {install}.") from error


@contextmanager
def refusing(message: str, kind: bool = False) -> Iterator[None]:
    """Raise ``ValueError`` with this message and the original one for any exception except out of memory.

    With ``kind``, the name of the original exception is added.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{message}: {type(error).__name__}: {error}" if kind else f"{message}: {error}") from error


def make_config(fields: Mapping[str, Any]) -> Any:
    """Return the configuration of transformers with these fields."""
    from transformers import AutoConfig

    with refusing("config"):  # architectures have their own checks
        config = AutoConfig.for_model(**fields)
    default = type(config)()
    for key in fields:  # transformers accepts unknown ones
        if hasattr(config, key) and not hasattr(default, key):
            message = f"config: {type(config).__name__} has no key {key!r}"
            if near := get_close_matches(key, dir(default), 1, 0.8):
                raise ValueError(f"{message}: did you mean {near[0]!r}?")
            warn(f"{message}: the model may ignore it.", once=message)
    return config


def make_lora_config(fields: Mapping[str, Any]) -> Any:
    """Return peft's configuration of LoRA with these fields."""
    require("peft", "peft")
    from peft import LoraConfig

    with refusing(f"lora={dict(fields)}"):
        return LoraConfig(**{"task_type": "CAUSAL_LM", **fields})


def add_adapters(model: Any, lora_config: Any) -> Any:
    """Return the model with new LoRA adapters, which do not change its outputs yet."""
    from peft import get_peft_model

    with not_sharded_yet(model):  # before peft has set them to zero
        return get_peft_model(model, lora_config)

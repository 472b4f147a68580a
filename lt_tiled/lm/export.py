"""``lt-tiled export``: write the model of a checkpoint as transformers loads it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lt_tiled.lm.causal import CausalLM
from lt_tiled.lm.documents import TOKENIZER
from lt_tiled.lm.models import refusing
from lt_tiled.lm.text import has_tokenizer, load_tokenizer


def export(checkpoint: str, output: str, merge: bool = False) -> None:
    """Write the model of a checkpoint of CausalLM, and its tokenizer, into a directory for ``from_pretrained``.

    Of a model with LoRA it writes the adapter, which refers to the model that it was trained on.

    Args:
        checkpoint: What a run of ``lt-tiled fit`` saved: a file, or the directory of FSDP, FSDP2 or DeepSpeed.
        output: A new directory.
        merge: Write one model with the adapter of LoRA in its weights.

    Raises:
        ValueError: If the checkpoint is not of CausalLM, or the directory is not empty.
    """
    if Path(output).exists() and (not Path(output).is_dir() or any(Path(output).iterdir())):
        raise ValueError(f"output={output!r} exists and is not empty: pass a new directory.")
    state = _load(checkpoint)
    arguments = {**state.get("hyper_parameters", {})}
    arguments.pop("_instantiator", None)
    name = arguments.pop("_class_path", "lt_tiled.lm.CausalLM")
    if "path" not in arguments or "config" not in arguments:
        raise ValueError(f"checkpoint={checkpoint!r} is of {name}: export is for lt_tiled.lm.CausalLM.")
    path, lora = arguments["path"], arguments.get("lora")
    if merge and lora is None:
        raise ValueError(f"merge=True needs a run with lora, and that of checkpoint={checkpoint!r} had none.")
    if lora is not None and path is None and not merge:
        raise ValueError(
            "An adapter refers to the model that it was trained on, and this one has no path: set --merge."
        )
    tokenizer, source = _load_tokenizer(state, path)
    arguments.update(attn_implementation="eager", loss=False)  # whatever attention this machine lacks
    with torch.device("meta"):
        module: CausalLM = instantiate_class((), {"class_path": name, "init_args": arguments})
        module.configure_model()
    model = module.model
    weights = {k.removeprefix("model."): v for k, v in state["state_dict"].items() if k.startswith("model.")}
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    if missing or unexpected:
        reason = f"lacks {missing[0]}" if missing else f"has {unexpected[0]}, which the model has not"
        raise ValueError(f"checkpoint={checkpoint!r} {reason}: save all weights, frozen ones too.")
    inner = model if lora is None else model.get_base_model()
    inner.tie_weights()
    if path is not None and (Path(path) / "generation_config.json").is_file():
        inner.generation_config = type(inner.generation_config).from_pretrained(path)
    if merge:
        model = model.merge_and_unload()
    elif lora is not None:
        model.peft_config["default"].base_model_name_or_path = str(Path(path).resolve())
    model.save_pretrained(output)
    if tokenizer is not None:
        tokenizer.save_pretrained(output)
    print(f"wrote {type(model).__name__} to {output}, and {source}")


def _load(checkpoint: str) -> Mapping[str, Any]:
    """Return the weights of a checkpoint, consolidated if it is sharded, and the arguments of its run."""
    folder = Path(checkpoint)
    if not folder.exists():
        raise ValueError(f"checkpoint={checkpoint!r} does not exist.")
    with refusing(f"checkpoint={checkpoint!r} cannot be loaded", kind=True):
        if folder.is_file():  # mmap: the state of the optimizer is not read
            return cast(Mapping[str, Any], torch.load(folder, map_location="cpu", weights_only=True, mmap=True))
        if not (folder / ".metadata").is_file():
            with tempfile.NamedTemporaryFile() as consolidated:
                return convert_zero_checkpoint_to_fp32_state_dict(folder, consolidated.name)
        reader = FileSystemReader(folder)
        tensors = {
            name: torch.empty(saved.size, dtype=saved.properties.dtype)
            for name, saved in reader.read_metadata().state_dict_metadata.items()
            if name.startswith(("model.", "state_dict.")) and isinstance(saved, TensorStorageMetadata)
        }  # FSDP says model, FSDP2 state_dict
        load(tensors, storage_reader=reader, no_dist=True)
        weights = {name.partition(".")[2]: weight for name, weight in tensors.items()}
        return {**torch.load(folder / "meta.pt", map_location="cpu", weights_only=True), "state_dict": weights}


def _load_tokenizer(state: Mapping[str, Any], path: str | None) -> tuple[Any, str]:
    """Return the tokenizer of the data or, if they have none, of the model, and where it is from."""
    data = state.get("datamodule_hyper_parameters", {})
    arguments = {name: data[name] for name in TOKENIZER if data.get(name)}
    if "tokenizer" not in arguments and path is not None and has_tokenizer(path):
        arguments["tokenizer"] = path
    if "tokenizer" not in arguments:
        return None, "no tokenizer, because the data had none"
    if not Path(arguments["tokenizer"]).is_dir():
        raise ValueError(
            f"The run had tokenizer={arguments['tokenizer']!r}, which is not a directory here: run export in the folder"
            " of the run."
        )
    return load_tokenizer(**arguments), f"the tokenizer of {arguments['tokenizer']}"

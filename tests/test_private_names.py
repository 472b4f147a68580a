"""Canaries: each private name of torch, Lightning, transformers and DeepSpeed in the package still is there.

What the names do is tested with what the package does with them. Names that are imported need no canary.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch._inductor.config
import torch.utils.checkpoint
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import lt_tiled
from tests.models import tiny_llama


def fit_loop() -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(accelerator="cpu", **quiet).fit_loop


FLASH = "_scaled_dot_product_flash_attention_for_cpu"
ATTRIBUTES: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch, "_C _inductor _ops _subclasses"),
    (lambda: torch._C, "_SetExcludeDispatchKeyGuard _are_functorch_transforms_active _autograd"),
    (lambda: torch._C, "_current_autograd_node _current_graph_task_id"),
    (lambda: torch._C, "DisableTorchFunctionSubclass"),
    (lambda: torch._C.DispatchKey, "ADInplaceOrView"),
    (lambda: torch._C._autograd, "_get_sequence_nr _top_saved_tensors_default_hooks"),
    (lambda: torch.Tensor, "_base _version _make_wrapper_subclass"),
    (lambda: torch.ones(1).untyped_storage(), "_cdata"),
    (lambda: torch.ones(1, requires_grad=True).exp().grad_fn, "_sequence_nr"),
    (lambda: torch.autograd.Variable, "_execution_engine"),
    (lambda: forward_ad, "_current_level"),
    (lambda: torch.utils, "_python_dispatch _pytree"),
    (lambda: torch.utils.checkpoint, "_allowed_determinism_checks_to_fns _enable_checkpoint_early_stop"),
    (lambda: torch.ops.aten, f"_grouped_mm _local_scalar_dense {FLASH} {FLASH}_backward"),
    (lambda: torch.ops.aten.mm.default, "_overloadpacket _schema"),
    (lambda: torch.ops.c10d, "_reduce_scatter_base_"),
    (lambda: torch.ops.fsdp, "all_gather_copy_in split_with_sizes_copy"),
    (lambda: nn.utils.parametrize, "_cache_enabled"),
    (lambda: nn.Linear(1, 1), "_backward_hooks _backward_pre_hooks _buffers _forward_hooks _forward_pre_hooks"),
    (lambda: nn.Linear(1, 1), "_modules _parameters"),
    (lambda: nn.TransformerEncoderLayer, "_ff_block"),
    (lambda: torch.compile(nn.Linear(1, 1)), "_orig_mod"),
    (lambda: checkpoint_wrapper(nn.Linear(1, 1)), "_checkpoint_wrapped_module"),
    (lambda: fit_loop(), "_combined_loader _data_source"),
    (lambda: tiny_llama().config, "_attn_implementation"),
]
"""Owners of attributes, and their names."""

CODE = {
    "accelerate.accelerator": "_is_accelerate_prepared",
    "deepspeed.ops": "__compatible_ops__",
    "deepspeed.utils.z3_leaf_module": "_z3_leaf",
    "lightning.fabric.strategies.fsdp": "_fsdp_kwargs _state_dict_type",
    "lightning.pytorch.cli": "_get",
    "lightning.pytorch.strategies.ddp": "_ddp_kwargs",
    "lightning.pytorch.strategies.fsdp": "_setup_model _state_dict_type",
    "lightning.pytorch.strategies.model_parallel": "_data_parallel_size _tensor_parallel_size",
    "lightning.pytorch.strategies.single_device": "_root_device",
    "torch.distributed.fsdp._common_utils": "_fsdp_wrapped_module",
    "torch.utils.checkpoint": "_checkpoint_hook _recomputation_hook",
    "transformers.modeling_utils": "_loss_function",
    "transformers.utils.output_capturing": "_active_collector",
    "transformers.models.llama.modeling_llama": "eager_attention_forward",
}
"""Modules whose code has names that instances get later, or that a subclass here overrides."""


@pytest.mark.parametrize(("owner", "names"), ATTRIBUTES, ids=[names for _, names in ATTRIBUTES])
def test_attributes(owner: Callable[[], Any], names: str) -> None:
    """The names are attributes where the package finds them."""
    found = owner()
    assert [name for name in names.split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("module", CODE)
def test_names_in_code(module: str) -> None:
    """The code that sets or reads the names still does."""
    pytest.importorskip(module.partition(".")[0])
    code = inspect.getsource(importlib.import_module(module))
    assert [name for name in CODE[module].split() if not re.search(rf"\b{name}\b", code)] == []


def test_each_private_name_has_a_canary() -> None:
    """The private attributes that the package uses and does not define itself, and no others, are in these tables."""
    text = "\n".join(path.read_text() for path in Path(lt_tiled.__file__).parent.rglob("*.py"))
    imported = " ".join(re.findall(r"^ *(?:from|import) .*(?:\([^)]*\))?", text, re.MULTILINE))
    defined = re.findall(r"\b(?:def|class) (_\w+)|\bself\.(_\w+)|^ *(_\w+)(?:: .*)? = ", text, re.MULTILINE)
    own = {name for names in defined for name in names} | set(re.findall(r"\b_\w+", imported))
    used = {name for name in re.findall(r"[.\"'](_[A-Za-z]\w*)", text) if not name.startswith("_lt_tiled")}
    tested = " ".join([*(names for _, names in ATTRIBUTES), *CODE.values()]).split()
    assert used - own - {*tested} == set()
    assert [name for name in tested if not re.search(rf"\b{name}\b", text)] == []

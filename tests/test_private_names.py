"""Canaries: each private name of torch, Lightning, transformers and DeepSpeed in the package still is there.

What the names do is tested with what the package does with them. Where nothing else would fail, it is checked here.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch._inductor.config
import torch.distributed.fsdp._common_utils
import torch.distributed.fsdp.fully_sharded_data_parallel
import torch.utils.checkpoint
import torchmetrics
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch._dynamo.comptime import comptime
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers.utils.output_capturing import _active_collector

import lt_tiled
from lt_tiled.sequence_parallel.states import RULES
from tests.models import tiny_llama


def hooked(register: str, name: str, **options: bool) -> Callable[[], Any]:
    def check() -> bool:
        linear = nn.Linear(1, 1)
        getattr(linear, register)(lambda *_: None, **options)
        return len(getattr(linear, name)) == 1

    return check


def checkpoint_hook() -> bool:
    """Whether the hooks of torch's checkpoint can be told from others by their names."""
    names: list[str] = []

    def look(x: Tensor) -> Tensor:
        names.append(torch._C._autograd._top_saved_tensors_default_hooks(True)[0].__qualname__)
        return x.sin()

    torch.utils.checkpoint.checkpoint(look, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    return names[0].startswith("_checkpoint_hook") and names[1].startswith("_recomputation_hook")


def loss_function() -> bool:
    """Whether transformers keeps the loss function that is set on a model under this name."""
    model = tiny_llama()
    model.loss_function = loss_function
    return vars(model)["_loss_function"] is loss_function


def rule(name: str) -> bool:
    """Whether a function of state layers in transformers has the arguments that are exchanged, and is a global."""
    families = {"torch_chunk_gated_delta_rule": "qwen3_next", "chunk_kimi_delta_attention": "kimi_linear"}
    family = families.get(name, "mamba2")
    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    parameters, dims = list(inspect.signature(getattr(file, name)).parameters), list(RULES[name].dims)
    return parameters[:5] == dims[:5] and set(dims) - {"z"} <= set(parameters)


def metric_state() -> bool:
    metric = torchmetrics.MeanMetric()
    metric.update(1.0)
    before = (metric._update_count, metric._computed)
    return before == (1, None) and float(metric.compute()) == 1.0 == float(metric._computed)


def backend_of_the_caller() -> bool:
    """Whether traced code can find the backend, and what it compiles shares code with others of that backend."""
    found: list[Any] = []

    def note(context: Any) -> None:
        found.append(context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.compiler_fn)

    def traced(x: Tensor) -> Tensor:
        comptime(note)
        return x + 1

    def backend(graph: Any, example: Any) -> Any:
        found.append(graph)
        return graph.forward

    torch.compile(traced, backend=backend)(torch.ones(1))
    torch._dynamo.optimize(found[0])(traced)(torch.ones(1))
    return len(found) == 2


def trainer() -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


FLASH = "_scaled_dot_product_flash_attention_for_cpu"
IN_TORCH = {
    "_are_functorch_transforms_active": "_C",
    "_BatchNorm": "nn.modules.batchnorm",
    "_C": "",
    "_ConvNd": "nn.modules.conv",
    "_NormBase": "nn.modules.batchnorm",
    "_autograd": "_C",
    "_base": "Tensor",
    "_cur_sdpa_kernel_backends": "nn.attention",
    "_current_autograd_node": "_C",
    "_current_graph_task_id": "_C",
    "_cache_enabled": "nn.utils.parametrize",
    "_current_level": "autograd.forward_ad",
    "_disable_current_modes": "utils._python_dispatch",
    "_enable_checkpoint_early_stop": "utils.checkpoint",
    "_engine_run_backward": "autograd.graph",
    "_get_current_dispatch_mode_stack": "utils._python_dispatch",
    "_get_sequence_nr": "_C._autograd",
    "_grouped_mm": "ops.aten",
    "_inductor": "",
    "_local_scalar_dense": "ops.aten",
    "_make_wrapper_subclass": "Tensor",
    "_python_dispatch": "utils",
    "_pytree": "utils",
    FLASH: "ops.aten",
    f"{FLASH}_backward": "ops.aten",
    "_subclasses": "",
    "_SetExcludeDispatchKeyGuard": "_C",
    "_ops": "",
    "_allowed_determinism_checks_to_fns": "utils.checkpoint",
    "_top_saved_tensors_default_hooks": "_C._autograd",
    "_version": "Tensor",
    "_post_accumulate_grad_hooks": "Tensor",
    "_execution_engine": "autograd.Variable",
}
"""Where in torch the names are attributes."""

SET_BY: dict[str, type] = {
    "_convert_stateful_objects_in_state": FabricFSDP,
    "_data_parallel_size": ModelParallelStrategy,
    "_dump_config": LightningCLI,
    "_get": LightningCLI,
    "_root_device": SingleDeviceStrategy,
    "_setup_model": FSDPStrategy,
    "_state_dict_type": FSDPStrategy,
    "_tensor_parallel_size": ModelParallelStrategy,
}
"""The classes that set or define the names, which a subclass here reads, sets or overrides."""

WRITTEN_IN = {
    "_is_accelerate_prepared": "accelerate.accelerator",
    "_z3_leaf": "deepspeed.utils.z3_leaf_module",
    "__compatible_ops__": "deepspeed.ops",
    "eager_attention_forward": "transformers.models.llama.modeling_llama",
}
"""The modules whose code has the names."""

CANARIES: dict[str, Callable[[], Any]] = {
    # torch
    "_backward_hooks": hooked("register_full_backward_hook", "_backward_hooks"),
    "_backward_pre_hooks": hooked("register_full_backward_pre_hook", "_backward_pre_hooks"),
    "_buffers": lambda: set(nn.BatchNorm1d(1)._buffers) == {"running_mean", "running_var", "num_batches_tracked"},
    "_cdata": lambda: (x := torch.ones(2)).untyped_storage()._cdata == x[1:].untyped_storage()._cdata,
    "_checkpoint_wrapped_module": lambda: hasattr(checkpoint_wrapper(nn.Linear(1, 1)), "_checkpoint_wrapped_module"),
    "_dynamo": backend_of_the_caller,
    "_i_will_not_complain_if_bc_breaks_InstructionTranslator": backend_of_the_caller,
    "_ff_block": lambda: all(hasattr(c, "_ff_block") for c in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)),
    "_forward_hooks": hooked("register_forward_hook", "_forward_hooks"),
    "_forward_pre_hooks": hooked("register_forward_pre_hook", "_forward_pre_hooks"),
    "_fsdp_wrapped_module": lambda: torch.distributed.fsdp._common_utils.FSDP_WRAPPED_MODULE == "_fsdp_wrapped_module",
    "_modules": lambda: set(nn.Sequential(nn.Linear(1, 1))._modules) == {"0"},
    "_orig_mod": lambda: (m := nn.Linear(1, 1)) is torch.compile(m)._modules["_orig_mod"],
    "_overloadpacket": lambda: torch.ops.aten.mm.default._overloadpacket is torch.ops.aten.mm,
    "_parameters": lambda: set(nn.Linear(1, 1)._parameters) == {"weight", "bias"},
    "_schema": lambda: len(torch.ops.aten.mm.default._schema.arguments) == 2,
    "_sequence_nr": lambda: (torch.ones(1, requires_grad=True) * 2).grad_fn._sequence_nr,
    "_checkpoint_hook": checkpoint_hook,
    "_recomputation_hook": checkpoint_hook,
    # Lightning
    "_batches_that_stepped": lambda: trainer().fit_loop.epoch_loop._batches_that_stepped == 0,
    "_combined_loader": lambda: hasattr(trainer().fit_loop, "_combined_loader"),
    "_data_source": lambda: hasattr(trainer().fit_loop, "_data_source"),
    "_ddp_kwargs": lambda: DDPStrategy(bucket_cap_mb=1)._ddp_kwargs == {"bucket_cap_mb": 1},
    "_fsdp_kwargs": lambda: "limit_all_gathers" in FabricFSDP(limit_all_gathers=False)._fsdp_kwargs,
    "_init_optimizers_and_lr_schedulers": lambda: _init_optimizers_and_lr_schedulers,
    # transformers and torchmetrics
    "_active_collector": lambda: _active_collector.get() is None,
    **{name: lambda name=name: rule(name) for name in RULES},
    "_attn_implementation": lambda: tiny_llama().config._attn_implementation == "sdpa",
    **{
        name: lambda name=name: getattr(type(tiny_llama()), name) is True
        for name in ("_supports_flash_attn", "_supports_flex_attn", "_supports_sdpa")
    },
    "_loss_function": loss_function,
    "_computed": metric_state,
    "_update_count": metric_state,
}


@pytest.mark.parametrize("name", CANARIES)
def test_canary(name: str) -> None:
    """The name exists and behaves as the package expects."""
    assert CANARIES[name]()


@pytest.mark.parametrize("name", IN_TORCH)
def test_name_in_torch(name: str) -> None:
    """The name is an attribute where the package finds it."""
    where = IN_TORCH[name]
    assert hasattr(attrgetter(where)(torch) if where else torch, name)


@pytest.mark.parametrize("name", SET_BY)
def test_name_of_a_class(name: str) -> None:
    """A base class still has the name that a subclass here uses."""
    assert any(name in names_in(base) for base in SET_BY[name].__mro__)


@pytest.mark.parametrize("name", WRITTEN_IN)
def test_name_in_code(name: str) -> None:
    """The code that sets or reads the name still does."""
    module = pytest.importorskip(WRITTEN_IN[name])
    assert re.search(rf"\b{name}\b", inspect.getsource(module))


@pytest.mark.slow
def test_each_private_name_has_a_canary() -> None:
    """A private name in the package that the package does not define itself is in a table of these."""
    modules = [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(lt_tiled.__path__, "lt_tiled.")
        if not info.name.endswith("__main__")
    ]
    tested = CANARIES.keys() | IN_TORCH.keys() | SET_BY.keys() | WRITTEN_IN.keys()
    missing = {name: module.__name__ for module in modules for name in foreign_names(module) if name not in tested}
    assert missing == {}


def foreign_names(module: ModuleType) -> set[str]:
    """The private names in a module that it does not define, and those that its classes share with foreign bases."""
    own, used = set(), set()
    tree = ast.parse(inspect.getsource(module))
    formatted = {id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in n.values}
    for n in ast.walk(tree):
        if isinstance(n, ast.FunctionDef | ast.ClassDef):
            own.add(n.name)
        elif isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
            own.add(n.id)
        elif isinstance(n, ast.arg):
            own.add(n.arg)
        elif isinstance(n, ast.ImportFrom):
            ours = (n.module or "").startswith("lt_tiled")
            (own if ours else used).update((n.module or "").split("."), (alias.name for alias in n.names))
        elif isinstance(n, ast.Attribute):
            stored = isinstance(n.ctx, ast.Store) and isinstance(n.value, ast.Name) and n.value.id == "self"
            (own if stored else used).add(n.attr)
        elif isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in formatted:
            used.update(n.value.split("."))
    names = {name for name in used - own if re.fullmatch(r"_[A-Za-z]\w*", name) and "_lt_tiled" not in name}
    for cls in vars(module).values():
        if inspect.isclass(cls) and cls.__module__ == module.__name__:
            bases: tuple[list[set[str]], list[set[str]]] = ([], [])
            for base in cls.__mro__:
                bases[base.__module__.startswith("lt_tiled")].append(names_in(base))
            theirs, ours = (set().union(*found) for found in bases)
            names = (names - ours) | (theirs & ours)
    return names


@functools.cache
def names_in(cls: type) -> set[str]:
    """The private names that a class sets on itself or defines."""
    with suppress(OSError, TypeError):
        return {a or b for a, b in re.findall(r"\bself\.(_[a-z]\w*)|\bdef (_[a-z]\w*)", inspect.getsource(cls))}
    return set()

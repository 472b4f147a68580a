"""Canaries: each private name of torch, Lightning, transformers and DeepSpeed in the package still is what it was."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.fsdp._common_utils
import torch.distributed.fsdp.fully_sharded_data_parallel
import torchmetrics
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _python_dispatch, _pytree
from torch.utils import checkpoint as activation_checkpointing

import lt_tiled
from lt_tiled.sequence_parallel.states import RULES
from tests.models import tiny_llama


def imports(module: str, name: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(module), name) is not None


def sets(cls: type, name: str) -> Callable[[], Any]:
    """Whether a class still sets or defines the name, which a subclass here reads, sets or overrides."""
    return lambda: any(name in names_in(base) for base in cls.__mro__)


def hooked(register: str, name: str, **options: bool) -> Callable[[], Any]:
    def check() -> bool:
        linear = nn.Linear(1, 1)
        getattr(linear, register)(lambda *_: None, **options)
        return len(getattr(linear, name)) == 1

    return check


def post_accumulate_hooks() -> bool:
    weight = nn.Parameter(torch.ones(1))
    before = weight._post_accumulate_grad_hooks
    weight.register_post_accumulate_grad_hook(print)
    hooks: Any = weight._post_accumulate_grad_hooks
    return before is None and list(hooks.values()) == [print] and weight._post_accumulate_grad_hooks is hooks


def end_of_backward() -> bool:
    """Whether what is queued in a backward pass runs at its end, and raises there."""
    x = torch.ones(1, requires_grad=True)

    def end() -> None:
        raise ArithmeticError(str(x.grad is not None))

    y = x * 2
    y.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(end))
    with pytest.raises(ArithmeticError, match="True"):
        y.backward()
    return True


def keeps_graph() -> bool:
    seen: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    x.register_hook(lambda _: seen.append(torch._C._autograd._get_current_graph_task_keep_graph()))
    y.backward(retain_graph=True)
    y.backward()
    return seen == [True, False]


def checkpoint_hook() -> bool:
    """Whether the hooks of torch's checkpoint can be told from others by their names."""
    names: list[str] = []

    def look(x: Tensor) -> Tensor:
        names.append(torch._C._autograd._top_saved_tensors_default_hooks(True)[0].__qualname__)
        return x.sin()

    torch.utils.checkpoint.checkpoint(look, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    return names[0].startswith("_checkpoint_hook") and names[1].startswith("_recomputation_hook")


def forward_gradients_are_off_in_functions_alone() -> bool:
    found = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            found.append(torch._C._is_fwd_grad_enabled())
            return x

    Look.apply(torch.ones(1))
    with torch.no_grad():
        return [*found, torch._C._is_fwd_grad_enabled()] == [False, True]


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


def saved_tensors_hooks() -> bool:
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks
    with torch.autograd.graph.saved_tensors_hooks(pack := lambda t: t, lambda t: t):
        inside = top(True)[0] is pack
    return inside and top(True) is None


def node() -> Any:
    return (torch.ones(1, requires_grad=True) * 2).grad_fn


def current_node() -> bool:
    seen: list[Any] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(torch._C._current_autograd_node()))
    y.sum().backward()
    return torch._C._current_autograd_node() is None and len(seen) == 1


def current_graph_task() -> bool:
    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(torch._C._current_graph_task_id()))
    for _ in range(2):
        (x * 2).backward()
    return torch._C._current_graph_task_id() == -1 and len(set(seen)) == 2


def backward_of_the_engine() -> bool:
    from torch.autograd.graph import _engine_run_backward

    x = torch.ones(2, requires_grad=True)
    found = _engine_run_backward(
        (x * 3,), (torch.full((2,), 2.0),), False, False, (x,), allow_unreachable=True, accumulate_grad=False
    )
    return x.grad is None and found[0].tolist() == [6.0, 6.0]


def unused_torch_function() -> bool:
    class Plain(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

    return type(torch.ones(1).as_subclass(Plain) + 1) is Tensor


def version() -> bool:
    x = torch.ones(1)
    return (x._version, x.add_(1)._version) == (0, 1)


def transforms_active() -> bool:
    active = torch._C._are_functorch_transforms_active
    return not active() and bool(torch.func.vmap(lambda x: x * active())(torch.ones(2)).all())


def cache_of_parametrizations() -> bool:
    with nn.utils.parametrize.cached():
        inside = nn.utils.parametrize._cache_enabled
    return inside == 1 and nn.utils.parametrize._cache_enabled == 0


def level_of_dual_numbers() -> bool:
    before = torch.autograd.forward_ad._current_level
    with torch.autograd.forward_ad.dual_level():
        return before == -1 and torch.autograd.forward_ad._current_level == 0


def modes_disabled() -> bool:
    with FakeTensorMode(), _python_dispatch._disable_current_modes():
        return type(torch.ones(1)) is Tensor


def stack_of_modes() -> bool:
    with FakeTensorMode() as mode:
        return _python_dispatch._get_current_dispatch_mode_stack() == [mode]


def fake() -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    with FakeTensorMode():
        return type(torch.ones(1)) is FakeTensor


def metric_state() -> bool:
    metric = torchmetrics.MeanMetric()
    metric.update(1.0)
    before = (metric._update_count, metric._computed)
    return before == (1, None) and float(metric.compute()) == 1.0 == float(metric._computed)


def shares_versions_below_autograd() -> bool:
    """Whether a tensor that a dispatch mode detaches can share the version of the other one."""
    kept = []

    class Mode(_python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                kept.append(output.detach())
            return output

    with Mode():
        y = torch.ones(1).sin()
    y.add_(1)
    return bool(kept[-1]._version == 1)


def wrapped_by_checkpoint() -> bool:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return hasattr(checkpoint_wrapper(nn.Linear(1, 1)), "_checkpoint_wrapped_module")


def compatible_ops() -> bool:
    deepspeed = pytest.importorskip("deepspeed")
    return "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__


def loops(name: str) -> Callable[[], Any]:
    return lambda: hasattr(trainer().fit_loop, name)


def trainer() -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


def compiles_below_patches() -> bool:
    eval_frame = torch._C._dynamo.eval_frame
    skipped = torch._dynamo.decorators.skip(lambda: None)
    torch._dynamo.eval_frame.skip_code((lambda: None).__code__)
    return eval_frame.set_eval_frame(None) is eval_frame.get_eval_frame_callback() and skipped._torchdynamo_disable


aten = torch.ops.aten
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
CANARIES: dict[str, Callable[[], Any]] = {
    "_are_functorch_transforms_active": transforms_active,
    # torch
    "_BatchNorm": lambda: issubclass(nn.BatchNorm1d, nn.modules.batchnorm._BatchNorm),
    "_C": lambda: torch._C is not None,
    "_ConvNd": lambda: issubclass(nn.Conv1d, nn.modules.conv._ConvNd),
    "_NormBase": lambda: issubclass(nn.InstanceNorm1d, nn.modules.batchnorm._NormBase),
    "_autograd": lambda: torch._C._autograd is not None,
    "_backward_hooks": hooked("register_full_backward_hook", "_backward_hooks"),
    "_backward_pre_hooks": hooked("register_full_backward_pre_hook", "_backward_pre_hooks"),
    "_base": lambda: (x := torch.ones(2))[1:]._base is x,
    "_buffers": lambda: set(nn.BatchNorm1d(1)._buffers) == {"running_mean", "running_var", "num_batches_tracked"},
    "_cdata": lambda: (x := torch.ones(2)).untyped_storage()._cdata == x[1:].untyped_storage()._cdata,
    "_checkpoint_wrapped_module": wrapped_by_checkpoint,
    "_current_autograd_node": current_node,
    "_current_graph_task_id": current_graph_task,
    "_cache_enabled": cache_of_parametrizations,
    "_current_level": level_of_dual_numbers,
    "_disable_current_modes": modes_disabled,
    "_disabled_torch_function_impl": unused_torch_function,
    "_engine_run_backward": backward_of_the_engine,
    "_dynamo": compiles_below_patches,
    "_torchdynamo_disable_msg": lambda: "_torchdynamo_disable_msg" in source("torch._dynamo.symbolic_convert"),
    "_ff_block": lambda: all(hasattr(c, "_ff_block") for c in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)),
    "_flat_param": lambda: torch.distributed.fsdp.fully_sharded_data_parallel.FLAT_PARAM == "_flat_param",
    "_forward_hooks": hooked("register_forward_hook", "_forward_hooks"),
    "_forward_hooks_with_kwargs": hooked("register_forward_hook", "_forward_hooks_with_kwargs", with_kwargs=True),
    "_forward_pre_hooks": hooked("register_forward_pre_hook", "_forward_pre_hooks"),
    "_forward_pre_hooks_with_kwargs": hooked(
        "register_forward_pre_hook", "_forward_pre_hooks_with_kwargs", with_kwargs=True
    ),
    "_fsdp_wrapped_module": lambda: torch.distributed.fsdp._common_utils.FSDP_WRAPPED_MODULE == "_fsdp_wrapped_module",
    "_get_current_dispatch_mode_stack": stack_of_modes,
    "_get_sequence_nr": lambda: isinstance(torch._C._autograd._get_sequence_nr(), int),
    "_global_forward_hooks": lambda: isinstance(nn.modules.module._global_forward_hooks, dict),
    "_grouped_mm": lambda: aten._grouped_mm.default is not None,
    "_inductor": lambda: importlib.import_module("torch._inductor.config").patch(fallback_random=True),
    "_local_scalar_dense": lambda: aten._local_scalar_dense.default is not None,
    "_make_wrapper_subclass": lambda: callable(Tensor._make_wrapper_subclass),
    "_modules": lambda: set(nn.Sequential(nn.Linear(1, 1))._modules) == {"0"},
    "_orig_mod": lambda: (m := nn.Linear(1, 1)) is torch.compile(m)._modules["_orig_mod"],
    "_unsafe_view": lambda: not aten._unsafe_view.default(torch.ones(2).view(2, 1), [2, 1])._is_view(),
    "_overloadpacket": lambda: aten.mm.default._overloadpacket is aten.mm,
    "_parameters": lambda: set(nn.Linear(1, 1)._parameters) == {"weight", "bias"},
    "_python_dispatch": imports("torch.utils._python_dispatch", "is_traceable_wrapper_subclass"),
    "_pytree": lambda: _pytree.tree_leaves(({"a": 1}, [2])) == [1, 2],
    FLASH: lambda: hasattr(aten, FLASH),
    f"{FLASH}_backward": lambda: hasattr(aten, f"{FLASH}_backward"),
    "_schema": lambda: len(aten.mm.default._schema.arguments) == 2,
    "_sequence_nr": lambda: isinstance(node()._sequence_nr(), int),
    "_subclasses": fake,
    "_checkpoint_hook": checkpoint_hook,
    "_recomputation_hook": checkpoint_hook,
    "_SetExcludeDispatchKeyGuard": shares_versions_below_autograd,
    "_ops": lambda: all(
        hasattr(torch._ops, f"{name}") for name in ("HigherOrderOperator", "OpOverload", "OpOverloadPacket")
    ),
    "_allowed_determinism_checks_to_fns": lambda: (
        "default" in activation_checkpointing._allowed_determinism_checks_to_fns
    ),
    "_get_current_graph_task_keep_graph": keeps_graph,
    "_top_saved_tensors_default_hooks": saved_tensors_hooks,
    "_version": version,
    # Lightning
    "_activation_checkpointing_kwargs": sets(FSDPStrategy, "_activation_checkpointing_kwargs"),
    "_batches_that_stepped": lambda: trainer().fit_loop.epoch_loop._batches_that_stepped == 0,
    **{
        name: lambda name=name: f'"{name}"' in source("lightning.pytorch.cli")
        for name in ("_class_path", "_instantiator")
    },
    "_combined_loader": loops("_combined_loader"),
    "_convert_stateful_objects_in_state": sets(FabricFSDP, "_convert_stateful_objects_in_state"),
    "_data_parallel_size": sets(ModelParallelStrategy, "_data_parallel_size"),
    "_data_source": loops("_data_source"),
    "_ddp_kwargs": lambda: DDPStrategy(bucket_cap_mb=1)._ddp_kwargs == {"bucket_cap_mb": 1},
    "_is_fwd_grad_enabled": forward_gradients_are_off_in_functions_alone,
    "_distributed_is_initialized": imports("lightning.fabric.utilities.distributed", "_distributed_is_initialized"),
    "_dump_config": sets(LightningCLI, "_dump_config"),
    "_fsdp_kwargs": lambda: "limit_all_gathers" in FabricFSDP(limit_all_gathers=False)._fsdp_kwargs,
    "_get": sets(LightningCLI, "_get"),
    "_init_optimizers_and_lr_schedulers": imports(
        "lightning.pytorch.core.optimizer", "_init_optimizers_and_lr_schedulers"
    ),
    "_loggers": lambda: trainer()._loggers == [],
    "_parse_ckpt_path": sets(LightningCLI, "_parse_ckpt_path"),
    "_parallelize_fn": sets(
        importlib.import_module("lightning.fabric.strategies").ModelParallelStrategy, "_parallelize_fn"
    ),
    "_root_device": sets(SingleDeviceStrategy, "_root_device"),
    "_setup_model": sets(FSDPStrategy, "_setup_model"),
    "_state_dict_type": sets(FSDPStrategy, "_state_dict_type"),
    "_tensor_parallel_size": sets(ModelParallelStrategy, "_tensor_parallel_size"),
    # torchmetrics, transformers, DeepSpeed
    "_active_collector": lambda: (
        importlib.import_module("transformers.utils.output_capturing")._active_collector.get() is None
    ),
    **{name: lambda name=name: rule(name) for name in RULES},
    "eager_attention_forward": lambda: imports("transformers.models.llama.modeling_llama", "eager_attention_forward")(),
    "_attn_implementation": lambda: tiny_llama().config._attn_implementation == "sdpa",
    **{
        name: lambda name=name: getattr(type(tiny_llama()), name) is True
        for name in ("_supports_flash_attn", "_supports_flex_attn", "_supports_sdpa")
    },
    "_is_stateful": lambda: tiny_llama()._is_stateful is False,
    "_loss_function": loss_function,
    "_can_checkpoint_with_cache": lambda: "_can_checkpoint_with_cache" in source("transformers.modeling_layers"),
    "_computed": metric_state,
    "_update_count": metric_state,
    "__compatible_ops__": compatible_ops,
    "_fsdp_flattened": lambda: torch.distributed.fsdp._common_utils.FSDP_FLATTENED == "_fsdp_flattened",
    "_is_accelerate_prepared": lambda: "_is_accelerate_prepared" in source("accelerate.accelerator"),
    "_z3_leaf": lambda: "hasattr(model, '_z3_leaf') and model._z3_leaf" in source("deepspeed.utils.z3_leaf_module"),
    "_post_accumulate_grad_hooks": post_accumulate_hooks,
    "_execution_engine": end_of_backward,
    "_external_params": lambda: "module._external_params = {}" in source("deepspeed.runtime.zero.partition_parameters"),
}


@pytest.mark.parametrize("name", CANARIES)
def test_canary(name: str) -> None:
    """The name exists and behaves as the package expects."""
    assert CANARIES[name]()


@pytest.mark.slow
def test_each_private_name_has_a_canary() -> None:
    """A private name in the package that the package does not define itself is in ``CANARIES``."""
    modules = [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(lt_tiled.__path__, "lt_tiled.")
        if not info.name.endswith("__main__")
    ]
    missing = {name: module.__name__ for module in modules for name in foreign_names(module) if name not in CANARIES}
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


def source(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))

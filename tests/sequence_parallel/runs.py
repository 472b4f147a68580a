"""What ranks run: a step whole on each of them, and the same step shared."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import lt_tiled
from lt_tiled import ActivationCheckpointing, SequenceParallel
from lt_tiled.errors import NothingFoundError
from lt_tiled.sequence_parallel import agreement, exchange
from lt_tiled.sequence_parallel.groups import Groups
from lt_tiled.sequence_parallel.self_check import checking
from tests import second_device
from tests.meters import peak_bytes
from tests.parity import spread
from tests.sequence_parallel.models import CASES, causal, ids


def value_of(output: Any) -> Tensor:
    """The loss of an output, or a scalar that depends on all of its logits."""
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else spread(output)
    return output.loss if output.get("loss") is not None else spread(output.logits)


def step(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The loss and all gradients, averaged over all ranks as engines do."""
    model.zero_grad(set_to_none=True)
    value = value_of(model(**inputs))
    value.backward()
    found = {"loss": value.detach().clone()}
    for name, weight in model.named_parameters():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        dist.all_reduce(gradient)
        found[name] = gradient / dist.get_world_size()
    return found


def worst(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """The greatest error relative to the norm; of a gradient without one, relative to the greatest."""
    largest = max(float(t.norm()) for t in true.values())
    return max(float((found[n] - true[n]).norm()) / max(float(true[n].norm()), 1e-3 * largest) for n in true)


def errors(
    names: list[str],
    size: int,
    policies: dict[str, Any] | None = None,
    device: str = "cpu",
) -> dict[str, float]:
    """The errors of these cases, where groups of ``size`` ranks share the sequences of their own.

    Losses of transformers are computed in tiles in both, because its own loss function rounds to float32.
    """
    group = Groups.of_size(size).group
    found = {}
    for name in names:
        case = CASES[name]
        model = case.build().to(device)
        inputs = tree_map_only(Tensor, lambda t: t.to(device), case.inputs(seed=dist.get_rank() // size))
        loss = {"loss": hasattr(model, "loss_function")}
        reference = copy.deepcopy(model)
        if loss["loss"]:
            lt_tiled.prepare(reference, **loss)
        true = step(reference, inputs)
        policy = SequenceParallel(size, targets=case.targets)
        with lt_tiled.prepare(model, sequence_parallel=policy, group=group, **loss, **(policies or {})):
            found[name] = worst(step(model, inputs), true)
    return found


def errors_on_second(names: list[str], policies: dict[str, Any]) -> dict[str, float]:
    """The same for groups of two ranks on the device of ``tests/second_device.py``."""
    with second_device.attached():
        return errors(names, 2, policies, second_device.NAME)


def against_whole(model: nn.Module, inputs: dict[str, Any], **options: Any) -> tuple[float, int, str]:
    """The error of a step whose sequences all ranks share, its exchanges, and the message if it is refused."""
    reference, policies, size = copy.deepcopy(model), {"loss": True}, dist.get_world_size()
    try:
        lt_tiled.prepare(reference, loss=True)
    except NothingFoundError:
        policies = {}
    true = step(reference, inputs)
    exchanges, to_heads = 0, exchange.to_heads

    def counted(state: Any, tensors: Any) -> Any:
        nonlocal exchanges
        exchanges += checking() is None
        return to_heads(state, tensors)

    exchange.to_heads = counted
    try:
        with lt_tiled.prepare(model, sequence_parallel=SequenceParallel(size, **options), **policies):
            return worst(step(model, inputs), true), exchanges, ""
    except ValueError as error:
        return 0.0, 0, str(error)
    finally:
        exchange.to_heads = to_heads


class Counts(TorchDispatchMode):
    """Counts collectives of the package, calls of attention, and reads of a tensor's values on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "lt_tiled":
            self.found[name] += 1
        self.found["reads"] += name in ("_local_scalar_dense", "nonzero")
        self.found["attention"] += "attention" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


def _causal(layers: int, keep: Any) -> tuple[Any, Any, dict[str, Any]]:
    group = Groups.of_size(2).group
    model = causal("llama", num_hidden_layers=layers)()
    policies = {"activation_checkpointing": ActivationCheckpointing(keep=keep), "loss": True}
    policy = SequenceParallel(2, self_check=False)
    prepared = lt_tiled.prepare(model, sequence_parallel=policy, group=group, **policies)
    return prepared, model, CASES["llama"].inputs()


def collectives(layers: int, keep: Any, attention: bool = False) -> dict[str, int]:
    """The collectives of one checkpointed step of a causal model; with ``attention`` the calls of attention too."""
    prepared, model, inputs = _causal(layers, keep)
    with prepared, Counts() as counts:
        model(**inputs).loss.backward()
    return {
        name: count
        for name, count in counts.found.items()
        if count and name not in ("reads", *([] if attention else ["attention"]))
    }


def reads(name: str) -> list[int]:
    """How often a step reads a value of a tensor on the host, without sequence parallelism and with it.

    The comparison of batches, which reads a number for each tensor of a batch, is left out.
    """
    found = []
    same, agreement._is_same = agreement._is_same, lambda *_: True
    hashed, agreement._hash = agreement._hash, lambda _: 0
    for size in (1, 2):
        model, inputs = CASES[name].build(), CASES[name].inputs()
        policy = SequenceParallel(2) if size > 1 else None
        with lt_tiled.prepare(model, sequence_parallel=policy, activation_checkpointing=True, tiling=3):
            step(model, inputs)  # learns, and checks
            with Counts() as counts:
                value_of(model(**inputs)).backward()
        found.append(counts.found["reads"])
    agreement._is_same, agreement._hash = same, hashed
    return found


def twice(keep: Any) -> tuple[float, float]:
    """The norms of all gradients after a first and a second backward pass."""
    prepared, model, inputs = _causal(2, keep)
    norms = []
    with prepared:
        loss = model(**inputs).loss
        for last in (False, True):
            model.zero_grad(set_to_none=True)
            loss.backward(retain_graph=not last)
            norms.append(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
    return norms[0], norms[1]


def peaks(tokens: int, policies: dict[str, Any]) -> tuple[int, int]:
    """The peaks of the bytes alive in a step of four ranks, and in one of a single rank on a quarter of the tokens."""
    found = []
    for size in (4, 1):
        group = Groups.of_size(size).group
        fields = {"hidden_size": 128, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 8}
        model = causal("llama", **fields, intermediate_size=256)().float()
        inputs = {"input_ids": (x := ids(1, tokens * size // 4)), "labels": x, "use_cache": False}

        def run(model: nn.Module = model, inputs: dict[str, Any] = inputs) -> None:
            model.zero_grad(set_to_none=True)
            model(**inputs).loss.backward()

        with lt_tiled.prepare(model, sequence_parallel=size, group=group, **policies):
            run()  # learns, and checks
            found.append(peak_bytes(run))
    return found[0], found[1]

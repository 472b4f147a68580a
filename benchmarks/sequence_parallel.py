"""Sequence parallelism next to DeepSpeed's and Accelerate's: ``python -m benchmarks --only sequence_parallel``.

Two gloo ranks share the sequence of a tiny model with random weights and take one step of SGD, whose change of the
weights shows the gradients. One process in float64 gives the true loss and gradients. lt_tiled runs under DDP;
DeepSpeed's ``UlyssesSPAttentionHF`` as its tutorial says, with its data loader adapter, shifted labels, and a loss
averaged by the labels that count; and Accelerate's ``ParallelismConfig(sp_backend="deepspeed")`` applies the same.
Accelerate 1.15 has no other backend. Both must be installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.harness import CPU, Options, Ranks, Table, marked
from benchmarks.tiny import tiny_model
from lt_tiled import prepare
from tests.engines.cells import zero
from tests.sequence_parallel.cases import half_ignored, packed, padded
from tests.sequence_parallel.models import ids
from tests.sequence_parallel.runs import step

CLOSE = 1e-5
RATE = 64.0  # of learning: a power of two adds no rounding
PLAIN = dict(ALL_ATTENTION_FUNCTIONS.items())
Batch = dict[str, Any]


class Case(NamedTuple):
    """A ``model_type`` and a batch."""

    model: str = "llama"
    tokens: int = 48
    given: Callable[[Tensor], Batch] = lambda x: {"input_ids": x, "labels": x}

    def batch(self) -> Batch:
        """Return what each rank is given, with the positions that DeepSpeed requires."""
        positions = torch.arange(self.tokens)[None]
        return {"position_ids": positions, "use_cache": False, **self.given(ids(1, self.tokens).clamp_min(4))}


CASES = {
    "Llama": Case(),
    "Qwen 2": Case("qwen2"),
    "Qwen 3": Case("qwen3"),
    "OLMo 2": Case("olmo2"),
    "Qwen 3 MoE": Case("qwen3_moe"),
    "Mixtral, sliding window": Case("mixtral"),
    "Mistral, sliding window": Case("mistral"),
    "Phi-3, sliding window": Case("phi3"),
    "Gemma 2, soft cap": Case("gemma2"),
    "Gemma 3, sliding window": Case("gemma3_text"),
    "GPT-OSS, sinks": Case("gpt_oss"),
    "GPT-2": Case("gpt2"),
    "DeepSeek V3, latent attention": Case("deepseek_v3"),
    "Bamba, Mamba 2": Case("bamba"),
    "Qwen 3.5, gated delta rule": Case("qwen3_5_text"),
    "LFM 2, short convolution": Case("lfm2"),
    "packed documents": Case(given=packed),
    "padding on the right": Case(given=padded(left=False)),
    "padding on the left": Case(given=padded(left=True)),
    "labels on the last rank only": Case(given=half_ignored),
    "a length that is no multiple": Case(tokens=47),
}


# The systems: each takes a step and returns the loss


def by_lt_tiled(model: Any, batch: Batch) -> Tensor:
    prepare(model, sequence_parallel=dist.get_world_size())
    wrapped, optimizer = DistributedDataParallel(model), sgd(model)
    loss: Tensor = wrapped(**batch).loss
    loss.backward()
    optimizer.step()
    return loss


def by_deepspeed(model: Any, batch: Batch, stage: int) -> Tensor:
    import deepspeed
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    deepspeed.init_distributed(dist_backend="gloo")
    size = dist.get_world_size()
    attention = model.config._attn_implementation
    mpu = ulysses_sp.UlyssesSPAttentionHF.register_with_transformers(model, attention, size, micro_batch_size=1)
    group = mpu.get_sequence_parallel_group()
    own = next(ulysses_sp.UlyssesSPDataLoaderAdapter([batch], dist.get_rank(), group, size, CPU))
    config = zero(f"zero{stage}") | {"sequence_parallel_size": size}
    engine, *_ = deepspeed.initialize(config=config, model=model, optimizer=sgd(model), mpu=mpu)
    loss = loss_of_share(engine, model, own, group)
    engine.backward(loss)
    engine.step()
    return loss


def by_accelerate(model: Any, batch: Batch, stage: int) -> Tensor:
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs, ParallelismConfig
    from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig
    from deepspeed.utils import groups

    AcceleratorState._reset_state(reset_partial_state=True)
    attention = model.config._attn_implementation
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation=attention)
    size = dist.get_world_size()
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=size, sp_handler=handler),
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=zero(f"zero{stage}") | {"gradient_accumulation_steps": 1}),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],  # by itself it has none on a CPU
    )
    data: Any = DataLoader([0], collate_fn=lambda _: batch)  # type: ignore[arg-type]
    engine, _, shares = accelerator.prepare(model, sgd(model), data)
    loss = loss_of_share(engine, model, next(iter(shares)), groups._get_sequence_parallel_group())
    accelerator.backward(loss)  # takes the step
    return loss


def loss_of_share(engine: Any, model: Any, own: Batch, group: Any) -> Tensor:
    """Return the mean over the group of the losses of the ranks, each with the number of its labels as its weight."""
    labels = own["shift_labels"]
    logits, vocabulary = engine(**own).logits, model.config.vocab_size
    loss = model.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=vocabulary)
    losses = dist_functional.all_gather(loss, group=group)
    counts = dist_functional.all_gather((labels != -100).sum(), group=group)
    total: Any = sum(one * count for one, count in zip(losses, counts, strict=True) if count)
    mean: Tensor = total / max(sum(counts), 1)
    return mean


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE)


SYSTEMS: dict[str, Callable[[Any, Batch], Tensor]] = {
    "lt_tiled": by_lt_tiled,
    "DeepSpeed, ZeRO-2": partial(by_deepspeed, stage=2),
    "DeepSpeed, ZeRO-3": partial(by_deepspeed, stage=3),
    "Accelerate, ZeRO-2": partial(by_accelerate, stage=2),
    "Accelerate, ZeRO-3": partial(by_accelerate, stage=3),
}


def errors(system: str, name: str) -> tuple[float, float, float]:
    """Return the relative errors of the loss and of all gradients, and the scale at which gradients are closest."""
    import deepspeed

    reset()
    case = CASES[name]
    true = step(tiny_model(case.model), case.batch())
    model: Any = tiny_model(case.model).float()
    before = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    loss = SYSTEMS[system](model, case.batch())
    gradients, expected = [], []
    for key, weight in model.named_parameters():
        with deepspeed.zero.GatheredParameters([weight]):
            gradients.append((before[key].double() - weight.detach().double()).flatten() / RATE)
        expected.append(true[key].flatten())
    found, exact = torch.cat(gradients), torch.cat(expected)
    off = float(loss.detach() / true["loss"]) - 1
    return abs(off), float((found - exact).norm() / exact.norm()), float(found @ exact / exact.square().sum())


def reset() -> None:
    """Undo what the last case left in this process: groups, and DeepSpeed's attention in transformers."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it compiles for minutes, and gloo does the same
    parallel_state_sp._SEQUENCE_PARALLEL_GROUP = None
    parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
    for name, function in PLAIN.items():
        ALL_ATTENTION_FUNCTIONS[name] = function


def sequence_parallel(options: Options) -> list[Table]:
    """One row for each model or batch, one column for each system."""
    table = Table("Loss and gradients of one sequence that two ranks share", ["", *SYSTEMS])
    table.note = (
        f"Errors relative to one process; ✗ above {CLOSE:g}. x2.00: the loss is right, and gradients are but for that"
        " factor."
    )
    with Ranks() as ranks:
        for name in list(CASES)[:: options.size(7, 1, 1)]:
            table.add(name, *(judged(ranks(system, errors, system, name)) for system in SYSTEMS))
    return [table]


def judged(found: Any) -> str:
    """Return the errors of the rank that is furthest off, or what was raised."""
    if isinstance(found, str):
        return marked(found.partition(": ")[2][:40] or found, False)
    loss, gradients, scale = max(found)
    if loss < CLOSE and gradients >= CLOSE and abs(gradients - abs(scale - 1)) < CLOSE:
        return marked(f"x{scale:.2f}", False)
    if max(loss, gradients) < CLOSE:
        return marked(f"{max(loss, gradients):.0e}", True)
    return marked(f"loss {loss:.0e}, gradients {gradients:.1g}", False)

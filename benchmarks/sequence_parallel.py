"""Sequence parallelism side by side with DeepSpeed's: ``python -m benchmarks --only sequence_parallel``.

The ranks of a group share the sequences of a small Llama: with ``sequence_parallel=`` of lt_tiled, and with DeepSpeed's
``UlyssesSPAttentionHF``, used as its tutorial says: its data loader adapter, shifted labels, and a loss averaged over
the group by the labels that count. One process in float64 gives the true gradients.
"""

from __future__ import annotations

import copy
import io
import logging
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lt_tiled
from benchmarks.costs import Size, llama
from benchmarks.sheet import Cell, Sheet, machine, reason, spread, version_of
from benchmarks.step_time import interleaved, ratios
from lt_tiled import ActivationCheckpointing, prepare
from tests.engines.cells import strategy
from tests.meters import LiveBytes
from tests.world import RanksFailed, World

ENGINES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
RATE = 64.0
"""The learning rate. One step of SGD shows the gradients in the weights; a power of two adds no rounding."""
CLOSE = 1e-5
SECONDS = 120
CPU = torch.device("cpu")
Batch = dict[str, Tensor]


# ------------------------------------------------------------------------------------------------------ correctness


@dataclass(frozen=True)
class Case:
    """A model and a batch ``[1, tokens]``."""

    tokens: int = 48
    kind: str = "llama"
    fields: dict[str, Any] = field(default_factory=dict)
    given: Callable[[Tensor], Batch] = lambda ids: {}

    def build(self) -> nn.Module:
        """Return the model in float32, the same on each rank."""
        sizes = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "pad_token_id": 0}
        torch.manual_seed(0)
        config = AutoConfig.for_model(self.kind, **{**sizes, **self.fields})
        model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        return model

    def batch(self) -> Batch:
        """Return what each rank is given."""
        ids = torch.randint(1, 64, (1, self.tokens), generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(self.tokens)[None]} | self.given(ids)


def _packed(ids: Tensor) -> Batch:
    third, half = ids.shape[1] // 3, ids.shape[1] // 2
    return {"position_ids": torch.cat([torch.arange(n) for n in (third, half, ids.shape[1] - third - half)])[None]}


def _padded(ids: Tensor, left: bool) -> Batch:
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    mask = mask if left else mask.flip(1)
    return {"input_ids": ids * mask, "labels": ids.where(mask.bool(), -100), "attention_mask": mask}


def _last_labels(ids: Tensor) -> Batch:
    return {"labels": ids.where(torch.arange(ids.shape[1]) >= ids.shape[1] - 6, -100)}


_MAMBA_2: dict[str, Any] = {
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_MAMBA_2 |= {"attn_layer_indices": [1]}
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_DELTA |= {"layer_types": ["linear_attention", "full_attention"]}
CASES = {
    "causal": Case(),
    "sliding window": Case(kind="mistral", fields={"sliding_window": 6}),
    "packed documents": Case(given=_packed),
    "padded on the right": Case(given=partial(_padded, left=False)),
    "padded on the left": Case(given=partial(_padded, left=True)),
    "labels on the last rank only": Case(given=_last_labels),
    "a length that is no multiple": Case(tokens=47),
    "three key-value heads": Case(fields={"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "Mamba 2 and attention": Case(kind="bamba", fields=_MAMBA_2),
    "gated delta rule and attention": Case(kind="qwen3_5_text", fields=_DELTA),
    "short convolution and attention": Case(kind="lfm2", fields={"layer_types": ["conv", "full_attention"]}),
}


def true_gradients(case: Case) -> dict[str, Tensor]:
    """Return the gradients of one process in float64."""
    model = case.build().double()
    model(**case.batch(), use_cache=False).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def error_and_scale(system: str, engine: str, name: str) -> tuple[float, float]:
    """Return the error of all gradients relative to their norm, and the scale at which they are closest."""
    case = CASES[name]
    true, model = true_gradients(case), case.build()
    before = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    with SYSTEMS[system](model, engine, case.batch()), _whole(model, engine):
        after = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    found = torch.cat([((before[key].double() - after[key].double()) / RATE).flatten() for key in true])
    expected = torch.cat([gradient.flatten() for gradient in true.values()])
    return float((found - expected).norm() / expected.norm()), float(found @ expected / (expected @ expected))


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, or the error that it raises as a string. What engines print is not shown."""
    warnings.simplefilter("ignore")
    for name in ("lt_tiled", "DeepSpeed"):
        logging.getLogger(name).disabled = True
    try:
        with redirect_stdout(io.StringIO()):
            return function(*args)
    except Exception as error:  # either system may raise anything
        return f"raises {type(error).__name__}: {reason(error)}"


def _whole(model: nn.Module, engine: str) -> AbstractContextManager[None]:
    """All-gather the weights of ZeRO-3."""
    if engine != "zero3":
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(list(model.parameters()))
    return gathered


@contextmanager
def _lt_tiled(model: nn.Module, engine: str, batch: Batch) -> Iterator[None]:
    """Take a step with lt_tiled."""
    size = dist.get_world_size()
    chosen = strategy(lt_tiled.fabric, engine, tiling=None, activation_checkpointing=None, sequence_parallel=size)
    fabric = Fabric(accelerator="cpu", devices=size, strategy=chosen)
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), RATE))
    fabric.backward(wrapped(**batch, use_cache=False).loss)
    optimizer.step()
    yield
    chosen.release()


@contextmanager
def _deepspeed(model: nn.Module, engine: str, batch: Batch) -> Iterator[None]:
    """Take a step with DeepSpeed's attention."""
    import deepspeed

    size, optimizer = dist.get_world_size(), torch.optim.SGD(model.parameters(), RATE)
    with ulysses(model) as mpu:
        if engine == "ddp":
            wrapped: Any = DistributedDataParallel(model)
            step = optimizer.step
        else:
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "sequence_parallel_size": size,
                "zero_optimization": {"stage": int(engine[-1])},
                "gradient_clipping": 0.0,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            }
            wrapped, *_ = deepspeed.initialize(config=config, model=model, optimizer=optimizer, mpu=mpu)
            step = wrapped.step
        loss = loss_of_share(wrapped, model, share_of(batch, mpu), mpu)
        loss.backward() if engine == "ddp" else wrapped.backward(loss)
        step()
        yield


SYSTEMS = {"lt_tiled": _lt_tiled, "DeepSpeed": _deepspeed}


# -------------------------------------------------------------------------------------- DeepSpeed as its tutorial says


@contextmanager
def ulysses(model: nn.Module) -> Iterator[Any]:
    """Let all models of the process use DeepSpeed's attention, and yield its process groups."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it compiles for minutes, and gloo does the same
    deepspeed.init_distributed(dist_backend="gloo")
    parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]  # which DeepSpeed replaces for good
    try:
        yield UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=dist.get_world_size(),
            micro_batch_size=1,
        )
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain


def share_of(batch: Batch, mpu: Any) -> Batch:
    """Return the rank's own tokens and shifted labels, as DeepSpeed's data loader adapter cuts them."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    group = mpu.get_sequence_parallel_group()
    size, rank = mpu.get_sequence_parallel_world_size(), mpu.get_sequence_parallel_rank()
    own: Batch = next(UlyssesSPDataLoaderAdapter([dict(batch)], rank, group, size, CPU))
    return own


def loss_of_share(wrapped: nn.Module, model: Any, own: Batch, mpu: Any) -> Tensor:
    """Return the mean over the group of the losses of the ranks, each with the number of its labels as its weight."""
    logits, group = wrapped(**own, use_cache=False).logits, mpu.get_sequence_parallel_group()
    shifted = own["shift_labels"]
    vocabulary = model.config.vocab_size
    loss = model.loss_function(logits=logits, labels=None, shift_labels=shifted, vocab_size=vocabulary)
    losses = dist_functional.all_gather(loss, group=group)
    counts = dist_functional.all_gather((shifted != -100).sum(), group=group)
    total: Tensor = sum(one * count for one, count in zip(losses, counts, strict=True)) / max(sum(counts), 1)
    return total


# ------------------------------------------------------------------------------------------------------------- costs


@dataclass(frozen=True)
class Way:
    """How a step runs."""

    system: str = "lt_tiled"
    activation_checkpointing: bool = False
    keep: Literal["attention"] | None = None


WAYS = {
    "DeepSpeed": Way("DeepSpeed"),
    "lt_tiled": Way(),
    "DeepSpeed, activation checkpointing": Way("DeepSpeed", True),
    "lt_tiled, activation checkpointing": Way(activation_checkpointing=True),
    'lt_tiled, `keep="attention"`': Way(activation_checkpointing=True, keep="attention"),
}
ALONE = {
    "one process": Way("one process"),
    "one process, activation checkpointing": Way("one process", True),
}
COLLECTIVES = {"all-to-all": "alltoall", "all-gather": "allgather", "reduce-scatter": "reducescatter"}
"""By the names of torch's operators."""
_STEPS: dict[str, Callable[[], None]] = {}
"""In the process of a rank: runs a forward and a backward pass, by the names of ways."""
_OPEN = ExitStack()


def set_up(names: list[str], size: Size) -> None:
    """Make the steps of some ways on a rank, and run each once, because a first step checks and allocates."""
    model: Any = llama(size, CPU)
    ids = torch.randint(512, (1, size.tokens), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(size.tokens)[None]}
    ways = {name: (WAYS | ALONE)[name] for name in names}
    deepspeed = any(way.system == "DeepSpeed" for way in ways.values())
    mpu = _OPEN.enter_context(ulysses(model)) if deepspeed else None
    for name, way in ways.items():
        _STEPS[name] = _step(way, copy.deepcopy(model).train(), batch, mpu)
        _STEPS[name]()


def _step(way: Way, model: Any, batch: Batch, mpu: Any) -> Callable[[], None]:
    """Return a function that runs a forward and a backward pass and frees the gradients."""
    if way.system == "DeepSpeed":
        if way.activation_checkpointing:
            model.gradient_checkpointing_enable()
        loss = partial(loss_of_share, model, model, share_of(batch, mpu), mpu)
    else:
        policy = ActivationCheckpointing(keep=way.keep) if way.activation_checkpointing else None
        prepare(model, sequence_parallel=dist.get_world_size(), activation_checkpointing=policy)
        loss = partial(loss_of, model, batch)

    def step() -> None:
        loss().backward()
        model.zero_grad(set_to_none=True)

    return step


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a batch, as a training step computes it."""
    loss: Tensor = model(**batch, use_cache=False).loss
    return loss


def collectives(name: str) -> dict[str, int]:
    """Count the collectives of a forward and a backward pass on this rank, by kind."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        _STEPS[name]()
    names = [event.name.replace("_", "") for event in profiled.events() if event.name.startswith("c10d::")]
    kinds = [next((kind for kind, plain in COLLECTIVES.items() if plain in found), "other") for found in names]
    return dict(Counter(kinds))


def peak(name: str) -> int:
    """Return the most bytes alive at once on this rank in a forward and a backward pass, without weights."""
    with LiveBytes() as meter:  # torch's profiler also sees what threads of gloo free a moment later
        _STEPS[name]()
    return int(meter.peak)


def seconds(name: str) -> float:
    """Time a forward and a backward pass on this rank."""
    dist.barrier()
    start = time.perf_counter()
    _STEPS[name]()
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------------------ tables


class Worlds:
    """Ranks for each system and number of ranks. DeepSpeed changes transformers and torch in its processes."""

    def __init__(self) -> None:
        self._worlds: dict[tuple[str, int], World] = {}

    def __call__(self, system: str, ranks: int, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a function returns on each rank, or say how it failed."""
        world = self._worlds.setdefault((system, ranks), World(ranks))
        try:
            answers = world(attempt, function, *args, timeout=SECONDS)
        except RanksFailed as failure:
            return "dies" if "the process died" in str(failure) else "hangs"
        return next((answer for answer in answers if isinstance(answer, str)), answers)

    def measure(self, system: str, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what a function returns on each rank.

        Raises:
            RuntimeError: If it fails.
        """
        found = self(system, ranks, function, *args)
        if isinstance(found, str):
            raise RuntimeError(f"{system} on {ranks} ranks {found}")
        answers: list[Any] = found
        return answers

    def close(self) -> None:
        for world in self._worlds.values():
            world.kill()


def sequence_parallel(size: Size, sizes: tuple[int, ...] = (2, 4), rounds: int = 9) -> list[Sheet]:
    """Return the gradients, the exact costs and the times of a step, for each number of ranks."""
    with closing(Worlds()) as worlds:
        return [gradients(worlds, sizes), exact_costs(worlds, size, sizes), times(worlds, size, sizes, rounds)]


def gradients(worlds: Worlds, sizes: tuple[int, ...] = (2, 4), names: Iterable[str] = CASES) -> Sheet:
    """One row for each kind of mask, one column for each system and engine."""
    columns = [(system, engine) for system in _here() for engine in ENGINES]
    headings = ["", *(f"{system}, {ENGINES[engine]}" for system, engine in columns)]
    sheet = Sheet("sequence_parallel", "gradients of one sequence that the ranks share", headings)
    sheet.notes = [
        f"Error of all gradients relative to their norm, float32 on gloo ranks; one process in float64 is the"
        f" reference; ✗ above {CLOSE:.0e}. x2.00 are gradients that are right except for that factor. deepspeed"
        f" {version_of('deepspeed')}, sdpa attention."
    ]
    for ranks in sizes:
        for name in names:
            found = [worlds(system, ranks, error_and_scale, system, engine, name) for system, engine in columns]
            sheet.add(f"{name}, {ranks} ranks", *map(_cell, found))
    return sheet


def _cell(found: Any) -> Cell:
    if isinstance(found, str):
        return Cell(found.partition(":")[0], False)
    error, scale = max(found)
    if error < CLOSE:
        return Cell(f"{error:.0e}", True)
    only_scaled = abs(error - abs(scale - 1)) < CLOSE
    return Cell(f"x{scale:.2f}" if only_scaled else f"wrong by {error:{'.0%' if error > 0.005 else '.0e'}}", False)


def exact_costs(worlds: Worlds, size: Size, sizes: tuple[int, ...] = (2, 4)) -> Sheet:
    """One row for each way to run a step."""
    headings = ["", *COLLECTIVES, "other", *(f"peak live bytes, {ranks} ranks" for ranks in sizes)]
    sheet = Sheet("sequence_parallel_costs", f"a step of {size.layers} layers, {size.tokens} tokens", headings)
    sheet.notes = [
        f"Collectives of a forward and a backward pass of {size.layers} layers on {sizes[-1]} ranks, without an engine."
        " The other ones belong to the loss: an all-reduce, and scatters that stand for a reduce-scatter on gloo. Bytes"
        f" are those that the step of {size.tokens} tokens allocates, without weights, on the rank with the most,"
        " relative to one process with or without activation checkpointing. Gradients of the weights are among them,"
        " and not divided. The two all-gathers of lt_tiled compare batches, on the host. Exact, on the CPU."
    ]
    ways = {name: way for name, way in WAYS.items() if way.system in _here()}
    worlds.measure("one process", 1, set_up, list(ALONE), size)
    alone = {
        way.activation_checkpointing: worlds.measure("one process", 1, peak, name)[0] for name, way in ALONE.items()
    }
    for system in _here():
        for ranks in sizes:
            worlds.measure(system, ranks, set_up, [name for name, way in ways.items() if way.system == system], size)
    for name, way in ways.items():
        counts = worlds.measure(way.system, sizes[-1], collectives, name)[0]
        bytes_ = [
            max(worlds.measure(way.system, ranks, peak, name)) / alone[way.activation_checkpointing] for ranks in sizes
        ]
        sheet.add(name, *(str(counts.get(kind, 0)) for kind in (*COLLECTIVES, "other")), *(f"{b:.2f}" for b in bytes_))
    return sheet


def times(worlds: Worlds, size: Size, sizes: tuple[int, ...], rounds: int) -> Sheet:
    """One row for each way and number of ranks, after :func:`exact_costs` made the steps."""
    sheet = Sheet(
        "sequence_parallel_time",
        f"a step of {size.layers} layers of {size.hidden}, {size.tokens} tokens",
        ["", "median [s]", "relative to one process, median", "range"],
    )
    sheet.notes = [
        f"A forward and a backward pass, one thread for each rank, {rounds} interleaved rounds, {machine(CPU)}."
        " Ranks on the same core wait for each other."
    ]
    runs: dict[str, Callable[[], float]] = {}
    for name, way in ALONE.items():
        runs[name] = partial(_slowest, worlds, way, 1, name)
    for ranks in sizes:
        for name, way in WAYS.items():
            if way.system in _here():
                runs[f"{name}, {ranks} ranks"] = partial(_slowest, worlds, way, ranks, name)
    found = interleaved(runs, rounds)
    for name in runs:
        of = ratios(found, name, next(iter(ALONE)))
        sheet.add(name, f"{statistics.median(found[name]):.3f}", f"{statistics.median(of):.2f}", spread(of))
    return sheet


def _slowest(worlds: Worlds, way: Way, ranks: int, name: str) -> float:
    return float(max(worlds.measure(way.system, ranks, seconds, name)))


def _here() -> list[str]:
    return [system for system in SYSTEMS if system != "DeepSpeed" or find_spec("deepspeed")]

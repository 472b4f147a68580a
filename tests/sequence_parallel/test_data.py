"""What ranks that share sequences read, log, count, save and load, in Trainer, Fabric and the command line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lt_tiled
from lt_tiled import SequenceParallel
from lt_tiled.cli import main
from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.modules.patch import get_patch
from lt_tiled.sequence_parallel import same_batch, sharing
from lt_tiled.sequence_parallel.model import SharedModel
from tests.engines.cells import strategy
from tests.lit import trainer
from tests.parity import near, rounding
from tests.sequence_parallel.models import GPT, causal, ids
from tests.sequence_parallel.test_engines import MODELS, Lit, batches, error, loss_and_logits
from tests.world import World, world_of

LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def fit(chosen: Any, lit: Any, data: Any, **options: Any) -> pl.Trainer:
    run = trainer(chosen, **{"devices": dist.get_world_size() if dist.is_initialized() else 1} | options)
    run.fit(lit, data)
    return run


# Which data a rank reads


class Numbered(IterableDataset[Tensor]):
    """Rows for groups of ranks: each takes every ``data_world_size``-th row."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.cat(batches(4))[self.strategy.data_rank :: self.strategy.data_world_size]


def read_by_trainer(iterable: bool) -> list[int]:
    seen: list[int] = []

    class Noting(Lit):
        def training_step(self, x: Tensor, index: int) -> Tensor:
            seen.append(int(x.sum()))
            return super().training_step(x, index)

    chosen = strategy(lt_tiled, "ddp", sequence_parallel=2)
    data = Numbered(chosen) if iterable else torch.cat(batches(4))
    fit(chosen, Noting("llama"), DataLoader(data, batch_size=2), max_steps=-1, max_epochs=1)
    return seen


def read_by_fabric(iterable: bool) -> list[int]:
    chosen = strategy(lt_tiled.fabric, "ddp", sequence_parallel=2)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=chosen)
    fabric.launch()
    data = Numbered(chosen) if iterable else torch.cat(batches(4))
    return [int(x.sum()) for x in fabric.setup_dataloaders(DataLoader(data, batch_size=2))]


@pytest.mark.parametrize("iterable", [False, True], ids=["sampler", "iterable"])
@pytest.mark.parametrize("read", [read_by_trainer, read_by_fabric], ids=["trainer", "fabric"])
def test_ranks_of_a_group_read_the_same(read: Any, iterable: bool, four_ranks: World) -> None:
    """The ranks of a group read the same batches, and the groups all rows between them."""
    seen = four_ranks(read, iterable)
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert len(seen[0]) == len(seen[2]) == 2
    assert sum(seen[0]) + sum(seen[2]) == int(torch.cat(batches(4)).sum())


# The check that they do


def different(name: str, change: str, batch: Any) -> str:
    """What a step says on a rank whose batch is changed on rank 1."""
    model, given = MODELS[name](), {"input_ids": ids(2, 24), "labels": ids(2, 24)}
    if dist.get_rank() == 1:
        if change == "values":
            given["labels" if hasattr(model, "config") else "input_ids"][0, 3] = 1
        elif change == "length":
            given = {name: value[:, :-1] for name, value in given.items()}
        else:
            del given["labels"]
    try:
        with lt_tiled.prepare(model, sequence_parallel=SequenceParallel(2, batch=batch, self_check=False)):
            model(**given)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("change", ["values", "length", "labels"])
def test_another_batch(change: str, world: World) -> None:
    """A batch that differs in values, in its shape or in what is given raises on all ranks and names the remedy."""
    for message in world(different, "llama", change, "check"):
        assert "was given a batch on rank 1" in message
        assert "use_distributed_sampler=True" in message
        assert "rank=strategy.data_rank" in message


@pytest.mark.parametrize("change", ["values", "length"])
def test_another_batch_of_a_hand_written_model(change: str, world: World) -> None:
    """The same for hidden states that enter the first block."""
    for message in world(different, "hand-written", change, "check"):
        assert "was given a batch on rank 1" in message


def large(change: str) -> str:
    """What the comparison says of a mask that is digested in parts, or of complex numbers, changed on rank 1."""
    given = torch.zeros(4, 64, dtype=torch.complex64 if change == "complex" else torch.int64)
    if dist.get_rank() == 1:
        if change == "a bit":
            given[3, 5] = 1
        elif change == "order":  # the sum of the row stays
            given[0, 0], given[0, 1] = 1, -1
        else:
            given += 1j
    before, same_batch.MAX_DIGESTED = same_batch.MAX_DIGESTED, 128
    try:
        same_batch.SameBatch("model", dist.group.WORLD).check([("mask", given)])
    except ValueError as error:
        return str(error)
    finally:
        same_batch.MAX_DIGESTED = before
    return ""


@pytest.mark.parametrize("change", ["a bit", "order", "complex"])
def test_no_tensor_is_left_out(change: str, world: World) -> None:
    """Tensors of integers are compared whatever their size, of which a part suffices, and so are complex numbers."""
    for message in world(large, change):
        assert "with other values in mask" in message


def infinite() -> None:
    mask = torch.zeros(4, 16).masked_fill(torch.ones(4, 16, dtype=torch.bool).triu(1), float("-inf"))
    check = same_batch.SameBatch("model", dist.group.WORLD).check
    check([("mask", mask), ("hidden_states", torch.full((2, 4), float("nan")))])
    with pytest.raises(ValueError, match="with other values in mask"):
        check([("mask", torch.zeros_like(mask) if dist.get_rank() else mask)])


def test_values_that_are_not_finite(world: World) -> None:
    """Infinite values and nan are equal to themselves, and hide no difference."""
    world(infinite)


class Copied:
    """The event behind a copy from a GPU to the host."""

    def synchronize(self) -> None: ...


class AsOnAGPU(same_batch.SameBatch):
    """Compares values with the next pass."""

    def _on_host(self, values: Tensor) -> Tensor:
        before = torch.zeros_like(values) if self._last is None else self._last[0]
        self._last = values, Copied()  # type: ignore[assignment]
        return before


def last_batch() -> str:
    """What a Trainer says at the end of training where the last of two batches is another one on rank 1."""

    class Other(Lit):
        def training_step(self, x: Tensor, index: int) -> Tensor:
            return super().training_step(ids(4, 25, seed=3) if index * dist.get_rank() else x, index)

    before, sharing.SameBatch = sharing.SameBatch, AsOnAGPU  # type: ignore[misc]
    try:
        chosen = strategy(lt_tiled, "ddp", sequence_parallel=2)
        fit(chosen, Other("llama"), DataLoader(torch.cat(batches(4)), 4), max_steps=-1, max_epochs=1)
    except ValueError as error:
        return str(error)
    finally:
        sharing.SameBatch = before  # type: ignore[misc]
    return ""


def test_the_last_batch(world: World) -> None:
    """On a GPU, where values are compared with the next pass, those of the last one are compared when training ends."""
    for message in world(last_batch):
        assert "was given a batch on rank 1" in message
        assert "the last pass" in message


def test_trusted(world: World) -> None:
    """``batch="trust"`` compares nothing."""
    assert world(different, "llama", "values", "trust") == ["", ""]


def hosts() -> tuple[list[int], list[int], list[int]]:
    """The ranks of a group of two, of the gloo group that is made for it if it were of NCCL, and of the one if not."""
    group, _ = dist.new_subgroups(2)
    plain = same_batch.host_group(group)
    before, dist.get_backend_config = dist.get_backend_config, lambda _: "cuda:nccl"
    try:
        made = same_batch.host_group(group)
        assert same_batch.host_group(group) is made is not group
    finally:
        dist.get_backend_config = before
    dist.barrier(made)
    return tuple(dist.get_process_group_ranks(g) for g in (group, made, plain))


def test_host_group(four_ranks: World) -> None:
    """A group without gloo gets a gloo group of its ranks, once, and one of gloo is used as it is."""
    for rank, found in enumerate(four_ranks(hosts)):
        assert found == (([0, 1], [2, 3])[rank // 2],) * 3


class Dropping(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(self.embed, nn.Dropout(0.3))


def dropped() -> str:
    torch.manual_seed(0)
    model = Dropping()
    torch.manual_seed(dist.get_rank())
    with lt_tiled.prepare(model, sequence_parallel=2):
        return str(float(model(ids(2, 24), ids(2, 24)).detach()))


def test_dropout_before_the_blocks(world: World) -> None:
    """Dropout of embeddings, which differs between ranks, is no other batch."""
    world(dropped)


def comparisons() -> int:
    model = causal("llama")()
    with lt_tiled.prepare(model, sequence_parallel=2, activation_checkpointing=True):
        for _ in range(3):
            model(input_ids=ids(2, 24), labels=ids(2, 24)).loss.backward()
        return get_patch(model, SharedModel).sharing.same_batch.compared


def test_one_comparison_for_a_step(world: World) -> None:
    """A step compares once, whatever blocks and recomputes it has."""
    assert world(comparisons) == [3, 3]


# Evaluation


def text() -> TextFiles:
    Path("a.txt").write_bytes(bytes(i * i % 251 for i in range(2000)))
    return TextFiles("a.txt", seq_len=33, batch_size=2, held_out=0.2)


def all_stages(folder: str, chosen: Any, devices: int) -> dict[str, Any]:
    """The metrics and log-probabilities of a model of the command line."""
    os.chdir(folder)
    torch.manual_seed(0)
    lit, data = CausalLM(LLAMA, learning_rate=1e-2, warmup_steps=0), text()
    run = trainer(chosen, devices=devices, max_steps=2, limit_val_batches=2)
    run.fit(lit, data)
    found = {name: float(value) for name, value in run.callback_metrics.items()}
    found |= run.validate(lit, data, verbose=False)[0] | run.test(lit, data, verbose=False)[0]
    return found | {"predicted": torch.cat(run.predict(lit, data))}


def shared_stages(folder: str, engine: str) -> dict[str, Any]:
    return all_stages(folder, strategy(lt_tiled, engine, sequence_parallel=2), 2)


@pytest.mark.table("fsdp2")
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_evaluation(engine: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Losses that are logged, perplexities of validation and test, and predicted log-probabilities are those of one
    process, on both ranks.
    """
    world = world_of(request, engine)
    both = world(shared_stages, str(tmp_path), engine)
    if engine == "zero3":  # its weights are drawn in another order
        assert {k: v for k, v in both[0].items() if k != "predicted"} == {
            k: v for k, v in both[1].items() if k != "predicted"
        }
        assert torch.equal(both[0]["predicted"], both[1]["predicted"])
        assert both[0]["test_perplexity"] == pytest.approx(
            float((-both[0]["predicted"].double().mean()).exp()), rel=rounding()
        )
        return
    true = all_stages(str(tmp_path), "auto", 1)
    for found in both:
        assert error(found.pop("predicted"), true["predicted"]) < rounding()
        assert found == near({k: v for k, v in true.items() if k != "predicted"})


def perplexity_of_groups(folder: str, size: int) -> float:
    os.chdir(folder)
    torch.manual_seed(0)
    chosen = DDPStrategy() if size == 1 else strategy(lt_tiled, "ddp", sequence_parallel=size)
    run = trainer(chosen, devices=dist.get_world_size())
    return run.validate(CausalLM(LLAMA), text(), verbose=False)[0]["val_perplexity"]


def test_perplexity_of_groups(four_ranks: World, world: World, tmp_path: Path) -> None:
    """Two groups of two ranks have the perplexity of two ranks without sequence parallelism."""
    assert four_ranks(perplexity_of_groups, str(tmp_path), 2) == pytest.approx(
        2 * world(perplexity_of_groups, str(tmp_path), 1), rel=rounding()
    )


# What else a step may have


class Adapted(Lit):
    """A Llama with LoRA."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        self.net = get_peft_model(self.net, config)


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate_grad_batches": 2, "max_steps": 2},
    "clipped": {"gradient_clip_val": 0.2},
    "LoRA": {},
}


def with_option(name: str, chosen: Any) -> tuple[list[float], list[float], Tensor]:
    lit = (Adapted if name == "LoRA" else Lit)("llama")
    if isinstance(chosen, str) and chosen != "auto":
        chosen = strategy(lt_tiled, chosen, sequence_parallel=2, tiling=3, activation_checkpointing=True, loss=True)
    run = fit(
        chosen, lit, DataLoader(torch.cat(batches(4)), batch_size=2), use_distributed_sampler=False, **OPTIONS[name]
    )
    logged = [float(value) for value in run.callback_metrics.values()]
    return lit.losses, logged, trained(lit)


def trained(lit: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in lit.parameters() if p.requires_grad])


@pytest.mark.table("accumulated")
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, world: World) -> None:
    """Accumulated and clipped gradients, and those of LoRA, train the weights of one process."""
    losses, logged, weights = with_option(name, "auto")
    before = trained((Adapted if name == "LoRA" else Lit)("llama"))
    for found in world(with_option, name, "ddp"):
        assert found[0] == near(losses)
        assert found[1] == near(logged)
        assert error(found[2] - before, weights - before) < 1e-5


def no_sync() -> Tensor:
    """The gradient of two micro-batches, the first of which is not reduced."""
    chosen = strategy(lt_tiled.fabric, "ddp", sequence_parallel=2)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=chosen)
    fabric.launch()
    net = causal("llama")().float()
    model = fabric.setup_module(net)
    for index, x in enumerate(batches(2)):
        with fabric.no_backward_sync(model, enabled=index == 0):
            fabric.backward(loss_and_logits("llama", model, x))
    chosen.release()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def test_no_sync(world: World) -> None:
    """Gradients that ``no_backward_sync`` keeps on each rank are reduced with the next ones."""
    net = causal("llama")().float()
    for x in batches(2):
        loss_and_logits("llama", net, x).backward()
    true = torch.cat([p.grad.flatten() for p in net.parameters()])
    for found in world(no_sync):
        assert error(found, true) < rounding()


# Checkpoints


def resumed(folder: str, engine: str, first: int, second: int, steps: int) -> tuple[list[float], str]:
    """The losses of an epoch after one, or a part of one, of groups of another size."""
    path = str(Path(folder) / f"{first}.ckpt")
    data = DataLoader(torch.cat(batches(4)), batch_size=2)
    chosen = [strategy(lt_tiled, engine, sequence_parallel=size) for size in (first, second)]
    fit(chosen[0], Lit("llama"), data, max_steps=steps, max_epochs=1).save_checkpoint(path)
    lit = Lit("llama")
    run = trainer(chosen[1], devices=2, max_steps=-1, max_epochs=2)
    try:
        run.fit(lit, data, ckpt_path=path)
    except ValueError as error:
        return [], str(error)
    return lit.losses, ""


@pytest.mark.table("zero2-1-2")
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2"])
def test_resumed_after_an_epoch(
    engine: str, first: int, second: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A run goes on with groups of another size where an epoch ended: the next epoch has all of its batches."""
    world = world_of(request, engine)
    for losses, message in world(resumed, str(tmp_path), engine, first, second, -1):
        assert message == ""
        assert len(losses) == 4 * second // 2


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2"])
def test_resumed_in_an_epoch(
    engine: str, first: int, second: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """In the middle of an epoch that is refused, because the batches that are left would be others."""
    world = world_of(request, engine)
    for losses, message in world(resumed, str(tmp_path), engine, first, second, 1):
        assert losses == []
        assert f"with sequence_parallel={first}" in message
        assert f"resume with {first}" in message


# The command line


class PrintsItsData(Callback):
    """Prints which part of the data a rank reads."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        print(f"data {trainer.strategy.data_rank} of {trainer.strategy.data_world_size}")


def trained_by(folder: str, value: str) -> str:
    from tests.test_cli import printed_by

    os.chdir(folder)
    text()
    Path("run.yaml").write_text(
        f"""
trainer:
  strategy: {{class_path: lt_tiled.TiledDDPStrategy, init_args: {{sequence_parallel: {value}}}}}
  accelerator: cpu
  devices: 2
  max_steps: 2
  limit_val_batches: 1
  logger: false
  enable_checkpointing: false
  callbacks: [{{class_path: tests.sequence_parallel.test_data.PrintsItsData}}]
model: {{class_path: lt_tiled.lm.CausalLM, init_args: {{config: {LLAMA}}}}}
data: {{class_path: lt_tiled.lm.TextFiles, init_args: {{paths: a.txt, seq_len: 32}}}}
"""
    )
    return printed_by(folder, "fit", "--config", "run.yaml")


@pytest.mark.table(".size: 2.")
@pytest.mark.parametrize("value", ["2", "{size: 2}"])
def test_command_line(value: str, world: World, tmp_path: Path) -> None:
    """``lt-tiled fit`` takes the number or the fields of the policy from YAML."""
    for printed in world(trained_by, str(tmp_path), value):
        assert "data 0 of 1" in printed


def test_command_line_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """A size that is not positive is refused while parsing."""
    with pytest.raises(SystemExit):
        main(
            [
                "fit",
                "--model=CausalLM",
                "--data=TextFiles",
                "--trainer.strategy=TiledDDPStrategy",
                "--trainer.strategy.sequence_parallel=0",
            ]
        )
    assert "sequence_parallel" in capsys.readouterr().err

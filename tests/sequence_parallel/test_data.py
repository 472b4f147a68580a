"""What ranks that share sequences read, log, count, save and load, in Trainer, Fabric and the command line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lt_tiled
from lt_tiled import SequenceParallel
from lt_tiled.lm import CausalLM, TextFiles
from tests.engines.cells import strategy
from tests.lit import trainer
from tests.parity import near, rounding
from tests.sequence_parallel.models import GPT, VOCAB, H, ids
from tests.sequence_parallel.test_engines import MODELS, Lit, batches, error
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


def changed(batch: dict[str, Any], change: str) -> dict[str, Any]:
    """Another batch."""
    first, x = next(iter(batch.items()))
    if change == "length":
        return {name: value[:, :-1] for name, value in batch.items()}
    if change == "values":
        return batch | {first: x.index_fill(1, torch.tensor([3]), 1)}
    if change == "order":
        return batch | {first: x.flip(1)}
    return {first: x}


def different(name: str, change: str) -> str:
    """What a step says on a rank whose batch is changed on rank 1."""
    given = {"input_ids": ids(2, 24), "labels": ids(2, 24)}
    given = changed(given, change) if dist.get_rank() else given
    refused = pytest.raises(ValueError, match="different batches")
    with lt_tiled.prepare(model := MODELS[name](), sequence_parallel=2), refused as raised:
        model(**given)
    return str(raised.value)


@pytest.mark.parametrize("change", ["values", "order", "length", "labels"])
@pytest.mark.parametrize("name", ["llama", "hand-written"])
def test_another_batch(name: str, change: str, world: World) -> None:
    """A batch that differs in any way raises on all ranks, and names the remedy."""
    for message in world(different, name, change):
        assert "rank=strategy.data_rank" in message


def hidden_states(change: str) -> None:
    """A named module is given floating-point numbers, of which some are not finite."""
    model, given = GPT(), torch.randn(2, 24, H, generator=torch.Generator().manual_seed(0))
    given[0, 0] = float("nan")
    if change and dist.get_rank():
        given[1, 20, -1] *= 1.001
    policy = SequenceParallel(2, targets="blocks.0", self_check=False)
    refused = pytest.raises(ValueError, match="different batches") if change else nullcontext()
    with lt_tiled.prepare(model, sequence_parallel=policy), refused:
        model.blocks[0](given)


def test_hidden_states(world: World) -> None:
    """All values of floating-point inputs count, and nan is equal to itself."""
    for change in ("", "a value"):
        world(hidden_states, change)


class Dropping(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(self.embed, nn.Dropout(0.3))


class Encoder(nn.Module):
    """Has the blocks, and is given what dropout left of the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = GPT().blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dropout, self.encoder = nn.Embedding(VOCAB, H), nn.Dropout(0.3), Encoder()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.encoder(self.dropout(self.embed(input_ids))).square().mean()


def dropped(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    torch.manual_seed(dist.get_rank())
    with lt_tiled.prepare(model, sequence_parallel=2):
        model(ids(2, 24), ids(2, 24)).backward()


@pytest.mark.parametrize("kind", [Dropping, Nested])
def test_dropout_before_the_blocks(kind: type[nn.Module], world: World) -> None:
    """Dropout of embeddings, which differs between ranks, is no other batch, whichever module has the blocks."""
    world(dropped, kind)


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


# Checkpoints


def resumed(folder: str, engine: str, first: int, second: int) -> list[float]:
    """The losses of an epoch after one of groups of another size."""
    path = str(Path(folder) / f"{first}.ckpt")
    data = DataLoader(torch.cat(batches(4)), batch_size=2)
    chosen = [strategy(lt_tiled, engine, sequence_parallel=size) for size in (first, second)]
    fit(chosen[0], Lit("llama"), data, max_steps=-1, max_epochs=1).save_checkpoint(path)
    lit = Lit("llama")
    run = trainer(chosen[1], devices=2, max_steps=-1, max_epochs=2)
    run.fit(lit, data, ckpt_path=path)
    return lit.losses


@pytest.mark.table("zero2-1-2")
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2"])
def test_resumed_after_an_epoch(
    engine: str, first: int, second: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A run goes on with groups of another size where an epoch ended: the next epoch has all of its batches."""
    world = world_of(request, engine)
    for losses in world(resumed, str(tmp_path), engine, first, second):
        assert len(losses) == 4 * second // 2


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

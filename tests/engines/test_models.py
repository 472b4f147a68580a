"""Models of many kinds under every engine: each trains in tiles as it does untiled under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor

import lt_tiled
from lt_tiled import Tiling, tiled_linear_cross_entropy
from lt_tiled.report import Report
from tests.architectures import ARCHITECTURES
from tests.engines.cells import draw, error_of, launch, set_up, step_on, strategy
from tests.engines.conftest import OnRanks
from tests.engines.kinds import KINDS, REFUSED_BY_ZERO3
from tests.models import TinyLM
from tests.parity import near
from tests.world import World

pytestmark = pytest.mark.self_checks

TILED: dict[str, Any] = {"tiling": Tiling(3, self_check=False), "activation_checkpointing": True, "loss": None}
UNTILED = {"tiling": None, "activation_checkpointing": None}


def losses(engine: str, name: str, tiled: bool) -> tuple[list[float], bool]:
    """The losses of three steps, and whether something ran in one tile."""
    kind = KINDS[name]
    options = {"find_unused_parameters": True} if engine == "ddp" and kind.unused else {}
    chosen = strategy(lt_tiled.fabric, engine, **(TILED | kind.policies if tiled else UNTILED), **options)
    if engine == "zero3":  # else a bucket may still have a weight whose gradient arrives late
        chosen.config["zero_optimization"]["reduce_bucket_size"] = 1
    fabric, net = launch(chosen), kind.build()
    optimizer = torch.optim.SGD([weight for weight in net.parameters() if weight.requires_grad], 0.1, momentum=0.9)
    try:
        model, optimizer = fabric.setup(net, optimizer)
        found = [step_on(fabric, optimizer, kind.loss(model, step, dist.get_rank())) for step in range(3)]
        tiles = [row.tiles for row in Report.of(net).tiled]
    finally:
        fabric.strategy.release()
    return found, tiles == [] or min(tiles) < 2


CELLS = [(engine, name) for name, kind in KINDS.items() for engine in kind.engines]


@pytest.mark.table(
    "zero3-(frozen|unused|tied|LoRA|DoRA on the head|a copy of the head|LoRA on all|Llama|Gemma 2|blocks run twice)"
    "|zero3-(4096 and 512 tokens|two calls|product|no gradient between|last is unused|Unusual, frozen embedding)"
    "|zero3-(own leaves, UsesNormBefore|Crosses|ReturnsDict)"
    "|fsdp2-(other experts on each rank|a copy of the head|LoRA on experts|Mixtral|4096 and no tokens|two calls)"
    "|fsdp-(LoRA on the head|BERT|unused|tied)|zero1-4096 and 1 token|zero2-(tokens are mixed|three calls)"
    "|ddp-(tied|Mixtral|product|LoRA on experts)"
)
@pytest.mark.parametrize(("engine", "name"), CELLS)
def test_losses(engine: str, name: str, on_ranks: OnRanks) -> None:
    """Three steps in tiles have the losses of untiled ones under DDP: with frozen, tied and unused weights, adapters,
    mixtures of experts, lengths that differ between ranks, several calls before one backward pass, and blocks that take
    and return other things than hidden states.
    """
    plain = on_ranks.once(losses, "ddp", name, False)
    for (true, _), (found, untiled) in zip(plain, on_ranks(losses, engine, name, True), strict=True):
        assert found == near(true)
        assert KINDS[name].untiled or not untiled


def refused(engine: str, name: str) -> tuple[str, str]:
    return error_of(lambda: losses(engine, name, True))


@pytest.mark.parametrize("name", REFUSED_BY_ZERO3)
def test_what_a_leaf_cannot_be(name: str, on_ranks: OnRanks) -> None:
    """Blocks whose gradients ZeRO-3 would lose are refused by name in the first step."""
    for error, message in on_ranks(refused, "zero3", name):
        assert error == "RuntimeError"
        assert message.startswith(f"{name.partition(',')[0]} has gradients that ZeRO-3 would lose")


def images_on_one_rank(frozen: bool, tiling: Tiling | None) -> tuple[dict[str, Tensor], bool]:
    """The gradients of a step with images on rank 0 alone, averaged by DDP."""
    architecture = ARCHITECTURES["Qwen 3-VL"]
    net: Any = architecture.build(torch.float32)
    inputs = architecture.feed(net)
    image = net.config.image_token_id
    if frozen:
        for name, weight in net.named_parameters():
            weight.requires_grad_("language_model" in name)
        torch.manual_seed(0)
        targets = r".*language_model.layers.1.*(gate_proj|down_proj|q_proj)|.*visual.*linear_fc1"
        net = get_peft_model(net, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    if dist.get_rank():
        ids = inputs["input_ids"]
        inputs = {"input_ids": ids.masked_fill(ids == image, 7), "labels": inputs["labels"]}
    fabric = launch("ddp", tiling=tiling, activation_checkpointing=True, find_unused_parameters=True)
    model = fabric.setup_module(net)
    fabric.backward(model(**inputs).loss)
    rows = [row for row in Report.of(net).tiled if dist.get_rank() == 0 or "language" in row.path]
    fabric.strategy.release()
    tiled = bool(rows) and all(row.tiles > 1 for row in rows)
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}, tiled


@pytest.mark.parametrize("frozen", [False, True], ids=["all trains", "frozen tower, LoRA on some layers"])
def test_images_on_one_rank(world: World, frozen: bool) -> None:
    """A vision-language model under DDP, with images on one rank and none on the other and LoRA or without: both towers
    are tiled, and both ranks' gradients are the untiled ones.
    """
    untiled, tiled = world(images_on_one_rank, frozen, None), world(images_on_one_rank, frozen, TILED["tiling"])
    for (true, _), (found, all_tiled) in zip(untiled, tiled, strict=True):
        assert all_tiled
        assert any("vis" in name for name in found)
        scale = max(float(value.norm()) for value in true.values())
        for name, value in true.items():
            assert float((found[name] - value).norm()) <= 1e-4 * max(float(value.norm()), 1e-3 * scale)


def with_norms_as_units(tiling: Tiling | None) -> list[float]:
    """The losses of three steps of a Gemma 2 whose norms next to MLPs are FSDP units of their own."""
    kind = KINDS["Gemma 2"]
    net = kind.build()
    classes = {type(m) for path, m in net.named_modules() if path.endswith("feedforward_layernorm")}
    fabric = launch("fsdp", tiling=tiling, auto_wrap_policy=classes)
    model, optimizer = set_up(fabric, net, "fsdp_flat", lambda ps: torch.optim.SGD(ps, 0.1))
    found = [step_on(fabric, optimizer, kind.loss(model, step, dist.get_rank())) for step in range(3)]
    fabric.strategy.release()
    return found


def test_norms_as_units(world: World) -> None:
    """Norms in the tiles of an MLP may be FSDP units: the losses are the untiled ones."""
    assert world(with_norms_as_units, TILED["tiling"])[0] == near(world(with_norms_as_units, None)[0])


def set_up_with_state() -> tuple[str, str]:
    net = TinyLM()
    optimizer = torch.optim.SGD(net.parameters(), 1.0, momentum=0.9)
    net(draw((2, 24), 0)).sum().backward()
    optimizer.step()
    return error_of(lambda: launch("fsdp2").setup(net, optimizer))


def test_optimizers_with_state_are_refused_under_fsdp2(world: World) -> None:
    """An optimizer that has stepped before ``fabric.setup`` would lose its momentum."""
    for kind, text in world(set_up_with_state):
        assert kind == "ValueError"
        assert "not the state of an optimizer: load it afterwards" in text


def mean_gradients() -> tuple[Tensor, Tensor]:
    """The ranks' mean of the gradients of a loss with their mean count, and that of the mean over all labels."""
    rank = dist.get_rank()
    weight = torch.linspace(-1, 1, 32 * 8, dtype=torch.float64).view(32, 8).requires_grad_()
    sources = [torch.Generator().manual_seed(r) for r in range(2)]
    hidden = [torch.randn(4 + 9 * r, 8, generator=sources[r], dtype=torch.float64) for r in range(2)]
    labels = [torch.randint(32, (4 + 9 * r,), generator=sources[r]) for r in range(2)]
    count = torch.tensor(len(labels[rank]) / 2)
    dist.all_reduce(count)
    loss = tiled_linear_cross_entropy(hidden[rank], weight, labels[rank], num_shards=2, count=count)
    (mine,) = torch.autograd.grad(loss, weight)
    dist.all_reduce(mine)
    (true,) = torch.autograd.grad(F.cross_entropy(torch.cat(hidden) @ weight.t(), torch.cat(labels)), weight)
    return mine / 2, true


def test_mean_over_all_ranks(world: World) -> None:
    """With the mean count of all ranks, the mean of their gradients is that of the mean over all of their labels."""
    for mean, true in world(mean_gradients):
        torch.testing.assert_close(mean, true, rtol=1e-6, atol=1e-9)

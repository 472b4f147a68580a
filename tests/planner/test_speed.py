"""Predicted time: exact on given numbers, and close to published steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.longest import LLAMA_8B
from lt_tiled import ActivationCheckpointing, SequenceParallel, TiledDeepSpeedStrategy, Tiling
from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.offload.offloader import OffloadStats
from lt_tiled.planner.engines import Engine, elements
from lt_tiled.planner.job import Job, make_job
from lt_tiled.planner.ledger import Allocation
from lt_tiled.planner.simulate import Plan, plan
from lt_tiled.planner.speed import ATTENTION, CPU_ADAM, MACHINES, PRODUCTS, Machine, predict
from tests.planner.runs import LLAMA

pytestmark = pytest.mark.slow

ROUND = Machine(tflops=1e-3, memory=100.0, pcie=10.0, nvme=1.0, network=50.0)
"""A GPU of 1 GFLOP/s."""
COMPUTED = 1 / PRODUCTS + 1 / ATTENTION
UPDATE = (2 * 100 + 10) / 100
"""Seconds of the forward pass and of the optimizer in the step of :func:`run`."""


def job(weights: int = 0, **settings: Any) -> Job:
    """The job of a module with so many weights."""
    module: Any = torch.nn.ParameterList([torch.empty(weights, device="meta")])
    return Job(module, None, **settings)


def run(job: Job, **changes: Any) -> Plan:
    """A step of one GFLOP of products and attention in the forward pass, and of twice as much in the backward pass."""
    state = [(Allocation(10**11, "optimizer"), 1), (Allocation(10**10, "gradients"), 1)]
    work = Counter(products=10**9, attention=10**9)
    base = Plan(job, 3, 1024, 0, 0, {"forward": 2, "backward": 2, "optimizer": 2}, state, work, work + work)
    return replace(base, **changes)


def test_seconds_are_exact() -> None:
    """Each phase takes its FLOPs at the share of the peak of their kind, and an update of weights the bandwidth of
    its state.
    """
    speed = predict(run(job()), ROUND)
    assert speed.seconds == pytest.approx(3 * COMPUTED + UPDATE, rel=1e-12)
    twice = predict(run(job(accumulate=2)), ROUND)
    assert twice.seconds == pytest.approx(6 * COMPUTED + UPDATE, rel=1e-12)
    assert twice.tokens_per_second == pytest.approx(2 * 3 * 1024 / twice.seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("cpu", "disk", "bound", "seconds"),
    [
        (10**9, 0, "compute", COMPUTED),
        (10**12, 0, "PCIe", 100.0),
        (10**12, 10**12, "NVMe", 1000.0),
    ],
)
def test_the_slowest_bounds_a_phase(cpu: int, disk: int, bound: str, seconds: float) -> None:
    """Offloaded bytes pass PCIe, those for the disk NVMe as well, and overlap with the computation."""
    speed = predict(run(job(), offloaded=OffloadStats(cpu_bytes=cpu, disk_bytes=disk)), ROUND)
    assert speed.bound == bound
    assert speed.seconds == pytest.approx(seconds + max(seconds, 2 * COMPUTED) + UPDATE, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("ddp", (0, 2, 0)), ("zero2", (0, 1, 1)), ("zero3", (1, 2, 0)), ("fsdp2", (1, 2, 0))],
)
def test_bytes_of_engines(name: Any, gigabytes: tuple[int, ...]) -> None:
    """DDP reduces and distributes gradients, ZeRO-2 reduces them and gathers updated weights, and engines that shard
    weights gather them in each pass.
    """
    base = job(10**12, engine=Engine(name, 4), dtype=torch.bfloat16)
    speed = predict(run(base), ROUND)
    seconds = [count * 2000 * 3 / 4 / 50 for count in gigabytes]
    assert speed.seconds == pytest.approx(sum(map(max, seconds, (COMPUTED, 2 * COMPUTED, UPDATE))))


def test_offloaded_state() -> None:
    """An optimizer in CPU memory updates the weights of its rank there, and weights in CPU memory pass PCIe twice."""
    cpu = {"device": "cpu"}
    engine = Engine("zero3", 4, zero={"offload_optimizer": cpu, "offload_param": cpu})
    speed = predict(run(job(10**12, engine=engine, dtype=torch.bfloat16)), ROUND)
    assert speed.bound == "the optimizer"
    passes = 50 + 60  # PCIe, and then the network
    assert speed.seconds == pytest.approx(passes + 10**12 / 4 / CPU_ADAM)


def test_work_is_counted_by_kind() -> None:
    """Attention has half of the products of a causal mask in the forward pass, and 2.5 times as many in the backward
    pass. What is tiled counts in full, and ranks that share a sequence do a part each.
    """
    layers, tokens, width = 2, 2048, LLAMA["hidden_size"]
    with torch.device("meta"):
        module = CausalLM({**LLAMA, "num_hidden_layers": layers})
    base = make_job(module, TextFiles(seq_len=tokens), {"strategy": "tiled_ddp", "accelerator": "cpu", "devices": 2})
    base = replace(base, activation_checkpointing=None)
    alone = plan(base, tokens)
    attention = layers * 4 * tokens * tokens * width // 2
    assert (alone.forward["attention"], alone.backward["attention"]) == (attention, attention * 5 // 2)
    shared = plan(replace(base, sequence_parallel=SequenceParallel(2)), tokens)
    assert shared.forward["attention"] == attention // 2


ABLATION = [
    (32_768, 1, None, 231.6),
    (163_840, 1, None, 514.4),
    (1_100_000, 8, None, 576.1),
]
"""Tokens, ranks that share a sequence, offloading and TFLOPS of Llama 3.1 8B on 8 x H100 (arXiv:2506.13996)."""


@pytest.mark.full
@pytest.mark.parametrize(("tokens", "sharing", "offload", "published"), ABLATION)
def test_published_speed(tokens: int, sharing: int, offload: Any, published: float) -> None:
    """Predicted steps take the published time within 15 %. The TFLOPS are by the formula of the published rows, which
    counts attention without its mask.
    """
    with torch.device("meta"):
        module = CausalLM({**LLAMA_8B, "num_hidden_layers": 32, "max_position_embeddings": 2**22}, loss=True)
    strategy = TiledDeepSpeedStrategy(stage=3, offload_optimizer=True, offload_parameters=True)
    base = make_job(module, TextFiles(), {"strategy": strategy, "precision": "bf16-true", "devices": 8})
    base = replace(
        base,
        tiling=Tiling(),
        loss="auto",
        activation_checkpointing=ActivationCheckpointing(offload=offload),
        sequence_parallel=SequenceParallel(sharing) if sharing > 1 else None,
    )
    found = plan(base, tokens)
    seconds = predict(found, MACHINES["h100"]).seconds
    flops = 8 * elements(module.parameters()) * tokens + 16 * 32 * 4096 * tokens**2
    assert flops / sharing / seconds / 1e12 == pytest.approx(published, rel=0.15)

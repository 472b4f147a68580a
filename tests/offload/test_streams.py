"""The order of copies and computation of a GPU, checked without one. See ``tests/offload/streams.py``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lt_tiled import Checkpointing, prepare
from lt_tiled.offload import pinned, tiers
from lt_tiled.offload.offloader import Offloader, build_offloader
from tests.models import TinyLM, lm_loss
from tests.offload.streams import Event, Stream, StreamCheck
from tests.offload.test_offloader import settle

CPU: dict[str, Any] = {"offload": "cpu", "cpu_budget": "1GiB"}
DISK: dict[str, Any] = {"offload": "disk"}
BOTH: dict[str, Any] = {"offload": "cpu+disk", "cpu_budget": 16384}
POLICIES: list[dict[str, Any]] = [
    tier | fields
    for tier in (CPU, DISK, BOTH)
    for fields in ({}, {"activations": "all", "prefetch": 3}, {"compress": True, "keep_last": 1, "prefetch": 1})
]


def ids(rows: int = 2) -> Tensor:
    return torch.arange(rows * 12).view(rows, 12) % 32


class Stumbled(Exception):
    pass


def train(check: StreamCheck, fields: dict[str, Any], stumble: tuple[int, ...] = ()) -> None:
    """Train on the device: with accumulation, on two streams, with dropped graphs, and with steps that end early.

    Args:
        check: What the device is.
        fields: Those of the policy.
        stumble: The numbers of the calls of a block that raise an error.
    """
    torch.manual_seed(0)
    model, calls = TinyLM(4, 8, 8), [0]
    side = Stream(check, torch.device("cuda", 0))

    def count(*_: object) -> None:
        calls[0] += 1
        if calls[0] in stumble:
            raise Stumbled

    with prepare(model, checkpointing=Checkpointing(**{"min_bytes": 0, "keep_last": 0} | fields)) as prepared:
        for block in model.blocks:
            block.attention.register_forward_pre_hook(count)
        check.adopt(*model.parameters())
        for rows in (2, 1):
            inputs = check.adopt(ids(rows))
            with suppress(Stumbled):
                lm_loss(model(inputs), inputs).backward()
            model(inputs)  # a graph that is dropped
            with suppress(Stumbled), check.stream(side):
                side.wait_event(check._default[0].record_event())
                loss = lm_loss(model(inputs), inputs)
                (gradient,) = torch.autograd.grad(loss, model.embed.weight)
                del loss, gradient
            check._default[0].wait_event(side.record_event())
            gc.collect()
        stored = prepared.offloader.so_far()
        assert stored.cpu_bytes + stored.disk_bytes > 0


@pytest.mark.parametrize("fields", POLICIES, ids=str)
def test_every_two_accesses_are_ordered(fields: dict[str, Any]) -> None:
    """With each tier, copies, computation and reuse of memory are in order: accumulation, a second stream, dropped
    graphs.
    """
    with StreamCheck() as check:
        train(check, fields)
    assert check.races == []
    assert check.operations > 500

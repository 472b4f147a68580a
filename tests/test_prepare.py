"""A whole model without a trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lt_tiled import ActivationCheckpointing, Tiling, prepare, tile
from lt_tiled.report import Report
from tests.models import GatedMLP, TinyLM, lm_loss

IDS = torch.arange(2 * 24).view(2, 24) % 32


def state(model: nn.Module) -> list[dict[str, object]]:
    return [dict(m.__dict__) for m in model.modules()]


def test_release_leaves_the_model_as_it_was() -> None:
    """After ``release``, and after the end of ``with`` by an exception, no instance attribute is left; twice is no
    error.
    """
    model = TinyLM()
    before = state(model)
    prepared = prepare(model, tiling=Tiling(4), activation_checkpointing=True)
    assert state(model) != before
    prepared.release()
    prepared.release()
    assert state(model) == before
    with pytest.raises(ArithmeticError), prepare(model, tiling=Tiling(4), activation_checkpointing=True):
        raise ArithmeticError
    assert state(model) == before


def with_a_capacity() -> nn.Module:
    model = nn.ModuleList([GatedMLP(), GatedMLP()])
    model[1].expert_capacity = 4
    return model


def of_lists() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16))
    model.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(16), GatedMLP()]) for _ in range(2))
    return model


REFUSED: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (TinyLM, {"tiling": Tiling(targets="nothing")}, "'nothing' matches no module"),
    (TinyLM, {"tiling": 4, "activation_checkpointing": ActivationCheckpointing("nothing")}, "matches no module"),
    (TinyLM, {"tiling": "many"}, "num_shards='many' must be 'auto' or an integer of at least 1"),
    (with_a_capacity, {"tiling": Tiling(4, targets=["0", "1"])}, r"1 \(GatedMLP\) cannot be tiled"),
    (of_lists, {"activation_checkpointing": True}, "ActivationCheckpointing found no blocks in Sequential"),
    (of_lists, {"activation_checkpointing": ActivationCheckpointing("layers.?")}, r"'layers.\?' matches no module"),
]


@pytest.mark.parametrize(("build", "policies", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_an_error_leaves_the_model_as_it_was(
    build: Callable[[], nn.Module], policies: dict[str, Any], message: str
) -> None:
    """Policies that name what is not there, or cannot be prepared as a list of parts, change nothing."""
    model = build()
    before = state(model)
    with pytest.raises(ValueError, match=message):
        prepare(model, **policies)
    assert state(model) == before


def test_report() -> None:
    """The report lists every tiled module with the tiles of its largest call, and every block; its table and line show
    them. That of a plain model says so.
    """
    model = TinyLM()
    with prepare(model, tiling=Tiling(4), activation_checkpointing=True) as prepared:
        assert {(row.path, row.tokens, row.tiles) for row in prepared.report().tiled} == {
            ("blocks.0.mlp", 0, 0),
            ("blocks.1.mlp", 0, 0),
        }
        lm_loss(model(IDS), IDS).backward()
        model(IDS[:, :3])
        report = prepared.report()
    assert [(row.path, row.kind, row.tokens, row.tiles) for row in report.tiled] == [
        ("blocks.0.mlp", "GatedMLP", 48, 4),
        ("blocks.1.mlp", "GatedMLP", 48, 4),
    ]
    assert [row.path for row in report.blocks] == ["blocks.0", "blocks.1"]
    assert report.summary() == "lt_tiled tiles 2 x GatedMLP and applies activation checkpointing to 2 x Block"
    cells = [list(column.cells) for column in report.table("1 GiB").columns]
    assert cells == [
        ["tiled", "activation checkpointing"],
        ["2 x GatedMLP", "2 x Block"],
        ["blocks.*.mlp", "blocks.*"],
        ["48", ""],
        ["4", ""],
    ]
    assert Report.of(TinyLM()) == Report((), ())
    assert Report.of(TinyLM()).summary() == "lt_tiled changes nothing in the model"


def test_what_is_prepared_already(caplog: pytest.LogCaptureFixture) -> None:
    """What was tiled by hand keeps its own policy, and stays tiled after the release. A second call, which changes
    nothing, says so.
    """
    model = TinyLM()
    tile(model.blocks[0].mlp, num_shards=2)
    with prepare(model, tiling=6, activation_checkpointing=True) as prepared:
        prepare(model, tiling=Tiling(8)).release()
        assert "2 modules of TinyLM are prepared already and stay so: release what" in caplog.text
        model(IDS)
        assert [row.tiles for row in prepared.report().tiled] == [2, 6]
    assert "forward" in model.blocks[0].mlp.__dict__
    assert "forward" not in model.blocks[1].mlp.__dict__

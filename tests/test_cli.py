"""The command line: what it parses and refuses in this process, and what it does in processes of its own."""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import yaml

from lt_tiled.cli import main
from tests.models import tiny_llama
from tests.processes import Forked
from tests.world import world_of

ROOT = Path(__file__).parent.parent
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


def config(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    """The configuration that these arguments lead to."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", *args, "--print_config"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    return yaml.safe_load(printed[printed.index("# lightning.pytorch==") :])  # DeepSpeed's logger may stand before


STRATEGY = ("--model=CausalLM", "--data=TextFiles", "--trainer.strategy=TiledDDPStrategy")


@pytest.mark.slow
def test_short_forms_and_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    """Short forms, a field in the place of one, registered names and another optimizer are understood."""
    Path("short.yaml").write_text(
        "trainer: {strategy: {class_path: lt_tiled.TiledDDPStrategy,"
        " init_args: {tiling: 8, activation_checkpointing: true}}}\n"
        "model: {class_path: lt_tiled.lm.CausalLM}\ndata: {class_path: lt_tiled.lm.TextFiles}\n"
    )
    short = config(capsys, "--config", "short.yaml")["trainer"]["strategy"]["init_args"]
    assert (short["tiling"], short["activation_checkpointing"]) == (8, True)
    given = config(capsys, "--config", "short.yaml", "--trainer.strategy.tiling.num_shards=4")["trainer"]["strategy"]
    assert given["init_args"]["tiling"]["num_shards"] == 4
    named = config(capsys, *STRATEGY[:2], "--trainer.strategy=tiled_ddp", "--model.optimizer=SGD")
    assert named["trainer"]["strategy"] == "tiled_ddp"
    assert named["model"]["init_args"]["optimizer"]["class_path"] == "torch.optim.SGD"


@pytest.mark.table("(FSDP|DeepSpeed)-.*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "of_parent"),
    [("DDP", "static_graph"), ("FSDP", "cpu_offload"), ("ModelParallel", "data_parallel_size"), ("DeepSpeed", "stage")],
)
def test_help_shows_all_arguments(name: str, of_parent: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help of a strategy shows its own and its parent's arguments, and leads on to the fields of the policies with
    their text.
    """
    shown = f"--trainer.strategy.help=lt_tiled.Tiled{name}Strategy"
    for more in ([], ["--trainer.strategy.tiling.help"]):
        with pytest.raises(SystemExit):
            main(["fit", shown, *more])
    text = " ".join(capsys.readouterr().out.split())
    for option in ("tiling", "activation_checkpointing", of_parent):
        assert f"--trainer.strategy.{option} " in text
    assert "Largest number of tokens per tile. Give this or" in text


def test_refused_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown key stops the command with its name and exit code 2, a value out of bounds with value and bound."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", *STRATEGY, "--trainer.strategy.tiling.num_shard=4"])
    assert stop.value.code == 2
    assert "num_shard" in capsys.readouterr().err
    with pytest.raises(ValueError, match="size=-1 must be an integer of at least 1"):
        main(["fit", *STRATEGY, "--trainer.strategy.sequence_parallel=-1"])


@pytest.mark.slow
def test_quickstart(tmp_path: Path) -> None:
    """Two steps of the quickstart on two ranks, the second of which it starts itself: tiles, validation, a checkpoint,
    and one table.
    """
    command = Forked(
        *("lt-tiled", "fit", "--config", QUICKSTART, "--trainer.accelerator=cpu", "--trainer.devices=2"),
        *("--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"),
        printed=tmp_path / "printed.txt",
        cwd=tmp_path,
        COLUMNS="120",  # to read what is printed
    )
    code, printed = command.finish(), command.printed.read_text()
    assert code == 0, printed
    assert re.search(r"tiled\s+│ 4 x LlamaMLP\s+│ model.model.layers.\*.mlp\s+│\s+4096\s+│\s+4 ", printed)
    assert re.search(r"peak memory of a step: \d+\.\d\d GiB", printed)
    (checkpoint,) = Path("runs").rglob("*.ckpt")
    keys = torch.load(checkpoint, weights_only=True)["state_dict"].keys()
    assert set(keys) == {f"model.{key}" for key in tiny_llama(num_hidden_layers=4).state_dict()}


CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def printed_by(folder: str, *args: str) -> str:
    """What the command prints on one of the ranks that run it."""
    os.chdir(folder)
    with redirect_stdout(io.StringIO()) as out:
        main(list(args))
    return out.getvalue()


@pytest.mark.self_checks
@pytest.mark.slow
@pytest.mark.table("deepspeed_zero3_disk")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_on_two_cpu_ranks(path: Path, request: pytest.FixtureRequest) -> None:
    """``--trainer.accelerator=cpu --trainer.devices=2`` runs every config: it trains in tiles, validates, saves, and
    reports once.
    """
    world = world_of(request, path.stem)
    strategy = yaml.safe_load(path.read_text())["trainer"]["strategy"]["init_args"]
    offloads = "offload" in strategy["activation_checkpointing"]
    tokens = 2048 if offloads else 512
    both = world(
        *(printed_by, os.getcwd(), "fit", "--config", str(path), "--trainer.accelerator=cpu", "--trainer.devices=2"),
        *("--trainer.max_steps=1", "--trainer.val_check_interval=1", "--trainer.limit_val_batches=1"),
        *(f"--data.seq_len={tokens}", "--trainer.strategy.tiling.num_shards=2"),
    )
    printed = "".join(both)
    table = rf"4 x LlamaMLP\s+│ model\.model\.layers\.\*\.mlp\s+│ +{tokens} +│ +2 "
    assert len(re.findall(table, printed)) == 1  # one line, although no terminal is as wide
    assert re.search(r"val_perplexity:\s*\d", printed)
    assert list(Path("runs").rglob("*.ckpt"))
    assert ("offloaded per step" in printed) == offloads


@pytest.mark.slow
@pytest.mark.parametrize("command", ["validate", "predict"])
def test_own_model_and_data(command: str, caplog: pytest.LogCaptureFixture) -> None:
    """``validate`` and ``predict`` run a model and data of the user's own, found by their import path."""
    options = ("--trainer.strategy=tiled", "--trainer.accelerator=cpu", "--trainer.logger=false")
    with caplog.at_level("INFO"):
        main([command, "--model=tests.lit.LitTiny", *options])
    assert "lt_tiled tiles 2 x GatedMLP and applies activation checkpointing to 2 x Block" in caplog.text


def test_a_config_is_not_written_over() -> None:
    """A run without a logger saves its configuration next to a ``config.yaml`` that it was read from, which stays as it
    is.
    """
    own = (
        "model: tests.lit.LitTiny  # mine\n"
        "trainer: {strategy: tiled, accelerator: cpu, logger: false, max_steps: 1, limit_val_batches: 0}"
    )
    Path("config.yaml").write_text(own)
    main(["fit", "--config", "config.yaml"])
    assert Path("config.yaml").read_text() == own
    assert yaml.safe_load(Path("run.yaml").read_text())["trainer"]["max_steps"] == 1


@pytest.mark.slow
def test_own_configs(capsys: pytest.CaptureFixture[str]) -> None:
    """``--config configs/...`` is the package's own where there is no such file, and no other argument is touched."""
    packaged = config(capsys, "--config=configs/quickstart.yaml", "--data.paths=configs/x.txt")
    assert packaged["data"]["init_args"]["paths"] == "configs/x.txt"
    Path("configs").mkdir()
    Path("configs/quickstart.yaml").write_text("trainer: {max_steps: 7}")
    own = config(capsys, "--config", "configs/quickstart.yaml", *STRATEGY[:2])
    assert own["trainer"]["max_steps"] == 7

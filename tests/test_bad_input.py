"""Bad input that the command line meets behind the parser: models, checkpoints, modules of the user, the first step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch

from lt_tiled.cli.bad_input import registered_name
from tests.test_cli import RUN, STRATEGY, config, stopped

SIZES = "hidden_size: 8, intermediate_size: 16, num_hidden_layers: 2, num_attention_heads: 1"


@pytest.fixture(autouse=True)
def _text_and_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let modules be imported from the test's folder, which has a text."""
    monkeypatch.syspath_prepend(os.getcwd())
    Path("a.txt").write_bytes(bytes(range(256)))


def ends(capsys: pytest.CaptureFixture[str], code: int, text: str, *args: str) -> str:
    """The line with which the command ends for a configuration."""
    Path("run.yaml").write_text(text)
    return stopped(capsys, code, "--config=run.yaml", *args)


@pytest.mark.table("not causal|zero|activation")
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("hidden_size: 8", "hidden_size: -8", "config: hidden_size=-8 must be None or an integer of at least 1."),
        ("hidden_size: 8", "hidden_size: big", "config: hidden_size='big' must be None or an integer"),
        (
            "num_attention_heads: 1",
            "num_attention_heads: 0",
            "config: num_attention_heads=0 must be None or an integer",
        ),
        ("num_attention_heads: 1", "num_attention_heads: 3", "config: Class validation error for validator"),
        (
            "num_attention_heads: 1",
            "num_attention_heads: 4, num_key_value_heads: 3",
            "config: num_attention_heads=4 is no multiple of num_key_value_heads=3.",
        ),
        (f"llama, {SIZES}", "gpt2, n_embd: -8", "config: n_embd=-8 must be None or an integer of at least 1."),
        ("hidden_size: 8", "hidden_size: 8, hidden_act: gleu", "config: the model cannot be built: KeyError: 'gleu'"),
        ("model_type: llama", "model_type: 5", "config: transformers has no model_type '5'"),
        ("model_type: llama", "model_type: t5", "config: the model cannot be built: ValueError: Unrecognized"),
    ],
    ids=["negative", "no number", "zero", "not divided", "no multiple", "own name", "activation", "type", "not causal"],
)
def test_a_model_that_cannot_be_built(right: str, wrong: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A size or name with which no model can be built is one line with the key."""
    text = RUN.replace("num_attention_heads: 1", "num_attention_heads: 1, vocab_size: 256").replace(right, wrong, 1)
    assert ends(capsys, 1, text).startswith(message)


@pytest.mark.slow
def test_weights_that_cannot_be_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose file of weights is damaged is one line with its path."""
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "llama", "vocab_size": 256}')
    Path("model/model.safetensors").write_text("damaged")
    text = RUN.replace(f"config: {{model_type: llama, {SIZES}}}", "path: model")
    assert ends(capsys, 1, text).startswith("path='model': the model cannot be built: SafetensorError: ")


def cut(path: str) -> None:
    """Write a checkpoint and cut it short."""
    torch.save({"state_dict": {"a": torch.zeros(999)}}, path)
    os.truncate(path, os.path.getsize(path) // 2)


def of_another_model(path: str) -> None:
    state: dict[str, Any] = {"state_dict": {"a": torch.zeros(3)}, "pytorch-lightning_version": "2.6.0"}
    torch.save(state, path)


@pytest.mark.table("another model|missing|cut")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: Path(path).write_text("hello"), "ckpt_path 'x.ckpt' cannot be loaded: KeyError: 101"),
        (lambda path: Path(path).touch(), "ckpt_path 'x.ckpt' cannot be loaded: EOFError:"),
        (cut, "ckpt_path 'x.ckpt' cannot be loaded: RuntimeError: PytorchStreamReader failed"),
        (os.mkdir, "ckpt_path 'x.ckpt' cannot be loaded: IsADirectoryError: "),
        (lambda path: torch.save(torch.zeros(3), path), "ckpt_path 'x.ckpt' cannot be loaded: AttributeError: "),
        (of_another_model, "ckpt_path 'x.ckpt' cannot be loaded: "),
        (
            lambda path: None,
            "ckpt_path 'x.ckpt' cannot be loaded: FileNotFoundError: Checkpoint file not found: x.ckpt",
        ),
    ],
    ids=["text", "empty", "cut", "directory", "tensor", "another model", "missing"],
)
def test_what_is_no_checkpoint(make: Any, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that cannot be loaded is one line with its path and the reason."""
    make("x.ckpt")
    assert ends(capsys, 1, RUN, "--ckpt_path=x.ckpt").startswith(message)


def test_pipes_are_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A named pipe as a checkpoint or configuration is refused, as it would wait for a writer; ``<(command)`` works."""
    os.mkfifo("pipe")
    assert ends(capsys, 2, RUN, "--ckpt_path=pipe") == "pipe is a named pipe: write what it gives to a file."
    assert "pipe is a named pipe" in ends(capsys, 2, RUN, "--config=pipe")
    reader, writer = os.pipe()
    os.write(writer, b"trainer: {max_steps: 3}")
    os.close(writer)
    assert config(capsys, *STRATEGY[:2], f"--config=/dev/fd/{reader}")["trainer"]["max_steps"] == 3


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class Own(Exception)\n    pass\n", "own.py:1: SyntaxError: expected ':'"),
        ("\nx = undefined\n", "own.py:2: NameError: name 'undefined' is not defined"),
        ("import not_installed\n", "own.py:1: ModuleNotFoundError: No module named 'not_installed'"),
        ("import torch\ntorch.nno\n", "own.py:2: AttributeError: module 'torch' has no attribute 'nno'"),
        ("import own_helper\n", "own_helper.py:2: ZeroDivisionError: division by zero"),
    ],
    ids=["syntax", "name", "dependency", "attribute", "import of an import"],
)
@pytest.mark.parametrize("argument", ["--model=own.Own", "--trainer.strategy=own.Own", "--trainer.callbacks=own.Own"])
def test_a_module_that_cannot_be_imported(
    argument: str, code: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception in the import of the user's module is one line: its file and line, and what it is."""
    Path("own.py").write_text(code)
    Path("own_helper.py").write_text("\n1 / 0\n")
    assert ends(capsys, 2, RUN, argument).endswith(f": {os.getcwd()}/{message}")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("strategy=TiledDPPStrategy", "strategy: there is no strategy 'TiledDPPStrategy': did you mean 'Tiled"),
        (
            "strategy=lt_tiled.TiledDPPStrategy",
            "strategy: there is no strategy 'lt_tiled.TiledDPPStrategy': did you mean 'Tiled",
        ),
        ("strategy.class_path=TiledDPPStrategy", "strategy: there is no 'TiledDPPStrategy': did you mean 'Tiled"),
        ("callbacks=[MemoryMonitr]", "callbacks: there is no 'MemoryMonitr': did you mean 'MemoryMonitor'?"),
        ("accumulate_grad_batches=0", "accumulate_grad_batches: 0 must be positive."),
        ("val_check_interval=0", "val_check_interval: 0 must be positive."),
    ],
)
def test_a_trainer_argument_that_is_not_there(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelled strategy or callback is one line with the name that is near, before anything is built."""
    assert stopped(capsys, 2, *STRATEGY[:2], f"--trainer.{argument}").startswith(f"trainer.{message}")


def test_strategies_by_the_name_of_their_class() -> None:
    """The name of a strategy's class alone stands for the strategy with its defaults."""
    names = ("TiledDDPStrategy", "TiledDeepSpeedStrategy", "DDPStrategy", "tiled_fsdp2", "auto", "DDP")
    assert [registered_name(name) for name in names] == [
        "tiled_ddp",
        "tiled_deepspeed",
        "ddp",
        "tiled_fsdp2",
        "auto",
        "DDP",
    ]


class Watch(pl.Callback):
    """Notes at an exception whether the weights and the optimizer are those from before the first step."""

    unchanged: ClassVar[list[bool]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.before = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        after = pl_module.state_dict()
        same = all(torch.equal(after[name], value) for name, value in self.before.items())
        self.unchanged.append(same and not trainer.optimizers[0].state and trainer.global_step == 0)


WATCHED = RUN.replace(
    "logger: false\n",
    "logger: {class_path: CSVLogger, init_args: {save_dir: runs}}\n  num_sanity_val_steps: 0\n  log_every_n_steps: 1\n",
).replace(
    "ModelCheckpoint\n",
    "ModelCheckpoint\n      init_args: {every_n_train_steps: 1}\n    - tests.test_bad_input.Watch\n",
)


@pytest.mark.self_checks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            "num_shards: 2",
            "{num_shards: 2, targets: LlamaAttention}",
            "model.model.layers.0.self_attn (LlamaAttention)",
        ),
        (
            "offload: cpu",
            "{offload: cpu, select: [hiden], min_bytes: 1}",
            "select='hiden' is no argument of LlamaDecod",
        ),
    ],
    ids=["not position-wise", "select"],
)
def test_the_first_step_loses_nothing(right: str, wrong: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake that the first step finds is found before it changes a weight, logs a metric or saves a checkpoint."""
    Watch.unchanged.clear()
    text = WATCHED.replace(f"\n        {right}", f" {wrong}", 1)
    assert ends(capsys, 1, text).startswith(message)
    assert Watch.unchanged == [True]
    assert not [*Path().rglob("*.ckpt"), *Path().rglob("metrics.csv")]
    assert ends_well(WATCHED)
    assert [*Path().rglob("*.ckpt")]
    assert [*Path().rglob("metrics.csv")]


def ends_well(text: str) -> bool:
    """Run a configuration, which must not fail."""
    from lt_tiled.cli import main

    Path("run.yaml").write_text(text)
    main(["fit", "--config=run.yaml"])
    return True


@pytest.mark.table("no path|devices|null")
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            "offload: cpu",
            "{offload: cpu, cpu_budget: 16}",
            "cpu_budget=16 has no room for one block input of min_bytes",
        ),
        ("seq_len: 8", "seq_len: null", "seq_len=None must be an integer of at least 2."),
        ("paths: a.txt", "paths: ''", "paths='' names no file"),
        ("paths: a.txt", "paths: []", "paths=[] names no file"),
        ("1.0e-3", "null", "learning_rate=None and weight_decay=0.1 must be numbers."),
        (
            "accelerator: cpu",
            "accelerator: cpu\n  devices: -3",
            "`devices` selected with `CPUAccelerator` should be an",
        ),
    ],
    ids=["cpu_budget", "null", "empty path", "no path", "no learning_rate", "devices"],
)
def test_values_that_are_refused_at_setup(
    right: str, wrong: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value that would fail late, or do nothing, ends the command before the first step."""
    text = RUN.replace(f"\n        {right}", f" {wrong}") if right == "offload: cpu" else RUN.replace(right, wrong, 1)
    assert message in ends(capsys, 1, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: " + "[" * 2000, "nested too deeply"),
        (f"a: {'9' * 5000}", "Exceeds the limit"),
        (f"{RUN.partition('trainer:')[0]}trainer: []\n", "trainer: [] has no keys such as max_steps."),
    ],
    ids=["deep", "long number", "list"],
)
def test_yaml_that_cannot_be_used(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Values that Python cannot read, and a list instead of a mapping, are one line."""
    assert message in ends(capsys, 2, text)

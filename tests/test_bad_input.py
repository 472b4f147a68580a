"""Bad input of the command line: what the parser refuses, and what is met behind it, each in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import lightning.pytorch as pl
import pytest
import torch

from lt_tiled.cli import main
from lt_tiled.cli.bad_input import registered_name
from lt_tiled.errors import OffloadError
from tests.lit import LitTiny
from tests.test_cli import STRATEGY

RUN = """\
model:
  class_path: CausalLM
  init_args:
    config: {model_type: llama, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 2, num_attention_heads: 1}
    learning_rate: 1.0e-3
data:
  class_path: TextFiles
  init_args: {seq_len: 8, paths: a.txt}
trainer:
  accelerator: cpu
  logger: false
  max_steps: 1
  strategy:
    class_path: lt_tiled.TiledSingleDeviceStrategy
    init_args:
      tiling:
        num_shards: 2
      activation_checkpointing:
        offload: cpu
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
"""
SIZES = "hidden_size: 8, intermediate_size: 16, num_hidden_layers: 2, num_attention_heads: 1"


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["fit", *args])
    assert stop.value.code == 2
    return capsys.readouterr().err


def stopped(capsys: pytest.CaptureFixture[str], code: int, *args: str) -> str:
    """What a command prints that ends with this exit code and without a traceback."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", *args])
    printed = capsys.readouterr().err
    assert stop.value.code == code, printed
    assert len(printed.splitlines()) == (1 if code == 2 else 2)  # and the hint at --debug
    return printed.removeprefix("lt-tiled fit: error: ").splitlines()[0]


@pytest.fixture(autouse=True)
def _text_and_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let modules be imported from the test's folder, which has a text."""
    monkeypatch.syspath_prepend(os.getcwd())
    Path("a.txt").write_bytes(bytes(range(256)))


def ends(capsys: pytest.CaptureFixture[str], code: int, text: str, *args: str) -> str:
    """The line with which the command ends for a configuration."""
    Path("run.yaml").write_text(text)
    return stopped(capsys, code, "--config=run.yaml", *args)


ARGUMENTS = {
    "--trainer.strategy=TiledDDPStrategy --trainer.strategy.tiling.num_shard=4": "trainer.strategy.tiling: unknown key "
    "'num_shard': did you mean",
    "--data.seq_ln=4": "data: unknown key 'seq_ln': did you mean 'seq_len'?",
    "--model=CausalLMM": "model: there is no 'CausalLMM': did you mean 'CausalLM'?",
    "--modle=CausalLM": "unknown key 'modle': did you mean 'model'?",
    "--config=none.yaml": 'Parser key "config": File does not exist: ',
    "--trainer.callbacks=MemoryMonitr": "trainer.callbacks: there is no 'MemoryMonitr': did you mean 'MemoryMon",
    "--trainer.callbacks=[MemoryMonitr]": "trainer.callbacks: there is no 'MemoryMonitr': did you mean 'MemoryMon",
    "--trainer.precision=17": "trainer.precision: '17' is none of ",
    "--trainer.accumulate_grad_batches=0": "trainer.accumulate_grad_batches: 0 must be positive.",
    "--trainer.val_check_interval=0": "trainer.val_check_interval: 0 must be positive.",
    "--trainer.strategy=tiled_dpp": "trainer.strategy: there is no strategy 'tiled_dpp': did you mean 'tiled_ddp'?",
    "--trainer.strategy=TiledDPPStrategy": "trainer.strategy: there is no strategy 'TiledDPPStrategy': did you mean 'T",
    "--trainer.strategy=lt_tiled.TiledDPPStrategy": "trainer.strategy: there is no strategy 'lt_tiled.TiledDPPStrat",
    "--trainer.strategy.class_path=TiledDPPStrategy": "trainer.strategy: there is no 'TiledDPPStrategy': did you mean ",
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_mistake_in_an_argument_is_one_line(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelled argument is one line with the name that is near, before anything is built."""
    assert stopped(capsys, 2, *STRATEGY[:2], *arguments.split()).startswith(ARGUMENTS[arguments])


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{RUN}trainer:\n  max_steps: 5\n", "line 22: 'trainer' is there a second time."),
        ("- a\n- b\n", r"it has no keys such as trainer:, but is '- a\n- b\n'."),
        ("word", "it has no keys such as trainer:, but is 'word'."),
        (bytes(range(256)), "this is not YAML in UTF-8."),
        (RUN.encode("utf-16"), "this is not YAML in UTF-8."),
        (f"{RUN}  - : {{\n", "while parsing a block"),
        (LAUGHS, "its aliases (*name) expand to more than 1"),
        ("trainer: &t\n  callbacks: *t\n", "its aliases (*name) expand to more than 1"),
        ("a: " + "[" * 2000, "nested too deeply"),
        (f"a: {'9' * 5000}", "Exceeds the limit"),
        (f"{RUN.partition('trainer:')[0]}trainer: []\n", "trainer: [] has no keys such as max_steps."),
    ],
    ids=[
        "twice",
        "list",
        "word",
        "binary",
        "utf-16",
        "syntax",
        "laughs",
        "endless",
        "deep",
        "long number",
        "no mapping",
    ],
)
def test_a_file_that_is_no_configuration(
    content: str | bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is no YAML, no mapping, has a key twice, expands without end, or has values that Python cannot read
    is one line with its name.
    """
    Path("run.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    found = stopped(capsys, 2, "--config=run.yaml")
    assert found.startswith(str(Path("run.yaml").absolute()))
    assert message in found


MISTAKES = {
    "both counts": (
        "num_shards: 2",
        "num_shards: 4\n        tile_tokens: 512",
        "num_shards=4 and tile_tokens=512 both set the tile",
    ),
    "compile mode": (
        "num_shards: 2",
        "compile: {mode: fast}",
        "compile={'mode': 'fast'}: Unrecognized mode=fast, should be one of",
    ),
    "disk_budget": (
        "offload: cpu",
        "{offload: disk, disk_budget: 16}",
        "disk_budget=16 has no room for one block input of min_bytes",
    ),
    "cpu_budget": (
        "offload: cpu",
        "{offload: cpu, cpu_budget: 16}",
        "cpu_budget=16 has no room for one block input of min_bytes",
    ),
    "config key": (
        "hidden_size",
        "hiden_size",
        "config: LlamaConfig has no key 'hiden_size': did you mean 'hidden_size'?",
    ),
    "seq_len": ("seq_len: 8", "seq_len: 1", "seq_len=1 must be an integer of at least 2"),
    "null": ("seq_len: 8", "seq_len: null", "seq_len=None must be an integer of at least 2."),
    "no file": ("a.txt", "none", "paths: 'none' matches no file"),
    "empty path": ("paths: a.txt", "paths: ''", "paths='' names no file"),
    "no path": ("paths: a.txt", "paths: []", "paths=[] names no file"),
    "no directory": ("logger: false", "default_root_dir: a.txt/runs", "[Errno 20] Not a directory: "),
    "no learning_rate": ("1.0e-3", "null", "learning_rate=None and weight_decay=0.1 must be numbers."),
    "devices": (
        "accelerator: cpu",
        "accelerator: cpu\n  devices: -3",
        "`devices` selected with `CPUAccelerator` should",
    ),
    "negative": (
        "hidden_size: 8",
        "hidden_size: -8",
        "config: hidden_size=-8 must be None or an integer of at least 1.",
    ),
    "no number": ("hidden_size: 8", "hidden_size: big", "config: hidden_size='big' must be None or an integer"),
    "zero": ("attention_heads: 1", "attention_heads: 0", "config: num_attention_heads=0 must be None or an integer"),
    "not divided": ("attention_heads: 1", "attention_heads: 3", "config: Class validation error for validator"),
    "no multiple": (
        "attention_heads: 1",
        "attention_heads: 4, num_key_value_heads: 3",
        "config: num_attention_heads=4 is no multiple of num_key_value_heads=3.",
    ),
    "own name": (f"llama, {SIZES}", "gpt2, n_embd: -8", "config: n_embd=-8 must be None or an integer of at least 1."),
    "activation": (
        "hidden_size: 8",
        "hidden_size: 8, hidden_act: gleu",
        "config: the model cannot be built: KeyError: 'gleu'",
    ),
    "type": ("model_type: llama", "model_type: 5", "config: transformers has no model_type '5'"),
    "not causal": (
        "model_type: llama",
        "model_type: t5",
        "config: the model cannot be built: ValueError: Unrecognized",
    ),
}
"""What is written in place of what is right, and how the line begins."""


@pytest.mark.table("no (file|path)|compile mode|not causal|zero|activation|devices|null")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_that_the_run_meets(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that the parser cannot judge, that would fail late or do nothing, and a size or name with which no model
    can be built, end the run in its first step or before, with a sentence.
    """
    right, wrong, message = MISTAKES[mistake]
    right = f"\n        {right}" if right == "offload: cpu" else right
    text = RUN.replace("num_attention_heads: 1", "num_attention_heads: 1, vocab_size: 256")
    assert ends(capsys, 1, text.replace(right, f" {wrong}" if "\n" in right else wrong, 1)).startswith(message)


@pytest.mark.slow
def test_weights_that_cannot_be_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose file of weights is damaged is one line with its path."""
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "llama", "vocab_size": 256}')
    Path("model/model.safetensors").write_text("damaged")
    text = RUN.replace(f"config: {{model_type: llama, {SIZES}}}", "path: model")
    assert ends(capsys, 1, text).startswith("path='model': the model cannot be built: SafetensorError: ")


def test_a_checkpoint_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """A path without a checkpoint is one line."""
    assert ends(capsys, 1, RUN, "--ckpt_path=x.ckpt").startswith("Checkpoint file not found: x.ckpt")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class Own(Exception)\n    pass\n", "expected ':' (own.py, line 1)"),
        ("\nx = undefined\n", "name 'undefined' is not defined"),
        ("import not_installed\n", "No module named 'not_installed'"),
    ],
    ids=["syntax", "name", "dependency"],
)
@pytest.mark.parametrize("argument", ["--model=own.Own", "--trainer.callbacks=own.Own"])
def test_a_module_that_cannot_be_imported(
    argument: str, code: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception in the import of the user's module is one line."""
    Path("own.py").write_text(code)
    assert ends(capsys, 2, RUN, argument).endswith(f": {message}")


def test_a_strategy_that_cannot_be_imported() -> None:
    """An exception in the import of the user's strategy, whose name may be any text, has its traceback."""
    Path("broken.py").write_text("\nx = undefined\n")
    with pytest.raises(NameError, match="name 'undefined' is not defined"):
        main(["fit", *STRATEGY[:2], "--trainer.strategy=broken.Own"])


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


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--trainer.strategy.tiling.num_shards=0", "num_shards"),
        ("--trainer.strategy.tiling.num_shards=many", "num_shards"),
        ("--trainer.strategy.tiling.tile_tokens=-5", "tile_tokens"),
        ("--trainer.strategy.tiling.shards=4", "shards"),
        ("--trainer.strategy.tiling.compile={modes: default}", "modes"),
        ("--trainer.strategy.tiling.accumulate=float16", "accumulate"),
        ("--trainer.strategy.loss=0", "loss"),
        ("--model.loss=-1", "loss"),
        ("--data.seq_len=0", "seq_len"),
        ("--data.held_out=1.5", "held_out"),
    ],
)
def test_bad_values_are_refused_while_parsing(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A value out of bounds stops the command with its name before anything is built."""
    assert message in refused(capsys, *STRATEGY, argument)


@pytest.mark.parametrize(
    ("right", "wrong", "line", "message"),
    [
        ("num_shards", "num_shard", 17, "trainer.strategy.tiling: unknown key 'num_shard': did you mean 'num_shards'?"),
        ("tiling", "tilling", 16, "trainer.strategy: unknown key 'tilling': did you mean 'tiling'?"),
        (
            "offload",
            "ofload",
            19,
            "trainer.strategy.activation_checkpointing: unknown key 'ofload': did you mean 'offload'?",
        ),
        ("learning_rate", "learning_rat", 5, "model: unknown key 'learning_rat': did you mean 'learning_rate'?"),
        ("seq_len", "seq_ln", 8, "data: unknown key 'seq_ln': did you mean 'seq_len'?"),
        ("max_steps", "max_step", 12, "unknown key 'trainer.max_step': did you mean 'trainer.max_steps'?"),
        ("trainer:", "trainr:", 9, "unknown key 'trainr': did you mean 'trainer'?"),
        (
            "TiledSingleDeviceStrategy",
            "TiledSingleDevice",
            13,
            "trainer.strategy: lt_tiled has no 'TiledSingleDevice': did you mean 'TiledSingleDeviceStrategy'?",
        ),
        (
            "callbacks.ModelCheckpoint",
            "callbacks.ModelCheckpiont",
            20,
            "trainer.callbacks: lightning.pytorch.callbacks has no 'ModelCheckpiont': did you mean 'ModelCheckpoint'?",
        ),
        ("offload: cpu", "offload: ram", 19, "trainer.strategy.activation_checkpointing.offload: 'ram' is none of "),
        ("1.0e-3", ".inf", 5, "model.learning_rate: Not of type PositiveFiniteFloat: inf does not conform to "),
        (
            "1.0e-3\n",
            "1.0e-3\n    weight_decay: .inf\n",
            6,
            "model.weight_decay: Not of type NonNegativeFiniteFloat: inf",
        ),
    ],
    ids=[
        *("tiling.num_shards", "tiling", "offload", "learning_rate", "seq_len", "max_steps", "trainer"),
        *("strategy class", "callback class", "tier", "infinite learning_rate", "infinite weight_decay"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(
    right: str, wrong: str, line: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelled key, class or value is one line: the file, the line, the keys, and the name that is near."""
    Path("run.yaml").write_text(RUN.replace(right, wrong, 1))
    assert stopped(capsys, 2, "--config=run.yaml").startswith(f"{Path('run.yaml').absolute()}:{line}: {message}")


def test_a_mistake_in_an_included_file(capsys: pytest.CaptureFixture[str]) -> None:
    """The line is that of the file which holds the key, also if another file names it."""
    Path("parts").mkdir()
    Path("parts/data.yaml").write_text("class_path: TextFiles\ninit_args:\n  seq_ln: 8\n")
    Path("run.yaml").write_text("model: CausalLM\ndata: parts/data.yaml\n")
    assert stopped(capsys, 2, "--config=run.yaml").startswith(f"{Path('parts/data.yaml').absolute()}:3: data: unknown")


@pytest.mark.parametrize("value", ["run.yaml", "template.yaml"])
def test_a_value_that_names_a_file(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that names the file itself, or one that is no YAML, is not taken for a part of the configuration."""
    Path("template.yaml").write_text("{% if x %}: [")
    Path("run.yaml").write_text(f"trainer:\n  default_root_dir: {value}\n  max_stepp: 4\n")
    assert "did you mean" in stopped(capsys, 2, "--config=run.yaml")


class Failing(LitTiny):
    """A LightningModule that raises an exception where it was told to."""

    def __init__(self, place: str, kind: str = "ValueError") -> None:
        super().__init__()
        self.place, self.kind = place, kind
        self.fail("init")

    def fail(self, place: str) -> None:
        if self.place == place:
            kind = {"ValueError": ValueError, "OSError": OSError, "own": OffloadError}[self.kind]
            raise kind(f"in {place}\n  a\n  b")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.fail("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.fail("step")
        return super().training_step(batch, batch_idx)


FAILING = ("--model=tests.test_bad_input.Failing", "--trainer.accelerator=cpu", "--trainer.logger=false")


@pytest.mark.parametrize("place", ["init", "configure_optimizers", "step"])
@pytest.mark.parametrize("kind", [ValueError, OSError])
def test_an_error_of_the_model_keeps_its_traceback(place: str, kind: type[Exception]) -> None:
    """An exception that the user's own code raises is not caught."""
    with pytest.raises((kind, ValueError), match=f"in {place}"):  # jsonargparse raises a ValueError from it
        main(["fit", *FAILING, f"--model.place={place}", f"--model.kind={kind.__name__}"])


def test_an_error_of_lt_tiled_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """An exception of lt_tiled is its message without a traceback, in a step too, with every line."""
    with pytest.raises(SystemExit):
        main(["fit", *FAILING, "--model.place=step", "--model.kind=own"])
    printed = capsys.readouterr().err
    assert printed == "lt-tiled fit: error: in step\n  a\n  b\n--debug shows the traceback.\n"

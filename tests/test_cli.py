"""The command line: what it parses and refuses in this process, and what it does in processes of its own."""

from __future__ import annotations

import io
import os
import re
import sys
from argparse import ArgumentError
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import yaml

from lt_tiled.cli import main
from lt_tiled.errors import OffloadError
from tests.forks import Forked
from tests.lit import LitTiny
from tests.models import tiny_llama
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


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["fit", *args])
    assert stop.value.code == 2
    return capsys.readouterr().err


STRATEGY = ("--model=CausalLM", "--data=TextFiles", "--trainer.strategy=TiledDDPStrategy")


@pytest.mark.slow
def test_short_forms_and_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    """``tiling: 8`` and ``activation_checkpointing: true`` work as well as the full forms, and both are overridden by
    ``tiling.num_shards``.
    """
    Path("short.yaml").write_text(
        "trainer: {strategy: {class_path: lt_tiled.TiledDDPStrategy,"
        " init_args: {tiling: 8, activation_checkpointing: true}}}\n"
        "model: {class_path: lt_tiled.lm.CausalLM}\ndata: {class_path: lt_tiled.lm.TextFiles}\n"
    )
    short = config(capsys, "--config", "short.yaml")["trainer"]["strategy"]["init_args"]
    assert (short["tiling"], short["activation_checkpointing"]) == (8, True)
    full = config(capsys, "--config", "short.yaml", "--trainer.strategy.tiling.num_shards=4")["trainer"]["strategy"][
        "init_args"
    ]
    assert full["tiling"]["num_shards"] == 4
    full = config(
        capsys,
        *STRATEGY,
        "--trainer.strategy.tiling.tile_tokens=512",
        "--trainer.strategy.activation_checkpointing.targets=Block",
    )
    init = full["trainer"]["strategy"]["init_args"]
    assert init["tiling"]["tile_tokens"] == 512
    assert init["activation_checkpointing"]["targets"] == "Block"
    quick = config(capsys, "--config", QUICKSTART, "--trainer.strategy.init_args.tiling.num_shards=4")
    assert quick["trainer"]["strategy"]["init_args"]["tiling"]["num_shards"] == 4


def test_registered_names(capsys: pytest.CaptureFixture[str]) -> None:
    """The strategies' registered names work as a plain string."""
    assert config(capsys, *STRATEGY[:2], "--trainer.strategy=tiled_ddp")["trainer"]["strategy"] == "tiled_ddp"


@pytest.mark.slow
def test_list_of_targets(capsys: pytest.CaptureFixture[str]) -> None:
    """Targets are a name or a list of names."""
    for value, expected in (("MLP", "MLP"), ("[MLP, 'layers.*.mlp']", ["MLP", "layers.*.mlp"])):
        init = config(capsys, *STRATEGY, f"--trainer.strategy.tiling.targets={value}")["trainer"]["strategy"][
            "init_args"
        ]
        assert init["tiling"]["targets"] == expected


@pytest.mark.slow
def test_compile_options(capsys: pytest.CaptureFixture[str]) -> None:
    """``compile`` is a truth value or arguments of ``torch.compile``."""
    for value, expected in (
        ("true", True),
        ("{mode: max-autotune, dynamic: true}", {"mode": "max-autotune", "dynamic": True}),
    ):
        init = config(capsys, *STRATEGY, f"--trainer.strategy.tiling.compile={value}")["trainer"]["strategy"][
            "init_args"
        ]
        assert init["tiling"]["compile"] == expected


@pytest.mark.slow
def test_tiled_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """``loss`` is a truth value or a number of tiles, of a strategy and of ``CausalLM``."""
    for value, expected in (("true", True), ("8", 8)):
        whole = config(capsys, *STRATEGY, f"--trainer.strategy.loss={value}", f"--model.loss={value}")
        assert whole["trainer"]["strategy"]["init_args"]["loss"] == expected
        assert whole["model"]["init_args"]["loss"] == expected


PARENTS = {
    "TiledSingleDeviceStrategy": ["device"],
    "TiledDDPStrategy": ["find_unused_parameters", "static_graph", "ddp_comm_hook", "start_method"],
    "TiledFSDPStrategy": ["sharding_strategy", "state_dict_type", "auto_wrap_policy", "cpu_offload"],
    "TiledModelParallelStrategy": ["data_parallel_size", "tensor_parallel_size", "save_distributed_checkpoint"],
    "TiledDeepSpeedStrategy": ["stage", "offload_optimizer", "config", "load_full_weights", "zero3_leaf_modules"],
}


@pytest.mark.table("Tiled(FSDP|DeepSpeed)Strategy")
@pytest.mark.slow
@pytest.mark.parametrize("name", PARENTS)
def test_help_shows_all_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help of a strategy shows its own and its parent's arguments, and leads on to the fields of the policies with
    their text.
    """

    def help_of(*args: str) -> str:
        with pytest.raises(SystemExit):
            main(["fit", *args])
        return " ".join(capsys.readouterr().out.split())

    text = help_of(f"--trainer.strategy.help=lt_tiled.{name}")
    for option in ["tiling", "activation_checkpointing", *PARENTS[name]]:
        assert f"--trainer.strategy.{option} " in text
    fields = help_of(f"--trainer.strategy.help=lt_tiled.{name}", "--trainer.strategy.tiling.help")
    assert "tiling.num_shards" in fields
    assert "The most tokens of a tile. Give this or" in fields


def test_every_command_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """The help without a command, and the error at an unknown one, list every command."""
    for args in (["--help"], ["fix"]):
        with pytest.raises(SystemExit):
            main(args)
        printed = capsys.readouterr()
        for command in ("fit", "validate", "test", "predict", "plan", "verify", "export"):
            assert command in printed.out + printed.err


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


def test_both_counts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Both counts at once stop the command with both values, before the model is built, which has no ``config``."""
    arguments = [*STRATEGY, "--trainer.strategy.tiling.num_shards=4", "--trainer.strategy.tiling.tile_tokens=512"]
    with pytest.raises(SystemExit) as stop:
        main(["fit", *arguments])
    assert stop.value.code in (1, 2)  # by version of jsonargparse
    assert "error: num_shards=4 and tile_tokens=512" in capsys.readouterr().err


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


def stopped(capsys: pytest.CaptureFixture[str], code: int, *args: str) -> str:
    """What a command prints that ends with this exit code and without a traceback."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", *args])
    printed = capsys.readouterr().err
    assert stop.value.code == code, printed
    assert len(printed.splitlines()) == (1 if code == 2 else 2)  # and the hint at --debug
    return printed.removeprefix("lt-tiled fit: error: ").splitlines()[0]


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


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--trainer.strategy.tiling.num_shard=4", "trainer.strategy.tiling: unknown key 'num_shard': did you mean"),
        ("--data.seq_ln=4", "data: unknown key 'seq_ln': did you mean 'seq_len'?"),
        ("--model=CausalLMM", "model: there is no 'CausalLMM': did you mean 'CausalLM'?"),
        ("--trainer.callbacks=MemoryMonitr", "trainer.callbacks: there is no 'MemoryMonitr': did you mean 'MemoryMon"),
        ("--trainer.precision=17", "trainer.precision: '17' is none of "),
        ("--modle=CausalLM", "unknown key 'modle': did you mean 'model'?"),
        ("--config=none.yaml", 'Parser key "config": File does not exist: '),
    ],
)
def test_a_mistake_in_an_argument_is_one_line(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelled argument is one line with the name that is near."""
    assert stopped(capsys, 2, *STRATEGY, argument).startswith(message)


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
    ],
    ids=["twice", "list", "word", "binary", "utf-16", "syntax", "laughs", "endless"],
)
def test_a_file_that_is_no_configuration(
    content: str | bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is no YAML, no mapping, has a key twice or expands without end is one line with its name."""
    Path("run.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert stopped(capsys, 2, "--config=run.yaml").startswith(f"{Path('run.yaml').absolute()}: {message}")


def test_aliases_work(capsys: pytest.CaptureFixture[str]) -> None:
    """A file may name a value and use it again."""
    Path("run.yaml").write_text("trainer: {min_steps: &n 3, max_steps: *n}\n")
    assert config(capsys, *STRATEGY[:2], "--config=run.yaml")["trainer"]["max_steps"] == 3


def test_two_merges_work(capsys: pytest.CaptureFixture[str]) -> None:
    """A mapping may merge several others with ``<<``, as PyYAML lets it."""
    Path("run.yaml").write_text("trainer: {<<: {min_steps: 3}, <<: {max_steps: 4}}\n")
    found = config(capsys, *STRATEGY[:2], "--config=run.yaml")["trainer"]
    assert (found["min_steps"], found["max_steps"]) == (3, 4)


@pytest.mark.table("select|no file|not position-wise|compile mode")
@pytest.mark.self_checks
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            "num_shards: 2",
            "num_shards: 4\n        tile_tokens: 512",
            "num_shards=4 and tile_tokens=512 both set the tile",
        ),
        (
            "num_shards: 2",
            "compile: {mode: fast}",
            "compile={'mode': 'fast'}: Unrecognized mode=fast, should be one of",
        ),
        (
            "num_shards: 2",
            "num_shards: 2\n        targets: LlamaAttention",
            "model.model.layers.0.self_attn (LlamaAttention) is not position-wise",
        ),
        (
            "offload: cpu",
            "{offload: disk, disk_budget: 16}",
            "disk_budget=16 has no room for one block input of min_bytes",
        ),
        (
            "offload: cpu",
            "{offload: cpu, select: [hiden], min_bytes: 1}",
            "select='hiden' is no argument of LlamaDecoder",
        ),
        ("hidden_size", "hiden_size", "config: LlamaConfig has no key 'hiden_size': did you mean 'hidden_size'?"),
        ("seq_len: 8", "seq_len: 1", "seq_len=1 must be an integer of at least 2"),
        ("a.txt", "none", "paths: 'none' matches no file"),
        ("logger: false", "default_root_dir: a.txt/runs", "[Errno 20] Not a directory: "),  # the standard library's
    ],
    ids=[
        *("both counts", "compile mode", "not position-wise", "disk_budget", "select"),
        *("config key", "seq_len", "no file", "no directory"),
    ],
)
def test_a_mistake_that_the_run_meets(right: str, wrong: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that the parser cannot judge ends the run in its first step or before, with a sentence."""
    Path("a.txt").write_bytes(bytes(range(100)))
    text = RUN.replace("offload: cpu", wrong) if right == "offload: cpu" else RUN.replace(right, wrong, 1)
    Path("run.yaml").write_text(
        text.replace("      activation_checkpointing:\n        {", "      activation_checkpointing: {")
    )
    assert stopped(capsys, 1, "--config=run.yaml").startswith(message)


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


FAILING = ("--model=tests.test_cli.Failing", "--trainer.accelerator=cpu", "--trainer.logger=false")


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


def test_a_strategy_name_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelled registered name of a strategy is a sentence with the name that is near."""
    found = stopped(capsys, 2, "--model=tests.lit.LitTiny", "--trainer.strategy=tiled_dpp")
    assert found == "trainer.strategy: there is no strategy 'tiled_dpp': did you mean 'tiled_ddp'?"


@pytest.mark.parametrize(("argument", "kind"), [("--data.seq_ln=4", ArgumentError), ("--data.paths=none", ValueError)])
def test_debug(argument: str, kind: type[Exception]) -> None:
    """With ``--debug`` an error has its traceback, wherever it stands, whether the parser or the run finds it."""
    args = ["fit", *STRATEGY, "--model.config={model_type: llama}", "--trainer.accelerator=cpu", argument]
    for given in ([*args, "--debug"], ["--debug", *args]):
        with pytest.raises(kind):
            main(given)


def test_debug_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that Lightning starts with ``sys.argv`` know ``--debug`` from their environment."""
    monkeypatch.setenv("LT_TILED_DEBUG", "0")  # and restored after the test
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["lt-tiled", "--debug", "fit", "--data.seq_ln=4"])
    for _ in range(2):
        with pytest.raises(ArgumentError):
            main()
        assert sys.argv == ["lt-tiled", "fit", "--data.seq_ln=4"]


def test_debug_is_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    """``--debug`` is in the help of each command, and not in a saved configuration."""
    assert "debug" not in config(capsys, *STRATEGY[:2], "--debug")
    for args in (["--help"], ["fit", "--help"]):
        with pytest.raises(SystemExit):
            main(args)
        assert "--debug" in capsys.readouterr().out


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
    assert "distributed_backend=gloo" in printed
    assert len(re.findall(r"4 x LlamaMLP\s+│", printed)) == 1
    assert re.search(r"tiled\s+│ 4 x LlamaMLP\s+│ model.model.layers.\*.mlp\s+│\s+4096 │\s+4 ", printed)
    assert re.search(r"activation checkpointing\s+│ 4 x LlamaDecoderLayer", printed)
    assert re.search(r"peak memory of a step: \d+\.\d\d GiB", printed)
    assert re.search(r"val_perplexity: *\d", printed)
    (checkpoint,) = Path("runs").rglob("*.ckpt")
    keys = torch.load(checkpoint, weights_only=True)["state_dict"].keys()
    plain = tiny_llama(num_hidden_layers=4).state_dict().keys()
    assert set(keys) == {f"model.{key}" for key in plain}


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["disk", "cpu", "cpu_disk"])
def test_offload_configs(tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The offload configs differ from the quickstart in where the block inputs go, and each parses to its tiers."""
    names = ("quickstart", f"quickstart_offload_{tier}")
    quick, other = (config(capsys, "--config", str(ROOT / "configs" / f"{name}.yaml")) for name in names)
    activation_checkpointing = other["trainer"]["strategy"]["init_args"].pop("activation_checkpointing")
    assert quick["trainer"]["strategy"]["init_args"].pop("activation_checkpointing") is True
    assert activation_checkpointing["offload"] == tier.replace("_", "+")
    assert other["model"] == quick["model"]
    assert other["trainer"]["strategy"] == quick["trainer"]["strategy"]


CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.table("fsdp2|deepspeed_zero3_disk")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_differ_in_the_strategy_alone(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every config names the quickstart's model and data, copies neither, and shows all of its strategy's arguments
    when printed.
    """
    written = yaml.safe_load(path.read_text())
    assert (written["model"], written["data"]) == ("shared/llama.yaml", "shared/text.yaml")
    quick, other = (config(capsys, "--config", str(p)) for p in (QUICKSTART, path))
    strategy = other["trainer"].pop("strategy")
    for printed in (quick, other):
        printed["trainer"].pop("strategy", None)
        assert printed["trainer"].pop("devices") in (1, "auto")
        where = printed["trainer"].pop("default_root_dir")
        assert printed["trainer"]["logger"]["init_args"].pop("save_dir") == where
    assert other == quick
    assert set(PARENTS[strategy["class_path"].rpartition(".")[2]]) <= set(strategy["init_args"])


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
    offload = (
        yaml.safe_load(path.read_text())["trainer"]["strategy"]
        .get("init_args", {})
        .get("activation_checkpointing", True)
    )
    tokens = 512 if offload is True else 2048  # smaller inputs are not offloaded
    both = world(
        *(printed_by, os.getcwd(), "fit", "--config", str(path), "--trainer.accelerator=cpu", "--trainer.devices=2"),
        *("--trainer.max_steps=1", "--trainer.val_check_interval=1", "--trainer.limit_val_batches=1"),
        *(f"--data.seq_len={tokens}", "--trainer.strategy.tiling.num_shards=2"),
    )
    printed = "".join(both)
    assert (
        len(re.findall(r"4 x LlamaMLP\s+│ model\.model\.layers\.\*\.mlp\s+│", printed)) == 1
    )  # one line, although no terminal is as wide
    assert re.search(rf"│\s+{tokens} │\s+2 ", printed)
    assert re.search(r"val_perplexity:\s*\d", printed)
    assert list(Path("runs").rglob("*.ckpt"))
    assert ("offloaded per step" in printed) == (offload is not True)
    if path.stem == "quickstart_offload_cpu_disk":
        assert re.search(r"offloaded per step: \d\.\d MiB to CPU memory, \d\.\d MiB to disk", printed)
        assert re.search(r"written to disk in all: \d+\.\d MiB", printed)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["validate", "predict"])
def test_own_model_and_data(command: str, caplog: pytest.LogCaptureFixture) -> None:
    """``validate`` and ``predict`` run a model and data of the user's own, found by their import path."""
    with caplog.at_level("INFO"):
        main(
            [
                command,
                "--model=tests.lit.LitTiny",
                "--trainer.strategy=tiled",
                "--trainer.accelerator=cpu",
                "--trainer.logger=false",
            ]
        )
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
    assert yaml.safe_load(Path("config_of_run.yaml").read_text())["trainer"]["max_steps"] == 1


@pytest.mark.slow
def test_own_configs(capsys: pytest.CaptureFixture[str]) -> None:
    """``--config configs/...`` is the package's own where there is no such file, and no other argument is touched."""
    assert (
        config(capsys, "--config=configs/quickstart.yaml", "--data.paths=configs/x.txt")["data"]["init_args"]["paths"]
        == "configs/x.txt"
    )
    Path("configs").mkdir()
    Path("configs/quickstart.yaml").write_text("trainer: {max_steps: 7}")
    assert (
        config(capsys, "--config", "configs/quickstart.yaml", "--model=CausalLM", "--data=TextFiles")["trainer"][
            "max_steps"
        ]
        == 7
    )

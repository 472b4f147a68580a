"""``lt-tiled export``, and what the command line sets of CausalLM: LoRA and optimizers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import lt_tiled
from lt_tiled.cli import main
from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.lm.export import _load
from lt_tiled.loss.transformers import OutputLogits
from tests.engines.cells import strategy
from tests.lit import trainer
from tests.models import tiny_llama
from tests.world import World

IDS = torch.arange(24)[None]
LORA = {"r": 2, "target_modules": "all-linear", "lora_alpha": 64}


@pytest.fixture(autouse=True)
def _files() -> None:
    """A model and its tokenizer, as ``save_pretrained`` writes them, and a text."""
    tiny_llama(vocab_size=256).save_pretrained("model")
    letters = Tokenizer(models.WordLevel({chr(i): i for i in range(256)}, unk_token="a"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="a").save_pretrained("model")
    Path("a.txt").write_text("the tiles of one call follow each other " * 20)


def fit(**options: Any) -> Tensor:
    """Train, save ``run.ckpt``, and return logits of the trained model."""
    model = CausalLM(**{"path": "model", "learning_rate": 1e-2, "warmup_steps": 0, **options})
    run = trainer("tiled", limit_val_batches=0)
    run.fit(model, datamodule=TextFiles("a.txt", seq_len=32))
    run.save_checkpoint("run.ckpt")
    with torch.no_grad():
        return model.eval()(IDS)


def logits(directory: str) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory)(IDS).logits


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "merge"), [(None, False), (LORA, False), (LORA, True)])
def test_transformers_loads_what_is_exported(lora: Any, merge: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A model, an adapter, and a model with the adapter merged give the logits of the trained model, and have its
    tokenizer.
    """
    trained = fit(lora=lora)
    main(["export", "run.ckpt", "out", *(["--merge=true"] if merge else [])])
    torch.testing.assert_close(logits("out"), trained, rtol=1e-4, atol=1e-5 if merge else 1e-6)
    assert float((logits("model") - trained).abs().max()) > 0.01
    assert Path("out/adapter_config.json").exists() == (lora is not None and not merge)
    assert AutoTokenizer.from_pretrained("out").get_vocab() == AutoTokenizer.from_pretrained("model").get_vocab()
    assert "to out, and the tokenizer of model" in capsys.readouterr().out


def test_lora_trains_its_adapters_alone() -> None:
    """With ``lora`` the weights of the model stay as they are, and its loss runs in tiles."""
    model = CausalLM(path="model", lora=LORA)
    model.configure_model()
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trainable
    assert all("lora_" in name for name in trainable)
    assert isinstance(model.model(input_ids=IDS, labels=IDS).logits, OutputLogits)


def begin(folder: str) -> list[float]:
    """Return the perplexity of the model, and that with new adapters, under ZeRO-3."""
    found, data = [], TextFiles(f"{folder}/a.txt", seq_len=32)
    for lora in (None, LORA):
        run = trainer(strategy(lt_tiled, "zero3"), devices=2)
        found += run.validate(CausalLM(path=f"{folder}/model", lora=lora), data, verbose=False)
    return [float(metrics["val_perplexity"]) for metrics in found]


def test_adapters_begin_at_the_model(deepspeed_world: World, tmp_path: Path) -> None:
    """Under ZeRO-3, too, new adapters change nothing before the first step."""
    for without, new in deepspeed_world(begin, str(tmp_path)):
        assert new == without


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"lora_alfa": 2}, r"LoraConfig has no field 'lora_alfa': did you mean 'lora_alpha'"),
        ({"r": 0}, r"lora=\{'r': 0.*: .*r.*positive"),
        ({"target_modules": ["zebra"]}, r"lora=\{'target_modules': \['zebra'\]\}: the model cannot be built: .*zebra"),
    ],
)
def test_bad_lora(lora: dict[str, Any], message: str) -> None:
    """A field, a value or a module that peft does not know is refused."""
    with pytest.raises(ValueError, match=message):
        CausalLM(path="model", lora=lora).configure_model()


def test_peft_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without peft, ``lora`` raises with the command that installs it."""
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match="pip install peft"):
        CausalLM(path="model", lora=LORA)


def save(**hyper_parameters: Any) -> None:
    data = {"datamodule_hyper_parameters": {"tokenizer": "gone"}} if hyper_parameters.pop("gone", False) else {}
    torch.save({"state_dict": {}, "hyper_parameters": hyper_parameters, **data}, "run.ckpt")


def test_export_does_not_read_the_optimizer() -> None:
    """What a checkpoint has besides weights stays in its file."""
    torch.save({"state_dict": {}, "optimizer_states": [torch.ones(8)]}, "run.ckpt")
    (state,) = _load("run.ckpt")["optimizer_states"]
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "run.ckpt" in line]
    ranges = [[int(end, 16) for end in line[0].split("-")] for line in lines]
    assert any(start <= state.data_ptr() < end for start, end in ranges)


def test_bad_export(capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that is missing, broken or of another module, an adapter without its model, and a directory with
    files are refused. Nothing is written before the tokenizer is found.
    """
    own = {"config": None, "path": "model", "lora": None}
    Path("broken.ckpt").write_text("text")
    cases: list[tuple[list[str], dict[str, Any], str]] = [
        (["gone.ckpt", "out"], own, "checkpoint='gone.ckpt' does not exist"),
        (["broken.ckpt", "out"], own, "checkpoint='broken.ckpt' cannot be loaded"),
        (["run.ckpt", "model"], own, "output='model' exists and is not empty"),
        (["run.ckpt", "out"], {"hidden": 4}, "is of lt_tiled.lm.CausalLM: export is for lt_tiled.lm.CausalLM"),
        (["run.ckpt", "out"], own, "checkpoint='run.ckpt' lacks model.embed_tokens.weight: save all weights"),
        (["run.ckpt", "out"], {**own, "gone": True}, "tokenizer='gone', which is not a directory here: run export in"),
        (["run.ckpt", "out", "--merge=true"], own, "merge=True needs a run with lora"),
        (["run.ckpt", "out"], {**own, "path": None, "config": {}, "lora": LORA}, "this one has no path: set --merge"),
    ]
    for arguments, given, message in cases:
        save(**given)
        with pytest.raises(SystemExit):
            main(["export", *arguments])
        assert message in capsys.readouterr().err
        assert not Path("out").exists()


def test_optimizers_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--optimizer`` and ``--lr_scheduler`` replace those of CausalLM: the scheduler steps with each batch, and the
    optimizer has the weights that are trained.
    """
    found: list[Any] = []
    monkeypatch.setattr(CausalLM, "on_train_end", lambda self: found.append(self.trainer))
    run = ["fit", "--model=CausalLM", "--model.path=model", f"--model.lora={LORA}", "--data=TextFiles"]
    run += ["--data.paths=a.txt", "--data.seq_len=32", "--trainer.strategy=tiled", "--trainer.accelerator=cpu"]
    run += ["--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.limit_val_batches=0"]
    run += ["--optimizer=SGD", "--optimizer.lr=0.5", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"]
    main([*run, "--trainer.max_steps=2", "--trainer.callbacks=[]"])
    (optimizer,) = found[0].optimizers
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    trained = sum(p.numel() for p in found[0].lightning_module.parameters() if p.requires_grad)
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == trained

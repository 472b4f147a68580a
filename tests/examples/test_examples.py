"""The examples, started as a user starts them, on the CPU and with small models: each tiled, and untiled beside it."""

from __future__ import annotations

import re
import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from lt_tiled.lm import TextFiles
from tests.processes import ROOT, Forked

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Run:
    """What a script printed, and where it saved."""

    printed: str
    output: Path

    def losses(self) -> list[float]:
        """Those before and after training, or of each step."""
        return [float(loss) for loss in re.findall(r"(?:loss|->) (\d+\.\d{5})\b", self.printed)]


def run_both(
    script: str, directory: Path, args: Sequence[str], tiled: Sequence[str], untiled: Sequence[str]
) -> tuple[Run, Run]:
    """Run a script tiled and untiled, side by side; whatever is left of them, their other ranks too, is killed."""
    command = ("python", str(ROOT / "examples" / script), "--accelerator=cpu", *args)
    logs = [directory / "tiled.log", directory / "untiled.log"]
    runs = [
        Forked(*command, f"--output={log.stem}", *more, printed=log, cwd=directory, COLUMNS="160")
        for log, more in zip(logs, (tiled, untiled), strict=True)
    ]
    codes = [run.finish() for run in runs]
    printed = [log.read_text() for log in logs]
    assert codes == [0, 0], "\n".join(printed)
    return Run(printed[0], directory / "tiled"), Run(printed[1], directory / "untiled")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small model and its tokenizer, and a text beside them."""
    directory = tmp_path_factory.mktemp("lora") / "llama"
    tokenizer = ByT5Tokenizer(extra_ids=0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer))).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory.parent / "text.txt").write_text("".join(f"{i} and {i + 1} are {2 * i + 1}.\n" for i in range(1000)))
    return directory


@pytest.fixture(scope="module")
def lora(llama: Path) -> tuple[Run, Run]:
    args = [
        str(llama),
        str(llama.parent / "text.txt"),
        "--seq-len=2048",
        "--steps=8",
        "--rank=4",
        "--learning-rate=0.02",
    ]
    return run_both("lora.py", llama.parent, args, tiled=[], untiled=["--untiled"])


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    args = ["--devices=2", "--seq-len=2048", "--hidden-size=64", "--depth=2", "--steps=5", "--learning-rate=0.01"]
    return run_both(
        "gpt_fabric.py",
        tmp_path_factory.mktemp("gpt"),
        args,
        tiled=["--strategy=tiled_fsdp2"],
        untiled=["--strategy=ddp"],
    )


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    directory = tmp_path_factory.mktemp("llava")
    torch.manual_seed(0)
    for part in runpy.run_path(str(ROOT / "examples" / "vision_language.py"))["build"](None):
        part.save_pretrained(directory / "model")
    args = [f"--model={directory / 'model'}", "--steps=5", "--learning-rate=0.003"]
    return run_both("vision_language.py", directory, args, tiled=[], untiled=["--untiled"])


@pytest.mark.table("lora")
@pytest.mark.parametrize("example", ["lora", "gpt", "llava"])
def test_losses(example: str, request: pytest.FixtureRequest) -> None:
    """The loss goes down, and each that is printed is the untiled run's. The table of the tiled run names its MLPs."""
    tiled, untiled = request.getfixturevalue(example)
    assert re.search(r"│ tiled +│ 2 x (?:FSDP)?\w*MLP .* 2 │\n", tiled.printed)
    assert "│ tiled" not in untiled.printed
    assert len(tiled.losses()) >= 2
    assert tiled.losses() == pytest.approx(untiled.losses(), rel=1e-4)
    assert tiled.losses()[-1] < 0.98 * tiled.losses()[0]


def test_adapter(lora: tuple[Run, Run], llama: Path) -> None:
    """The saved adapter, put on the base model by peft, has the held-out loss that the run printed last."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama), lora[0].output)
    data = TextFiles(str(llama.parent / "text.txt"), tokenizer=str(llama), seq_len=2048)
    data.setup("validate")
    with torch.no_grad():
        losses = [float(model(**batch, labels=batch["input_ids"]).loss) for batch in data.val_dataloader()]
    assert sum(losses) / len(losses) == pytest.approx(lora[0].losses()[-1], rel=1e-4)

"""Text files as windows of tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DistributedSampler
from transformers import LlamaConfig, PreTrainedTokenizerFast

from lt_tiled.lm import TextFiles
from lt_tiled.lm.text import read_text
from tests.lit import trainer
from tests.world import World


def windows(data: TextFiles, part: str) -> torch.Tensor:
    loader = {"train": data.train_dataloader, "val": data.val_dataloader, "test": data.test_dataloader}[part]()
    return torch.cat([batch["input_ids"] for batch in loader])


def test_bytes_of_files(tmp_path: Path) -> None:
    """Each byte of the files is a token once, in train, validation or test, the held-out parts last and in order.
    Directories, globs and single files are read in order.
    """
    for index, name in enumerate(("a.txt", "b.txt", "c.log", "d.md")):
        (tmp_path / name).write_bytes(bytes(range(50 * index, 50 * index + 50)))
    assert read_text(str(tmp_path)) == bytes([*range(100), *range(150, 200)])
    data = TextFiles([str(tmp_path / name) for name in ("[ab].txt", "c.log", "*.md")], seq_len=10, held_out=0.1)
    data.setup("fit")
    assert data.vocab_size == 256
    assert windows(data, "train").dtype == torch.long
    assert sorted(windows(data, "train").flatten().tolist()) == [*range(160)]
    assert windows(data, "val").flatten().tolist() == [*range(160, 180)]
    assert windows(data, "test").flatten().tolist() == [*range(180, 200)]


def save_words(directory: str, tile: int) -> None:
    """Save a tokenizer of words, and the configuration of a model, to a directory."""
    LlamaConfig(vocab_size=512).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "tile": tile}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(directory)


def test_tokenizers() -> None:
    """A text is cut by its tokenizer, and without one into bytes."""
    save_words("a", 499)
    Path("a.txt").write_text("tile " * 40)
    for tokenizer, vocab_size, tokens in (("a", 500, [499] * 5), (None, 256, list(b"tile "))):
        data = TextFiles("a.txt", tokenizer=tokenizer, seq_len=5)
        data.setup("fit")
        assert (data.vocab_size, windows(data, "val")[0].tolist()) == (vocab_size, tokens)


class Noting(LightningModule):
    """Notes the first token of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[int] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        self.seen += batch["input_ids"][:, 0].tolist()
        return self.weight * 1

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches > 0  # as schedules do: Lightning makes the loader
        return torch.optim.SGD(self.parameters(), 0.1)


def run(callback: Callback | None, ckpt_path: str | None = None, **options: Any) -> list[Any]:
    """Train on ``a.txt`` and return what was noted, with options of the data and of the Trainer."""
    own = {name: options.pop(name) for name in ("paths", "seq_len", "batch_size") if name in options}
    data, module = TextFiles(**{"paths": "a.txt", "seq_len": 8, "held_out": 0.01, **own}), Noting()
    options = {"strategy": "auto", "max_steps": -1, "limit_val_batches": 0, **options}
    chosen = trainer(callbacks=callback, enable_checkpointing=callback is not None, **options)
    chosen.fit(module, data, ckpt_path=ckpt_path)
    return module.seen


def resume(folder: str, saved: list[int], options: dict[str, Any]) -> None:
    """Train, and then again from the checkpoints after so many steps."""
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    all_steps = run(saving, **options)
    for step in saved:
        assert run(None, f"{folder}/step={step}.ckpt", **options) == all_steps[step:]


@pytest.fixture
def text() -> None:
    Path("a.txt").write_bytes(bytes(range(112)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "options"),
    [
        ([3, 12], {"max_steps": 14}),
        ([3, 10, 13], {"max_steps": 14, "limit_train_batches": 10}),
        ([5, 12, 17], {"max_epochs": 2}),
        ([4, 5, 12], {"max_steps": 14, "limit_val_batches": 1, "val_check_interval": 2}),
    ],
    ids=str,
)
def test_resumed_in_an_epoch(saved: list[int], options: dict[str, Any], text: None) -> None:
    """A run that is resumed in an epoch, or at its end, gets the batches that an undisturbed one gets."""
    resume(".", saved, options)


def resume_on_two_ranks(folder: str) -> None:
    options = {"max_steps": 14, "limit_train_batches": 5, "strategy": "ddp", "devices": 2}
    resume(folder, [5, 8], {"paths": f"{folder}/a.txt", **options})


def test_resumed_in_an_epoch_on_two_ranks(world: World, text: None) -> None:
    """So do the ranks of a distributed run."""
    world(resume_on_two_ranks, os.getcwd())


def test_resumed_again_and_again(text: None) -> None:
    """So does a run that ``max_steps`` stops twice in an epoch, and then with the end of the next one."""
    found: list[int] = []
    for end in (5, 7, 24, 30):
        last = f"{len(found)}/last.ckpt" if found else None
        found += run(ModelCheckpoint(str(end), "last"), last, max_steps=end)
    assert found == run(None, max_steps=30)


def test_loaders_of_others(text: None) -> None:
    """A run that overfits a few batches saves checkpoints under DDP, too. Fabric gives each rank a sampler of
    its own, which it does not where the loader has one.
    """
    options = {"overfit_batches": 2, "max_steps": 3, "strategy": "ddp", "accelerator": "cpu", "devices": 1}
    assert len(run(ModelCheckpoint(".", "last"), **options)) == 3
    data = TextFiles(paths="a.txt", seq_len=8, held_out=0.01)
    data.setup("fit")
    assert not isinstance(data.train_dataloader().sampler, DistributedSampler)


@pytest.mark.parametrize(
    ("text", "kwargs", "message"),
    [
        (None, {"paths": "nowhere/*.txt"}, r"paths: 'nowhere/\*.txt' matches no file"),
        (b"", {"paths": "a.txt"}, r"The text has 0 tokens"),
        (b"abc" * 9, {"paths": "a.txt", "seq_len": 10}, r"has 27 tokens, 2 sequences of seq_len=10, and needs at"),
        (b"abc" * 9, {"paths": "a.txt", "seq_len": 1}, r"seq_len=1 must be an integer of at least 2"),
        (None, {"held_out": 1.5}, r"held_out=1.5 must be between 0 and 1"),
        (b"abc", {"paths": "a.txt", "tokenizer": "none/here"}, r"tokenizer='none/here' is not a directory"),
    ],
)
def test_bad_input(text: bytes | None, kwargs: dict[str, object], message: str) -> None:
    """Missing, empty and short files and a missing tokenizer are errors with the value and the remedy."""
    if text is not None:
        Path("a.txt").write_bytes(text)
    with pytest.raises(ValueError, match=message):
        TextFiles(**kwargs).setup("fit")

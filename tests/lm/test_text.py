"""Text files as windows of tokens."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DistributedSampler
from transformers import LlamaConfig, PreTrainedTokenizerFast

from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.lm.text import has_tokenizer, read_text
from tests.lit import trainer
from tests.world import World


def windows(data: TextFiles, part: str) -> torch.Tensor:
    loader = {"train": data.train_dataloader, "val": data.val_dataloader, "test": data.test_dataloader}[part]()
    return torch.cat([batch["input_ids"] for batch in loader])


def test_bytes_of_files(tmp_path: Path) -> None:
    """Each byte of the files is a token once, in train, validation or test, the held-out parts last and in order."""
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    (tmp_path / "b.txt").write_bytes(bytes(range(100, 200)))
    data = TextFiles(str(tmp_path), seq_len=10, batch_size=3, held_out=0.1)
    data.setup("fit")
    assert windows(data, "val").flatten().tolist() == list(range(160, 180))
    assert windows(data, "test").flatten().tolist() == list(range(180, 200))
    assert sorted(windows(data, "train").flatten().tolist()) == list(range(160))
    assert windows(data, "train").dtype == torch.long
    assert data.vocab_size == 256


@pytest.mark.parametrize(
    ("tokens", "tokenizer", "vocab_size"), [(512, True, 500), (256, False, 256), (512, False, None)]
)
def test_text_for_a_local_model(tokens: int, tokenizer: bool, vocab_size: int | None) -> None:
    """A text for a local model is tokenized by the tokenizer in its directory. Without one, it is bytes for a model of
    256 tokens, and others raise before the first step.
    """
    if tokenizer:
        save_words("model", 499)
    else:
        LlamaConfig(vocab_size=tokens).save_pretrained("model")
    Path("a.txt").write_text("tile " * 40)
    data = TextFiles("a.txt", seq_len=5)
    data.setup("fit")  # with no model, as bytes
    data.trainer = SimpleNamespace(lightning_module=CausalLM(path="model"))  # type: ignore[assignment]
    if vocab_size is None:
        with pytest.raises(ValueError, match=r"path='model' has 512 tokens and no tokenizer.*: set tokenizer of"):
            data.setup("fit")
    else:
        data.setup("fit")
        assert data.vocab_size == vocab_size
        assert windows(data, "val")[0].tolist() == ([499] * 5 if tokenizer else list(b"tile "))


def save_words(directory: str, tile: int) -> None:
    """Save a tokenizer of words, and the configuration of a model, to a directory."""
    LlamaConfig(vocab_size=512).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "tile": tile}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(directory)


def test_text_for_another_model() -> None:
    """A text that is used for another model is cut by the tokenizer of that model, or into bytes for a model without a
    path.
    """
    save_words("a", 499)
    save_words("b", 7)
    Path("a.txt").write_text("tile " * 40)
    data = TextFiles("a.txt", seq_len=5)
    for model, vocab_size, tokens in (
        (CausalLM(path="a"), 500, [499] * 5),
        (CausalLM(path="b"), 8, [7] * 5),
        (LightningModule(), 256, list(b"tile ")),
    ):
        data.trainer = SimpleNamespace(lightning_module=model)  # type: ignore[assignment]
        data.setup("fit")
        assert data.vocab_size == vocab_size
        assert windows(data, "val")[0].tolist() == tokens


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"])
def test_tokenizer_of_one_file(tmp_path: Path, file: str) -> None:
    """A directory with one of the files that a tokenizer may have is taken for one."""
    assert not has_tokenizer(str(tmp_path))
    (tmp_path / file).touch()
    assert has_tokenizer(str(tmp_path))


class Noting(LightningModule):
    """Notes the epoch, the number and the first token of each sequence, and raises after so many."""

    def __init__(self, failing: int = -1) -> None:
        super().__init__()
        self.failing = failing
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, ...]] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        if len(self.seen) == self.failing:
            raise ArithmeticError("the step failed")
        self.seen.append((self.current_epoch, index, *batch["input_ids"][:, 0].tolist()))
        return self.weight * 1

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches > 0  # as schedules do: Lightning makes the loader
        return torch.optim.SGD(self.parameters(), 0.1)


def run(callback: Callback | None, ckpt_path: str | None = None, failing: int = -1, **options: Any) -> list[Any]:
    """Train on ``a.txt`` and return what was noted, with options of the data and of the Trainer."""
    own = {name: options.pop(name) for name in ("paths", "seq_len", "batch_size", "num_workers") if name in options}
    data, module = TextFiles(**{"paths": "a.txt", "seq_len": 8, "held_out": 0.01, **own}), Noting(failing)
    options = {"strategy": "auto", "max_steps": -1, "limit_val_batches": 0, **options}
    with suppress(ArithmeticError):
        trainer(callbacks=callback, enable_checkpointing=callback is not None, **options).fit(
            module, data, ckpt_path=ckpt_path
        )
    return module.seen


def firsts(seen: list[tuple[int, ...]]) -> list[int]:
    """Return the first tokens of what was noted."""
    return [tokens[0] for _, _, *tokens in seen]


def resume(folder: str, workers: int, saved: list[int], devices: int, batches: int | None = None) -> None:
    """Train 14 steps, in epochs of so many batches; then the rest of them from each checkpoint."""
    saves = f"{folder}/{workers}_{batches}"
    saving = ModelCheckpoint(saves, "{step}", save_top_k=-1, every_n_train_steps=1)
    options: dict[str, Any] = {"max_steps": 14, "limit_train_batches": batches, "num_workers": workers}
    options["paths"] = f"{folder}/a.txt"
    options |= {"strategy": "ddp", "devices": devices} if devices > 1 else {}
    all_steps = run(saving, **options)
    for step in saved:
        assert run(None, f"{saves}/step={step}.ckpt", **options) == all_steps[step:]


@pytest.fixture
def text() -> None:
    Path("a.txt").write_bytes(bytes(range(112)))


@pytest.mark.slow
def test_resumed_in_an_epoch(text: None) -> None:
    """A run that is resumed in the middle of an epoch, or at its end, gets the batches that an undisturbed one gets;
    with worker processes, too.
    """
    resume(".", 0, [3, 12], 1)
    resume(".", 2, [13], 1)
    resume(".", 0, [3, 10, 13], 1, batches=10)


def test_resumed_again_and_again(text: None) -> None:
    """So does a run that ``max_steps`` stops twice in an epoch, and then with the end of the next one."""
    found: list[int] = []
    for end in (5, 7, 24, 30):
        last = f"{len(found)}/last.ckpt" if found else None
        found += firsts(run(ModelCheckpoint(str(end), "last"), last, max_steps=end))
    assert found == firsts(run(None, max_steps=30))


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_after_an_epoch(text: None, workers: int) -> None:
    """So does a run of ``max_epochs`` that goes on with another epoch."""
    found = run(ModelCheckpoint(".", "last"), max_epochs=1, num_workers=workers)
    found += run(None, "last.ckpt", max_epochs=2, num_workers=workers)
    assert found == run(None, max_epochs=2)


def test_resumed_in_the_last_epoch(text: None) -> None:
    """So does a run of ``max_epochs`` from a checkpoint in the middle of an epoch."""
    saving = ModelCheckpoint(".", "{step}", save_top_k=-1, every_n_train_steps=1)
    found = run(saving, max_epochs=2)
    for step in (5, 17):
        assert run(None, f"step={step}.ckpt", max_epochs=2) == found[step:]


def test_resumed_with_validation(text: None) -> None:
    """So does a run that validates during an epoch. What else reads the loader meanwhile gets each batch."""

    class Reading(Callback):
        def on_train_epoch_end(self, run: Trainer, module: LightningModule) -> None:
            assert len([*run.train_dataloader]) == 12

    saving = ModelCheckpoint(".", "{step}", save_top_k=-1, every_n_train_steps=1)
    options = {"max_steps": 14, "limit_val_batches": 1, "val_check_interval": 2}
    found = run(saving, **options)
    for step in (4, 5, 12):
        assert run(Reading(), f"step={step}.ckpt", **options) == found[step:]


def test_loader_that_lightning_builds_again(text: None) -> None:
    """A run that overfits a few batches saves checkpoints under a strategy of several ranks, too."""
    options = {"overfit_batches": 2, "max_steps": 3, "strategy": "ddp", "accelerator": "cpu", "devices": 1}
    assert len(run(ModelCheckpoint(".", "last"), **options)) == 3


def test_loader_without_a_trainer(text: None) -> None:
    """Fabric gives each rank a sampler of its own, which it does not where the loader has one."""
    data = TextFiles(paths="a.txt", seq_len=8, held_out=0.01)
    data.setup("fit")
    assert not isinstance(data.train_dataloader().sampler, DistributedSampler)


def test_state(text: None) -> None:
    """A checkpoint, which is loaded with weights only, has what determines the batches of its epoch."""
    run(ModelCheckpoint(".", "last"), max_steps=3, seq_len=8, batch_size=1)
    state = torch.load("last.ckpt", weights_only=True)["TextFiles"]
    shape = {"seq_len": 8, "batch_size": 1, "ranks": 1, "seed": 0, "sequences": 12}
    assert state == {**shape, "batches": 12, "total": 3}


class Kept(OnExceptionCheckpoint):
    """Its checkpoint stays when the Trainer ends."""

    def teardown(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize("failing", [3, 11])
def test_saved_in_a_step(text: None, failing: int) -> None:
    """A checkpoint of a step that raised, the last one of its epoch too, repeats the batch of this step."""
    found = run(Kept("."), max_steps=14, failing=failing)
    assert len(found) == failing
    assert found + run(None, "on_exception.ckpt", max_steps=14) == run(None, max_steps=14)


def test_resumed_with_other_batches(text: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With batches that are not those of the checkpoint a run raises in the middle of an epoch, and not at its end."""
    run(ModelCheckpoint(".", "{step}", save_top_k=-1, every_n_train_steps=1), max_steps=12)
    for name, now, before in (("seq_len", 4, 8), ("batch_size", 2, 1)):
        with pytest.raises(ValueError, match=rf"after 3 batches of an epoch with {name}={before}\. With {name}={now} "):
            run(None, "step=3.ckpt", max_steps=14, **{name: now})
    assert len(run(None, "step=12.ckpt", max_steps=14, batch_size=2)) == 2
    with monkeypatch.context() as patched:
        patched.setenv("PL_GLOBAL_SEED", "1")
        with pytest.raises(ValueError, match=r"with seed=0\. With seed=1 .*: resume with seed=0, or from"):
            run(None, "step=3.ckpt", max_steps=14)
    Path("a.txt").write_bytes(bytes(range(120)))
    with pytest.raises(ValueError, match=r"with sequences=12\. With sequences=13 "):
        run(None, "step=3.ckpt", max_steps=14)
    state = torch.load("step=3.ckpt")
    torch.save({name: value for name, value in state.items() if name != "TextFiles"}, "step=3.ckpt")
    with pytest.raises(ValueError, match=r"after 3 batches of an epoch of other data: resume with that data"):
        run(None, "step=3.ckpt", max_steps=14)


def test_resumed_in_an_epoch_on_two_ranks(world: World, text: None) -> None:
    """So do the ranks of a distributed run. One rank alone raises."""
    world(resume, os.getcwd(), 0, [5, 8], 2, 5)
    with pytest.raises(ValueError, match=r"with ranks=2\. With ranks=1 "):
        run(None, "0_5/step=3.ckpt", max_steps=14)


def test_default_corpus_is_the_standard_library() -> None:
    """Without paths the text is the standard library's own source: megabytes of it, the same at each reading."""
    data, again = TextFiles(seq_len=4096), TextFiles(seq_len=4096)
    data.setup("fit")
    again.setup("fit")
    assert len(data.train_dataloader().dataset) > 500
    assert b"import" in bytes(windows(data, "val").flatten().tolist())
    assert torch.equal(windows(data, "val"), windows(again, "val"))


def test_globs_single_files_and_max_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Globs and single files are read in order, up to ``max_bytes``, and a warning says that there are more."""
    for name in ("b.log", "a.log", "c.md"):
        (tmp_path / name).write_text(name[0] * 50)
    data = TextFiles([str(tmp_path / "*.log"), str(tmp_path / "c.md")], seq_len=10, max_bytes=120)
    with caplog.at_level("WARNING", "lt_tiled"):
        data.setup("fit")
    assert "paths have 150 bytes, of which max_bytes=120 are read: set max_bytes" in caplog.text
    text = bytes(torch.cat([windows(data, "val"), windows(data, "test")]).flatten().tolist())
    assert text == b"c" * 20
    assert read_text([tmp_path / "a.log", tmp_path / "b.log"], 70) == b"a" * 50 + b"b" * 20


def test_tokenizer(tmp_path: Path) -> None:
    """With a local tokenizer the tokens and the vocabulary are the tokenizer's."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "tile": 1, "by": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("tile by tile " * 40)
    data = TextFiles(str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "tokenizer"), seq_len=3)
    data.setup("fit")
    assert windows(data, "val")[0].tolist() == [1, 2, 1]
    assert data.vocab_size == 3


@pytest.mark.parametrize(
    ("text", "kwargs", "message"),
    [
        (None, {"paths": "nowhere/*.txt"}, r"paths: 'nowhere/\*.txt' matches no file"),
        (b"", {"paths": "a.txt"}, r"The 1 files of paths are empty \(a.txt is the first\)"),
        (
            b"abc" * 9,
            {"paths": "a.txt", "seq_len": 10},
            r"has 27 tokens, 2 sequences of seq_len=10, and needs at least 3",
        ),
        (b"abc" * 9, {"paths": "a.txt", "seq_len": 1}, r"seq_len=1 must be an integer of at least 2"),
        (b"abc", {"paths": "a.txt", "tokenizer": "none/here"}, r"tokenizer='none/here' is not a directory"),
    ],
)
def test_bad_input(text: bytes | None, kwargs: dict[str, object], message: str) -> None:
    """Missing, empty and short files and a missing tokenizer are errors with the value and the remedy."""
    if text is not None:
        Path("a.txt").write_bytes(text)
    with pytest.raises(ValueError, match=message):
        TextFiles(**kwargs).setup("fit")


def test_code_of_a_tokenizer_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer with code of its own raises and asks nothing, unless ``trust_remote_code`` is set."""
    Path("tokenizer").mkdir()
    Path("tokenizer/tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Own", null]}}')
    Path("tokenizer/own.py").write_text(OWN_TOKENIZER)
    Path("a.txt").write_text("text " * 20)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", os.path.abspath("modules"))
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        TextFiles("a.txt", tokenizer="tokenizer", seq_len=10).setup("fit")
    assert not Path("was_run").exists()
    TextFiles("a.txt", tokenizer="tokenizer", seq_len=10, trust_remote_code=True).setup("fit")
    assert Path("was_run").exists()


OWN_TOKENIZER = """
from pathlib import Path
from transformers import PreTrainedTokenizer
Path("was_run").touch()
class Own(PreTrainedTokenizer):
    vocab_size = 256
    def get_vocab(self): return {chr(i): i for i in range(256)}
    def _tokenize(self, text, **kwargs): return list(text)
    def _convert_token_to_id(self, token): return ord(token)
    def _convert_id_to_token(self, index): return chr(index)
"""

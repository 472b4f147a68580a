"""Text files as windows of tokens."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from lt_tiled.lm import TextFiles
from lt_tiled.lm.text import read_text
from tests.processes import LIMIT


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


def test_default_corpus_is_the_standard_library() -> None:
    """Without paths the text is the standard library's own source: megabytes of it, the same at each reading."""
    data, again = TextFiles(seq_len=4096), TextFiles(seq_len=4096)
    data.setup("fit")
    again.setup("fit")
    assert len(data.train_dataloader().dataset) > 500
    assert b"import" in bytes(windows(data, "val").flatten().tolist())
    assert torch.equal(windows(data, "val"), windows(again, "val"))


def test_globs_single_files_and_max_bytes(tmp_path: Path) -> None:
    """Globs and single files are read in order, up to ``max_bytes``."""
    for name in ("b.log", "a.log", "c.md"):
        (tmp_path / name).write_text(name[0] * 50)
    data = TextFiles([str(tmp_path / "*.log"), str(tmp_path / "c.md")], seq_len=10, max_bytes=120)
    data.setup("fit")
    text = bytes(torch.cat([windows(data, "val"), windows(data, "test")]).flatten().tolist())
    assert text == b"c" * 20
    assert read_text([tmp_path / "a.log", tmp_path / "b.log"], 70) == b"a" * 50 + b"b" * 20


def test_tokenizer(tmp_path: Path) -> None:
    """With a local tokenizer the tokens and the vocabulary are the tokenizer's."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

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


def test_what_is_no_file_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """A named pipe, a directory called like a text and a dangling link are skipped with their names, and not waited
    for.
    """
    Path("texts/notes.txt").mkdir(parents=True)
    Path("texts/notes.txt/a.md").write_text("text " * 20)
    os.mkfifo("texts/pipe.txt")
    writer = threading.Timer(LIMIT, lambda: os.close(os.open("texts/pipe.txt", os.O_RDWR)))  # ends a read that waits
    writer.daemon = True
    writer.start()
    Path("texts/z.txt").symlink_to("gone")
    data = TextFiles("texts", seq_len=10)
    with caplog.at_level("WARNING", "lt_tiled"):
        data.setup("fit")
    writer.cancel()
    assert "skipped what is not a regular file: texts/notes.txt, texts/pipe.txt, texts/z.txt." in caplog.text
    assert sum(windows(data, part).numel() for part in ("train", "val", "test")) == 100


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


def test_unreadable_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be opened is named, with the system's reason."""
    Path("a.txt").write_text("text")
    real = Path.open

    def refuse(self: Path, *args: object, **kwargs: object) -> object:
        if self.name == "a.txt":
            raise PermissionError(13, os.strerror(13))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"a.txt cannot be read \(Permission denied\): fix its permissions"):
        TextFiles("a.txt").setup("fit")

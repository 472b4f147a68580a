"""A datamodule of text files, cut into sequences of tokens."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lt_tiled._log import warn
from lt_tiled._types import NonNegativeInt, OpenUnitInterval, PositiveInt, make_plain
from lt_tiled.lm.causal import _require_transformers
from lt_tiled.policies import check_count


class TextFiles(LightningDataModule):
    """Reads text files and cuts them into sequences of ``seq_len`` tokens that do not overlap.

    The last part of the text is for testing, the part before it for validation. Tokens are bytes, or those of a local
    tokenizer.

    Args:
        paths: Files, directories (their ``*.txt``, ``*.md`` and ``*.py`` files) and globs. The default is the source of
            the Python standard library, a text that every machine has.
        tokenizer: A local directory with a Hugging Face tokenizer; ``None`` for bytes.
        seq_len: Tokens per sequence.
        batch_size: Sequences per batch and device.
        held_out: The share of the sequences that validation and testing each get, at least one sequence.
        max_bytes: Read no more text than this.
        num_workers: Worker processes of the data loaders.
        trust_remote_code: Run the Python code that ``tokenizer`` may contain. Otherwise one that needs it raises.

    Raises:
        ValueError: If a path matches no file, a file cannot be read, or the text has fewer than three sequences.
    """

    def __init__(
        self,
        paths: str | Sequence[str] | None = None,
        tokenizer: str | None = None,
        seq_len: PositiveInt = 4096,
        batch_size: PositiveInt = 1,
        held_out: OpenUnitInterval = 0.02,
        max_bytes: PositiveInt = 4_000_000,
        num_workers: NonNegativeInt = 0,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        check_count("seq_len", seq_len, least=2)  # a model predicts each token but the first
        check_count("batch_size", batch_size)
        if paths is not None and (not paths or "" in list(paths)):
            raise ValueError(f"paths={paths!r} names no file: leave it out for the source of the standard library.")
        if tokenizer is not None and not Path(tokenizer).is_dir():
            raise ValueError(f"tokenizer={tokenizer!r} is not a directory: pass a local tokenizer; none is downloaded.")
        self.save_hyperparameters()
        make_plain(self.hparams)
        self.paths = [paths] if isinstance(paths, str) else paths
        self.tokenizer, self.seq_len, self.max_bytes, self.held_out = tokenizer, seq_len, max_bytes, held_out
        self.batch_size, self.num_workers, self.trust_remote_code = batch_size, num_workers, trust_remote_code
        self.vocab_size = 256
        self._windows, self._cut_at = dict[str, Tensor](), 0

    def setup(self, stage: str) -> None:
        """Read and cut the text on every rank, and again if ``seq_len`` has changed."""
        if self._cut_at == self.seq_len:
            return
        tokens = self._tokenize(read_text(self._files(), self.max_bytes))
        count = len(tokens) // self.seq_len
        held = max(1, round(count * self.held_out))
        if count - 2 * held < 1:
            raise ValueError(
                f"The text has {len(tokens)} tokens, {count} sequences of seq_len={self.seq_len}, and needs at least 3:"
                " one to train on, one to validate, one to test. Give more text or a shorter seq_len."
            )
        windows = tokens[: count * self.seq_len].view(count, self.seq_len)
        parts = windows.split([count - 2 * held, held, held])
        self._windows = dict(zip(("train", "val", "test"), parts, strict=True))
        self._cut_at = self.seq_len

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader("test")

    predict_dataloader = test_dataloader

    def _loader(self, part: str, shuffle: bool = False) -> DataLoader[dict[str, Tensor]]:
        data: Any = TensorDataset(self._windows[part])
        options: dict[str, Any] = {"batch_size": self.batch_size, "num_workers": self.num_workers}
        return DataLoader(data, shuffle=shuffle, collate_fn=_batch, **options)

    def _files(self) -> list[Path]:
        if self.paths is None:
            root = Path(sysconfig.get_path("stdlib"))
            return sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py"))
        files: list[Path] = []
        for path in self.paths:
            if Path(path).is_dir():
                named = sorted(p for p in Path(path).rglob("*") if p.suffix in (".txt", ".md", ".py"))
            else:  # a file's name may look like a glob
                names = [path] if Path(path).is_file() else sorted(glob(path, recursive=True))
                named = [Path(name) for name in names]
            found = [p for p in named if p.is_file()]  # reading a named pipe would wait for a writer
            # A glob matches plain directories, too.
            if skipped := [str(p) for p in named if p.suffix and not p.is_file()]:
                warn(f"paths: {path!r}: skipped what is not a regular file: {', '.join(skipped[:5])}.")
            if not found:
                kinds = "a file, a directory with .txt, .md or .py files, or a glob"
                raise ValueError(f"paths: {path!r} matches no file: pass {kinds}.")
            files += found
        return files

    def _tokenize(self, text: bytes) -> Tensor:
        if self.tokenizer is None:
            return torch.frombuffer(bytearray(text), dtype=torch.uint8)
        _require_transformers()
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                self.tokenizer, local_files_only=True, trust_remote_code=self.trust_remote_code
            )
        except Exception as error:
            raise ValueError(f"tokenizer={self.tokenizer!r} cannot be loaded: {error}") from error
        self.vocab_size = len(tokenizer)
        return torch.tensor(tokenizer(text.decode(errors="replace"))["input_ids"], dtype=torch.int32)


def _batch(rows: list[tuple[Tensor]]) -> dict[str, Tensor]:
    return {"input_ids": torch.stack([row for (row,) in rows]).long()}


def read_text(files: Sequence[Path], max_bytes: int) -> bytes:
    """Return the first ``max_bytes`` bytes of the files.

    Raises:
        ValueError: If a file cannot be read, or all of them are empty.
    """
    text = bytearray()
    for file in files:
        try:
            with file.open("rb") as stream:
                text += stream.read(max_bytes - len(text))
        except OSError as error:
            reason = f"{file} cannot be read ({error.strerror})"
            raise ValueError(f"{reason}: fix its permissions or remove it from paths.") from error
        if len(text) >= max_bytes:
            break
    if not text:
        raise ValueError(f"The {len(files)} files of paths are empty ({files[0]} is the first): pass files with text.")
    return bytes(text)

"""A datamodule of text files, cut into sequences of tokens, and what all datamodules of tokens have in common."""

from __future__ import annotations

import sysconfig
from collections.abc import Collection, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, StackDataset, default_collate

from lt_tiled._log import warn
from lt_tiled._types import NonNegativeInt, OpenUnitInterval, PositiveInt, make_plain
from lt_tiled.lm.causal import require
from lt_tiled.policies import check_count


class Sequences(LightningDataModule):
    """Gives batches of sequences of ``seq_len`` tokens, in a part to train on, one to validate and one to test."""

    def __init__(self, seq_len: int, batch_size: int, num_workers: int) -> None:
        super().__init__()
        check_count("seq_len", seq_len, least=2)  # a model predicts each token but the first
        check_count("batch_size", batch_size)
        self.seq_len, self.batch_size, self.num_workers = seq_len, batch_size, num_workers
        self.vocab_size = 256
        self._parts, self._cut_at = dict[str, Mapping[str, Tensor]](), 0

    def cut(self) -> list[Mapping[str, Tensor]]:
        """Return tensors of shape ``[sequences, seq_len]`` for the three parts, the same on every rank."""
        raise NotImplementedError

    def setup(self, stage: str) -> None:
        """Read and cut the data on every rank, and again if ``seq_len`` has changed."""
        if self._cut_at != self.seq_len:
            self._parts = dict(zip(("train", "val", "test"), self.cut(), strict=True))
            self._cut_at = self.seq_len

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._loader("test")

    predict_dataloader = test_dataloader

    def _loader(self, part: str, shuffle: bool = False) -> DataLoader[dict[str, Tensor]]:
        data: Any = StackDataset(**self._parts[part])  # type: ignore[arg-type]  # torch wants datasets, and takes sequences
        options: dict[str, Any] = {"batch_size": self.batch_size, "num_workers": self.num_workers}
        return DataLoader(data, shuffle=shuffle, collate_fn=_batch, **options)


class TextFiles(Sequences):
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
        super().__init__(seq_len, batch_size, num_workers)
        if paths is not None and (not paths or "" in list(paths)):
            raise ValueError(f"paths={paths!r} names no file: leave it out for the source of the standard library.")
        if tokenizer is not None:
            check_tokenizer(tokenizer)
        self.save_hyperparameters()
        make_plain(self.hparams)
        self.paths = [paths] if isinstance(paths, str) else paths
        self.tokenizer, self.max_bytes, self.held_out = tokenizer, max_bytes, held_out
        self.trust_remote_code = trust_remote_code

    def cut(self) -> list[Mapping[str, Tensor]]:
        if self.paths is None:
            root = Path(sysconfig.get_path("stdlib"))
            files = sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py"))
        else:
            files = [file for path in self.paths for file in files_of(path, (".txt", ".md", ".py"))]
        tokens = self._tokenize(read_text(files, self.max_bytes))
        count = len(tokens) // self.seq_len
        held = max(1, round(count * self.held_out))
        if count - 2 * held < 1:
            raise ValueError(
                f"The text has {len(tokens)} tokens, {count} sequences of seq_len={self.seq_len}, and needs at least 3:"
                " one to train on, one to validate, one to test. Give more text or a shorter seq_len."
            )
        windows = tokens[: count * self.seq_len].view(count, self.seq_len)
        return [{"input_ids": part} for part in windows.split([count - 2 * held, held, held])]

    def _tokenize(self, text: bytes) -> Tensor:
        if self.tokenizer is None:
            return torch.frombuffer(bytearray(text), dtype=torch.uint8)
        tokenizer = load_tokenizer(self.tokenizer, self.trust_remote_code)
        self.vocab_size = len(tokenizer)
        return torch.tensor(tokenizer(text.decode(errors="replace"))["input_ids"], dtype=torch.int32)


def check_tokenizer(directory: str) -> None:
    """Raise ``ValueError`` if this is no directory."""
    if not Path(directory).is_dir():
        raise ValueError(f"tokenizer={directory!r} is not a directory: pass a local tokenizer; none is downloaded.")


def load_tokenizer(tokenizer: str, trust_remote_code: bool = False, chat_template: str | None = None) -> Any:
    """Return the tokenizer of a local directory, with the chat template of a file if there is one.

    Raises:
        ValueError: If one of them cannot be loaded.
    """
    require("transformers", "'lt-tiled[hf]'")
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ValueError(f"tokenizer={tokenizer!r} cannot be loaded: {error}") from error
    if chat_template is not None:
        try:
            found.chat_template = Path(chat_template).read_text()
        except OSError as error:
            raise ValueError(f"chat_template={chat_template!r} cannot be read ({error.strerror}).") from error
    return found


def files_of(path: str, suffixes: Collection[str]) -> list[Path]:
    """Return the file, those of a directory with one of the suffixes, or those of a glob.

    Raises:
        ValueError: If there is none.
    """
    if Path(path).is_dir():
        named = sorted(p for p in Path(path).rglob("*") if p.suffix in suffixes)
    else:  # a file's name may look like a glob
        names = [path] if Path(path).is_file() else sorted(glob(path, recursive=True))
        named = [Path(name) for name in names]
    found = [p for p in named if p.is_file()]  # reading a named pipe would wait for a writer
    # A glob matches plain directories, too.
    if skipped := [str(p) for p in named if p.suffix and not p.is_file()]:
        warn(f"paths: {path!r}: skipped what is not a regular file: {', '.join(skipped[:5])}.")
    if not found:
        kinds = f"a file, a directory with {' or '.join(suffixes)} files, or a glob"
        raise ValueError(f"paths: {path!r} matches no file: pass {kinds}.")
    return found


def _batch(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.long() for name, tensor in default_collate(rows).items()}


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

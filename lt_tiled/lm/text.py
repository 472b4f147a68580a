"""A datamodule of text files, cut into sequences of tokens, in an order that a resumed run continues."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cached_property
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lt_tiled.policies import check_count


class TextFiles(LightningDataModule):
    """Reads text files and cuts them into sequences of ``seq_len`` tokens that do not overlap.

    The last part of the text is for testing, the part before it for validation. A run that is resumed in the middle of
    an epoch, with the same text, arguments, seed and ranks, continues with the batches that are left of it.

    Args:
        paths: Files, directories (their ``*.txt``, ``*.md`` and ``*.py`` files) and globs. The default is the source of
            the Python standard library, a text that every machine has.
        tokenizer: A local directory with a Hugging Face tokenizer. By default each byte is a token.
        seq_len: Tokens per sequence.
        batch_size: Sequences per batch and device.
        held_out: The share of the sequences that validation and testing each get, at least one sequence.
        trust_remote_code: Run the Python code that ``tokenizer`` may contain. Otherwise one that needs it raises.

    Raises:
        ValueError: If a path matches no file, a file cannot be read, or the text has fewer than three sequences.
    """

    def __init__(
        self,
        paths: str | Sequence[str] | None = None,
        tokenizer: str | None = None,
        seq_len: int = 4096,
        batch_size: int = 1,
        held_out: float = 0.02,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        check_count("seq_len", seq_len, least=2)  # a model predicts each token but the first
        if not 0 < held_out < 1:
            raise ValueError(f"held_out={held_out} must be between 0 and 1.")
        if tokenizer is not None and not Path(tokenizer).is_dir():
            raise ValueError(f"tokenizer={tokenizer!r} is not a directory: pass a local tokenizer; none is downloaded.")
        self.save_hyperparameters()
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.tokenizer = tokenizer
        self.vocab_size = 256
        self._parts: dict[str, Tensor] = {}

    def setup(self, stage: str) -> None:
        """Cut the text into ``[sequences, seq_len]`` for each of the three parts, alike on every rank."""
        tokens = self._tokens
        count = len(tokens) // self.seq_len
        held_out = max(1, round(count * self.hparams["held_out"]))
        if count <= 2 * held_out:
            raise ValueError(
                f"The text has {len(tokens)} tokens, {count} sequences of seq_len={self.seq_len}, and needs at least 3:"
                " one to train on, one to validate, one to test. Give more text or a shorter seq_len."
            )
        sequences = tokens[: count * self.seq_len].view(count, self.seq_len)
        training, validation, testing = sequences.split([count - 2 * held_out, held_out, held_out])
        self._parts = {"train": training, "val": validation, "test": testing}

    @cached_property
    def _tokens(self) -> Tensor:  # [T], read once: each stage cuts them again
        text = read_text(self.hparams["paths"])
        if self.tokenizer is None:
            return torch.from_numpy(np.frombuffer(bytearray(text), np.uint8))
        from transformers import AutoTokenizer

        trust = self.hparams["trust_remote_code"]
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer, local_files_only=True, trust_remote_code=trust)
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1  # its length is less if ids are left out
        ids = tokenizer(text.decode(errors="replace"), verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int32)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return batches in an order that depends only on the seed and on how many batches came before the epoch."""
        if self.trainer is None:  # Fabric gives each rank a sampler, but not where the loader has one
            return self._loader("train", shuffle=True)
        return self._loader("train", sampler=_EpochOrder(self.trainer, self.batch_size, self._parts["train"]))

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Tensor]:
        return self._loader("test")

    predict_dataloader = test_dataloader

    def _loader(self, part: str, **options: Any) -> DataLoader[Tensor]:
        rows: Any = self._parts[part]  # a loader takes any sequence
        options["collate_fn"] = lambda tokens: {"input_ids": torch.stack(tokens).long()}
        return _Loader(rows, batch_size=self.batch_size, **options)


class _EpochOrder(DistributedSampler[Tensor]):
    """Shuffles sequences for each epoch, divides them among the ranks, and leaves out what a resumed run has seen."""

    def __init__(self, trainer: Any, batch_size: int, sequences: Any) -> None:
        self.trainer = trainer
        self.batch_size = batch_size
        ranks = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        super().__init__(sequences, **ranks, seed=int(os.environ.get("PL_GLOBAL_SEED", 0)))

    def __iter__(self) -> Iterator[Any]:
        # 1. Lightning creates iterators before it restores its counts, but a generator starts with its first item.
        counts = self.trainer.fit_loop.epoch_loop.batch_progress
        # 2. Lightning counts an epoch that max_steps ends as a whole one. The batches before an epoch are certain.
        self.set_epoch(counts.total.completed - counts.current.completed)
        # 3. Lightning counts from 0 in a new epoch, and in a resumed one from where it stopped.
        yield from islice(super().__iter__(), counts.current.ready * self.batch_size, None)


class _Loader(DataLoader[Tensor]):
    """Is known to Lightning as a loader that resumes, which would warn otherwise. The order above does it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def read_text(paths: str | Sequence[str] | None) -> bytes:
    """Return the text of files, of the text files in directories, and of the files that globs match."""
    if paths is None:
        paths = str(Path(sysconfig.get_path("stdlib"), "*.py"))
    if isinstance(paths, str):
        paths = [paths]
    text = b""
    for path in paths:
        if Path(path).is_dir():
            candidates = [file for file in Path(path).rglob("*") if file.suffix in (".txt", ".md", ".py")]
        else:
            candidates = [Path(name) for name in glob(path, recursive=True)]
        files = sorted(file for file in candidates if file.is_file())  # reading a named pipe would wait for a writer
        if not files:
            raise ValueError(
                f"paths: {path!r} matches no file: pass a file, a directory with .txt, .md or .py files, or a glob."
            )
        text += b"".join(file.read_bytes() for file in files)
    return text

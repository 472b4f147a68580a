"""A datamodule of text files, cut into sequences of tokens, in an order that a resumed run continues."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lt_tiled._log import warn
from lt_tiled.lm.models import require
from lt_tiled.policies import check_count


class TextFiles(LightningDataModule):
    """Reads text files and cuts them into sequences of ``seq_len`` tokens that do not overlap.

    The last part of the text is for testing, the part before it for validation. A run that is resumed in the middle of
    an epoch continues with the batches that are left of it.

    Args:
        paths: Files, directories (their ``*.txt``, ``*.md`` and ``*.py`` files) and globs. The default is the source of
            the Python standard library, a text that every machine has.
        tokenizer: A local directory with a Hugging Face tokenizer. By default each byte is a token.
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
        seq_len: int = 4096,
        batch_size: int = 1,
        held_out: float = 0.02,
        max_bytes: int = 4_000_000,
        num_workers: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        check_count("seq_len", seq_len, least=2)  # a model predicts each token but the first
        check_count("batch_size", batch_size)
        check_count("max_bytes", max_bytes)
        if not 0 < held_out < 1:
            raise ValueError(f"held_out={held_out} must be between 0 and 1.")
        if paths is not None and (not paths or "" in list(paths)):
            raise ValueError(f"paths={paths!r} names no file: leave it out for the source of the standard library.")
        if tokenizer is not None and not Path(tokenizer).is_dir():
            raise ValueError(f"tokenizer={tokenizer!r} is not a directory: pass a local tokenizer; none is downloaded.")
        self.save_hyperparameters()
        self.paths = [paths] if isinstance(paths, str) else paths
        self.seq_len, self.batch_size, self.num_workers = seq_len, batch_size, num_workers
        self.max_bytes, self.held_out, self.trust_remote_code = max_bytes, held_out, trust_remote_code
        self.tokenizer = tokenizer
        self.vocab_size = 256
        self.resumed: dict[str, Any] = {}
        """What a checkpoint tells of its epoch."""
        self._parts: dict[str, Tensor] = {}
        self._cut_at = 0

    def setup(self, stage: str) -> None:
        """Read and cut the text on every rank, and again if ``seq_len`` has changed."""
        if self._cut_at != self.seq_len:
            self._parts = self._cut()
            self._cut_at = self.seq_len

    def _cut(self) -> dict[str, Tensor]:
        """Return tensors of shape ``[sequences, seq_len]`` for the three parts, the same on every rank."""
        if self.paths is None:
            root = Path(sysconfig.get_path("stdlib"))
            files = sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py"))
        else:
            files = [file for path in self.paths for file in files_of(path)]
        text = read_text(files, self.max_bytes)
        if self.paths is not None and len(text) < (size := sum(file.stat().st_size for file in files)):
            warn(f"paths have {size} bytes, of which max_bytes={len(text)} are read: set max_bytes to read more.")
        tokens = self._tokenize(text)
        count = len(tokens) // self.seq_len
        held_out = max(1, round(count * self.held_out))
        if count <= 2 * held_out:
            raise ValueError(
                f"The text has {len(tokens)} tokens, {count} sequences of seq_len={self.seq_len}, and needs at least 3:"
                " one to train on, one to validate, one to test. Give more text or a shorter seq_len."
            )
        sequences = tokens[: count * self.seq_len].view(count, self.seq_len)
        training, validation, testing = sequences.split([count - 2 * held_out, held_out, held_out])
        return {"train": training, "val": validation, "test": testing}

    def _tokenize(self, text: bytes) -> Tensor:
        if self.tokenizer is None:
            return torch.frombuffer(bytearray(text), dtype=torch.uint8)
        require("transformers", "'lt-tiled[hf]'")
        from transformers import AutoTokenizer

        options = {"local_files_only": True, "trust_remote_code": self.trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer, **options)
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1  # its length is less if ids are left out
        ids = tokenizer(text.decode(errors="replace"), verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int32)

    def state_dict(self) -> dict[str, Any]:
        if self.trainer is None or not self._parts:
            return {}
        return {**self._epoch(), "total": self.trainer.fit_loop.epoch_loop.batch_progress.total.ready}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.resumed = state_dict

    def _epoch(self) -> dict[str, int]:
        """Return what determines the batches of an epoch."""
        assert self.trainer is not None
        sampler = self.trainer.distributed_sampler_kwargs or {}
        return {
            "seq_len": self.seq_len,
            "batch_size": self.batch_size,
            "ranks": sampler.get("num_replicas", 1),
            "seed": _seed(),
            "sequences": len(self._parts["train"]),
        }

    def begin_epoch(self) -> int:
        """Return the number of batches of this epoch that a resumed run has trained on.

        Raises:
            ValueError: If the data has changed within an epoch, so that other batches would be left of it.
        """
        if self.trainer is None:
            return 0
        counts = self.trainer.fit_loop.epoch_loop.batch_progress
        if counts.current.ready == 0 or counts.total.ready != self.resumed.get("total"):
            return 0
        # No batch has been trained on since the checkpoint.
        for name, value in self._epoch().items():
            if self.resumed[name] != value:
                raise ValueError(
                    f"The checkpoint is of the middle of an epoch with {name}={self.resumed[name]}, and now {name}="
                    f"{value}: resume with {name}={self.resumed[name]}, or from the end of an epoch."
                )
        return counts.current.ready

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return batches in an order that depends only on the seed and on how many batches came before the epoch."""
        # With several ranks, Lightning and Fabric give each such a sampler.
        alone = self.trainer is not None and self.trainer.world_size == 1
        data, seed = self._parts["train"], _seed()
        sampler: Any = DistributedSampler(data, 1, 0, seed=seed) if alone else None  # type: ignore[arg-type]
        return _ResumedLoader(data, datamodule=self, shuffle=not alone, sampler=sampler, **self._options())

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self._parts["val"], **self._options())  # type: ignore[arg-type]  # it takes any sequence

    def test_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self._parts["test"], **self._options())  # type: ignore[arg-type]

    predict_dataloader = test_dataloader

    def _options(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "num_workers": self.num_workers, "collate_fn": _batch}


def _seed() -> int:
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def _batch(rows: list[Tensor]) -> dict[str, Tensor]:
    return {"input_ids": torch.stack(rows).long()}


class _ResumedLoader(DataLoader[Tensor]):
    """Skips the batches of an epoch that a resumed run has already trained on, as Lightning counts them."""

    def __init__(self, *args: Any, datamodule: TextFiles, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.datamodule = datamodule  # an argument and an attribute, because Lightning builds the loader again

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: Lightning warns about loaders without this method, but does not always load its result."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]
        # A generator starts with its first batch. Lightning creates iterators before it restores its counts.
        trained = self.datamodule.begin_epoch()
        trainer = self.datamodule.trainer
        if trainer is not None:
            if trained and trained >= trainer.num_training_batches:
                return  # the epoch is complete: Lightning starts the next one
            if isinstance(self.sampler, DistributedSampler):
                counts = trainer.fit_loop.epoch_loop.batch_progress
                self.sampler.set_epoch(counts.total.completed - counts.current.completed)  # another for each epoch
        yield from islice(super().__iter__(), trained, None)


def files_of(path: str) -> list[Path]:
    """Return the file, the texts of a directory, or the files of a glob: at least one."""
    if Path(path).is_dir():
        candidates = [file for file in Path(path).rglob("*") if file.suffix in (".txt", ".md", ".py")]
    else:
        candidates = [Path(path), *map(Path, glob(path, recursive=True))]  # a file's name may look like a glob
    files = sorted({file for file in candidates if file.is_file()})  # reading a named pipe would wait for a writer
    if not files:
        raise ValueError(
            f"paths: {path!r} matches no file: pass a file, a directory with .txt, .md or .py files, or a glob."
        )
    return files


def read_text(files: Sequence[Path], max_bytes: int) -> bytes:
    """Return the first ``max_bytes`` bytes of the files, at least one."""
    text = bytearray()
    for file in files:
        with file.open("rb") as stream:
            text += stream.read(max_bytes - len(text))
        if len(text) >= max_bytes:
            break
    if not text:
        raise ValueError(f"The {len(files)} files of paths are empty ({files[0]} is the first): pass files with text.")
    return bytes(text)

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

from lt_tiled._log import inform, warn
from lt_tiled.lm.causal import CausalLM
from lt_tiled.lm.models import require
from lt_tiled.policies import check_count


class TextFiles(LightningDataModule):
    """Reads text files and cuts them into sequences of ``seq_len`` tokens that do not overlap.

    The last part of the text is for testing, the part before it for validation. A run that is resumed in the middle of
    an epoch continues with the batches that are left of it.

    Args:
        paths: Files, directories (their ``*.txt``, ``*.md`` and ``*.py`` files) and globs. The default is the source of
            the Python standard library, a text that every machine has.
        tokenizer: A local directory with a Hugging Face tokenizer. The default is that in the ``path`` of CausalLM, or
            bytes for a model without ``path``, or with 256 tokens.
        seq_len: Tokens per sequence.
        batch_size: Sequences per batch and device.
        held_out: The share of the sequences that validation and testing each get, at least one sequence.
        max_bytes: Read no more text than this.
        num_workers: Worker processes of the data loaders.
        trust_remote_code: Run the Python code that ``tokenizer`` may contain. Otherwise one that needs it raises.

    Raises:
        ValueError: If a path matches no file, a file cannot be read, the text has fewer than three sequences, or the
            model in a local directory has other tokens than bytes and no tokenizer.
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
        self.tokenizer = self._used = tokenizer
        self.vocab_size = 256
        self.epoch: dict[str, Any] = {}
        """What determines the batches of the current epoch. A loaded one also has ``total``, the batches so far."""
        self._parts: dict[str, Tensor] = {}
        self._cut_at = 0

    def setup(self, stage: str) -> None:
        """Read and cut the text on every rank, and again if ``seq_len`` or the tokenizer has changed."""
        tokenizer = self.tokenizer or self._tokenizer_of_the_model()
        if tokenizer != self._used:
            inform(f"the tokens of the text are {f'those of the tokenizer in {tokenizer}' if tokenizer else 'bytes'}")
            self._used = tokenizer
        elif self._cut_at == self.seq_len:
            return
        self._parts = self._cut()
        self._cut_at = self.seq_len

    def _tokenizer_of_the_model(self) -> str | None:
        """Return the directory of the model if it has a tokenizer, or ``None`` for bytes."""
        module = getattr(self.trainer, "lightning_module", None)
        if not isinstance(module, CausalLM) or (path := module.hparams["path"]) is None:
            return None
        if has_tokenizer(path):
            return str(path)
        if module.vocab_size != 256:
            raise ValueError(
                f"The model in path={path!r} has {module.vocab_size} tokens and no tokenizer, and the data would be"
                " bytes: set tokenizer of lt_tiled.lm.TextFiles to a local directory with the tokenizer of the model."
            )
        return None

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
        if self._used is None:
            self.vocab_size = 256
            return torch.frombuffer(bytearray(text), dtype=torch.uint8)
        require("transformers", "'lt-tiled[hf]'")
        from transformers import AutoTokenizer

        options = {"local_files_only": True, "trust_remote_code": self.trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(self._used, **options)
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1  # its length is less if ids are left out
        ids = tokenizer(text.decode(errors="replace"), verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int32)

    def state_dict(self) -> dict[str, Any]:
        if self.trainer is None or not self.epoch:
            return {}
        return {**self.epoch, "total": self.trainer.fit_loop.epoch_loop.batch_progress.total.ready}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return batches in an order that depends only on the seed and on how many batches came before the epoch."""
        # With several ranks, Lightning and Fabric give each such a sampler.
        alone = self.trainer is not None and self.trainer.world_size == 1
        data, seed = self._parts["train"], int(os.environ.get("PL_GLOBAL_SEED", 0))
        sampler: Any = DistributedSampler(data, 1, 0, seed=seed) if alone else None  # type: ignore[arg-type]
        return _ResumedLoader(data, datamodule=self, shuffle=not alone, sampler=sampler, **self._options())

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self._parts["val"], **self._options())  # type: ignore[arg-type]  # it takes any sequence

    def test_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self._parts["test"], **self._options())  # type: ignore[arg-type]

    predict_dataloader = test_dataloader

    def _options(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "num_workers": self.num_workers, "collate_fn": _batch}


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
        trained, trainer = 0, self.datamodule.trainer
        if trainer is not None:
            counts, saved = trainer.fit_loop.epoch_loop.batch_progress, self.datamodule.epoch
            if counts.total.ready == saved.get("total"):  # no batch has been trained on since the checkpoint
                trained = counts.current.ready
            elif not saved and counts.current.ready and not counts.is_last_batch:
                raise ValueError(
                    f"The checkpoint was saved after {counts.current.ready} batches of an epoch of other data: resume"
                    " with that data, or from a checkpoint of the end of an epoch."
                )
            if trained and trained >= saved["batches"]:
                return  # the epoch is complete: Lightning starts the next one
            self._begin_epoch(trained, trainer.num_training_batches)
            if isinstance(self.sampler, DistributedSampler):  # a different number for each epoch
                self.sampler.set_epoch(counts.total.completed - counts.current.completed)
        yield from islice(super().__iter__(), trained, None)

    def _begin_epoch(self, trained: int, batches: float) -> None:
        """Record what determines the batches of this epoch, which must be those of the checkpoint's epoch."""
        epoch: dict[str, Any] = {
            "seq_len": self.datamodule.seq_len,
            "batch_size": self.batch_size,
            "ranks": getattr(self.sampler, "num_replicas", 1),
            "seed": getattr(self.sampler, "seed", 0),
            "sequences": len(self.dataset),  # type: ignore[arg-type]  # it is a tensor
        }
        saved = self.datamodule.epoch
        for name, value in epoch.items():
            if trained and saved[name] != value:
                raise ValueError(
                    f"The checkpoint was saved after {trained} batches of an epoch with {name}={saved[name]}. With"
                    f" {name}={value} other batches would be left: resume with {name}={saved[name]}, or from a"
                    " checkpoint of the end of an epoch."
                )
        self.datamodule.epoch = {**saved, **epoch, "batches": batches}


def has_tokenizer(directory: str) -> bool:
    """Return whether a directory has a tokenizer: what ``save_pretrained`` writes, or its vocabulary alone."""
    files = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")
    return any((Path(directory) / file).is_file() for file in files)


def files_of(path: str) -> list[Path]:
    """Return the file, the texts of a directory, or the files of a glob: at least one."""
    if Path(path).is_dir():
        candidates = [file for file in Path(path).rglob("*") if file.suffix in (".txt", ".md", ".py")]
    elif Path(path).is_file():  # its name may look like a glob
        candidates = [Path(path)]
    else:
        candidates = [Path(name) for name in glob(path, recursive=True)]
    files = sorted(file for file in candidates if file.is_file())  # reading a named pipe would wait for a writer
    if not files:
        kinds = "a file, a directory with .txt, .md or .py files, or a glob"
        raise ValueError(f"paths: {path!r} matches no file: pass {kinds}.")
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

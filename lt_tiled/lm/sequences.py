"""Batches of token sequences, in an order that a resumed run continues."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, StackDataset, default_collate

from lt_tiled.cli.numbers import make_plain
from lt_tiled.policies import check_count


class Sequences(LightningDataModule):
    """Provides batches of sequences of ``seq_len`` tokens for training, validation and testing."""

    def __init__(self, seq_len: int, batch_size: int, num_workers: int) -> None:
        super().__init__()
        check_count("seq_len", seq_len, least=2)  # a model predicts each token but the first
        check_count("batch_size", batch_size)
        self.seq_len, self.batch_size, self.num_workers = seq_len, batch_size, num_workers
        self.vocab_size = 256
        self._epoch: dict[str, Any] = {}
        """What determines the batches of the current epoch. A loaded one also has ``total``, the batches so far."""
        self._parts, self._cut_at = dict[str, Mapping[str, Tensor]](), 0

    def cut(self) -> list[Mapping[str, Tensor]]:
        """Return tensors of shape ``[sequences, seq_len]`` for the three parts, the same on every rank."""
        raise NotImplementedError

    def setup(self, stage: str) -> None:
        """Read and cut the data on every rank, and again if ``seq_len`` has changed."""
        if self._cut_at != self.seq_len:
            self._parts = dict(zip(("train", "val", "test"), self.cut(), strict=True))
            self._cut_at = self.seq_len

    def state_dict(self) -> dict[str, Any]:
        if self.trainer is None or not self._epoch:
            return {}
        return {**self._epoch, "total": self.trainer.fit_loop.epoch_loop.batch_progress.total.ready}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epoch = state_dict

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return batches in an order that depends only on the seed and on how many batches came before the epoch."""
        # With several ranks, Lightning and Fabric give each such a sampler.
        alone = self.trainer is not None and self.trainer.world_size == 1
        data, seed = self._data("train"), int(os.environ.get("PL_GLOBAL_SEED", 0))
        sampler: Any = DistributedSampler(data, 1, 0, seed=seed) if alone else None
        return _ResumedLoader(data, datamodule=self, shuffle=not alone, sampler=sampler, **self._options())

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self._data("val"), **self._options())

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self._data("test"), **self._options())

    predict_dataloader = test_dataloader

    def _data(self, part: str) -> Any:
        return StackDataset(**self._parts[part])  # type: ignore[arg-type]  # torch wants datasets, and takes sequences

    def _options(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "num_workers": self.num_workers, "collate_fn": _batch}


class _ResumedLoader(DataLoader[dict[str, Tensor]]):
    """Skips the batches of an epoch that a resumed run has already trained on, as Lightning counts them."""

    def __init__(self, *args: Any, datamodule: Sequences, **kwargs: Any) -> None:
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
            counts, saved = trainer.fit_loop.epoch_loop.batch_progress, self.datamodule._epoch
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
            "sequences": len(self.dataset),  # type: ignore[arg-type]  # it is a StackDataset
        }
        make_plain(epoch)
        saved = self.datamodule._epoch
        for name, value in epoch.items():
            if trained and saved[name] != value:
                raise ValueError(
                    f"The checkpoint was saved after {trained} batches of an epoch with {name}={saved[name]}. With"
                    f" {name}={value} other batches would be left: resume with {name}={saved[name]}, or from a"
                    " checkpoint of the end of an epoch."
                )
        self.datamodule._epoch = {**saved, **epoch, "batches": batches}


def part_sizes(count: int, held_out: float) -> list[int]:
    """Return how many of ``count`` are for training, validation and testing: at least one for each of the last two."""
    held_out_count = max(1, round(count * held_out))
    return [count - 2 * held_out_count, held_out_count, held_out_count]


def _batch(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.long() for name, tensor in default_collate(rows).items()}

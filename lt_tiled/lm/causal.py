"""A LightningModule for any causal language model of Hugging Face."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torchmetrics import MeanMetric

from lt_tiled._log import warn
from lt_tiled.loss.cross_entropy import shifted
from lt_tiled.loss.transformers import find_losses, patch_losses
from lt_tiled.policies import as_loss
from lt_tiled.sequence_parallel.ulysses import gathered
from lt_tiled.strategies.deepspeed import not_sharded_yet
from lt_tiled.tiling.weights import swapped


class CausalLM(LightningModule):
    """Trains a causal language model of transformers, from scratch or from a local directory.

    Nothing is downloaded. Batches are dictionaries with ``input_ids``, integers of shape ``[B, S]``, and may have
    ``labels`` of that shape (-100 where there is no loss; not shifted) and other arguments of the model.

    Args:
        config: The fields of a Hugging Face configuration, such as ``{model_type: llama, hidden_size: 256}``. With
            ``path``, those that differ from its own, such as ``{attn_implementation: flex_attention}``.
        path: A local directory with a model, as ``save_pretrained`` writes it.
        lora: Train LoRA adapters instead of the weights: the fields of peft's ``LoraConfig``, such as ``{r: 16,
            target_modules: all-linear}``.
        loss: Compute losses and log-probabilities in tiles: ``True``, or the number of tiles. ``False`` turns it off.
        learning_rate: The peak learning rate of AdamW.
        weight_decay: The weight decay of AdamW.
        optimizer: Another optimizer in place of AdamW: ``--model.optimizer=SGD --model.optimizer.lr=0.1``.
        warmup_steps: Steps of linear warmup. Then a cosine schedule ends at a tenth of the peak.
        trust_remote_code: Run the Python code that ``path`` may contain. Otherwise a model that needs it raises.

    Raises:
        ValueError: If neither ``config`` nor ``path`` names a model, or it does not learn to predict the next token.
    """

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        path: str | None = None,
        lora: dict[str, Any] | None = None,
        loss: bool | int | None = True,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        optimizer: OptimizerCallable | None = None,
        warmup_steps: int = 10,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        if path is None and "model_type" not in (config or {}):
            raise ValueError(f"{config=} has no model_type: add one, such as llama, or pass path, a local model.")
        if path is not None and not (Path(path) / "config.json").is_file():
            raise ValueError(f"path={path!r} is not a directory with a config.json: pass a local model.")
        self.save_hyperparameters(ignore="optimizer")
        self.optimizer = optimizer
        self._loss_shards = as_loss(loss)
        self.model: Any = None
        self.val_perplexity = _Perplexity()
        self.test_perplexity = _Perplexity()

    def configure_model(self) -> None:
        """Build the model once. Strategies call this hook, so that they can shard weights as they are made."""
        if self.model is not None:
            return
        model = self._new_model()
        if "loss_function" not in inspect.getsource(type(model).forward):
            raise ValueError(
                f"{type(model).__name__} does not compute the loss of the next token by transformers' loss_function:"
                " train it in a LightningModule of your own, or choose a causal model such as llama."
            )
        self.model = model
        if self.hparams["lora"] is not None:
            from peft import LoraConfig, get_peft_model

            lora = LoraConfig(**{"task_type": "CAUSAL_LM"} | self.hparams["lora"])
            with not_sharded_yet(model):  # before peft has set the adapters to zero
                self.model = get_peft_model(model, lora)
        self.model.train()
        if self._loss_shards is not None:
            patch_losses(find_losses(model), self._loss_shards, object(), evaluation=True)

    def _new_model(self) -> Any:
        """Return a new transformers model, or the one in ``path``; in a plan, without its weights."""
        from transformers import AutoModelForCausalLM

        path = self.hparams["path"]
        options = {"config": self._config(), "trust_remote_code": self.hparams["trust_remote_code"]}
        if path is None or torch.get_default_device().type == "meta":
            return AutoModelForCausalLM.from_config(**options)
        dtype = torch.get_default_dtype()
        return AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=dtype, **options)

    def _config(self) -> Any:
        """Return the configuration of a new model, or of the one in ``path``."""
        from transformers import AutoConfig

        fields = self.hparams["config"] or {}
        if self.hparams["path"] is None:
            config = AutoConfig.for_model(**fields)
        else:
            options = {"local_files_only": True, "trust_remote_code": self.hparams["trust_remote_code"]}
            config = AutoConfig.from_pretrained(self.hparams["path"], **options, **fields)
        default = type(config)()
        for key in fields:  # transformers accepts unknown ones
            if hasattr(config, key) and not hasattr(default, key):
                message = f"config: {type(config).__name__} has no key {key!r}: the model may ignore it."
                warn(message, once=message)
        return config

    def setup(self, stage: str) -> None:
        """Compare the data with the model before the model is built."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        config = self._config().get_text_config()
        tokens = getattr(data, "vocab_size", 0)
        if tokens > config.vocab_size:
            raise ValueError(
                f"The data has token ids up to {tokens - 1} and the model {config.vocab_size} tokens: set vocab_size:"
                f" {tokens}."
            )
        path = self.hparams["path"]
        if path is not None and getattr(data, "tokenizer", path) is None:
            warn(f"the tokens of the text are bytes: set tokenizer of TextFiles, such as --data.tokenizer={path}")
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and getattr(data, "seq_len", 0) > longest:
            warn(f"seq_len={data.seq_len} is above the max_position_embeddings={longest} of the model: raise that too")

    def forward(self, input_ids: Tensor, **others: Any) -> Tensor:
        """Return logits of shape ``[B, S, vocab_size]``; ``others`` are arguments of the model."""
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False, **others).logits
        return logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**self._inputs(batch)).loss
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch["input_ids"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val", self.val_perplexity)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test", self.test_perplexity)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the log-probability of each token but the first, ``[B, S - 1]``; 0 for labels of -100."""
        return -self._token_losses(self._inputs(batch))

    def _evaluate(self, batch: dict[str, Tensor], stage: str, perplexity: _Perplexity) -> None:
        inputs = self._inputs(batch)
        has_label = inputs["labels"][:, 1:] != -100
        perplexity.update(self._token_losses(inputs), has_label)
        self.log(f"{stage}_perplexity", perplexity, prog_bar=True, batch_size=len(has_label))

    def _inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Return the arguments of the model for a batch."""
        return {"labels": batch["input_ids"], **batch, "use_cache": False}

    def _token_losses(self, inputs: dict[str, Any]) -> Tensor:
        """Return the loss of each token but the first, ``[B, S - 1]``.

        It is computed in the model's forward pass, where engines have all-gathered the weights of the head.
        """
        from transformers import PreTrainedModel

        losses: list[Tensor] = []

        def loss_function(logits: Tensor, *_: Any, shift_labels: Tensor | None = None, **others: Any) -> Tensor:
            labels = shifted(inputs["labels"], -100) if shift_labels is None else shift_labels
            rows = logits.float().view(-1, logits.shape[-1])
            loss = F.cross_entropy(rows, labels.flatten(), reduction="none").view(labels.shape)
            losses.append(gathered(loss))
            return losses[-1].mean()

        # Adapters and engines may wrap the transformers model.
        model = next(module for module in self.model.modules() if isinstance(module, PreTrainedModel))
        with swapped([(vars(model), "_loss_function", loss_function)]):  # the setter has no deleter
            self.model(**inputs)
        return losses[-1][:, :-1]

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        from transformers import get_cosine_with_min_lr_schedule_with_warmup_lr_rate as make_schedule

        # 1. The optimizer. One group of weights in the order of the model, as FSDP needs to resume a run of DDP.
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        if self.optimizer is not None:
            optimizer = self.optimizer(weights)
        else:
            decay = self.hparams["weight_decay"]
            optimizer = torch.optim.AdamW(weights, self.hparams["learning_rate"], (0.9, 0.95), weight_decay=decay)
        # 2. The schedule.
        steps: Any = self.trainer.estimated_stepping_batches
        schedule = make_schedule(optimizer, self.hparams["warmup_steps"], steps, min_lr_rate=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class _Perplexity(MeanMetric):
    """Computes the perplexity from the losses of tokens."""

    def compute(self) -> Tensor:
        return super().compute().exp()

"""A LightningModule for any causal language model of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric

from lt_tiled._log import inform, warn
from lt_tiled.errors import NothingFoundError
from lt_tiled.lm.models import add_adapters, make_config, make_lora_config, require
from lt_tiled.loss.cross_entropy import shifted
from lt_tiled.loss.transformers import find_losses, patch_losses
from lt_tiled.modules.cache import loss_function_set
from lt_tiled.modules.find import full_shape, plain_name
from lt_tiled.policies import as_loss, check_count
from lt_tiled.sequence_parallel.ulysses import gathered


class CausalLM(LightningModule):
    """Trains a causal language model of transformers, from scratch or from a local directory.

    Nothing is downloaded. Batches are dictionaries with ``input_ids``, integers of shape ``[B, S]``, and may have
    ``labels`` of that shape (-100 where there is no loss; not shifted) and other arguments of the model.

    Args:
        config: The fields of a Hugging Face configuration, such as ``{model_type: llama, hidden_size: 256, ...}``.
        path: A local directory with a model, as ``save_pretrained`` writes it. Give this or ``config``.
        attn_implementation: Hugging Face's name of the attention (``sdpa``, ``eager``, ``flash_attention_2``, ...).
        lora: Train LoRA adapters instead of the weights: the fields of peft's ``LoraConfig``, such as ``{r: 16,
            target_modules: all-linear}``.
        loss: Compute losses, perplexities and log-probabilities in tiles, without the full logits: ``True``, or the
            number of tiles. ``False`` and ``None`` turn this off.
        learning_rate: The peak learning rate of AdamW.
        weight_decay: The weight decay of AdamW, for weights with two dimensions or more.
        optimizer: Another optimizer in place of AdamW, with its own learning rate, such as
            ``--model.optimizer=SGD --model.optimizer.lr=0.1`` on the command line.
        warmup_steps: Steps of linear warmup. Then a cosine schedule ends at a tenth of the peak.
        trust_remote_code: Run the Python code that ``path`` may contain. Otherwise a model that needs it raises.

    Raises:
        ValueError: If not exactly one of ``config`` and ``path`` is given, or it names no model.
        ModuleNotFoundError: If transformers is not installed, or peft, which ``lora`` needs.
    """

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        path: str | None = None,
        attn_implementation: str = "sdpa",
        lora: dict[str, Any] | None = None,
        loss: bool | int | None = True,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        optimizer: OptimizerCallable | None = None,
        warmup_steps: int = 10,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        if (config is None) == (path is None):
            raise ValueError("CausalLM needs exactly one of config (Hugging Face's fields) and path (a local model).")
        if config is not None and "model_type" not in config:
            raise ValueError(f"config has no model_type, only {sorted(config)}: add one, such as model_type: llama.")
        if path is not None and not (Path(path) / "config.json").is_file():
            raise ValueError(f"path={path!r} is not a directory with a config.json: pass a local model.")
        if not 0 < learning_rate < math.inf or not 0 <= weight_decay < math.inf:
            raise ValueError(f"{learning_rate=} must be above 0 and {weight_decay=} not below, and both finite.")
        check_count("warmup_steps", warmup_steps, least=0)
        require("transformers", "'lt-tiled[hf]'")
        self._lora = None if lora is None else make_lora_config(lora)
        self.save_hyperparameters(ignore="optimizer")
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.optimizer = optimizer
        self.warmup_steps = warmup_steps
        self._loss_shards = as_loss(loss)
        self.model: Any = None
        self._vectors: set[str] = set()
        """The names of weights with one dimension or none, which get no weight decay."""
        self.val_perplexity, self.test_perplexity = _Perplexity(), _Perplexity()

    def configure_model(self) -> None:
        """Build the model once. Strategies call this hook, so that they can shard weights as they are made."""
        if self.model is not None:
            return
        model = self._new_model()
        self.model = model if self._lora is None else add_adapters(model, self._lora)
        self.model.train()
        if self._loss_shards is not None:
            try:
                patch_losses(find_losses(model), self._loss_shards, object(), evaluation=True)
            except NothingFoundError:
                kind = type(model).__name__
                inform(f"the loss of {kind} is not tiled: the model does not compute it from labels and a linear head")
        # Sharding flattens weights, so this must be known by name before.
        self._vectors = {name for name, weight in self.named_parameters() if len(full_shape(weight)) <= 1}

    def _new_model(self) -> Any:
        """Return a new transformers model, or the one in ``path``; in a plan, without its weights."""
        from transformers import AutoModelForCausalLM

        is_plan = torch.get_default_device().type == "meta"
        options = {name: self.hparams[name] for name in ("attn_implementation", "trust_remote_code")}
        if self.hparams["path"] is None or is_plan:
            return AutoModelForCausalLM.from_config(self._config(), **options)
        options |= {"local_files_only": True, "dtype": torch.get_default_dtype()}
        return AutoModelForCausalLM.from_pretrained(self.hparams["path"], **options)

    def _config(self) -> Any:
        from transformers import AutoConfig

        path, trust = self.hparams["path"], self.hparams["trust_remote_code"]
        if path is None:
            return make_config(self.hparams["config"])
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust)

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

    def _inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
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
        with loss_function_set(model, loss_function):
            self.model(**inputs)
        if not losses:  # the model does not call its loss function
            loss_function(self(inputs["input_ids"]))
        return losses[-1][:, :-1]

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        weights = [(plain_name(name), weight) for name, weight in self.named_parameters() if weight.requires_grad]
        if self.optimizer is not None:
            optimizer = self.optimizer(weight for _, weight in weights)
        else:
            vectors = [weight for name, weight in weights if name in self._vectors]
            others = [weight for name, weight in weights if name not in self._vectors]
            groups = [{"params": others, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
            optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        steps = max(int(self.trainer.estimated_stepping_batches) - self.warmup_steps, 1)

        def share_of_peak(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / (self.warmup_steps + 1)
            done = min((step - self.warmup_steps) / steps, 1)
            return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, share_of_peak), "interval": "step"},
        }


class _Perplexity(MeanMetric):
    """Computes the perplexity from the losses of tokens."""

    def compute(self) -> Tensor:
        return super().compute().exp()

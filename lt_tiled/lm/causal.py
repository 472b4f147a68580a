"""A LightningModule for any causal language model of Hugging Face."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torchmetrics import MeanMetric

from lt_tiled._log import inform, warn
from lt_tiled.cli.numbers import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, make_plain
from lt_tiled.errors import NothingFoundError, did_you_mean
from lt_tiled.loss.cross_entropy import shifted
from lt_tiled.loss.transformers import LossPatch, find_losses, loss_function_set, patch_losses
from lt_tiled.modules.find import plain_name
from lt_tiled.modules.patch import get_patch
from lt_tiled.policies import CompileOptions, as_loss, check_compile, check_count
from lt_tiled.sequence_parallel.region import gathered

_SIZES = (
    *("hidden_size", "intermediate_size", "vocab_size", "head_dim"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
"""The names that transformers has for the sizes of all models."""


class CausalLM(LightningModule):
    """Trains a causal language model of Hugging Face, from scratch or from a local directory.

    It downloads nothing. Batches are dictionaries with ``input_ids``, integers of shape ``[B, S]``, and if need be
    ``labels`` of that shape (-100 where there is no loss; not shifted) and the ``position_ids`` of packed documents,
    which begin at 0 for each.

    Args:
        config: The fields of a Hugging Face configuration, such as ``{model_type: llama, hidden_size: 256, ...}``.
        path: A local directory with a model, as ``save_pretrained`` writes it. Give this or ``config``.
        attn_implementation: Hugging Face's name of the attention (``sdpa``, ``eager``, ``flash_attention_2``, ...).
        attn_compile: For ``flex_attention``: arguments of ``torch.compile``, such as ``{mode: max-autotune}``.
        lora: Train LoRA adapters instead of the weights: the fields of peft's ``LoraConfig``, such as ``{r: 16,
            target_modules: all-linear}``.
        tiled_loss: Compute losses, perplexities and log-probabilities in tiles, without the full logits: ``True``, or
            the number of tiles.
        learning_rate: The peak learning rate of AdamW.
        weight_decay: The weight decay of AdamW, for weights with two dimensions or more.
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
        attn_compile: CompileOptions | None = None,
        lora: dict[str, Any] | None = None,
        tiled_loss: bool | PositiveInt = True,
        learning_rate: PositiveFloat = 3e-4,
        weight_decay: NonNegativeFloat = 0.1,
        warmup_steps: NonNegativeInt = 10,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        if (config is None) == (path is None):
            raise ValueError("CausalLM needs exactly one of config (Hugging Face's fields) and path (a local model).")
        if config is not None and "model_type" not in config:
            raise ValueError(f"config has no model_type, only {sorted(config)}: add one, such as model_type: llama.")
        if path is not None and not (Path(path) / "config.json").is_file():
            raise ValueError(f"path={path!r} is not a directory with a config.json: pass a local model.")
        if attn_compile is not None and attn_implementation != "flex_attention":
            raise ValueError(
                f"attn_compile={attn_compile!r} needs flex attention, but attn_implementation={attn_implementation!r}:"
                " set it to 'flex_attention', or leave attn_compile out."
            )
        check_compile(attn_compile or {}, "attn_compile")
        if learning_rate is None or weight_decay is None:  # the parser lets null pass
            raise ValueError(f"{learning_rate=} and {weight_decay=} must be numbers.")
        require("transformers", "'lt-tiled[hf]'")
        self._adapter = None if lora is None else _lora_config(lora)
        self.save_hyperparameters()
        make_plain(self.hparams)
        # Plain numbers, because the state of the optimizer goes into the checkpoint.
        check_count("warmup_steps", warmup_steps, least=0)
        self.learning_rate, self.weight_decay = float(learning_rate), float(weight_decay)
        self.warmup_steps, self.attn_compile = int(warmup_steps), attn_compile
        self._loss_shards = as_loss(tiled_loss)
        self.model: Any = None
        self._separates: bool | None = None
        """Whether the model keeps packed documents apart, if that is known."""
        self._vectors: set[str] = set()
        self.val_perplexity, self.test_perplexity = _Perplexity(), _Perplexity()

    def configure_model(self) -> None:
        """Build the model once. Strategies call this hook, so that they can shard weights as they are made."""
        if self.model is not None:
            return
        from transformers import AutoModelForCausalLM

        attention, path = self.hparams["attn_implementation"], self.hparams["path"]
        trust = {"trust_remote_code": self.hparams["trust_remote_code"]}
        if attention == "flex_attention":
            attention = _flex_attention(self.attn_compile)
        config = None if path is not None and torch.get_default_device().type != "meta" else self._config()
        try:
            if config is None:
                options = {"local_files_only": True, "dtype": torch.get_default_dtype(), **trust}
                self.model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, **options)
            else:
                self.model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, **trust)
            inner = self.model
            if self._adapter is not None:
                from peft import get_peft_model

                with _unsharded(self.model):
                    self.model = get_peft_model(self.model, self._adapter)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            what = "config" if path is None else f"path={path!r}"
            what = what if self.model is None else f"lora={self.hparams['lora']}"
            raise ValueError(f"{what}: the model cannot be built: {type(error).__name__}: {error}") from error
        self.model.train()
        if torch.get_default_device().type == "meta":  # a plan, which can try nothing
            self._separates = True
        elif inner._is_stateful or "position_ids" not in inspect.signature(type(inner).forward).parameters:
            self._separates = False
        if self._loss_shards is not None:
            try:
                patch_losses(find_losses(inner), self._loss_shards, object())
            except NothingFoundError:
                kind = type(inner).__name__
                inform(f"the loss of {kind} is not tiled: the model does not compute it from labels and a linear head")
        # Sharding flattens weights, so this must be known by name before. ZeRO-3 shards them as they are made.
        shapes = {name: getattr(weight, "ds_shape", weight.shape) for name, weight in self.named_parameters()}
        self._vectors = {name for name, shape in shapes.items() if len(shape) <= 1}

    def _config(self) -> Any:
        from transformers import CONFIG_MAPPING, AutoConfig

        path, given = self.hparams["path"], self.hparams["config"]
        if path is not None:
            trust = self.hparams["trust_remote_code"]
            return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust)
        kind = str(given["model_type"])
        if kind not in CONFIG_MAPPING:
            near = did_you_mean(kind, CONFIG_MAPPING, 0.8)
            raise ValueError(f"config: transformers has no model_type {kind!r}{near}")
        sizes = {*_SIZES, *map(CONFIG_MAPPING[kind].attribute_map.get, _SIZES)}  # its own names, too
        for key, value in given.items():
            if key in sizes and not isinstance(value, list):
                check_count(f"config: {key}", value, None)
        try:
            config = AutoConfig.for_model(**given)
        except Exception as error:  # of the checks that each architecture has
            raise ValueError(f"config: {error}") from error
        heads, groups = getattr(config, "num_attention_heads", 0), given.get("num_key_value_heads") or 1
        if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
            raise ValueError(f"config: num_attention_heads={heads} is no multiple of num_key_value_heads={groups}.")
        plain = type(config)()
        for key in given:  # transformers keeps what it does not know
            if hasattr(config, key) and not hasattr(plain, key):
                message = f"config: {type(config).__name__} has no key {key!r}"
                if near := did_you_mean(key, dir(plain), 0.8):
                    raise ValueError(message + near)
                warn(f"{message}: the model may ignore it.", once=message)
        return config

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the model knows, also before it is built."""
        return int(self._config().get_text_config().vocab_size)

    def setup(self, stage: str) -> None:
        """Compare the vocabularies of the model and the data before the model is built."""
        config, data = self._config().get_text_config(), self.trainer.datamodule  # type: ignore[attr-defined]
        known, needed = config.vocab_size, getattr(data, "vocab_size", None)
        if needed is not None and needed > known:
            raise ValueError(
                f"The data has token ids up to {needed - 1} and the model {known} tokens: set vocab_size: {needed}."
            )
        seq_len, most = getattr(data, "seq_len", 0), getattr(config, "max_position_embeddings", None)
        if most is not None and seq_len > most and not hasattr(config, "rope_parameters"):
            warn(f"The data has seq_len={seq_len} and the model {most} positions: a model that learns them fails.")

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
        return -self._token_losses(self._inputs(batch), batch["input_ids"].shape)

    def _evaluate(self, batch: dict[str, Tensor], stage: str, perplexity: _Perplexity) -> None:
        given, shape = self._inputs(batch), batch["input_ids"].shape
        counted = given["labels"].view(shape)[:, 1:] != -100
        perplexity.update(self._token_losses(given, shape), counted)
        self.log(f"{stage}_perplexity", perplexity, prog_bar=True, batch_size=len(counted))

    def _inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the arguments of the model for a batch.

        Raises:
            ValueError: If it has others, such as a mask, or its documents would be mixed.
        """
        if others := sorted(set(batch) - {"input_ids", "labels", "position_ids"}):
            raise ValueError(
                f"The batch has {', '.join(others)}, which CausalLM does not give to its model: leave that out, with"
                " padding on the right and labels of -100 there, or override training_step."
            )
        given = {"labels": batch["input_ids"], **batch}
        if "position_ids" in given:
            if self._separates is None:
                self._separates = self._try_two_documents()
            if not self._separates:
                raise ValueError(
                    "The batch has position_ids of packed documents, and this model mixes documents in spite of them:"
                    " set pack: false of lt_tiled.lm.Documents."
                )
            # No document predicts the first token of the next one.
            given["labels"] = given["labels"].masked_fill(given["position_ids"] == 0, -100)
            if "flash" in self.hparams["attn_implementation"]:  # it looks for documents in a single row only
                given = {name: tensor.reshape(1, -1) for name, tensor in given.items()}
        return {**given, "use_cache": False}

    @torch.no_grad()
    def _try_two_documents(self) -> bool:
        """Return whether another first document leaves the logits of a second one as they are.

        The masks of some models (GPT-OSS, OPT), and convolutions, do not look at position_ids.
        """
        positions = torch.arange(8, device=self.device).repeat(2)[None]
        ids = torch.arange(16, device=self.device)[None] % self.model.config.get_text_config().vocab_size
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            rows = (ids, torch.cat([ids[:, 1:9], ids[:, 8:]], 1))
            one, other = (self(row, position_ids=positions)[:, 8:] for row in rows)
        finally:
            for module, mode in modes:
                module.training = mode
        return bool((one - other).abs().max() <= torch.finfo(one.dtype).eps ** 0.75 * one.abs().max())

    def _token_losses(self, given: dict[str, Any], shape: torch.Size) -> Tensor:
        """Return the loss of each token but the first, ``[B, S - 1]``, computed in the model's forward.

        There, engines have gathered the weights of the head.
        """
        found: list[Tensor] = []

        def loss_function(logits: Tensor, *_: Any, shift_labels: Tensor | None = None, **others: Any) -> Tensor:
            labels = shifted(given["labels"], -100) if shift_labels is None else shift_labels
            rows = logits.float().view(-1, logits.shape[-1])
            found.append(gathered(F.cross_entropy(rows, labels.flatten(), reduction="none").view(labels.shape)))
            return found[-1].mean()

        inner = next((m for m in self.model.modules() if get_patch(m, LossPatch) is not None), self.model)
        with loss_function_set(inner, loss_function):  # also inside of an adapter
            self.model(**given)
        if not found:  # the model does not call its loss function
            loss_function(self(**{name: value for name, value in given.items() if name not in ("labels", "use_cache")}))
        return found[0].view(shape)[:, :-1]

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        weights = [(plain_name(name), p) for name, p in self.named_parameters() if p.requires_grad]
        if any("_flat_param" in name for name, _ in weights):
            warn("FSDP with use_orig_params=False has one tensor per FSDP unit: biases and norms get weight decay too.")
        groups = [
            {"params": [p for name, p in weights if name not in self._vectors], "weight_decay": self.weight_decay},
            {"params": [p for name, p in weights if name in self._vectors], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        warmup = LinearLR(optimizer, 1 / (self.warmup_steps + 1), total_iters=self.warmup_steps)
        steps = max(int(self.trainer.estimated_stepping_batches) - self.warmup_steps, 1)
        cosine = CosineAnnealingLR(optimizer, steps, eta_min=self.learning_rate / 10)
        schedule = SequentialLR(optimizer, [warmup, cosine], [self.warmup_steps])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _flex_attention(options: Mapping[str, Any] | None) -> str:
    """Register flex attention with options of ``torch.compile``, and return its ``attn_implementation``.

    Hugging Face's function compiles ``flex_attention`` without options, unless it is itself being compiled. So options
    apply to the whole function.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.masking_utils import flex_attention_mask

    inform("compiles flex attention at its first use, which can take minutes", once="compile flex attention")
    if not options:
        return "flex_attention"
    name = f"lt_tiled_flex_{abs(hash(repr(sorted(options.items()))))}"
    AttentionInterface.register(name, torch.compile(flex_attention_forward, **options))
    AttentionMaskInterface.register(name, flex_attention_mask)
    return name


class _Perplexity(MeanMetric):
    """Computes the perplexity from the losses of tokens."""

    def compute(self) -> Tensor:
        return super().compute().exp()


def _lora_config(fields: Mapping[str, Any]) -> Any:
    """Return peft's configuration.

    Raises:
        ValueError: If it has no such field or value.
    """
    require("peft", "peft")
    from peft import LoraConfig

    if unknown := [name for name in fields if name not in inspect.signature(LoraConfig).parameters]:
        near = did_you_mean(unknown[0], inspect.signature(LoraConfig).parameters)
        raise ValueError(f"lora: peft's LoraConfig has no field {unknown[0]!r}{near}")
    try:
        return LoraConfig(**{"task_type": "CAUSAL_LM", **fields})
    except (TypeError, ValueError) as error:
        raise ValueError(f"lora={dict(fields)}: {error}") from error


@contextmanager
def _unsharded(model: Any) -> Iterator[None]:
    """Let ZeRO-3 shard new weights when it starts. It would shard adapters before peft has set them to zero."""
    if not any(hasattr(weight, "ds_id") for weight in model.parameters()):
        yield
        return
    from deepspeed.runtime.zero import partition_parameters as zero

    zero.shutdown_init_context()
    try:
        yield
    finally:
        zero.restore_init_context()


def require(package: str, install: str) -> None:
    """Raise ``ModuleNotFoundError`` with the remedy if an optional package is not installed."""
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"This needs the package {package}: pip install {install}.") from error

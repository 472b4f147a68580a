"""The models of the projects, small, with random weights and random data. Each imports its package when it is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch
import torch
from torch import Tensor, nn

from benchmarks.projects.compare import STEPS, Project


class Supervised(lightning.pytorch.LightningModule):
    """Trains a module of a package without LightningModules on a loss of its output."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor] = nn.functional.cross_entropy) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def training_step(self, batch: tuple[tuple[Tensor, ...], Tensor]) -> Tensor:
        inputs, target = batch
        return self.loss(self.model(*inputs), target)


def _images(size: int, count: int = 2, classes: int = 10) -> list[Any]:
    return [((torch.randn(count, 3, size, size),), torch.randint(classes, (count,))) for _ in range(STEPS)]


def _timm(name: str, size: int, **arguments: Any) -> tuple[Any, list[Any]]:
    import timm

    return Supervised(timm.create_model(name, num_classes=10, **arguments)), _images(size)


def vit() -> tuple[Any, list[Any]]:
    return _timm("vit_tiny_patch16_224", 512, img_size=512, depth=3)


def swin() -> tuple[Any, list[Any]]:
    return _timm("swin_tiny_patch4_window7_224", 224, embed_dim=24, depths=(2, 2, 4, 2), drop_path_rate=0.0)


def convnext() -> tuple[Any, list[Any]]:
    return _timm("convnext_tiny", 224, dims=(16, 32, 64, 128), depths=(2, 2, 4, 2))


def gmlp() -> tuple[Any, list[Any]]:
    from timm.layers import GatedMlp
    from timm.models.mlp_mixer import MlpMixer, SpatialGatingBlock

    model = MlpMixer(
        10, 384, num_blocks=3, embed_dim=64, mlp_ratio=6, block_layer=SpatialGatingBlock, mlp_layer=GatedMlp
    )
    return Supervised(model), _images(384)


def torchvision_swin() -> tuple[Any, list[Any]]:
    from torchvision.models import SwinTransformer

    return Supervised(
        SwinTransformer([4, 4], 24, [2, 2, 4, 2], [2, 4, 4, 4], [7, 7], stochastic_depth_prob=0.0)
    ), _images(224)


def torchvision_vit() -> tuple[Any, list[Any]]:
    from torchvision.models import VisionTransformer

    return Supervised(VisionTransformer(512, 16, 4, 4, 128, 512, num_classes=10)), _images(512)


def segformer() -> tuple[Any, list[Any]]:
    import segmentation_models_pytorch as smp

    model = smp.Segformer("mit_b0", encoder_weights=None, classes=4)
    for module in model.modules():  # without dropout and stochastic depth, as in the other models: tiles draw others
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.p = 0.0
        if hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
    data = [((torch.randn(1, 3, 256, 256),), torch.randint(4, (1, 256, 256))) for _ in range(STEPS)]
    return Supervised(model), data


def litgpt_gpt() -> tuple[Any, list[Any]]:
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    config = Config.from_name("Llama-3-8B", n_layer=4, n_head=4, n_query_groups=2, n_embd=128, intermediate_size=448)
    config.vocab_size = config.padded_vocab_size = 512
    ids = [torch.randint(512, (1, 2049)) for _ in range(STEPS)]
    return Supervised(GPT(config), chunked_cross_entropy), [((batch[:, :-1],), batch[:, 1:]) for batch in ids]


def _series(model: Any, batch_size: int) -> tuple[Any, list[Any]]:
    """Return a model of neuralforecast with batches of its own data loader."""
    import numpy as np
    import pandas as pd
    from neuralforecast.tsdataset import TimeSeriesDataModule, TimeSeriesDataset

    names, days = [str(i) for i in range(batch_size)], pd.date_range("2020", periods=1100, freq="D")
    values = np.random.default_rng(0).normal(size=len(names) * len(days)).cumsum()
    frame = pd.DataFrame({"unique_id": np.repeat(names, len(days)), "ds": list(days) * len(names), "y": values})
    dataset = TimeSeriesDataset.from_df(frame)[0]
    model.val_size = model.test_size = 0
    loader = TimeSeriesDataModule(dataset, batch_size, shuffle_train=False).train_dataloader()
    return model, [batch for _ in range(STEPS) for batch in loader]


def patchtst() -> tuple[Any, list[Any]]:
    from neuralforecast.models import PatchTST

    return _series(PatchTST(96, 960, encoder_layers=3, dropout=0.0, fc_dropout=0.0, windows_batch_size=8), 8)


def itransformer() -> tuple[Any, list[Any]]:
    from neuralforecast.models import iTransformer

    return _series(
        iTransformer(96, 512, n_series=256, hidden_size=64, d_ff=256, dropout=0.0, windows_batch_size=4), 256
    )


def neuralforecast_lstm() -> tuple[Any, list[Any]]:
    from neuralforecast.models import LSTM

    return _series(LSTM(24, 128, encoder_hidden_size=32, decoder_hidden_size=32, windows_batch_size=16), 8)


def gluonts_patchtst() -> tuple[Any, list[Any]]:
    from gluonts.torch.model.patch_tst.lightning_module import PatchTSTLightningModule

    arguments = {"prediction_length": 48, "context_length": 2048, "patch_len": 8, "stride": 4, "padding_patch": "end"}
    arguments |= {"d_model": 64, "nhead": 4, "dim_feedforward": 256, "num_encoder_layers": 3, "dropout": 0.0}
    arguments |= {"activation": "relu", "norm_first": True, "scaling": "mean", "num_feat_dynamic_real": 0}
    module = PatchTSTLightningModule(arguments)
    shapes = {"past_target": 2048, "past_observed_values": 2048, "future_target": 48, "future_observed_values": 48}
    data = [{name: torch.rand(8, length) for name, length in shapes.items()} for _ in range(STEPS)]
    return module, [{k: torch.ones_like(v) if "observed" in k else v for k, v in batch.items()} for batch in data]


def simclr() -> tuple[Any, list[Any]]:
    import timm
    from lightly_train._methods.simclr.simclr import SimCLR, SimCLRArgs, SimCLRSGDArgs
    from lightly_train._models.embedding_model import EmbeddingModel
    from lightly_train._models.timm.timm import TIMMModelWrapper

    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=224, depth=2, dynamic_img_size=True)
    embedding = EmbeddingModel(TIMMModelWrapper(model))
    module = SimCLR(SimCLRArgs(hidden_dim=64), SimCLRSGDArgs(), embedding, global_batch_size=6, num_input_channels=3)
    module._log_example_views = lambda train_batch: None  # it writes pictures
    views = [[torch.randn(6, 3, 224, 224) for _ in range(2)] for _ in range(STEPS)]
    return module, [{"views": pair, "filename": ["a"] * 6} for pair in views]


class Trunk(nn.Module):
    """The trunk of boltz, which makes pair representations [B, N, N, D]: its MSA module and its Pairformer."""

    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        from boltz.model.layers.pairformer import PairformerModule
        from boltz.model.modules.trunkv2 import MSAModule

        self.msa = MSAModule(
            32, 64, 32, msa_blocks=2, msa_dropout=0.0, z_dropout=0.0, activation_checkpointing=checkpointing
        )
        arguments = {"num_blocks": 3, "num_heads": 4, "dropout": 0.25, "activation_checkpointing": checkpointing}
        self.pairformer = PairformerModule(32, 64, **arguments, v2=True)
        self.bins = nn.Linear(64, 16)

    def forward(self, tokens: Tensor, pairs: Tensor, features: dict[str, Tensor]) -> Tensor:
        mask = features["token_pad_mask"]
        pairs = pairs + self.msa(pairs, tokens, features)
        tokens, pairs = self.pairformer(tokens, pairs, mask, mask[:, :, None] * mask[:, None, :])
        logits: Tensor = self.bins(pairs).movedim(-1, 1) + 0 * tokens.sum()
        return logits


def boltz(checkpointing: bool = False) -> tuple[Any, list[Any]]:
    count, sequences, data = 64, 8, []
    for _ in range(STEPS):
        ones = torch.ones(1, sequences, count)
        features = {"msa": torch.randint(33, (1, sequences, count)), "msa_mask": ones, "msa_paired": ones}
        features |= {"has_deletion": 0 * ones, "deletion_value": 0 * ones, "token_pad_mask": torch.ones(1, count)}
        inputs = (torch.randn(1, count, 32), torch.randn(1, count, count, 64), features)
        data.append((inputs, torch.randint(16, (1, count, count))))
    return Supervised(Trunk(checkpointing)), data


PROJECTS = [
    Project("timm", "VisionTransformer, 512 x 512", vit),
    Project("timm", "SwinTransformer", swin),
    Project("timm", "ConvNeXt", convnext),
    Project("timm", "gMLP", gmlp),
    Project("torchvision", "SwinTransformer", torchvision_swin),
    Project("torchvision", "VisionTransformer, 512 x 512", torchvision_vit),
    Project("segmentation-models-pytorch", "Segformer", segformer),
    Project("litgpt", "GPT, Llama 3", litgpt_gpt),
    Project("neuralforecast", "PatchTST", patchtst),
    Project("neuralforecast", "iTransformer", itransformer),
    Project("neuralforecast", "LSTM", neuralforecast_lstm),
    Project("gluonts", "PatchTSTLightningModule", gluonts_patchtst),
    Project("lightly-train", "SimCLR with timm's ViT", simclr),
    Project("boltz", "MSAModule, PairformerModule", boltz),
    Project("boltz", "the same, activation_checkpointing=True", lambda: boltz(checkpointing=True)),
]

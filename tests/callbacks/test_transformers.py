"""``TiledCallback`` in the Trainer of transformers, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer, TrainingArguments

from lt_tiled import ActivationCheckpointing
from lt_tiled.modules.patch import Patch, get_patches
from lt_tiled.transformers import TiledCallback
from tests.models import tiny_llama

OFFLOAD = ActivationCheckpointing(offload="cpu", keep_last=0)
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
POLICIES: dict[str, Any] = {"tiling": 3, "activation_checkpointing": OFFLOAD, "loss": 4}


def rows(count: int) -> list[dict[str, Tensor]]:
    """Sequences with labels, fewer in each than in the one before."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(64, (count, 40), generator=generator)
    return [{"input_ids": row, "labels": row.where(torch.arange(40) > 5 * i, -100)} for i, row in enumerate(ids)]


def accuracy(prediction: Any) -> dict[str, float]:
    found, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((found == labels)[labels != -100].mean())}


def trainer_of(
    directory: Path,
    callbacks: list[Any],
    kind: type[Trainer] = Trainer,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Any:
    """A Trainer of three steps of two micro-batches; transformers computes the loss in float32."""
    torch.manual_seed(0)
    defaults = {"save_strategy": "no", "max_steps": 3, "gradient_accumulation_steps": 2, "learning_rate": 0.1}
    arguments = TrainingArguments(
        str(directory),
        use_cpu=True,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=2,
        optim="sgd",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        **{**defaults, **options},
    )
    data = {"train_dataset": rows(6), "eval_dataset": rows(4)}
    return kind(tiny_llama().to(dtype), arguments, **data, compute_metrics=accuracy, callbacks=callbacks)


def patches(model: nn.Module) -> int:
    return sum(len(get_patches(module, Patch)) for module in model.modules())


@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing_factor": 0.1}, {"eval_strategy": "steps", "eval_steps": 1}],
    ids=lambda options: next(iter(options), "defaults"),
)
def test_losses_metrics_and_weights_are_those_of_the_trainer_alone(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses over the tokens of two micro-batches, metrics of logits and weights are those of the Trainer alone. The
    model is prepared from the Trainer's ``__init__`` to the end of training, which prints the report.
    """
    callback = TiledCallback(**POLICIES)
    tiled, plain = trainer_of(tmp_path, [callback], **options), trainer_of(tmp_path, [], **options)
    assert patches(tiled.model) > 0
    for trainer in (tiled, plain):
        trainer.train()
        trainer.evaluate()
    assert patches(tiled.model) == len(callback.prepared) == 0
    assert "activation checkpointing" in capsys.readouterr().out
    losses = [[log.get("loss", log.get("eval_loss")) for log in t.state.log_history] for t in (tiled, plain)]
    accuracies = [[log.get("eval_accuracy", 0.0) for log in t.state.log_history] for t in (tiled, plain)]
    assert losses[0] == [loss and pytest.approx(loss, rel=1e-6) for loss in losses[1]]
    assert accuracies[0] == pytest.approx(accuracies[1], rel=1e-6)
    torch.testing.assert_close(tiled.model.state_dict(), plain.model.state_dict(), rtol=0, atol=1e-7)
    report = callback.report
    assert report is not None
    assert [row.tiles for row in report.tiled] == [3, 3]
    assert report.offloaded is not None
    assert report.offloaded.cpu_bytes > 0
    assert report.losses[0].tiles == (0 if "label_smoothing_factor" in options else 4)


def test_blocks_are_recomputed_once(tmp_path: Path) -> None:
    """Activation checkpointing of the arguments, on by default in TRL, is turned off and adds no FLOPs."""
    flops = []
    for own in (False, True):
        trainer = trainer_of(tmp_path, [TiledCallback(**POLICIES)], gradient_checkpointing=own)
        with FlopCounterMode(display=False) as counter:
            trainer.train()
        flops.append(counter.get_total_flops())
        assert not trainer.args.gradient_checkpointing
    assert flops[0] == flops[1]


def test_resumed_and_second_runs(tmp_path: Path) -> None:
    """A resumed run, and a second ``train()`` of a Trainer, are tiled and have the weights of the Trainer alone."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    plain = trainer_of(tmp_path / "plain", [], **saving)
    plain.train()
    callback = TiledCallback(**POLICIES)
    tiled = trainer_of(tmp_path / "tiled", [callback], **saving)
    tiled.train()
    for trainer in (tiled, trainer_of(tmp_path / "tiled", [TiledCallback(**POLICIES)], **saving)):
        trainer.train(resume_from_checkpoint=str(tmp_path / "tiled" / "checkpoint-2"))
        torch.testing.assert_close(trainer.model.state_dict(), plain.model.state_dict(), rtol=0, atol=1e-7)
    assert callback.report is not None
    assert callback.report.tiled[0].tiles == 3
    assert patches(tiled.model) == 0


@pytest.mark.parametrize("late", ["add_callback", "model_init"])
def test_a_model_that_is_not_prepared_in_time_is_refused(late: str, tmp_path: Path) -> None:
    """A callback that was added after ``__init__``, or a model that ``train()`` makes anew, raises with the remedy."""
    trainer = trainer_of(tmp_path, [])
    if late == "add_callback":
        trainer.add_callback(TiledCallback())
    else:
        made = {"model_init": lambda: tiny_llama().double(), "train_dataset": rows(6)}
        trainer = Trainer(args=trainer.args, callbacks=[TiledCallback()], **made)
    with pytest.raises(RuntimeError, match=r"Trainer\(callbacks=\[\.\.\.\]\)"):
        trainer.train()


def test_replicas_in_one_process_are_refused(tmp_path: Path) -> None:
    """``nn.DataParallel``, which the Trainer chooses for several GPUs in one process, raises with the remedy."""
    trainer = trainer_of(tmp_path, [])
    trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match="torchrun"):
        TiledCallback().on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model)

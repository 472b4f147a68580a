"""The causal language model of the command line."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_tiled import TiledSingleDeviceStrategy
from lt_tiled.callbacks import Tiled, TilingReport
from lt_tiled.lm import CausalLM, TextFiles
from tests.lit import trainer
from tests.meters import peak_bytes
from tests.models import tiny_llama

LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def data() -> TextFiles:
    Path("a.txt").write_bytes(b"the tiles of one call follow each other " * 40)
    return TextFiles("a.txt", seq_len=64, batch_size=2)


def test_loads_a_local_model(tmp_path: Path) -> None:
    """A model saved by ``save_pretrained`` is loaded with its weights, and the attention that is asked for."""
    saved = tiny_llama()
    saved.save_pretrained(tmp_path / "model")
    model = CausalLM({"attn_implementation": "flex_attention"}, str(tmp_path / "model"))
    model.configure_model()
    assert model.model.config._attn_implementation == "flex_attention"
    assert all(torch.equal(a, b) for a, b in zip(model.model.parameters(), saved.parameters(), strict=True))


MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "output_router_logits": True}
GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL, GPT2], ids=lambda c: c["model_type"])
def test_tiled_loss_changes_no_figure(config: dict[str, Any], data: TextFiles) -> None:
    """A model of any architecture trains by its configuration. Losses are those of full logits; perplexity and
    log-probabilities are torch's of the logits, without the auxiliary loss of a mixture.
    """
    found = []
    for tiled in (False, 3):
        torch.manual_seed(0)
        model = CausalLM(config, loss=tiled, learning_rate=1e-2, warmup_steps=2)
        run = trainer("tiled", limit_val_batches=1, max_steps=20)
        run.fit(model, datamodule=data)
        found.append(float(run.callback_metrics["train_loss"]))
        perplexity = run.test(model, data, verbose=False)[0]["test_perplexity"]
        logprobs = torch.cat(run.predict(model, datamodule=data))
        ids = torch.cat([batch["input_ids"] for batch in data.predict_dataloader()])
        with torch.no_grad():
            true = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        torch.testing.assert_close(logprobs, true, rtol=1e-4, atol=1e-5)
        assert perplexity == pytest.approx(float(true.mean().neg().exp()), rel=1e-4)
    assert found[0] < 4.5
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("call", ["fit", "predict"])
def test_no_full_logits(call: str, data: TextFiles) -> None:
    """By default, the peak of training and of prediction is lower by most of the full logits in float32."""
    peaks = []
    for tiled in (False, 8):
        model = CausalLM({**LLAMA, "vocab_size": 16384}, loss=tiled)
        model.configure_model()
        run = trainer("tiled", max_steps=1, limit_val_batches=1, limit_predict_batches=1, num_sanity_val_steps=0)
        peaks.append(peak_bytes(lambda run=run, model=model: getattr(run, call)(model, datamodule=data)))
    assert CausalLM(LLAMA).hparams["loss"] is True
    assert peaks[0] - peaks[1] >= 4 * 64 * 16384 * 0.7


def test_a_strategy_says_how_many_tiles(data: TextFiles) -> None:
    """The number of tiles in a strategy's ``loss=...``, or a callback's, counts while it holds the model; the
    report tells it.
    """
    model, report = CausalLM(LLAMA), TilingReport()
    fifth = TiledSingleDeviceStrategy(loss=5)
    ways = [(fifth, [], 5), ("tiled", [], 1), ("auto", [Tiled(None, None, loss=2)], 2)]
    for strategy, callbacks, tiles in ways:
        trainer(strategy, callbacks=[report, *callbacks], limit_val_batches=0).fit(model, datamodule=data)
        (row,) = report.report.losses
        assert (row.path, row.kind, row.tokens, row.tiles) == ("model.lm_head", "LlamaForCausalLM", 128, tiles)


def test_the_schedule_and_another_optimizer() -> None:
    """The learning rate of any optimizer rises over ``warmup_steps`` and ends at a tenth of its peak."""
    model = CausalLM(LLAMA, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.5), warmup_steps=4)
    model.configure_model()
    model._trainer = type("Run", (), {"estimated_stepping_batches": 24})()
    schedule = model.configure_optimizers()["lr_scheduler"]["scheduler"]
    rates = []
    for _ in range(24):
        rates += schedule.get_last_lr()
        schedule.optimizer.step()
        schedule.step()
    assert isinstance(schedule.optimizer, torch.optim.SGD)
    assert [rates[0], rates[3], max(rates), rates[-1]] == pytest.approx([0.125, 0.5, 0.5, 0.05])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "config=None has no model_type: add one, such as llama, or pass path, a local model"),
        ({"config": LLAMA, "loss": 0}, "loss=0 must be None or False or True or 'always' or an integer of at least 1"),
        ({"path": "no/model"}, "path='no/model' is not a directory with a config.json"),
    ],
)
def test_bad_input(kwargs: dict[str, Any], message: str) -> None:
    """What does not lead to a model is refused when the module is made, with the value and the remedy."""
    with pytest.raises(ValueError, match=message):
        CausalLM(**kwargs)


XLNET = {"model_type": "xlnet", "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}
BART = {"model_type": "bart", "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}


@pytest.mark.parametrize("config", [XLNET, BART], ids=lambda c: c["model_type"])
def test_models_that_predict_another_token(config: dict[str, Any]) -> None:
    """XLNet and decoders of encoder-decoder models, whose loss compares each token with itself, are refused."""
    with pytest.raises(ValueError, match="does not compute the loss of the next token"):
        CausalLM({**config, "vocab_size": 64}).configure_model()


@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_code_of_a_file_is_not_run(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local model or tokenizer with code of its own raises and asks nothing, unless ``trust_remote_code`` is set."""
    Path("own").mkdir()
    Path("own/config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    Path("own/tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Words", null]}}')
    Path("own/own.py").write_text(OWN)
    Path("a.txt").write_text("text " * 20)
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", os.path.abspath("modules"))

    def load(**trust: bool) -> None:
        if part == "config":
            CausalLM(path="own", **trust)._config()
        else:
            TextFiles("a.txt", tokenizer="own", seq_len=10, **trust).setup("fit")

    with pytest.raises(ValueError, match="trust_remote_code=True"):
        load()
    assert not Path("was_run").exists()
    load(trust_remote_code=True)
    assert Path("was_run").exists()


OWN = """
from pathlib import Path
from transformers import LlamaConfig, PreTrainedTokenizer
Path("was_run").touch()
class Own(LlamaConfig):
    model_type = "own"
class Words(PreTrainedTokenizer):
    vocab_size = 256
    def get_vocab(self): return {chr(i): i for i in range(256)}
    def _tokenize(self, text, **kwargs): return list(text)
    def _convert_token_to_id(self, token): return ord(token)
    def _convert_id_to_token(self, index): return chr(index)
"""


def test_data_that_does_not_fit_the_model(data: TextFiles) -> None:
    """A vocabulary that is smaller than that of the data raises."""
    with pytest.raises(ValueError, match=r"token ids up to 255 and the model 64 tokens: set vocab_size: 256"):
        trainer("tiled").fit(CausalLM({**LLAMA, "vocab_size": 64}), datamodule=data)


@pytest.mark.parametrize("tiled", [True, False])
def test_evaluation_through_an_adapter(tiled: bool, data: TextFiles) -> None:
    """With an adapter around the model, evaluation runs it once, in tiles or without, with its perplexity, and leaves
    its loss as it was.
    """
    model = CausalLM(LLAMA, lora={"r": 2, "target_modules": ["q_proj"]}, loss=tiled)
    model.configure_model()
    calls: list[Any] = []
    model.model.get_base_model().model.embed_tokens.register_forward_hook(lambda *args: calls.append(args))
    ids = torch.arange(64)[None]
    with torch.no_grad():
        losses = -model.predict_step({"input_ids": ids}, 0)
        assert len(calls) == 1
        assert float(losses.mean()) == pytest.approx(float(model.model(input_ids=ids, labels=ids).loss), rel=1e-5)
    assert all("_loss_function" not in vars(m) and "loss_function" not in vars(m) for m in model.modules())


def test_labels() -> None:
    """Tokens with a label of -100 are in no loss and have a log-probability of 0."""
    model = CausalLM(LLAMA)
    model.configure_model()
    ids = torch.arange(64)[None]
    labels = ids.masked_fill(ids < 16, -100)
    logprobs = model.predict_step({"input_ids": ids, "labels": labels}, 0)
    assert not logprobs[:, :15].any()
    loss = model.model(**model._inputs({"input_ids": ids, "labels": labels})).loss.detach()
    assert loss.item() == pytest.approx(-logprobs[:, 15:].mean().item(), rel=1e-5)

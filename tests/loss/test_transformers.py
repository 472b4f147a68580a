"""The loss of transformers' models in tiles, without a change to their code."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from lt_tiled import ActivationCheckpointing, Tiling, _log, prepare
from lt_tiled.planner.ledger import Ledger
from lt_tiled.report import Report
from tests.architectures import ARCHITECTURES
from tests.meters import peak_bytes
from tests.models import tiny_llama
from tests.parity import MIXED, less_accurate, worst, worst_of_model
from tests.parity import step_of as run

LOSS: dict[str, Any] = {"loss": True}
IDS = torch.arange(96).view(2, 48) % 64
WHOLE = ("BART", "MobileBERT", "ESM")
"""Those that add something of their own to whole logits, or compute them without calling their head."""


HEADS = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")


@pytest.mark.table("Llama|GPT-2|Gemma 2|BERT|T5|Mixtral|DeepSeek V3|Cohere|Jamba|Mamba|LLaVA")
@pytest.mark.parametrize("name", [name for name, a in ARCHITECTURES.items() if a.model.endswith(HEADS)])
def test_architectures(name: str) -> None:
    """Loss and gradients are those of whole logits, which the model itself casts to float32."""
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    inputs = architecture.feed(model)
    true = run(model, inputs)
    with prepare(model, **LOSS, activation_checkpointing=ActivationCheckpointing()):
        assert worst_of_model(run(model, inputs), true) <= 1e-6
        assert (model(**inputs).logits is not None) is (name in WHOLE)


def test_costs_no_more_flops_and_less_memory() -> None:
    """FLOPs of a step are those of whole logits less the head's for the last token, whose label does not count, and the
    peak falls by most of the logits of a large vocabulary.
    """
    model = tiny_llama(vocab_size=4096, num_hidden_layers=1)
    ids = torch.arange(2048)[None] % 4096
    costs = []
    step = partial(run, model, {"input_ids": ids, "labels": ids})
    for loss in (False, True):
        with prepare(model, loss=loss, activation_checkpointing=ActivationCheckpointing()):
            with Ledger() as counted:  # FlopCounterMode uses the logits
                step()
            costs.append((counted.work.total(), peak_bytes(step)))
    assert costs[0][0] - costs[1][0] == 3 * 2 * 4096 * model.config.hidden_size
    assert costs[0][1] - costs[1][1] >= 4 * 1024 * 4096


def test_logits_of_the_output() -> None:
    """``output.logits`` is ``None`` in training, and full logits in evaluation, where the loss is transformers' own;
    with ``loss="always"`` evaluation has tiles, too.
    """
    model = tiny_llama()
    true = model(input_ids=IDS, labels=IDS)
    with prepare(model, **LOSS):
        output = model(input_ids=IDS, labels=IDS)
        assert output.logits is None
        assert float(output.loss.detach()) == pytest.approx(float(true.loss.detach()), rel=1e-6)
        assert model(input_ids=IDS, labels=IDS, return_dict=False)[1] is None
        assert torch.equal(model(input_ids=IDS).logits, true.logits)
        model.eval()
        output = model(input_ids=IDS, labels=IDS)
        assert torch.equal(output.logits, true.logits)
        assert torch.equal(output.loss, true.loss)
        for mode in (torch.no_grad, torch.inference_mode):
            with prepare(model, loss="always") as prepared, mode():
                output = model(input_ids=IDS, labels=IDS)
                assert output.logits is None
                assert float(output.loss) == pytest.approx(float(true.loss.detach()), rel=1e-6)
            assert prepared.report().losses[0].tiles == 1
            assert torch.equal(model(input_ids=IDS, labels=IDS).logits, true.logits)


class ByUse(LlamaForCausalLM):
    """A Llama whose ``use`` computes the loss from its head and hidden states."""

    use: Any = None

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return CausalLMOutput(loss=self.use(self.lm_head, self.model(input_ids).last_hidden_state, labels))


def outside_autocast(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(x)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def without_grad(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        logits = head(x)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) + 0 * x.sum()


def and_z_loss(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = head(x.bfloat16().to(x.dtype)).bfloat16().to(x.dtype).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten()) + logits.logsumexp(-1).square().mean()


@pytest.mark.low_precision
@pytest.mark.parametrize(
    ("use", "dtype"),
    [
        (outside_autocast, torch.bfloat16),
        (without_grad, torch.float32),
        (and_z_loss, torch.bfloat16),
    ],
)
def test_what_a_model_does_with_its_logits(use: Any, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    """Logits keep the autocast and gradient mode of their head's call, and what was done to them, for later uses, of
    which a line tells.
    """
    torch.manual_seed(0)
    model = ByUse(tiny_llama().config)
    model.use = use
    inputs = {"input_ids": IDS, "labels": IDS}
    true, untiled = run(copy.deepcopy(model).double(), inputs), run(model, inputs)
    with caplog.at_level("INFO", "lt_tiled"), prepare(model, loss=5):
        found = run(model, inputs)
    line = "the loss of ByUse is not tiled: its code uses full logits"
    assert (line in caplog.text) is (use is and_z_loss)
    assert less_accurate(found, untiled, true, dtype) == {}
    # Logits that are more precise than the model asks for are another function, however near to float64.
    assert float(found["loss"]) == pytest.approx(float(untiled["loss"]), rel=MIXED)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.flatten())


def change_a_view(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = head(x)
    flat = logits.view(-1, logits.shape[-1])
    flat.masked_fill_(torch.arange(64) % 5 == 1, -3.0)
    return cross_entropy(logits, labels)


def change_under_a_view(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = head(x)
    flat, same = logits.view(-1, logits.shape[-1]), logits.contiguous()
    logits[..., 3] = 1.5
    same[:, ::2].mul_(2)
    return F.cross_entropy(flat, labels.flatten())


def change_after_the_loss(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = head(x)
    loss = cross_entropy(logits, labels)
    logits[..., 2:4] *= 2
    return loss + cross_entropy(logits, labels)


def without_grad_afterwards(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = head(x)
    with torch.no_grad():
        half, same = logits * 0.5, logits.to(logits.dtype)
    return cross_entropy(logits, labels) * cross_entropy(half, labels) + cross_entropy(same, labels)


def classes_in_the_second_dimension(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(x), labels)


def checkpointed(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(checkpoint(head, x, use_reentrant=False), labels) + 0 * x.sum()


def reentrant(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(checkpoint(head, x, use_reentrant=True), labels) + 0 * x.sum()


def slice_of_tokens(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = head(x)[..., :-1, :].contiguous().float() / 2
    return cross_entropy(logits.view(-1, 64), labels[:, 1:])


def two_logits(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(head(x) * head(torch.ones_like(x)), labels)


USES = [change_a_view, change_under_a_view, change_after_the_loss, without_grad_afterwards]
USES += [classes_in_the_second_dimension, checkpointed, reentrant, slice_of_tokens, two_logits]


@pytest.mark.parametrize("use", USES)
def test_uses_of_logits(use: Any) -> None:
    """A change of the logits in place is seen by what shares their memory, and by nothing else; logits ``[B, 64, 64]``
    with labels ``[B, 64]`` have their classes in the second dimension; a reentrant checkpoint gives logits a graph. The
    loss of a slice of the tokens runs in tiles.
    """
    torch.manual_seed(0)
    model, ids = ByUse(tiny_llama().config).double(), torch.arange(128).view(2, 64) * 7 % 64
    model.use = use
    inputs = {"input_ids": ids, "labels": ids}
    true = run(model, inputs)
    with prepare(model, loss=5) as prepared:
        assert worst(run(model, inputs), true) <= 1e-6
        assert use is not slice_of_tokens or prepared.report().losses[0].tiles == 5


def loss_of_single_tokens(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """A loss whose backward pass computes the logits again."""
    return F.cross_entropy(head(x).flatten(0, 1), labels.flatten(), reduction="none").sum()


class DroppingHead(nn.Linear):
    """Drops hidden states in training."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


@pytest.mark.parametrize("change", [lambda model: model.lm_head.weight.data.add_(1), nn.Module.eval])
def test_heads_that_change_before_the_backward_pass(change: Any) -> None:
    """The losses of single tokens, whose logits the backward pass computes again, refuse other logits."""
    model = ByUse(tiny_llama().config)
    model.use = loss_of_single_tokens
    model.lm_head.__class__ = DroppingHead
    model.lm_head.requires_grad_(False)
    with prepare(model, loss=5):
        loss = model(input_ids=IDS, labels=IDS).loss
        change(model)
        with pytest.raises(RuntimeError, match="the head of ByUse computes different values"):
            loss.backward()


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_labels_that_torch_refuses(dtype: torch.dtype) -> None:
    """Labels that ``F.cross_entropy`` refuses are refused by it."""
    model = ByUse(tiny_llama().config)
    model.use = lambda head, x, labels: cross_entropy(head(x), labels.to(dtype))
    with prepare(model, loss=5), pytest.raises(RuntimeError, match=r"target dtype|scalar type"):
        model(input_ids=IDS, labels=IDS)


def test_arguments_of_the_loss() -> None:
    """A number of items to divide by, and labels that are shifted already, are honoured; so are labels by position."""
    model = tiny_llama().double()
    for extra in ({"num_items_in_batch": 17}, {"shift_labels": IDS.flip(1)}):
        inputs = {"input_ids": IDS, "labels": IDS, **extra}
        true = run(model, inputs)
        with prepare(model, **LOSS):
            assert worst(run(model, inputs), true) <= 1e-6
    whole = model(IDS, None, None, None, None, IDS).loss
    with prepare(model, **LOSS):
        output = model(IDS, None, None, None, None, IDS)
    assert float(output.loss.detach()) == pytest.approx(float(whole.detach()), rel=1e-6)
    assert output.logits is None


@pytest.mark.parametrize("targets", [["lm_head"], ["q_proj"]])
def test_adapters_on_the_head(targets: list[str]) -> None:
    """With LoRA on the head, or a frozen head, the gradients are those of whole logits."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    model: Any = get_peft_model(tiny_llama().double(), config)
    true = run(model, {"input_ids": IDS, "labels": IDS})
    with prepare(model, **LOSS):
        found = run(model, {"input_ids": IDS, "labels": IDS})
        assert model(input_ids=IDS, labels=IDS).logits is None
    assert worst(found, true) <= 1e-6


@pytest.mark.low_precision
def test_tied_head_and_autocast() -> None:
    """A head that shares the embedding's weight; and bfloat16 autocast, to its precision."""
    model = tiny_llama(tie_word_embeddings=True)
    true = run(copy.deepcopy(model).double(), {"input_ids": IDS, "labels": IDS})
    for enabled, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        found = []
        for loss in (False, True):
            with prepare(model, loss=loss), torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                found.append(run(model, {"input_ids": IDS, "labels": IDS}))
        assert less_accurate(found[1], found[0], true, dtype) == {}


def test_a_head_that_is_not_called(caplog: pytest.LogCaptureFixture) -> None:
    """A model that computes its logits without calling its head, as MobileBERT does, keeps its loss; a warning says so,
    and the report no longer lists the loss.
    """
    architecture = ARCHITECTURES["MobileBERT"]
    model = architecture.build()
    with prepare(model, **LOSS) as prepared:
        run(model, architecture.feed(model))
        assert "the loss of MobileBertForMaskedLM is not tiled: its code does not call its head" in caplog.text
        assert prepared.report().losses == ()


def test_copies_and_release() -> None:
    """A copy of a prepared model has its own weights; release leaves nothing behind; a model without such a loss is
    refused.
    """
    model = tiny_llama()
    before = [set(vars(m)) for m in model.modules()]
    with prepare(model, **LOSS):
        clone = copy.deepcopy(model)
        with torch.no_grad():
            model.lm_head.weight.zero_()
        assert float(clone(input_ids=IDS, labels=IDS).loss.detach()) != pytest.approx(
            float(model(input_ids=IDS, labels=IDS).loss.detach())
        )
    assert [set(vars(m)) for m in model.modules()] == before
    with pytest.raises(
        ValueError,
        match=r"loss=True found no model of transformers in TransformerEncoder.*tiled_linear_cross_entropy",
    ):
        prepare(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2), loss=True)


def test_loss_alone() -> None:
    """``loss`` alone tiles no module; a number of tiles that is not positive is refused with the bound."""
    model = tiny_llama()
    with prepare(model, loss=2) as prepared:
        assert prepared.report().tiled == ()
        assert prepared.report().summary() == "lt_tiled tiles the loss of 1 x LlamaForCausalLM"
    with pytest.raises(ValueError, match=r"targets=\[\] must be .*tiling=False and loss=True"):
        Tiling(targets=[])
    for count in (0, -1, 2.0, "auto"):
        with pytest.raises(ValueError, match=f"loss={count!r} must be None or False or True or 'always' or an integer"):
            prepare(model, loss=count)


def test_a_custom_function_on_the_logits_is_refused() -> None:
    """A loss kernel that takes logits past Python's operators, and would lose their gradients, is refused with the
    remedy.
    """

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            ctx.shape = logits.shape
            return logits.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient.expand(ctx.shape)

    model = tiny_llama()
    model._loss_function = lambda logits, labels, **kwargs: Kernel.apply(logits)
    with (
        prepare(model, **LOSS),
        pytest.raises(RuntimeError, match=r"LlamaForCausalLM: a custom autograd Function.*loss=False"),
    ):
        model(input_ids=IDS, labels=IDS).loss.backward()


def test_hooks_on_the_head(caplog: pytest.LogCaptureFixture) -> None:
    """Hooks of a user on the head, which change or watch logits, get whole ones, once; the loss and its gradients are
    right.
    """
    for register in (
        lambda head: head.register_forward_hook(lambda module, args, output: output * 0.5),
        lambda head: head.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    ):
        _log._logged.clear()
        model = tiny_llama().double()
        register(model.lm_head)
        true = run(model, {"input_ids": IDS, "labels": IDS})
        with caplog.at_level("INFO", "lt_tiled"), prepare(model, **LOSS):
            assert worst(run(model, {"input_ids": IDS, "labels": IDS}), true) <= 1e-12
        assert (
            "the loss of LlamaForCausalLM is not tiled: hooks, tensor parallelism or a reentrant checkpoint of its head"
            in caplog.text
        )


@pytest.mark.parametrize("engine", ["torch.distributed.fsdp", ""])
def test_logits_are_tensors(engine: str) -> None:
    """Code that asks whether logits are a tensor finds one, also behind hooks of engines, which see none."""

    def hook(module: nn.Module, args: Any, output: Any = None) -> None:
        seen.append(isinstance(output, Tensor))

    def use(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        logits = head(x)
        assert isinstance(logits, Tensor)
        assert torch.is_tensor(logits)
        return cross_entropy(logits, labels)

    seen: list[bool] = []
    model = ByUse(tiny_llama().config).double()
    model.use = use
    if engine:
        hook.__module__ = engine
        model.lm_head.register_forward_pre_hook(hook)
        model.lm_head.register_forward_hook(hook)
    true = run(model, {"input_ids": IDS, "labels": IDS})
    del seen[:]
    with prepare(model, loss=5):
        assert worst(run(model, {"input_ids": IDS, "labels": IDS}), true) <= 1e-6
    assert seen == [False, False, False, True] * bool(engine)  # the head's call, and the tiles' whose loss is a tensor
    assert len(model.lm_head._forward_hooks) == bool(engine)


@pytest.mark.parametrize("frozen_first", [False, True])
def test_a_head_that_uses_other_weights(frozen_first: bool) -> None:
    """A head that reads a weight which is not its own, and would get no gradient, is refused: at its first call, or
    when the weight is no longer frozen.
    """

    class Borrowing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.other[0])

    model = tiny_llama()
    head = Borrowing(32, 64, bias=False)
    head.other = [model.model.embed_tokens.weight]
    model.lm_head = head
    with prepare(model, **LOSS):
        if frozen_first:
            head.other[0].requires_grad_(False)
            model(input_ids=IDS, labels=IDS).loss.backward()
            head.other[0].requires_grad_(True)
        with pytest.raises(ValueError, match=r"head of LlamaForCausalLM depends on a tensor of shape"):
            model(input_ids=IDS, labels=IDS)


def test_generation_and_signature() -> None:
    """A prepared model's forward shows its own arguments, so that ``generate`` makes the mask for padded prompts that
    it makes untiled.
    """
    torch.manual_seed(0)
    model = tiny_llama(pad_token_id=0, eos_token_id=1, bos_token_id=2).eval()
    signature = inspect.signature(model.forward)
    prompt = torch.tensor([[0, 0, 0, 20, 63], [7, 8, 9, 20, 63]])
    plain = model.generate(prompt, max_new_tokens=6, do_sample=False)
    with prepare(
        model, tiling=Tiling(3, self_check=False), activation_checkpointing=ActivationCheckpointing(), loss=True
    ):
        assert inspect.signature(model.forward) == signature
        assert inspect.signature(model.model.layers[0].mlp.forward) == inspect.signature(
            type(model.model.layers[0].mlp)(model.config).forward
        )
        assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), plain)


def test_models_without_a_loss_are_not_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only models that take labels are asked for their loss: transformers warns, in words about the loss, when others
    are.
    """
    model = tiny_llama()

    def asked(module: nn.Module) -> None:
        raise RuntimeError("asked for a loss")

    monkeypatch.setattr(type(model.model), "loss_function", property(asked))
    with prepare(model, **LOSS):
        assert [row.kind for row in Report.of(model).losses] == ["LlamaForCausalLM"]

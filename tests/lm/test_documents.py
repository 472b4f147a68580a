"""Documents and chats, packed to the sequence length."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lt_tiled.lm import CausalLM, Documents
from lt_tiled.lm.documents import packed
from tests.lit import trainer
from tests.lm.test_causal import LLAMA
from tests.parity import MIXED

WORDS = ["[UNK]", ".", "user", ":", "assistant", "a", "b", "c", "d", "e", "f", "g"]
CHATS = "{% for m in messages %}{{ m.role }} : {{ m.content }} . {% endfor %}"
CHATS += "{% if add_generation_prompt %}assistant : {% endif %}"
TAGGED = "{% for m in messages %}{{ m.role }} : {% if m.role == 'assistant' %}{% generation %}{{ m.content }} ."
TAGGED += "{% endgeneration %} {% else %}{{ m.content }} . {% endif %}{% endfor %}"
LAST = "{% for m in messages %}{{ m.role }} : {% if loop.last %}a {% endif %}{{ m.content }} . {% endfor %}"
CHAT = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
CHAT += [{"role": "user", "content": "e"}, {"role": "assistant", "content": "f g"}]


@pytest.fixture(autouse=True)
def _tokenizer() -> None:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=".", chat_template=CHATS)
    made.save_pretrained("tokenizer")


def write(*records: Any, name: str = "data.jsonl") -> None:
    lines = [r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode() for r in records]
    Path(name).write_bytes(b"\n".join(lines))


def documents(**options: Any) -> Documents:
    data = Documents(**{"paths": "data.jsonl", "tokenizer": "tokenizer", "seq_len": 8, **options})
    data.setup("fit")
    return data


def rows(data: Documents, part: str) -> dict[str, Tensor]:
    batches = list({"train": data.train_dataloader, "val": data.val_dataloader, "test": data.test_dataloader}[part]())
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def in_words(ids: Tensor) -> str:
    return " ".join(WORDS[i] for i in ids.tolist())


def found(data: Documents) -> Counter[tuple[str, str]]:
    """The documents of all parts, and their labels."""
    pieces: Counter[tuple[str, str]] = Counter()
    for part in ("train", "val", "test"):
        batch = rows(data, part)
        for ids, labels, positions in zip(*(batch[n] for n in ("input_ids", "labels", "position_ids")), strict=True):
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
            for start, end in itertools.pairwise(starts):
                assert positions[start:end].tolist() == [*range(end - start)]
                known = labels[start:end]
                if (known != -100).any():
                    assert known[0] == -100
                    pieces[in_words(ids[start:end]), in_words(ids[start:end][known != -100])] += 1
    return pieces


TEXTS = ["a b c", "d e", "f g a b c d", "a", "b c d e f g a b c d", "e f g"]


def test_each_document_is_there_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each document is in one part once, with its end and positions from 0, and a label at each token but the first; a
    longer one is split, and what has no label is left out with a warning.
    """
    write(*[{"text": text} for text in TEXTS], {"text": ""})
    expected = ["a b c .", "d e .", "f g a b c d .", "a .", "b c d e f g a b", "c d .", "e f g ."]
    with caplog.at_level("WARNING", "lt_tiled"):
        assert found(documents()) == Counter((text, text[2:]) for text in expected)
    assert "pieces of documents, of at most 8 tokens each, for training have no token with a label" in caplog.text


def test_packing() -> None:
    """Rows are full where documents fit, none is longer than the sequence length, and each document is in one."""
    lengths = torch.randint(1, 100, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    filled = packed(lengths, 100)
    assert sorted(i for row in filled for i in row) == list(range(300))
    assert max(sum(lengths[i] for i in row) for row in filled) <= 100
    assert len(filled) <= sum(lengths) / 100 * 1.05


def test_the_split_is_the_same_again() -> None:
    """Two datamodules, as on two ranks, have the same parts; another sequence length keeps the documents of a part."""
    write(*[{"text": " ".join(WORDS[5 + (i + j) % 7] for j in range(i % 5 + 1))} for i in range(40)])
    one, other = documents(held_out=0.1), documents(held_out=0.1)
    for part in ("val", "test"):
        assert all(torch.equal(a, b) for a, b in zip(rows(one, part).values(), rows(other, part).values(), strict=True))
    before = sorted(rows(one, "val")["labels"].flatten().tolist())
    one.seq_len = 16
    one.setup("fit")
    assert rows(one, "val")["labels"].shape[1] == 16
    assert [i for i in sorted(rows(one, "val")["labels"].flatten().tolist()) if i >= 0] == [i for i in before if i >= 0]


def test_without_packing() -> None:
    """With ``pack=False`` each document has a row of its own, which padding without labels fills."""
    write(*[{"text": text} for text in ("a b", "c d e", "f g a b")])
    data = documents(pack=False)
    made = [rows(data, part) for part in ("train", "val", "test")]
    assert all(batch.keys() == {"input_ids", "labels"} for batch in made)
    assert {in_words(ids) for batch in made for ids in batch["input_ids"]} == {
        "a b . . . . . .",
        "c d e . . . . .",
        "f g a b . . . .",
    }
    assert sum(int((batch["labels"] >= 0).sum()) for batch in made) == 2 + 3 + 4


@pytest.mark.parametrize("template", [CHATS, TAGGED])
def test_chats(template: str) -> None:
    """A chat is the text of its template; with ``assistant_only`` the labels are what the assistant says and its end,
    found with ``{% generation %}`` or without.
    """
    write(*[{"messages": CHAT}] * 3)
    Path("template.jinja").write_text(template)
    text = "user : a b . assistant : c d . user : e . assistant : f g ."
    data = documents(seq_len=32, chat_template="template.jinja")
    assert found(data) == {(text, text.removeprefix("user ")): 3}
    data = documents(seq_len=32, chat_template="template.jinja", assistant_only=True)
    assert found(data) == {(text, "c d . f g ."): 3}


@pytest.mark.parametrize(("attention", "error"), [("sdpa", 1e-9), ("eager", 1e-7)])  # eager has a softmax in float32
def test_packed_documents_train_as_alone(attention: str, error: float) -> None:
    """A batch of packed documents has the loss, the gradients and the perplexity of the documents alone."""
    generator = torch.Generator().manual_seed(0)
    alone = [torch.randint(256, (n,), generator=generator) for n in (5, 9, 2, 11, 3, 2)]
    batch = {
        "input_ids": torch.cat(alone).view(2, 16),
        "position_ids": torch.cat([torch.arange(len(ids)) for ids in alone]).view(2, 16),
    }
    batch["labels"] = batch["input_ids"].clone()
    model = CausalLM(LLAMA, attn_implementation=attention, loss=3)
    model.configure_model()
    model.double()
    model.log = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    results, perplexities = [], []
    for batches in ([batch], [{"input_ids": ids[None]} for ids in alone]):
        model.zero_grad()
        losses = [model.training_step(one, 0) for one in batches]
        counts = [len(ids) - 1 for ids in alone] if len(batches) > 1 else [sum(len(ids) - 1 for ids in alone)]
        loss = sum(a * n for a, n in zip(losses, counts, strict=True)) / sum(counts)
        loss.backward()
        model.val_perplexity.reset()
        for one in batches:
            model.validation_step(one, 0)
        perplexities.append(float(model.val_perplexity.compute()))
        results.append([loss, *(p.grad.clone() for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=error)
    assert math.log(perplexities[0]) == pytest.approx(math.log(perplexities[1]), rel=MIXED)


@pytest.mark.parametrize("assistant_only", [False, True])
def test_documents_that_are_packed_train_as_alone(assistant_only: bool) -> None:
    """The losses of packed rows add up to those of the same documents in rows of their own: empty ones, some that end
    with a sequence or exceed it by one token, labels before and after a split.
    """
    texts = [" ".join(WORDS[5 + (i + j) % 7] for j in range(n)) for i, n in enumerate((0, 1, 2, 7, 7, 8, 15, 16, 30))]
    write(*[{"text": text} for text in texts], *[{"messages": CHAT}] * 3, {"messages": CHAT[:1]})
    model = CausalLM({**LLAMA, "vocab_size": 16}, loss=3)
    model.configure_model()
    model.double()
    model.log = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    sums = []
    for pack in (True, False):
        data, total, count = documents(pack=pack, assistant_only=assistant_only, held_out=0.01), 0.0, 0
        for part in ("train", "val", "test"):
            for batch in {"train": data.train_dataloader, "val": data.val_dataloader, "test": data.test_dataloader}[
                part
            ]():
                labels = int((batch["labels"][:, 1:] >= 0).sum())
                total += float(model.training_step(batch, 0).detach()) * labels
                count += labels
        sums.append((count, total))
    assert sums[0][0] == sums[1][0] > 60
    assert sums[0][1] == pytest.approx(sums[1][1], rel=1e-9)


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [("bos", [6], [1]), ("no eos", [], []), ("truncation", [], [1])],
)
def test_tokenizers(change: str, before: list[int], after: list[int]) -> None:
    """A text begins and ends as its tokenizer says, and truncation and padding that were saved with it do not act. The
    size of the vocabulary is the highest id plus 1.
    """
    words = Tokenizer(models.WordLevel({**{word: i for i, word in enumerate(WORDS)}, "last": 500}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if change == "bos":
        words.post_processor = processors.TemplateProcessing(single="b $A", special_tokens=[("b", 6)])
    if change == "truncation":
        words.enable_truncation(3)
        words.enable_padding(length=6, pad_token=".", pad_id=1)
    end = {} if change == "no eos" else {"eos_token": "."}
    PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=4, **end).save_pretrained("tokenizer")
    write(*[{"text": "a b"}] * 3, {"text": "a b c d e f g"})
    data = documents()
    assert data._documents[0].ids.tolist() == [*before, 5, 6, *after]
    assert data._documents[3].ids.tolist() == [*before, *range(5, 12), *after]
    assert data.vocab_size == 501


def test_answers_of_letters_with_many_tokens() -> None:
    """The labels of ``assistant_only`` are whole letters, also of those that are several tokens."""
    letters = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=letters, chat_template=CHATS).save_pretrained("tokenizer")
    chat = [{"role": "user", "content": "\u65e5"}, {"role": "assistant", "content": "\u672c\U0001f642"}]
    write(*[{"messages": chat * 2}] * 3)
    data = documents(seq_len=128, assistant_only=True)
    labels = data._documents[0].labels
    assert data._tokenizer.decode(labels[labels >= 0]) == "\u672c\U0001f642 . " * 2


def test_flash_attention_gets_one_row() -> None:
    """Flash attention looks for documents in a batch of one sequence, so that is what it gets."""
    model = CausalLM(LLAMA, attn_implementation="flash_attention_2")
    model._separates = True
    given = model._inputs(
        {"input_ids": torch.ones(2, 4).long(), "position_ids": torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])}
    )
    assert given["position_ids"].tolist() == [[0, 1, 0, 1, 0, 1, 2, 3]]
    assert given["labels"].tolist() == [[-100, 1, -100, 1, -100, 1, 1, 1]]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "opt", "vocab_size": 64, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 1},
        {"model_type": "bloom", "vocab_size": 64, "hidden_size": 16, "n_layer": 1},
        {"model_type": "mamba", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    ],
    ids=lambda c: c["model_type"],
)
def test_a_model_that_mixes_documents_is_refused(config: dict[str, Any]) -> None:
    """A model whose mask ignores position_ids, that takes none, or that has a recurrent state raises with packed
    documents, and trains on documents that are not packed.
    """
    heads = {"opt": {"num_attention_heads": 2, "word_embed_proj_dim": 16}, "bloom": {"n_head": 2}, "mamba": {}}
    write(*[{"text": text} for text in TEXTS])
    for pack in (True, False):
        run = trainer("auto", max_steps=1, limit_val_batches=0)
        attention = "sdpa" if config["model_type"] == "opt" else "eager"
        model = CausalLM({**config, **heads[config["model_type"]]}, attn_implementation=attention)
        if pack:
            with pytest.raises(ValueError, match=r"mixes documents in spite of them: set pack: false"):
                run.fit(model, documents())
        else:
            run.fit(model, documents(pack=False))
            assert run.global_step == 1


def test_dataset_on_disk() -> None:
    """A Hugging Face dataset on disk gives the documents of the same JSON lines, whatever its other columns and its
    format; a column without texts, and a dataset of splits, are refused.
    """
    datasets = pytest.importorskip("datasets")
    write(*[{"text": text} for text in TEXTS])
    rows = datasets.Dataset.from_dict({"text": TEXTS, "when": [date(2026, 1, 1)] * len(TEXTS)})
    rows.with_format("numpy").save_to_disk("rows")
    datasets.DatasetDict({"train": rows}).save_to_disk("splits")
    assert found(documents(paths="rows")) == found(documents())
    with pytest.raises(ValueError, match=r"rows, row 0, has when=datetime"):
        documents(paths="rows", field="when")
    with pytest.raises(ValueError, match=r"'splits' has the splits train: pass splits/train"):
        documents(paths="splits")


def test_datasets_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, a dataset on disk raises with the command that installs it."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    Path("rows").mkdir()
    Path("rows/state.json").touch()
    with pytest.raises(ModuleNotFoundError, match="pip install datasets"):
        documents(paths="rows")


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        ('{"text": "a"', {}, r"data.jsonl, line 4, is not JSON: Expecting"),
        ("[1]", {}, r"data.jsonl, line 4, is \[1\]: write a JSON object"),
        ({"content": "a"}, {}, r"line 4, has no field 'messages' or 'text', only \['content'\]: set field"),
        ({"content": "a"}, {"field": "body"}, r"line 1, has no field 'body', only \['text'\]"),
        ({"text": 5}, {}, r"line 4, has text=5: it must be a text, or messages with a role and a text"),
        ({"messages": [{"from": "a"}]}, {}, r"line 4, has messages=\[{.*: it must be a text, or messages with"),
        ({"messages": CHAT}, {"chat_template": "strict"}, r"line 4, does not fit the chat template: bad"),
        (
            {"messages": [{"role": "user", "value": "a"}]},
            {},
            r"line 4, has messages=\[{.*with a role and a text as content",
        ),
        ({"messages": [{"role": "user", "content": None}]}, {}, r"line 4, .*with a role and a text as content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, {}, r"line 4, .*a text as content"),
        ({"text": None}, {}, r"line 4, has no field 'messages' or 'text', only \[\]: set field"),
        ({"text": "a \ud800"}, {}, r"line 4, cannot be tokenized: "),
        (b'{"text": "\xff"}', {}, r"line 4, is not JSON: .*can't decode byte 0xff"),
        (
            {"messages": CHAT[1:]},
            {"assistant_only": True},
            r"line 4, has a message 0 that the chat template begins with",
        ),
        ({"messages": CHAT}, {"chat_template": "empty"}, r"line 4, .*'tokenizer' has no chat template: set chat_templ"),
        ({"messages": CHAT}, {"chat_template": "gone"}, r"chat_template='gone' cannot be read \(No such file"),
        (
            {"messages": CHAT},
            {"chat_template": "last", "assistant_only": True},
            r"line 4, has a message 1 that the chat template writes in another way when others follow",
        ),
        ({"text": "a"}, {"max_documents": 2}, r"have 2 documents, and held_out=0.02 leaves none to train on"),
        ({"text": "a"}, {"paths": []}, r"paths=\[\] names no file"),
        ({"text": "a"}, {"tokenizer": "gone"}, r"tokenizer='gone' is not a directory"),
    ],
)
def test_bad_input(record: Any, options: dict[str, Any], message: str) -> None:
    """What is not understood is refused with its file and line, and the remedy."""
    write({"text": "a"}, {"text": "b"}, "", record)
    Path("strict").write_text("{{ raise_exception('bad') }}")
    Path("last").write_text(LAST)
    if options.get("chat_template") == "empty":
        del options["chat_template"]
        (PreTrainedTokenizerFast.from_pretrained("tokenizer")).save_pretrained("tokenizer")
        Path("tokenizer/chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=message):
        documents(**options)

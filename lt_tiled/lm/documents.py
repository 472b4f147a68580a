"""A datamodule of documents and chats: JSON lines or Hugging Face datasets on disk, packed to the sequence length."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lt_tiled._log import warn
from lt_tiled.cli.numbers import NonNegativeInt, OpenUnitInterval, PositiveInt, make_plain
from lt_tiled.lm.models import refusing, require
from lt_tiled.lm.sequences import Sequences, part_sizes
from lt_tiled.lm.text import check_tokenizer, files_of, load_tokenizer, vocab_size


class _Document(NamedTuple):
    ids: Tensor
    labels: Tensor
    """The ids, and -100 where there is no loss: at the first token, which nothing predicts, and where masked."""


class Documents(Sequences):
    """Reads texts and chats, and cuts or joins them into sequences of ``seq_len`` tokens.

    A record is a JSON object on a line of its own, or a row of a Hugging Face dataset. It has a text or the messages of
    a chat, ``[{"role": "user", "content": "..."}, ...]``, which the tokenizer's chat template turns into text. A text
    ends with the tokenizer's end-of-sequence token, if it has one. All tokens are in CPU memory, on every rank.

    Batches have ``input_ids``, ``labels`` (-100 where there is no loss; not shifted) and ``position_ids``, which begin
    at 0 for each document: the attention of transformers keeps documents apart by them. A document longer than
    ``seq_len`` is split into several. The first token of a document has no label, and a document without any label is
    left out. A random ``held_out`` share of the documents, always the same, is for validation, another for testing.

    Args:
        paths: Files of JSON lines, directories (their ``*.jsonl`` files), globs, and directories that
            ``datasets.Dataset.save_to_disk`` wrote.
        tokenizer: A local directory with a Hugging Face tokenizer.
        seq_len: Tokens per sequence.
        batch_size: Sequences per batch and device.
        field: The name of a record's text or messages; by default ``messages`` or ``text``, whichever it has.
        assistant_only: Train on what the assistant says in a chat, and not on the other messages.
        chat_template: A file with a chat template (Jinja) that replaces the tokenizer's.
        pack: Put several documents into one sequence. Otherwise each has its own, and padding fills it.
        held_out: The share of the documents that validation and testing each get, at least one document.
        max_documents: Read no more documents than this.
        num_workers: Worker processes of the data loaders.
        trust_remote_code: Run the Python code that ``tokenizer`` may contain. Otherwise one that needs it raises.

    Raises:
        ValueError: If a path matches no file, a record is not understood, or there are fewer than three documents.
        ModuleNotFoundError: If a path is a Hugging Face dataset and datasets is not installed.
    """

    def __init__(
        self,
        paths: str | Sequence[str],
        tokenizer: str,
        seq_len: PositiveInt = 4096,
        batch_size: PositiveInt = 1,
        field: str | None = None,
        assistant_only: bool = False,
        chat_template: str | None = None,
        pack: bool = True,
        held_out: OpenUnitInterval = 0.02,
        max_documents: PositiveInt | None = None,
        num_workers: NonNegativeInt = 0,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(seq_len, batch_size, num_workers)
        check_tokenizer(tokenizer)
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        if not self.paths or "" in self.paths:
            raise ValueError(f"paths={paths!r} names no file: pass files of JSON lines, or a dataset on disk.")
        self.save_hyperparameters()
        make_plain(self.hparams)
        self.fields = ["messages", "text"] if field is None else [field]
        self.assistant_only, self.pack, self.held_out = assistant_only, pack, held_out
        self.max_documents = max_documents
        self._tokenizer: Any = None
        self._documents: list[_Document] = []

    def cut(self) -> list[Mapping[str, Tensor]]:
        if not self._documents:
            self._tokenizer = load_tokenizer(**{name: self.hparams[name] for name in TOKENIZER})
            self.vocab_size = vocab_size(self._tokenizer)
            self._documents = [self._document(*r) for r in islice(self._records(), self.max_documents)]
        count = len(self._documents)
        sizes = part_sizes(count, self.held_out)
        if sizes[0] < 1:
            raise ValueError(
                f"paths={self.paths} have {count} documents, and held_out={self.held_out} leaves none to train on: give"
                " at least 3 documents, or use lt_tiled.lm.TextFiles for a long text."
            )
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        validation, testing, training = order.split(sizes[::-1])
        parts = {"training": training, "validation": validation, "testing": testing}
        return [self._rows(part, chosen.tolist()) for part, chosen in parts.items()]

    def _records(self) -> Iterator[tuple[str, Any]]:
        """Yield each record, and where it is."""
        for path in self.paths:
            if (Path(path) / "dataset_dict.json").is_file():
                splits = sorted(p.parent.name for p in Path(path).glob("*/state.json"))
                raise ValueError(f"paths: {path!r} has the splits {', '.join(splits)}: pass {path}/{splits[0]}.")
            if (Path(path) / "state.json").is_file():
                require("datasets", "datasets")
                from datasets import load_from_disk

                for number, row in enumerate(load_from_disk(path).with_format(None)):
                    yield f"{path}, row {number},", row
                continue
            for file in files_of(path, (".jsonl",)):
                with file.open("rb") as lines:
                    for number, line in enumerate(lines, 1):
                        place = f"{file}, line {number},"
                        if line.strip():
                            with refusing(f"{place} is not JSON"):
                                record = json.loads(line)
                            yield place, record

    def _document(self, place: str, record: Any) -> _Document:
        if not isinstance(record, dict):
            raise ValueError(f'{place} is {record!r:.40}: write a JSON object, such as {{"text": "..."}}.')
        name = next((name for name in self.fields if record.get(name) is not None), None)
        if name is None:
            raise ValueError(
                f"{place} has no field {' or '.join(map(repr, self.fields))}, only"
                f" {sorted(name for name in record if record[name] is not None)}: set field to the name of its text or"
                " messages."
            )
        value = record[name]
        if isinstance(value, str):
            ids, end = self._encode(place, value)["input_ids"], self._tokenizer.eos_token_id
            if end is not None and ids[-1:] != [end]:
                ids = [*ids, end]
            trained_on = [1] * len(ids)
        elif isinstance(value, list) and value and all(map(_is_message, value)):
            ids, trained_on = self._chat(place, value)
        else:
            raise ValueError(
                f"{place} has {name}={value!r:.60}: it must be a text, or messages with a role and a text as content."
            )
        tokens = torch.tensor(ids, dtype=torch.int32)
        return _Document(tokens, tokens.masked_fill(torch.tensor(trained_on) == 0, -100))

    def _encode(self, place: str, text: str, **options: Any) -> Mapping[str, Any]:
        with refusing(f"{place} cannot be tokenized"):  # half a surrogate pair, or a tokenizer that has no offsets
            return cast(Mapping[str, Any], self._tokenizer(text, verbose=False, **options))

    def _apply_template(self, place: str, messages: list[Any], **options: Any) -> Any:
        with refusing(f"{place} does not fit the chat template"):
            return self._tokenizer.apply_chat_template(messages, **options)

    def _chat(self, place: str, messages: list[Any]) -> tuple[list[int], list[int]]:
        """Return the token ids of a chat, and for each token whether it is trained on."""
        template = self._tokenizer.chat_template
        if template is None:
            raise ValueError(
                f"{place} has messages, but tokenizer={self.hparams['tokenizer']!r} has no chat template: set"
                " chat_template to a file with one."
            )
        marks_assistant = re.search(r"{%-?\s*generation\b", str(template))
        if self.assistant_only and not marks_assistant:
            return self._find_assistant(place, messages)
        options = {"return_assistant_tokens_mask": self.assistant_only, "tokenizer_kwargs": {"verbose": False}}
        chat = self._apply_template(place, messages, return_dict=True, **options)
        ids = chat["input_ids"]
        return ids, chat["assistant_masks"] if self.assistant_only else [1] * len(ids)

    def _find_assistant(self, place: str, messages: list[Any]) -> tuple[list[int], list[int]]:
        """Return the same for a template without ``{% generation %}``, by applying it to each beginning of the chat."""
        text = self._apply_template(place, messages, tokenize=False)
        encoded = self._encode(place, text, add_special_tokens=False, return_offsets_mapping=True)
        starts, ends = [start for start, _ in encoded["offset_mapping"]], [end for _, end in encoded["offset_mapping"]]
        trained_on = [0] * len(starts)
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = (
                self._apply_template(place, messages[:i], add_generation_prompt=True, tokenize=False) if i else None
            )
            until = self._apply_template(place, messages[: i + 1], tokenize=False)
            if before is None or not text.startswith(before) or not text.startswith(until):
                why = "writes in another way when others follow" if i else "begins with"
                raise ValueError(
                    f"{place} has a message {i} that the chat template {why}, so assistant_only=True cannot find it:"
                    " set chat_template to a file with {% generation %}."
                )
            first, end = bisect_right(ends, len(before)), bisect_left(starts, len(until))
            trained_on[first:end] = [1] * (end - first)
        return encoded["input_ids"], trained_on

    def _rows(self, part: str, chosen: list[int]) -> Mapping[str, Tensor]:
        """Return the documents in sequences of ``seq_len`` tokens."""
        size = self.seq_len
        pieces, unlabeled = self._pieces(chosen)
        if unlabeled:
            pieces_of = f"pieces of documents, of at most {size} tokens each, for {part}"
            warn(f"{unlabeled} of {unlabeled + len(pieces)} {pieces_of} have no token with a label, and are left out.")
        if not pieces:
            raise ValueError(
                f"paths={self.paths}: no document for {part} has a token with a label: give more documents."
            )
        rows = packed([len(p.ids) for p in pieces], size) if self.pack else [[i] for i in range(len(pieces))]
        padding = self._tokenizer.pad_token_id
        if padding is None:
            padding = self._tokenizer.eos_token_id or 0
        names = ("input_ids", "labels", "position_ids") if self.pack else ("input_ids", "labels")
        tensors = {name: torch.empty((len(rows), size), dtype=torch.int32) for name in names}
        for row, members in enumerate(rows):
            left = size - sum(len(pieces[i].ids) for i in members)
            padded = [*(pieces[i] for i in members), _Document(torch.full([left], padding), torch.full([left], -100))]
            tensors["input_ids"][row] = torch.cat([piece.ids for piece in padded])
            tensors["labels"][row] = torch.cat([piece.labels for piece in padded])
            if self.pack:  # padding is a document of its own
                tensors["position_ids"][row] = torch.cat([torch.arange(len(piece.ids)) for piece in padded])
        return tensors

    def _pieces(self, chosen: list[int]) -> tuple[list[_Document], int]:
        """Return pieces of at most ``seq_len`` tokens that have labels, and the number of those without."""
        pieces, unlabeled = list[_Document](), 0
        for ids, labels in (self._documents[i] for i in chosen):
            for piece, piece_labels in zip(ids.split(self.seq_len), labels.split(self.seq_len), strict=True):
                known = piece_labels.clone()
                known[:1] = -100
                if (known != -100).any():  # else the loss of a batch of such could be a mean of nothing
                    pieces.append(_Document(piece, known))
                else:
                    unlabeled += 1
        return pieces, unlabeled


def _is_message(value: Any) -> bool:
    """Whether this is a message. A template writes nothing, or Python, for what is no text."""
    return (
        isinstance(value, dict)
        and "role" in value
        and (isinstance(value.get("content"), str) or bool(value.get("tool_calls")))
    )


def packed(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return rows of at most ``size`` tokens as indices of documents: the longest first, each where least is left."""
    rows, free = list[list[int]](), list[tuple[int, int]]()
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(free, (lengths[index], 0))
        left, row = free.pop(at) if at < len(free) else (size, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        insort(free, (left - lengths[index], row))
    return rows


TOKENIZER = ("tokenizer", "trust_remote_code", "chat_template")
"""The arguments of a datamodule that make its tokenizer."""

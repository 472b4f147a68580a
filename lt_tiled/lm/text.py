"""A datamodule of text files, cut into sequences of tokens."""

from __future__ import annotations

import sysconfig
from collections.abc import Collection, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lt_tiled._log import inform, warn
from lt_tiled.cli.numbers import NonNegativeInt, OpenUnitInterval, PositiveInt, make_plain
from lt_tiled.lm.causal import CausalLM
from lt_tiled.lm.models import refusing, require
from lt_tiled.lm.sequences import Sequences, part_sizes


class TextFiles(Sequences):
    """Reads text files and cuts them into sequences of ``seq_len`` tokens that do not overlap.

    The last part of the text is for testing, the part before it for validation.

    Args:
        paths: Files, directories (their ``*.txt``, ``*.md`` and ``*.py`` files) and globs. The default is the source of
            the Python standard library, a text that every machine has.
        tokenizer: A local directory with a Hugging Face tokenizer. The default is that in the ``path`` of CausalLM, or
            bytes for a model without ``path``, or with 256 tokens.
        seq_len: Tokens per sequence.
        batch_size: Sequences per batch and device.
        held_out: The share of the sequences that validation and testing each get, at least one sequence.
        max_bytes: Read no more text than this.
        num_workers: Worker processes of the data loaders.
        trust_remote_code: Run the Python code that ``tokenizer`` may contain. Otherwise one that needs it raises.

    Raises:
        ValueError: If a path matches no file, a file cannot be read, the text has fewer than three sequences, or the
            model in a local directory has other tokens than bytes and no tokenizer.
    """

    def __init__(
        self,
        paths: str | Sequence[str] | None = None,
        tokenizer: str | None = None,
        seq_len: PositiveInt = 4096,
        batch_size: PositiveInt = 1,
        held_out: OpenUnitInterval = 0.02,
        max_bytes: PositiveInt = 4_000_000,
        num_workers: NonNegativeInt = 0,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(seq_len, batch_size, num_workers)
        if paths is not None and (not paths or "" in list(paths)):
            raise ValueError(f"paths={paths!r} names no file: leave it out for the source of the standard library.")
        if tokenizer is not None:
            check_tokenizer(tokenizer)
        self.save_hyperparameters()
        make_plain(self.hparams)
        self.paths = [paths] if isinstance(paths, str) else paths
        self.max_bytes, self.held_out, self.trust_remote_code = max_bytes, held_out, trust_remote_code
        self.tokenizer = self._used = tokenizer

    def setup(self, stage: str) -> None:
        """Read and cut the text on every rank, and again if ``seq_len`` or the tokenizer has changed."""
        tokenizer = self.tokenizer or self._tokenizer_of_the_model()
        if tokenizer != self._used:
            inform(f"the tokens of the text are {f'those of the tokenizer in {tokenizer}' if tokenizer else 'bytes'}")
            self._used, self._cut_at = tokenizer, 0
        super().setup(stage)

    def _tokenizer_of_the_model(self) -> str | None:
        """Return the directory of the model if it has a tokenizer, or ``None`` for bytes."""
        module = getattr(self.trainer, "lightning_module", None)
        if not isinstance(module, CausalLM) or (path := module.hparams["path"]) is None:
            return None
        if has_tokenizer(path):
            return str(path)
        if module.vocab_size != 256:
            raise ValueError(
                f"The model in path={path!r} has {module.vocab_size} tokens and no tokenizer, and the data would be"
                " bytes: set tokenizer of lt_tiled.lm.TextFiles to a local directory with the tokenizer of the model."
            )
        return None

    def cut(self) -> list[Mapping[str, Tensor]]:
        if self.paths is None:
            root = Path(sysconfig.get_path("stdlib"))
            files = sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py"))
        else:
            files = [file for path in self.paths for file in files_of(path, (".txt", ".md", ".py"))]
        text = read_text(files, self.max_bytes)
        if self.paths is not None and len(text) < (size := sum(file.stat().st_size for file in files)):
            warn(f"paths have {size} bytes, of which max_bytes={len(text)} are read: set max_bytes to read more.")
        tokens = self._tokenize(text)
        count = len(tokens) // self.seq_len
        sizes = part_sizes(count, self.held_out)
        if sizes[0] < 1:
            raise ValueError(
                f"The text has {len(tokens)} tokens, {count} sequences of seq_len={self.seq_len}, and needs at least 3:"
                " one to train on, one to validate, one to test. Give more text or a shorter seq_len."
            )
        windows = tokens[: count * self.seq_len].view(count, self.seq_len)
        return [{"input_ids": part} for part in windows.split(sizes)]

    def _tokenize(self, text: bytes) -> Tensor:
        if self._used is None:
            self.vocab_size = 256
            return torch.frombuffer(bytearray(text), dtype=torch.uint8)
        tokenizer = load_tokenizer(self._used, self.trust_remote_code)
        self.vocab_size = vocab_size(tokenizer)
        ids = tokenizer(text.decode(errors="replace"), verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int32)


def has_tokenizer(directory: str) -> bool:
    """Return whether a directory has a tokenizer: what ``save_pretrained`` writes, or its vocabulary alone."""
    files = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")
    return any((Path(directory) / file).is_file() for file in files)


def vocab_size(tokenizer: Any) -> int:
    """Return the highest token id of a tokenizer, plus 1. Its length is less if ids are left out."""
    return int(max(tokenizer.get_vocab().values())) + 1


def check_tokenizer(directory: str) -> None:
    """Raise ``ValueError`` if this is no directory."""
    if not Path(directory).is_dir():
        raise ValueError(f"tokenizer={directory!r} is not a directory: pass a local tokenizer; none is downloaded.")


def load_tokenizer(tokenizer: str, trust_remote_code: bool = False, chat_template: str | None = None) -> Any:
    """Return the tokenizer of a local directory, with the chat template of a file if there is one."""
    require("transformers", "'lt-tiled[hf]'")
    from transformers import AutoTokenizer

    with refusing(f"tokenizer={tokenizer!r} cannot be loaded"):
        loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=trust_remote_code)
    if chat_template is not None:
        try:
            loaded.chat_template = Path(chat_template).read_text()
        except OSError as error:
            raise ValueError(f"chat_template={chat_template!r} cannot be read ({error.strerror}).") from error
    return loaded


def files_of(path: str, suffixes: Collection[str]) -> list[Path]:
    """Return the file, those of a directory with one of the suffixes, or those of a glob: at least one."""
    if Path(path).is_dir():
        candidates = sorted(p for p in Path(path).rglob("*") if p.suffix in suffixes)
    else:  # a file's name may look like a glob
        matches = [path] if Path(path).is_file() else sorted(glob(path, recursive=True))
        candidates = [Path(name) for name in matches]
    files = [p for p in candidates if p.is_file()]  # reading a named pipe would wait for a writer
    # A glob also matches plain directories.
    if skipped := [str(p) for p in candidates if p.suffix and not p.is_file()]:
        warn(f"paths: {path!r}: skipped what is not a regular file: {', '.join(skipped[:5])}.")
    if not files:
        kinds = f"a file, a directory with {' or '.join(suffixes)} files, or a glob"
        raise ValueError(f"paths: {path!r} matches no file: pass {kinds}.")
    return files


def read_text(files: Sequence[Path], max_bytes: int) -> bytes:
    """Return the first ``max_bytes`` bytes of the files, at least one."""
    text = bytearray()
    for file in files:
        try:
            with file.open("rb") as stream:
                text += stream.read(max_bytes - len(text))
        except OSError as error:
            reason = f"{file} cannot be read ({error.strerror})"
            raise ValueError(f"{reason}: fix its permissions or remove it from paths.") from error
        if len(text) >= max_bytes:
            break
    if not text:
        raise ValueError(f"The {len(files)} files of paths are empty ({files[0]} is the first): pass files with text.")
    return bytes(text)

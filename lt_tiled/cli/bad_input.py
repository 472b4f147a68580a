"""What the command line says about bad input: the key, a near one and the line of the file, without a traceback."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentError
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import dropwhile, takewhile
from pathlib import Path
from textwrap import shorten
from traceback import walk_tb
from typing import Any, NoReturn

import yaml
from jsonargparse import get_loader
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lt_tiled.errors import did_you_mean

_UNKNOWN_KEY = re.compile(r"(?:.*[Oo]ption '|unrecognized arguments: --)([\w.]+).*")
# The lines of jsonargparse's tree of errors that are not a reason by themselves.
_TREE = re.compile(
    r'[\s-]*(Parser key ".*":$|Problem with given class_path|Does not validate|Subtypes: |Errors:$|Given value'
    r"|Expected a|Not of type .* argument must|Not a valid subclass|Subclass types|a class path \(|a dict with)"
)
_load_yaml = get_loader("yaml")


class Parser(LightningArgumentParser):
    """Raises ``ArgumentError`` for what a user typed. Classes in a configuration also have parsers of this class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.command: Parser = self  # of the main parser: the parser with all keys
        self.files = list[Path]()

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        self.files.append(Path(path).absolute())
        try:
            return super().parse_path(path, *args, **kwargs)
        except UnicodeDecodeError as error:
            self.error("Problems parsing config: this is not YAML in UTF-8.", error)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if found := _UNKNOWN_KEY.fullmatch(message):
            message = f"unknown key {_near(found[1], self.command.get_defaults().keys())}"
        if isinstance(ex, ArgumentError):  # the main parser repeats its command's
            raise ArgumentError(None, message) from ex
        if self.exit_on_error:
            raise ArgumentError(None, explain(message, self.command.files)) from ex
        # A class's parser: its error becomes a line of the next parser's.
        keys, reason = _keys_and_reason(message)
        raise ArgumentError(None, f"In {'.'.join(keys)}: {reason}" if keys else reason) from ex


def explain(text: str, files: Sequence[Path] = ()) -> str:
    """Return one line for jsonargparse's tree of errors: the place, the keys and the first reason."""
    if files and text.startswith("Problems parsing config: "):
        return f"{files[-1]}: {_line(text.partition(': ')[2])}"
    if files and text.startswith("Unexpected config: "):
        return f"{files[-1]}: it has no keys such as trainer:, but is {text.partition(': ')[2][:40]!r}."
    keys, reason = _keys_and_reason(text)
    unknown = re.search(r"unknown key '([\w.]+)'", reason)
    path = [*keys, *unknown[1].split(".")] if unknown else keys
    place = next(filter(None, (_find(file, path) for file in files)), "") if path else ""
    return f"{place}{'.'.join(keys)}{': ' if keys else ''}{_line(reason)}"


def _keys_and_reason(text: str) -> tuple[list[str], str]:
    """Return the keys that an error is about and its first reason, which may be that a value fits no type."""
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    key = re.search(r'Parser key "(.+)":$', lines[0])
    keys = key[1].split(".") if key else []
    # One reason may have several lines.
    reasons = list(takewhile(lambda line: not _TREE.match(line), dropwhile(_TREE.match, lines)))
    reason = " ".join(reasons).strip(" -") or _unfit_value(lines) or lines[-1].strip(" -")
    if inner := re.fullmatch(r"In ([\w.]+): (.*)", reason):
        keys, reason = keys + inner[1].split("."), inner[2]
    if found := re.match(r"module '([\w.]+)' has no attribute '(\w+)'", reason):
        reason = f"{found[1]} has no {_near(found[2], dir(sys.modules.get(found[1])))}"
    return keys, reason


def _unfit_value(lines: Sequence[str]) -> str:
    """Return that the innermost value fits none of its types, or an empty string if no value is given."""
    types, value = "", None
    for line in lines:
        name, _, rest = line.strip(" -").partition(": ")
        if name == "Subtypes":
            types = rest
        elif name == "Given value":
            value = rest
            break
    if value is None:
        return ""
    value = re.sub(r"NestedArg\(key='(.+?)', val='(.*)'\)", r"\1=\2", value)
    known: set[str] = set()
    for module, name in re.findall(r"<class '([\w.]+)\.(\w+)'>", types):
        known |= _names(getattr(sys.modules.get(module), name, int))
    named = re.fullmatch(r"\[?'?(?:{'class_path': '|class_path=)?(\w+)('.*)?", value)
    if named and (near := did_you_mean(named[1], known)):
        return f"there is no {named[1]!r}{near}"
    return f"{value!r} is none of {types}"


def registered_name(strategy: str) -> str:
    """Return the registered name of a strategy, also for the name of its class, or raise ``ValueError``."""
    names = ["auto", *StrategyRegistry.available_strategies()]
    classes = {StrategyRegistry[name]["strategy"].__name__: name for name in sorted(names[1:], key=len, reverse=True)}
    if strategy in classes or strategy.lower() in names:
        return str(classes.get(strategy, strategy))
    module, _, name = strategy.rpartition(".")
    if module:
        import_module(module)  # an error of the user's code says more
    near = did_you_mean(name, {*names, *_names(Strategy)})
    raise ValueError(f"there is no strategy {strategy!r}{near}")


def _names(kind: type) -> set[str]:
    """Return the names of the class and of its subclasses."""
    return {kind.__name__}.union(*map(_names, kind.__subclasses__()))


def _line(text: str) -> str:
    """Return the text as one line that is not endless, with types as they are written."""
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>|typing\.", r"\1", shorten(text, 1000, placeholder=" ..."))


def _near(name: str, known: Iterable[str]) -> str:
    """Return the first part of a dotted name that is unknown, and the known name that is nearest to it."""
    parts, names = name.split("."), set(known)
    for depth in range(1, len(parts) + 1):
        begin, beginnings = ".".join(parts[:depth]), {".".join(n.split(".")[:depth]) for n in names}
        if begin not in beginnings:
            break
    return f"{begin!r}{did_you_mean(begin, beginnings)}"


def _find(file: Path, keys: Sequence[str], node: yaml.Node | None = None, outer: Sequence[Path] = ()) -> str:
    """Return the file and line of the keys, between which there may be others, or an empty string."""
    if node is None and file not in outer and file.is_file():
        with suppress(OSError, ValueError, yaml.YAMLError):  # a value may name a file that is no configuration
            node = yaml.compose(file.read_text(), yaml.SafeLoader)
    if isinstance(node, yaml.ScalarNode) and node.value.endswith((".yaml", ".yml")):
        return _find(file.parent / node.value, keys, None, (*outer, file))
    if isinstance(node, yaml.SequenceNode):
        return next(filter(None, (_find(file, keys, value, outer) for value in node.value)), "")
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        rest = keys[1:] if key.value == keys[0] else keys
        if found := _find(file, rest, value, outer) if rest else f"{file}:{key.start_mark.line + 1}: ":
            return found
    return ""


def load_yaml(text: str) -> Any:
    """Load YAML as jsonargparse does, but refuse a key that is twice in a mapping, and endless aliases."""
    try:
        _refuse_repeated(yaml.compose(text, yaml.SafeLoader), len(text) + 10_000)
        return _load_yaml(text)
    except RecursionError:
        raise yaml.YAMLError("its lists and mappings are nested too deeply.") from None
    except ValueError as error:  # such as a number of 5000 digits
        raise yaml.YAMLError(str(error)) from error


def _refuse_repeated(node: yaml.Node, limit: int) -> None:
    """Raise ``yaml.YAMLError`` for a key that is repeated, and if aliases repeat more than so many values."""
    nodes = [node]
    for node in nodes:  # which grows: aliases are expanded, as jsonargparse does where it copies what was loaded
        keys = set[str]()
        for item in node.value if isinstance(node, yaml.CollectionNode) else ():
            if isinstance(node, yaml.MappingNode):
                key, item = item
                if key.value in keys and not key.tag.endswith(":merge"):  # there may be several <<
                    line = key.start_mark.line + 1
                    raise yaml.YAMLError(f"line {line}: {key.value!r} is there a second time.")
                keys.add(key.value)
            nodes.append(item)
        if len(nodes) > limit:
            raise yaml.YAMLError(f"its aliases (*name) expand to more than {len(nodes)} values: write fewer of them.")


def message(error: Exception) -> str:
    """Return the message for an error that needs no traceback: one line, unless lt_tiled wrote several."""
    text = str(error)
    if any(sign in text for sign in ('Parser key "', "Does not validate against")):
        return explain(text)
    return text if type(error).__module__ == "lt_tiled.errors" else _line(text)


def needs_no_traceback(error: Exception) -> bool:
    """Return whether a sentence is enough: an error of lt_tiled, or of a value or file that it or a library refuses."""
    if type(error).__module__ == "lt_tiled.errors":
        return True
    packages = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
    *_, raised_in = (name for name in packages if name not in sys.stdlib_module_names)  # which says what it opens
    if raised_in == "jsonargparse" and isinstance(error.__cause__, Exception):  # of a class in the configuration
        return needs_no_traceback(error.__cause__)
    kinds = (ValueError, OSError, ImportError, MisconfigurationException, *[TypeError] * (raised_in == "lightning"))
    libraries = ("lightning", "jsonargparse", "transformers", "fsspec", "deepspeed", "pydantic")
    return isinstance(error, kinds) and raised_in in ("lt_tiled", *libraries)

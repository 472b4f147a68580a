"""What all benchmarks share: tables, a small Llama, ranks, and the measurement of time and bytes."""

from __future__ import annotations

import gc
import io
import logging
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tests.meters import peak_bytes
from tests.models import tiny_llama
from tests.world import RanksFailed, World

T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Options:
    """What the command line chooses."""

    device: torch.device = CPU
    quick: bool = False

    @property
    def rounds(self) -> int:
        """How often a step is timed."""
        return 3 if self.quick else 9

    def size(self, quick: T, here: T, on_gpu: T) -> T:
        """Return what fits the machine and the time."""
        if self.device.type == "cuda":
            return on_gpu
        return quick if self.quick else here


# Tables


@dataclass
class Table:
    """A table of Markdown with a title and a note."""

    title: str
    headings: list[str]
    note: str = ""
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        self.rows.append(list(cells))

    def text(self) -> str:
        """Return the table, aligned, so that it is read in a terminal and pasted into a page."""
        columns = zip(self.headings, *self.rows, strict=True)
        widths = [max(3, *map(len, column)) for column in columns]
        lines = [self.headings, ["-" * width for width in widths], *self.rows]
        text = f"## {self.title}\n\n"
        for line in lines:
            cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            text += f"| {' | '.join(cells)} |\n"
        return f"{text}\n{self.note}\n" if self.note else text


def marked(text: str, good: bool) -> str:
    """Return a figure with its verdict."""
    return f"{'✓' if good else '✗'} {text}"


def judged(error: float | str, bound: float) -> str:
    """Return a relative error with its verdict, or the kind of what was raised."""
    if isinstance(error, str):
        return marked(error.partition(":")[0], False)
    return marked(f"{error:.0e}", error < bound)


def machine(device: torch.device) -> str:
    name = f"{os.cpu_count()} {platform.machine()} CPU cores"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"


def usable(makers: dict[str, Callable[[], T]]) -> tuple[dict[str, T], str]:
    """Return what can be made on this machine by its name, and a note that says why others cannot."""
    found: dict[str, T] = {}
    missing = ""
    for name, make in makers.items():
        try:
            found[name] = make()
        except Exception as error:  # a package may refuse a machine with any error
            missing += f" Not measured: {name} ({error})."
    return found, missing


# A model


class Size(NamedTuple):
    """The sizes of a Llama and of its input."""

    tokens: int
    hidden: int
    intermediate: int
    layers: int
    shards: int


def llama(size: Size, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Any:
    """Return a Llama with a small vocabulary and random weights."""
    heads = {"num_attention_heads": size.hidden // 64, "num_key_value_heads": size.hidden // 64}
    sizes = {"hidden_size": size.hidden, "intermediate_size": size.intermediate, "num_hidden_layers": size.layers}
    torch.manual_seed(0)
    return tiny_llama(**sizes, **heads, vocab_size=512).to(device, dtype)


def draw(size: Size, device: torch.device = CPU) -> Tensor:
    """Return token ids ``[1, tokens]``."""
    return torch.randint(512, (1, size.tokens), generator=torch.Generator().manual_seed(0)).to(device)


def step_of(model: nn.Module, ids: Tensor) -> Callable[[], None]:
    """Return a function that runs a forward and a backward pass and frees the gradients."""

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


# Time and memory


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Return how long a run takes on the device. On a CPU this is the process time of one thread."""
    if device.type != "cuda":
        return host_seconds_of(run)
    start = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def host_seconds_of(run: Callable[[], Any]) -> float:
    """Return the process time that a run takes in one thread, which other load hardly changes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # launches into a full queue would spin
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start = time.process_time()
    run()
    seconds = time.process_time() - start
    torch.set_num_threads(threads)
    return seconds


def interleaved(
    runs: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[Callable[[], Any]], float]
) -> dict[str, list[float]]:
    """Return the times of each run in each round by a clock. A first round warms up and is left out.

    The order of the runs alternates, so that other load affects all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 1):
        order = list(runs) if index % 2 else list(reversed(runs))
        for name in order:
            seconds = clock(runs[name])
            if index:
                times[name].append(seconds)
    return times


def compared(times: dict[str, list[float]], name: str, base: str) -> tuple[float, str]:
    """Return the median of the ratios of two runs, round by round, and their range."""
    ratios = [a / b for a, b in zip(times[name], times[base], strict=True)]
    return statistics.median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"


def peak_of(run: Callable[[], Any], device: torch.device) -> int:
    """Return the bytes that a run allocates at its peak: exact on a CPU, of CUDA's allocator on a GPU."""
    if device.type != "cuda":
        return peak_bytes(run)
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


# Ranks


class Ranks:
    """Two gloo ranks for each name: packages change torch and transformers in their processes."""

    def __init__(self) -> None:
        self._worlds: dict[str, World] = {}

    def __call__(self, name: str, function: Callable[..., Any], *args: Any, timeout: float = 120) -> Any:
        """Return what a function returns on each rank, or how it failed."""
        world = self._worlds.setdefault(name, World(2))
        try:
            answers = world(attempt, function, *args, timeout=timeout)
        except RanksFailed as failure:
            return "dies" if "the process died" in str(failure) else "hangs"
        raised = [answer for answer in answers if isinstance(answer, str)]
        if raised:
            world.kill()  # the next call starts ranks anew
            return raised[0]
        return answers

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for world in self._worlds.values():
            world.kill()


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, or the error that it raises as a string. What engines print is not shown."""
    logging.disable()
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args)
    except Exception as error:  # a package may raise anything
        return f"raises {type(error).__name__}: {error}"
    finally:
        logging.disable(logging.NOTSET)

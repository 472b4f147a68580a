"""What ``python -m benchmarks.gpu`` measures: each part yields rows, and each row is measured when it is called.

On a CPU, or with ``--tiny``, the same code runs at a tiny size, so that it has run before it meets a GPU.
"""

from __future__ import annotations

import copy
import gc
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import host
from benchmarks.costs import Size, llama, loss_of, with_checkpointing
from benchmarks.longest import ON_GPU as LLAMA_8B
from benchmarks.longest import RUNGS
from benchmarks.peers import peers
from benchmarks.sheet import device_at_hand, reason
from benchmarks.step_time import ON_GPU, ratios, seconds_of, step_of
from lt_tiled import (
    Checkpointing,
    SequenceParallel,
    TiledDeepSpeedStrategy,
    TiledModelParallelStrategy,
    TiledSingleDeviceStrategy,
    Tiling,
    prepare,
)
from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.memory import PeakMemory
from lt_tiled.planner.job import make_job
from lt_tiled.policies import Tiers

ROOT = Path(__file__).parents[1]
TINY = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 512,
}
ROOM = 24 * 2**30
"""The GPU memory within which the longest sequence is sought."""
SETTINGS: dict[str, tuple[bool, bool, Tiers | None, bool]] = {
    **{name: values for name, values in RUNGS.items() if values[2] is None},
    "+ block inputs in CPU memory": (True, True, "cpu", True),
}
"""Activation checkpointing, tiled loss, offload, tiled MLPs."""
Figures = dict[str, Any]
Rows = Iterator[tuple[str, Callable[[], Figures]]]


@dataclass
class Place:
    """The device, the size and the time of a part."""

    tiny: bool
    seconds: float
    device: torch.device = field(default_factory=device_at_hand)

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.seconds
        self.config: dict[str, Any] = LLAMA_8B.model | (TINY if self.tiny else {})
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.end - time.monotonic()

    def length(self, tokens: int) -> int:
        """Return the sequence length in place of one."""
        return tokens // 512 if self.tiny else tokens

    def ids(self, tokens: int) -> Tensor:
        """Return token ids ``[1, tokens]``."""
        return torch.randint(256, (1, self.length(tokens)), device=self.device)

    def text(self, tokens: int) -> TextFiles:
        """Return text in sequences of that length."""
        return TextFiles(seq_len=self.length(tokens), max_bytes=64 * self.length(tokens))

    def build(self) -> nn.Module:
        """Return the model, made on the device."""
        torch.manual_seed(0)
        with self.device:
            model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config), dtype=self.dtype)
        return model.train()

    def policies(self, setting: str = "+ tiled MLPs", **tiling: Any) -> dict[str, Any]:
        """Return the arguments of ``prepare``, or of a strategy, for a setting."""
        recompute, loss, offload, tiled = SETTINGS[setting]
        shards: Any = 4 if self.tiny else "auto"  # which tiles nothing as small as that
        small: dict[str, Any] = {"min_bytes": 0} if self.tiny else {}
        return {
            "tiling": Tiling(shards, **tiling) if tiled else None,
            "checkpointing": Checkpointing(offload=offload, **small) if recompute else None,
            "loss": (4 if self.tiny else True) if loss else None,
        }

    def timed(self, ways: dict[str, Callable[[], float]], seconds: float) -> dict[str, list[float]]:
        """Return the seconds of each way, in one to nine rounds after one that warms up."""
        start = time.monotonic()
        for way in ways.values():
            way()
        times: dict[str, list[float]] = {name: [] for name in ways}
        for index in range(9):
            begun = time.monotonic()
            for name in list(ways)[:: 1 if index % 2 else -1]:
                times[name].append(ways[name]())
            now = time.monotonic()
            if now - start + (now - begun) > seconds:
                break
        return times

    def peak(self, run: Callable[[], Any]) -> float:
        """Return the GiB that a run allocates at its peak."""
        memory, before = PeakMemory(self.device), torch.cuda.memory_allocated()
        memory.reset()
        run()
        return (memory.read() - before) / 2**30


def tests(place: Place) -> Rows:
    """Run the tests that need a GPU, but for the longest sequences; those that train for long come last."""

    def run() -> Figures:
        files = {str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text()}
        files = {"tests/test_memory.py"} if place.tiny else files
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "gpu",
            "-k",
            "not 131072",
            "-v",
            "--tb=short",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-o", "addopts=", *sorted(files, key=lambda file: ("planner" in file, file))]
        late, seconds = "", 300 if place.tiny else place.left()
        with tempfile.TemporaryFile("w+") as printed:
            try:
                subprocess.run(command, cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT, timeout=seconds)
            except subprocess.TimeoutExpired:
                late = f"cut off after {seconds:.0f} s"
            printed.seek(0)
            return outcomes(printed.read().splitlines(), late)

    yield "pytest -m gpu", run


def outcomes(lines: list[str], late: str = "") -> Figures:
    """Count the outcomes in the lines that pytest prints, and keep what it prints of failures."""
    found = Counter(
        match[1] for line in lines if (match := re.match(r"tests/\S+::.+? (PASSED|FAILED|ERROR|SKIPPED)", line))
    )
    failed = found["FAILED"] + found["ERROR"]
    figures: Figures = {"passed": found["PASSED"], "failed": failed, "skipped": found["SKIPPED"]}
    if not found and not late:
        late = "pytest ran no test: " + "".join(lines[-1:])
    if late or failed:
        figures["printed"] = lines[-200:]
    return {**figures, "error": late} if late else figures


def offload(place: Place) -> Rows:
    """Compare steps with block inputs in CPU memory to the same steps without."""

    def run(tokens: int, share: float) -> Figures:
        ids, kept = place.ids(tokens), place.build()
        moved = copy.deepcopy(kept)
        with prepare(kept, **place.policies()), prepare(moved, **place.policies("+ block inputs in CPU memory")) as it:
            times = place.timed({"kept": step_of(kept, ids), "moved": step_of(moved, ids)}, share * place.left())
            assert it.offloader is not None
            steps, stats = len(times["kept"]) + 1, asdict(it.offloader.so_far())
        return {
            "relative step time": statistics.median(ratios(times, "moved", "kept")),
            "step [s]": statistics.median(times["kept"]),
            **{f"{name} per step": value / steps for name, value in stats.items() if value},
        }

    for tokens, share in ((8192, 0.1), (32768, 0.3), (131072, 0.9)):
        yield f"{tokens} tokens", partial(run, tokens, share)


class Watch(Callback):
    """Keeps the loss, the seconds and the peak of the last step of a run."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.memory = PeakMemory(trainer.strategy.root_device)
        self.memory.reset()
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.loss = float(outputs["loss"])  # waits for the device
        self.seconds, self.peak = time.perf_counter() - self.start, self.memory.read()


def fit(place: Place, strategy: Any, tokens: int) -> Watch:
    """Train three steps: the optimizer state exists from the second on."""
    watch = Watch()
    arguments: dict[str, Any] = {"accelerator": "gpu" if place.device.type == "cuda" else "cpu", "devices": 1}
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    torch.manual_seed(0)
    precision: Any = "bf16-true" if place.device.type == "cuda" else "32-true"
    options: dict[str, Any] = {"limit_val_batches": 0, "callbacks": [watch], **dict.fromkeys(quiet, False)}
    trainer = Trainer(strategy=strategy, precision=precision, max_steps=3, **arguments, **options)
    trainer.fit(CausalLM(place.config, tiled_loss=False), datamodule=place.text(tokens))
    return watch


def peak(place: Place, settings: tuple[str, ...] = tuple(SETTINGS), tokens: int = 16384) -> Rows:
    """Compare the peak of training steps to the prediction of ``lt-tiled plan``."""

    def run(setting: str, tokens: int) -> Figures:
        strategy = partial(TiledSingleDeviceStrategy, **place.policies(setting))
        with torch.device("meta"):
            planned = CausalLM(place.config, tiled_loss=False)
        arguments = {"strategy": strategy(), "accelerator": "gpu", "precision": "bf16-true"}
        predicted = make_job(planned, place.text(tokens), arguments).simulate().peak
        found = fit(place, strategy(), tokens)
        reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        return {
            "peak [GiB]": found.peak / 2**30,
            "predicted [GiB]": predicted / 2**30,
            "predicted over measured": predicted / found.peak,
            "reserved over allocated": reserved / max(allocated, 1),
            "step [s]": found.seconds,
        }

    for setting in settings:
        yield f"{setting}, {tokens} tokens", partial(run, setting, tokens)
    if len(settings) > 2:
        for setting in settings[-2:]:
            yield f"{setting}, {4 * tokens} tokens", partial(run, setting, 4 * tokens)


def segments(place: Place) -> Rows:
    """Train with ``expandable_segments``, which the environment of this part sets."""
    yield from peak(place, tuple(SETTINGS)[-2:], 4 * 16384)


def steps(place: Place) -> Rows:
    """Compare steps with the tiled MLPs of each package to the untiled step, and what a tile costs the host."""
    size = Size(tokens=256, hidden=64, intermediate=192, layers=2, shards=4) if place.tiny else ON_GPU
    model, ids = llama(size, place.device, place.dtype), torch.randint(256, (1, size.tokens), device=place.device)

    def run(name: str) -> Figures:
        with with_checkpointing(model, "untiled", 1) as untiled, with_checkpointing(model, name, size.shards) as tiled:
            ways = {"untiled": step_of(untiled, ids), name: step_of(tiled, ids)}
            times = place.timed(ways, place.left() / 6)
            peaks = {of: place.peak(step) for of, step in ways.items()}
        tiles = {f"{name} {count}": host.step_of(name, count, place.device) for count in (host.FEW, host.MANY)}
        return {
            "relative step time": statistics.median(ratios(times, name, "untiled")),
            "step [s]": statistics.median(times[name]),
            "relative peak": peaks[name] / max(peaks["untiled"], 1e-9),
            "host time of one tile more [µs]": host.per_tile(place.timed(tiles, place.left() / 12), name)[2],
        }

    for peer in peers():
        yield peer.name, partial(dict, missing=peer.missing) if peer.tile is None else partial(run, peer.name)


def longest(place: Place) -> Rows:
    """Find the longest sequence that trains in 24 GiB, as far as the time goes."""
    if place.device.type == "cuda":
        share = ROOM / torch.cuda.get_device_properties(place.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0))

    def run(setting: str, share: float) -> Figures:
        end, model = time.monotonic() + share * place.left(), place.build()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()  # creates its state
        low, high, seconds, tokens = 0, 0, 0.0, 4096

        def step() -> None:
            loss_of(model, place.ids(tokens)).backward()
            optimizer.step()

        with prepare(model, **place.policies(setting)):
            while not high or high - low > max(low // 8, 256):
                if low and time.monotonic() + 5 * seconds > end:
                    break
                try:
                    seconds, low = seconds_of(step, place.device), tokens
                except RuntimeError as error:
                    if not (is_oom_error(error) or "ALLOC_FAILED" in str(error)):
                        raise
                    high = tokens
                optimizer.zero_grad()
                gc.collect()  # after an error the graph may be part of a cycle
                tokens = (low + high) // 2 if high else 2 * low
        return {"tokens": low, "does not fit": high or "not reached", "step [s]": seconds}

    for index, setting in enumerate(SETTINGS):
        yield setting, partial(run, setting, 1 / (len(SETTINGS) - index))


def compared(place: Place, tokens: int, ways: dict[str, dict[str, Any]]) -> Rows:
    """Compare steps with other arguments of ``prepare`` to those of the first row."""
    ids, first = place.ids(tokens), Figures()

    def run(arguments: dict[str, Any]) -> Figures:
        model = place.build()
        with prepare(model, **arguments):
            start, step = time.monotonic(), step_of(model, ids)
            step()
            found = {"first step [s]": time.monotonic() - start, "loss": float(loss_of(model, ids).detach())}
            found["step [s]"] = statistics.median(place.timed({"": step}, place.left() / 6)[""])
            found["peak [GiB]"] = place.peak(step)
        for name, value in found.items():
            first.setdefault(name, value)
        relative = {"step time": "step [s]", "peak": "peak [GiB]"}
        return {**found, **{f"relative {name}": found[key] / first[key] for name, key in relative.items()}}

    for name, arguments in ways.items():
        yield name, partial(run, arguments)


def compiled(place: Place) -> Rows:
    """Compare compiled tiles, also as CUDA graphs, to others."""
    backend = {"backend": "aot_eager"} if place.tiny else None  # inductor would compile for minutes
    ways = {"not compiled": False, "compiled": backend or True, "CUDA graphs": backend or {"mode": "reduce-overhead"}}
    return compared(place, 16384, {name: place.policies(targets="mlp", compile=value) for name, value in ways.items()})


def head_tiles(place: Place) -> Rows:
    """Compare attention of a few heads at a time to attention of all heads."""
    counts = {f"{n} head tiles": {"sequence_parallel": SequenceParallel(head_tiles=n)} for n in (1, 2, 4, 8)}
    return compared(place, 65536, {name: {**place.policies(), **more} for name, more in counts.items()})


def engines(place: Place) -> Rows:
    """Train on one rank of FSDP2 and ZeRO-3, with block inputs in CPU memory."""

    def run(strategy: Any, **arguments: Any) -> Figures:
        try:
            found = fit(place, strategy(**place.policies("+ block inputs in CPU memory"), **arguments), 16384)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        return {"loss": found.loss, "step [s]": found.seconds, "peak [GiB]": found.peak / 2**30}

    yield "one device", partial(run, TiledSingleDeviceStrategy)
    yield "FSDP2", partial(run, TiledModelParallelStrategy)
    if find_spec("deepspeed") is None:
        yield "ZeRO-3", partial(dict, missing="No module named 'deepspeed'")
    else:
        yield "ZeRO-3", partial(run, TiledDeepSpeedStrategy, stage=3)


PARTS: dict[str, Callable[[Place], Rows]] = {
    part.__name__: part for part in (tests, offload, peak, steps, longest, compiled, segments, head_tiles, engines)
}


def measure(part: str, place: Place) -> Iterator[tuple[str, Figures]]:
    """Yield the figures of each row of a part; of one that fails, the error."""
    rows = PARTS[part](place)
    while True:
        try:
            name, run = next(rows)
        except StopIteration:
            return
        except Exception as error:  # before its first row
            yield part, {"error": f"{type(error).__name__}: {reason(error)}"}
            return
        try:
            figures = run()
        except Exception as error:  # one row must not end the others
            figures = {"error": f"{type(error).__name__}: {reason(error)}"}
        gc.collect()
        if place.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        yield name, figures

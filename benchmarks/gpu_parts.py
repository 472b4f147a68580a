"""What ``python -m benchmarks.gpu`` measures: each part yields rows, and each row is measured when it is called.

On a CPU, or with ``--tiny``, the same code runs at a tiny size, so that it has run before it meets a GPU.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn
from torch.utils.data import DataLoader, StackDataset
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import host
from benchmarks.costs import Size, llama, loss_of, with_checkpointing
from benchmarks.gpu import NO_TIME, Figures
from benchmarks.longest import ON_GPU as LLAMA_8B_4_LAYERS
from benchmarks.longest import QUIET, RUNGS
from benchmarks.peers import peers
from benchmarks.sheet import reason
from benchmarks.step_time import ON_GPU, device_peak, interleaved, ratios, seconds_of, step_of
from lt_tiled import (
    ActivationCheckpointing,
    TiledDeepSpeedStrategy,
    TiledModelParallelStrategy,
    TiledSingleDeviceStrategy,
    Tiling,
    prepare,
)
from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.memory import PeakMemory
from lt_tiled.planner.job import make_job
from lt_tiled.planner.search import plan
from lt_tiled.policies import Tiers

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
RELATIVE = {"loss": "loss", "step [s]": "step time", "peak [GiB]": "peak", "reserved [GiB]": "reserved"}
"""The figures that are also given relative to those of another row, and under which names."""
Rows = Iterator[tuple[str, Callable[[], Figures]]]


@dataclass(frozen=True)
class Setup:
    """The size of a part, the time at which it ends, and its device."""

    tiny: bool
    end: float
    """A time of ``time.monotonic``."""
    device: torch.device

    @property
    def config(self) -> dict[str, Any]:
        """The model's configuration."""
        return LLAMA_8B_4_LAYERS.model | (TINY if self.tiny else {})

    @property
    def dtype(self) -> torch.dtype:
        """That of weights and activations."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def left(self) -> float:
        """Return the seconds that are left for more than the least work: none at a tiny size."""
        return 0.0 if self.tiny else self.end - time.monotonic()

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
        return {
            "tiling": Tiling(shards, **tiling) if tiled else None,
            "activation_checkpointing": ActivationCheckpointing(offload=offload) if recompute else None,
            "loss": (4 if self.tiny else True) if loss else None,
        }

    def timed(self, variants: dict[str, Callable[[], float]], share: float) -> dict[str, list[float]]:
        """Return the seconds of each variant, in up to nine rounds within a share of the time that is left.

        There are at least three rounds, unless the part ends before.
        """
        left = self.left()
        return interleaved(variants, 9, lambda rounds, seconds: seconds > (left if rounds < 3 else share * left))


def with_ratios(found: Figures, first: Figures) -> Figures:
    """Return figures with those relative to the first row's, which ``first`` keeps."""
    for name in RELATIVE.keys() & found.keys():
        first.setdefault(name, found[name])
    return found | {f"relative {what}": found[name] / first[name] for name, what in RELATIVE.items() if name in found}


def offload(setup: Setup) -> Rows:
    """Compare steps with block inputs in CPU memory to the same steps without."""

    def run(tokens: int, share: float) -> Figures:
        ids, base = setup.ids(tokens), setup.build()
        offloaded = copy.deepcopy(base)
        policies = setup.policies("+ block inputs in CPU memory")
        with prepare(base, **setup.policies()), prepare(offloaded, **policies) as prepared:
            times = setup.timed({"base": step_of(base, ids), "offloaded": step_of(offloaded, ids)}, share)
            assert prepared.offloader is not None
            assert prepared.offloader.cpu is not None
            steps, stats = len(times["base"]) + 1, asdict(prepared.offloader.stats)
            free = prepared.offloader.cpu._free.values()
            pinned = {piece.is_pinned() for pieces in free for piece in pieces}
        return {
            "relative step time": statistics.median(ratios(times, "offloaded", "base")),
            "step [s]": statistics.median(times["base"]),
            "rounds": steps - 1,
            "pinned": pinned == {True},
            **{f"{name} per step": value / steps for name, value in stats.items() if value},
        }

    for tokens, share in ((8192, 0.05), (32768, 0.15), (131072, 0.9)):
        yield f"{tokens} tokens", partial(run, tokens, share)


class Watch(Callback):
    """Keeps the loss, the seconds and the peak of the last step of a run, whose weights are the same in each run."""

    expandable = False
    """Whether all memory that the allocator has reserved is in expandable segments."""

    def setup(self, *_: Any, **__: Any) -> None:  # before the model is built
        torch.manual_seed(0)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.memory = PeakMemory(trainer.strategy.root_device)
        self.memory.reset()
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.loss = float(outputs["loss"])  # waits for the device
        self.seconds, self.peak = time.perf_counter() - self.start, self.memory.read()
        if trainer.strategy.root_device.type == "cuda":
            self.expandable = {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()} == {True}

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        if isinstance(trainer.strategy, SingleDeviceStrategy):  # its teardown would copy all of this to the CPU
            for optimizer in trainer.optimizers:
                optimizer.state.clear()
            module.zero_grad()
            for weight in module.parameters():
                weight.data = weight.data.new_empty(0)

    def figures(self) -> Figures:
        """Return them by name."""
        return {"loss": self.loss, "step [s]": self.seconds, "peak [GiB]": self.peak / 2**30}


def fit(setup: Setup, strategy: Any, tokens: int, config: dict[str, Any] | None = None) -> Watch:
    """Train three steps on one sequence: the optimizer state exists from the second on."""
    watch, on_gpu = Watch(), setup.device.type == "cuda"
    arguments: dict[str, Any] = {"accelerator": "gpu" if on_gpu else "cpu", "devices": 1, **QUIET}
    precision: Any = "bf16-true" if on_gpu else "32-true"
    trainer = Trainer(strategy=strategy, precision=precision, max_steps=3, callbacks=[watch], **arguments)
    torch.manual_seed(0)
    data = StackDataset(input_ids=setup.ids(tokens).cpu().expand(3, -1))  # type: ignore[arg-type]  # takes sequences
    trainer.fit(CausalLM(config or setup.config, loss=False), DataLoader(data))
    return watch


def peak(setup: Setup, settings: tuple[str, ...] = tuple(SETTINGS), tokens: int = 16384) -> Rows:
    """Compare the peak of training steps to the prediction of ``lt-tiled plan``."""
    firsts: dict[int, Figures] = {}

    def run(setting: str, tokens: int) -> Figures:
        strategy = partial(TiledSingleDeviceStrategy, **setup.policies(setting))
        with torch.device("meta"):
            planned = CausalLM(setup.config, loss=False)
        arguments = {"strategy": strategy(), "accelerator": "gpu", "precision": "bf16-true"}
        predicted = plan(make_job(planned, setup.text(tokens), arguments)).peak
        found = fit(setup, strategy(), tokens)
        reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        figures = {
            **found.figures(),
            "predicted [GiB]": predicted / 2**30,
            "predicted over measured": predicted / found.peak,
            "expandable segments": found.expandable,
            "reserved over allocated": reserved / max(allocated, 1),
        }
        return with_ratios(figures, firsts.setdefault(tokens, {}))

    for setting in settings:
        yield f"{setting}, {tokens} tokens", partial(run, setting, tokens)
    if len(settings) > 2:
        for setting in settings[-2:]:
            yield f"{setting}, {4 * tokens} tokens", partial(run, setting, 4 * tokens)


def segments(setup: Setup) -> Rows:
    """Train with ``expandable_segments``, which the environment of this part sets."""

    def checked(run: Callable[[], Figures]) -> Figures:
        figures = run()
        if not figures["expandable segments"]:
            raise RuntimeError("PYTORCH_ALLOC_CONF=expandable_segments:True had no effect")
        return figures

    for name, run in peak(setup, tuple(SETTINGS)[-2:]):
        on_gpu = setup.device.type == "cuda"
        yield name, partial(checked, run) if on_gpu else partial(dict, missing="no CUDA allocator")


def steps(setup: Setup) -> Rows:
    """Compare steps with the tiled MLPs of each package to the untiled step, and what a tile costs the host."""
    size = Size(tokens=256, hidden=64, intermediate=192, layers=2, shards=4) if setup.tiny else ON_GPU
    model, ids = llama(size, setup.device, setup.dtype), torch.randint(256, (1, size.tokens), device=setup.device)

    def run(name: str) -> Figures:
        with with_checkpointing(model, "untiled", 1) as untiled, with_checkpointing(model, name, size.shards) as tiled:
            variants = {"untiled": step_of(untiled, ids), name: step_of(tiled, ids)}
            times = setup.timed(variants, 1 / 6)
            peaks = {variant: device_peak(step, setup.device) for variant, step in variants.items()}
        return {
            "relative step time": statistics.median(ratios(times, name, "untiled")),
            "step [s]": statistics.median(times[name]),
            "rounds": len(times[name]),
            "relative peak": peaks[name] / max(peaks["untiled"], 1),
        }

    def host_time(name: str) -> Figures:
        tiles = {f"{name} {count}": host.step_of(name, count, setup.device) for count in (host.FEW, host.MANY)}
        return {"host time of one tile more [µs]": host.per_tile(setup.timed(tiles, 1 / 6), name)[2]}

    found = peers()
    for peer in found:
        yield peer.name, partial(dict, missing=peer.missing) if peer.tile is None else partial(run, peer.name)
    for peer in found:
        if peer.tile is not None:
            yield f"{peer.name}, host", partial(host_time, peer.name)


def longest(setup: Setup) -> Rows:
    """Find the longest sequence that trains in 24 GiB, as far as the time goes."""

    def run(setting: str, share: float) -> Figures:
        if setup.device.type == "cuda" and not setup.tiny:
            room = ROOM / torch.cuda.get_device_properties(setup.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(room, 1.0))
        model = setup.build()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()  # creates its state
        low, high, seconds, tokens = 0, 0, 0.0, 1024

        def step() -> None:
            loss_of(model, setup.ids(tokens)).backward()
            optimizer.step()

        with prepare(model, **setup.policies(setting)):
            step()  # loads kernels, which takes longer than later steps
            optimizer.zero_grad()
            end, tokens = time.monotonic() + share * setup.left(), 4096
            while not high or high - low > max(low // 8, 256):
                if low and time.monotonic() + 5 * seconds > end:
                    break
                try:
                    seconds, low = seconds_of(step, setup.device), tokens
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


def compared(setup: Setup, tokens: int, variants: dict[str, dict[str, Any]]) -> Rows:
    """Compare steps with other arguments of ``prepare`` to those of the first row."""
    ids, first = setup.ids(tokens), Figures()

    def run(arguments: dict[str, Any]) -> Figures:
        model = setup.build()
        with prepare(model, **arguments):
            start, step = time.monotonic(), step_of(model, ids)
            step()
            found = {"first step [s]": time.monotonic() - start, "loss": float(loss_of(model, ids).detach())}
            found["step [s]"] = statistics.median(setup.timed({"": step}, 1 / 6)[""])
            if setup.device.type == "cuda":  # all of this row: replays of CUDA graphs allocate nothing
                found["reserved [GiB]"] = torch.cuda.max_memory_reserved() / 2**30
        return with_ratios(found, first)

    for name, arguments in variants.items():
        yield name, partial(run, arguments)


def compiled(setup: Setup) -> Rows:
    """Compare compiled tiles, also as CUDA graphs, to others."""
    backend = {"backend": "aot_eager"} if setup.tiny else None  # inductor would compile for minutes
    graphs = backend or {"mode": "reduce-overhead"}
    variants = {"not compiled": False, "compiled tiles": backend or True, "CUDA graphs": graphs}
    arguments = {name: setup.policies(targets="mlp", compile=value) for name, value in variants.items()}
    return compared(setup, 16384, arguments)


def engines(setup: Setup) -> Rows:
    """Train on one rank of FSDP2 and ZeRO-3 with block inputs in CPU memory, next to activation checkpointing alone.

    Each engine draws weights of its own, so losses are compared within it. FSDP2 draws them on the CPU: two layers.
    """
    firsts: dict[Any, Figures] = {}
    config = setup.config | {"num_hidden_layers": 2, "vocab_size": 512}

    def run(strategy: Any, setting: str, **arguments: Any) -> Figures:
        try:
            found = fit(setup, strategy(**setup.policies(setting), **arguments), 16384, config)
        finally:
            if torch.distributed.is_initialized() and "stage" not in arguments:  # DeepSpeed uses its first group again
                torch.distributed.destroy_process_group()
        return with_ratios(found.figures(), firsts.setdefault(strategy, {}))

    for name, row in {
        "FSDP2": partial(run, TiledModelParallelStrategy),
        "ZeRO-3": partial(run, TiledDeepSpeedStrategy, stage=3),
    }.items():
        missing = name == "ZeRO-3" and find_spec("deepspeed") is None
        for setting in ("activation checkpointing", "+ block inputs in CPU memory"):
            what = f"{name}, {setting}"
            yield what, partial(dict, missing="No module named 'deepspeed'") if missing else partial(row, setting)


def tiny(setup: Setup) -> Rows:
    """Run all other parts at a tiny size, so that errors show in the first minute."""
    for name, part in PARTS.items():
        if part not in (tiny, segments):  # which needs an environment of its own
            yield from ((f"{name}: {row}", run) for row, run in part(replace(setup, tiny=True)))


PARTS: dict[str, Callable[[Setup], Rows]] = {
    part.__name__: part for part in (tiny, offload, peak, steps, longest, compiled, segments, engines)
}


def measure(part: str, setup: Setup) -> Iterator[tuple[str, Figures]]:
    """Yield that there was no time for each row of a part, which stays if the part is killed; then its figures."""
    try:
        rows = list(PARTS[part](setup))
    except Exception as error:  # before its first row
        yield part, {"error": f"{type(error).__name__}: {reason(error)}"}
        return
    yield from ((name, {"missing": NO_TIME}) for name, _ in rows)
    for name, run in rows:
        if time.monotonic() > setup.end:
            return
        try:
            figures = run()
        except Exception as error:  # one row must not end the others
            figures = {"error": f"{type(error).__name__}: {reason(error)}"}
        gc.collect()
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        yield name, figures

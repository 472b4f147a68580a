"""Measure rates of the disk tier and step times with it: ``python -m benchmarks --only offload``.

First the same block inputs are written and read by the disk tier, with and without ``O_DIRECT``, and by ``torch.save``
and ``torch.load``, with and without ``fsync``, in turn. Then training steps with activation checkpointing are timed in
interleaved rounds: without offload, with the disk tier, and with one file for each tensor, as other trainers do it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.costs import Size, llama
from benchmarks.sheet import Sheet, machine, spread
from benchmarks.step_time import interleaved, ratios, step_of
from lt_tiled import ActivationCheckpointing, prepare
from lt_tiled.offload.disk import Disk
from lt_tiled.offload.tensors import raw_bytes

GIB = 2**30
EACH = "`torch.save`, one file each"


def offload(
    device: torch.device, directory: str, block_inputs: int = 32, mib: int = 8, tokens: int = 4096, rounds: int = 7
) -> list[Sheet]:
    """Rates on ``directory``, and step times."""
    tensors = [torch.randn(mib * 2**18) for _ in range(block_inputs)]
    return [rates(tensors, directory, rounds), steps(device, tokens, directory, rounds)]


# Rates


def rates(tensors: list[Tensor], directory: str, rounds: int) -> Sheet:
    """Write and read rates, each over all tensors at once."""
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "disk tier, page cache": _tier(tensors, directory, direct=False),
        "`torch.save`, page cache": _torch_save(tensors, directory, sync=False),
        "disk tier, `O_DIRECT`": _tier(tensors, directory, direct=True),
        "`torch.save`, fsync": _torch_save(tensors, directory, sync=True),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            times[name].append(way())
    total = sum(t.nbytes for t in tensors) / GIB
    title = f"disk, {len(tensors)} block inputs of {tensors[0].nbytes >> 20} MiB"
    sheet = Sheet("offload_rates", title, ["", "write, GiB/s", "read, GiB/s", "write, relative to next row", "range"])
    sheet.notes = [
        f"Medians of {rounds} rounds, {_filesystem(directory)}, {machine(torch.device('cpu'))}."
        " Only `O_DIRECT` reads the disk."
    ]
    written = {name: [total / write for write, _ in pairs[1:]] for name, pairs in times.items()}
    read = {name: [total / back for _, back in pairs[1:]] for name, pairs in times.items()}
    names = list(ways)
    for index, name in enumerate(names):
        of = ratios(written, name, names[index + 1]) if index % 2 == 0 else []
        last = [f"{statistics.median(of):.1f}", spread(of)] if of else ["", ""]
        sheet.add(name, f"{statistics.median(written[name]):.2f}", f"{statistics.median(read[name]):.2f}", *last)
    return sheet


def _filesystem(directory: str) -> str:
    """Its kind, as the system lists it; and whether files on it can be opened past the page cache."""
    lines = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    mounts = {mount: kind for _, mount, kind, *_ in lines}
    place = Path(directory).resolve()
    kind = next(mounts[str(parent)] for parent in (place, *place.parents) if str(parent) in mounts)
    disk = Disk(directory)
    direct = disk.direct
    disk.close()
    return kind if direct else f"{kind}, which has no `O_DIRECT`"


def _tier(tensors: list[Tensor], directory: str, direct: bool) -> Callable[[], tuple[float, float]]:
    disk = Disk(directory, direct=direct)

    def run() -> tuple[float, float]:
        start = time.perf_counter()
        stored = [disk.store(raw_bytes(t), None) for t in tensors]
        for _, _, wait in stored:
            wait()
        middle = time.perf_counter()
        for (place, _, _), t in zip(stored, tensors, strict=True):
            disk.load(place, t.nbytes, t.device)()
        end = time.perf_counter()
        return middle - start, end - middle

    return run


def _torch_save(tensors: list[Tensor], directory: str, sync: bool) -> Callable[[], tuple[float, float]]:
    def run() -> tuple[float, float]:
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            files = [Path(folder) / str(i) for i in range(len(tensors))]
            start = time.perf_counter()
            for tensor, file in zip(tensors, files, strict=True):
                with file.open("wb") as stream:
                    torch.save(tensor, stream)
                    if sync:
                        stream.flush()
                        os.fsync(stream.fileno())
            middle = time.perf_counter()
            for file in files:
                torch.load(file)
            return middle - start, time.perf_counter() - middle

    return run


# Steps


def steps(device: torch.device, tokens: int, directory: str, rounds: int) -> Sheet:
    """Return step times relative to the same step without offload."""
    size = Size(tokens=tokens, hidden=512, intermediate=1536, layers=4)
    ids = torch.randint(512, (1, size.tokens), device=device)
    policies = {
        "no offload": ActivationCheckpointing(),
        "disk tier, `O_DIRECT`": ActivationCheckpointing(offload="disk", directory=directory),
        "disk tier, page cache": ActivationCheckpointing(offload="disk", directory=directory, direct_io=False),
        **({"CPU memory": ActivationCheckpointing(offload="cpu")} if device.type == "cuda" else {}),
        EACH: ActivationCheckpointing(),
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        models = {name: llama(size, device) for name in policies}
        for name, policy in policies.items():
            stack.enter_context(prepare(models[name], activation_checkpointing=policy))
        ways = {name: step_of(model, ids) for name, model in models.items()}
        ways[EACH] = _one_file_each(models[EACH], ways[EACH], folder)
        times = interleaved(ways, rounds)
    sheet = Sheet(
        "offload_steps",
        f"a training step with offload, {tokens} tokens",
        ["", "relative to no offload, median", "range"],
    )
    sheet.notes = [f"{rounds} rounds, {machine(device)}."]
    for name in ways:
        of = ratios(times, name, "no offload")
        sheet.add(name, f"{statistics.median(of):.2f}", spread(of))
    return sheet


def _one_file_each(model: nn.Module, step: Callable[[], float], folder: Path) -> Callable[[], float]:
    """Run the step with the input of each block but the last in a file of its own."""
    count, wanted = 0, set[int]()

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        wanted.add(args[0].data_ptr())

    for layer in model.model.layers[:-1]:  # type: ignore[index, union-attr]
        layer.register_forward_pre_hook(note)

    def pack(tensor: Tensor) -> tuple[Path, torch.device] | Tensor:
        nonlocal count
        if tensor.data_ptr() not in wanted:
            return tensor
        wanted.discard(tensor.data_ptr())
        count += 1
        file = folder / str(count)
        torch.save(tensor.cpu(), file)
        return file, tensor.device

    def unpack(packed: tuple[Path, torch.device] | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        tensor: Tensor = torch.load(packed[0], map_location=packed[1])
        packed[0].unlink()
        return tensor

    def run() -> float:
        wanted.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return step()

    return run

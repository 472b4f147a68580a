"""The check that all ranks of a group, which share each sequence, were given the same batch.

The ranks exchange a few numbers on the host, once for each forward pass, and all of them raise the same error. Names,
shapes and dtypes are compared at once. So are values, but for those of later passes on a GPU: they are copied to the
host without a wait for the GPU, and compared with the next pass, or at the end of the Trainer's training.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from math import prod
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lt_tiled.sequence_parallel.collectives import begun

ROWS, WIDTH = 64, 16
"""How many places of floating-point tensors are compared, and how many numbers of each, as of a token's features."""
TOLERANCE = 0.05
"""Their difference, relative to their norm: devices may round differently, and other tokens differ by more."""
MAX_DIGESTED = 2**24
"""Of larger tensors of integers, which are masks, the sums of the rows and as many entries are compared."""

_hosts: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a gloo group of the same ranks. Each of them makes it with the first call, unless the group is one."""
    if group not in _hosts:
        if "cpu:gloo" in dist.get_backend_config(group):
            return group
        ranks = dist.get_process_group_ranks(group)
        _hosts[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _hosts[group]


class SameBatch:
    """Compares the batches of the ranks of a group that shares each sequence."""

    def __init__(self, owner: str, group: dist.ProcessGroup) -> None:
        self.owner, self.size, self._group = owner, group.size(), group
        self._last: tuple[Tensor, torch.cuda.Event | None] | None = None
        """The values of the last pass, and when they are on the host."""
        self.compared = 0
        """How often values were compared."""

    @torch.no_grad()
    def check(self, inputs: Iterable[tuple[str, object]]) -> None:
        """Compare the tensors among named inputs. All ranks raise if they differ, or if one failed and went on."""
        tensors = [(name, value) for name, value in inputs if isinstance(value, Tensor)]
        described = zlib.crc32(repr([(name, t.dtype, [*t.shape]) for name, t in tensors]).encode())
        shapes = ", ".join(f"{name} {[*t.shape]}" for name, t in tensors)
        self._compare(described, self._on_host(_values([t for _, t in tensors])), shapes)

    def check_last(self) -> None:
        """Compare the values of the last pass on a GPU, where no other pass follows."""
        if self._last is not None and (arrived := self._last[1]) is not None:
            arrived.synchronize()
            values, self._last = self._last[0], None
            self._compare(0, values, "the last pass")

    def _compare(self, described: int, values: Tensor, shapes: str) -> None:
        mine = torch.cat([torch.tensor([begun(self._group), described]), values])
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine, group=host_group(self._group))
        self.compared += 1
        for rank, other in enumerate(every):
            if other[0] != every[0][0]:
                raise RuntimeError(
                    f"{self.owner}: rank {rank} of a group that shares each sequence took part in {int(other[0])}"
                    f" exchanges so far, and rank 0 in {int(every[0][0])}. One of them failed and went on, or left out"
                    " a pass, and what the others computed since is wrong: end all ranks when one of them fails."
                )
            if other[1] != every[0][1]:
                how = f"of other shapes; here {shapes}"
            elif _differ(every[0][2:], other[2:]):
                how = f"with other values in {shapes}"
            else:
                continue
            raise ValueError(
                f"{self.owner} was given a batch on rank {rank} of a group that shares each sequence, and another on"
                f" rank 0 ({how}). All {self.size} ranks of a group need the same batch. Let Lightning set the sampler"
                " (use_distributed_sampler=True), or give yours num_replicas=strategy.data_world_size,"
                " rank=strategy.data_rank and the same seed on all ranks. If they are the same and random numbers"
                " change them in the model, set SequenceParallel(batch='trust')."
            )

    def _on_host(self, values: Tensor) -> Tensor:
        """Return values on the host; on a GPU, but for the first time, those of the last pass."""
        if self._last is None or values.device.type != "cuda":
            self._last = torch.zeros(values.shape, dtype=values.dtype), None
            return values.cpu()
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        copy.copy_(values, non_blocking=True)
        (before, arrived), self._last = self._last, (copy, torch.cuda.current_stream(values.device).record_event())
        if arrived is not None:
            arrived.synchronize()
        return before


def _values(tensors: list[Tensor]) -> Tensor:
    """Return a digest of the integers, and bits of some floating-point numbers: ``[1 + ROWS * WIDTH]``, int64."""
    device = tensors[0].device if tensors else torch.device("cpu")
    values = torch.zeros(1 + ROWS * WIDTH, dtype=torch.int64, device=device)
    tensors = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    floats = [t for t in tensors if t.is_floating_point() and t.numel()][:ROWS]
    for tensor, part in zip(floats, values[1:].view(ROWS, WIDTH).tensor_split(max(1, len(floats))), strict=False):
        sample = _sampled(tensor, len(part)).to(device)
        part[: len(sample), : sample.shape[1]] = sample.view(torch.int32)
    for tensor in tensors:
        if not tensor.is_floating_point():
            values[0] = values[0] * 31 + _digest(tensor).to(device)
    return values


def _digest(tensor: Tensor) -> Tensor:
    """Return a number that tells a tensor of integers from others."""
    if tensor.numel() > MAX_DIGESTED:
        step = -(-tensor.numel() // MAX_DIGESTED)
        places = torch.arange(0, tensor.numel(), step, device=tensor.device)
        sampled = tensor[torch.unravel_index(places, tensor.shape)]
        return _digest(sampled) * 31 + _digest(tensor.sum(-1, dtype=torch.int64))
    flat = tensor.reshape(-1).to(torch.int64)
    mixed = (flat + 1) * (torch.arange(len(flat), device=flat.device) * 0x1E3779B97F4A7C15 + 1)
    return (mixed ^ (mixed >> 29)).sum()


def _sampled(tensor: Tensor, rows: int) -> Tensor:
    """Return some of the features of evenly spaced tokens, ``[at most rows, at most WIDTH]``, in float32."""
    *leading, width = tensor.shape or (1,)
    places = torch.linspace(0, prod(leading) - 1, min(rows, prod(leading)), device=tensor.device).long()
    tokens = tensor[torch.unravel_index(places, leading)] if leading else tensor.reshape(1, -1)
    return tokens[:, :: max(1, width // WIDTH)][:, :WIDTH].float().contiguous()


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether values differ by more than rounding, and otherwise than by dropout.

    Dropout in front of the blocks leaves some of the features of each token equal, and another token hardly any.
    """
    if one[0] != other[0]:
        return True
    a, b = (values[1:].to(torch.int32).view(torch.float32).view(ROWS, WIDTH) for values in (one, other))
    counted = (a != 0) | (b != 0)
    near = (a - b).abs() <= TOLERANCE * a[a.isfinite()].square().mean().sqrt()
    equal = (near | (a == b) | (a.isnan() & b.isnan())) & counted  # masks may hold infinite numbers
    rows = counted.any(1)
    if not rows.any():
        return False
    share = equal[rows].sum(1) / counted[rows].sum(1)
    return bool((share <= 1 / 8).float().mean() > (0 if share.median() > 3 / 4 else 0.1))

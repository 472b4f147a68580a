"""The self-check of sequence parallelism: a few tokens, whole on each rank and shared, must give the same.

It also compares what attention is given: queries and keys that were rotated by the positions of a rank's own tokens
differ as a whole, where the loss would differ in its fourth digit. It also runs on more tokens than the lengths above
which a model computes something else, as far as its configuration names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lt_tiled.recompute.buffers import ModuleState
from lt_tiled.recompute.mode import random_state_kept
from lt_tiled.sequence_parallel.region import Region, entered

TOKENS = 4
"""Tokens of each rank; the first rank has one more, as lengths may be uneven."""
MOST_TOKENS = 2**13
"""No length above this one is checked with as many tokens."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Of the norm of a difference, relative to the norm: models of float64 may compute a part in float32."""
TF32 = 1e-2
"""For float32, where its products may be rounded to TF32, with errors of 1e-3, or autocast may round to 16 bits."""
COARSE = 0.1
"""For 16-bit dtypes."""
_OF_TOKENS = ("window", "chunk")
"""Parts of the names of lengths in tokens that a token can see."""
_OF_POSITIONS = ("original_max_position", "floor_scale", "seq_length", "seq_len", "logn", "log_n")
"""Parts of the names of positions from which others are scaled."""
UNNAMED = (64, 256)
"""Lengths past which models without a configuration are checked: attention may be scaled by the logarithm of one."""
_REMEDY = (
    "Use the sdpa, flash or flex attention of transformers, pass position_ids that the model reads, or name the modules"
    " that are independent of this in SequenceParallel(targets=...)."
)


def check_shared(
    module: nn.Module,
    owner: str,
    device: torch.device,
    regions: Sequence[Region],
    run: Callable[[Region], Tensor],
    blocks: bool,
) -> None:
    """Compare a call of a module with its tokens on one rank and shared by the group, in evaluation mode.

    All ranks raise ``ValueError`` if they differ on any.

    Args:
        module: What runs.
        owner: The name in messages.
        device: Where it runs.
        regions: A region of one rank, and one of the group. They record what attention is given.
        run: Calls the module in a region and returns its output for the rank's own tokens, ``[B, n, ...]``, or the
            loss of all.
        blocks: Whether all of the module is in the region. Otherwise it may attend elsewhere, and is not checked if it
            cannot run on so few tokens.
    """
    outputs: list[Tensor] = []
    for region in regions:
        try:
            outputs.append(_run_apart(module, device, region, run))
        except (RuntimeError, IndexError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError | dist.DistError):
                raise
            if outputs:
                raise ValueError(
                    f"{owner} runs on {region.total} tokens, and cannot run on the {region.length} of them that are"
                    f" this rank's ({error}). It may read something of all tokens from an attribute, as positions, or"
                    f" have an attention function of its own. Pass it what it reads as an argument. {_REMEDY}"
                ) from error
            if not blocks:  # on all ranks: they have the same tokens
                return
            raise ValueError(
                f"{owner} cannot run on {region.total} tokens, with which sequence parallelism checks it ({error})."
                f" It may need a number of tokens that is a product of others, as of an image. {_REMEDY}"
            ) from error
    dtype = _computes_in(module, regions[0], outputs[0])
    # Positions of the first rank begin at 0: it may find nothing.
    problems: list[str | None] = [None] * regions[1].size
    dist.all_gather_object(problems, _difference(owner, regions, outputs, blocks, dtype), group=regions[1].group)
    for problem in problems:
        if problem is not None:
            raise ValueError(problem)


def _run_apart(module: nn.Module, device: torch.device, region: Region, run: Callable[[Region], Tensor]) -> Tensor:
    """Return the output in a region. Everything is left as it was."""
    with torch.no_grad(), random_state_kept(device), _as_it_was(module), entered(region):
        for part in module.modules():
            part.training = False
        return run(region)


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Undo changes of buffers and attributes, training modes among them."""
    state = ModuleState(list(module.modules()))
    try:
        yield
    finally:
        state.put_back()


def _computes_in(module: nn.Module, region: Region, output: Tensor) -> torch.dtype:
    """Return the dtype in which a module computes: attention's, or else the narrowest of the weights and the output."""
    tensors = [region.record[0][3]] if region.record else [output, *module.parameters()]
    return min((t.dtype for t in tensors if t.is_floating_point()), key=lambda dtype: dtype.itemsize)


def _difference(
    owner: str, regions: Sequence[Region], outputs: Sequence[Tensor], blocks: bool, dtype: torch.dtype
) -> str | None:
    """Return what differs, if anything does."""
    alone, shared = regions
    in_one, in_shared = alone.record or [], shared.record or []
    if blocks and len(in_one) != len(in_shared):
        return (
            f"{owner} computes attention {len(in_one)} times for {alone.total} tokens and {len(in_shared)} times for"
            f" {shared.total} that {shared.size} ranks share. {_REMEDY}"
        )
    for index, (everything, mine) in enumerate(zip(in_one, in_shared, strict=True) if blocks else ()):
        share = mine[0]
        for place, name, heads in ((1, "queries", share.heads), (2, "keys", share.keys), (3, "values", share.keys)):
            if error := _excess(mine[place], everything[place][:, heads], dtype):
                return (
                    f"{owner} gives attention {index} other {name} when {shared.size} ranks share the sequence"
                    f" (relative difference {error:.1e}). It may compute positions from the number of tokens that it"
                    f" is given, or mix tokens outside of attention. {_REMEDY}"
                )
    expected = outputs[0] if outputs[0].shape == outputs[1].shape else shared.local(outputs[0])
    if error := _excess(outputs[1], expected, dtype):
        unseen = "" if in_shared else " None of its attention was seen."
        return (
            f"{owner} has another output when {shared.size} ranks share the sequence (relative difference"
            f" {error:.1e}).{unseen} It may mix tokens in other code than an attention function of transformers or"
            " F.scaled_dot_product_attention, compute something from the number of tokens that it is given, as a scale,"
            f" or use those of one rank outside of its blocks. {_REMEDY}"
        )
    return None


def _excess(found: Tensor, true: Tensor, dtype: torch.dtype) -> float:
    """Return the relative difference if it is above the tolerance, and 0 otherwise.

    ``dtype`` is that in which the module computes: a float32 tensor of a module of 16 bits was upcast.
    """
    same = (found == true) | (found.isnan() & true.isnan())  # infinite ones too
    difference = torch.where(same, 0.0, (found - true).double())
    error = float(difference.norm() / true.double().nan_to_num(0.0, 0.0, 0.0).norm().clamp_min(1e-30))
    rounded = rounds_products() or torch.is_autocast_enabled(true.device.type) or dtype.itemsize < 4
    tolerance = TF32 if rounded and true.dtype == torch.float32 else TOLERANCE.get(true.dtype, COARSE)
    return 0.0 if error <= tolerance else error


def rounds_products() -> bool:
    """Whether products of float32 may be rounded to TF32 or bfloat16."""
    # torch.get_float32_matmul_precision() raises where these attributes were set.
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    return any(backend.fp32_precision in ("tf32", "bf16") for backend in backends)


def switches(config: Any) -> tuple[list[int], list[int]]:
    """Return the numbers of tokens, and the positions, above which a model of transformers computes otherwise."""
    fields = config.to_dict()
    of_tokens, of_positions = (
        {value for name, value in _lengths(fields) if any(part in name for part in parts)}
        for parts in (_OF_TOKENS, _OF_POSITIONS)
    )
    rope = [fields.get(name) for name in ("rope_parameters", "rope_scaling")]
    if "dynamic" in str(rope) and (longest := fields.get("max_position_embeddings")):
        of_positions.add(longest)
    return sorted(of_tokens), sorted(of_positions)


def _lengths(fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _lengths(value)
        elif isinstance(value, int) and value > 1:
            yield str(name), value

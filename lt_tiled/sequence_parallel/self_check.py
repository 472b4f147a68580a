"""The self-check of sequence parallelism: a few tokens, whole on each rank and shared, must give the same.

It compares what attention is given, too: queries and keys that were rotated by the positions of a rank's own tokens
differ as a whole, where the loss would differ in its fourth digit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lt_tiled.sequence_parallel.region import Region, entered
from lt_tiled.tiling.observe import Observation
from lt_tiled.tiling.recompute import random_state_kept

TOKENS = 4
"""Tokens of each rank; the first rank has one more, as lengths may be uneven."""
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Of the norm of a difference, relative to the norm."""
TF32 = 1e-2
"""For float32, where its products may be rounded to TF32, with errors of 1e-3, or autocast may round to 16 bits."""
COARSE = 0.1
"""For 16-bit dtypes."""
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
    blocks: bool = True,
) -> None:
    """Compare a call of a module with its tokens on one rank and shared by the group, in evaluation mode.

    Args:
        module: What runs.
        owner: The name in messages.
        device: Where it runs.
        regions: A region of one rank, one of the group, and one of the group with head tiles if it has some. The first
            two record what attention is given.
        run: Calls the module in a region and returns its output for the rank's own tokens, ``[B, n, ...]``, or the
            loss of all.
        blocks: Whether all of the module is in the region. Otherwise it may attend elsewhere, and is not checked if it
            cannot run on so few tokens.

    Raises:
        ValueError: On all ranks, if they differ on any, or if the module cannot run on so few tokens.
    """
    whole, shared = regions[:2]
    modules = list(module.modules())
    with torch.no_grad(), random_state_kept(device), Observation(owner, (module,), "").restored("the comparison"):
        for part in modules:
            part.training = False
        try:
            expected = _run_in(whole, run)
        except (RuntimeError, IndexError, TypeError) as error:  # on all ranks: they have the same tokens
            if not blocks:
                return
            raise ValueError(
                f"{owner} cannot run on {whole.total} tokens, with which sequence parallelism checks it ({error})."
                f" It may need a number of tokens that is a product of others, as of an image. {_REMEDY}"
            ) from error
        if expected.dim() > 1:
            expected = shared.local(expected)
        found, *in_parts = [_run_in(region, run) for region in regions[1:]]
    problem = _difference(owner, whole, shared, found, expected, blocks)
    for parts, region in zip(in_parts, regions[2:], strict=True):
        if problem is None and (off := _error(parts, expected)) > _tolerance(expected, _values_dtype(whole)):
            problem = (
                f"{owner} has another output when its heads are computed in {region.head_tiles} parts (relative"
                f" difference {off:.1e}). It may compute something of all of its heads, as a norm: set head_tiles=1."
            )
    problems: list[str | None] = [problem]
    if shared.group is not None:  # the first rank's own positions begin at 0, so it may find nothing where others do
        problems = [None] * shared.size
        dist.all_gather_object(problems, problem, group=shared.group)
    if problem := next(filter(None, problems), None):
        raise ValueError(problem)


def _run_in(region: Region, run: Callable[[Region], Tensor]) -> Tensor:
    with entered(region):
        return run(region)


def _difference(owner: str, whole: Region, shared: Region, found: Tensor, expected: Tensor, blocks: bool) -> str | None:
    """Return what differs, if anything does."""
    of_whole, of_shared = whole.record or [], shared.record or []
    if blocks and len(of_whole) != len(of_shared):
        return (
            f"{owner} computes attention {len(of_whole)} times for {whole.total} tokens and {len(of_shared)} times for"
            f" {shared.total} that {shared.size} ranks share. {_REMEDY}"
        )
    values = _values_dtype(whole)
    for index, (everything, mine) in enumerate(zip(of_whole, of_shared, strict=True) if blocks else ()):
        share, *here = mine
        for name, one, other in zip(("queries", "keys", "values"), everything[1:], here, strict=True):
            heads = share.queries if name == "queries" else share.keys
            if (error := _error(other, one[:, heads])) > _tolerance(one, values):
                return (
                    f"{owner} gives attention {index} other {name} when {shared.size} ranks share the sequence"
                    f" (relative difference {error:.1e}). It may compute positions from the number of tokens that it"
                    f" is given, or mix tokens outside of attention. {_REMEDY}"
                )
    if (error := _error(found, expected)) > _tolerance(expected, values):
        unseen = "" if of_shared else " None of its attention was seen."
        return (
            f"{owner} has another output when {shared.size} ranks share the sequence (relative difference"
            f" {error:.1e}).{unseen} It may mix tokens in other code than an attention function of transformers or"
            f" F.scaled_dot_product_attention, or use those of one rank outside of its blocks. {_REMEDY}"
        )
    return None


def _values_dtype(region: Region) -> torch.dtype | None:
    """Return the dtype of the values that attention was given, in which a module computes."""
    return region.record[0][3].dtype if region.record else None


def _error(found: Tensor, true: Tensor) -> float:
    difference = torch.where(found.isnan() & true.isnan(), 0.0, (found - true).double())
    return float(difference.norm() / true.double().nan_to_num().norm().clamp_min(1e-30))


def _tolerance(tensor: Tensor, values: torch.dtype | None) -> float:
    """Return the tolerance for a tensor of a module that gives attention values of a dtype: others are upcast."""
    rounded = rounds_products() or torch.is_autocast_enabled(tensor.device.type)
    if tensor.dtype == torch.float32 and (rounded or values != torch.float32):
        return TF32
    return TOLERANCE.get(tensor.dtype, COARSE)


def rounds_products() -> bool:
    """Whether products of float32 may be rounded to TF32 or bfloat16."""
    # torch.get_float32_matmul_precision() raises where these attributes were set.
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    return any(backend.fp32_precision in ("tf32", "bf16") for backend in backends)

"""Layers with a state, as they run on a GPU: one kernel for each rule, with its memory and its FLOPs.

Without kernels, transformers computes a rule in torch, chunk by chunk or token by token: a plan for a million tokens
would take as many operations, and count memory that no kernel needs. So a plan for a GPU counts what the kernels of
flash-linear-attention, mamba_ssm and causal_conv1d save and allocate. Their chunks are small, so that everything but
the states of the chunks grows with the tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from lt_tiled.planner.ledger import Ledger, Work
from lt_tiled.sequence_parallel.states import CONVOLUTION, FUSED, RULES, functions_of
from lt_tiled.training_step.step import nothing, swapped

_FLOAT = 4
"""Bytes of a number in float32."""


@dataclass(frozen=True)
class Kernel:
    """What one call of a kernel needs besides its inputs and its output, in bytes, and the FLOPs of its forward pass.

    The backward pass has three times the FLOPs: two products for each one, and those that it computes again.
    """

    saved: int
    forward: int = 0
    """What is alive at the peak of the forward pass besides what is saved."""
    backward: int = 0
    """What is alive at the peak of the backward pass besides gradients and what was saved."""
    flops: int = 0
    output: bool = False
    """Whether the output is saved."""
    replaced: tuple[str, ...] = ()
    """The inputs that it saves only in another form, which is part of ``saved``."""


def _delta_rule(a: dict[str, Any]) -> Kernel:
    """Return that of ``chunk_gated_delta_rule`` or ``chunk_kda`` of flash-linear-attention, with chunks of 64 tokens.

    Saved are normalized queries and keys, the sums of the decay in float32, and a triangular matrix for each chunk, of
    which KDA has two. Temporary are ``w``, ``u``, new values and the states of the chunks, and in the backward pass
    their gradients: https://github.com/fla-org/flash-linear-attention, ``fla/ops/gated_delta_rule/chunk.py`` and
    ``fla/ops/kda/chunk.py``.
    """
    query, key, value, decay = a["query"], a["key"], a["value"], a["g"]
    (batch, tokens, heads, width), keys, each = value.shape, key.shape[-1], value.element_size()
    rows = batch * tokens * heads
    states = batch * ceil(tokens / 64) * heads * keys * width * each
    matrices = rows * 64 * each * (decay.dim() - 2)
    normed = a.get("use_qk_l2norm_in_kernel", False)
    norms = query.nbytes + key.nbytes + 2 * _FLOAT * rows if normed else 0
    values, w = value.nbytes, rows * keys * each
    return Kernel(
        saved=_FLOAT * decay.numel() + matrices + norms,
        forward=w + 2 * values + states,
        backward=2 * w + 4 * values + 2 * states + _FLOAT * decay.numel(),
        flops=2 * rows * (64 * (3 * keys + 2 * width) + 3 * keys * width),
        replaced=("query", "key") if normed else (),
    )


def _chunk_scan(a: dict[str, Any]) -> Kernel:
    """Return that of ``mamba_chunk_scan_combined`` of mamba_ssm.

    Saved are the output and the sums of the decay. Temporary are the products of B and C in each chunk, and the states
    of the chunks in float32, with their gradients in the backward pass:
    https://github.com/state-spaces/mamba, ``mamba_ssm/ops/triton/ssd_combined.py``.
    """
    x, B, chunk = a["hidden_states"], a["B"], a["chunk_size"]
    (batch, tokens, heads, width), (groups, size) = x.shape, B.shape[2:]
    chunks = batch * ceil(tokens / chunk)
    steps = _FLOAT * chunks * chunk * heads
    states = _FLOAT * chunks * heads * width * size
    half = states * x.element_size() // _FLOAT
    products = _FLOAT * chunks * groups * chunk * chunk
    of_groups = _FLOAT * B.numel()
    within = chunk * (groups * size + heads * width)
    return Kernel(
        saved=steps,
        forward=steps + half + max(states, products),
        backward=2 * steps + products + max(2 * states + 2 * half, 2 * half + products + 2 * of_groups + 3 * steps),
        flops=2 * chunks * chunk * (within + 2 * heads * width * size),
        output=True,
    )


def _convolution(a: dict[str, Any]) -> Kernel:
    """Return that of ``causal_conv1d_fn`` of causal_conv1d, whose backward pass computes the activation again."""
    return Kernel(saved=0, flops=2 * a["hidden_states"].numel() * a["weight"].shape[-1])


_KERNELS: dict[str, Callable[[dict[str, Any]], Kernel]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _chunk_scan,
    CONVOLUTION: _convolution,
}


@contextmanager
def with_kernels(model: nn.Module, ledger: Ledger) -> Iterator[None]:
    """Let the layers of a model run kernels that allocate and compute nothing else than their results."""
    with ExitStack() as stack:
        for table, names in functions_of(model):
            for name in names:
                # A layer whose fused kernel returns None calls the functions that are counted here.
                kernel = nothing if name == FUSED else partial(_run, name, ledger)
                stack.enter_context(swapped(table, name, kernel))
        yield


def _run(name: str, ledger: Ledger, *args: Any, **kwargs: Any) -> Any:
    rule = RULES.get(name)
    names = ("hidden_states", "weight", "bias") if rule is None else tuple(rule.dims)
    arguments = dict(zip(names, args, strict=False)) | kwargs
    kernel = _KERNELS[name](arguments)
    inputs = {name: value for name in names if isinstance(value := arguments.get(name), Tensor)}
    like = inputs["hidden_states" if rule is None else rule.output]
    saves = [name not in kernel.replaced for name in inputs]
    output = _Kernel.apply(kernel, ledger, like, saves, *inputs.values())
    return (output, None) if rule is not None and rule.with_state else output


class _Kernel(torch.autograd.Function):
    """Allocates what a kernel does, and counts its FLOPs."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, ledger: Ledger, like: Tensor, saves: list[bool], *inputs: Tensor) -> Tensor:
        ctx.kernel, ctx.ledger = kernel, ledger
        ctx.shapes = [(t.shape, t.dtype) for t in inputs]
        saved, output = _bytes(kernel.saved), torch.empty_like(like, memory_format=torch.contiguous_format)
        _bytes(kernel.forward)
        kept = [t for t, keep in zip(inputs, saves, strict=True) if keep]
        ctx.save_for_backward(saved, *kept, *([output] if kernel.output else []))
        ledger.work += Work(products=kernel.flops)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _ = ctx.saved_tensors  # recomputes the block
        gradients = []
        for (shape, dtype), needed in zip(ctx.shapes, ctx.needs_input_grad[4:], strict=True):
            gradients.append(torch.empty(shape, dtype=dtype, device=gradient.device) if needed else None)
        _bytes(ctx.kernel.backward)
        ctx.ledger.work += Work(products=3 * ctx.kernel.flops)
        return None, None, None, None, *gradients


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8)

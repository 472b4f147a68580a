"""What a tiling policy names, or ``"auto"`` finds: MLPs, norms, and the projections of attention behind these."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from lt_tiled.errors import NothingFoundError
from lt_tiled.modules.blocks import find_blocks
from lt_tiled.modules.feed_forward import (
    ONE_KERNEL,
    Tileable,
    find_feed_forwards,
    is_norm,
    mixes_tokens,
    norms_of,
    projections,
)
from lt_tiled.modules.find import children_of, find_named, full_shape, outermost, walk
from lt_tiled.modules.patch import roots
from lt_tiled.policies import Tiling


def find_tileable(model: nn.Module, tiling: Tiling) -> list[Tileable]:
    """Return the modules that the policy names: with ``"mlp"`` the MLP of every block, with ``"auto"`` also norms.

    Raises:
        NothingFoundError: If there is no MLP.
    """
    targets = tiling.targets
    wanted = [targets] if isinstance(targets, str) or callable(targets) else targets
    # 1. What is named comes first: it is tiled by itself, also where it stands next to an MLP.
    modules = [target for target in wanted if target not in ("auto", "mlp")]
    found = {module: Tileable(path, module, named=True) for path, module in find_named(model, modules, "Tiling")}
    # 2. The blocks' MLPs, each once.
    if "auto" in wanted or "mlp" in wanted:
        mlps: list[Tileable] = []
        for path, block in find_blocks(model) or [("", model)]:
            mlps += find_feed_forwards(block, path)
        if not mlps:
            raise NothingFoundError(
                f"Tiling found no MLP in {type(model).__name__} (a child of a block with linear layers from hidden_size"
                " to intermediate_size and back): name it, as in Tiling(targets=['MyMLP']) or"
                " Tiling(targets='layers.*.mlp'), or pass tiling=False."
            )
        for mlp in mlps:
            found.setdefault(mlp.module, mlp)
        outer = outermost((tileable.path, module) for module, tileable in found.items())
        found = {module: found[module] for _, module in outer}
    # 3. The norms outside of all this.
    tileables = list(found.values())
    if "auto" in wanted:
        tileables += find_norms(model, tileables)
    return tileables


def find_norms(model: nn.Module, found: Sequence[Tileable]) -> list[Tileable]:
    """Return the norms outside of what was found, those before attention with the projections behind them.

    Norms in Python hold several float32 tensors of the size of the hidden states. ``nn.LayerNorm`` and ``nn.RMSNorm``
    are one kernel and are left out.
    """
    taken: set[nn.Module] = set()
    for tileable in found:
        for module in (*roots(tileable.module, tileable.parts), *tileable.before, *tileable.after):
            taken.update(module.modules())
    # The first norm of a block stands before attention. A guess: what the block does with its output decides.
    blocks: dict[nn.Module, nn.Module] = {}
    for _, block in find_blocks(model):
        stream, _ = norms_of(block)
        blocks.update((norm, block) for norm in stream[:1])
    hidden = 1
    norms: dict[nn.Module, str] = {}
    for path, norm in walk(model):
        if is_norm(norm) and not any(norm.children()):
            for weight in norm.parameters():
                hidden = max(hidden, prod(full_shape(weight)))
            if norm not in taken and not isinstance(norm, ONE_KERNEL):
                norms.setdefault(norm, path)
    tileables: list[Tileable] = []
    for norm, path in norms.items():
        parent = blocks.get(norm)
        behind = [] if parent is None else _projections_of_attention(parent)
        tileables.append(Tileable(path, norm, parent=parent, after=behind, norm_of=hidden))
    return tileables


def _projections_of_attention(block: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for name, child in children_of(block):
        for _, part in children_of(child) if mixes_tokens(name, child) else ():
            for projection, _, _ in projections(part):
                # The product of quantized weights runs in a custom Function: the recompute could not leave it out.
                if all(weight.is_floating_point() for weight in projection.parameters()):
                    found.append(projection)
    return found

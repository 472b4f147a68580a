"""Code of users in a model that shares its sequences: their modules, their hooks, and what modules keep in attributes.

In a region that code is given the tokens of one rank. What it computes of them beside the model's output, as a loss
that a hook collects or an attribute holds, would not be that of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled.modules.find import walk_all
from lt_tiled.modules.patch import HOOKS, Patch, get_patches, is_of, is_patched
from lt_tiled.namespaces import LIGHTNING
from lt_tiled.tiling.places import is_equal, is_weight, storage_of

_PACKAGES = ("torch.", "lt_tiled.", "deepspeed.", "accelerate.", "peft.", *LIGHTNING)
_KNOWN = (*_PACKAGES, "transformers.", "liger_kernel.transformers.rms_norm")
"""What computes each token by itself outside of the blocks, but for positions."""
_NO_USERS = (*_PACKAGES, "transformers.utils.", "transformers.modeling_utils")
"""What has hooks that compute weights, follow modules, or mark tensors."""
_OWN_OF_MODULES = frozenset(nn.Module().__dict__)


def runs_known_code(module: nn.Module) -> bool:
    """Whether the forward of a module is that of a package which is known, and not of a user."""
    forwards = [type(module).forward, module.__dict__.get("forward")]
    forwards += [patch.replaced for patch in get_patches(module, Patch)]
    return all(forward is None or is_patched(forward) or is_of(forward, _KNOWN) for forward in forwards)


def users_hooks(module: nn.Module, kinds: Sequence[str] = HOOKS) -> list[Any]:
    """Return the hooks of users on a module, submodules aside."""
    hooks = [hook for kind in kinds for hook in module.__dict__[kind].values()]
    return [hook for hook in hooks if not is_of(hook, _NO_USERS)]


def refuse_hooks(name: str, block: nn.Module, outside: Sequence[str]) -> None:
    """Raise ``ValueError`` if a user's hook would get the tokens of one rank.

    Hooks of the kinds ``outside`` on the block itself get all tokens.
    """
    for path, part in walk_all(block):
        kinds = [kind for kind in HOOKS if path or kind not in outside]
        for hook in users_hooks(part, kinds):
            called = getattr(hook, "__qualname__", type(hook).__name__)
            raise ValueError(
                f"{'.'.join(filter(None, (name, path)))} ({type(part).__name__}) has the hook {called}, which would get"
                " the tokens of one rank where ranks share a sequence. Remove it, or put it on a module outside of the"
                " blocks, such as the embeddings or the last norm, whose hooks get all tokens."
            )


def kept_values(module: nn.Module) -> dict[str, Any]:
    """Return the tensors and floats that a module and those in it hold beside their weights, by path."""
    return dict(_values_in(module))


@contextmanager
def unchanged_in_place(module: nn.Module) -> Iterator[None]:
    """Undo in-place changes of tensors that are no weights, in a module and those in it.

    :class:`Observation` restores what a second pass would read, and has no copies before a first one.
    """
    copies = []
    for _, value in _values_in(module):
        if isinstance(value, Tensor) and storage_of(value) is not None and value.untyped_storage().nbytes():
            copies.append((value, value.detach().clone()))
    try:
        yield
    finally:
        for value, copy in copies:
            if not is_equal(value.detach(), copy):
                value.data.copy_(copy)


def _values_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and floats that are no weights, with their paths."""
    for path, part in walk_all(module):
        for holder in (part._buffers, part.__dict__):
            for name, value in holder.items():
                if name in _OWN_OF_MODULES or not isinstance(value, Tensor | float | list | tuple | dict):
                    continue
                for place, leaf in pytree.tree_leaves_with_path(value):
                    # FSDP with use_orig_params=False keeps views of its flat weights here, whose memory may be gone.
                    if isinstance(leaf, Tensor | float) and not is_weight(leaf):
                        yield f"{path}.{name}{pytree.keystr(place)}".lstrip("."), leaf


def replaced_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return those that were not there before."""
    return {place: value for place, value in now.items() if before.get(place) is not value}


def refuse_gradients(owner: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a module keeps a new value that wants a gradient."""
    for place, value in replaced_values(before, now).items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            raise ValueError(
                f"{owner} keeps {place}, which it computed with a graph from the tokens of one rank, so a loss of it is"
                " not that of all tokens. Compute it from the output of the blocks, outside of them, or let the model"
                " add it to its loss, as with output_router_logits=True."
            )

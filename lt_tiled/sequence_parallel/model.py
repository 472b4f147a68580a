"""A model that calls blocks which share its sequences: shared from token ids to the loss, or by its blocks."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.sequence_parallel import causal
from lt_tiled.sequence_parallel.arguments import Call, repeated_to
from lt_tiled.sequence_parallel.forward import SharedPart
from lt_tiled.sequence_parallel.region import Region, entered
from lt_tiled.sequence_parallel.self_check import TOKENS
from lt_tiled.sequence_parallel.sharing import Sharing


class SharedModel(SharedPart):
    """On the module that calls the blocks."""

    def __init__(self, sharing: Sharing, name: str, rotary: bool) -> None:
        super().__init__(sharing, name)
        self.rotary = rotary
        """Whether positions are rotary tables, so that nothing else before the blocks needs all tokens."""

    def share(self, call: Call) -> Any:
        sharing, compared = self.sharing, False
        if sharing.hand_written:  # its first block compares the batches, if it shares them
            self._check_around(call)
        else:
            to_loss = self._is_shared_to_loss(call)
            causal.refuse_outputs(sharing.owner, call, to_loss)
            if to_loss:
                sharing.compare(call)
                return self._to_loss(call)
            call = causal.without_unused_cache(call)
            if not causal.fills_cache(call) and not causal.is_partial(call):  # otherwise ranks may generate apart
                sharing.compare(call)
                compared = True
        with sharing.around_blocks(call, compared):
            return call.run(self.inner)

    def _is_shared_to_loss(self, call: Call) -> bool:
        """Whether the region of a call is that of a causal model, from its token ids to its loss.

        Otherwise it ends with the last block: GPT-2 reshapes behind its blocks to the shape of all.
        """
        if not causal.computes_loss(call):
            return False
        model: Any = call.module
        if self.sharing.mode is not None:
            because = "it gives masks to torch's attention itself"
        elif not self.rotary:
            because = "it has no rotary position embeddings"
        elif model.training and getattr(model.get_input_embeddings(), "neftune_noise_alpha", None):
            because = "the noise of its embeddings (neftune_noise_alpha) depends on the sequence length"
        else:
            return True
        inform(
            f"{self.name} computes what is before and behind its blocks for all tokens on each rank: {because}",
            once=f"all tokens {self.name}",
        )
        return False

    def _to_loss(self, call: Call) -> Any:
        """Run a causal model on the rank's own tokens, and return its output with the loss of the whole sequence."""
        sharing, tokens = self.sharing, call.tokens
        assert tokens is not None
        self._check_to_loss(call, tokens)
        if (total := tokens.shape[1]) < sharing.size:
            return call.run(self.inner)
        region = sharing.region(total)
        own = causal.own_arguments(region, call)
        as_tuple = own.pop("return_dict", None) is False
        with causal.shared_loss(region, call), entered(region):
            output = self.inner(call.module, **own)
        output["loss"] = region.mean(output["loss"])
        region.check_exchanged()
        if output.get("logits") is not None:
            output["logits"] = None  # those of this rank's tokens
        return output.to_tuple() if as_tuple else output

    def _check_to_loss(self, call: Call, tokens: Tensor) -> None:
        """Check a few of the tokens, at each position past which others are scaled, and more than each window."""
        lengths = self.lengths_to_check(tokens.shape[1], positions=False)
        if not lengths:
            return
        few, *more = lengths
        if not self.checked:
            self._check_tokens(call, tokens, few)
            for position in self.sharing.positions:  # the last rank alone is past it
                self._check_tokens(call, tokens, few, max(0, position - few + 1))
            lengths = more
        for count in lengths:
            self._check_tokens(call, tokens, count, all_of_them=False)

    def _check_tokens(
        self, call: Call, tokens: Tensor, count: int, begin: int | None = None, all_of_them: bool = True
    ) -> None:
        """Check ``count`` tokens, repeated if needed, at positions from ``begin``, as in a call without labels.

        Compare what attention is given and all logits, or the logits of each rank's last tokens alone.
        """
        name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
        given: dict[str, Any] = {"use_cache": False}
        rows, mask = 1, call.arguments.get("attention_mask")
        if begin is not None:
            given["position_ids"] = torch.arange(begin, begin + count, device=tokens.device)[None]
        elif isinstance(mask, Tensor) and mask.dim() == 2:  # positions may be made from it
            rows, padded = 2, torch.ones(2, count, dtype=mask.dtype, device=mask.device)
            padded[1, : TOKENS // 2] = 0
            given["attention_mask"] = padded
        given[name] = repeated_to(count)(tokens[:1].detach(), 1).expand(rows, *(-1,) * (tokens.dim() - 1))
        call, takes = Call(call.module, (), given), inspect.signature(type(call.module).forward).parameters
        mine = self.sharing.region(count)

        def run(region: Region) -> Tensor:
            arguments = call.kwargs if region.size == 1 else causal.own_arguments(region, call)
            if not all_of_them and "logits_to_keep" in takes:
                last = torch.arange(mine.length - TOKENS, mine.length, device=tokens.device)
                arguments["logits_to_keep"] = last + (mine.begins[mine.rank] if region.size == 1 else 0)
            logits: Tensor = self.inner(call.module, **arguments).logits
            return logits

        self.check(call, run, count, in_blocks=False, blocks=all_of_them)

    def _check_around(self, call: Call) -> None:
        """Check a hand-written model with some of its token ids: code between the blocks may need all tokens."""
        ids, sharing = call.tokens, self.sharing
        if ids is None or ids.dim() != 2 or ids.is_floating_point():
            return
        for tokens in self.lengths_to_check(ids.shape[1]):
            some = repeated_to(tokens)
            few = call.changed(sharing.owner, ids.shape[1], some(ids, 1), some, masks=True)
            sharing.compare(call)
            self.check(call, partial(self._run_few, few), tokens, blocks=False)

    def _run_few(self, call: Call, region: Region) -> Tensor:
        with self.sharing.opened_by_first_block(region) if region.size > 1 else nullcontext():
            output = call.run(self.inner)
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        return torch.cat([leaf.flatten() for leaf in leaves if leaf.is_floating_point()])

"""A causal language model and its data, for the command line."""

from lt_tiled.lm.causal import CausalLM
from lt_tiled.lm.text import TextFiles

__all__ = ["CausalLM", "TextFiles"]

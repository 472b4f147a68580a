"""Losses of a projection, tile by tile: the full logits never exist."""

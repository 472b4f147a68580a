"""Activation checkpointing, and the comparison of each recompute with its forward pass. Imports nothing of tiling.

recompute: computing again in the backward pass what the forward pass computed.
fingerprint: some rows of a tensor, each reduced to one number.
sample: the fingerprints of one tensor in the forward pass and in its recompute.
verdict: the comparison of all samples of a backward pass, at its end.
"""

"""Compare one training step without and with lt_tiled: the same weights, data, randomness, precision and engine.

NOTE [What is compared]
An engine sets up a copy of the model once. A step runs with lt_tiled's patches turned off, and turned on, forced to
several tiles. Before each forward pass buffers, attributes and random states are restored. The
optimizer of the run changes no weight. It can put gradients in the place of weights: the full state dict, which every
engine can gather, then has them under the names of the weights. DeepSpeed has a function for that. The same step of a
plain copy in higher precision, without engine and patches, shows the rounding of both.
"""

from lt_tiled.verification.comparison import run_verify, verify
from lt_tiled.verification.result import Row, Step, Verification

__all__ = ["Row", "Step", "Verification", "run_verify", "verify"]

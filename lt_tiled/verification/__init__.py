"""Compare one training step without and with lt_tiled: the same weights, data, randomness, precision and engine.

NOTE [What is compared]
A Trainer fits three copies of the module on the same engine: two with lt_tiled's patches turned off, and one with the
patches turned on and forced to several tiles. Each copy runs one step, and all start from the same random states, so
nothing has to be restored between the steps. The optimizer puts each gradient in the place of its weight. The full
weights after the step are therefore the full gradients, on every engine. The weights of the second copy are off by
random numbers as large as rounding errors: how far its gradients move is what rounding may do to those in tiles.
"""

from lt_tiled.verification.comparison import run_verify, verify
from lt_tiled.verification.result import Row, Verification

__all__ = ["Row", "Verification", "run_verify", "verify"]

"""Position-wise modules, tile by tile. Imports torch and nothing of Lightning.

tile: a contiguous run of tokens that a module processes at once.
anchor: the small node of autograd that saves a call's inputs and weights before any of its arithmetic runs.
leaf: a tensor at which the graph of a tile begins; it stands in the place of a weight while tiles run.
sum: the gradient of a weight, summed over the tiles.
pending: what has not run, because it may run in the tiles of the module that follows.

A call goes through three files: ``patch.py`` decides how it runs, ``call.py`` says what it consists of, ``run.py`` runs
it, forward and backward.
"""

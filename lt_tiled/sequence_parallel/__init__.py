"""Sequence parallelism (Ulysses): each rank of a group holds a part of the tokens of every sequence.

A *group* of ranks shares each sequence. A forward pass is shared from one of two *doors* on (``doors.py``): a causal
model of transformers from its token ids to its loss, and the blocks of any other model from the first block's input to
the last block's output. The door makes the *state* of the pass from all tokens
(:class:`~lt_tiled.sequence_parallel.ulysses.UlyssesState`), cuts out the rank's own, and returns the loss of all tokens
or the hidden states of all tokens. In between, whatever mixes tokens is given all of them by an *exchange* of heads for
tokens (``exchange.py``): attention (``attention.py``) and layers that pass on a state from token to token
(``states.py``). The heads that a rank then computes are its *head shard*.
"""

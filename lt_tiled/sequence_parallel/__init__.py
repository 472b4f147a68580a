"""Sequence parallelism: the ranks of a group share each sequence, and attention exchanges heads for tokens."""

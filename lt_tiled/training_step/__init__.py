"""One training step outside of a training loop, for ``verify``, the planner and the callbacks."""

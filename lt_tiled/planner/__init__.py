"""Memory before the run: simulate a step on fake tensors, and find the longest sequence or the cheapest settings."""

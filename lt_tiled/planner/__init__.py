"""Memory before the run: a step simulated on fake tensors, the longest sequence that fits, and the cheapest
settings.
"""

"""Measurements that take time, and whose figures the documentation quotes."""

"""Measurements that take time, and whose figures the documentation quotes. Many of their models are small."""

import os

import torch

# DeepSpeed looks for its accelerator when it is imported.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

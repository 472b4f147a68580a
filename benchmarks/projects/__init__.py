"""Models of released projects, trained untiled and with lt_tiled's strategies: ``python -m benchmarks.projects``."""

import torch

try:
    import torchvision  # noqa: F401  # torchmetrics, and with it Lightning, imports it where it is installed
except ImportError:
    pass
except RuntimeError:  # its wheel on PyPI is built for CUDA, and finds torch for the CPU: no operators
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""The module's own code, compiled as ``Tiling(compile=...)`` asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from lt_tiled.policies import CompileOptions


def compiled(function: Callable[..., Any], options: Literal[True] | CompileOptions) -> Callable[..., Any]:
    """Return a function that runs compiled, with the arguments of ``torch.compile`` in ``options``."""
    given: Mapping[str, Any] = {} if options is True else options
    # Inductor's own random numbers would differ between the forward pass and the recompute.
    run: Callable[..., Any] = torch._inductor.config.patch(fallback_random=True)(torch.compile(function, **given))
    return run

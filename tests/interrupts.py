"""Ctrl-C at a given line."""

from __future__ import annotations

import inspect
import linecache
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any


def interrupted_at(line: int, run: Callable[[], object]) -> bool:
    """Run and raise ``KeyboardInterrupt`` at the n-th line or call of the package; return whether there was one.

    The end of a block in which torch looks for modes of its own counts, too.
    """
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if "lt_tiled" not in file and not ("overrides" in file and name == "__exit__"):
            return None
        # Python handles no signal between the last line inside ``with`` and its end, which is an event too, and
        # ignores exceptions in finalizers, as of a generator that was not read to its end.
        text = linecache.getline(file, frame.f_lineno).lstrip()
        goes_on = event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR and name == "<genexpr>"
        if event in ("call", "line") and not text.startswith("with ") and not goes_on:
            left -= 1
            if left <= 0 and not any(caller.f_code.co_name == "__del__" for caller, _ in traceback.walk_stack(frame)):
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False

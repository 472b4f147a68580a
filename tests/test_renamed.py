"""Old names and import paths work, with a warning that names the new ones."""

from __future__ import annotations

import importlib
import re
import sys

import pytest

from lt_tiled import _renamed
from lt_tiled.report import TiledModule

NAMES = [
    ("lt_tiled", "OffloadDiskFull", "errors.OffloadDiskFullError"),
    ("lt_tiled.errors", "OffloadDiskFull", "errors.OffloadDiskFullError"),
    ("lt_tiled.offload.errors", "OffloadDiskFull", "errors.OffloadDiskFullError"),
    ("lt_tiled.tiling.work", "NotTokenWise", "errors.NotPositionWiseError"),
    ("lt_tiled.planner.fake", "CannotSimulate", "errors.SimulationError"),
    ("lt_tiled.planner.search", "DoesNotFit", "errors.DoesNotFitError"),
    ("lt_tiled.report", "CheckpointedBlock", "report.RecomputedBlock"),
]


@pytest.mark.parametrize(("old", "new"), _renamed.MODULES.items())
def test_old_modules(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old path imports the very module that has a new one, and warns on its first import."""
    monkeypatch.delitem(sys.modules, old, raising=False)
    spec = importlib.import_module(new).__spec__
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}") as warned:
        __import__(old)
    assert sys.modules[old] is sys.modules[new]
    assert sys.modules[new].__spec__ is spec
    assert warned[0].filename == __file__


@pytest.mark.filterwarnings("ignore:lt_tiled.offload.errors is now", "ignore:lt_tiled.tiling.work is now")
@pytest.mark.parametrize(("module", "old", "new"), NAMES)
def test_old_names(module: str, old: str, new: str) -> None:
    """An old name is the renamed class, and warns where it is used."""
    with pytest.warns(DeprecationWarning, match=rf"\.{old} is now lt_tiled\.{re.escape(new)};") as warned:
        found = getattr(importlib.import_module(module), old)
    place, _, name = new.partition(".")
    assert found is getattr(importlib.import_module(f"lt_tiled.{place}"), name)
    assert place == "report" or found is getattr(importlib.import_module("lt_tiled"), name)
    assert warned[-1].filename == __file__


def test_names_that_never_existed() -> None:
    """Other names are missing, as in any module."""
    with pytest.raises(AttributeError, match="module 'lt_tiled' has no attribute 'nothing'"):
        _ = importlib.import_module("lt_tiled").nothing
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("lt_tiled.nothing")


def test_old_attribute_of_a_report() -> None:
    """``TiledModule.widths`` is ``sizes``, and warns where it is used."""
    row = TiledModule("mlp", "MLP", 8, 2, sizes=(16, 48))
    with pytest.warns(DeprecationWarning, match="TiledModule.widths is now TiledModule.sizes") as warned:
        assert row.widths == (16, 48)
    assert warned[0].filename == __file__

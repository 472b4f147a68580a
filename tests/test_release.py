"""The wheel: what ``python -m build`` makes of the repository runs without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lt_tiled
from tests.processes import LIMIT

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by way of the source distribution, as a release is."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=LIMIT,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_what_the_wheel_holds(wheel: Path) -> None:
    """The wheel has the version of ``lt_tiled.__version__``, and holds the package and its configs alone. Its README,
    that of the repository, links to no file of the repository, which it lacks.
    """
    files, info = zipfile.ZipFile(wheel), f"lt_tiled-{lt_tiled.__version__}.dist-info"
    assert wheel.name.startswith(f"lt_tiled-{lt_tiled.__version__}-")
    assert {name.split("/")[0] for name in files.namelist()} == {"lt_tiled", info}
    assert {name for name in files.namelist() if name.startswith("lt_tiled/configs/")} == {
        f"lt_tiled/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")
    }
    text = files.read(f"{info}/METADATA").decode()
    assert re.findall(r"\]\((?!http)", text) == []
    assert "| engine | strategy | name | config |" in text


@pytest.mark.full
def test_quickstart_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """In an empty folder, with nothing of the repository, the README's quickstart command trains and shows what was
    tiled.
    """
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)],
        check=True,
        timeout=LIMIT,
    )
    command = f"import sys, lt_tiled.cli; print(lt_tiled.__file__); sys.argv[1:] = {SHORT!r}; lt_tiled.cli.main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", command],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(site), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))
    assert "4 x LlamaMLP" in done.stdout + done.stderr
    assert list(work.glob("runs/quickstart/**/*.ckpt"))


SHORT = [
    *("fit", "--config", "configs/quickstart.yaml", "--trainer.accelerator=cpu", "--data.seq_len=256"),
    *("--trainer.limit_train_batches=2", "--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"),
]

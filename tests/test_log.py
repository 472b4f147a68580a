"""What shows progress."""

from __future__ import annotations

import pytest

from lt_tiled._log import progress


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_for_terminals(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is being done is shown on a terminal, and a file or a pipe gets nothing."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
        monkeypatch.setenv("TERM", "xterm")
    with progress("Planning"):
        pass
    printed = capsys.readouterr()
    assert ("Planning" in printed.err) == terminal
    assert not printed.out

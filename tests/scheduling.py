"""In which process pytest-xdist runs a test."""

from __future__ import annotations

from pathlib import Path

from xdist.scheduler import LoadScopeScheduling


class Scheduling(LoadScopeScheduling):
    """Runs the tests of ``engines/`` and of ``sequence_parallel/`` in one process each, those of DeepSpeed in another,
    each file of ``examples/`` in one, and other tests wherever a process is free.

    Whole files would leave processes idle at the end, and single tests would start all ranks in every process. Another
    ``--dist`` has no effect. The groups of pytest-xdist 3.8 (``xdist_group``) have no effect with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if "/engines/" in file or "/sequence_parallel/" in file:
            return "deepspeed" if "zero" in nodeid or "deepspeed" in nodeid else str(Path(file).parent)
        return file if "/examples/" in file else nodeid

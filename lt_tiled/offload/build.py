"""Open the tiers of a policy with its share of a node's memory and disk."""

from __future__ import annotations

import os
import tempfile

from lt_tiled.memory import available_memory, ranks_on_node
from lt_tiled.offload.offloader import Offloader
from lt_tiled.offload.spill import SpillFile
from lt_tiled.offload.tiers import CPUTier, DiskTier
from lt_tiled.policies import ActivationCheckpointing, parse_bytes


def build_offloader(policy: ActivationCheckpointing, ranks_per_node: int | None = None) -> Offloader:
    """Open the tiers of a policy with ``offload`` set.

    ``ranks_per_node`` processes share a node's budgets: by default the launcher's number, else all ranks.
    """
    assert policy.offload is not None
    ranks = ranks_on_node(ranks_per_node)
    cpu = disk = None
    if "cpu" in policy.offload:
        budget = available_memory() // 2 if policy.cpu_budget is None else parse_bytes(policy.cpu_budget, "cpu_budget")
        cpu = CPUTier(budget // ranks)
    if "disk" in policy.offload:
        limit = None if policy.disk_budget is None else parse_bytes(policy.disk_budget, "disk_budget") // ranks
        directory = os.path.expanduser(policy.directory or tempfile.gettempdir())
        disk = DiskTier(SpillFile(directory, limit, direct=policy.direct_io, checksum=policy.checksum))
    return Offloader(policy, cpu, disk)

"""Open the tiers of a policy with its share of a node's memory and disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from lt_tiled.offload.offloader import Offloader
from lt_tiled.offload.spill import SpillFile
from lt_tiled.offload.tiers import CPUTier, DiskTier
from lt_tiled.policies import ActivationCheckpointing, parse_bytes


def build_offloader(policy: ActivationCheckpointing, ranks_per_node: int | None = None) -> Offloader:
    """Open the tiers of a policy with ``offload`` set.

    ``ranks_per_node`` processes share a node's budgets: by default the launcher's number, else all ranks.
    """
    assert policy.offload is not None
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    ranks = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world))  # torchrun sets it
    cpu = disk = None
    if "cpu" in policy.offload:
        budget = available_memory() // 2 if policy.cpu_budget is None else parse_bytes(policy.cpu_budget, "cpu_budget")
        cpu = CPUTier(budget // ranks)
    if "disk" in policy.offload:
        limit = None if policy.disk_budget is None else parse_bytes(policy.disk_budget, "disk_budget") // ranks
        directory = os.path.expanduser(policy.directory or tempfile.gettempdir())
        disk = DiskTier(SpillFile(directory, limit, direct=policy.direct_io, checksum=policy.checksum))
    return Offloader(policy, cpu, disk)


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes of CPU memory that the system, or this process's cgroups, can allocate now."""
    try:
        lines = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return max(min([available, *_cgroup_memory(root)]), 0)


def _cgroup_memory(root: Path) -> Iterator[int]:
    """Yield the free bytes of each cgroup that has a limit: the process's own and all above it.

    psutil does not read them.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                mount, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
            elif "memory" in controllers.split(","):
                mount, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
                cache = "total_inactive_file"
            else:
                continue
            group = mount / path.lstrip("/")  # in a container it may not be there, but the mount is the container's
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # ValueError: no limit, "max"
                    free = int((folder / limit).read_text()) - int((folder / usage).read_text())
                    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    yield free + int(stat.get(cache, 0))  # the kernel frees unused page cache first

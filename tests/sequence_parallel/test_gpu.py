"""The check of batches on a CUDA device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lt_tiled.sequence_parallel.same_batch import SameBatch
from tests.sequence_parallel.models import ids
from tests.world import World

pytestmark = pytest.mark.gpu


def late() -> list[str]:
    """What each of three checks says, of which the second has another batch on rank 1, and none waits for the GPU but
    the first.
    """
    same, said = SameBatch("model", dist.group.WORLD), []
    for step in range(3):
        batch = ids(2, 32, seed=dist.get_rank() if step == 1 else 0).cuda()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            same.check([("input_ids", batch)])
            said.append("")
        except ValueError as error:
            said.append(str(error))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return said


def test_values_of_the_last_pass(world: World) -> None:
    """Another batch is found with the next pass, and the GPU is not waited for."""
    for first, second, third in world(late):
        assert (first, second) == ("", "")
        assert "was given a batch on rank 1" in third

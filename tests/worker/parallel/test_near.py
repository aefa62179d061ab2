"""The memory that near ranks share: PyTorch's own part is played by one that adds each rank's numbers to themselves."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from worker.parallel import near
from worker.parallel.near import NearSum


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_memory_is_taken_before_the_first_sum_and_serves_every_size(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
):
    taken, met = list[Tensor](), list[Tensor]()

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        taken.append(torch.zeros(size, dtype=dtype, device=device))
        return taken[-1]

    def double(x: Tensor, operation: str, group: str) -> None:
        assert (operation, group) == ("sum", "all") and x.data_ptr() == met[0].data_ptr()
        x.mul_(2)

    monkeypatch.setattr(near, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=SimpleNamespace(group_name="all"))))
    monkeypatch.setattr(symmetric, "empty", empty)
    monkeypatch.setattr(symmetric, "rendezvous", lambda room, group: met.append(room))
    monkeypatch.setattr(torch.ops.symm_mem, "two_shot_all_reduce_", double, raising=False)

    ranks = NearSum(2, torch.device("cpu"))

    assert len(met) == len(taken) == 1
    most = taken[0].nbytes // dtype.itemsize
    for shape in ((1, 16), (3, 4096), (most // 64, 64)):
        x = torch.randint(-8, 8, shape).to(dtype)
        assert ranks.takes(x)
        assert torch.equal(ranks.sum(x), 2 * x)
    assert not ranks.takes(torch.zeros(most + 16, dtype=dtype))
    assert len(taken) == 1

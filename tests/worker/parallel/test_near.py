"""The memory that near ranks share: PyTorch's own part is played by one that adds each rank's numbers to themselves."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from worker.parallel import near
from worker.parallel.near import NearSum, met_alike


@dataclass
class Played:
    taken: list[Tensor] = field(default_factory=list[Tensor])
    met: list[Tensor] = field(default_factory=list[Tensor])


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    taken, met = played.taken, played.met

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
    monkeypatch.setattr(near, "_meetings", 0)
    return played


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_memory_is_taken_before_the_first_sum_and_serves_every_size(played: Played, dtype: torch.dtype):
    ranks = NearSum(2, torch.device("cpu"))

    taken = played.taken
    assert len(played.met) == len(taken) == 1
    most = taken[0].nbytes // dtype.itemsize
    for shape in ((1, 16), (3, 4096), (most // 64, 64)):
        x = torch.randint(-8, 8, shape).to(dtype)
        assert ranks.takes(x)
        assert torch.equal(ranks.sum(x), 2 * x)
    assert not ranks.takes(torch.zeros(most + 16, dtype=dtype))
    assert len(taken) == 1


@pytest.mark.usefixtures("played")
def test_a_process_meets_only_ranks_that_have_met_others_as_often():
    def beside(others: int) -> bool:
        theirs = iter((others, -others))
        return met_alike(lambda own: min(own, next(theirs)))

    assert beside(0) and not beside(1)
    NearSum(2, torch.device("cpu"))
    assert beside(1) and not beside(0) and not beside(2)

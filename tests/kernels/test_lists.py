"""The tokens of each expert, and the tiles that they are cut into."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.gpu_cases import DEVICE

pytest.importorskip("triton")

from kernels.gpu.lists import collect, make_lists

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@settings(max_examples=12, deadline=None)
@given(
    tokens=st.sampled_from([1, 3, 20, 70]),
    count=st.sampled_from([1, 2, 5, 17]),
    top_k=st.integers(1, 2),
    shared=st.booleans(),
    elsewhere=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
def test_tiles_hold_each_pair_once_and_stand_side_by_side(tokens, count, top_k, shared, elsewhere, seed):
    drawn = torch.Generator().manual_seed(seed)
    top_k, block_m = min(top_k, count), 16
    ids = torch.stack([torch.randperm(count, generator=drawn)[:top_k] for _ in range(tokens)]).int()
    ids[torch.rand(ids.shape, generator=drawn) < elsewhere] = -1
    lists = make_lists(tokens, top_k, count, block_m, DEVICE, shared=shared)
    collect(ids.to(DEVICE), lists)

    expected = {expert: [] for expert in range(count)}
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert >= 0:
            expected[expert].append(pair)
    if shared:
        expected[count] = list(range(tokens * top_k, tokens * top_k + tokens))
    members = lists.members.flatten().tolist()
    found = {expert: [] for expert in expected}
    tiles = lists.table.T.tolist()
    used = sum(expert >= 0 for expert, _, _ in tiles)
    for expert, size, begin in tiles[:used]:
        assert 0 < size <= block_m
        found[expert] += members[begin : begin + size]
    assert {expert: sorted(pairs) for expert, pairs in found.items()} == expected
    assert all(expert == -1 for expert, _, _ in tiles[used:])
    assert used == sum(-(-len(pairs) // block_m) for pairs in expected.values())
    if shared:
        # The longest work begins first.
        assert {expert for expert, _, _ in tiles[: -(-tokens // block_m)]} == {count}
    # What counts is zero again, for the next layer.
    assert not lists.counts.any()
    assert not lists.progress.any()

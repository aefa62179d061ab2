"""Paged attention and KV writes against one query, one head at a time."""

import pytest
import torch

import kernels
from kernels.attention import plan_attention
from tests.kernels.attention_cases import BATCHES, HEADS, Batch, Heads, naive_attention, shuffled_pages

PAGE_SIZES = [1, 4, 7]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.name)
def test_every_query_attends_to_exactly_what_lies_before_its_visible_end(batch: Batch, heads: Heads) -> None:
    page_size = PAGE_SIZES[len(batch.name) % len(PAGE_SIZES)]
    pages, total = shuffled_pages(batch, page_size, seed=1)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(sum(map(len, batch.ends)), heads.query, heads.dim, generator=generator)
    k_pages, v_pages = torch.randn(2, total, page_size, heads.kv, heads.dim, generator=generator)
    plan = plan_attention(batch.starts, batch.ends, pages, page_size, device=torch.device("cpu"), dtype=torch.float32)

    mixed = kernels.attention(q, k_pages, v_pages, plan, 0.3)

    assert torch.allclose(mixed.double(), naive_attention(q, k_pages, v_pages, batch, pages, 0.3), atol=1e-5)


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.name)
def test_what_nobody_sees_may_hold_nan(batch: Batch) -> None:
    page_size = 4
    pages, total = shuffled_pages(batch, page_size, seed=3)
    k_pages, v_pages = torch.full((2, total, page_size, 2, 8), float("nan"))
    for row, ends in enumerate(batch.ends):
        for position in range(max(ends)):
            at = pages[row][position // page_size], position % page_size
            k_pages[at], v_pages[at] = torch.randn(2, 2, 8)
    q = torch.randn(sum(map(len, batch.ends)), 4, 8)
    plan = plan_attention(batch.starts, batch.ends, pages, page_size, device=torch.device("cpu"), dtype=torch.float32)

    assert kernels.attention(q, k_pages, v_pages, plan, 1.0).isfinite().all()


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.name)
def test_keys_and_values_land_at_their_positions_and_nowhere_else(batch: Batch) -> None:
    page_size = 4
    pages, total = shuffled_pages(batch, page_size, seed=4)
    tokens = sum(map(len, batch.ends))
    k, v = torch.randn(2, tokens, 2, 8)
    k_pages, v_pages = torch.zeros(2, total, page_size, 2, 8)
    plan = plan_attention(batch.starts, batch.ends, pages, page_size, device=torch.device("cpu"), dtype=torch.float32)

    kernels.kv_write(k, v, k_pages, v_pages, plan.slots)

    expected_k, expected_v = torch.zeros_like(k_pages), torch.zeros_like(v_pages)
    token = 0
    for row, (start, ends) in enumerate(zip(batch.starts, batch.ends, strict=True)):
        for position in range(start, start + len(ends)):
            expected_k[pages[row][position // page_size], position % page_size] = k[token]
            expected_v[pages[row][position // page_size], position % page_size] = v[token]
            token += 1
    assert torch.equal(k_pages, expected_k)
    assert torch.equal(v_pages, expected_v)


def test_a_plan_tells_a_fused_twin_where_rows_begin_and_what_they_see() -> None:
    plan = plan_attention(
        [2, 0], [(4, 4), (3, 3, 3)], [[5, 1], [0, 7]], 2, device=torch.device("cpu"), dtype=torch.float32
    )

    assert plan.row_offsets.tolist() == [0, 2, 5]
    assert plan.visible_end.tolist() == [4, 4, 3, 3, 3]
    assert plan.page_table.tolist() == [[5, 1], [0, 7]]
    assert plan.slots.tolist() == [2, 3, 0, 1, 14]

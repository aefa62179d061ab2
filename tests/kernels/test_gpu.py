"""The fused twins against their references: in Triton's interpreter on the CPU, compiled on a GPU."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.gpu_cases import (
    ATTENTION,
    DEVICE,
    DTYPES,
    GPU_ATTENTION,
    NARROW,
    ON_GPU,
    TOLERANCE,
    AttentionCase,
    attention_inputs,
    integers,
    normal,
    relative_error,
    widened,
)

pytest.importorskip("triton")

import kernels.gpu.attention
import kernels.gpu.kv_write
import kernels.gpu.linear
import kernels.gpu.lora
import kernels.gpu.moe
import kernels.gpu.rms_norm
import kernels.gpu.rope
import kernels.gpu.router
import kernels.gpu.swiglu
import kernels.gpu.token_stats
from kernels.attention import AttentionPlan, RowGroup, attention
from kernels.gpu.attention import Tile, attend, choose_tile
from kernels.kv_write import kv_write
from kernels.linear import gated_linear, linear
from kernels.lora import Factors, assign, lora, lora_swiglu
from kernels.moe import Experts, Router, experts, mix, route
from kernels.noise import gumbel
from kernels.rms_norm import rms_norm
from kernels.rope import rope, rope_tables
from kernels.rope_write import rope_write
from kernels.swiglu import swiglu
from kernels.token_stats import Filters, Noise, Proposals, token_stats

# The interpreter computes with numpy, which warns where a GPU silently makes an infinity or a NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

product_dtypes = pytest.mark.parametrize(
    "dtype", (torch.float32, NARROW), ids=lambda dtype: str(dtype).removeprefix("torch.")
)


@dtypes
@pytest.mark.parametrize(
    "tokens, hidden", [(1, 64), (3, 100), (5, 1536)] + ([(77, 4096), (2048, 4096), (9, 3584)] if ON_GPU else [])
)
@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm_agrees(dtype, tokens, hidden, residual):
    x, weight = normal(tokens, hidden, dtype=dtype, seed=1), normal(hidden, dtype=dtype, seed=2)
    added = normal(tokens, hidden, dtype=dtype, seed=3) if residual else None
    out, total = kernels.gpu.rms_norm.rms_norm(x, weight, 1e-6, added)
    wide, wide_total = rms_norm(x.float(), weight.float(), 1e-6, None if added is None else added.float())
    assert relative_error(out, wide) < TOLERANCE[dtype]
    assert relative_error(total, wide_total) < TOLERANCE[dtype]


@dtypes
@pytest.mark.parametrize("tokens, inner", [(1, 1), (3, 1000), (7, 1025)] + ([(2048, 12288)] if ON_GPU else []))
def test_swiglu_agrees(dtype, tokens, inner):
    x = normal(tokens, 2 * inner, dtype=dtype, seed=1)
    assert relative_error(kernels.gpu.swiglu.swiglu(x), swiglu(x.float())) < TOLERANCE[dtype]


@dtypes
@pytest.mark.parametrize(
    "heads, head_dim, width", [(28, 64, 64), (5, 128, 64), (12, 80, 80), (3, 256, 128), (1, 96, 32)]
)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_agrees_full_and_partial(dtype, heads, head_dim, width, normed):
    # A slice of a wider tensor, as queries are a slice of the projection.
    x = normal(4, heads + 2, head_dim, dtype=dtype, seed=1)[:, :heads]
    weight = normal(heads, head_dim, dtype=dtype, seed=2) if normed else None
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, width, 2, device=DEVICE).float() / width)
    cos, sin = rope_tables(torch.tensor([0, 7, 1000, 31], device=DEVICE), inv_freq, dtype)
    out = kernels.gpu.rope.rope(x, cos, sin, weight, 1e-6)
    expected = rope(x.float(), cos.float(), sin.float(), None if weight is None else weight.float(), 1e-6)
    assert relative_error(out, expected) < TOLERANCE[dtype]


def _pages(dtype: torch.dtype, heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys = normal(6, 8, heads, head_dim, dtype=dtype, seed=8)
    return keys, keys + 1


@dtypes
@pytest.mark.parametrize("heads, head_dim", [(2, 64), (3, 80), (8, 128)])
def test_kv_write_changes_its_slots_and_nothing_else(dtype, heads, head_dim):
    k = normal(5, heads + 1, head_dim, dtype=dtype, seed=1)[:, 1:]
    v = normal(5, heads, head_dim, dtype=dtype, seed=2)
    slots = torch.tensor([7, 0, 47, 13, 8], device=DEVICE)
    (k_pages, v_pages), theirs = _pages(dtype, heads, head_dim), _pages(dtype, heads, head_dim)
    kernels.gpu.kv_write.kv_write(k, v, k_pages, v_pages, slots)
    kv_write(k, v, *theirs, slots)
    assert torch.equal(k_pages, theirs[0]) and torch.equal(v_pages, theirs[1])


@dtypes
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, width", [(28, 4, 64, 64), (12, 2, 80, 80), (16, 4, 128, 64), (4, 4, 96, 96)]
)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write_does_what_its_parts_do(dtype, heads, kv_heads, head_dim, width, normed):
    qkv = normal(5, heads + 2 * kv_heads, head_dim, dtype=dtype, seed=1)
    weight = normal(heads + kv_heads, head_dim, dtype=dtype, seed=2) if normed else None
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, width, 2, device=DEVICE).float() / width)
    cos, sin = rope_tables(torch.tensor([0, 7, 1000, 31, 32], device=DEVICE), inv_freq, dtype)
    slots = torch.tensor([7, 0, 47, 13, 8], device=DEVICE)
    k_pages, v_pages = _pages(dtype, kv_heads, head_dim)
    wide = (k_pages.float(), v_pages.float())
    q = kernels.gpu.rope.rope_write(qkv, cos, sin, weight, 1e-6, k_pages, v_pages, slots)
    expected = rope_write(
        qkv.float(), cos.float(), sin.float(), None if weight is None else weight.float(), 1e-6, *wide, slots
    )
    assert relative_error(q, expected) < TOLERANCE[dtype]
    assert relative_error(k_pages, wide[0]) < TOLERANCE[dtype]
    assert torch.equal(v_pages.float(), wide[1])


@product_dtypes
@pytest.mark.parametrize("case", ATTENTION + (GPU_ATTENTION if ON_GPU else ()), ids=lambda case: case.name)
def test_attention_agrees_and_never_reads_what_no_query_sees(dtype, case: AttentionCase):
    q, k, v, plan = attention_inputs(case, dtype, seed=3)
    out = kernels.gpu.attention.attention(q, k, v, plan, case.head_dim**-0.5)
    # The reference multiplies hidden values by zero, so for it they must be finite.
    wide = attention(q.float(), k.float().nan_to_num(0), v.float().nan_to_num(0), widened(plan), case.head_dim**-0.5)
    assert relative_error(out, wide) < 1.5 * TOLERANCE[dtype]


@pytest.mark.parametrize("case", GPU_ATTENTION[:4] if ON_GPU else [ATTENTION[2]], ids=lambda case: case.name)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("ahead", [False, True])
def test_attention_agrees_however_its_tiles_are_cut(case: AttentionCase, splits, ahead):
    q, k, v, plan = attention_inputs(case, NARROW, seed=4)
    # Keys of one page, of two, and of more.
    tiles = [Tile(16, 16, 2, 4, ahead), Tile(16, 32, 2, 4, ahead), Tile(16, 64, 2, 4, ahead)]
    if ON_GPU:
        tiles += [Tile(64, 64, 4, 3, ahead), Tile(128, 64, 8, 3, ahead), Tile(64, 128, 4, 2, ahead)]
        tiles += [Tile(128, 32, 8, 3, ahead, 128), Tile(128, 64, 8, 2, ahead, 128)]
    longest = max(query for _, query in case.rows)
    wide = attention(q.float(), k.float().nan_to_num(0), v.float().nan_to_num(0), widened(plan), 0.1)
    for tile in tiles:
        out = attend(q, k, v, plan, 0.1, longest, tile, splits, torch.empty_like(q))
        assert relative_error(out, wide) < 1.5 * TOLERANCE[NARROW], tile


@given(
    packed=st.integers(1, 40_000),
    pairs=st.integers(1, 4096),
    head_dim=st.integers(16, 256),
    element_size=st.sampled_from([2, 4]),
    small=st.booleans(),
)
def test_a_tile_of_attention_fits_shared_memory_twice_where_two_are_to_share_it(
    packed, pairs, head_dim, element_size, small
):
    tile = choose_tile(packed, pairs, head_dim, element_size, 132, small=small)
    width = max(16, 1 << (head_dim - 1).bit_length())
    bytes_of_one = (tile.block_m + 2 * tile.stages * tile.block_n) * width * element_size
    assert bytes_of_one * (1 if tile.registers is None else 2) <= 227 * 1024
    assert tile.block_m >= min(packed, 16)


@pytest.mark.parametrize("splits", [1, 4])
def test_rows_that_ask_for_nothing_change_nothing_in_attention(splits):
    """Slots that stand before their rows leave an empty row each (`kernels.canvas`)."""
    q, k, v, plan = attention_inputs(ATTENTION[0], NARROW, seed=5)
    longest = max(group.query for group in plan.groups)
    order = [0, *range(plan.page_table.shape[0]), 0, 0]
    begins = plan.row_offsets.tolist()
    offsets = torch.tensor([0, *begins, begins[-1], begins[-1]], dtype=torch.int32, device=q.device)
    wider = replace(plan, row_offsets=offsets, page_table=plan.page_table[order].contiguous())
    tile, scale = Tile(16, 32, 4, 1), 0.1
    found = attend(q, k, v, wider, scale, longest, tile, splits, torch.full_like(q, float("nan")))
    assert torch.equal(found, attend(q, k, v, plan, scale, longest, tile, splits, torch.full_like(q, float("nan"))))
    assert not bool(found.isnan().any())


@pytest.mark.parametrize("rows, query", [(1, 8), (8, 8), (8, 64), (32, 8)])
def test_rows_that_ask_for_nothing_do_not_count_when_tiles_are_chosen(monkeypatch, rows, query):
    seen: list[tuple[Tile, int]] = []
    monkeypatch.setattr(kernels.gpu.attention, "attend", lambda *given: seen.append(given[6:8]))
    monkeypatch.setattr(kernels.gpu.attention, "_multiprocessors", lambda device: 132)
    pages = torch.zeros((1, 16, 8, 16), dtype=NARROW, device=DEVICE)
    q = torch.zeros((rows * query, 32, 16), dtype=NARROW, device=DEVICE)
    for idle in (0, rows):
        offsets = [*range(0, rows * query + 1, query), *[rows * query] * idle]
        plan = AttentionPlan(
            slots=torch.zeros(rows * query, dtype=torch.int64, device=DEVICE),
            row_offsets=torch.tensor(offsets, dtype=torch.int32, device=DEVICE),
            visible_end=torch.full((rows * query,), 1000, dtype=torch.int32, device=DEVICE),
            page_table=torch.zeros((rows + idle, 63), dtype=torch.int32, device=DEVICE),
            groups=(RowGroup(slice(0, rows * query), slice(0, 0), rows + idle, query, 1000, None),),
        )
        kernels.gpu.attention.attention(q, pages, pages, plan, 0.1)
    assert seen[0] == seen[1]


def test_few_packed_rows_take_the_tiles_that_were_timed():
    assert choose_tile(16, 64 * 8, 128, 2, 132) == choose_tile(16, 32 * 8, 128, 2, 132) == Tile(16, 32, 4, 3, True)
    assert choose_tile(16, 8 * 8, 128, 2, 132) == choose_tile(16, 8, 128, 2, 132) == Tile(16, 64, 4, 3, True)


@pytest.mark.parametrize(
    "rows, slots, kv_heads, block_m",
    [(8, 0, 8, 64), (8, 4, 8, 64), (16, 2, 8, 64), (32, 0, 8, 128), (32, 4, 8, 64), (64, 0, 8, 128)]
    + [(32, 0, 4, 64), (32, 4, 4, 64), (64, 0, 4, 128), (64, 8, 4, 64), (64, 16, 4, 64)],
)
def test_blocks_of_32_take_the_tiles_that_were_faster_on_a_card(rows, slots, kv_heads, block_m):
    """Tiles of 128 packed rows where they nearly fill their turns, at two for each of 132 multiprocessors."""
    longest = 64 if slots else 32
    pairs = -(-32 * (rows + slots) // longest) * kv_heads
    assert choose_tile(4 * longest, pairs, 128, 2, 132).block_m == block_m


@pytest.mark.parametrize("tokens", [1, 4, 32, 50, 64])
@pytest.mark.parametrize("columns, inputs", [(64, 512), (200, 330)] + ([(6144, 4096), (4096, 12288)] if ON_GPU else []))
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_streamed_products_agree(tokens, columns, inputs, splits, gated):
    dtype = NARROW
    x = normal(tokens, inputs, dtype=dtype, seed=1)
    weight = normal(columns * (2 if gated else 1), inputs, dtype=dtype, seed=2, scale=inputs**-0.5)
    tiling = kernels.gpu.linear.Tiling(64, 64, splits, 4, 3)
    bias = None if gated else normal(columns, dtype=dtype, seed=3)
    for _ in range(2):  # the second time finds the counters as the first has left them
        out = kernels.gpu.linear.stream(x, weight, bias, tiling, gated=gated)
        wide = (
            gated_linear(x.float(), weight.float())
            if gated
            else linear(x.float(), weight.float(), None if bias is None else bias.float())
        )
        assert relative_error(out, wide) < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [0, 3, 65])
def test_linear_chooses_by_the_number_of_tokens_and_agrees(tokens):
    x = normal(tokens, 96, dtype=NARROW, seed=1)
    weight = normal(130, 96, dtype=NARROW, seed=2)
    bias = normal(130, dtype=NARROW, seed=3)
    out = kernels.gpu.linear.linear(x, weight, bias)
    assert relative_error(out, linear(x.float(), weight.float(), bias.float())) < TOLERANCE[NARROW]
    out = kernels.gpu.linear.gated_linear(x, weight)
    assert relative_error(out, gated_linear(x.float(), weight.float())) < TOLERANCE[NARROW]


# --- token statistics


def _same(ours: Proposals, theirs: Proposals, tolerance: float = 2e-5) -> None:
    assert torch.equal(ours.token, theirs.token)
    assert torch.equal(ours.finite, theirs.finite)
    for field in fields(Proposals):
        if field.name not in ("token", "finite"):
            torch.testing.assert_close(
                getattr(ours, field.name), getattr(theirs, field.name), rtol=tolerance, atol=2e-6
            )


vocabularies = pytest.mark.parametrize(
    "rows, vocab", [(1, 5), (4, 4097), (3, 9000)] + ([(70, 151936)] if ON_GPU else [])
)


@dtypes
@vocabularies
@pytest.mark.parametrize("warm", [False, True])
def test_greedy_statistics_agree(dtype, rows, vocab, warm):
    logits = normal(rows, vocab, dtype=dtype, seed=1, scale=4)
    temperature = torch.linspace(0.5, 2, rows, device=DEVICE) if warm else None
    barred = torch.zeros(vocab, dtype=torch.bool, device=DEVICE)
    barred[logits[0].argmax()] = True
    barred[-1] = True
    arguments = {"temperature": temperature, "barred": barred, "entropy": True, "margin": True}
    _same(kernels.gpu.token_stats.token_stats(logits, **arguments), token_stats(logits, **arguments))


@dtypes
def test_equal_logits_give_the_lowest_id_and_no_margin(dtype):
    logits = torch.zeros(3, 8200, dtype=dtype, device=DEVICE)
    logits[1, [8191, 4500, 77]] = 3.0
    logits[2, [8199, 4096]] = 2.0
    ours = kernels.gpu.token_stats.token_stats(logits, entropy=True, margin=True)
    assert ours.token.tolist() == [0, 77, 4096]
    _same(ours, token_stats(logits, entropy=True, margin=True))


def test_rows_that_are_not_finite_are_told_and_hold_zeros():
    logits = normal(6, 5000, dtype=torch.float32, seed=1)
    logits[0, 4999] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("nan")
    logits[3] = float("-inf")
    logits[4, :4500] = float("-inf")
    ours = kernels.gpu.token_stats.token_stats(logits, entropy=True, margin=True)
    assert ours.finite.tolist() == [False, False, False, False, True, True]
    _same(ours, token_stats(logits, entropy=True, margin=True))


def test_forbidden_ids_leave_the_distribution_and_the_logits_stay_as_they_were():
    logits = normal(3, 5000, dtype=torch.float32, seed=1)
    before = logits.clone()
    rows = torch.tensor([0, 0, 2, 2], device=DEVICE)
    ids = torch.stack((*logits[0].topk(2).indices, logits[2].argmax(), logits[2].argmax()))
    ours = kernels.gpu.token_stats.token_stats(logits, forbidden=(rows, ids), entropy=True)
    _same(ours, token_stats(logits, forbidden=(rows, ids), entropy=True))
    assert torch.equal(logits, before)


@dtypes
@vocabularies
def test_seeded_draws_are_those_of_the_reference(dtype, rows, vocab):
    logits = normal(rows, vocab, dtype=dtype, seed=1)
    chosen = torch.arange(0, rows, 2, device=DEVICE)
    count = chosen.numel()
    noise = Noise(
        rows=chosen,
        seed=torch.tensor([2**62 + 12345, 3, 2**33], device=DEVICE).repeat(rows)[:count],
        position=torch.arange(count, device=DEVICE) * 31,
        step=torch.arange(count, device=DEVICE) % 3,
    )
    arguments = {"temperature": torch.full((rows,), 0.7, device=DEVICE), "noise": noise}
    _same(kernels.gpu.token_stats.token_stats(logits, **arguments), token_stats(logits, **arguments))


@dtypes
@vocabularies
def test_drawn_tokens_are_ranked_by_another_temperature_as_in_the_reference(dtype, rows, vocab):
    logits, numbers = normal(rows, vocab, dtype=dtype, seed=1), torch.arange(rows, device=DEVICE)
    chosen = torch.arange(0, rows, 3, device=DEVICE)
    arguments = {
        "temperature": torch.where(numbers % 2 == 0, 0.3, 1.0).to(torch.float32),
        "noise": Noise(rows=numbers, seed=numbers + 7, position=numbers, step=numbers % 3),
        # Rows that a filter ranks are ranked by the temperature they are drawn with.
        "ranking": torch.where((numbers % 3 == 0) & (numbers % 2 == 0), 0.3, 1.0).to(torch.float32),
        "filters": Filters(
            rows=chosen,
            top_k=torch.full_like(chosen, 40),
            top_p=torch.full_like(chosen, 0.9, dtype=torch.float32),
            min_p=torch.zeros_like(chosen, dtype=torch.float32),
            ranks=torch.ones_like(chosen, dtype=torch.bool),
        ),
        "entropy": True,
        "margin": True,
    }
    _same(kernels.gpu.token_stats.token_stats(logits, **arguments), token_stats(logits, **arguments))


def test_rows_of_the_noise_that_are_not_drawn_keep_their_best_token():
    rows, vocab = 6, 3001
    logits, numbers = normal(rows, vocab, dtype=torch.float32, seed=1), torch.arange(rows, device=DEVICE)
    noise = Noise(rows=numbers, seed=numbers + 7, position=numbers, step=numbers % 3, drawn=numbers % 2 == 1)
    ours, expected = kernels.gpu.token_stats.token_stats(logits, noise=noise), token_stats(logits, noise=noise)
    _same(ours, expected)
    assert torch.equal(expected.token[::2], logits.argmax(-1)[::2])
    assert torch.equal(expected.token, token_stats(logits, noise=some_rows(noise, 1)).token)


def some_rows(noise: Noise, first: int) -> Noise:
    assert noise.rows is not None
    return Noise(noise.rows[first::2], noise.seed[first::2], noise.position[first::2], noise.step[first::2])


def test_noise_words_are_the_same_bit_for_bit():
    """Zero logits: every draw is then the argmax of the noise alone, and all its lanes compete."""
    count = 40 if ON_GPU else 8
    numbers = torch.arange(count, device=DEVICE)
    noise = Noise(rows=numbers, seed=numbers * 2**40 + 7, position=numbers * 1000, step=numbers % 5)
    logits = torch.zeros(count, 6000, device=DEVICE)
    expected = gumbel(noise.seed, noise.position, noise.step, 6000).argmax(-1)
    assert torch.equal(kernels.gpu.token_stats.token_stats(logits, noise=noise).token, expected)


@dtypes
@pytest.mark.parametrize(
    "top_k, top_p, min_p",
    [(0, 1.0, 0.0), (1, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (50, 0.77, 0.0), (0, 1.0, 0.05), (30, 0.6, 0.02)],
)
def test_filters_keep_what_the_reference_keeps(dtype, top_k, top_p, min_p):
    rows, vocab = 4, 9001 if ON_GPU else 3001
    logits = normal(rows, vocab, dtype=dtype, seed=5, scale=3)
    chosen = torch.tensor([0, 3], device=DEVICE)
    filters = Filters(
        rows=chosen,
        top_k=torch.tensor([top_k, top_k], device=DEVICE),
        top_p=torch.tensor([top_p, top_p], device=DEVICE),
        min_p=torch.tensor([min_p, min_p], device=DEVICE),
        ranks=torch.tensor([True, False], device=DEVICE),
    )
    noise = Noise(rows=chosen, seed=chosen + 9, position=chosen, step=chosen)
    arguments = {
        "temperature": torch.full((rows,), 1.3, device=DEVICE) if dtype == torch.bfloat16 else None,
        "barred": torch.arange(vocab, device=DEVICE) % 97 == 0,
        "filters": filters,
        "noise": noise,
    }
    _same(kernels.gpu.token_stats.token_stats(logits, **arguments), token_stats(logits, **arguments))


def test_no_rows_give_no_proposals():
    assert kernels.gpu.token_stats.token_stats(normal(0, 10, dtype=torch.float32, seed=1)).token.shape == (0,)


# --- mixture of experts

_ROUTERS = {
    "olmoe": Router(top_k=4, normalise=False),
    "qwen3": Router(top_k=8),
    "llada2.0": Router(top_k=8, scoring="sigmoid", groups=8, kept_groups=4, scale=2.5),
    "llada2.2": Router(top_k=8, scoring="sigmoid", capacity=24, scale=2.5),
    "odd": Router(top_k=3, scoring="sigmoid", groups=3, kept_groups=2),
}


@dtypes
@pytest.mark.parametrize("name", _ROUTERS)
def test_routing_agrees(dtype, name):
    router = _ROUTERS[name]
    count = 60 if name == "odd" else 256 if ON_GPU else 64
    logits = normal(9, count, dtype=dtype, seed=1)
    bias = normal(count, dtype=torch.float32, seed=2, scale=0.1) if router.scoring == "sigmoid" else None
    blocks = torch.tensor([0, 0, 0, 1, -1, 1, 4, 4, -1], device=DEVICE) if router.capacity else None
    ids, weights = kernels.gpu.router.route(logits, router, bias, blocks)
    expected_ids, expected_weights = route(logits, router, bias, blocks)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)
    if router.capacity:
        assert ids[:3].unique().numel() <= router.capacity


@pytest.mark.parametrize("name", _ROUTERS)
def test_tokens_of_nan_go_to_experts_that_exist_and_take_no_other_token_along(name):
    router = _ROUTERS[name]
    logits = normal(9, 60 if name == "odd" else 64, dtype=torch.float32, seed=1)
    logits[1] = float("nan")
    logits[2, 37] = float("nan")
    logits[3, 5:50] = float("nan")
    logits[4] = float("inf")
    logits[5, 11] = float("inf")
    logits[6] = float("-inf")
    # Those of one block see which experts the others want, so each has a block of its own.
    blocks = torch.arange(9, device=DEVICE) if router.capacity else None
    ids, weights = kernels.gpu.router.route(logits, router, None, blocks)
    expected_ids, expected_weights = route(logits, router, None, blocks)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert weights[1].isnan().all() and weights[[0, 7, 8]].isfinite().all()
    assert all(row.unique().numel() == router.top_k for row in ids)


def test_equal_votes_open_the_experts_of_the_lowest_ids():
    router = Router(top_k=2, scoring="sigmoid", capacity=5)
    logits = torch.zeros(3, 40, device=DEVICE)
    logits[:, 30] = 1.0
    blocks = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    ids, _ = kernels.gpu.router.route(logits, router, None, blocks)
    assert torch.equal(ids, route(logits, router, None, blocks)[0])
    assert ids[0].tolist() == [30, 0]


@product_dtypes
@pytest.mark.parametrize(
    "tokens, count, hidden, inner, top_k",
    [(1, 4, 64, 32, 2), (5, 9, 100, 70, 3), (40, 3, 64, 48, 2), (50, 3, 128, 64, 2), (70, 2, 256, 128, 1)]
    + (
        [(32, 256, 2048, 512, 8), (1024, 256, 2048, 512, 8), (300, 16, 1024, 768, 2), (900, 8, 2048, 512, 1)]
        if ON_GPU
        else []
    ),
)
def test_grouped_experts_agree(dtype, tokens, count, hidden, inner, top_k):
    x = normal(tokens, hidden, dtype=dtype, seed=1)
    gate_up = normal(count, 2 * inner, hidden, dtype=dtype, seed=2, scale=hidden**-0.5)
    down = normal(count, hidden, inner, dtype=dtype, seed=3, scale=inner**-0.5)
    ids, weights = route(normal(tokens, count, dtype=torch.float32, seed=4), Router(top_k=top_k))
    ids[-1, 0], weights[-1, 0] = -1, 0.0
    out = kernels.gpu.moe.experts(x, ids, weights, Experts(gate_up, down))
    wide = experts(x.float(), ids, weights, Experts(gate_up.float(), down.float()))
    # Gate, product and share are rounded one after the other.
    assert relative_error(out, wide) < 1.5 * TOLERANCE[dtype]


@product_dtypes
@pytest.mark.parametrize(
    "tokens, name, count, first, shared",
    [
        (1, "qwen3", 8, 0, True),
        (7, "llada2.0", 64, 0, True),
        (33, "olmoe", 16, 0, False),
        (40, "odd", 6, 3, False),
        (70, "olmoe", 4, 4, True),
    ]
    + ([(1024, "llada2.0", 256, 0, True), (300, "llada2.0", 64, 128, False), (32, "qwen3", 128, 0, True)] * ON_GPU),
)
def test_experts_mix_as_the_router_chooses_wherever_they_lie(dtype, tokens, name, count, first, shared):
    """Of more experts than lie here, the others' parts are left out; a shared one stands behind those that do."""
    hidden, inner, router = 128, 64, _ROUTERS[name]
    everyone = max(count + first, 2 * first, router.top_k * router.groups)
    x = normal(tokens, hidden, dtype=dtype, seed=1)
    logits = normal(tokens, everyone, dtype=torch.float32, seed=2)
    bias = normal(everyone, dtype=torch.float32, seed=3, scale=0.1) if router.scoring == "sigmoid" else None
    gate_up = normal(count + shared, 2 * inner, hidden, dtype=dtype, seed=4, scale=hidden**-0.5)
    down = normal(count + shared, hidden, inner, dtype=dtype, seed=5, scale=inner**-0.5)
    wide = mix(x.float(), logits, router, Experts(gate_up.float(), down.float(), shared=shared), bias, first=first)
    for _ in range(2):  # what counts the pairs is left as it was found
        out = kernels.gpu.moe.mix(x, logits, router, Experts(gate_up, down, shared=shared), bias, first=first)
        assert relative_error(out, wide) < 1.5 * TOLERANCE[dtype]


def test_a_router_with_a_capacity_does_not_mix_without_the_blocks_of_its_tokens():
    x, weight = torch.zeros(2, 32, device=DEVICE), torch.zeros(24, 32, 32, device=DEVICE)
    with pytest.raises(ValueError, match="blocks"):
        kernels.gpu.moe.mix(x, x[:, :24], _ROUTERS["llada2.2"], Experts(weight, weight[:, :, :16]))


@pytest.mark.parametrize("ranks", (1, 2, 8))
def test_tiles_are_chosen_by_the_tokens_that_come_to_an_expert_wherever_the_others_lie(monkeypatch, ranks):
    x, count = normal(1024, 128, dtype=NARROW, seed=1), 64 // ranks
    stack, lists = Experts(x.new_zeros(count, 128, 128), x.new_zeros(count, 128, 64)), []

    def note(logits, router, bias, blocks, valid, ids, weights, made, first):
        lists.append(made)

    monkeypatch.setattr(kernels.gpu.moe, "choose", note)
    monkeypatch.setattr(kernels.gpu.moe, "_multiply_all", lambda *_: x)
    kernels.gpu.moe.mix(x, normal(1024, 64, dtype=torch.float32, seed=2), Router(2), stack)
    assert lists[0].block_m == 64  # 32 tokens an expert
    assert lists[0].tiles >= count + 1024 * 2 // 64 - 1  # all may come here


@pytest.mark.parametrize("each", (2, 10, 40, 80))
@pytest.mark.parametrize("tokens, favourite", [(150, 2), (150, 0), (200, None)])
def test_products_in_one_launch_agree_with_those_in_two_however_unevenly_tokens_are_spread(tokens, favourite, each):
    count, hidden, inner, top_k = 4, 128, 64, 2
    x = normal(tokens, hidden, dtype=NARROW, seed=1)
    gate_up = normal(count + 1, 2 * inner, hidden, dtype=NARROW, seed=2, scale=hidden**-0.5)
    down = normal(count + 1, hidden, inner, dtype=NARROW, seed=3, scale=inner**-0.5)
    stack = Experts(gate_up, down, shared=True)
    # Nobody asks for expert 1; a favourite has all tokens, and so several tiles.
    ids = torch.stack((integers(2, 4, (tokens,), 4), torch.zeros(tokens, dtype=torch.int64, device=DEVICE)), 1)
    if favourite is not None:
        ids[:, 0], ids[:, 1] = favourite, -1
    weights = normal(tokens, top_k, dtype=torch.float32, seed=5).sigmoid()
    tile = kernels.gpu.moe._choose_tile(each * count, count)
    assert each <= tile.tokens
    together = kernels.gpu.moe.multiply(x, ids, weights, stack, tile)
    apart = kernels.gpu.moe.multiply(x, ids, weights, stack, None)
    assert relative_error(together, apart) < TOLERANCE[NARROW]


@pytest.mark.parametrize("shared", (False, True))
def test_what_a_token_gets_does_not_depend_on_its_neighbours(shared):
    count, hidden, inner = 2, 128, 64
    x = normal(130, hidden, dtype=NARROW, seed=1)
    gate_up = normal(count + shared, 2 * inner, hidden, dtype=NARROW, seed=2, scale=hidden**-0.5)
    down = normal(count + shared, hidden, inner, dtype=NARROW, seed=3, scale=inner**-0.5)
    ids, weights = route(normal(130, count, dtype=torch.float32, seed=4), Router(top_k=1))
    order = torch.randperm(130, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    stack = Experts(gate_up, down, shared=shared)
    straight = kernels.gpu.moe.experts(x, ids, weights, stack)
    shuffled = kernels.gpu.moe.experts(x[order], ids[order], weights[order], stack)
    assert torch.equal(shuffled, straight[order])


@product_dtypes
@pytest.mark.parametrize(
    "tokens, ends, rank, each",
    [(1, (48,), 8, 1), (4, (48,), 8, 4), (37, (130,), 16, 1), (20, (10, 20, 48), 40, 4), (300, (128, 192, 256), 16, 2)]
    + [(24, (160, 320), 16, 4), (20, (48,), 96, 1)]
    + ([(128, (4096, 5120, 6144), 64, 4), (1056, (12288, 24576), 32, 32)] if ON_GPU else []),
)
def test_mixed_adapters_agree(dtype, tokens, ends, rank, each):
    outputs = ends[-1]
    ranks = torch.tensor([rank, rank // 2, 1, rank - 1, rank], dtype=torch.int32, device=DEVICE)
    b = normal(5, outputs, rank, dtype=dtype, seed=4)
    b[(torch.arange(rank, device=DEVICE) >= ranks[:, None])[:, None].expand(-1, outputs, -1)] = 0
    factors = Factors(normal(5, len(ends) * rank, 8, dtype=dtype, seed=3), b, ends)
    # The linear's outputs and the low ones may lie side by side.
    both = normal(tokens, outputs + 5 * len(ends) * rank, dtype=dtype, seed=1)
    y, low = both[:, :outputs], both[:, outputs:]
    rows = tokens // each
    scale = torch.linspace(0.5, 2, rows, device=DEVICE)
    assignment = assign(integers(-1, 5, (rows,), seed=5), scale, ranks, each)
    wide = Factors(factors.a.float(), b.float(), ends)
    wanted = lora(y.float(), low.float(), wide, assignment)
    if len(ends) == 2:
        gated = kernels.gpu.lora.lora_swiglu(y, low, factors, assignment)
        assert relative_error(gated, swiglu(wanted)) < TOLERANCE[dtype]
        assert relative_error(lora_swiglu(y.float(), low.float(), wide, assignment), swiglu(wanted)) < 1e-6
    assert relative_error(kernels.gpu.lora.lora(y, low, factors, assignment), wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows, each", [(1, 1), (1, 4), (3, 5), (32, 4), (64, 32), (300, 1), (1024, 2), (1025, 1)])
def test_tokens_are_assigned_as_the_reference_does(rows, each):
    adapter = integers(-1, 5, (rows,), seed=rows)
    scale = torch.linspace(0.5, 2, rows, device=DEVICE)
    ranks = torch.tensor([8, 0, 16, 3, 1], dtype=torch.int32, device=DEVICE)
    found, wanted = (each_of(adapter, scale, ranks, each) for each_of in (kernels.gpu.lora.assign, assign))
    for name in ("order", "adapter", "rank", "scale"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name


def test_an_adapter_without_ranks_adds_nothing_whatever_lies_in_its_place():
    """One that is gone keeps its place until another one comes (`AdapterStack`)."""
    y, low = normal(40, 48, dtype=NARROW, seed=1), normal(40, 16, dtype=NARROW, seed=2)
    low[:, 8:] = float("nan")
    factors = Factors(normal(2, 8, 64, dtype=NARROW, seed=3), normal(2, 48, 8, dtype=NARROW, seed=4), (48,))
    adapter = integers(0, 2, (40,), seed=5)
    ranks = torch.tensor([8, 0], device=DEVICE)
    out = kernels.gpu.lora.lora(y, low, factors, assign(adapter, torch.ones(40, device=DEVICE), ranks))
    assert torch.equal(out[adapter == 1], y[adapter == 1])
    assert (out[adapter == 0] != y[adapter == 0]).any(-1).all()


def test_tokens_without_an_adapter_keep_their_values_bit_by_bit():
    y, low = normal(40, 48, dtype=NARROW, seed=1), normal(40, 16, dtype=NARROW, seed=2)
    factors = Factors(normal(2, 8, 64, dtype=NARROW, seed=3), normal(2, 48, 8, dtype=NARROW, seed=4), (48,))
    adapter = integers(-1, 2, (40,), seed=5)
    ranks = torch.tensor([8, 8], device=DEVICE)
    out = kernels.gpu.lora.lora(y, low, factors, assign(adapter, torch.ones(40, device=DEVICE), ranks))
    assert torch.equal(out[adapter < 0], y[adapter < 0])
    assert (out[adapter >= 0] != y[adapter >= 0]).any(-1).all()

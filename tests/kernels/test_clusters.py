"""Products by clusters of blocks: the rules anywhere, the machine code where NVRTC is, the products on Hopper."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.gpu_cases import DEVICE, NARROW, ON_GPU, TOLERANCE, normal, relative_error

pytest.importorskip("triton")

import kernels.gpu.linear
from kernels.gpu import clusters, driver
from kernels.gpu.clusters import Room, Tiling, choose, expected_us
from kernels.gpu.linear import choose_clusters
from kernels.linear import gated_linear, linear

HOPPER = ON_GPU and clusters.able(DEVICE)
on_hopper = pytest.mark.skipif(not HOPPER, reason="clusters need Hopper and NVRTC")
TILINGS = [
    Tiling(3, 256, 1, 2),
    Tiling(3, 256, 2),
    Tiling(3, 192, 2),
    Tiling(3, 160),
    Tiling(3, 224, 1, 2),
    Tiling(2, 64, 4),
    Tiling(1, 64, 2),
    Tiling(3, 128, 2, 1, 2),
    Tiling(1, 128, 1, 1, 4),
    Tiling(2, 128, 2, 2, 2),
    Tiling(2, 128, 2, 1, 2, 136),
    Tiling(2, 128, 1, 2, 2, 72),
    Tiling(3, 192, 2, 1, 2, 200),
    Tiling(4, 256, 1, 2, 2, 104),
]
H100 = Room(132, 66, 30)


@given(
    rows=st.integers(1, 4000).map(lambda sixteens: 16 * sixteens),
    inputs=st.integers(1, 3000).map(lambda eights: 8 * eights),
    tokens=st.integers(1, 2048),
    room=st.builds(Room, st.integers(60, 200), st.integers(30, 100), st.integers(0, 50)),
    gated=st.booleans(),
)
def test_a_chosen_tiling_covers_the_output_and_fits_a_multiprocessor(rows, inputs, tokens, room, gated):
    tiling = choose(rows, inputs, tokens, room, gated=gated)
    grid = tiling.grid(rows, tokens)
    assert grid.blocks % grid.cluster == 0
    across = tiling.token_clusters(tokens)
    assert across * tiling.tokens_in_cluster * tiling.tokens >= tokens
    assert grid.blocks // (across * grid.cluster) * tiling.rows_in_cluster * tiling.rows >= rows
    assert grid.shared_bytes + 2048 <= 228 * 1024 and tiling.stages >= 3
    assert 0 < expected_us(tiling, rows, inputs, tokens, room) < float("inf")
    if gated:
        assert tiling.gates


def test_the_gate_of_an_8b_runs_in_one_wave_of_tiles_that_all_tokens_share():
    tiling = choose(24576, 4096, 256, H100, gated=True)
    assert (tiling.rows, tiling.tokens) == (192, 256)
    assert 124 <= tiling.grid(24576, 256).blocks <= 132


def test_one_more_turn_of_tiles_costs_as_much_as_the_first():
    tiling = Tiling(3, 256)
    one, two = (expected_us(tiling, 192 * tiles, 4096, 256, H100) for tiles in (132, 133))
    assert one < 90 and two > 1.4 * one


def test_an_8bs_products_for_few_tokens_occupy_most_of_the_device():
    for rows, inputs in ((6144, 4096), (4096, 4096), (4096, 12288)):
        for tokens in (4, 32, 128):
            assert choose(rows, inputs, tokens, H100, gated=False).grid(rows, tokens).blocks >= 96


def test_clusters_of_four_are_chosen_as_many_as_run_at_once():
    tiling = choose(4096, 12288, 256, H100, gated=False)
    assert tiling.cluster == 4 and tiling.grid(4096, 256).blocks <= 4 * 30
    assert choose(4096, 12288, 256, Room(132, 66, 0), gated=False).cluster < 4


@given(rows=st.integers(1, 2600).map(lambda sixteens: 16 * sixteens), tokens=st.integers(1, 4096))
def test_wide_products_without_a_gate_take_clusters_only_where_tiles_fill_their_turns(rows, tokens):
    tiling = choose_clusters(tokens, rows, 4096, H100, gated=False)
    if tiling is not None and rows >= clusters.WIDE:
        blocks, at_once = tiling.grid(rows, tokens).blocks, H100.blocks(tiling.cluster)
        idle = -blocks % at_once
        assert tokens > 64 and idle <= 0.1 * (blocks + idle)


def test_numbers_of_tokens_between_those_of_tiles_have_tilings_of_their_own():
    """Resting steps of 320 tokens took 10.0 ms where 384 took 8.7: each tile of 192 was a third empty."""
    for rows, inputs in ((4096, 4096), (4096, 12288)):
        for tokens in (144, 160, 288, 320):
            tiling = choose_clusters(tokens, rows, inputs, H100, gated=False)
            assert tiling is not None
            assert 0 <= tiling.token_clusters(tokens) * tiling.tokens_in_cluster * tiling.tokens - tokens <= 16


def test_outputs_that_leave_much_of_a_turn_idle_are_left_to_cublas_from_where_clusters_gain_little():
    assert choose_clusters(320, 6144, 4096, H100, gated=False) is not None
    assert choose_clusters(320, 6144 + 384, 4096, H100, gated=False) is None
    assert choose_clusters(256, 6144 + 384, 4096, H100, gated=False) is not None


def test_a_gate_that_adapters_stand_before_is_one_turn_of_tiles_and_heads_are_left_to_cublas():
    for rows in (24576 + 2 * 8 * 16, 24576 + 2 * 8 * 32):
        tiling = choose_clusters(128, rows, 4096, H100, gated=False)
        assert tiling is not None and 128 <= tiling.grid(rows, 128).blocks <= 132
    assert choose_clusters(128, 24576 + 2 * 8 * 64, 4096, H100, gated=False) is None
    assert choose_clusters(128, 151936, 4096, H100, gated=False) is None


def test_a_gate_whose_tiles_few_tokens_would_fill_by_half_is_left_to_cublas():
    """What each of two ranks has of an 8B's gate, 32 and 64 tokens: tiles of 128 take 45.9 and 42.1 us, cuBLAS 30.6."""
    assert clusters.choose(12288, 4096, 32, H100, gated=True).tokens == 128
    assert all(choose_clusters(tokens, 12288, 4096, H100, gated=True) is None for tokens in (1, 32, 64))
    assert choose_clusters(128, 12288, 4096, H100, gated=True) is not None
    assert all(choose_clusters(tokens, 24576, 4096, H100, gated=True) is not None for tokens in (1, 4, 32, 64, 128))


def test_norms_are_folded_for_as_many_tokens_as_it_was_timed_to_gain_and_all_of_those_go_by_clusters():
    """Steps of 192 tokens took as long with the norms folded into the products as without, of 256 longer."""
    folded = set(kernels.gpu.linear._FOLDED)
    assert {1, 4, 32, 64, 96, 128} <= folded and not folded & {192, 224, 256, 288, 320, 384}
    for tokens in folded:
        for rows, inputs, gated in (
            (4096, 4096, False),
            (24576, 4096, True),
            (4096, 12288, False),
            (6144, 4096, False),
        ):
            assert choose_clusters(tokens, rows, inputs, H100, gated=gated) is not None


@pytest.mark.parametrize(
    "wrong",
    [
        (5, 128),
        (3, 128, 4, 4),
        (3, 272),
        (3, 96, 1, 1, 4),
        (2, 40),
        (2, 80, 1, 4),
        (2, 128, 1, 1, 1, 100),
        (3, 192, 1, 1, 1, 216),
        (2, 64, 1, 1, 1, 64),
        (1, 64, 1, 1, 4, 64),
        (4, 256, 1, 1, 1, 144),
        (4, 256),
        (4, 192),
        (3, 0),
    ],
)
def test_a_tiling_that_the_kernel_cannot_run_is_an_error(wrong):
    with pytest.raises(ValueError, match="Tiling"):
        Tiling(*wrong)


@pytest.mark.skipif(driver.compiler() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_the_text_compiles_for_hopper(tiling, gated, half):
    if gated and not tiling.gates:
        pytest.skip("no such tiling behind a gate")
    assert driver.compile_cubin(clusters.source(tiling, gated=gated, half=half)).startswith(b"\x7fELF")


@pytest.mark.skipif(driver.compiler() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("what", ["adds", "scales", "scales behind a gate"])
def test_the_text_with_a_part_of_a_norm_compiles_for_hopper(tiling, what):
    adds, gated = what == "adds", "gate" in what
    if gated and not tiling.gates:
        pytest.skip("no such tiling behind a gate")
    text = clusters.source(tiling, gated=gated, half=False, scales=not adds, adds=adds)
    assert driver.compile_cubin(text).startswith(b"\x7fELF")


@pytest.mark.skipif(driver.compiler() is None, reason="NVRTC is not installed")
def test_a_text_that_does_not_compile_is_an_error_with_the_compilers_words():
    with pytest.raises(RuntimeError, match="nonsense"):
        driver.compile_cubin("nonsense")


@on_hopper
@pytest.mark.parametrize("tokens", [1, 100, 256, 300, 512])
@pytest.mark.parametrize("rows, inputs", [(512, 512), (1040, 1112), (6144, 4096)])
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_products_by_clusters_agree_and_repeat(tokens, rows, inputs, tiling, gated):
    if gated and not tiling.gates:
        pytest.skip("no such tiling behind a gate")
    x = normal(tokens, inputs, dtype=NARROW, seed=1)
    weight = normal(rows, inputs, dtype=NARROW, seed=2, scale=inputs**-0.5)
    bias = None if gated else normal(rows, dtype=NARROW, seed=3)
    wide = (
        gated_linear(x.float(), weight.float())
        if gated
        else linear(x.float(), weight.float(), None if bias is None else bias.float())
    )
    torch.full_like(wide, float("nan"), dtype=NARROW)
    out = clusters.multiply(x, weight, bias, tiling, gated=gated)
    assert relative_error(out, wide) < TOLERANCE[NARROW]
    assert torch.equal(out, clusters.multiply(x, weight, bias, tiling, gated=gated))


@on_hopper
def test_a_part_of_wider_tokens_is_multiplied_where_it_lies():
    wide = normal(200, 1024, dtype=NARROW, seed=1)
    weight = normal(256, 512, dtype=NARROW, seed=2, scale=512**-0.5)
    x = wide[:, 512:]
    out = clusters.multiply(x, weight, None, TILINGS[7], gated=False)
    assert torch.equal(out, clusters.multiply(x.contiguous(), weight, None, TILINGS[7], gated=False))


@on_hopper
def test_what_the_copy_engine_cannot_address_is_an_error():
    x, weight = normal(8, 100, dtype=NARROW, seed=1), normal(64, 100, dtype=NARROW, seed=2)
    with pytest.raises(ValueError, match="does not go with"):
        clusters.multiply(x, weight, None, TILINGS[0], gated=False)


@on_hopper
@pytest.mark.parametrize("tokens", [1, 31, 65, 128, 129, 144, 160, 288, 320, 340, 512, 1100, 2048])
@pytest.mark.parametrize("rows, inputs", [(6144, 4096), (4096, 4096), (4096, 12288)])
def test_linear_takes_clusters_where_they_are_faster_and_agrees(tokens, rows, inputs):
    x = normal(tokens, inputs, dtype=NARROW, seed=1)
    weight = normal(rows, inputs, dtype=NARROW, seed=2, scale=inputs**-0.5)
    bias = normal(rows, dtype=NARROW, seed=3)
    out = kernels.gpu.linear.linear(x, weight, bias)
    assert relative_error(out, linear(x.float(), weight.float(), bias.float())) < TOLERANCE[NARROW]
    out = kernels.gpu.linear.gated_linear(x, weight)
    assert relative_error(out, gated_linear(x.float(), weight.float())) < TOLERANCE[NARROW]


@on_hopper
@pytest.mark.parametrize("tokens", [65, 128, 144, 256, 320, 512, 1024])
def test_a_wide_product_without_a_gate_agrees(tokens):
    x = normal(tokens, 4096, dtype=NARROW, seed=1)
    weight = normal(24832, 4096, dtype=NARROW, seed=2, scale=1 / 64)
    assert choose_clusters(tokens, 24832, 4096, clusters.room_of(DEVICE), gated=False) is not None
    out = kernels.gpu.linear.linear(x, weight)
    assert relative_error(out, linear(x.float(), weight.float())) < TOLERANCE[NARROW]


@on_hopper
def test_a_replayed_product_is_what_it_is_by_itself_for_new_tokens():
    weight = normal(4096, 4096, dtype=NARROW, seed=2, scale=1 / 64)
    x, other = (normal(256, 4096, dtype=NARROW, seed=seed) for seed in (1, 3))
    wanted = [kernels.gpu.linear.gated_linear(tokens, weight) for tokens in (x, other)]
    held = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.gpu.linear.gated_linear(held, weight)
    for tokens, want in zip((x, other), wanted, strict=True):
        held.copy_(tokens)
        graph.replay()
        assert torch.equal(out, want)

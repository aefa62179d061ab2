"""The parts that ranks hold of a model cover it once, and every stored number finds its way."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kernels.moe import Router
from tests.worker.parallel.ranks import SilentPeers
from tests.worker.tiny_checkpoints import write_checkpoint
from worker.models import ModelError, load_model
from worker.models.checkpoint import read_checkpoint
from worker.models.layers import Decoder, LayerShape, MoeShape
from worker.parallel.loading import load_share, share_decoder
from worker.parallel.shares import Cut, NotDivisible, Rank, check_divisible, cuts, pieces, vocabulary

CPU = torch.device("cpu")


def a_decoder(heads: int, kv_heads: int, inner: int, vocabulary_size: int, moe: MoeShape | None) -> Decoder:
    shape = LayerShape(8, heads, kv_heads, 4, inner, 1e-6, qkv_bias=True, out_bias=True, head_norm=True, moe=moe)
    return Decoder(shape, 2, vocabulary_size, 1e4, False, device=CPU, dtype=torch.float32)


@given(
    count=st.sampled_from([1, 2, 3, 4, 6]),
    groups=st.integers(1, 3),
    kv=st.integers(1, 3),
    inner=st.integers(1, 3),
    vocabulary_size=st.integers(40, 60),
    experts=st.integers(0, 2),
)
@settings(max_examples=40, deadline=None)
def test_each_number_of_a_weight_lies_on_some_rank_and_twice_only_with_shared_key_heads(
    count: int, groups: int, kv: int, inner: int, vocabulary_size: int, experts: int
) -> None:
    moe = MoeShape(experts * count, 4, Router(1), shared_inner=2 * count) if experts else None
    decoder = a_decoder(count * groups * kv, count * kv, count * inner, vocabulary_size, moe)
    parts = [cuts(decoder, Rank(number, count)) for number in range(count)]

    for weight in decoder.parameters():
        if weight not in parts[0]:
            assert all(weight not in each for each in parts)
            continue
        held = [i for each in parts for span in each[weight].ranges for i in range(*span)]
        assert sorted(held) == list(range(weight.shape[parts[0][weight].dim]))


@pytest.mark.parametrize(("count", "heads"), [(4, [[0], [0], [1], [1]]), (8, [[0], [0], [0], [0], [1], [1], [1], [1]])])
def test_ranks_beyond_the_key_heads_hold_the_one_that_their_query_heads_read(
    count: int, heads: list[list[int]]
) -> None:
    decoder = a_decoder(8, 2, 8, 64, None)
    attention = next(iter(decoder.layers)).attention

    for number in range(count):
        (own, keys, values) = cuts(decoder, Rank(number, count))[attention.qkv.weight].ranges
        assert list(range(own[0] // 4, own[1] // 4)) == list(range(number * 8 // count, (number + 1) * 8 // count))
        assert [(keys[0] - 32) // 4] == heads[number] and values[0] - keys[0] == 2 * 4


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_pieces_of_any_box_of_a_weight_fill_exactly_what_is_kept_of_it(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    whole = torch.arange(torch.tensor(shape).prod().item(), dtype=torch.float32).view(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    edges = sorted(data.draw(st.sets(st.integers(0, shape[dim]), max_size=4)))
    ranges = tuple(zip(edges[::2], edges[1::2], strict=False))
    cut = Cut(dim, ranges)
    at = data.draw(st.integers(0, shape[0] - 1))
    boxes = [whole[at : data.draw(st.integers(at + 1, shape[0]))]]
    if len(shape) > 1:
        boxes.append(whole[at])
        boxes += [*whole.split(data.draw(st.integers(1, shape[1])), dim=1)]
    kept = torch.cat([whole.narrow(dim, first, end - first) for first, end in ranges], dim) if ranges else None
    filled = torch.full_like(whole, -1) if kept is None else torch.full_like(kept, -1)

    for box in boxes:
        view = int(box.storage_offset()), tuple(box.shape), box.stride()
        for piece in pieces(tuple(whole.shape), view, cut):
            part = filled[tuple(slice(*span) for span in piece.target)]
            part.copy_(box[tuple(slice(*span) for span in piece.source)].reshape(part.shape))

    if kept is not None and len(shape) > 1:
        assert torch.equal(filled, kept)
    else:
        assert kept is None or bool(((filled == kept) | (filled == -1)).all())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_reads_its_slices_of_a_checkpoint(tmp_path: Path, size: int, shards: int, tied: bool) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=shards, tie_word_embeddings=tied)
    module = load_model(folder).module
    assert isinstance(module, Decoder)

    for rank in range(size):
        own = load_share(read_checkpoint(folder), SilentPeers(rank, size), device=CPU, dtype=torch.float32)
        assert isinstance(own.module, Decoder) and (own.module.head is own.module.embedding) is tied
        assert own.spec.num_kv_heads == max(1, 2 // size)
        parts = cuts(module, Rank(rank, size))
        for (name, part), (same, weight) in zip(own.module.named_parameters(), module.named_parameters(), strict=True):
            assert name == same
            assert torch.equal(part, kept(weight, parts.get(weight))), name


def kept(weight: nn.Parameter, cut: Cut | None) -> Tensor:
    if cut is None:
        return weight
    return torch.cat([weight.narrow(cut.dim, first, end - first) for first, end in cut.ranges], cut.dim)


@given(st.integers(1, 100), st.integers(1, 8))
def test_ids_are_shared_in_order(size: int, count: int) -> None:
    shares = [vocabulary(Rank(number, count), size) for number in range(count)]
    assert [i for share in shares for i in range(*share)] == list(range(size))
    assert len({end - first for first, end in shares[:-1] if end < size}) <= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "4 attention heads cannot be shared by 3 ranks"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, "2 key and value heads cannot be shared by 3 ranks"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, "40 columns of the MLP cannot be shared by 3 ranks"),
    ],
)
def test_a_model_without_equal_shares_is_refused_by_the_size_at_fault(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_checkpoint(tmp_path / "m", **changes)
    with pytest.raises(ModelError, match=f"tensor_parallel: {message}"):
        load_share(read_checkpoint(folder), SilentPeers(0, 3), device=CPU, dtype=torch.float32)


def test_experts_that_cannot_be_shared_are_refused() -> None:
    decoder = a_decoder(4, 4, 8, 64, MoeShape(6, 4, Router(1)))
    with pytest.raises(NotDivisible, match="6 experts cannot be shared by 4 ranks"):
        check_divisible(decoder, 4)


def test_what_each_rank_adds_is_added_once() -> None:
    decoders = [a_decoder(4, 2, 8, 64, None) for _ in range(2)]
    for rank, decoder in enumerate(decoders):
        share_decoder(decoder, SilentPeers(rank, 2), CPU)

    biases = [next(iter(decoder.layers)).attention.out.bias for decoder in decoders]
    assert biases[0] is not None and biases[1] is None

"""Which part of each weight a rank holds (Megatron-LM, arXiv 1909.08053, section 3).

Projections into heads and into the MLP's inner columns are cut by outputs, those back by inputs, so that a layer needs
one sum behind its attention and one behind its MLP. Query heads stay with their key heads; where there are more ranks
than key heads, several ranks hold the same one. Experts are cut by number: each rank computes its own for all tokens,
and the sum that the layer needs anyway adds them up. Sending tokens to their experts' ranks instead (all-to-all) would
move less only if a token's hidden state cost more than a weight: at the some hundreds of tokens of a denoise step the
weights of nearly all experts are read, and the sum is a few hundred KiB. Embedding and head are cut by ids.
"""

from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, replace

from torch import nn

from worker.models.layers import Attention, Decoder, GatedMLP, LayerShape, MoeMLP

Range = tuple[int, int]
"""[first, end)"""


class NotDivisible(Exception):
    """A model has no equal shares for so many ranks; the message says which of its sizes stands against it."""


@dataclass(frozen=True, slots=True)
class Rank:
    number: int
    count: int

    def of(self, size: int) -> Range:
        """Return this rank's part of `size` equal things, which the count must divide."""
        return self.number * size // self.count, (self.number + 1) * size // self.count


@dataclass(frozen=True, slots=True)
class Cut:
    """What is kept of a weight: the ranges of one of its dimensions, side by side."""

    dim: int
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        return sum(end - first for first, end in self.ranges)


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a stored tensor, and where it goes in the kept part of a weight; ranges for each dimension."""

    source: tuple[Range, ...]
    target: tuple[Range, ...]


def check_divisible(decoder: Decoder, count: int) -> None:
    """Raise `NotDivisible` unless so many ranks get equal shares of the decoder."""
    for layer in decoder.layers:
        shape, mlp = layer.attention.shape, layer.mlp
        sizes = {"attention heads": shape.num_heads}
        if shape.num_kv_heads % count and count % shape.num_kv_heads:
            sizes["key and value heads"] = shape.num_kv_heads
        dense = mlp if isinstance(mlp, GatedMLP) else mlp.shared
        if dense is not None:
            sizes["columns of the MLP"] = dense.down.weight.shape[1]
        if isinstance(mlp, MoeMLP):
            sizes["experts"] = mlp.down.shape[0]
        for what, size in sizes.items():
            if size % count:
                raise NotDivisible(f"{size} {what} cannot be shared by {count} ranks")
    vocabulary = decoder.embedding.shape[0]
    if (count - 1) * -(-vocabulary // count) >= vocabulary:
        raise NotDivisible(f"{vocabulary} ids cannot be shared by {count} ranks")


def kv_heads(rank: Rank, shape: LayerShape) -> Range:
    """Return the key and value heads of a rank: at least one."""
    if shape.num_kv_heads >= rank.count:
        return rank.of(shape.num_kv_heads)
    own = rank.number * shape.num_kv_heads // rank.count
    return own, own + 1


def local_shape(rank: Rank, shape: LayerShape) -> LayerShape:
    """Return what a layer of the rank looks like to itself."""
    first, end = kv_heads(rank, shape)
    return replace(
        shape,
        num_heads=shape.num_heads // rank.count,
        num_kv_heads=end - first,
        intermediate_size=shape.intermediate_size // rank.count,
    )


def vocabulary(rank: Rank, size: int) -> Range:
    """Return the ids of a rank; all ranks but the last have the same number."""
    width = -(-size // rank.count)
    return min(rank.number * width, size), min((rank.number + 1) * width, size)


def cuts(decoder: Decoder, rank: Rank) -> dict[nn.Parameter, Cut]:
    """Return what the rank keeps of each weight of a whole decoder; of those that are not named, all."""
    ids = Cut(0, (vocabulary(rank, decoder.embedding.shape[0]),))
    found = {decoder.embedding: ids, decoder.head: ids}
    for layer in decoder.layers:
        found |= _attention(layer.attention, rank)
        mlp = layer.mlp
        if isinstance(mlp, GatedMLP):
            found |= _gated(mlp, rank)
            continue
        own = Cut(0, (rank.of(mlp.down.shape[0]),))
        found |= {mlp.gate_up: own, mlp.down: own}
        if mlp.shared is not None:
            found |= _gated(mlp.shared, rank)
    return found


def _attention(attention: Attention, rank: Rank) -> dict[nn.Parameter, Cut]:
    shape = attention.shape
    heads, keys = rank.of(shape.num_heads), kv_heads(rank, shape)
    first_key, first_value = shape.num_heads, shape.num_heads + shape.num_kv_heads
    rows = [heads, _moved(keys, first_key), _moved(keys, first_value)]
    outputs = Cut(0, tuple(_scaled(each, shape.head_dim) for each in rows))
    found = {
        attention.qkv.weight: outputs,
        attention.out.weight: Cut(1, (_scaled(heads, shape.head_dim),)),
    }
    if attention.qkv.bias is not None:
        found[attention.qkv.bias] = outputs
    if attention.head_norm is not None:
        found[attention.head_norm] = Cut(0, tuple(rows[:2]))
    return found


def _gated(mlp: GatedMLP, rank: Rank) -> dict[nn.Parameter, Cut]:
    inner = mlp.down.weight.shape[1]
    own = rank.of(inner)
    return {mlp.gate_up.weight: Cut(0, (own, _moved(own, inner))), mlp.down.weight: Cut(1, (own,))}


def _moved(span: Range, by: int) -> Range:
    return span[0] + by, span[1] + by


def _scaled(span: Range, by: int) -> Range:
    return span[0] * by, span[1] * by


def pieces(whole: ReadOnly[int], view: tuple[int, ReadOnly[int], ReadOnly[int]], cut: Cut | None) -> list[Piece]:
    """Return what to copy of a stored tensor, whose place in a whole weight is a view of it.

    whole: shape of the weight. view: (offset, shape, strides) of the place, a box of the weight that may lack
    dimensions in which it is one wide. Sources have the view's dimensions, targets the weight's.
    """
    box, dims = _box(whole, *view)
    if cut is None:
        return [Piece(_of_view(box, box, dims), box)]
    found: list[Piece] = []
    begin = 0
    for first, end in cut.ranges:
        low, high = max(first, box[cut.dim][0]), min(end, box[cut.dim][1])
        if low < high:
            part = (*box[: cut.dim], (low, high), *box[cut.dim + 1 :])
            target = (*box[: cut.dim], (begin + low - first, begin + high - first), *box[cut.dim + 1 :])
            found.append(Piece(_of_view(part, box, dims), target))
        begin += end - first
    return found


def _box(
    whole: ReadOnly[int], offset: int, shape: ReadOnly[int], strides: ReadOnly[int]
) -> tuple[tuple[Range, ...], list[int]]:
    """Return the ranges of a view in each dimension of a contiguous whole, and which of them the view has."""
    box: list[Range] = []
    dims: list[int] = []
    at = 0
    for dim, size in enumerate(whole):
        step = 1
        for inner in whole[dim + 1 :]:
            step *= inner
        first = offset // step
        offset %= step
        if at < len(shape) and strides[at] == step and first + shape[at] <= size:
            box.append((first, first + shape[at]))
            dims.append(dim)
            at += 1
        else:
            box.append((first, first + 1))
    if at < len(shape):
        raise ValueError(f"a view of shape {list(shape)} is no box of {list(whole)}")
    return tuple(box), dims


def _of_view(part: ReadOnly[Range], box: ReadOnly[Range], dims: ReadOnly[int]) -> tuple[Range, ...]:
    return tuple((part[dim][0] - box[dim][0], part[dim][1] - box[dim][0]) for dim in dims)

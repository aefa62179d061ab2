"""Paged attention in which every query position has a visible end: it attends to all positions before it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of equal query length, attended in one call."""

    tokens: Tensor | slice
    """[rows * query] int64 positions in the ragged batch; a slice where they are adjacent."""
    slots: Tensor | slice
    """[rows * context] int64 KV slots, padded with the row's last one; a slice where they are adjacent."""
    rows: int
    query: int
    context: int
    bias: Tensor | None
    """[rows, 1, query, context], 0 where visible and -inf elsewhere; None if every query sees the whole context."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What attention and KV writes need to know of a step; made once, shared by all layers.

    A slot is `page * page_size + offset`. The first four fields are all that a fused twin needs; `groups` is how the
    reference avoids a loop over rows.
    """

    slots: Tensor
    """[tokens] int64: where each query position's key and value are written."""
    row_offsets: Tensor
    """[rows + 1] int32: first token of each row in the ragged batch."""
    visible_end: Tensor
    """[tokens] int32"""
    page_table: Tensor
    """[rows, pages of the longest row] int32, padded with 0."""
    groups: tuple[RowGroup, ...]
    visible_start: Tensor | None = None
    """[tokens] int32: positions before it are hidden; None: nothing is."""


def plan_attention(
    starts: Sequence[int],
    visible_end: Sequence[Sequence[int]],
    pages: Sequence[Sequence[int]],
    page_size: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    visible_start: Sequence[Sequence[int]] | None = None,
) -> AttentionPlan:
    """Lay out one step: row r asks for positions starts[r].. and sees pages[r] up to visible_end[r][i].

    The pages of a row cover every position that it writes or sees. `dtype` is that of the keys. With `visible_start`
    the i-th query of row r sees nothing before visible_start[r][i] (sliding windows). Without it, a plan for a GPU has
    one group that only tells the longest query, for the fused twin needs no more, and it is sent without waiting.
    """
    lengths = [len(ends) for ends in visible_end]
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    width = max(map(len, pages))
    table = torch.tensor([[*row, *[0] * (width - len(row))] for row in pages], dtype=torch.int64)
    ends = torch.tensor([end for row in visible_end for end in row], dtype=torch.int64)
    begins = None
    if visible_start is not None:
        begins = torch.tensor([start for row in visible_start for start in row], dtype=torch.int64)
    within = torch.arange(offsets[-1])
    row_of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = within + (torch.tensor(starts) - torch.tensor(offsets[:-1]))[row_of]
    written = table[row_of, position // page_size] * page_size + position % page_size

    if device.type == "cuda" and visible_start is None:
        reach = max(max(row_ends) for row_ends in visible_end)
        group = RowGroup(slice(0, offsets[-1]), slice(0, 0), len(lengths), max(lengths), reach, None)
        return AttentionPlan(
            slots=upload(written, device),
            row_offsets=upload(torch.tensor(offsets, dtype=torch.int32), device),
            visible_end=upload(ends.int(), device),
            page_table=upload(table.int(), device),
            groups=(group,),
        )

    members: dict[tuple[int, int], list[int]] = {}
    for row, row_ends in enumerate(visible_end):
        # Contexts of one group are padded to the longest: a power of two bounds the padding to half.
        members.setdefault((lengths[row], max(row_ends).bit_length()), []).append(row)
    groups = tuple(
        _group(rows, lengths, offsets, ends, begins, table, pages, page_size, device, dtype)
        for rows in members.values()
    )
    return AttentionPlan(
        slots=written.to(device),
        row_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        visible_end=ends.to(device, torch.int32),
        page_table=table.to(device, torch.int32),
        groups=groups,
        visible_start=None if begins is None else begins.to(device, torch.int32),
    )


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Return `values` on a device, in order with what runs there, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def _group(
    rows: list[int],
    lengths: list[int],
    offsets: list[int],
    ends: Tensor,
    begins: Tensor | None,
    table: Tensor,
    pages: Sequence[Sequence[int]],
    page_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> RowGroup:
    query = lengths[rows[0]]
    adjacent = rows[-1] - rows[0] == len(rows) - 1 and len(set(lengths[rows[0] : rows[-1] + 1])) == 1
    if adjacent:
        tokens: Tensor | slice = slice(offsets[rows[0]], offsets[rows[-1] + 1])
        picked = tokens
    else:
        offset = torch.tensor([offsets[row] for row in rows])
        picked = (offset[:, None] + torch.arange(query)).view(-1)
        tokens = picked.to(device)
    seen = ends[picked].view(len(rows), query)
    longest = seen.amax(1)
    first = torch.zeros_like(longest)
    if begins is not None:
        # What no query of a row sees is not even gathered.
        first = begins[picked].view(len(rows), query).amin(1)
    context = int((longest - first).max())
    position = first[:, None] + torch.arange(context)
    hidden = position[:, None] >= seen[:, :, None]
    if begins is not None:
        hidden |= position[:, None] < begins[picked].view(len(rows), query)[:, :, None]
    bias = None
    if bool(hidden.any()):
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None].to(device)

    numbers, skipped = pages[rows[0]], int(first[0])
    used = range(skipped // page_size, (skipped + context + page_size - 1) // page_size)
    if len(rows) == 1 and all(numbers[i] == numbers[0] + i for i in used):
        begin = numbers[0] * page_size + skipped
        slots: Tensor | slice = slice(begin, begin + context)
    else:
        # Padding repeats the row's last visible slot: a slot behind it may hold another request's leftovers, and even
        # with weight zero a NaN would spread.
        reached = torch.minimum(position, longest[:, None] - 1)
        slots = table[rows].gather(1, reached // page_size) * page_size + reached % page_size
        slots = slots.view(-1).to(device)
    return RowGroup(tokens, slots, len(rows), query, context, bias)


def attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan, scale: float, scales: Tensor | None = None
) -> Tensor:
    """Return softmax(scale * q k^T) v over the visible positions of each query.

    q [tokens, heads, head_dim], k_pages and v_pages [pages, page_size, kv_heads, head_dim] of the same dtype, or e4m3
    with `scales` [2, pages, page_size, kv_heads]; the result has q's shape. Query head h reads KV head
    h // (heads / kv_heads).
    """
    if len(plan.groups) == 1:
        return _attend(q, k_pages, v_pages, plan.groups[0], scale, scales)
    out = torch.empty_like(q)
    for group in plan.groups:
        out[group.tokens] = _attend(q[group.tokens], k_pages, v_pages, group, scale, scales)
    return out


def _attend(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, group: RowGroup, scale: float, scales: Tensor | None
) -> Tensor:
    heads, head_dim = q.shape[1:]
    kv_heads = k_pages.shape[2]
    k, v = _gather(k_pages, group), _gather(v_pages, group)
    if scales is not None:
        k, v = (
            (part.float() * _gather(of_part, group)[..., None]).to(q.dtype)
            for part, of_part in zip((k, v), scales, strict=True)
        )
    result = F.scaled_dot_product_attention(
        q.view(group.rows, group.query, heads, head_dim).transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=group.bias,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return result.transpose(1, 2).reshape(q.shape)


def _gather(pages: Tensor, group: RowGroup) -> Tensor:
    """Return [rows, context, kv_heads, ...]."""
    flat = pages.flatten(0, 1)
    if isinstance(group.slots, slice):
        picked = flat[group.slots]
    elif flat.itemsize > 1:
        picked = flat.index_select(0, group.slots)
    else:
        # Not every device knows how to index numbers of 8 bits.
        picked = flat.view(torch.uint8).index_select(0, group.slots).view(flat.dtype)
    return picked.view(group.rows, group.context, *flat.shape[1:])

"""Twins of `kernels.token_share`: one pass over a rank's logits, and one over what all ranks tell of them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.overlap import overlap_options, wait_for_inputs
from kernels.gpu.token_stats import MOST_SPLITS, of_best, reduce_rows, runner_up_of, whole_slope
from kernels.token_share import Part
from kernels.token_stats import Noise, Proposals

_MOST_RANKS = 64


def token_share(
    logits: Tensor,
    first: int,
    temperature: Tensor | None = None,
    barred: Tensor | None = None,
    forbidden: tuple[Tensor, Tensor] | None = None,
    noise: Noise | None = None,
    ranking: Tensor | None = None,
    *,
    entropy: bool = False,
    margin: bool = False,
) -> Tensor:
    rows = logits.shape[0]
    found = torch.empty((len(Part), rows), dtype=torch.float32, device=logits.device)
    if not rows:
        return found
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    if forbidden is None:
        return _tell(logits, first, temperature, barred, noise, ranking, entropy, margin, found)
    # Struck in place and put back, as in `token_stats`.
    at, ids = forbidden
    kept = logits[at, ids]
    logits[at, ids] = float("-inf")
    try:
        return _tell(logits, first, temperature, barred, noise, ranking, entropy, margin, found)
    finally:
        logits[at, ids] = kept


def _tell(
    logits: Tensor,
    first: int,
    temperature: Tensor | None,
    barred: Tensor | None,
    noise: Noise | None,
    ranking: Tensor | None,
    entropy: bool,
    margin: bool,
    found: Tensor,
) -> Tensor:
    rows = logits.shape[0]
    temperature = None if temperature is None else temperature.contiguous()
    ranks = temperature if ranking is None else ranking
    reduced = reduce_rows(logits, temperature, barred, None, noise, ranks, entropy, margin, first)
    _tell_share[(rows,)](
        logits,
        logits if ranks is None else ranks,
        reduced.parts,
        reduced.tokens,
        found,
        logits.stride(0),
        rows,
        first,
        reduced.splits,
        RANKED=ranks is not None,
        ENTROPY=entropy,
        MARGIN=margin,
        BLOCK=MOST_SPLITS,
        num_warps=1,
        **overlap_options(logits.device),
    )
    return found


def merge_shares(parts: Tensor, *, entropy: bool = False, margin: bool = False) -> Proposals:
    ranks, _, rows = parts.shape
    if ranks > _MOST_RANKS:
        raise ValueError(f"{ranks} ranks are more than {_MOST_RANKS}")
    device = parts.device
    numbers = torch.empty((3, rows), dtype=torch.float32, device=device)
    found = Proposals(
        token=torch.empty(rows, dtype=torch.int64, device=device),
        confidence=numbers[0],
        entropy=numbers[1],
        margin=numbers[2],
        finite=torch.empty(rows, dtype=torch.bool, device=device),
    )
    if rows:
        _merge_shares[(rows,)](
            parts.contiguous(),
            found.token,
            found.confidence,
            found.entropy,
            found.margin,
            found.finite,
            rows,
            ranks,
            PARTS=len(Part),
            ENTROPY=entropy,
            MARGIN=margin,
            BLOCK=max(2, triton.next_power_of_2(ranks)),
            num_warps=1,
            **overlap_options(device),
        )
    return found


@triton.jit(do_not_specialize=["rows", "first", "splits"])
def _tell_share(
    logits_ptr,
    ranking_ptr,
    parts_ptr,
    tokens_ptr,
    found_ptr,
    stride,
    rows,
    first,
    splits,
    RANKED: tl.constexpr,
    ENTROPY: tl.constexpr,
    MARGIN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Put the stretches of a row together, into the columns of `kernels.token_share.Part`."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    inside = part < splits
    at = row * splits + part
    plane = rows.to(tl.int64) * splits
    wait_for_inputs(OVERLAP)
    peaks = tl.load(parts_ptr + at, mask=inside, other=float("-inf"))
    masses = tl.load(parts_ptr + plane + at, mask=inside, other=0.0)
    bests = tl.load(parts_ptr + 2 * plane + at, mask=inside, other=float("-inf"))
    broken = tl.max(tl.load(parts_ptr + 3 * plane + at, mask=inside, other=0.0), 0)
    tokens = tl.load(tokens_ptr + at, mask=inside, other=0)

    peak = tl.max(peaks, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    fade = tl.exp(peaks - base)
    slope = 0.0
    if ENTROPY:
        slopes = tl.load(parts_ptr + 4 * plane + at, mask=inside, other=0.0)
        slope = whole_slope(slopes, peaks, masses, base)
    second = float("-inf")
    if MARGIN:
        seconds = tl.load(parts_ptr + 5 * plane + at, mask=inside, other=float("-inf"))
        second = runner_up_of(seconds, peaks, part)
    token = of_best(bests, tokens, part)
    z = tl.load(logits_ptr + row * stride + token).to(tl.float32)
    if RANKED:
        z = z / tl.load(ranking_ptr + row)
    to = found_ptr + row
    tl.store(to, peak)
    tl.store(to + rows, tl.sum(masses * fade, 0))
    tl.store(to + 2 * rows, slope)
    tl.store(to + 3 * rows, second)
    tl.store(to + 4 * rows, tl.max(bests, 0))
    tl.store(to + 5 * rows, (first + token).to(tl.float32))
    tl.store(to + 6 * rows, z)
    tl.store(to + 7 * rows, broken)


@triton.jit(do_not_specialize=["rows", "ranks"])
def _merge_shares(
    parts_ptr,
    token_ptr,
    confidence_ptr,
    entropy_ptr,
    margin_ptr,
    finite_ptr,
    rows,
    ranks,
    PARTS: tl.constexpr,
    ENTROPY: tl.constexpr,
    MARGIN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    rank = tl.arange(0, BLOCK)
    inside = rank < ranks
    place = parts_ptr + rank * (PARTS * rows) + row
    wait_for_inputs(OVERLAP)
    peaks = tl.load(place, mask=inside, other=float("-inf"))
    masses = tl.load(place + rows, mask=inside, other=0.0)
    bests = tl.load(place + 4 * rows, mask=inside, other=float("-inf"))
    tokens = tl.load(place + 5 * rows, mask=inside, other=0.0)
    logits = tl.load(place + 6 * rows, mask=inside, other=float("-inf"))
    broken = tl.max(tl.load(place + 7 * rows, mask=inside, other=0.0), 0)

    peak = tl.max(peaks, 0)
    finite = (broken == 0) & (peak > float("-inf"))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    fade = tl.exp(peaks - base)
    mass = tl.sum(masses * fade, 0)
    total = base + tl.log(mass)
    token = of_best(bests, tokens, rank)
    z = of_best(bests, logits, rank)
    tl.store(token_ptr + row, tl.where(finite, token, 0.0).to(tl.int64))
    tl.store(confidence_ptr + row, tl.where(finite, tl.exp(z - total), 0.0))
    tl.store(finite_ptr + row, finite)
    entropy = 0.0
    if ENTROPY:
        slopes = tl.load(place + 2 * rows, mask=inside, other=0.0)
        mean = base + whole_slope(slopes, peaks, masses, base) / mass
        entropy = tl.where(finite, tl.maximum(total - mean, 0.0), 0.0)
    tl.store(entropy_ptr + row, entropy)
    margin = 0.0
    if MARGIN:
        seconds = tl.load(place + 3 * rows, mask=inside, other=float("-inf"))
        second = runner_up_of(seconds, peaks, rank)
        margin = tl.where(finite, tl.exp(peak - total) - tl.exp(second - total), 0.0)
    tl.store(margin_ptr + row, margin)

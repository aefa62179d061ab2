"""Twin of `kernels.token_stats`: one pass over the logits, in their own dtype, cut over the vocabulary.

Each program reduces a stretch of one row to a handful of numbers, a second kernel merges the stretches. Rows whose
distribution is cut by top-k or top-p are first searched for the logit from which up they are kept.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.noise import gumbel, hash_key
from kernels.gpu.overlap import overlap_options, wait_for_inputs
from kernels.token_stats import Filters, Noise, Proposals

_BLOCK = 2048
# Ids that a thread reads at once.
_LINE = tl.constexpr(8)
# What stands for minus infinity where differences are taken.
_LOWEST = tl.constexpr(-3.4028234e38)
_SEARCH_BLOCK = 8192
# Programs that fill the device a few times over; more stretches only make more to merge.
_PROGRAMS = 1024
MOST_SPLITS = 64


def token_stats(
    logits: Tensor,
    temperature: Tensor | None = None,
    barred: Tensor | None = None,
    forbidden: tuple[Tensor, Tensor] | None = None,
    filters: Filters | None = None,
    noise: Noise | None = None,
    ranking: Tensor | None = None,
    *,
    entropy: bool = False,
    margin: bool = False,
) -> Proposals:
    if forbidden is None:
        return _propose(logits, temperature, barred, filters, noise, ranking, entropy, margin)
    # Struck in place and put back: a copy of the logits would cost more than the whole pass.
    rows, ids = forbidden
    kept = logits[rows, ids]
    logits[rows, ids] = float("-inf")
    try:
        return _propose(logits, temperature, barred, filters, noise, ranking, entropy, margin)
    finally:
        logits[rows, ids] = kept


def _propose(
    logits: Tensor,
    temperature: Tensor | None,
    barred: Tensor | None,
    filters: Filters | None,
    noise: Noise | None,
    ranking: Tensor | None,
    entropy: bool,
    margin: bool,
) -> Proposals:
    rows, vocab = logits.shape
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    if temperature is not None:
        temperature = temperature.contiguous()
    device = logits.device

    numbers = torch.empty((3, rows), dtype=torch.float32, device=device)
    found = Proposals(
        token=torch.empty(rows, dtype=torch.int64, device=device),
        confidence=numbers[0],
        entropy=numbers[1],
        margin=numbers[2],
        finite=torch.empty(rows, dtype=torch.bool, device=device),
    )
    if not rows:
        return found
    limit = ranks = None
    if filters is not None and filters.rows.numel():
        limit = torch.full((rows,), float("-inf"), dtype=torch.float32, device=device)
        ranks = torch.zeros(rows, dtype=torch.bool, device=device).index_copy_(0, filters.rows, filters.ranks)
        _find_limits[(filters.rows.shape[0],)](
            logits,
            logits if temperature is None else temperature,
            logits if barred is None else barred,
            filters.rows,
            filters.top_k,
            filters.top_p,
            filters.min_p,
            limit,
            logits.stride(0),
            vocab,
            WARM=temperature is not None,
            BARS=barred is not None,
            BLOCK=_SEARCH_BLOCK,
            num_warps=16,
        )
    ranking = temperature if ranking is None else ranking
    reduced = reduce_rows(logits, temperature, barred, limit, noise, ranking, entropy, margin)
    _merge[(rows,)](
        logits,
        logits if ranking is None else ranking,
        reduced.tokens if ranks is None else ranks,
        reduced.parts,
        reduced.tokens,
        found.token,
        found.confidence,
        found.entropy,
        found.margin,
        found.finite,
        logits.stride(0),
        rows,
        reduced.splits,
        RANKED=ranking is not None,
        CUT=limit is not None,
        ENTROPY=entropy,
        MARGIN=margin,
        BLOCK=MOST_SPLITS,
        num_warps=1,
        **overlap_options(device),
    )
    return found


@dataclass(frozen=True, slots=True)
class Reduced:
    """What the stretches of each row come to."""

    parts: Tensor
    """[8, rows, splits] float32: peak, mass, best score, broken, slope, runner-up, kept mass; the last is not used."""
    tokens: Tensor
    """[rows, splits] int32: columns of the best scores."""
    splits: int


def reduce_rows(
    logits: Tensor,
    temperature: Tensor | None,
    barred: Tensor | None,
    limit: Tensor | None,
    noise: Noise | None,
    ranking: Tensor | None,
    entropy: bool,
    margin: bool,
    first: int = 0,
) -> Reduced:
    """Read logits [rows, columns], of ids from `first` on, once; there are rows, and columns lie side by side.

    Scores are divided by `temperature`, what sums and confidences are made of by `ranking`.
    """
    rows, vocab = logits.shape
    device = logits.device
    noises = None
    if noise is not None and noise.seed.numel():
        # [4, rows]: whether the row draws, and the three words of its key.
        drawn = torch.ones_like(noise.seed) if noise.drawn is None else noise.drawn.to(torch.int64)
        noises = torch.stack((drawn, noise.seed, noise.position, noise.step))
        if noise.rows is not None:
            words, noises = noises, torch.zeros((4, rows), dtype=torch.int64, device=device)
            noises.index_copy_(1, noise.rows, words)

    splits = max(1, min(MOST_SPLITS, triton.cdiv(_PROGRAMS, rows), triton.cdiv(vocab, _BLOCK)))
    share = triton.cdiv(triton.cdiv(vocab, splits), _BLOCK) * _BLOCK
    splits = triton.cdiv(vocab, share)
    parts = torch.empty((8, rows, splits), dtype=torch.float32, device=device)
    tokens = torch.empty((rows, splits), dtype=torch.int32, device=device)
    _reduce[(rows, splits)](
        logits,
        logits if temperature is None else temperature,
        logits if ranking is None else ranking,
        logits if barred is None else barred,
        logits if limit is None else limit,
        tokens if noises is None else noises,
        parts,
        tokens,
        logits.stride(0),
        rows,
        vocab,
        first,
        share,
        splits,
        WARM=temperature is not None,
        BARS=barred is not None,
        RANKED=ranking is not None,
        CUT=limit is not None,
        DRAWS=noises is not None,
        ENTROPY=entropy,
        MARGIN=margin,
        BLOCK=_BLOCK,
        num_warps=8,
        **overlap_options(device),
    )
    return Reduced(parts, tokens, splits)


@triton.jit(do_not_specialize=["rows", "first", "splits"])
def _reduce(
    logits_ptr,
    temperature_ptr,
    ranking_ptr,
    barred_ptr,
    limit_ptr,
    noises_ptr,
    parts_ptr,
    tokens_ptr,
    stride,
    rows,
    vocab,
    first,
    share,
    splits,
    WARM: tl.constexpr,
    RANKED: tl.constexpr,
    BARS: tl.constexpr,
    CUT: tl.constexpr,
    DRAWS: tl.constexpr,
    ENTROPY: tl.constexpr,
    MARGIN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    begin = part * share
    stop = tl.minimum(begin + share, vocab)
    wait_for_inputs(OVERLAP)
    line = logits_ptr + row.to(tl.int64) * stride
    temperature = 1.0
    if WARM:
        temperature = tl.load(temperature_ptr + row)
    ranking = 1.0
    if RANKED:
        ranking = tl.load(ranking_ptr + row)
    limit = float("-inf")
    if CUT:
        limit = tl.load(limit_ptr + row)
    draws = False
    if DRAWS:
        draws = tl.load(noises_ptr + row) != 0
        key = hash_key(
            tl.load(noises_ptr + rows + row),
            tl.load(noises_ptr + 2 * rows + row),
            tl.load(noises_ptr + 3 * rows + row),
        )

    # Each line of a few ids, which one thread holds, keeps numbers of its own; they are brought together at the end.
    # Divisions by one, the common case, would be most of the arithmetic.
    LINES: tl.constexpr = BLOCK // _LINE
    warm = temperature != 1.0
    ranked = ranking != 1.0
    peak = tl.full((LINES,), _LOWEST, tl.float32)  # largest logit, the base of the sums
    mass = tl.zeros((LINES,), tl.float32)
    slope = tl.zeros((LINES,), tl.float32)  # sum of (z - peak) exp(z - peak), for the entropy
    runner_up = tl.full((LINES,), _LOWEST, tl.float32)
    kept_mass = tl.zeros((LINES,), tl.float32)
    best = tl.full((LINES,), float("-inf"), tl.float32)  # largest score among what may be proposed
    token = tl.zeros((LINES,), tl.int32)
    lane = tl.arange(0, LINES)[:, None] * _LINE + tl.arange(0, _LINE)[None, :]
    for start in range(begin, stop, BLOCK):
        ids = start + lane
        inside = ids < stop
        z = tl.load(line + ids, mask=inside, other=float("-inf")).to(tl.float32)
        score = z
        if WARM:
            if warm:
                score = score / temperature
        if RANKED:
            if ranked:
                z = z / ranking
        high = tl.max(z, 1)
        if MARGIN:
            leader = tl.min(tl.where(z == high[:, None], ids, vocab), 1)
            second = tl.max(tl.where(ids == leader[:, None], _LOWEST, z), 1)
            runner_up = tl.maximum(tl.minimum(peak, high), tl.maximum(runner_up, second))
        new = tl.maximum(peak, high)
        fade = tl.exp(peak - new)
        fall = z - new[:, None]
        weight = tl.exp(fall)
        if ENTROPY:
            slope = tl.where(mass > 0, (slope + (peak - new) * mass) * fade, 0.0)
            slope += tl.sum(tl.where(weight > 0, fall * weight, 0.0), 1)
        mass = mass * fade + tl.sum(weight, 1)

        if BARS:
            barred = tl.load(barred_ptr + ids, mask=inside, other=1)
            score = tl.where(barred != 0, float("-inf"), score)
        if CUT:
            score = tl.where(score >= limit, score, float("-inf"))
            kept_mass = kept_mass * fade + tl.sum(tl.where(score > float("-inf"), weight, 0.0), 1)
        if DRAWS:
            if draws:
                score += gumbel(key, (first + ids).to(tl.uint32))
        top = tl.max(score, 1)
        place = tl.min(tl.where(score == top[:, None], ids, vocab), 1)
        better = top > best
        token = tl.where(better, place, token)
        best = tl.where(better, top, best)
        peak = new

    base = tl.max(peak, 0)
    fade = tl.exp(peak - base)
    top = tl.max(best, 0)
    at = row.to(tl.int64) * splits + part
    plane = rows.to(tl.int64) * splits
    tl.store(tokens_ptr + at, tl.min(tl.where(best == top, token, vocab), 0))
    tl.store(parts_ptr + at, tl.where(base == _LOWEST, float("-inf"), base))
    tl.store(parts_ptr + plane + at, tl.sum(mass * fade, 0))
    tl.store(parts_ptr + 2 * plane + at, top)
    # Both a NaN and an infinity make a sum that is not a number.
    tl.store(parts_ptr + 3 * plane + at, tl.max((mass != mass).to(tl.float32), 0))
    if ENTROPY:
        falls = (slope + (peak - base) * mass) * fade
        tl.store(parts_ptr + 4 * plane + at, tl.sum(tl.where(mass > 0, falls, 0.0), 0))
    if MARGIN:
        number = tl.arange(0, LINES)
        leader = tl.min(tl.where(peak == base, number, LINES), 0)
        second = tl.maximum(tl.max(tl.where(number == leader, _LOWEST, peak), 0), tl.max(runner_up, 0))
        tl.store(parts_ptr + 5 * plane + at, tl.where(second == _LOWEST, float("-inf"), second))
    if CUT:
        tl.store(parts_ptr + 6 * plane + at, tl.sum(kept_mass * fade, 0))


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge(
    logits_ptr,
    ranking_ptr,
    ranks_ptr,
    parts_ptr,
    tokens_ptr,
    token_ptr,
    confidence_ptr,
    entropy_ptr,
    margin_ptr,
    finite_ptr,
    stride,
    rows,
    splits,
    RANKED: tl.constexpr,
    CUT: tl.constexpr,
    ENTROPY: tl.constexpr,
    MARGIN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
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
    finite = (broken == 0) & (peak > float("-inf"))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    fade = tl.exp(peaks - base)
    total = base + tl.log(tl.sum(masses * fade, 0))
    token = of_best(bests, tokens, part)
    z = tl.load(logits_ptr + row * stride + token).to(tl.float32)
    if RANKED:
        z = z / tl.load(ranking_ptr + row)
    ranked = total
    if CUT:
        kept = tl.load(parts_ptr + 6 * plane + at, mask=inside, other=0.0)
        kept_total = base + tl.log(tl.sum(kept * fade, 0))
        ranked = tl.where(tl.load(ranks_ptr + row) != 0, kept_total, total)
    tl.store(token_ptr + row, tl.where(finite, token, 0).to(tl.int64))
    tl.store(confidence_ptr + row, tl.where(finite, tl.exp(z - ranked), 0.0))
    tl.store(finite_ptr + row, finite)
    if ENTROPY:
        slopes = tl.load(parts_ptr + 4 * plane + at, mask=inside, other=0.0)
        mean = base + whole_slope(slopes, peaks, masses, base) / tl.sum(masses * fade, 0)
        tl.store(entropy_ptr + row, tl.where(finite, tl.maximum(total - mean, 0.0), 0.0))
    else:
        tl.store(entropy_ptr + row, 0.0)
    if MARGIN:
        seconds = tl.load(parts_ptr + 5 * plane + at, mask=inside, other=float("-inf"))
        second = runner_up_of(seconds, peaks, part)
        tl.store(margin_ptr + row, tl.where(finite, tl.exp(peak - total) - tl.exp(second - total), 0.0))
    else:
        tl.store(margin_ptr + row, 0.0)


@triton.jit
def of_best(bests, values, part):
    """Return the value of the best part. Parts are in order of ids, so the first among equals holds the lowest."""
    chosen = tl.argmax(bests, 0, tie_break_left=True)
    return tl.sum(tl.where(part == chosen, values, 0), 0)


@triton.jit
def whole_slope(slopes, peaks, masses, base):
    """Return the sum of (z - base) exp(z - base), of parts whose sums are relative to their own peaks."""
    falls = tl.where(masses > 0, (peaks - base) * masses, 0.0)
    return tl.sum((slopes + falls) * tl.exp(peaks - base), 0)


@triton.jit
def runner_up_of(seconds, peaks, part):
    """Return the second largest logit: some part's second, or the largest but one of their peaks."""
    leader = tl.argmax(peaks, 0, tie_break_left=True)
    return tl.maximum(tl.max(seconds, 0), tl.max(tl.where(part == leader, float("-inf"), peaks), 0))


@triton.jit
def _order(z):
    """Map float32 to int32 so that the order stays."""
    bits = z.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _unorder(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _scan(
    line,
    barred_ptr,
    temperature,
    pivot,
    floor,
    peak,
    vocab,
    WARM: tl.constexpr,
    BARS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return how many proposable scores are >= pivot, and the mass exp(z - peak) of those > pivot and >= floor."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + lane
        inside = ids < vocab
        z = tl.load(line + ids, mask=inside, other=float("-inf")).to(tl.float32)
        if WARM:
            z = z / temperature
        if BARS:
            z = tl.where(tl.load(barred_ptr + ids, mask=inside, other=1) != 0, float("-inf"), z)
        key = _order(z)
        count += (inside & (key >= pivot)).to(tl.int32)
        mass += tl.where((key > pivot) & (z >= floor), tl.exp(z - peak), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _find_limits(
    logits_ptr,
    temperature_ptr,
    barred_ptr,
    rows_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    limit_ptr,
    stride,
    vocab,
    WARM: tl.constexpr,
    BARS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Search the row's limits by bisection over the ordered bits of a float32: 32 rounds at most for each filter."""
    row = tl.load(rows_ptr + tl.program_id(0))
    top_k = tl.load(top_k_ptr + tl.program_id(0))
    top_p = tl.load(top_p_ptr + tl.program_id(0))
    min_p = tl.load(min_p_ptr + tl.program_id(0))
    line = logits_ptr + row * stride
    temperature = 1.0
    if WARM:
        temperature = tl.load(temperature_ptr + row)

    lane = tl.arange(0, BLOCK)
    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + lane
        inside = ids < vocab
        z = tl.load(line + ids, mask=inside, other=float("-inf")).to(tl.float32)
        if WARM:
            z = z / temperature
        if BARS:
            z = tl.where(tl.load(barred_ptr + ids, mask=inside, other=1) != 0, float("-inf"), z)
        peaks = tl.maximum(peaks, z)
    peak = tl.max(peaks, 0)

    limit = float("-inf")
    lowest: tl.constexpr = -2139095041  # the key of -inf
    if (top_k > 0) & (top_k < vocab):
        # The largest key that at least top_k scores reach is that of the top_k-th score.
        low = tl.full((), lowest, tl.int64)
        high = _order(peak).to(tl.int64)
        while low < high:
            middle = (low + high + 1) >> 1
            count, _ = _scan(line, barred_ptr, temperature, middle.to(tl.int32), 0.0, peak, vocab, WARM, BARS, BLOCK)
            enough = count >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        limit = _unorder(low.to(tl.int32))
    if top_p < 1.0:
        # The smallest key above which the kept mass is below its share is the last score of the nucleus.
        _, total = _scan(line, barred_ptr, temperature, lowest, limit, peak, vocab, WARM, BARS, BLOCK)
        bound = top_p * total
        low = tl.full((), lowest, tl.int64)
        high = _order(peak).to(tl.int64)
        while low < high:
            middle = (low + high) >> 1
            _, mass = _scan(line, barred_ptr, temperature, middle.to(tl.int32), limit, peak, vocab, WARM, BARS, BLOCK)
            inside = mass < bound
            high = tl.where(inside, middle, high)
            low = tl.where(inside, low, middle + 1)
        limit = tl.maximum(limit, _unorder(low.to(tl.int32)))
    if min_p > 0.0:
        limit = tl.maximum(limit, peak + tl.log(min_p))
    tl.store(limit_ptr + row, limit)

"""Token statistics of a vocabulary that is spread over several ranks, without its logits in one place.

Each rank reduces its share of a row's logits to a few numbers; put side by side, those of all ranks give what
`kernels.token_stats` gives of the whole row. Filters need to know more of a row, and are not here.
"""

from enum import IntEnum

import torch
from torch import Tensor

from kernels.noise import gumbel
from kernels.token_stats import Noise, Proposals


class Part(IntEnum):
    """Rows of what a rank tells, [len(Part), n] float32."""

    PEAK = 0
    """Largest logit, what the sums are relative to; -inf where there is none."""
    MASS = 1
    """Sum of exp(z - peak)."""
    SLOPE = 2
    """Sum of (z - peak) exp(z - peak), for the entropy; 0 unless asked for."""
    SECOND = 3
    """Second largest logit; -inf unless asked for."""
    BEST = 4
    """Largest score, noise included, among what may be proposed."""
    TOKEN = 5
    """Its id, which float32 holds exactly below 2**24."""
    LOGIT = 6
    """Its logit."""
    BROKEN = 7
    """1 if there is NaN or +inf, else 0."""


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
    """Return [len(Part), n] float32 of the logits [n, share] of ids [first, first + share).

    `barred` [share] is of these ids, and so are those of `forbidden`, which are counted from `first`; all else is as in
    `kernels.token_stats`.
    """
    rows, share = logits.shape
    z = logits.float()
    if forbidden is not None:
        z = z.index_put(forbidden, z.new_full((), float("-inf")))
    choice = z if temperature is None else z / temperature[:, None]
    z = choice if ranking is None else z / ranking[:, None]
    parts = z.new_zeros((len(Part), rows))
    peak = z.max(-1).values if share else z.new_full((rows,), float("-inf"))
    base = peak.masked_fill(~peak.isfinite(), 0.0)
    weight = (z - base[:, None]).exp()
    parts[Part.PEAK] = peak
    parts[Part.MASS] = weight.sum(-1)
    parts[Part.BROKEN] = (z.isnan() | (z == float("inf"))).any(-1).float()
    if entropy:
        parts[Part.SLOPE] = ((z - base[:, None]) * weight).masked_fill(weight == 0, 0.0).sum(-1)
    parts[Part.SECOND] = z.topk(2, -1).values[:, 1] if margin and share > 1 else float("-inf")
    if barred is not None:
        choice = choice + z.new_zeros(share).masked_fill_(barred, float("-inf"))
    if noise is not None:
        drawn = gumbel(noise.seed, noise.position, noise.step, share, first)
        if noise.drawn is not None:
            drawn = drawn.masked_fill(~noise.drawn[:, None], 0.0)
        choice = choice + drawn if noise.rows is None else choice.index_add(0, noise.rows, drawn)
    best, place = choice.max(-1)
    parts[Part.BEST] = best
    parts[Part.TOKEN] = (first + place).float()
    parts[Part.LOGIT] = z.gather(-1, place[:, None])[:, 0]
    return parts


def merge_shares(parts: Tensor, *, entropy: bool = False, margin: bool = False) -> Proposals:
    """Return the proposals of parts [ranks, len(Part), n], ranks in order of their ids.

    Equal to `kernels.token_stats` of all logits side by side, but for the rounding of sums.
    """
    peaks, masses = parts[:, Part.PEAK], parts[:, Part.MASS]
    peak = peaks.max(0).values
    finite = ~(parts[:, Part.BROKEN] != 0).any(0) & (peak > float("-inf"))
    base = peak.masked_fill(~peak.isfinite(), 0.0)
    fade = (peaks - base).exp()
    mass = (masses * fade).sum(0)
    total = base + mass.log()
    # The first of equals is the rank with the lowest ids.
    chosen = parts[:, Part.BEST].max(0, keepdim=True).indices
    token = parts[:, Part.TOKEN].gather(0, chosen)[0].long()
    confidence = (parts[:, Part.LOGIT].gather(0, chosen)[0] - total).exp()
    zero = torch.zeros_like(total)
    spread = gap = zero
    if entropy:
        falls = ((peaks - base) * masses).masked_fill(masses == 0, 0.0)
        mean = base + ((parts[:, Part.SLOPE] + falls) * fade).sum(0) / mass
        spread = (total - mean).clamp(min=0.0)
    if margin:
        leader = peaks.max(0, keepdim=True).indices
        others = peaks.scatter(0, leader, float("-inf"))
        second = torch.cat((others, parts[:, Part.SECOND])).max(0).values
        gap = (peak - total).exp() - (second - total).exp()
    return Proposals(
        token=token.where(finite, 0),
        confidence=confidence.where(finite, 0.0),
        entropy=spread.where(finite, 0.0),
        margin=gap.where(finite, 0.0),
        finite=finite,
    )

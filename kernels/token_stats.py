"""From logits to a proposal for each position: the token, how sure the model is, and how the rest is spread."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.noise import gumbel


@dataclass(frozen=True, slots=True)
class Noise:
    """Rows whose token is drawn; the others take the most probable one."""

    rows: Tensor | None
    """[m] int64; None: all, in order."""
    seed: Tensor
    """[m] int64"""
    position: Tensor
    """[m] int64, absolute."""
    step: Tensor
    """[m] int64, denoise steps already spent in the block."""
    drawn: Tensor | None = None
    """[m] bool: which of these rows are drawn after all; None: all of them. What is captured cannot leave rows out."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Rows whose distribution is cut; top-k first, top-p of what it leaves, min-p."""

    rows: Tensor
    """[m] int64"""
    top_k: Tensor
    """[m] int64; 0 keeps all. Ties with the k-th stay."""
    top_p: Tensor
    """[m] float32; 1 keeps all. The smallest set of tokens that reaches this mass stays."""
    min_p: Tensor
    """[m] float32; tokens below this share of the best one's probability go."""
    ranks: Tensor
    """[m] bool: confidence comes from the cut distribution instead of the model's own."""


@dataclass(frozen=True, slots=True)
class Proposals:
    """One proposal for each row; rows that are not `finite` hold zeros."""

    token: Tensor
    """[n] int64: the most probable or the drawn token; the lowest id among equals."""
    confidence: Tensor
    """[n] float32: probability of `token`."""
    entropy: Tensor
    """[n] float32, nats; zeros unless asked for."""
    margin: Tensor
    """[n] float32: best minus second-best probability; zeros unless asked for."""
    finite: Tensor
    """[n] bool: False if a row's logits hold NaN or +inf."""


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
    """Propose a token for each row of logits [n, vocab].

    temperature [n] float32 > 0, or None for 1, divides the logits that the token is drawn from. ranking [n] float32
    > 0, or None for the same, divides those that confidence, entropy and margin are of; rows that a filter ranks have
    the same in both. barred [vocab] bool are ids that the model's distribution has and that are never proposed (the
    mask, padding of the vocabulary). forbidden (rows [m], ids [m]) are struck from a row's distribution.
    All arithmetic is float32.
    """
    z = logits.float()
    if forbidden is not None:
        z = z.index_put(forbidden, z.new_full((), float("-inf")))
    choice = z if temperature is None else z / temperature[:, None]
    z = choice if ranking is None else z / ranking[:, None]
    total = z.logsumexp(-1)
    ranked = total
    if barred is not None:
        # One row of -inf is added rather than a mask filled in: a third of the time on a CPU.
        choice = choice + z.new_zeros(z.shape[1]).masked_fill_(barred, float("-inf"))
    if filters is not None:
        kept = cut(choice[filters.rows], filters)
        choice = choice.index_copy(0, filters.rows, kept)
        own = torch.where(filters.ranks, kept.logsumexp(-1), total[filters.rows])
        ranked = total.index_copy(0, filters.rows, own)
    if noise is not None:
        drawn = gumbel(noise.seed, noise.position, noise.step, z.shape[1])
        if noise.drawn is not None:
            drawn = drawn.masked_fill(~noise.drawn[:, None], 0.0)
        choice = choice + drawn if noise.rows is None else choice.index_add(0, noise.rows, drawn)
    # The first of equals, as argmax, at a third of its time on a CPU.
    token = choice.max(-1).indices
    confidence = (z.gather(-1, token[:, None])[:, 0] - ranked).exp()
    finite = total.isfinite()
    zero = torch.zeros_like(total)
    spread = torch.special.entr((z - total[:, None]).exp()).sum(-1) if entropy else zero
    gap = zero
    if margin:
        best = (z.topk(2, -1).values - total[:, None]).exp()
        gap = best[:, 0] - best[:, 1]
    return Proposals(
        token=token.where(finite, 0),
        confidence=confidence.where(finite, 0.0),
        entropy=spread.where(finite, 0.0),
        margin=gap.where(finite, 0.0),
        finite=finite,
    )


def cut(z: Tensor, filters: Filters) -> Tensor:
    """Return z [m, vocab] with -inf for what the filters remove.

    Each filter keeps all values from some limit up, so ties never depend on their order.
    """
    descending = z.sort(-1, descending=True).values
    size = z.shape[1]
    keep = torch.where(filters.top_k > 0, filters.top_k.clamp(max=size), size)
    limit = descending.gather(-1, keep[:, None] - 1)
    mass = descending.where(descending >= limit, float("-inf")).softmax(-1)
    before = mass.cumsum(-1) - mass
    # A sum of float32 probabilities may pass 1 before the last token, so 1 means all rather than a comparison.
    inside = (before < filters.top_p[:, None]) | (filters.top_p[:, None] >= 1)
    nucleus = descending.gather(-1, inside.sum(-1, keepdim=True) - 1)
    floor = descending[:, :1] + filters.min_p[:, None].log()
    return z.where(z >= limit.maximum(nucleus).maximum(floor), float("-inf"))

"""Proposals of hidden states, wherever the vocabulary lies."""

from collections.abc import Sequence as ReadOnly

import torch
from torch import Tensor

import kernels
from kernels.token_stats import Noise, Proposals
from worker.draws import Draws
from worker.models import Denoiser
from worker.models.layers import Decoder, VocabularyShare
from worker.parallel.messages import Propose

_NO_FILTERS = "filters need the logits of all ranks in one place"


def share_of(module: Denoiser) -> VocabularyShare | None:
    """Return which part of the vocabulary a module has; None: all of it."""
    return module.share if isinstance(module, Decoder) else None


def propose(
    module: Denoiser,
    hidden: Tensor,
    draws: Draws,
    barred: Tensor | None = None,
    *,
    entropy: bool = False,
    margin: bool = False,
) -> Proposals:
    """Return what `kernels.token_stats` says of the logits of hidden states [n, hidden].

    `draws` lie with the hidden states or on the host, what is forbidden there. Ranks that share the vocabulary exchange
    a few numbers for each row instead of its logits; raises `ValueError` for filters, which would need more.
    """
    share = share_of(module)
    if share is None or not isinstance(module, Decoder):
        draws = draws.on(hidden.device)
        return propose_by(module.logits(hidden), draws, barred, entropy=entropy, margin=margin)
    if draws.filters is not None:
        raise ValueError(_NO_FILTERS)
    draws = draws.within(share.first, share.end).on(hidden.device)
    parts = kernels.token_share(
        module.own_logits(hidden),
        share.first,
        draws.temperature,
        None if barred is None else barred[share.first : share.end],
        draws.forbidden,
        draws.noise,
        draws.ranking,
        entropy=entropy,
        margin=margin,
    )
    return kernels.merge_shares(share.peers.gather(parts), entropy=entropy, margin=margin)


def propose_by(
    logits: Tensor, draws: Draws, barred: Tensor | None, *, entropy: bool = False, margin: bool = False
) -> Proposals:
    """Return what `kernels.token_stats` says of whole logits [n, vocab]; `draws` lie with them."""
    return kernels.token_stats(
        logits,
        draws.temperature,
        barred,
        draws.forbidden,
        draws.filters,
        draws.noise,
        draws.ranking,
        entropy=entropy,
        margin=margin,
    )


def propose_message(first: int, end: int, draws: Draws, entropy: bool, margin: bool) -> Propose:
    """Return how the other ranks learn of a call of `propose` for the last batch's hidden states [first, end).

    `draws` lie on the host: what lies on a device could be told only once all that runs there has ended. Raises
    `ValueError` for what `propose` does not do.
    """
    if draws.filters is not None:
        raise ValueError(_NO_FILTERS)
    words = None
    if (noise := draws.noise) is not None:
        rows = None if noise.rows is None else noise.rows.tolist()
        words = rows, noise.seed.tolist(), noise.position.tolist(), noise.step.tolist()
    return Propose(
        first,
        end,
        entropy,
        margin,
        None if draws.temperature is None else draws.temperature.tolist(),
        None if draws.ranking is None else draws.ranking.tolist(),
        None if draws.forbidden is None else (draws.forbidden[0].tolist(), draws.forbidden[1].tolist()),
        words,
    )


def propose_as_told(module: Denoiser, hidden: Tensor, barred: Tensor, message: Propose) -> None:
    """Do the part of another rank in a call of `propose`; hidden [n, hidden] of the last batch."""
    own = hidden[message.first : message.end]
    propose(module, own, _draws_of(message), barred, entropy=message.entropy, margin=message.margin)


def _draws_of(message: Propose) -> Draws:
    def integers(values: ReadOnly[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    def floats(values: ReadOnly[float] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.float32)

    forbidden = noise = None
    if message.forbidden is not None:
        rows, ids = message.forbidden
        forbidden = integers(rows), integers(ids)
    if message.noise is not None:
        drawn, *words = message.noise
        noise = Noise(None if drawn is None else integers(drawn), *map(integers, words))
    return Draws(floats(message.temperature), forbidden, None, noise, floats(message.ranking))

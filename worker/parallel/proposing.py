"""Proposals of hidden states, wherever the vocabulary lies."""

from collections.abc import Sequence as ReadOnly

import torch
from torch import Tensor

import kernels
from kernels.token_stats import Filters, Noise, Proposals
from worker.models import Denoiser
from worker.models.layers import Decoder, VocabularyShare
from worker.parallel.messages import Propose


def share_of(module: Denoiser) -> VocabularyShare | None:
    """Return which part of the vocabulary a module has; None: all of it."""
    return module.share if isinstance(module, Decoder) else None


def propose(
    module: Denoiser,
    hidden: Tensor,
    temperature: Tensor | None = None,
    barred: Tensor | None = None,
    forbidden: tuple[Tensor, Tensor] | None = None,
    noise: Noise | None = None,
    ranking: Tensor | None = None,
    filters: Filters | None = None,
    *,
    entropy: bool = False,
    margin: bool = False,
) -> Proposals:
    """Return what `kernels.token_stats` says of the logits of hidden states [n, hidden].

    Ranks that share the vocabulary exchange a few numbers for each row instead of its logits; raises `ValueError` for
    filters, which would need more.
    """
    share = share_of(module)
    if share is None or not isinstance(module, Decoder):
        logits = module.logits(hidden)
        return kernels.token_stats(
            logits, temperature, barred, forbidden, filters, noise, ranking, entropy=entropy, margin=margin
        )
    if filters is not None:
        raise ValueError("filters need the logits of all ranks in one place")
    parts = kernels.token_share(
        module.own_logits(hidden),
        share.first,
        temperature,
        None if barred is None else barred[share.first : share.end],
        forbidden,
        noise,
        ranking,
        entropy=entropy,
        margin=margin,
    )
    return kernels.merge_shares(share.peers.gather(parts), entropy=entropy, margin=margin)


def propose_message(
    first: int,
    end: int,
    entropy: bool,
    margin: bool,
    temperature: Tensor | None = None,
    ranking: Tensor | None = None,
    forbidden: tuple[Tensor, Tensor] | None = None,
    noise: Noise | None = None,
    filters: Filters | None = None,
) -> Propose:
    """Return how the other ranks learn of a call of `propose`; raises `ValueError` for what it does not do."""
    if filters is not None:
        raise ValueError("filters need the logits of all ranks in one place")
    words = None
    if noise is not None:
        rows = None if noise.rows is None else noise.rows.tolist()
        words = rows, noise.seed.tolist(), noise.position.tolist(), noise.step.tolist()
    return Propose(
        first,
        end,
        entropy,
        margin,
        None if temperature is None else temperature.tolist(),
        None if ranking is None else ranking.tolist(),
        None if forbidden is None else (forbidden[0].tolist(), forbidden[1].tolist()),
        words,
    )


def propose_as_told(module: Denoiser, hidden: Tensor, barred: Tensor, message: Propose) -> None:
    """Do the part of another rank in a call of `propose`; hidden [n, hidden] of the last batch."""

    def integers(values: ReadOnly[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=hidden.device)

    def floats(values: ReadOnly[float] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.float32, device=hidden.device)

    forbidden = noise = None
    if message.forbidden is not None:
        rows, ids = message.forbidden
        forbidden = integers(rows), integers(ids)
    if message.noise is not None:
        drawn, *words = message.noise
        noise = Noise(None if drawn is None else integers(drawn), *map(integers, words))
    propose(
        module,
        hidden[message.first : message.end],
        floats(message.temperature),
        barred,
        forbidden,
        noise,
        floats(message.ranking),
        entropy=message.entropy,
        margin=message.margin,
    )

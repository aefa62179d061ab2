"""Block diffusion without cache, batch or scheduler: each step recomputes everything from position 0."""

from shared.commands import Sampling
from shared.decoding import Decoding
from worker.engine.plan import Canvas, Plan, Row, visible_ends
from worker.models import LoadedModel
from worker.runner import Runner


def decode_naively(
    model: LoadedModel,
    prompt: list[int],
    max_tokens: int,
    block_length: int,
    decoding: Decoding,
    sampling: Sampling,
) -> tuple[list[int], int]:
    """Return the produced tokens and the number of forwards. No stop, no filler rules of the engine."""
    tokens, limit, nfe = list(prompt), len(prompt) + max_tokens, 0
    while len(tokens) < limit:
        start = len(tokens) // block_length * block_length
        end = start + block_length
        masked = [len(tokens) <= position < limit for position in range(start, end)]
        tokens += [model.spec.mask_token_id] * (end - len(tokens))
        step = 0
        while any(masked):
            row = Row(
                request_id="naive",
                start=0,
                token_ids=tuple(tokens),
                visible_end=visible_ends(model.spec.attention, 0, end, block_length, end),
                pages=tuple(range(end)),
                canvas=Canvas(start, tuple(masked), step, False, sampling, decoding, ()),
            )
            decision = Runner(model, num_pages=end, page_size=1)(Plan((row,)))
            for i, taken in enumerate(decision.accepted[0]):
                if taken:
                    tokens[start + i], masked[i] = decision.tokens[0][i], False
            step, nfe = step + 1, nfe + 1
    return tokens[len(prompt) : limit], nfe

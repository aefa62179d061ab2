"""A model on paper: exact, torch-free, and as touchy about its cache as a real one.

Two attention "layers" of hashes. What is stored for a position depends on everything the position saw when it was
written, so a stale key, a wrong page, a wrong visible end or a missed commit changes tokens downstream. `PaperForward`
runs plans against paged storage as the runner does; `decode_alone` is the oracle: it recomputes everything from the
token list in every step and knows no pages, plans or scheduler.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from shared.commands import Generate
from shared.decoding import MultiBlock, Threshold
from worker.engine.plan import Canvas, Plan
from worker.engine.ports import Decision
from worker.models.spec import Attention, ModelSpec

STOP, FILLER, MASK = 60, 61, 62
VOCAB = 63


def paper_spec(block_length: int = 4, max_model_len: int = 256) -> ModelSpec:
    return ModelSpec(
        family="paper",
        attention=Attention.BLOCK_CAUSAL,
        vocab_size=VOCAB,
        text_vocab_size=VOCAB,
        mask_token_id=MASK,
        stop_token_ids=(STOP,),
        filler_ids=(FILLER,),
        block_length=block_length,
        max_model_len=max_model_len,
        num_layers=2,
        hidden_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        decoding=Threshold(threshold=0.7),
    )


def _mix(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def _first(token: int, position: int) -> int:
    return _mix("first", token, position)


def _second(seen: Sequence[int], position: int) -> int:
    return _mix("second", tuple(seen), position)


def _proposal(seen: Sequence[int], position: int, seed: int) -> tuple[int, float]:
    value = _mix("logits", tuple(seen), position, seed)
    # Stops and filler are rare enough that most requests span several blocks.
    token = value % 60 if value % 29 else (STOP, FILLER)[value // 29 % 2]
    return token, (value >> 32) % 1000 / 1000


def accept(
    canvas: Canvas, proposals: Sequence[tuple[int, float]], filler: frozenset[int] = frozenset((FILLER,))
) -> list[bool]:
    """The threshold rule with the filler rule, written for one row from its sentence."""
    masked = [index for index, undecided in enumerate(canvas.masked) if undecided]
    if canvas.last:
        return list(canvas.masked)
    if isinstance(canvas.decoding, MultiBlock):
        return accept_blocks(canvas.masked, proposals, canvas.decoding, canvas.block_length, filler)
    assert isinstance(canvas.decoding, Threshold)

    def rank(index: int) -> float:
        token, confidence = proposals[index]
        return 0.0 if canvas.decoding.filler_rules and token in filler else confidence

    best = max(masked, key=lambda index: (rank(index), -index))
    taken = {index for index in masked if rank(index) >= canvas.decoding.threshold} | {best}
    return [index in taken for index in range(len(canvas.masked))]


def accept_blocks(
    masked: Sequence[bool],
    proposals: Sequence[tuple[int, float]],
    rule: MultiBlock,
    block: int,
    filler: frozenset[int] = frozenset((FILLER,)),
) -> list[bool]:
    """The rule for several blocks, written for one row from its sentence."""
    accepted = [False] * len(masked)
    decided_before = block
    for start in range(0, len(masked), block):
        undecided = [i for i in range(start, min(start + block, len(masked))) if masked[i]]
        others = [i for i in undecided if proposals[i][0] not in filler] if rule.filler_rules else undecided
        turn = others or undecided
        sure = [i for i in turn if proposals[i][1] > rule.tau_acc]
        fully_activated = start == 0 or decided_before >= rule.tau_semi * block
        if turn and not sure and fully_activated:
            sure = [max(turn, key=lambda i: (proposals[i][1], -i))]
        for i in sure:
            accepted[i] = True
        decided_before = block - len(undecided)
    return accepted


@dataclass
class Slot:
    first: int = -1
    second: int = -1


class PaperForward:
    """Implements `Forward` over pages of slots; counts what it ran."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.slots = [[Slot() for _ in range(page_size)] for _ in range(num_pages)]
        self.page_size = page_size
        self.plans: list[Plan] = []
        self.poison: set[str] = set()

    def __call__(self, plan: Plan) -> Decision:
        self.plans.append(plan)
        for row in plan.rows:
            written = set(row.pages[row.start // self.page_size : -(-row.end // self.page_size)])
            others = {page for other in plan.rows if other is not row for page in other.pages}
            assert not written & others, "a row writes to a page that another one sees"
        decision = Decision([], [], [], [])
        for row in plan.rows:

            def slot(position: int, pages: tuple[int, ...] = row.pages) -> Slot:
                return self.slots[pages[position // self.page_size]][position % self.page_size]

            positions = range(row.start, row.end)
            for position, token in zip(positions, row.token_ids, strict=True):
                slot(position).first = _first(token, position)
            ends = dict(zip(positions, row.visible_end, strict=True))
            seconds = {p: _second([slot(k).first for k in range(ends[p])], p) for p in positions}
            for position, value in seconds.items():
                slot(position).second = value
            if row.canvas is None:
                proposals: list[tuple[int, float]] = []
                accepted: list[bool] = []
            else:
                start, seed = row.canvas.start, row.canvas.sampling.seed
                proposals = [
                    _proposal([slot(k).second for k in range(ends[p])], p, seed)
                    for p in range(start, start + len(row.canvas.masked))
                ]
                accepted = accept(row.canvas, proposals)
            decision.accepted.append(accepted)
            decision.tokens.append([token for token, _ in proposals])
            decision.confidence.append([confidence for _, confidence in proposals])
            decision.failed.append("NaN in the logits" if row.request_id in self.poison else None)
        return decision


@dataclass
class Answer:
    tokens: list[int]
    detail: str
    nfe: int


def decode_alone(request: Generate, spec: ModelSpec, threshold: float = 0.7) -> Answer:
    """Decode by the definition: recompute both layers for the whole text before each step, no cache of any kind."""
    block = request.block_length or spec.block_length
    prompt, limits = list(request.prompt), request.limits
    limit = min(len(prompt) + limits.max_tokens, spec.max_model_len)
    tokens, nfe = prompt, 0
    rules = not limits.ignore_eos
    stops = set() if limits.ignore_eos else {STOP}
    while True:
        start = len(tokens) // block * block
        end = start + block
        canvas: list[int | None] = [*tokens[start:], *[None] * (end - len(tokens))]
        closed = end
        while any(token is None and start + i < min(limit, closed) for i, token in enumerate(canvas)):
            ids = tokens[:start] + [MASK if token is None else token for token in canvas]
            first = [_first(token, p) for p, token in enumerate(ids)]
            ends = [(p // block + 1) * block for p in range(end)]
            second = [_second(first[: ends[p]], p) for p in range(end)]
            proposals = [_proposal(second[: ends[p]], p, request.sampling.seed) for p in range(start, end)]
            nfe += 1
            last = limits.max_nfe is not None and nfe >= limits.max_nfe
            wanted = tuple(token is None and start + i < min(limit, closed) for i, token in enumerate(canvas))
            view = Canvas(
                start, wanted, 0, last, request.sampling, Threshold(threshold=threshold, filler_rules=rules), ()
            )
            for index, take in enumerate(accept(view, proposals)):
                if take:
                    canvas[index] = proposals[index][0]
            for index, token in enumerate(canvas):
                if token in stops and start + index < closed and start + index >= len(prompt):
                    closed = start + index
                    canvas[index + 1 :] = [FILLER] * (block - index - 1)
                    break
        produced_end = min(limit, closed, end)
        tokens = tokens[:start] + [token for token in canvas[: produced_end - start] if token is not None]
        if closed < min(end, limit):
            return Answer(tokens[len(prompt) :], "stop_token", nfe)
        if limit <= end:
            cut = limit < len(prompt) + limits.max_tokens
            return Answer(tokens[len(prompt) :], "max_model_len" if cut else "max_tokens", nfe)
        if limits.max_nfe is not None and nfe >= limits.max_nfe:
            return Answer(tokens[len(prompt) :], "max_nfe", nfe)

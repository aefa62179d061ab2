"""The rule that keeps a canvas to a grammar, whatever the order in which its positions are decided.

Of the text only a prefix, up to the frontier, is checked for good; behind it some positions may be decided already. So
that these never become impossible, a guard keeps a *witness*: a whole text, from the frontier to its end, that holds
every decided token and fits into the request's room. Each step it walks from the frontier through the block, takes at
every undecided position the best token that is allowed there, and has a new witness: whatever of its tokens a strategy
accepts, in any order, the witness holds. Where tokens behind the walk are decided, the witness is changed one token at
a time instead, as far as the grammar stands it. Where the text could not be ended in the room that is left, the walk is
cut at the last position from which it can, and goes on with that end.

The idea of a witness for gaps: arXiv 2602.00612 (lookahead verification); the room is ours.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from llguidance import LLMatcher

from worker.constraints.closing import ends, shortest_end
from worker.constraints.vocabulary import Vocabulary, allowed_tokens
from worker.engine.plan import UNDECIDED, DeadEnd, Fill, Guarded, Scores

_HOPELESS = 0.1
"""Below this share of the least sure choice on the way to it no strategy would accept a position for its path."""
_SURE = 0.95
"""From this probability on it does not matter by how much the allowed tokens raise it."""


@dataclass(slots=True)
class _Walk:
    tokens: list[int]
    confidence: list[float]
    last: LLMatcher
    """Behind the last position, or before the stop token."""
    end: int | None = None
    """Index of the stop token."""
    forced: list[bool] = field(default_factory=list[bool])
    """There is no other token that may stand behind those before it."""


class GrammarGuard:
    """Implements `worker.engine.plan.Guard`. Belongs to one request and one thread."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, room: int, filler_id: int) -> None:
        """`matcher` is at the start of the text; `room` is what the request may produce."""
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._filler = filler_id
        first = shortest_end(matcher, vocabulary, room)
        self._witness: list[int] = first or []
        """From the frontier on."""
        self._end: list[int] = first or []
        """The last one that was found."""
        self._bounded = first is not None
        """The witness is whole: the text will end in time."""

    @property
    def accepts(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        return self._matcher.is_accepting() and self._matcher.is_stopped()

    def push(self, token_id: int) -> None:
        if self._matcher.is_stopped() or not self._matcher.consume_token(token_id):
            raise DeadEnd("a decided token does not follow the grammar")
        if self._witness and self._witness[0] == token_id:
            self._witness = self._witness[1:]
        else:
            # Decided elsewhere (a resumed request): the next walk finds another end.
            self._witness = []

    def fill(self, canvas: Guarded, wanted: Sequence[bool], scores: Scores) -> Fill:
        tokens = canvas.tokens[canvas.frontier :]
        asked = wanted[canvas.frontier :]
        reach = 1 + max(index for index, token in enumerate(tokens) if asked[index] or token != UNDECIDED)
        walk = self._walk(canvas, tokens[:reach], scores)
        if self._bounded:
            walk = self._within(walk, canvas, tokens[:reach], scores)
        elif walk.end is None:
            self._witness = walk.tokens
        else:
            self._witness = walk.tokens[: walk.end + 1]
        return self._filled(walk, canvas, tokens, asked)

    # --- the walk

    def _walk(self, canvas: Guarded, tokens: Sequence[int], scores: Scores) -> _Walk:
        """Return the best valid text that holds the decided tokens."""
        state, chain = self._matcher.deep_copy(), 1.0
        walk = _Walk([], [], state)
        held = max((index + 1 for index, token in enumerate(tokens) if token != UNDECIDED), default=0)
        witness, run = self._witness[:held], deque[int]()
        for index, decided in enumerate(tokens):
            forced = False
            if walk.end is None and index >= held and not run:
                run.extend(state.compute_ff_tokens())
            if walk.end is not None:
                token, own = self._filler, 0.0
            elif decided != UNDECIDED:
                token, own = decided, 1.0
                if token in self._vocabulary.stop_ids:
                    walk.end = index
            else:
                place = canvas.frontier + index
                if index < held:
                    token = self._between(state, scores.best(place), witness[index:])
                    if chain >= _HOPELESS:
                        allowed = allowed_tokens(state, self._vocabulary.stop_ids, canvas.may_stop)
                        chain = min(chain, scores.share(place, token, allowed))
                elif run:
                    token, forced = run.popleft(), True
                else:
                    token, share = self._next(state, place, canvas.may_stop, scores, chain)
                    chain, forced = min(chain, share), share == 1.0
                    if token in self._vocabulary.stop_ids:
                        walk.end = index
                # Either the model itself is sure of it, or every choice on the way to it was sure.
                own = max(scores.probability(place, token), chain if chain >= _HOPELESS else 0.0)
            walk.tokens.append(token)
            walk.confidence.append(own)
            walk.forced.append(forced)
            if walk.end is None and not state.consume_token(token):
                raise _dead_end(state)
        return walk

    def _between(self, state: LLMatcher, proposal: int, witness: Sequence[int]) -> int:
        """Return the model's proposal if the rest of the witness may stand behind it, else the witness's token."""
        if proposal in self._vocabulary.stop_ids:
            return witness[0]
        fits = state.validate_tokens([proposal, *witness[1:]]) == len(witness)
        return proposal if fits else witness[0]

    def _next(self, state: LLMatcher, place: int, may_stop: bool, scores: Scores, chain: float) -> tuple[int, float]:
        """Return the best token that may follow, and its share among those that may."""
        proposal = scores.best(place)
        if proposal not in self._vocabulary.stop_ids and state.validate_tokens([proposal]) == 1:
            # What is best of all is best of the allowed ones, and its share of these is more than its share of all.
            own = chain if chain < _HOPELESS else scores.probability(place, proposal)
            if chain < _HOPELESS or own >= _SURE:
                return proposal, own
        best = scores.best_of(place, allowed_tokens(state, self._vocabulary.stop_ids, may_stop))
        if best is None:
            raise _dead_end(state)
        return best

    # --- the room

    def _within(self, walk: _Walk, canvas: Guarded, tokens: Sequence[int], scores: Scores) -> _Walk:
        """Return the walk, or as much of it as leaves room for an end, and keep the whole text as the witness."""
        if walk.end is not None and walk.end < canvas.room:
            self._witness = walk.tokens[: walk.end + 1]
            return walk
        held = max((index + 1 for index, token in enumerate(tokens) if token != UNDECIDED), default=0)
        kept, end = self._longest(walk, held, len(tokens), canvas.room)
        if end is None:
            if not self._witness:
                self._bounded, self._witness = False, walk.tokens
                return walk
            whole = self._witness
        else:
            whole = [*walk.tokens[:kept], *end]
            if kept == len(tokens):
                self._witness = whole
                return walk
        self._witness = whole
        return self._along(whole, walk, canvas, tokens, scores)

    def _longest(self, walk: _Walk, least: int, most: int, room: int) -> tuple[int, list[int] | None]:
        """Return how much of the walk can be kept, and how the text then ends."""

        def end_of(kept: int) -> list[int] | None:
            return self._end_of(walk.last if kept == most else self._behind(walk, kept), room - kept)

        found = end_of(most)
        if found is not None:
            return most, found
        best: tuple[int, list[int] | None] = (least, end_of(least))
        if best[1] is None:
            return best
        low, high = least, most
        while high - low > 1:
            middle = (low + high) // 2
            found = end_of(middle)
            if found is None:
                high = middle
            else:
                low, best = middle, (middle, found)
        return best

    def _end_of(self, state: LLMatcher, room: int) -> list[int] | None:
        """Return how a text can end: as it could the last time, if it still can."""
        if len(self._end) <= room and ends(state, self._vocabulary, self._end):
            return self._end
        found = shortest_end(state, self._vocabulary, room)
        self._end = found or self._end
        return found

    def _behind(self, walk: _Walk, kept: int) -> LLMatcher:
        state = self._matcher.deep_copy()
        state.consume_tokens(walk.tokens[: kept if walk.end is None else min(kept, walk.end)])
        return state

    def _along(
        self, whole: Sequence[int], walk: _Walk, canvas: Guarded, tokens: Sequence[int], scores: Scores
    ) -> _Walk:
        """Return the walk that follows a given text."""
        along = _Walk([], [], walk.last)
        for index, decided in enumerate(tokens):
            if index >= len(whole):
                token, own = self._filler, 0.0
                along.end = index - 1 if along.end is None and index == len(whole) else along.end
            else:
                token, own = whole[index], 1.0
                if token in self._vocabulary.stop_ids:
                    along.end = index
                if decided == UNDECIDED:
                    same = token == walk.tokens[index] and along.tokens == walk.tokens[:index]
                    own = walk.confidence[index] if same else scores.probability(canvas.frontier + index, token)
            along.tokens.append(token)
            along.confidence.append(own)
            along.forced.append(
                index < len(whole) and walk.forced[index] and whole[: index + 1] == walk.tokens[: index + 1]
            )
        return along

    # --- the answer

    def _filled(self, walk: _Walk, canvas: Guarded, tokens: Sequence[int], asked: Sequence[bool]) -> Fill:
        before, behind = canvas.frontier, len(canvas.tokens) - canvas.frontier - len(walk.tokens)
        stops = walk.end is not None and walk.tokens[walk.end] in self._vocabulary.stop_ids
        over = stops and walk.end is not None and tokens[walk.end] != UNDECIDED
        opened = [
            ask and (over or walk.end is None or index <= walk.end)
            for index, ask in enumerate(asked[: len(walk.tokens)])
        ]
        confidence = [1.0] * len(walk.tokens) if over else walk.confidence
        return Fill(
            tokens=[0] * before + walk.tokens + [0] * behind,
            confidence=[0.0] * before + confidence + [0.0] * behind,
            open=[False] * before + opened + [False] * behind,
            end=canvas.frontier + walk.end if stops and not over and walk.end is not None else None,
            forced=[False] * before + walk.forced + [False] * behind,
        )


def _dead_end(state: LLMatcher) -> DeadEnd:
    if state.is_error():
        return DeadEnd("the grammar costs more than it may")
    return DeadEnd("the grammar allows no token of this model's vocabulary here")

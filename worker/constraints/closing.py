"""How to end a text that a grammar has under way, in few tokens.

The shortest end of a context-free grammar cannot be read off a matcher that only tells the next tokens, so this is a
greedy walk: forced tokens first, then closing brackets, and no choice that leaves everything as it was. It need not be
the shortest: a guard holds on to an end once it has found it. Nor is one always found: where every letter may always
come (`.*END`), nothing tells which one leads on, and the text may end by its length.
"""

from collections.abc import Sequence

from llguidance import LLMatcher

from worker.constraints.vocabulary import Vocabulary, allowed_tokens

_MOST_TRIES = 160
LONGEST_END = 512


def shortest_end(matcher: LLMatcher, vocabulary: Vocabulary, room: int) -> list[int] | None:
    """Return tokens of at most `room` that make the text whole, a stop token included where the text could go on.

    None if none were found. `matcher` stays as it is.
    """
    room = min(room, LONGEST_END)
    found = _walk(matcher, vocabulary, room, wander=False)
    # In a pattern the walk may go round in circles; in JSON the same place comes again and again.
    return _walk(matcher, vocabulary, room, wander=True) if found is None else found


def ends(matcher: LLMatcher, vocabulary: Vocabulary, end: Sequence[int]) -> bool:
    """Tell whether tokens that have ended another text would end this one: far cheaper than to look for an end."""
    stop = bool(end) and end[-1] in vocabulary.stop_ids
    body = list(end[:-1] if stop else end)
    if matcher.is_stopped() or matcher.validate_tokens(body) < len(body):
        return False
    state = matcher.deep_copy()
    return state.consume_tokens(body) and state.is_accepting() and state.is_stopped() != stop


def _walk(matcher: LLMatcher, vocabulary: Vocabulary, room: int, *, wander: bool) -> list[int] | None:
    """Walk to an end; with `wander` to places first that the walk has not seen, else only on from where it is."""
    state, end, seen = matcher.deep_copy(), list[int](), set[bytes]()
    while True:
        if state.is_error() or len(end) > room:
            return None
        if state.is_accepting():
            if state.is_stopped():
                return end
            return [*end, vocabulary.stop_ids[0]] if vocabulary.stop_ids and len(end) < room else None
        forced: Sequence[int] = state.compute_ff_tokens()
        if not forced:
            step = _step(state, vocabulary, seen if wander else set())
            if step is None:
                return None
            forced = (step,)
        if len(end) + len(forced) > room or not state.consume_tokens(list(forced)):
            return None
        end += forced


def _step(state: LLMatcher, vocabulary: Vocabulary, seen: set[bytes]) -> int | None:
    """Return the token of the closing order that comes first and leads to where the walk has not been.

    What may come next tells where it is.
    """
    allowed = allowed_tokens(state, (), may_stop=True)
    seen.add(allowed)
    tries, first = 0, None
    for token in vocabulary.closing_order:
        if not allowed[token]:
            continue
        first = token if first is None else first
        after = state.deep_copy()
        if after.consume_token(token):
            there = allowed_tokens(after, (), may_stop=True)
            if after.is_accepting() or there not in seen:
                seen.add(there)
                return token
        tries += 1
        if tries == _MOST_TRIES:
            break
    return first

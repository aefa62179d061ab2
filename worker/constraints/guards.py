"""Makes the guards of a worker's requests."""

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher

from shared.commands import Generate
from shared.grammar import LIMITS, InvalidConstraint, grammar_of
from shared.text import Tokenizer
from worker.constraints.guard import GrammarGuard
from worker.constraints.vocabulary import Vocabulary
from worker.models.spec import ModelSpec

_KEPT = 64
"""Grammars that are kept ready."""


class Guards:
    """The vocabulary is read beside whatever else the worker does at its start; the first guard waits for it."""

    def __init__(self, tokenizer: Tokenizer, spec: ModelSpec) -> None:
        self._filler = (*spec.filler_ids, *spec.stop_token_ids, 0)[0]
        self._ready = OrderedDict[str, LLMatcher]()
        pool = ThreadPoolExecutor(1, "vocabulary")
        self._vocabulary: Future[Vocabulary] = pool.submit(
            Vocabulary, tokenizer.to_json(), spec.vocab_size, spec.stop_token_ids
        )
        pool.shutdown(wait=False)

    def __call__(self, request: Generate) -> GrammarGuard | None:
        """Return the guard of a request at the start of its text, None without a constraint.

        Raises `InvalidConstraint`.
        """
        if request.constraint is None:
            return None
        try:
            vocabulary = self._vocabulary.result()
        except ValueError as error:
            raise InvalidConstraint(f"the tokenizer of this model cannot follow a grammar: {error}") from error
        matcher = self._matcher(grammar_of(request.constraint), vocabulary)
        return GrammarGuard(vocabulary, matcher, request.limits.max_tokens, self._filler)

    def _matcher(self, grammar: str, vocabulary: Vocabulary) -> LLMatcher:
        known = self._ready.get(grammar)
        if known is None:
            known = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=LIMITS)
            if known.is_error():
                raise InvalidConstraint(" ".join(known.get_error().split())[:400])
            self._ready[grammar] = known
            if len(self._ready) > _KEPT:
                self._ready.popitem(last=False)
        self._ready.move_to_end(grammar)
        return known.deep_copy()

"""Which logits a request edits in its next forward. A pure rule over what is decided."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as ReadOnly

from shared.commands import LogitEdits
from worker.engine.plan import Edit


def edits_of(asked: LogitEdits, prompt: ReadOnly[int], produced: Iterable[int]) -> tuple[Edit, ...]:
    """Return the edits that change something, one for each token id, by rising id.

    Presence and frequency look at what is `produced`, as OpenAI defines them; repetition at the prompt too.
    """
    divisors: dict[int, float] = {}
    shifts: dict[int, float] = {}
    if asked.repetition_penalty != 1 or asked.presence_penalty or asked.frequency_penalty:
        counts = Counter(produced)
        if asked.repetition_penalty != 1:
            divisors = dict.fromkeys({*prompt, *counts}, asked.repetition_penalty)
        if asked.presence_penalty or asked.frequency_penalty:
            shifts = {
                token: -(asked.presence_penalty + asked.frequency_penalty * count) for token, count in counts.items()
            }
    for token, bias in asked.logit_bias:
        shifts[token] = shifts.get(token, 0.0) + bias
    return tuple((token, divisors.get(token, 1.0), shifts.get(token, 0.0)) for token in sorted({*divisors, *shifts}))

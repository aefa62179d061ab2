"""Penalties and biases of a body, checked against the model's vocabulary."""

from api.errors import invalid
from api.schemas import GenerationBody
from shared.card import ModelCard
from shared.commands import LogitEdits
from shared.vocabulary import find_foreign, spelled

_MOST_BIAS = 100.0


def edits_of(body: GenerationBody, card: ModelCard) -> LogitEdits | None:
    """Return the edits of logits that a body asks for, None if it asks for none; raises `ApiError`."""
    edits = LogitEdits(
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_bias(body, card),
    )
    return None if edits == LogitEdits() else edits


def _bias(body: GenerationBody, card: ModelCard) -> tuple[tuple[int, float], ...]:
    found: dict[int, float] = {}
    for name, bias in (body.logit_bias or {}).items():
        where = f"logit_bias.{name[:40]}"
        is_number = name.isascii() and name.isdecimal() and len(name) < 12
        if not is_number or find_foreign([int(name)], card.vocab_size):
            raise invalid(where, f"{where}: keys are token ids, {spelled(card.vocab_size)}")
        if not -_MOST_BIAS <= bias <= _MOST_BIAS:
            raise invalid(where, f"{where} is {bias}; a bias is -100 to 100")
        found[int(name)] = bias
    return tuple(sorted(found.items()))

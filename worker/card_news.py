"""What a worker says when it finds another card under its model's name: who serves what, and what to do about it."""

import logging

from shared.adapters import TARGETS_FILE
from shared.queue import Published

_WORDS = {TARGETS_FILE: "what adapters need"}


def card_news(model: str, published: Published) -> tuple[int, str] | None:
    """Return the level and the line to log, None if there is nothing to say."""
    if not published.differs:
        return None
    what = _listed(published)
    others = "another worker" if published.others == 1 else f"{published.others} other workers"
    if published.kept:
        return logging.WARNING, (
            f"this worker has no model store, {others} of model {model} may have: requests with adapters that come "
            "here are passed on, which delays them. Start it with the same --model-store (DIFFLEET_MODEL_STORE)"
        )
    if not published.others:
        return logging.INFO, f"the card of model {model} is a new one, it differs in: {what}. Nobody serves the former"
    if published.differs == (TARGETS_FILE,) and not published.adapters:
        return logging.WARNING, (
            f"model {model} takes adapters from now on, {others} started before may have no model store: requests with "
            "adapters that come there are passed on, which delays them. Start all with the same --model-store"
        )
    return logging.WARNING, (
        f"the card of model {model} was another's, it differs in: {what}. Fronts follow this one; {others} may serve "
        "the former under the same name, and give other answers: stop what is old, or give one its own --model-name"
    )


def reclaimed_news(model: str, former: Published) -> tuple[int, str]:
    """Return the level and the line to log when a worker's card has taken the place of one that nobody has any more."""
    return logging.WARNING, (
        f"no worker has the card of model {model} any more, fronts follow this worker's again. It differed in: "
        f"{_listed(former)}"
    )


def _listed(published: Published) -> str:
    return ", ".join(_WORDS.get(name, name) for name in published.differs)

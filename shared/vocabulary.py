"""Which token ids a model has."""

from collections.abc import Sequence


def find_foreign(token_ids: Sequence[int], vocab_size: int) -> tuple[int, str] | None:
    """Return the index of the first id that is none of the model's, and what to say of it; None if there is none."""
    for index, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            return index, f"is {token}; token ids of this model are {spelled(vocab_size)}"
    return None


def spelled(vocab_size: int) -> str:
    """Return the range of a model's ids in words."""
    return f"0 to {vocab_size - 1}"

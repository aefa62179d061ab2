"""When a request ends. Pure rules over produced tokens; text rules live in the text decoder."""

from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass

from shared.events import FinishDetail, FinishReason


@dataclass(frozen=True, slots=True)
class Stop:
    """The request produces nothing at or behind `position` (absolute)."""

    position: int
    detail: FinishDetail


def reason_of(detail: FinishDetail) -> FinishReason:
    """Return the coarse reason that OpenAI's clients know."""
    match detail:
        case "stop_token" | "stop_string" | "embedded" | "filled":
            return "stop"
        case "aborted":
            return "aborted"
        case "max_tokens" | "max_nfe" | "max_repetition_run" | "max_model_len" | "deadline":
            return "length"


def first_of(tokens: ReadOnly[int], wanted: frozenset[int], start: int, end: int) -> int | None:
    """Return the first position of [start, end) whose token is in `wanted`."""
    return next((position for position in range(start, end) if tokens[position] in wanted), None)


def repetition_run(tokens: ReadOnly[int], start: int, position: int) -> int:
    """Return how many equal tokens end at `position`, looking back no further than `start`."""
    run = 1
    while position - run >= start and tokens[position - run] == tokens[position]:
        run += 1
    return run

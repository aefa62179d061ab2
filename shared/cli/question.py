"""What one may ask a fleet from the terminal."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """None leaves a choice to the fleet. `raw` continues the prompt as it stands, without the chat template."""

    prompt: str
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    threshold: float | None = None
    block_length: int | None = None
    raw: bool = False

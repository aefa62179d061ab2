"""What one may ask a fleet from the terminal."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shared.cli.infill import Infill


@dataclass(frozen=True, slots=True)
class Question:
    """None leaves a choice to the fleet. `raw` continues the prompt as it stands, without the chat template.

    `before` are the earlier messages of a chat, as role and content.
    """

    prompt: str
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    threshold: float | None = None
    block_length: int | None = None
    raw: bool = False
    json_schema: dict[str, Any] | None = None
    """What the answer must be."""
    infill: Infill | None = None
    """What the answer is to have around its holes."""
    before: tuple[tuple[str, str], ...] = ()
    loras: tuple[tuple[str, float], ...] = ()
    """Name and scale of the adapters that it runs under."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat, with the prompt as its last message."""
        said = (*self.before, ("user", self.prompt))
        return [{"role": role, "content": content} for role, content in said]


def schema_of(argument: str) -> dict[str, Any]:
    """Return the JSON schema that an option gives as text, or as the name of a file; raises ValueError."""
    try:
        text = argument if argument.lstrip().startswith("{") else Path(argument).read_text()
        value = json.loads(text)
    except OSError as error:
        raise ValueError(f"{argument}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("a schema must be an object")
    return cast(dict[str, Any], value)

"""What one may ask a fleet from the terminal."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    strategy: str | None = None
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
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    """Further options of the decoding strategy."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat, with the prompt as its last message."""
        said = (*self.before, ("user", self.prompt))
        return [{"role": role, "content": content} for role, content in said]

    @property
    def decoding(self) -> dict[str, object]:
        """What it asks of the sampler, by the names that the protocol has for it."""
        given = {"strategy": self.strategy, "threshold": self.threshold}
        return {name: value for name, value in given.items() if value is not None} | dict(self.options)


_OPTIONS = {
    "guided_json": "--json-schema",
    "json_schema": "--json-schema",
    "max_tokens": "--max-tokens",
    "block_length": "--block-length",
    "temperature": "--temperature",
    "seed": "--seed",
    "diffusion.strategy": "--strategy",
    "strategy": "--strategy",
    "diffusion.threshold": "--threshold",
    "threshold": "--threshold",
    "lora": "--lora",
}
"""Options of `diffleet generate` by the fields that a fleet's complaints name."""
_FIELD = "|".join(sorted(map(re.escape, _OPTIONS), key=len, reverse=True))
_PLACE = r"(?:\[\d+\])?(?:\.(?:name|scale))?"
_NAMED = re.compile(
    rf"\A({_FIELD}){_PLACE}(?=[: ])|(?<=\()({_FIELD}){_PLACE}(?=\)\Z)"
    r"|(?<= )(max_tokens|block_length|diffusion\.strategy)(?= )"
)
_SET = re.compile(r"\Adiffusion\.(?!template)([a-z_]+)(?=[: ])")
"""What has no option of its own is given by --set."""


def as_typed(complaint: str) -> str:
    """Return a fleet's complaint with options in place of fields: where it begins with one, ends in one in parentheses,
    or has one that is no word of English."""
    named = _NAMED.sub(lambda found: _OPTIONS[found[1] or found[2] or found[3]], complaint)
    return _SET.sub(r"--set \1", named)


def schema_of(argument: str) -> dict[str, Any]:
    """Return the JSON schema that an option gives as text, or as the name of a file; raises ValueError."""
    try:
        text = argument if argument.lstrip().startswith("{") else Path(argument).read_text()
        value = json.loads(text)
        # What Python reads as infinity or NaN cannot be sent.
        json.dumps(value, allow_nan=False)
    except OSError as error:
        raise ValueError(f"{argument}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("a schema must be an object")
    return cast(dict[str, Any], value)

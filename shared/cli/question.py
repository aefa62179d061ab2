"""What one may ask a fleet from the terminal."""

from dataclasses import dataclass


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
    before: tuple[tuple[str, str], ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat, with the prompt as its last message."""
        said = (*self.before, ("user", self.prompt))
        return [{"role": role, "content": content} for role, content in said]

"""What the front needs of the fleet; `shared.client.FleetClient` is the one that talks to Redis."""

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Protocol

from shared.card import ModelCard
from shared.client import Result
from shared.commands import Generate
from shared.events import Event
from shared.lora import AdapterRecord
from shared.queue_state import QueueState
from shared.roster import WorkerInfo
from shared.text import Tokenizer


class Fleet(Protocol):
    """Every method raises `shared.client.FleetUnavailable` if Redis cannot be reached."""

    def run(
        self,
        command: Generate,
        *,
        queue_limit: int | None = ...,
        idempotency_key: str | None = ...,
        tenant: str = ...,
        retention_ms: int = ...,
    ) -> AsyncGenerator[Event]:
        """Submit, and follow to the terminal event.

        Raises `QueueFull`, `UnknownModel`, `IdempotencyConflict` on iteration.
        """
        ...

    async def submit(
        self, command: Generate, *, queue_limit: int | None = ..., tenant: str = ..., retention_ms: int = ...
    ) -> object:
        """Queue; raises as `run`. Submitting the same id again changes nothing."""
        ...

    def stream(self, request_id: str, after: int = ..., previews: bool = ...) -> AsyncGenerator[Event]:
        """Follow from the event behind `after`; raises `shared.client.UnknownRequest` on iteration."""
        ...

    async def result(self, request_id: str) -> Result:
        """Raises `shared.client.UnknownRequest`."""
        ...

    async def abort(self, request_id: str, reason: str = ...) -> object: ...

    async def models(self) -> Sequence[str]: ...

    async def alive(self, models: Sequence[str]) -> Collection[str]:
        """Return those that have a live worker."""
        ...

    async def default_model(self) -> str:
        """Raises `shared.client.NoDefaultModel`."""
        ...

    async def card(self, name: str) -> ModelCard:
        """Raises `shared.client.UnknownModel`, `shared.card.InvalidCard`."""
        ...

    async def tokenizer(self, card: ModelCard) -> Tokenizer:
        """Raises `shared.text.InvalidTokenizer`."""
        ...

    async def find_adapters(self, model: str, names: Sequence[str]) -> Mapping[str, AdapterRecord]:
        """Return those of the named adapters that the model has."""
        ...

    async def adapters(self, model: str) -> Sequence[AdapterRecord]:
        """Return the model's adapters; raises `shared.client.UnknownModel`."""
        ...

    async def workers(self, model: str) -> Sequence[WorkerInfo]:
        """Return the live ones; raises `shared.client.UnknownModel`."""
        ...

    async def queue(self, model: str) -> QueueState:
        """Raises `shared.client.UnknownModel`, `shared.card.InvalidCard`."""
        ...

    @property
    def reconnects(self) -> int:
        """How often the subscription was made anew."""
        ...

    @property
    def replays(self) -> int:
        """How often the event log was read, to begin with or to close a gap."""
        ...

    async def ping(self) -> None: ...

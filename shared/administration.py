"""What operators see and ask of a fleet: workers, single requests, dead letters, adapters, caches."""

from collections.abc import Mapping
from dataclasses import dataclass

from shared.connection import Link
from shared.dead_letters import DeadLetters
from shared.keys import Keys
from shared.lora import AdapterRegistry
from shared.orders import OrderBook
from shared.webhooks import WebhookStore


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Where a request stands. Neither its prompt nor its text is part of it."""

    id: str
    state: str
    """queued | running | done | failed | aborted | expired | dead"""
    lane: str
    owner: str
    """The worker that runs it, or ran it last."""
    epoch: int
    attempts: int
    lost_workers: tuple[str, ...]
    """Workers that were lost with it."""
    passed_on: int
    """Workers that were unable to run it."""
    prompt_tokens: int
    completion_tokens: int
    blocks: int
    nfe: int
    tenant: str
    submitted_ms: int
    """Server times, ms since 1970."""
    deadline_ms: int
    ended_ms: int | None


class Administration:
    """One server's fleet. Raises `FleetUnavailable`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.adapters = AdapterRegistry(link)
        self.orders = OrderBook(link)
        self.dead_letters = DeadLetters(link)
        self.webhooks = WebhookStore(link)

    async def inspect(self, request_id: str) -> RequestFacts | None:
        """Return what is known of a request; None if it is not known, or no longer. Raises ValueError for no id."""
        found: dict[bytes, bytes] = await self._link.read("HGETALL", Keys.of(request_id).request(request_id))
        fields = {name.decode(): value for name, value in found.items() if name != b"in"}
        return _facts(request_id, fields) if "st" in fields else None


def _facts(request_id: str, fields: Mapping[str, bytes]) -> RequestFacts:
    def text(name: str) -> str:
        return fields.get(name, b"").decode(errors="replace")

    def number(name: str) -> int:
        return int(fields[name]) if fields.get(name, b"").isdigit() else 0

    return RequestFacts(
        id=request_id,
        state=text("st"),
        lane=text("lane"),
        owner=text("own"),
        epoch=number("ep"),
        attempts=number("att"),
        lost_workers=tuple(text("lost").split()),
        passed_on=number("unable"),
        prompt_tokens=number("pt"),
        completion_tokens=number("nt"),
        blocks=number("nb"),
        nfe=number("nfe"),
        tenant=text("ten"),
        submitted_ms=number("t0"),
        deadline_ms=number("dl"),
        ended_ms=number("t1") or None,
    )

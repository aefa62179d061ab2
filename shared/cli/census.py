"""What a fleet is at one moment, read from Redis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.client import FleetClient
from shared.commands import LANES, Lane
from shared.connection import Link
from shared.keys import Keys, partition
from shared.roster import WorkerInfo, strangers


@dataclass(frozen=True, slots=True)
class LaneView:
    lane: Lane
    length: int
    """Requests queued and running."""
    oldest_s: float | None
    """Age of the oldest of them; None if there is none."""


@dataclass(frozen=True, slots=True)
class ModelView:
    name: str
    workers: tuple[WorkerInfo, ...]
    lanes: tuple[LaneView, ...]
    dead_letters: int
    strangers: tuple[str, ...] = ()
    """Ids of the workers that have another card than the one in force."""

    @property
    def open_requests(self) -> int:
        return sum(lane.length for lane in self.lanes)

    @property
    def running(self) -> int:
        return sum(worker.slots - worker.free for worker in self.workers)


@dataclass(frozen=True, slots=True)
class Census:
    now_ms: int
    """Time of the server."""
    models: tuple[ModelView, ...]


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request as its hash tells it. Neither prompt nor answer."""

    id: str
    state: str
    lane: str
    age_s: float
    worker: str
    attempts: int
    prompt_tokens: int
    tokens: int
    nfe: int
    blocks: int


async def take_census(fleet: FleetClient, link: Link, only: str | None = None) -> Census:
    """Read all models, or one; raises as `FleetClient.card`."""
    seconds, micros = await link.read("TIME")
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    names = await fleet.models() if only is None else [only]
    return Census(now_ms, tuple([await _model(fleet, link, name, now_ms) for name in names]))


async def open_requests(fleet: FleetClient, link: Link, model: str, limit: int) -> list[RequestView]:
    """Return the oldest queued and running requests of a model, oldest first; raises as `FleetClient.card`."""
    seconds, micros = await link.read("TIME")
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    found: list[RequestView] = []
    for keys in await _partitions(fleet, model):
        for lane in LANES:
            entries: Sequence[tuple[bytes, Any]] = await link.read("XRANGE", keys.lane(lane), "-", "+", "COUNT", limit)
            for _, fields in entries:
                request_id = _pairs(fields)[b"id"].decode()
                view = await request(link, request_id, now_ms)
                if view is not None:
                    found.append(view)
    return sorted(found, key=lambda view: -view.age_s)[:limit]


async def request(link: Link, request_id: str, now_ms: int) -> RequestView | None:
    """Return one request; None if it is not known, or no longer."""
    fields = ("st", "lane", "t0", "t1", "own", "att", "pt", "nt", "nfe", "nb")
    values: list[bytes | None] = await link.read("HMGET", Keys.of(request_id).request(request_id), *fields)
    known = {name: (value or b"").decode() for name, value in zip(fields, values, strict=True)}
    if not known["st"]:
        return None
    ended = int(known["t1"] or now_ms)
    attempts, prompt_tokens, tokens, nfe, blocks = (int(known[name] or 0) for name in ("att", "pt", "nt", "nfe", "nb"))
    return RequestView(
        request_id,
        known["st"],
        known["lane"],
        max(0, ended - int(known["t0"] or ended)) / 1000,
        known["own"],
        attempts,
        prompt_tokens,
        tokens,
        nfe,
        blocks,
    )


async def _model(fleet: FleetClient, link: Link, name: str, now_ms: int) -> ModelView:
    lengths: dict[Lane, int] = dict.fromkeys(LANES, 0)
    oldest: dict[Lane, float | None] = dict.fromkeys(LANES)
    dead = 0
    for keys in await _partitions(fleet, name):
        dead += await link.read("XLEN", keys.dead_letters())
        for lane in LANES:
            lengths[lane] += await link.read("XLEN", keys.lane(lane))
            entries: Sequence[tuple[bytes, Any]] = await link.read("XRANGE", keys.lane(lane), "-", "+", "COUNT", 1)
            for entry_id, _ in entries:
                age_s = max(0, now_ms - int(entry_id.partition(b"-")[0])) / 1000
                oldest[lane] = max(age_s, oldest[lane] or 0.0)
    workers = sorted(await fleet.workers(name), key=lambda worker: worker.id)
    lanes = tuple(LaneView(lane, lengths[lane], oldest[lane]) for lane in LANES)
    others = tuple(worker.id for worker in strangers((await fleet.card(name)).digest, workers))
    return ModelView(name, tuple(workers), lanes, dead, others)


async def _partitions(fleet: FleetClient, model: str) -> list[Keys]:
    return [Keys(partition(model, number)) for number in range((await fleet.card(model)).partitions)]


def _pairs(fields: Mapping[bytes, bytes] | Sequence[bytes]) -> Mapping[bytes, bytes]:
    if isinstance(fields, Mapping):
        return fields
    return dict(zip(fields[::2], fields[1::2], strict=True))

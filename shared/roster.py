"""What a worker says about itself with every beat."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from shared.connection import Link
from shared.keys import Keys

WorkerState = Literal["loading", "ready", "draining"]
_NUMBERS = ("slots", "free", "steps", "tokens", "pages", "pages_free", "reclaims", "pid")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    id: str
    """Pod or host name with a boot nonce; it is the consumer name, and never reused."""
    model: str
    state: WorkerState
    slots: int = 0
    """Requests that it can run at the same time."""
    free: int = 0
    """Slots without a request."""
    steps: int = 0
    """Denoising forwards since its start."""
    tokens: int = 0
    """Tokens committed since its start."""
    pages: int = 0
    """Pages of its KV cache."""
    pages_free: int = 0
    reclaims: int = 0
    """Claims since its start of requests that another claim had begun."""
    pid: int = 0
    """Its process, on the host or in the pod that its id names."""
    version: str = ""
    device: str = ""
    adapters: tuple[str, ...] = ()
    """Names of the adapters that it has loaded, each as the request had it that it was loaded for."""
    adapter_digests: tuple[str, ...] = ()
    """What the files of these are: several names, or a later one, may stand for the same files."""
    card: str = ""
    """Digest of the model card that it would publish; empty while it loads, and from programs that do not tell."""
    beat_ms: int = 0
    """Server time (ms since 1970) of its last beat; set by the server."""


def pack_worker(info: WorkerInfo) -> dict[str, str | int]:
    """Return the fields of the worker's hash, the beat's time excepted."""
    return {
        "id": info.id,
        "model": info.model,
        "state": info.state,
        "slots": info.slots,
        "free": info.free,
        "steps": info.steps,
        "tokens": info.tokens,
        "pages": info.pages,
        "pages_free": info.pages_free,
        "reclaims": info.reclaims,
        "pid": info.pid,
        "version": info.version,
        "device": info.device,
        "adapters": ",".join(info.adapters),
        "digests": ",".join(info.adapter_digests),
        "card": info.card,
    }


def unpack_worker(fields: Mapping[bytes, bytes]) -> WorkerInfo | None:
    """Parse a worker's hash; None if it has expired meanwhile or is not one."""
    text = {key.decode(): value.decode(errors="replace") for key, value in fields.items()}
    state = next((known for known in get_args(WorkerState) if known == text.get("state")), None)
    if state is None or "id" not in text:
        return None
    numbers = {name: int(text.get(name, "0")) for name in _NUMBERS}
    return WorkerInfo(
        id=text["id"],
        model=text.get("model", ""),
        state=state,
        version=text.get("version", ""),
        device=text.get("device", ""),
        adapters=tuple(filter(None, text.get("adapters", "").split(","))),
        adapter_digests=tuple(filter(None, text.get("digests", "").split(","))),
        card=text.get("card", ""),
        beat_ms=int(text.get("beat", "0")),
        **numbers,
    )


async def read_roster(link: Link, keys: Keys) -> list[WorkerInfo]:
    """Return the workers that have beaten within their lease, in two round trips; `keys` of a model's partition 0."""
    ids: list[bytes] = await link.read("ZRANGE", keys.workers(), 0, -1)
    found = await link.read_all([("HGETALL", keys.worker(worker_id.decode())) for worker_id in ids])
    return [info for info in map(unpack_worker, found) if info is not None]


def strangers(card: str, workers: Iterable[WorkerInfo]) -> list[WorkerInfo]:
    """Return those that take requests and have another card than the one of this digest."""
    return [worker for worker in workers if worker.state == "ready" and worker.card not in ("", card)]


def is_deserted(card: str, workers: Iterable[WorkerInfo]) -> bool:
    """Whether nobody who takes requests has the card of this digest, or may have it since he does not tell."""
    return not any(worker.state == "ready" and worker.card in ("", card) for worker in workers)

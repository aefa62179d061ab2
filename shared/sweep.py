"""What nobody else cleans up while a model has no workers: requests past their deadline, entries without a request."""

from dataclasses import dataclass

from shared.commands import LANES
from shared.connection import Link
from shared.keys import GROUP, Keys, partition
from shared.lua import script
from shared.subscriber import EXPIRY_GRACE_MS

_PAGE = 256


@dataclass(frozen=True, slots=True)
class Swept:
    dropped: int
    """Entries whose request is over and forgotten; left alone they would keep a pool awake."""
    expired: int
    """Requests that have got their terminal event now."""


async def sweep_lanes(link: Link, model: str, partitions: int) -> Swept:
    """Look through all lanes of a model, page by page; raises `FleetUnavailable`."""
    dropped = expired = 0
    for number in range(partitions):
        keys = Keys(partition(model, number))
        prefix = keys.request("").removesuffix("r:")
        for lane in LANES:
            first = "-"
            while True:
                args = [GROUP, prefix, first, _PAGE, EXPIRY_GRACE_MS]
                seen, last, gone, late = await link.run_again(script("sweep"), [keys.lane(lane)], args)
                dropped += gone
                for request_id in late:
                    expired += await _expire(link, request_id.decode(errors="replace"))
                if seen < _PAGE:
                    break
                first = f"({last.decode()}"
    return Swept(dropped, expired)


async def _expire(link: Link, request_id: str) -> bool:
    try:
        keys = Keys.of(request_id)
    except ValueError:
        return False  # Malformed: for a worker to drop.
    names = [keys.request(request_id), keys.log(request_id), keys.channel(request_id), keys.rate()]
    names += [keys.lane(lane) for lane in LANES]
    return await link.run_again(script("expire"), names, [request_id, GROUP, EXPIRY_GRACE_MS]) == b"expired"

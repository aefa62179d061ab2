"""The workers of a model, of which some models have none."""

from collections.abc import Sequence

from api.ports import Fleet
from shared.client import UnknownModel
from shared.roster import WorkerInfo


async def live_workers(fleet: Fleet, model: str) -> Sequence[WorkerInfo]:
    """Return those of a model that was found just now: none if it has been forgotten since."""
    try:
        return await fleet.workers(model)
    except UnknownModel:
        return ()

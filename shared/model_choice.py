"""Which model a request means that names none."""

from collections.abc import Collection, Sequence

from shared.connection import Link
from shared.keys import Keys, partition


class NoDefaultModel(Exception):
    """A request names no model, and there is none, or more than one that it may mean."""

    def __init__(self, alive: Sequence[str], departed: Sequence[str]) -> None:
        told = [f"the models are {', '.join(alive)}"] if alive else []
        told += [f"without a worker: {', '.join(departed)}"] if departed else []
        super().__init__(f"model is required: {'; '.join(told)}" if told else "no worker has announced a model yet")
        self.alive = tuple(alive)
        """Those that have a live worker."""
        self.departed = tuple(departed)


def default_model(known: Sequence[str], alive: Collection[str]) -> str:
    """Return the only model that has a live worker; if none has one, the only one that is known.

    Raises `NoDefaultModel`. A model outlives its workers, for they may come back; who names none wants an answer.
    """
    served = [name for name in known if name in alive]
    match served or known:
        case [only]:
            return only
        case _:
            raise NoDefaultModel(served, [name for name in known if name not in alive])


async def read_alive(link: Link, known: Sequence[str]) -> set[str]:
    """Return those models of which a worker has beaten within its lease, in two round trips for them all."""
    rosters = [Keys(partition(name)) for name in known]
    listed = await link.read_all([("ZRANGE", keys.workers(), 0, -1) for keys in rosters])
    places = [
        (name, keys.worker(one.decode())) for name, keys, ids in zip(known, rosters, listed, strict=True) for one in ids
    ]
    states = await link.read_all([("HGET", place, "state") for _, place in places])
    return {name for (name, _), state in zip(places, states, strict=True) if state is not None}

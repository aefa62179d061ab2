"""Where in Redis webhooks are due: with the partitions of all models, and in one place for all else."""

from collections.abc import Sequence
from typing import Protocol

from shared.card import InvalidCard, ModelCard
from shared.client import UnknownModel
from shared.keys import OTHER_HOOKS, Keys, partition


class Models(Protocol):
    async def models(self) -> Sequence[str]: ...

    async def card(self, name: str) -> ModelCard: ...


async def hook_partitions(fleet: Models) -> list[Keys]:
    """Return the names of each place. Raises `FleetUnavailable`."""
    found = [OTHER_HOOKS]
    for name in await fleet.models():
        try:
            card = await fleet.card(name)
        except (UnknownModel, InvalidCard):
            continue  # gone since, or written by something else
        found += [Keys(partition(name, number)) for number in range(card.partitions)]
    return found

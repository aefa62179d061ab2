"""The fleet's registry of adapters: which names requests may use, and where in the model store each one lies."""

from dataclasses import dataclass

import orjson

from shared.commands import LoraUse
from shared.connection import Link
from shared.keys import loras


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    name: str
    path: str
    """Folder in the model store."""
    digest: str
    """sha256 (hex) over its files: a worker loads these and no others."""
    rank: int
    parameters: int
    created: int
    """Seconds since 1970."""

    def use(self, scale: float = 1.0) -> LoraUse:
        return LoraUse(name=self.name, scale=scale, path=self.path, digest=self.digest)


class AdapterRegistry:
    """The adapters of each model of one server. Raises `FleetUnavailable`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def add(self, model: str, record: AdapterRecord) -> None:
        """Register an adapter, in the place of one of its name; requests that were submitted keep the former."""
        await self._link.read("HSET", loras(model), record.name, orjson.dumps(record))

    async def remove(self, model: str, name: str) -> bool:
        """Forget an adapter and return whether it was there; requests that were submitted with it still run."""
        return bool(await self._link.command("HDEL", loras(model), name))

    async def find(self, model: str, name: str) -> AdapterRecord | None:
        found: bytes | None = await self._link.read("HGET", loras(model), name)
        return None if found is None else _record(found)

    async def list(self, model: str) -> list[AdapterRecord]:
        """Return the adapters of a model by name."""
        found: dict[bytes, bytes] = await self._link.read("HGETALL", loras(model))
        records = [_record(content) for content in found.values()]
        return sorted((each for each in records if each is not None), key=lambda each: each.name)


def _record(content: bytes) -> AdapterRecord | None:
    """Parse a record; None for what is none, or a newer writer's."""
    try:
        fields = orjson.loads(content)
        return AdapterRecord(**{name: fields[name] for name in AdapterRecord.__dataclass_fields__})
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None

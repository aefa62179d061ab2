"""The fleet's registry of adapters: which names requests may use, and where in the model store each one lies."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import orjson

from shared.commands import LoraUse
from shared.connection import Link
from shared.keys import loras
from shared.roster import WorkerInfo

ADAPTER_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")


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

    def is_loaded(self, worker: WorkerInfo) -> bool:
        """Whether a worker has these files loaded, for whichever name."""
        if worker.adapter_digests:
            return self.digest in worker.adapter_digests
        return self.name in worker.adapters  # a worker of before digests were told

    def use(self, scale: float = 1.0, param: Literal["lora", "model"] = "lora") -> LoraUse:
        """Return what a request says that runs under it; `param` is the field that named it."""
        return LoraUse(name=self.name, scale=scale, path=self.path, digest=self.digest, param=param)


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

    async def find(self, model: str, names: Sequence[str]) -> dict[str, AdapterRecord]:
        """Return those of the named adapters that exist; any name will do. As cheap among thousands as among few."""
        asked = [name for name in names if ADAPTER_NAME.fullmatch(name)]
        if not asked:
            return {}
        found: list[bytes | None] = await self._link.read("HMGET", loras(model), *asked)
        records = {name: _record(content) for name, content in zip(asked, found, strict=True) if content is not None}
        return {name: record for name, record in records.items() if record is not None}

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

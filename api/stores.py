"""What fronts keep in Redis beside the queue."""

from dataclasses import dataclass

from api.batches import BatchStore
from api.files import FileStore
from api.responses.store import ResponseStore
from api.settings import ApiSettings
from shared.connection import Link


@dataclass(frozen=True, slots=True)
class Stores:
    responses: ResponseStore
    files: FileStore
    batches: BatchStore

    @classmethod
    def on(cls, link: Link, settings: ApiSettings) -> "Stores":
        return cls(ResponseStore(link), FileStore(link, settings.file_quota_bytes), BatchStore(link))

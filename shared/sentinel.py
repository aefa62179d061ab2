"""The primary of a replicated Redis, found by asking its sentinels: at every new connection, so that a failover is
followed by whoever connects again.

    redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/db]

The credentials are those of the primary; the sentinels are asked without any.
"""

from dataclasses import dataclass
from typing import Any, Self, cast
from urllib.parse import unquote

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection
from redis.connection import ConnectionPool as SyncConnectionPool
from redis.sentinel import Sentinel as SyncSentinel
from redis.sentinel import SentinelManagedConnection as SyncSentinelManagedConnection

SCHEME = "redis+sentinel://"
_PORT = 26_379
_ASK_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Sentinels:
    """What a redis+sentinel:// URL says."""

    hosts: tuple[tuple[str, int], ...]
    service: str
    db: int = 0
    username: str | None = None
    password: str | None = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Raises ValueError, naming what is wrong."""
        authority, _, path = url.removeprefix(SCHEME).partition("/")
        credentials, _, listed = authority.rpartition("@")
        username, _, password = credentials.partition(":")
        hosts: list[tuple[str, int]] = []
        for host in listed.split(","):
            name, _, port = host.partition(":")
            if not name or (port and not port.isdigit()):
                raise ValueError(f"{host!r} is not a sentinel's host:port")
            hosts.append((name, int(port or _PORT)))
        service, _, db = path.partition("/")
        if not service or (db and not db.isdigit()):
            raise ValueError(f"the URL must end in /service or /service/db, not in {path!r}")
        return cls(
            tuple(hosts), service, int(db or 0), unquote(username) or None, unquote(password) if credentials else None
        )

    @property
    def connection(self) -> dict[str, Any]:
        """Keyword arguments of a connection to the primary."""
        return {"db": self.db, "username": self.username, "password": self.password}

    async def primary(self) -> tuple[str, int]:
        """Return the primary's host and port; raises redis' ConnectionError if no sentinel knows it."""
        sentinel = Sentinel(
            list(self.hosts), socket_timeout=_ASK_TIMEOUT_S, socket_connect_timeout=_ASK_TIMEOUT_S, protocol=2
        )
        try:
            address = cast(tuple[str, int], await cast(Any, sentinel).discover_master(self.service))
        finally:
            for client in sentinel.sentinels:
                await client.aclose()
        return address[0], int(address[1])

    def primary_sync(self) -> tuple[str, int]:
        """As `primary`, for a thread without an event loop."""
        sentinel = SyncSentinel(
            list(self.hosts), socket_timeout=_ASK_TIMEOUT_S, socket_connect_timeout=_ASK_TIMEOUT_S, protocol=2
        )
        try:
            address = cast(tuple[str, int], cast(Any, sentinel).discover_master(self.service))
        finally:
            for client in sentinel.sentinels:
                client.close()
        return address[0], int(address[1])


class PrimaryPool(BlockingConnectionPool):
    """A pool whose connections ask where to go; callers beyond its size wait, as with any other."""

    is_master = True
    check_connection = False

    def __init__(self, sentinels: Sentinels, **options: Any) -> None:
        self._sentinels = sentinels
        super().__init__(  # pyright: ignore[reportUnknownMemberType]
            connection_class=SentinelManagedConnection, connection_pool=self, **sentinels.connection, **options
        )

    async def get_master_address(self) -> tuple[str, int]:
        return await self._sentinels.primary()


class SyncPrimaryPool(SyncConnectionPool):
    is_master = True
    check_connection = False

    def __init__(self, sentinels: Sentinels, **options: Any) -> None:
        self._sentinels = sentinels
        super().__init__(  # pyright: ignore[reportUnknownMemberType]
            connection_class=SyncSentinelManagedConnection, connection_pool=self, **sentinels.connection, **options
        )

    def get_master_address(self) -> tuple[str, int]:
        return self._sentinels.primary_sync()

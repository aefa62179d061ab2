"""Connections to Redis, and what its errors mean.

A reply may be lost after the command has run. So the client library retries nothing; this module retries, with jitter,
only what the caller declares idempotent (scripts keyed by id, epoch and seq, and reads).
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, Protocol, Self, assert_never, cast

from redis import Redis as SyncRedis
from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool as SyncConnectionPool
from redis.retry import Retry as SyncRetry

from shared.cluster import SCHEMES as CLUSTER_SCHEMES
from shared.cluster import ClusterClient, ClusterUrl, SyncClusterClient
from shared.lua import Script
from shared.sentinel import SCHEME, PrimaryPool, Sentinels, SyncPrimaryPool
from shared.settings import check_redis_url

CONNECT_TIMEOUT_S = 3.0
REPLY_TIMEOUT_S = 8.0
"""Blocking reads must ask for less."""
RETRY_S = 5.0
"""How long an idempotent call is tried again before the fleet counts as unavailable."""

Argument = str | bytes | int | float


class FleetUnavailable(Exception):
    """Redis cannot be reached, or cannot take a command now."""


class OutOfMemory(FleetUnavailable):
    """Redis takes no new work until some has ended; trying again soon would not help."""


class TurnedAway(FleetUnavailable):
    """Redis takes no connection of ours: it wants other credentials, or has no database of that number."""


class NotReplicated(FleetUnavailable):
    """The write has happened, but fewer replicas than wanted have confirmed it."""


class GroupMissing(Exception):
    """The consumer group is gone: Redis has restarted without its data."""


class Failure(Enum):
    """What a Redis error means to its caller."""

    CONNECTION = auto()
    """The command may or may not have run."""
    REFUSED = auto()
    """READONLY, LOADING, MASTERDOWN, BUSY, ...: it has not run; a later try may."""
    CREDENTIALS = auto()
    DATABASE = auto()
    """It has no database of the number that the URL ends in."""
    NOSCRIPT = auto()
    OUT_OF_MEMORY = auto()
    NOGROUP = auto()
    OTHER = auto()
    """A fault of the program or of the access rules."""


def classify(error: BaseException) -> Failure:
    """Tell what an exception of the client library means."""
    match error:
        case exceptions.ConnectionError(__cause__=exceptions.RedisError() as cause):
            return classify(cause)  # of a Unix socket: what its server has said to the first words of a connection
        case exceptions.AuthenticationError() | exceptions.AuthorizationError():
            return Failure.CREDENTIALS
        case exceptions.NoPermissionError():
            return Failure.OTHER
        case exceptions.BusyLoadingError() | exceptions.ReadOnlyError():
            return Failure.REFUSED
        case exceptions.ClusterDownError():
            return Failure.REFUSED
        case exceptions.ConnectionError() | exceptions.TimeoutError() | OSError() | TimeoutError():
            return Failure.CONNECTION
        case exceptions.NoScriptError():
            return Failure.NOSCRIPT
        case exceptions.OutOfMemoryError():
            return Failure.OUT_OF_MEMORY
        case exceptions.ResponseError():
            return _classify_reply(str(error))
        case _:
            return Failure.OTHER


def _classify_reply(message: str) -> Failure:
    if "NOGROUP" in message:
        return Failure.NOGROUP
    if message.startswith("NOSCRIPT"):
        return Failure.NOSCRIPT
    if message.startswith("OOM"):
        return Failure.OUT_OF_MEMORY
    if "DB index" in message:
        return Failure.DATABASE
    refusals = ("READONLY", "LOADING", "MASTERDOWN", "BUSY ", "TRYAGAIN", "CLUSTERDOWN", "NOREPLICAS", "MISCONF")
    refusals += ("MOVED ", "ASK ")
    # A slot is on its way to another node: a script has met a key that has left already, or a read waited at one.
    if "non local key" in message or message.startswith("UNBLOCKED"):
        return Failure.REFUSED
    return Failure.REFUSED if message.startswith(refusals) else Failure.OTHER


class AsyncPipeline(Protocol):
    def execute_command(self, *args: Argument) -> Any: ...

    async def execute(self, raise_on_error: bool = True) -> list[Any]: ...


class AsyncClient(Protocol):
    """What is used of an async client; the library leaves it half typed."""

    async def execute_command(self, *args: Argument) -> Any: ...

    def pipeline(self, transaction: bool = True) -> AsyncPipeline: ...

    async def aclose(self) -> None: ...


def open_client(url: str, connections: int = 8) -> AsyncClient:
    """Return an async client for short calls; calls beyond `connections` (to one node) wait for one to be free.

    Connects at the first command. Raises ValueError for a URL that is not redis://, rediss://, unix://,
    redis+sentinel://, redis+cluster:// or rediss+cluster://, or ends in no database's number.
    """

    def open_node(node: str) -> Redis:
        return Redis.from_pool(open_pool(node, connections))

    if url.startswith(CLUSTER_SCHEMES):
        return ClusterClient(ClusterUrl.from_url(url), open_node)
    return cast(AsyncClient, open_node(url))


def open_pool(url: str, connections: int = 8) -> BlockingConnectionPool:
    """Return the connections of `open_client` to a single server; raises as that does."""
    check_redis_url(url)
    options: dict[str, Any] = {
        "max_connections": connections,
        "timeout": REPLY_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": REPLY_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "protocol": 2,
        **_tls_options(url),
    }
    if url.startswith(SCHEME):
        return PrimaryPool(Sentinels.from_url(url), **options)
    return BlockingConnectionPool.from_url(url, **options)  # pyright: ignore[reportUnknownMemberType]


def _tls_options(url: str) -> dict[str, Any]:
    """Return what an encrypted connection needs beside its URL, whose own options win."""
    # The client library of this version would take a certificate of any name.
    return {"ssl_check_hostname": True} if url.startswith("rediss://") else {}


def open_sync_client(url: str, timeout_s: float = REPLY_TIMEOUT_S) -> SyncRedis:
    """Return a client for one thread without an event loop; of a Cluster, for single commands only.

    Raises as `open_client`.
    """
    check_redis_url(url)
    if url.startswith(CLUSTER_SCHEMES):
        return SyncClusterClient(ClusterUrl.from_url(url), lambda node: open_sync_client(node, timeout_s))
    options: dict[str, Any] = {
        "max_connections": 2,
        "retry": SyncRetry(NoBackoff(), 0),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": min(timeout_s, CONNECT_TIMEOUT_S),
        "protocol": 2,
        **_tls_options(url),
    }
    if url.startswith(SCHEME):
        return SyncRedis.from_pool(SyncPrimaryPool(Sentinels.from_url(url), **options))
    pool = SyncConnectionPool.from_url(url, **options)  # pyright: ignore[reportUnknownMemberType]
    return SyncRedis.from_pool(pool)


def evalsha(script: Script, keys: Sequence[str], args: Sequence[Argument]) -> tuple[Argument, ...]:
    """Return the command that runs a script."""
    return ("EVALSHA", script.sha, len(keys), *keys, *args)


def jitter_s(attempt: int, longest_s: float = 1.0) -> float:
    """Return how long to wait before try `attempt` (from 0): full jitter, doubling from 50 ms."""
    return random.uniform(0.0, min(longest_s, 0.05 * 2**attempt))


class Link:
    """Commands over one client, with errors in the protocol's words. Safe for concurrent tasks."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    @classmethod
    def open(cls, url: str, connections: int = 8) -> Self:
        return cls(open_client(url, connections))

    @property
    def clustered(self) -> bool:
        """True if a command may have keys of one partition only."""
        return isinstance(self._client, ClusterClient)

    async def close(self) -> None:
        await self._client.aclose()

    async def command(self, *args: Argument) -> Any:
        """Run a command once.

        Raises `FleetUnavailable` (it may have run), `GroupMissing`.
        """
        try:
            return await self._client.execute_command(*args)
        except (exceptions.RedisError, OSError) as error:
            raise translate(error) from error

    async def read(self, *args: Argument) -> Any:
        """Run a command that may run twice; retried for `RETRY_S`."""
        return await self._retry(lambda: self.command(*args))

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Run a script once; raises as `command`."""
        try:
            return await self._client.execute_command(*evalsha(script, keys, args))
        except exceptions.NoScriptError:
            # It has not run, so sending the whole script is no repeat. EVAL also caches it.
            return await self.command("EVAL", script.source, len(keys), *keys, *args)
        except (exceptions.RedisError, OSError) as error:
            raise translate(error) from error

    async def run_again(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Run an idempotent script; retried for `RETRY_S`."""
        return await self._retry(lambda: self.run(script, keys, args))

    async def run_waited(
        self, script: Script, keys: Sequence[str], args: Sequence[Argument], replicas: int, wait_ms: int
    ) -> Any:
        """Run an idempotent script that always writes, until `replicas` have what it wrote; retried for `RETRY_S`.

        Raises `NotReplicated` if they are too slow: it has run, and may be run again.
        """
        wait = ("WAIT", replicas, wait_ms)

        async def attempt() -> Any:
            # On one connection, for WAIT counts from that connection's last write.
            reply, copies = await self.pipeline([evalsha(script, keys, args), wait])
            if isinstance(reply, exceptions.NoScriptError):
                command = ("EVAL", script.source, len(keys), *keys, *args)
                reply, copies = await self.pipeline([command, wait])
            for answer in (reply, copies):
                if isinstance(answer, Exception):
                    raise translate(answer) from answer
            if copies < replicas:
                raise NotReplicated(f"only {copies} of {replicas} replicas have it")
            return reply

        return await self._retry(attempt)

    async def pipeline(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """Run commands in one round trip, once, in order; replies that are errors are returned as exceptions."""
        pipe = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        try:
            return await pipe.execute(raise_on_error=False)
        except (exceptions.RedisError, OSError) as error:
            raise translate(error) from error

    async def read_all(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """Run commands that may run twice in one round trip; retried for `RETRY_S`. Raises as `command`."""

        async def attempt() -> list[Any]:
            replies = await self.pipeline(commands) if commands else []
            for reply in replies:
                if isinstance(reply, Exception):
                    raise translate(reply) from reply
            return replies

        return await self._retry(attempt)

    async def run_many(self, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[Argument]]]) -> list[Any]:
        """Run one idempotent script with several arguments, pipelined and in order; retried for `RETRY_S`."""
        commands = [evalsha(script, keys, args) for keys, args in calls]

        async def attempt() -> list[Any]:
            replies = await self.pipeline(commands)
            if any(classify(reply) is Failure.NOSCRIPT for reply in replies if isinstance(reply, Exception)):
                await self.command("SCRIPT", "LOAD", script.source)
                again = await self.pipeline(commands)
                # What ran in the first pass ran: its answer stands.
                pairs = zip(replies, again, strict=True)
                replies = [new if isinstance(old, Exception) else old for old, new in pairs]
            for reply in replies:
                if isinstance(reply, Exception):
                    raise translate(reply) from reply
            return replies

        return await self._retry(attempt)

    async def _retry(self, attempt: Callable[[], Any]) -> Any:
        until = time.monotonic() + RETRY_S
        tries = 0
        while True:
            try:
                return await attempt()
            except (OutOfMemory, TurnedAway):
                raise
            except FleetUnavailable:
                pause = jitter_s(tries)
                tries += 1
                if time.monotonic() + pause > until:
                    raise
                await asyncio.sleep(pause)


def translate(error: Exception) -> Exception:
    """Return the exception to raise for an error of the client library."""
    failure = classify(error)
    match failure:
        case Failure.CONNECTION:
            return FleetUnavailable(f"Redis does not answer: {error}")
        case Failure.REFUSED if str(error).startswith(("MOVED ", "ASK ")):
            return FleetUnavailable("Redis is a Cluster (name it redis+cluster://host), and the slot is elsewhere")
        case Failure.REFUSED:
            return FleetUnavailable(f"Redis refuses commands for now: {error}")
        case Failure.CREDENTIALS:
            return TurnedAway("this Redis wants other credentials (DIFFLEET_REDIS_USERNAME, DIFFLEET_REDIS_PASSWORD)")
        case Failure.DATABASE:
            return TurnedAway(f"this Redis has no such database: {error}; the URL ends in its number")
        case Failure.OUT_OF_MEMORY:
            return OutOfMemory("Redis is out of memory and takes no new work")
        case Failure.NOGROUP:
            return GroupMissing(str(error))
        case Failure.NOSCRIPT | Failure.OTHER:
            return error
        case _:
            assert_never(failure)

"""A Redis Cluster behind the interface of one server: each command goes to the node that has its key's slot.

    redis+cluster://[user:password@]host[:port][,host[:port]...][?ssl options]        (rediss+cluster:// encrypted)

Some nodes are enough: they tell of the others. A redirected command has not run, so sending it again is no repeat;
nothing else is sent twice here. All keys of one command must share a slot, which `shared.keys` sees to.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from redis import Redis as SyncRedis
from redis import exceptions
from redis.asyncio import Redis
from redis.connection import ConnectionPool
from redis.crc import key_slot

SCHEMES = ("redis+cluster://", "rediss+cluster://")
_PORT = 6379
_ASK_TIMEOUT_S = 2.0
_KEYLESS = frozenset({"PING", "TIME", "INFO", "SCRIPT", "WAIT", "CLIENT", "CLUSTER", "CONFIG", "DBSIZE"})

Argument = str | bytes | int | float
Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ClusterUrl:
    """What the URL of a Cluster says."""

    seeds: tuple[Address, ...]
    scheme: str
    login: str
    """`user:password@`, as it stands in the URL; or nothing."""
    query: str

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Raises ValueError, naming what is wrong."""
        scheme, _, rest = url.partition("+cluster://")
        rest, _, query = rest.partition("?")
        authority, _, db = rest.partition("/")
        if db not in ("", "0"):
            raise ValueError(f"a Cluster has no database but 0, so the URL must not end in /{db}")
        login, at, listed = authority.rpartition("@")
        seeds: list[Address] = []
        for host in listed.split(","):
            name, _, port = host.rpartition(":") if host.rpartition(":")[2].isdigit() else (host, "", "")
            if not name or (":" in name and not name.startswith("[")):
                raise ValueError(f"{host!r} is not a node's host:port")
            seeds.append((name.strip("[]"), int(port or _PORT)))
        return cls(tuple(seeds), scheme, login + at, query)

    def node(self, address: Address) -> str:
        """Return the URL of one node."""
        host, port = address
        name = f"[{host}]" if ":" in host else host
        return f"{self.scheme}://{self.login}{name}:{port}/0" + (f"?{self.query}" if self.query else "")


class Slots:
    """Which node has which slot, as one of them told it."""

    def __init__(self, ranges: Iterable[tuple[int, int, Address]]) -> None:
        self._ranges = tuple(ranges)
        self.nodes = tuple(dict.fromkeys(address for _, _, address in self._ranges))
        """The primaries."""

    @classmethod
    def from_reply(cls, reply: Sequence[Sequence[Any]], asked: Address) -> Self:
        """Read the answer of CLUSTER SLOTS; a node that does not know its own name is where it was asked."""
        ranges: list[tuple[int, int, Address]] = []
        for start, end, (host, port, *_), *_ in reply:
            name = host.decode() if isinstance(host, bytes) else host
            ranges.append((start, end, (name or asked[0], port)))
        return cls(ranges)

    def owner(self, key: str | bytes) -> Address:
        """Raises redis' ClusterDownError if nobody has the key's slot."""
        slot = key_slot(key.encode() if isinstance(key, str) else key)
        for start, end, address in self._ranges:
            if start <= slot <= end:
                return address
        raise exceptions.ClusterDownError(f"slot {slot} is served by no node")


def key_of(command: Sequence[Argument]) -> str | bytes | None:
    """Return a key of a command, which tells its slot; None if it has none."""
    name = str(command[0])
    match name:
        case "EVAL" | "EVALSHA":
            return cast(str, command[3]) if int(command[2]) else None
        case "XGROUP" | "XINFO":
            return cast(str, command[2])
        case "XREADGROUP":
            return cast(str, command[command.index("STREAMS") + 1])
        case _:
            return None if name.partition(" ")[0] in _KEYLESS or len(command) < 2 else cast(str, command[1])


def redirection(error: object, asked: Address) -> tuple[str, Address] | None:
    """Return MOVED or ASK, and to where, if an error says so; a client of one server leaves them unparsed."""
    words = str(error).split() if isinstance(error, exceptions.ResponseError) else []
    if len(words) != 3 or words[0] not in ("MOVED", "ASK"):
        return None
    host, _, port = words[2].rpartition(":")
    return words[0], (host or asked[0], int(port))


def _is_stale(error: Exception, asked: Address) -> bool:
    """Tell whether an error is a reason to ask again who has what."""
    lost = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError, OSError)
    return isinstance(error, lost) or redirection(error, asked) is not None


class ClusterClient:
    """The part of an async client that is used. For one event loop."""

    def __init__(self, url: ClusterUrl, open_node: Callable[[str], Redis]) -> None:
        self._url = url
        self._open_node = open_node
        self._clients: dict[Address, Redis] = {}
        self._slots = Slots(())
        self._stale = True
        self._asking = asyncio.Lock()

    async def aclose(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    def pipeline(self, transaction: bool = False) -> "ClusterPipeline":
        if transaction:
            raise ValueError("transactions are scripts here")
        return ClusterPipeline(self)

    async def execute_command(self, *command: Argument) -> Any:
        """Run a command where it belongs; a script is loaded everywhere."""
        if command[0] == "SCRIPT":
            await self.refresh()
            return (await asyncio.gather(*(self.run_at(node, command) for node in self._slots.nodes)))[0]
        owner = await self.owner(command)
        try:
            return await self.run_at(owner, command)
        except exceptions.ResponseError as error:
            match redirection(error, owner):
                case ("MOVED", node):
                    return await self.run_at(node, command)
                case (_, node):
                    (reply,) = await self.ask_at(node, [command])
                    if isinstance(reply, Exception):
                        raise reply from None
                    return reply
                case None:
                    raise

    async def owner(self, command: Sequence[Argument]) -> Address:
        """Return the node that has a command's slot; any, if it has none."""
        await self.refresh()
        key = key_of(command)
        if key is not None:
            return self._slots.owner(key)
        if not self._slots.nodes:
            raise exceptions.ClusterDownError("no node has a slot")
        return random.choice(self._slots.nodes)

    async def run_at(self, address: Address, command: Sequence[Argument]) -> Any:
        return await self._watched(address, cast(Any, self._client(address)).execute_command(*command))

    async def run_all_at(self, address: Address, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Run commands on one connection, in one round trip; errors come as replies."""
        pipe = self._client(address).pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)  # pyright: ignore[reportUnknownMemberType]
        try:
            replies: list[Any] = await self._watched(address, pipe.execute(raise_on_error=False))
        except (exceptions.RedisError, OSError) as error:
            return [error] * len(commands)
        self._stale |= any(redirection(reply, address) is not None for reply in replies)
        return replies

    async def ask_at(self, address: Address, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Run commands, of which the first has a key, at a node that does not have its slot yet: the key has moved."""
        return (await self.run_all_at(address, [("ASKING",), *commands]))[1:]

    async def refresh(self) -> None:
        """Ask who has what, if that may have changed; raises redis' ConnectionError if no node answers."""
        async with self._asking:
            if not self._stale:
                return
            known = list(dict.fromkeys([*self._slots.nodes, *self._url.seeds]))
            random.shuffle(known)
            fault: BaseException | None = None
            for address in known:
                try:
                    async with asyncio.timeout(_ASK_TIMEOUT_S):
                        reply = await cast(Any, self._client(address)).execute_command("CLUSTER", "SLOTS")
                except exceptions.AuthenticationError:
                    raise
                except (exceptions.ConnectionError, exceptions.TimeoutError, OSError, TimeoutError) as error:
                    fault = error
                    continue
                self._slots, self._stale = Slots.from_reply(reply, address), False
                return
            raise exceptions.ConnectionError(f"no node of the Cluster answers: {fault}") from fault

    async def _watched(self, address: Address, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except (exceptions.RedisError, OSError) as error:
            self._stale |= _is_stale(error, address)
            raise

    def _client(self, address: Address) -> Redis:
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = self._open_node(self._url.node(address))
        return client


class ClusterPipeline:
    """Commands in one round trip to each node, in order there; one without a key goes where the one before it went.

    What is redirected has not run: it is sent again, and with it what follows and has no key, such as WAIT, which would
    otherwise be about the node that redirected. One that is redirected once more is a reply like any other error.
    """

    def __init__(self, client: ClusterClient) -> None:
        self._client = client
        self._commands: list[tuple[Argument, ...]] = []

    def execute_command(self, *command: Argument) -> None:
        self._commands.append(command)

    async def execute(self, raise_on_error: bool = False) -> list[Any]:
        shares: dict[Address, list[int]] = {}
        owner: Address | None = None
        for index, command in enumerate(self._commands):
            if owner is None or key_of(command) is not None:
                owner = await self._client.owner(command)
            shares.setdefault(owner, []).append(index)
        calls = [self._client.run_all_at(node, [self._commands[i] for i in share]) for node, share in shares.items()]
        replies: list[Any] = [None] * len(self._commands)
        for share, answers in zip(shares.values(), await asyncio.gather(*calls), strict=True):
            for index, answer in zip(share, answers, strict=True):
                replies[index] = answer
        for node, share in shares.items():
            await self._follow(node, share, replies)
        if raise_on_error and (fault := next((reply for reply in replies if isinstance(reply, Exception)), None)):
            raise fault
        return replies

    async def _follow(self, asked: Address, share: Sequence[int], replies: list[Any]) -> None:
        """Send again, in order, what a node has redirected; put the replies in place."""
        for place, index in enumerate(share):
            if (found := redirection(replies[index], asked)) is None:
                continue
            kind, node = found
            group = [index]
            for later in share[place + 1 :]:
                if key_of(self._commands[later]) is not None:
                    break
                group.append(later)
            commands = [self._commands[i] for i in group]
            run = self._client.ask_at if kind == "ASK" else self._client.run_all_at
            for i, answer in zip(group, await run(node, commands), strict=True):
                replies[i] = answer


class SyncClusterClient(SyncRedis):
    """The same for one thread without an event loop; of a client's methods, those of single commands."""

    def __init__(self, url: ClusterUrl, open_node: Callable[[str], SyncRedis]) -> None:
        self._url = url
        self._open_node = open_node
        self._clients: dict[Address, SyncRedis] = {}
        self._slots = Slots(())
        self._stale = True
        pool = cast(ConnectionPool, self._client(url.seeds[0]).connection_pool)
        super().__init__(connection_pool=pool)  # pyright: ignore[reportUnknownMemberType]

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if self._stale:
            self._refresh()
        key = key_of(args)
        address = self._slots.owner(key) if key is not None else random.choice(self._slots.nodes)
        try:
            return cast(Any, self._client(address)).execute_command(*args, **options)
        except (exceptions.RedisError, OSError) as error:
            self._stale |= _is_stale(error, address)
            match redirection(error, address):
                case ("MOVED", node):
                    return cast(Any, self._client(node)).execute_command(*args, **options)
                case (_, node):
                    pipe: Any = cast(Any, self._client(node)).pipeline(transaction=False)
                    for words in (("ASKING",), args):
                        pipe.execute_command(*words)
                    return pipe.execute()[1]
                case None:
                    raise

    def _refresh(self) -> None:
        known = list(dict.fromkeys([*self._slots.nodes, *self._url.seeds]))
        random.shuffle(known)
        fault: BaseException | None = None
        for address in known:
            try:
                reply = cast(Any, self._client(address)).execute_command("CLUSTER", "SLOTS")
            except exceptions.AuthenticationError:
                raise
            except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
                fault = error
                continue
            slots = Slots.from_reply(reply, address)
            if not slots.nodes:
                raise exceptions.ClusterDownError("no node has a slot")
            self._slots, self._stale = slots, False
            return
        raise exceptions.ConnectionError(f"no node of the Cluster answers: {fault}") from fault

    def _client(self, address: Address) -> SyncRedis:
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = self._open_node(self._url.node(address))
        return client

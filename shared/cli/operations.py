"""The fleet as its operator reaches it: through Redis."""

import contextlib
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

from redis import exceptions

from shared.cli.exits import Exit, Stop
from shared.client import FleetClient, FleetUnavailable, UnknownModel, UnknownRequest
from shared.connection import Link, TurnedAway
from shared.embedded import EmbeddedServer
from shared.settings import ServiceSettings, queue_url


def find_redis(given: str | None, data_dir: Path | None) -> str:
    """Return the URL to use: the given one, else that of `diffleet up` in this data folder.

    Without a folder it is that of the usual one, else the settings'. Raises `Stop` where no fleet runs in the folder:
    what was meant for it must reach no other fleet.
    """
    if given:
        return named_redis(given)
    found = local_redis(ServiceSettings.model_fields["data_dir"].default if data_dir is None else data_dir)
    if found is None and data_dir is not None:
        raise Stop(Exit.UNREACHABLE, f"no fleet runs in {data_dir}; name its data folder, or its Redis by --redis-url")
    return found or named_redis(None)


def named_redis(given: str | None) -> str:
    """Return what `queue_url` does; raises `Stop`."""
    try:
        return queue_url(given)
    except ValueError as error:
        raise Stop(Exit.USAGE, f"--redis-url: {error}" if given else str(error)) from None


def local_redis(data_dir: Path) -> str | None:
    """Return the URL of the server that `diffleet up` keeps for this data folder; None if there is none."""
    server = EmbeddedServer(data_dir)
    return server.url if server.socket_path.is_socket() else None


@contextlib.asynccontextmanager
async def operating(url: str) -> AsyncGenerator[tuple[FleetClient, Link]]:
    """Yield a client and a connection beside it; raises `Stop`."""
    try:
        client, link = FleetClient.connect(url, connections=4), Link.open(url, connections=4)
    except ValueError as error:
        raise Stop(Exit.USAGE, f"--redis-url: {error}") from error
    try:
        with stopping("no Redis answers: {}; name one with --redis-url"):
            async with contextlib.aclosing(_Closing(link)), client:
                yield client, link
    except (UnknownModel, UnknownRequest) as error:
        raise Stop(Exit.REFUSED, str(error)) from error


@contextlib.contextmanager
def stopping(unreachable: str) -> Generator[None]:
    """Turn what Redis refuses, or does not answer, into `Stop`; `unreachable` has {} for the cause."""
    try:
        yield
    except TurnedAway as error:
        raise Stop(Exit.UNREACHABLE, str(error)) from error
    except FleetUnavailable as error:
        raise Stop(Exit.UNREACHABLE, unreachable.format(error)) from error
    except exceptions.NoPermissionError as error:
        raise Stop(Exit.REFUSED, f"this Redis user may not do that: {error}") from error


class _Closing:
    def __init__(self, link: Link) -> None:
        self._link = link

    async def aclose(self) -> None:
        await self._link.close()

"""One POST to one address: no redirect, no proxy, no second look at the name, only the head of the answer."""

import asyncio
import contextlib
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import h11

from api.webhooks.target import Address, Target

_MOST_HEAD_BYTES = 16_384
_MOST_ADDRESSES = 3
_CONNECT_S = 5.0
_LONGEST_RETRY_AFTER_S = 86_400.0


class BrokenAnswer(Exception):
    """The receiver does not speak HTTP, or too much of it."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    retry_after_s: float | None = None
    """What the receiver asks for."""


class Poster:
    """Certificates are checked against the system's authorities (`SSL_CERT_FILE` names others)."""

    def __init__(self, timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._timeout_s = timeout_s
        self._tls = tls or ssl.create_default_context()

    async def post(
        self, target: Target, addresses: Sequence[Address], headers: Mapping[str, str], body: bytes, now_s: float
    ) -> Answer:
        """Raises OSError (TimeoutError and ssl.SSLError are), `BrokenAnswer`."""
        async with asyncio.timeout(self._timeout_s):
            reader, writer = await self._connect(target, addresses)
            try:
                return await _exchange(reader, writer, target, headers, body, now_s)
            finally:
                writer.close()
                with contextlib.suppress(OSError, asyncio.CancelledError, TimeoutError):
                    # TLS would wait for the other side's goodbye.
                    writer.transport.abort()

    async def _connect(
        self, target: Target, addresses: Sequence[Address]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        fault: OSError | None = None
        for address in addresses[:_MOST_ADDRESSES]:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return await asyncio.open_connection(
                        str(address),
                        target.port,
                        limit=_MOST_HEAD_BYTES,
                        ssl=self._tls if target.secure else None,
                        server_hostname=target.host.rstrip(".") if target.secure else None,
                    )
            except OSError as error:
                fault = error
        raise fault or OSError("no address")


async def _exchange(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    target: Target,
    headers: Mapping[str, str],
    body: bytes,
    now_s: float,
) -> Answer:
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_HEAD_BYTES)
    own = {"host": target.authority, "content-length": str(len(body)), "connection": "close"}
    request = h11.Request(method="POST", target=target.path, headers=list((own | dict(headers)).items()))
    for event in (request, h11.Data(data=body), h11.EndOfMessage()):
        writer.write(connection.send(event) or b"")
    await writer.drain()
    left = 2 * _MOST_HEAD_BYTES
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError as error:
            raise BrokenAnswer("the answer is not HTTP") from error
        if isinstance(event, h11.Response):
            given = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in event.headers}
            return Answer(event.status_code, retry_after(given.get("retry-after"), now_s))
        if event is h11.NEED_DATA:
            data = await reader.read(_MOST_HEAD_BYTES)
            left -= len(data)
            if left < 0:
                raise BrokenAnswer("the head of the answer does not end")
            connection.receive_data(data)
        elif not isinstance(event, h11.InformationalResponse):
            raise BrokenAnswer("the connection ended before an answer")


def retry_after(value: str | None, now_s: float) -> float | None:
    """Return the seconds that a Retry-After asks for (RFC 9110 10.2.3), up to a day; None: nothing sensible."""
    if value is None:
        return None
    if value.strip().isascii() and value.strip().isdigit():
        return min(float(value.strip()[:9]), _LONGEST_RETRY_AFTER_S)
    try:
        wanted = parsedate_to_datetime(value).timestamp() - now_s
    except (ValueError, OverflowError):
        return None
    return min(wanted, _LONGEST_RETRY_AFTER_S) if wanted > 0 else None

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_address, ip_network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.webhooks.post import Answer, BrokenAnswer, Poster, retry_after
from api.webhooks.target import Forbidden, Target, TargetRules, resolve_host
from tests.certificates import self_signed

STRICT, LAX = TargetRules(), TargetRules(allow_http=True)
PRIVATE = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
"""RFC 6890 and its neighbours: written down here once more, not taken from where the rule takes them."""
private = st.sampled_from(PRIVATE).flatmap(
    lambda network: st.integers(int(network.network_address), int(network.broadcast_address)).map(IPv4Address)
)


def wrapped(address: IPv4Address) -> list[IPv6Address]:
    inner = int(address)
    return [
        IPv6Address(0xFFFF << 32 | inner),
        IPv6Address(0x64FF9B << 96 | inner),
        IPv6Address(0x2002 << 112 | inner << 80),
        IPv6Address(0x20010000 << 96 | (inner ^ 0xFFFFFFFF)),
    ]


@given(private)
def test_no_private_address_is_called_in_whatever_it_is_wrapped(address: IPv4Address) -> None:
    assert not STRICT.allows(address)
    assert not any(STRICT.allows(outer) for outer in wrapped(address))


@pytest.mark.parametrize(
    "address", ["::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "::127.0.0.1", "fec0::1", "2001:db8::1"]
)
def test_addresses_of_this_machine_and_its_neighbours_are_not_called(address: str) -> None:
    assert not STRICT.allows(ip_address(address))


@pytest.mark.parametrize("address", ["93.184.215.14", "1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1"])
def test_public_addresses_are_called(address: str) -> None:
    assert STRICT.allows(ip_address(address))


@given(private)
def test_a_named_network_is_called_and_nothing_beside_it(address: IPv4Address) -> None:
    rules = TargetRules(networks=(ip_network("10.1.0.0/16"), ip_network("fd00::/8")))
    assert rules.allows(address) == (address in IPv4Network("10.1.0.0/16"))
    assert rules.allows(ip_address("fd12::1")) and not rules.allows(ip_address("fe80::1"))


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "ftp://example.com/",
        "https://",
        "https:///path",
        "https://user:secret@example.com/",
        "https://example.com/#part",
        "https://example.com:0/",
        "https://example.com:99999/",
        "https://exa mple.com/",
        "https://example.com/\r\nHost: other",
        "https://example.com\\@127.0.0.1/",
        "https://127.0.0.1/",
        "https://[::1]/",
        "https://[::ffff:10.0.0.1]/",
        "https://[fe80::1%25eth0]/",
        "https://169.254.169.254/latest/meta-data",
        "https://exämple.com/",
        "https://example.com/" + "a" * 2048,
        "https://exa%6dple.com/",
        "//example.com/",
    ],
)
def test_a_url_that_nobody_may_call_is_refused_before_anything_is_queued(url: str) -> None:
    with pytest.raises(Forbidden) as refused:
        STRICT.parse(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("name", ["2130706433", "0x7f000001", "0177.0.0.1", "127.1", "localhost", "localhost."])
async def test_other_spellings_of_this_machine_are_found_out_when_they_are_resolved(name: str) -> None:
    target = LAX.parse(f"http://{name}/")
    try:
        found = await LAX.addresses(target, resolve_host)
    except (Forbidden, OSError):
        return
    pytest.fail(f"{name} would be called at {found}")


def test_the_parts_of_a_url_are_what_is_sent() -> None:
    assert STRICT.parse("https://Example.com/a/b?c=%20d") == Target(True, "example.com", 443, "/a/b?c=%20d")
    assert STRICT.parse("https://example.com:8443").authority == "example.com:8443"
    assert LAX.parse("http://[2606:4700::1]:80/").authority == "[2606:4700::1]"


async def test_only_the_allowed_ones_of_several_addresses_are_called() -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1", "1.1.1.1", "fe80::1%lo", "1.1.1.1"]

    assert await STRICT.addresses(STRICT.parse("https://a.example/"), resolve) == [ip_address("1.1.1.1")]


@contextlib.asynccontextmanager
async def answering(
    reply: bytes, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Yield the port of a receiver that says `reply`, and what it has heard."""
    heard: list[bytes] = []
    calls: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            heard.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(reply)
            await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(asyncio.create_task(serve(reader, writer)))

    async with await asyncio.start_server(begin, host, 0, ssl=tls) as server:
        try:
            yield server.sockets[0].getsockname()[1], heard
        finally:
            await asyncio.wait_for(asyncio.gather(*calls), 20)


async def test_a_name_is_looked_up_once_and_only_what_was_checked_is_called() -> None:
    """DNS rebinding: the second look would find this machine."""
    rules = TargetRules(allow_http=True, networks=(ip_network("127.0.0.2/32"),))
    asked: list[str] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.2"] if len(asked) == 1 else ["127.0.0.1"]

    async with answering(b"HTTP/1.1 204 No Content\r\n\r\n", "127.0.0.2") as (port, heard):
        target = rules.parse(f"http://rebind.example:{port}/x")
        addresses = await rules.addresses(target, resolve)
        assert await Poster(5.0).post(target, addresses, {}, b"{}", 0.0) == Answer(204)
        assert asked == ["rebind.example"] and f"host: rebind.example:{port}".encode() in heard[0].lower()
        with pytest.raises(Forbidden):
            await rules.addresses(target, resolve)


async def test_a_redirection_is_an_answer_and_is_not_followed() -> None:
    async with answering(b"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.1:1/\r\n\r\n") as (port, heard):
        target = Target(False, "a.example", port, "/")
        assert (await Poster(5.0).post(target, [ip_address("127.0.0.1")], {}, b"{}", 0.0)).status == 307
        assert len(heard) == 1


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\n" + b"x: " + b"a" * 100_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 4000,
    ],
)
async def test_what_is_no_answer_or_has_no_end_is_a_failure(reply: bytes) -> None:
    async with answering(reply) as (port, _):
        target = Target(False, "a.example", port, "/")
        with pytest.raises((BrokenAnswer, ConnectionError)):
            await Poster(5.0).post(target, [ip_address("127.0.0.1")], {}, b"{}", 0.0)


async def test_the_body_of_an_answer_is_not_waited_for() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\nfirst") as (port, _):
        target = Target(False, "a.example", port, "/")
        assert await Poster(5.0).post(target, [ip_address("127.0.0.1")], {}, b"{}", 0.0) == Answer(200)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of b.example, which is its own authority, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    return self_signed(tmp_path_factory.mktemp("tls"), "b", "b.example")


@pytest.mark.parametrize(("name", "trusted"), [("b.example", True), ("a.example", True), ("b.example", False)])
async def test_only_a_receiver_with_a_certificate_of_its_name_is_told_anything(
    certificate: tuple[Path, Path], name: str, trusted: bool
) -> None:
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(*certificate)
    trust = ssl.create_default_context(cafile=certificate[0] if trusted else None)
    async with answering(b"HTTP/1.1 204 No Content\r\n\r\n", tls=own) as (port, heard):
        call = Poster(20.0, trust).post(Target(True, name, port, "/"), [ip_address("127.0.0.1")], {}, b"{}", 0.0)
        if name == "b.example" and trusted:
            assert (await call).status == 204 and len(heard) == 1
            return
        with pytest.raises(ssl.SSLCertVerificationError):
            await call
    assert not heard


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("120", 120.0),
        ("999999999999", 86_400.0),
        ("soon", None),
        ("-5", None),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40.0),
        ("Thu, 01 Jan 1970 00:00:10 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date_and_nothing_else(value: str | None, seconds: float | None) -> None:
    assert retry_after(value, 60.0) == seconds

"""Where a message may go: rules of URLs and addresses, so that no caller reaches what only this machine can."""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

LONGEST_URL = 2048
_PORTS = {"https": 443, "http": 80}
_VISIBLE = re.compile(r"[\x21-\x7e]+")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_NAT64 = IPv6Network("64:ff9b::/96")
_COMPATIBLE = IPv6Network("::/96")

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port to addresses. Raises OSError."""


class Forbidden(ValueError):
    """A URL that is not called. The message names the rule, and nothing of the URL but its host."""


@dataclass(frozen=True, slots=True)
class Target:
    secure: bool
    host: str
    """Name, or address without brackets."""
    port: int
    path: str
    """With the query."""

    @property
    def authority(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == _PORTS["https" if self.secure else "http"] else f"{name}:{self.port}"


@dataclass(frozen=True, slots=True)
class TargetRules:
    allow_http: bool = False
    networks: tuple[Network, ...] = ()
    """Private ones that may be called all the same."""

    def parse(self, url: str) -> Target:
        """Check a URL as far as that goes without asking anybody. Raises `Forbidden`."""
        if len(url) > LONGEST_URL:
            raise Forbidden(f"is longer than {LONGEST_URL} characters")
        if not _VISIBLE.fullmatch(url) or "\\" in url:
            raise Forbidden("must be visible ASCII characters, others escaped")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise Forbidden("is not a URL") from None
        if parts.scheme != "https" and not (self.allow_http and parts.scheme == "http"):
            raise Forbidden("must begin with https://" + (" or http://" if self.allow_http else ""))
        if "@" in parts.netloc:
            raise Forbidden("must not hold credentials: messages are signed")
        if "#" in url:
            raise Forbidden("must not have a fragment")
        host = parts.hostname or ""
        if "%" in host or not (":" in host or _NAME.fullmatch(host)) or port == 0:
            raise Forbidden("has no host that could be called")
        try:
            literal = ip_address(host)
        except ValueError:
            literal = None
        if literal is not None and not self.allows(literal):
            raise Forbidden(f"{host} is not an address of the public internet")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return Target(parts.scheme == "https", host, port or _PORTS[parts.scheme], path)

    def allows(self, address: Address) -> bool:
        """Tell whether an address is public, or in one of the networks; what is wrapped in it counts as well."""
        if any(address.version == network.version and address in network for network in self.networks):
            return True
        inner = _wrapped(address)
        if inner is not None:
            return self.allows(inner)
        own = (
            address.is_multicast or address.is_reserved or (isinstance(address, IPv6Address) and address.is_site_local)
        )
        return address.is_global and not own

    async def addresses(self, target: Target, resolve: Resolve) -> list[Address]:
        """Resolve a host, once, and return the addresses that may be called. Raises `Forbidden`, OSError."""
        found: list[Address] = []
        for text in await resolve(target.host, target.port):
            try:
                found.append(ip_address(text.partition("%")[0]))
            except ValueError:
                continue
        allowed = list(dict.fromkeys(address for address in found if self.allows(address)))
        if found and not allowed:
            raise Forbidden(f"{target.host} has no address of the public internet")
        if not allowed:
            raise OSError(f"{target.host} has no address")
        return allowed


def _wrapped(address: Address) -> IPv4Address | None:
    """Return the IPv4 address that an IPv6 one stands for: mapped, compatible, 6to4, Teredo or NAT64 (RFC 6052)."""
    if isinstance(address, IPv4Address):
        return None
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return None


async def resolve_host(host: str, port: int) -> list[str]:
    """Ask the system's resolver. Raises OSError."""
    loop = asyncio.get_running_loop()
    try:
        rows = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError("no host can be called so") from None
    return [row[4][0] for row in rows if isinstance(row[4][0], str)]

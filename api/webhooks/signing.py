"""Signatures as in Standard Webhooks (standardwebhooks.com, the symmetric scheme `v1`)."""

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from api.kept_file import KeptFile

SECRET_PREFIX = "whsec_"
ANYONE = "*"
"""In the file of secrets: every key's id that it does not name, and callers without a key."""
_SECRET_BYTES = 32
_LEAST_BYTES, _MOST_BYTES = 24, 64
_FILE = TypeAdapter(dict[str, list[str]])


class InvalidSecrets(ValueError):
    """The file of secrets cannot be read, or one in it is none; the message never repeats a value."""


class Secrets:
    """The secrets of each API key's owner; the first one is the newest, all of them sign."""

    def __init__(self, read: Callable[[], Mapping[str, Sequence[bytes]]]) -> None:
        self._read = read

    @classmethod
    def load(cls, path: Path | None) -> "Secrets":
        """Read a JSON object of key ids (or "*") to lists of `whsec_...`, and anew when it has changed.

        None: nobody has any. Raises `InvalidSecrets`.
        """
        return cls(dict[str, list[bytes]] if path is None else KeptFile(path, _read_secrets))

    def of(self, tenant: str) -> Sequence[bytes]:
        """Return the secrets that sign what a tenant has asked for; none: it may not ask."""
        secrets_of = self._read()
        return secrets_of.get(tenant) or secrets_of.get(ANYONE, ())


def _read_secrets(path: Path) -> dict[str, list[bytes]]:
    try:
        given = _FILE.validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidSecrets(f"{path}: {error.strerror}") from error
    except ValidationError:
        raise InvalidSecrets(f'{path}: must be a JSON object such as {{"*": ["whsec_..."]}}') from None
    found: dict[str, list[bytes]] = {}
    for owner, listed in given.items():
        if not listed:
            raise InvalidSecrets(f"{path}: {owner}: has no secret")
        for number, secret in enumerate(listed):
            try:
                found.setdefault(owner, []).append(decode_secret(secret))
            except ValueError as error:
                raise InvalidSecrets(f"{path}: {owner}[{number}]: {error}") from None
    return found


def new_secret() -> str:
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def decode_secret(secret: str) -> bytes:
    """Raises ValueError, which does not repeat it."""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(SECRET_PREFIX) or not _LEAST_BYTES <= len(key) <= _MOST_BYTES:
        raise ValueError(f"must be {SECRET_PREFIX} and the base64 of {_LEAST_BYTES} to {_MOST_BYTES} bytes")
    return key


def sign(keys: Sequence[bytes], message_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """Return the three headers of a message; a receiver takes it if one of the signatures is by a secret of its own."""
    signed = f"{message_id}.{timestamp_s}.".encode() + body
    signatures = (hmac.new(key, signed, hashlib.sha256).digest() for key in keys)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(one).decode()}" for one in signatures),
    }

"""The protocol's Lua scripts: found beside this module, put together from their parts, known by their SHA1.

A script is `scripts/<name>.lua`. Its first line is the shebang with its flags (Redis 7, Valkey 7.2); the shared parts
that it uses are set in behind it.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).with_name("scripts")

_PARTS: dict[str, tuple[str, ...]] = {
    "submit": ("log", "hook", "settle"),
    "take": ("log", "hook", "settle", "start"),
    "start": ("log", "hook", "settle", "start"),
    "emit": ("log",),
    "finish": ("log", "hook", "settle"),
    "beat": ("log",),
    "hand_back": ("log",),
    "abort": ("log", "hook", "settle"),
    "expire": ("log", "hook", "settle"),
    "replay": ("log",),
    "sweep": ("log",),
    "hook_add": ("log", "hook"),
    "hook_take": ("log",),
    "hook_settle": ("log", "hook"),
    "hook_replay": ("log", "hook"),
    "name_replay": (),
    "forget_consumers": (),
    "publish_card": (),
    "drop_lanes": (),
    "memory": (),
    "limit": (),
    "advance": (),
    "renew": (),
    "release": (),
}


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    source: bytes
    sha: str
    """SHA1 (hex) of the source, as EVALSHA wants it."""


@cache
def script(name: str) -> Script:
    """Return a script by its name in `scripts/`; raises KeyError for one that the protocol does not have."""
    parts = [(_FOLDER / "parts" / f"{part}.lua").read_text() for part in _PARTS[name]]
    shebang, _, body = (_FOLDER / f"{name}.lua").read_text().partition("\n")
    source = "\n".join([shebang, *parts, body]).encode()
    return Script(name, source, hashlib.sha1(source, usedforsecurity=False).hexdigest())

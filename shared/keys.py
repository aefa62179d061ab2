"""Every Redis name of the protocol.

All keys of one request share the hash tag `{model.partition}`, so that a script that touches several of them runs in
one Cluster slot. A request id carries its partition (`r_<model>.<n>_<ulid>`): whoever knows the id knows every key.
"""

import hashlib
import os
import random
import re
import time
import zlib
from dataclasses import dataclass

from shared.commands import Lane

GROUP = "g"
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,95}")
_REQUEST_ID = re.compile(r"r_(?P<part>[A-Za-z0-9][A-Za-z0-9._/-]{0,95}\.\d{1,4})_[0-9A-HJKMNP-TV-Z]{26}")
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def ulid(now_ms: int | None = None) -> str:
    """Return a ULID: 48 bits of milliseconds, 80 random bits, Crockford base 32 (github.com/ulid/spec)."""
    milliseconds = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    value = (milliseconds & (2**48 - 1)) << 80 | int.from_bytes(os.urandom(10), "big")
    return "".join(_CROCKFORD[value >> shift & 31] for shift in range(125, -1, -5))


def named_ulid(name: str) -> str:
    """Return what looks like a ULID and is always the same for a name, which it does not tell."""
    digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:17], "big")
    return "".join(_CROCKFORD[digest >> shift & 31] for shift in range(125, -1, -5))


def partition(model: str, number: int = 0) -> str:
    """Return the hash tag of one partition of a model; raises ValueError for a name that cannot be one."""
    if not MODEL_NAME.fullmatch(model):
        raise ValueError(f"model name {model!r} must match {MODEL_NAME.pattern}")
    return f"{model}.{number}"


def new_request_id(model: str, number: int = 0) -> str:
    return f"r_{partition(model, number)}_{ulid()}"


def pick_partition(count: int, key: str | None = None) -> int:
    """Return where a new request goes: always to the same partition for one idempotency key, else to any."""
    return random.randrange(count) if key is None else zlib.crc32(key.encode()) % count


def partition_of(request_id: str) -> str:
    """Return the hash tag inside a request id; raises ValueError if it is not one of ours."""
    match = _REQUEST_ID.fullmatch(request_id)
    if match is None:
        raise ValueError(f"{request_id[:120]!r} is not a request id")
    return match["part"]


def model_of(request_id: str) -> str:
    return partition_of(request_id).rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of one partition."""

    part: str

    @classmethod
    def of(cls, request_id: str) -> "Keys":
        return cls(partition_of(request_id))

    def _name(self, suffix: str) -> str:
        return f"df:{{{self.part}}}:{suffix}"

    def lane(self, lane: Lane) -> str:
        """Stream of queued and running entries, consumer group `GROUP`."""
        return self._name(f"q:{lane}")

    def request(self, request_id: str) -> str:
        """Hash: the truth about one request."""
        return self._name(f"r:{request_id}")

    def log(self, request_id: str) -> str:
        """Stream of durable events from the first block or end on, ids `<seq>-0`, with the TTL of its request."""
        return self._name(f"e:{request_id}")

    def channel(self, request_id: str) -> str:
        """Pub/sub channel: live copy of the log, and previews."""
        return self._name(f"c:{request_id}")

    def abort(self, request_id: str) -> str:
        """String: the reason; may be set by anyone whom the ACL lets."""
        return self._name(f"a:{request_id}")

    def idempotency(self, tenant: str, key: str) -> str:
        return self._name(f"i:{tenant}:{key}")

    def tenant(self, tenant: str) -> str:
        """Sorted set: ids of a tenant's queued and running requests by their deadline; lives as long as the last."""
        return self._name(f"t:{tenant}")

    def worker(self, worker_id: str) -> str:
        """Hash with the lease's TTL: what one worker announces with each beat."""
        return self._name(f"w:{worker_id}")

    def workers(self) -> str:
        """Sorted set: worker ids by the time (ms) of their last beat."""
        return self._name("workers")

    def dead_letters(self) -> str:
        return self._name("dlq")

    def officers(self) -> str:
        """Sorted set with the lease's TTL: workers that run suspects of a crash, by the end (ms) of their office."""
        return self._name("officers")

    def handed_back(self) -> str:
        """String with the lease's TTL: some entry waits in the pending list for an owner, look there now."""
        return self._name("back")

    def drain_order(self, worker_id: str) -> str:
        """String with a TTL: this worker is asked to end."""
        return self._name(f"d:{worker_id}")

    def flush_order(self) -> str:
        """String with a TTL, other at each order: prefix caches are to be emptied."""
        return self._name("flush")

    def rate(self) -> str:
        """Hash with a TTL of a minute: how fast the partition ends requests."""
        return self._name("rate")

    def hooks(self) -> str:
        """Sorted set with a TTL of days: ids whose webhook is due, by the time (ms) of its next try."""
        return self._name("hooks")

    def hook(self, subject_id: str) -> str:
        """Hash with a TTL of days: where one webhook goes, what it tells, and how often it was tried."""
        return self._name(f"hook:{subject_id}")

    def dead_hooks(self) -> str:
        """Sorted set with a TTL of days: ids whose webhook was given up, by the time (ms) of that."""
        return self._name("hooks:dead")

    def hook_counts(self) -> str:
        """Hash with a TTL of a month: how many tries have ended in which way."""
        return self._name("hooks:counts")


def card(model: str) -> str:
    """Hash without TTL: a pool scaled to zero still accepts work."""
    return f"df:{{{partition(model)}}}:card"


def loras(model: str) -> str:
    """Hash without TTL: adapters by name, as operators have registered them."""
    return f"df:{{{partition(model)}}}:loras"


def step_prices(model: str, kind: str) -> str:
    """String with a TTL of days: what steps take on workers of one kind, by which they choose block lengths."""
    return f"df:{{{partition(model)}}}:prices:{kind}"


def watch_channel(nonce: str) -> str:
    """Pub/sub channel on which one process hears itself, to know that its subscription lives."""
    return f"df:watch:{nonce}"


def closed_hooks(digest: str) -> str:
    """String with a TTL: this receiver has said that it is gone; `digest` names tenant and URL."""
    return f"df:{{hooks.{digest}}}:closed"


OTHER_HOOKS = Keys("hooks")
"""Names of webhooks that no partition of a model commits: those of batches."""

MODELS = "df:models"
"""Set without TTL: names of the models that have a card."""

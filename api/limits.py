"""Rate limits per key, held in Redis: right over any number of fronts."""

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from api.access import Caller
from api.errors import ApiError
from api.names import limit_keys
from api.relay import Reservation
from shared.commands import Generate
from shared.connection import Link
from shared.lua import script

_MOST_RETRY_AFTER_S = 120
"""OpenAI's client does not retry at all if it is told to wait longer."""


@dataclass(frozen=True, slots=True)
class Level:
    """Where one limit stands."""

    limit: int
    left: int
    full_ms: int
    """Time until nothing of it is used any more."""


@dataclass(frozen=True, slots=True)
class Verdict:
    wait_ms: int
    """0: allowed; -1: more than the limit allows at any time."""
    requests: Level | None
    tokens: Level | None

    @property
    def headers(self) -> dict[str, str]:
        """Return the `x-ratelimit-*` headers of the limits that there are."""
        fields: dict[str, str] = {}
        for name, level in (("requests", self.requests), ("tokens", self.tokens)):
            if level is not None:
                fields[f"x-ratelimit-limit-{name}"] = str(level.limit)
                fields[f"x-ratelimit-remaining-{name}"] = str(level.left)
                fields[f"x-ratelimit-reset-{name}"] = duration(level.full_ms)
        return fields


class Limiter:
    def __init__(self, link: Link) -> None:
        self._link = link

    async def charge(self, caller: Caller, requests: int, tokens: int) -> Verdict:
        """Charge both limits, or neither; negative amounts are given back. Raises `FleetUnavailable`."""
        limits = (caller.requests_per_minute or 0, caller.tokens_per_minute or 0)
        # Once, not again: a lost answer must not charge twice.
        reply: Sequence[int] = await self._link.run(script("limit"), limit_keys(caller.id), [*limits, requests, tokens])
        allowed, wait_ms, left, full_ms, tokens_left, tokens_full_ms = reply
        return Verdict(
            0 if allowed else wait_ms,
            Level(limits[0], left, full_ms) if limits[0] else None,
            Level(limits[1], tokens_left, tokens_full_ms) if limits[1] else None,
        )

    async def reserve(
        self, caller: Caller, commands: Sequence[Generate], headers: MutableMapping[str, str]
    ) -> Sequence[Reservation | None]:
        """Set aside one request and the tokens that the commands may cost; one reservation for each command.

        `headers` gets the state of the limits. Raises `ApiError` (429), and nothing was charged.
        """
        if not caller.requests_per_minute and not caller.tokens_per_minute:
            return [None] * len(commands)
        tokens = sum(len(command.prompt) + command.limits.max_tokens for command in commands)
        verdict = await self.charge(caller, 1, tokens)
        headers.update(verdict.headers)
        if verdict.wait_ms:
            raise _exceeded(verdict, tokens)
        return [
            _Reserved(self, caller, int(index == 0), len(command.prompt), command.limits.max_tokens)
            for index, command in enumerate(commands)
        ]


@dataclass(frozen=True, slots=True)
class _Reserved:
    limiter: Limiter
    caller: Caller
    requests: int
    prompt_tokens: int
    max_tokens: int

    async def settle(self, spent: int | None) -> None:
        if spent is None:
            await self.limiter.charge(self.caller, -self.requests, -self.prompt_tokens - self.max_tokens)
        elif spent < self.max_tokens:
            await self.limiter.charge(self.caller, 0, spent - self.max_tokens)


def _exceeded(verdict: Verdict, tokens: int) -> ApiError:
    if verdict.wait_ms < 0:
        assert verdict.tokens is not None, "one request is never more than the limit"
        return ApiError(
            429,
            "rate_limit_exceeded",
            f"prompt and max_tokens are {tokens} tokens together; this key may use {verdict.tokens.limit} a minute",
            headers={"x-should-retry": "false"},
        )
    seconds = min(_MOST_RETRY_AFTER_S, math.ceil(verdict.wait_ms / 1000))
    return ApiError(
        429,
        "rate_limit_exceeded",
        f"this key has used up its rate; try again in {duration(verdict.wait_ms)}",
        headers={"Retry-After": str(seconds), "retry-after-ms": str(verdict.wait_ms)},
    )


def duration(ms: int) -> str:
    """Return a duration as OpenAI's headers have it, which is Go's way: `120ms`, `1.5s`, `6m0s`."""
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    seconds = f"{rest / 1000:g}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}" if hours else f"{minutes}m{seconds}" if minutes else seconds

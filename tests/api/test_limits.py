from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.access import Caller
from api.limits import Limiter, duration
from shared.connection import Link


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0ms"),
        (120, "120ms"),
        (1000, "1s"),
        (1500, "1.5s"),
        (60_000, "1m0s"),
        (360_000, "6m0s"),
        (3_723_004, "1h2m3.004s"),
    ],
)
def test_durations_are_written_as_go_writes_them(ms: int, text: str) -> None:
    assert duration(ms) == text


@given(st.integers(0, 10**8))
def test_a_duration_is_never_empty_and_ends_with_a_unit(ms: int) -> None:
    assert duration(ms).endswith("s")


async def test_a_burst_is_let_through_and_no_more_over_two_connections(redis_url: str) -> None:
    caller = Caller("k", requests_per_minute=5, tokens_per_minute=1000)
    links = [Link.open(redis_url) for _ in range(2)]
    limiters = [Limiter(link) for link in links]
    verdicts = [await limiters[number % 2].charge(caller, 1, 10) for number in range(7)]
    assert [verdict.wait_ms == 0 for verdict in verdicts] == [True] * 5 + [False] * 2
    assert 0 < verdicts[5].wait_ms <= 12_000
    left = [verdict.requests.left for verdict in verdicts if verdict.requests]
    assert left == [4, 3, 2, 1, 0, 0, 0]
    assert verdicts[0].headers["x-ratelimit-limit-tokens"] == "1000"
    for link in links:
        await link.close()


async def test_a_refusal_charges_neither_limit(redis_url: str) -> None:
    link = Link.open(redis_url)
    limiter, caller = Limiter(link), Caller("k", requests_per_minute=10, tokens_per_minute=100)
    first = await limiter.charge(caller, 1, 80)
    refused = await limiter.charge(caller, 1, 80)
    never = await limiter.charge(caller, 1, 101)
    assert (first.wait_ms, never.wait_ms) == (0, -1) and refused.wait_ms > 0
    for verdict in (first, refused, never):
        assert verdict.requests and verdict.requests.left == 9
        assert verdict.tokens and 20 <= verdict.tokens.left <= 25
    await link.close()


async def test_what_is_given_back_can_be_used_again_and_never_becomes_more_than_the_limit(redis_url: str) -> None:
    link = Link.open(redis_url)
    limiter, caller = Limiter(link), Caller("k", tokens_per_minute=100)
    await limiter.charge(caller, 1, 90)
    await limiter.charge(caller, 0, -85)
    assert (await limiter.charge(caller, 1, 90)).wait_ms == 0
    await limiter.charge(caller, 0, -1000)
    full = await limiter.charge(caller, 1, 1)
    assert full.tokens and full.tokens.left == 99 and full.requests is None
    await link.close()


async def test_callers_have_limits_of_their_own(redis_url: str) -> None:
    link = Link.open(redis_url)
    limiter = Limiter(link)
    for name in ("a", "b"):
        assert (await limiter.charge(Caller(name, requests_per_minute=1), 1, 0)).wait_ms == 0
        assert (await limiter.charge(Caller(name, requests_per_minute=1), 1, 0)).wait_ms > 0
    await link.close()


def test_longer_waits_are_longer_texts_of_time() -> None:
    assert [duration(ms) for ms in (1, 999)] == ["1ms", "999ms"]
    assert all(a != b for a, b in pairwise(duration(ms) for ms in range(0, 5000, 7)))

from hypothesis import given
from hypothesis import strategies as st

from api.webhooks.schedule import DELAYS_S, JITTER, Again, GiveUp, judge, next_try

delays = st.lists(st.floats(0.01, 172_800.0), max_size=12)


@given(delays, st.floats(0.0, 1.0))
def test_a_message_is_tried_once_more_than_there_are_delays_then_given_up(given_s: list[float], draw: float) -> None:
    verdicts = [next_try(attempt, given_s, draw=draw) for attempt in range(1, len(given_s) + 3)]
    assert all(isinstance(verdict, Again) for verdict in verdicts[: len(given_s)])
    assert verdicts[len(given_s) :] == [GiveUp(), GiveUp()]


@given(delays.filter(bool), st.data())
def test_each_delay_is_within_the_jitter_and_never_shorter_than_the_receiver_asks(
    given_s: list[float], data: st.DataObject
) -> None:
    attempt = data.draw(st.integers(1, len(given_s)))
    asked = data.draw(st.none() | st.floats(0.0, 86_400.0))
    verdict = next_try(attempt, given_s, asked)
    assert isinstance(verdict, Again)
    base = given_s[attempt - 1]
    assert verdict.delay_s <= max(base * (1 + JITTER) * 1.0001, asked or 0.0)
    assert verdict.delay_s >= max(base * (1 - JITTER) * 0.9999, asked or 0.0)


def test_what_failed_together_does_not_come_back_together() -> None:
    drawn = {next_try(2, DELAYS_S) for _ in range(50)}
    assert len(drawn) > 40


@given(st.integers(100, 599))
def test_only_2xx_takes_a_message_and_only_410_ends_them(status: int) -> None:
    assert judge(status) == ("told" if status // 100 == 2 else "gone" if status == 410 else "again")


def test_the_recommended_schedule_is_ten_tries_over_three_days() -> None:
    assert len(DELAYS_S) + 1 == 10 and 3 <= sum(DELAYS_S) / 86_400 < 4

"""The card that is not there takes the times that it was given."""

import pytest

from tests.bench.gpu.emulated import Card, head_ms, layers_ms


@pytest.mark.parametrize(("rows", "ms"), [(1, 5.17), (32, 18.3), (48, 27.9), (64, 37.5)])
def test_the_layers_take_what_was_measured_and_between_what_lies_between(rows: int, ms: float) -> None:
    assert layers_ms(rows, slots=0, seen=0) == pytest.approx(ms)


def test_a_step_takes_the_longer_the_more_it_does() -> None:
    assert layers_ms(32, 0, 0) < layers_ms(32, 8, 0) < layers_ms(32, 32, 0) < layers_ms(32, 32, 32_768)
    assert head_ms(128) < head_ms(1024)


def test_work_begins_when_it_is_asked_for_and_what_came_before_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    card = Card()
    assert [card.work(20), card.work(10)] == pytest.approx([100.02, 100.03])
    now = 101.0
    assert card.work(10) == pytest.approx(101.01)

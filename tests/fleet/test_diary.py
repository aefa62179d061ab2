"""What the diary of a storm says of each interruption."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fleet.diary import (
    Fault,
    Interruption,
    Line,
    Span,
    What,
    at_work,
    blocks_begun_again,
    interruptions,
    overlap_s,
    uncovered,
)

A, B, C = 1, 2, 3
"""Workers."""


def line(at: float, pid: int, what: What, number: int = 1, request_id: str = "r") -> Line:
    return Line(at, pid, what, request_id, number)


def kill(at: float, pid: int) -> Fault:
    return Fault("killed", Span(at, math.inf), frozenset({pid}))


def test_an_interruption_lasts_from_the_fault_to_the_next_block_of_another_worker() -> None:
    story = [line(0.0, A, "claims"), line(1.0, A, "commits", 2), line(3.5, B, "claims", 2), line(4.0, B, "commits", 3)]
    [found] = interruptions(story, [kill(1.5, A)], [Span(1.0, 2.0)])
    assert found == Interruption("r", "killed", 1.5, 3.5, 4.0, 1, 2, 0.5)
    assert (found.total_s, found.fleet_s) == (2.5, 2.0)


def test_a_request_that_loses_its_next_worker_too_is_interrupted_once_and_longer() -> None:
    story = [line(0.0, A, "claims"), line(2.0, B, "claims", 2), line(5.0, C, "claims", 3), line(6.0, C, "commits", 2)]
    [found] = interruptions(story, [kill(1.0, A), kill(3.0, B)], [])
    assert (found.began, found.claimed, found.committed, found.claims, found.attempt) == (1.0, 5.0, 6.0, 2, 3)


def test_a_fault_that_its_worker_outlived_is_no_interruption() -> None:
    story = [line(0.0, A, "claims"), line(1.0, A, "commits", 2), line(2.0, A, "commits", 3)]
    assert interruptions(story, [Fault("frozen", Span(1.2, 1.8), frozenset({A}))], []) == []


def test_what_a_zombie_still_writes_ends_no_interruption() -> None:
    story = [line(0.0, A, "claims"), line(2.0, B, "claims", 2), line(2.1, A, "commits", 2), line(3.0, B, "commits", 2)]
    [found] = interruptions(story, [Fault("frozen", Span(0.5, 2.05), frozenset({A}))], [])
    assert (found.kind, found.committed) == ("frozen", 3.0)


def test_a_request_that_moves_without_a_fault_counts_from_its_last_sign_of_life() -> None:
    story = [line(0.0, A, "claims"), line(1.0, A, "commits", 2), line(3.0, B, "claims", 2), line(4.0, B, "commits", 3)]
    [found] = interruptions(story, [kill(0.5, B)], [])
    assert (found.kind, found.began) == ("none", 1.0)


def test_the_fault_is_the_one_after_the_last_sign_of_life() -> None:
    outlived = Fault("frozen", Span(0.2, 0.4), frozenset({A}))
    story = [line(0.0, A, "claims"), line(1.0, A, "commits", 2), line(3.0, B, "claims", 2), line(4.0, B, "commits", 3)]
    [found] = interruptions(story, [outlived, kill(1.5, A)], [])
    assert (found.kind, found.began) == ("killed", 1.5)


def test_blocks_begun_again_are_counted_by_what_befell_their_workers() -> None:
    story = [("r", 4, A), ("r", 8, A), ("s", 8, A), ("r", 8, B), ("s", 8, C), ("r", 8, C), ("t", 8, B), ("t", 8, C)]
    lines = [line(float(at), pid, "begins", number, name) for at, (name, number, pid) in enumerate(story)]
    zombie = Fault("frozen", Span(4.5, 4.9), frozenset({C}))
    again = blocks_begun_again([*lines, line(9.0, A, "commits", 8)], [kill(2.5, A), zombie])
    assert again == {"killed": 2, "frozen": 1, "none": 1}


def test_a_worker_works_while_it_is_ready_and_under_no_fault() -> None:
    frozen = Fault("frozen", Span(2.0, 3.0), frozenset({A}))
    spans = at_work({A: Span(1.0, 6.0), B: Span(4.0, math.inf)}, [frozen, kill(5.0, A), kill(7.0, B)])
    assert sorted((span.start, span.end) for span in spans) == [(1.0, 2.0), (3.0, 5.0), (4.0, 7.0)]


moments = st.integers(0, 40)
spans = st.tuples(moments, moments).map(lambda pair: Span(min(pair), max(pair)))


@given(spans, st.lists(spans, max_size=6))
def test_what_is_uncovered_is_the_rest_of_the_whole(whole: Span, covers: list[Span]) -> None:
    gaps = uncovered(whole, covers)

    def inside(at: float, span: Span) -> bool:
        return span.start <= at < span.end

    for at in [number + 0.5 for number in range(40)]:
        bare = inside(at, whole) and not any(inside(at, cover) for cover in covers)
        assert sum(inside(at, gap) for gap in gaps) == bare
    assert overlap_s(whole, gaps) == pytest.approx(sum(gap.end - gap.start for gap in gaps))

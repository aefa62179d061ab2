import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.pages import PagePool


def test_taking_more_than_is_free_takes_nothing() -> None:
    pool = PagePool(3, 16)
    assert pool.take(4) is None
    assert pool.free == 3


def test_a_page_freed_twice_is_an_error() -> None:
    pool = PagePool(3, 16)
    pages = pool.take(2)
    assert pages is not None
    pool.give_back(pages)
    with pytest.raises(ValueError, match="freed twice"):
        pool.give_back(pages[:1])


@given(st.lists(st.integers(0, 6), max_size=40), st.randoms(use_true_random=False))
def test_no_page_has_two_owners_and_none_is_lost(requests: list[int], random) -> None:  # type: ignore[no-untyped-def]
    pool = PagePool(10, 4)
    held: list[list[int]] = []
    for count in requests:
        if held and random.random() < 0.5:
            pool.give_back(held.pop(random.randrange(len(held))))
        pages = pool.take(count)
        if pages is not None:
            held.append(pages)
        flat = [page for pages in held for page in pages]
        assert len(flat) == len(set(flat))
        assert len(flat) + pool.free == 10


def test_pages_for_rounds_up() -> None:
    pool = PagePool(3, 16)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]

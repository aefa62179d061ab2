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


def test_a_page_is_found_by_its_key_until_it_is_needed_for_something_else() -> None:
    pool = PagePool(2, 16)
    pages = pool.take(2)
    assert pages is not None
    pool.register(pages[0], b"first")
    pool.give_back(pages)
    assert (pool.free, pool.idle) == (2, 1)
    assert pool.share(b"first") == pages[0]
    assert pool.free == 1
    pool.give_back([pages[0]])
    assert pool.take(2) is not None
    assert pool.share(b"first") is None


def test_of_idle_pages_the_end_of_the_longest_unused_text_goes_first() -> None:
    pool = PagePool(4, 16)
    old, new = pool.take(2), pool.take(2)
    assert old is not None and new is not None
    for page in (*old, *new):
        pool.register(page, bytes([page]))
    pool.give_back(old)
    pool.give_back(new)
    order = [page for _ in range(4) for page in pool.take(1) or ()]
    assert order == [old[1], old[0], new[1], new[0]]


def test_a_forgotten_page_is_found_by_nobody_and_stays_with_its_holder() -> None:
    pool = PagePool(1, 16)
    assert pool.take(1) == [0]
    pool.register(0, b"key")
    pool.forget(0)
    assert pool.share(b"key") is None
    assert pool.free == 0
    pool.give_back([0])
    assert (pool.free, pool.idle) == (1, 0)


def test_what_nobody_holds_is_not_registered() -> None:
    with pytest.raises(ValueError, match="nobody"):
        PagePool(1, 16).register(0, b"key")


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "give", "register", "share", "forget"]), st.integers(0, 7)), max_size=80
    )
)
def test_holders_free_and_idle_pages_add_up_whatever_happens(actions: list[tuple[str, int]]) -> None:
    pool = PagePool(6, 4)
    held: list[list[int]] = []
    content: dict[bytes, int] = {}
    for action, number in actions:
        key = bytes([number])
        match action:
            case "take":
                before = pool.free
                pages = pool.take(number)
                assert (pages is None) == (number > before)
                if pages:
                    # Its content is about to change: it must not be anybody else's, nor be found.
                    assert all(page not in (p for other in held for p in other) for page in pages)
                    assert all(page not in pages for page in map(pool._page_of.get, content))
                    held.append(pages)
            case "give" if held:
                pool.give_back(held.pop(number % len(held)))
            case "register" if held and held[-1]:
                pool.register(held[-1][0], key)
                content[key] = held[-1][0]
            case "share":
                page = pool.share(key)
                if page is not None:
                    held.append([page])
            case "forget" if held and held[-1]:
                pool.forget(held[-1][0])
                assert held[-1][0] not in pool._page_of.values()
            case _:
                pass
        owned = {page for pages in held for page in pages}
        assert pool.free + len(owned) == 6
        assert all(pool.holders(page) == sum(pages.count(page) for pages in held) for page in range(6))

"""Accounting of KV pages. No tensors: a page is a number that the runner indexes with."""

from collections import deque


class PagePool:
    """Fixed set of pages, each free or held by exactly one sequence.

    Not thread-safe: the engine's thread owns it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"need at least one page of at least one token, not {num_pages} of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = deque(range(num_pages))
        self._held = [False] * num_pages

    @property
    def free(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold positions [0, tokens)."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int] | None:
        """Return `count` pages, or None (and take nothing) if fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        for page in taken:
            self._held[page] = True
        return taken

    def give_back(self, pages: list[int]) -> None:
        """Free `pages`; raises ValueError for a page that is not held, which would soon have two owners."""
        for page in pages:
            if not self._held[page]:
                raise ValueError(f"page {page} is freed twice")
            self._held[page] = False
        self._free.extend(pages)

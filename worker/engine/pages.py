"""Accounting of KV pages. No tensors: a page is a number that the runner indexes with."""

from collections import OrderedDict, deque


class PagePool:
    """Fixed set of pages, each free, held by one or more sequences, or idle: kept for its content until it is needed.

    A page whose content is final may get a key, under which others find it. It keeps the key, and its content, after
    its last holder has gone, until no free page is left: then the page that has been idle for longest is taken first.

    Not thread-safe: the engine's thread owns it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"need at least one page of at least one token, not {num_pages} of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = deque(range(num_pages))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Pages that can be taken."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Pages that nobody holds and whose content can still be shared."""
        return len(self._idle)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold positions [0, tokens)."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int] | None:
        """Return `count` pages, or None (and take nothing) if fewer are free."""
        if count > self.free:
            return None
        taken: list[int] = []
        while len(taken) < count:
            if self._free:
                page = self._free.popleft()
            else:
                page, _ = self._idle.popitem(last=False)
                self.forget(page)
            self._holders[page] = 1
            taken.append(page)
        return taken

    def give_back(self, pages: list[int]) -> None:
        """Let go of `pages`; raises ValueError for a page that is not held, which would soon have two owners."""
        # Of a text the end is worth least: the last page becomes idle first, and so is taken first.
        for page in reversed(pages):
            if not self._holders[page]:
                raise ValueError(f"page {page} is freed twice")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    # --- shared content

    def register(self, page: int, key: bytes) -> None:
        """Let others find the content of a held `page`, now final, under `key`; the first page of a key stays."""
        if not self._holders[page]:
            raise ValueError(f"page {page} is registered by nobody who holds it")
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def share(self, key: bytes) -> int | None:
        """Hold the page that is registered under `key` once more; None if there is none."""
        page = self._page_of.get(key)
        if page is not None:
            self._idle.pop(page, None)
            self._holders[page] += 1
        return page

    def forget_all(self) -> None:
        """Let nobody find any page any more."""
        for page in list(self._key_of):
            self.forget(page)

    def forget(self, page: int) -> None:
        """Let nobody find `page` any more; who holds it keeps it."""
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

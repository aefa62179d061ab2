"""Who runs in the next step: admission, fairness, preemption. Integers and lists only."""

from bisect import insort
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass

from worker.engine.pages import PagePool
from worker.engine.plan import Plan, Row, chunk_end
from worker.engine.sequence import Sequence
from worker.engine.shortage import Shortage
from worker.engine.window import Window
from worker.models.spec import Commit


@dataclass(frozen=True, slots=True)
class CacheShape:
    page_size: int
    """Tokens a page."""
    num_pages: int


BUDGET_OF_BLOCKS = 4
"""A denoising row's block may take that part of a step's tokens, so that it has room beside a prompt's share."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    max_rows: int
    """Sequences that decode together."""
    token_budget: int
    """Query tokens of one step, shared by prefill chunks and denoise rows."""
    pages_ahead: bool = False
    """Rows hold the pages of their next block as well while there are some to spare: the device enters it by itself."""

    @property
    def largest_block(self) -> int:
        """The longest block that leaves a denoising row room beside a prompt's share of the budget."""
        return max(1, self.token_budget // BUDGET_OF_BLOCKS)


def _age(sequence: Sequence) -> int:
    return sequence.order


def _is_prefill(sequence: Sequence, window: Window) -> bool:
    """True for what may be cut; nothing is gained by cutting a block and the one before it."""
    return window.divisible and window.end - window.start > 2 * sequence.block_length


def _in_turn(ready: ReadOnly[Sequence], budget: int) -> list[tuple[Sequence, Row]]:
    """Return rows of so many query tokens together, in this order; the first one also if it alone has more."""
    pairs: list[tuple[Sequence, Row]] = []
    left = budget
    for sequence in ready:
        window, end = sequence.window(), 0
        if _is_prefill(sequence, window):
            # The first chunk holds a block, be that too much.
            room = left // sequence.copies if pairs else max(left // sequence.copies, sequence.context_block)
            end = chunk_end(window.start, window.end, sequence.context_block, room)
        elif not pairs or (window.end - window.start) * sequence.copies <= left:
            end = window.end
        if end > window.start:
            pairs.append((sequence, sequence.row(window, end)))
            left -= (end - window.start) * sequence.copies
    return pairs


class Scheduler:
    """Keeps the waiting and the running sequences, oldest first, and turns them into plans.

    - A row joins as soon as a slot and pages for its next block are free, in order of arrival: nobody overtakes.
    - Pages grow block by block. When they run out a row takes those of the youngest row at a block boundary, which then
      waits at the head of the queue; with none there it sits out a step. The oldest row always gets on, so somebody
      always finishes.
    - Denoise rows and prefill chunks share the token budget. A long prompt gets what the denoise rows leave, and at
      least a quarter of the budget, so neither starves the other.
    - While the device is short of memory rows take turns in steps that hold less, and at least one row each.
    """

    def __init__(self, cache: CacheShape, limits: BatchLimits) -> None:
        self.pool = PagePool(cache.num_pages, cache.page_size)
        self.limits = limits
        self.shortage = Shortage(limits.token_budget)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.cached_tokens = 0
        """Tokens that were not prefilled because their pages were there."""

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_age)

    def find(self, request_id: str) -> Sequence | None:
        return next((s for s in (*self.running, *self.waiting) if s.id == request_id), None)

    def remove(self, sequence: Sequence, *, spoiled: bool = False) -> None:
        """Let a sequence leave; its pages are free at once, and nobody finds them again if they are `spoiled`."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if spoiled:
            for page in sequence.pages:
                self.pool.forget(page)
        self.pool.give_back(sequence.pages)
        sequence.pages = []

    def can_ever_fit(self, sequence: Sequence) -> bool:
        """True if a request, run to its limit, has pages when it is alone and budget beside a prefill's share."""
        if self.pool.pages_for(sequence.last_reach) * sequence.copies > self.pool.num_pages:
            return False
        # A window that cannot be cut may exceed the budget: it then runs alone.
        return not self.block_too_long(sequence)

    def block_too_long(self, sequence: Sequence) -> bool:
        """True if a request that is cut between steps has blocks that could not be planned beside others."""
        budget, copies = self.limits.token_budget, sequence.copies
        if 4 * sequence.widest * copies > 3 * budget and sequence.widest > sequence.block_length:
            # It could not be cut, and never ran beside a prompt's share.
            return True
        if sequence.window().divisible or (sequence.template and sequence.spec.commit is Commit.FUSED):
            return BUDGET_OF_BLOCKS * sequence.block_length * copies > budget
        return False

    def plan(self, step: int) -> tuple[Plan, list[Sequence]]:
        """Return the next step's plan and the sequences of its rows, in the same order."""
        self._publish()
        self._grow()
        self._admit(step)
        if self.limits.pages_ahead:
            self._look_ahead()
        pairs = self._rows()
        for sequence, _ in pairs:
            sequence.planned_at = step
        running = frozenset(sequence.id for sequence in self.running)
        return Plan(tuple(row for _, row in pairs), running), [sequence for sequence, _ in pairs]

    # --- pages

    def _missing(self, sequence: Sequence) -> int:
        return self.pool.pages_for(sequence.reach) * sequence.copies - len(sequence.pages)

    def _publish(self) -> None:
        """Let others find the pages that have become final since the last step."""
        for sequence in self.running:
            keys = sequence.page_keys(self.pool.page_size, sequence.cached)
            for page, key in zip(sequence.pages[sequence.shared :], keys[sequence.shared :], strict=False):
                self.pool.register(page, key)
            sequence.shared = max(sequence.shared, len(keys))

    def _share(self, sequence: Sequence) -> list[int]:
        """Hold and return the pages of others that begin a waiting sequence's text."""
        pages: list[int] = []
        for key in sequence.page_keys(self.pool.page_size, sequence.shareable_end):
            page = self.pool.share(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def _grow(self) -> None:
        """Give running sequences the pages of their active block, oldest first."""
        for sequence in list(self.running):
            if sequence not in self.running:
                continue
            pages = self.pool.take(self._missing(sequence))
            while pages is None and (victim := self._younger_evictable(sequence)) is not None:
                self._preempt(victim)
                pages = self.pool.take(self._missing(sequence))
            if pages is not None:
                sequence.pages.extend(pages)

    def _younger_evictable(self, sequence: Sequence) -> Sequence | None:
        candidates = reversed(self.running[self.running.index(sequence) + 1 :])
        return next((s for s in candidates if s.evictable and s.pages), None)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.give_back(sequence.evict())
        self.preemptions += 1
        self.add(sequence)

    def _admit(self, step: int) -> None:
        while self.waiting and len(self.running) < self.limits.max_rows:
            sequence = self.waiting[0]
            shared = self._share(sequence)
            missing = self._missing(sequence) - len(shared)
            # Every running row may need a page soon: a newcomer that would take the last ones only causes preemption.
            crowded = self.running and missing + len(self.running) > self.pool.free
            pages = None if crowded else self.pool.take(missing)
            if pages is None:
                self.pool.give_back(shared)
                return
            sequence.hold(shared, pages, self.pool.page_size)
            self.cached_tokens += sequence.cached
            self.waiting.pop(0)
            # Before those that run, behind those that sit out: short answers that never cease would keep them out.
            sequence.planned_at = step - 2
            insort(self.running, sequence, key=_age)

    def _look_ahead(self) -> None:
        for sequence in self.running:
            if sequence.copies > 1 or sequence.limit <= sequence.reach:
                continue
            wanted = self.pool.pages_for(sequence.reach + sequence.block_length) - len(sequence.pages)
            # Nobody shall be preempted, or wait, for what may never be used.
            if wanted > 0 and self.pool.free - wanted >= len(self.running):
                sequence.pages.extend(self.pool.take(wanted) or [])

    # --- tokens

    def _rows(self) -> list[tuple[Sequence, Row]]:
        budget = self.limits.token_budget
        ready = [s for s in self.running if self._missing(s) <= 0]
        # Longest unplanned first, so that rows which did not fit this time go first next time.
        ready.sort(key=lambda s: (s.planned_at, s.order))
        if self.shortage.budget is not None:
            return _in_turn(ready, self.shortage.budget)
        windows = [(sequence, sequence.window()) for sequence in ready]
        prefill = [(s, w) for s, w in windows if _is_prefill(s, w)]
        denoise = [(s, w) for s, w in windows if not _is_prefill(s, w)]
        # A prompt gets a quarter of the budget at least, and never less than the block that a chunk must hold.
        share = max(budget // 4, min(s.block_length * s.copies for s, _ in prefill)) if prefill else 0
        left = budget - share
        pairs: list[tuple[Sequence, Row]] = []
        for sequence, window in denoise:
            cost = (window.end - window.start) * sequence.copies
            if cost <= left or (not pairs and not prefill and not window.divisible):
                pairs.append((sequence, sequence.row(window, window.end)))
                left -= cost
        left += share
        for sequence, window in prefill:
            end = chunk_end(window.start, window.end, sequence.context_block, left // sequence.copies)
            if end > window.start:
                pairs.append((sequence, sequence.row(window, end)))
                left -= (end - window.start) * sequence.copies
        return pairs

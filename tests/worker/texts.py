"""A text decoder for tests that only look at tokens."""

from collections.abc import Iterable


class NoText:
    """Decodes nothing, and never stops."""

    stopped = False

    def push(self, token_ids: Iterable[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""

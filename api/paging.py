"""Pages of a list, as OpenAI's clients walk through them."""

from collections.abc import Mapping, Sequence
from typing import Literal

from api.errors import ApiError

Order = Literal["asc", "desc"]


def page(
    items: Sequence[Mapping[str, object]], after: str | None, limit: int, order: Order = "desc"
) -> dict[str, object]:
    """Return up to `limit` items behind the one with id `after`; `items` are oldest first. Raises `ApiError`."""
    rows = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        places = [index for index, item in enumerate(rows) if item["id"] == after]
        if not places:
            raise ApiError(400, "invalid_value", "after names nothing in this list", "after")
        rows = rows[places[0] + 1 :]
    shown = rows[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(rows) > limit,
    }
